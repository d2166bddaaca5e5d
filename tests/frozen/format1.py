"""A result of format 2 in the shape of format 1, whose paths the stored numbers have."""

from __future__ import annotations

from typing import Any

Tree = dict[str, Any]
LISTED = ("k3", "k1", "mean_ratio", "ess_tokens", "abs_log_ratio", "prob_diff_mean", "f_2")
"""Numbers of every place; further ones were asked for, k3 too where others were."""
TOKENS = ("first", "positions", "token_ids", "log_ratios", "rollout_log_probs", "train_log_probs")
"""The tokens of a sequence, which are not frozen."""
KEPT = ("dump", "histograms", "lengths", "gates")


def as_format_1(found: Tree) -> Tree:
    """Return the numbers of a result under the names that they had in format 1."""
    if found.get("format") != 2:
        return found
    numbers = found["numbers"]
    result = {name: found[name] for name in KEPT if name in found}
    result["metrics"] = described(numbers["dump"])
    result["presets"] = {
        name: {"applied": True, **one, "metrics": described(numbers.get(f"preset/{name}", {}))}
        for name, one in found["presets"].items()
    }
    first = "candidate/"
    result["weights"] = {
        key.removeprefix(first): described(one) for key, one in numbers.items() if key.startswith(first)
    }
    result["by"] = {axis: located(axis, one, numbers) for axis, one in found["axes"].items()}
    if curve := found.get("lengths"):
        result["lengths"] = curve | {
            "longest": number(curve["longest"]),
            "curve": list(map(at, rows(curve["curve"]))),
        }
    if swept := found.get("sweep"):
        result["sweep"] = swept | {"points": list(map(point, swept["points"]))}
        if window := swept["window"]:
            result["sweep"]["window"] = window | {"point": point(window["point"])}
    if compared := found.get("comparison"):
        differences = {name: described(one) for name, one in compared["differences"].items()}
        some = {name: subset(compared[name]) for name in ("all_tokens", "all_sequences")}
        drops = [
            one
            | {"examples": rows(one["examples"])}
            | {name: subset(one[name]) for name in ("tokens", "sequences")}
            for one in compared["drops"]
        ]
        result["comparison"] = compared | {"differences": differences, "drops": drops} | some
    if against := found.get("against"):
        fields = ("a", "b", "difference", "ratio")
        contrasts = [
            one | {name: number(one[name]) for name in fields if one[name] is not None}
            for one in rows(against["contrasts"])
        ]
        whole = as_format_1(against["b"])
        b = {name: whole[name] for name in ("dump", "metrics", "presets", "by", "histograms")}
        result["against"] = against | {"b": b, "contrasts": contrasts}
    result["worst"] = {name: list(map(worst, rows(table))) for name, table in found["worst"].items()}
    result["worst"]["typical"] = next(iter(result["worst"]["typical"]), None)
    result["charts"] = drawn(found["charts"])
    return result


def rows(table: Tree) -> list[Tree]:
    """Return the rows of a table of columns."""
    return [dict(zip(table, cells, strict=True)) for cells in zip(*table.values(), strict=True)]


def worst(row: Tree) -> Tree:
    """Return a sequence without its tokens, or a token."""
    return {name: x for name, x in row.items() if name not in TOKENS}


def number(parts: list[Any] | None) -> Tree | None:
    """Return a number by the names of its parts."""
    if parts is None:
        return None
    value, low, high, _, log10, clamped = [*parts, *[None] * (6 - len(parts))]
    interval = None if low is None else [low, high]
    return {"value": value, "interval": interval, "log10": log10, "clamped": clamped}


def described(numbers: Tree) -> Tree:
    return {name: number(parts) for name, parts in numbers.items()}


def located(axis: str, found: Tree, numbers: Tree) -> Tree:
    """Return an axis as a list of places."""
    columns = ("places", "order", "tokens", "sequences")
    places = []
    for key, order, tokens, sequences in zip(*(found[name] for name in columns), strict=True):
        where = f"@{axis}/{key}"
        own = described(numbers[f"dump{where}"])
        asked = {name: one for name, one in own.items() if name not in LISTED}
        for subject, one in numbers.items():
            if subject.startswith("preset/") and subject.endswith(where):
                preset = subject.removeprefix("preset/").removesuffix(where)
                asked |= {f"{preset}.{name}": x for name, x in described(one).items()}
        metrics = {name: own[name] for name in LISTED}
        asked |= {"k3": own["k3"]} if asked else {}
        row = {"key": key, "order": order, "tokens": tokens, "sequences": sequences}
        places.append(row | {"metrics": metrics, "asked": asked})
    return {"places": places, "numeric": found["numeric"], "left_out": found["left_out"]}


def at(one: Tree) -> Tree:
    return one | {"ess_sequences": number(one["ess_sequences"]), "khat": number(one["khat"])}


def point(one: Tree) -> Tree:
    return {name: x for name, x in one.items() if name != "numbers"} | {"metrics": described(one["numbers"])}


def subset(one: Tree | None) -> Tree | None:
    return one and {"count": one["count"], **described(one["numbers"])}


def drawn(charts: Tree) -> Tree:
    """Return the charts."""
    tails = {name: one | {"khat": number(one["khat"])} for name, one in charts["tails"].items()}
    lag = charts["lag"] and charts["lag"] | {
        name: number(charts["lag"][name]) for name in ("in_sync", "start", "end")
    }
    listed: Tree = {name: rows(charts[name]) for name in ("bands", "crossings", "ranges")}
    if types := charts["token_types"]:
        listed["token_types"] = types | {"worst": rows(types["worst"])}
    return charts | {"gap_shares": described(charts["gap_shares"]), "tails": tails, "lag": lag} | listed

"""Learn what each piece of evidence weighs where a dump cannot decide, and how often probabilities are right.

    python benchmarks/doctor/learn.py --make ARCHITECTURE … [--cache DIR] [--examples N]
    python benchmarks/doctor/learn.py --write

--make trains the small model of each architecture (hub.py), composes dumps of known cause from what its
engines sample, with and without policy lag, advantages and metadata, and keeps in evidence.json what the
diagnosis says of each, and which evidence holds where it cannot decide. --write learns the weights
(multinomial logistic regression with a ridge; evidence for a cause never counts against it) and writes them
to offpol_diag/data/candidates.toml, and docs/calibration.md: each architecture is judged by the weights that
the others teach, and `HELD_BACK` by those of all others.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from offpol_diag.diagnosis import candidates
from offpol_diag.diagnosis.candidates import CANDIDATES

HERE = Path(__file__).parent
EVIDENCE, CALIBRATION = HERE / "evidence.json", HERE / "calibration.json"
WEIGHTS = Path(candidates.__file__).parents[1] / "data" / "candidates.toml"
HELD_BACK = "gpt-neox"
"""The architecture that teaches nothing, in the weights that ship either."""
RIDGE = 0.05
"""Penalty on the square of each weight, beside the mean log-loss times the number of examples."""
NONE = "none of them"
SEEDS = {
    "qwen3": ("words", 41),
    "llama": ("bytes", 42),
    "olmo2": ("words", 43),
    "phi": ("words", 44),
    "qwen3-moe": ("words", 45),
    "gpt-bigcode": ("bytes", 46),
    "gpt-oss": ("words", 47),
    "gemma3": ("words", 48),
    "mixtral": ("bytes", 49),
    "gpt-neox": ("words", 50),
}
"""Architecture → task and seed of its model."""


# ---------------------------------------------------------------- dumps of known cause


def engines(experts: bool) -> dict[str, tuple[list[str], Callable[[int], Any]]]:
    """Return kinds of engines: name → (ids of the causes that are right, step → what the engine holds)."""
    from benchmarks.doctor.runs import Held

    def at(behind: int, **how: Any) -> Callable[[int], Any]:
        return lambda step: Held(max(step - behind, 0), **how)

    stopped, differ = ["sync_stopped"], ["weights_differ"]
    rounding = ["numerics", "moe_outliers"] if experts else ["numerics"]
    kinds = {
        "bf16": (rounding, at(0)),
        "lag 1": (["stale"], at(1)),
        "lag 2": (["stale"], at(2)),
        "every third": (["stale"], lambda step: Held(step - step % 3)),
        "never": (stopped, lambda step: Held(0)),
        "until 5": (stopped, lambda step: Held(min(step, 5))),
        "fp8": (["quantized_rollout"], at(0, precision="fp8")),
        "int8": (["quantized_rollout"], at(0, precision="int8")),
        "int4": (["quantized_rollout"], at(0, precision="int4")),
        "half": (differ, at(0, kind="scaled", factor=0.5)),
        "twice": (differ, at(0, kind="scaled", factor=2.0)),
        "head": (differ, at(0, kind="head")),
        "shuffled": (differ, at(0, kind="shuffled", factor=0.3)),
    }
    return kinds | ({"experts": (differ, at(0, kind="experts"))} if experts else {})


def examples(architecture: str, many: int, cache: Path) -> Iterator[dict[str, Any]]:
    """Yield dumps of known cause, and what the diagnosis says of each."""
    from benchmarks.doctor.runs import STEPS, Held, Path_, Trajectory

    run = Trajectory(Path_(architecture, *SEEDS[architecture]), cache)
    kinds = engines(architecture in ("qwen3-moe", "gpt-oss", "mixtral"))
    for number in range(many):
        chance = random.Random(f"{architecture} {number}")
        name = list(kinds)[number % len(kinds)]
        right, held = kinds[name]
        length = chance.choice((1, 2, 4, 6, 9, STEPS))
        first = chance.randint(1, STEPS + 1 - length)
        if all(held(step) == Held(step) for step in range(first, first + length)):
            right = kinds["bf16"][0]  # at these steps the engine is in sync
        stale = right == ["stale"]
        how = {
            "kind": name,
            "steps": [first, first + length - 1],
            "lag": chance.random() < (0.3 if stale else 0.4),
            "advantages": chance.random() < 0.6,
            "metadata": {"rollout_dtype": "bfloat16"}
            if held(1).precision == "bf16" and chance.random() < 0.3
            else {},
            "rows": chance.choice((16, 32, 32)),
        }
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "dump.parquet"
            compose(path, run, held, stale, how)
            yield {"architecture": architecture, **how, "right": right, **answer(path)}


def compose(path: Path, run: Any, held: Callable[[int], Any], stale: bool, how: Mapping[str, Any]) -> None:
    """Write a dump of one kind of engine over some steps."""
    from benchmarks.doctor.rollouts import SAMPLES
    from benchmarks.doctor.runs import normalised
    from offpol_diag import DumpWriter

    with DumpWriter(path, provenance=how["metadata"]) as writer:
        for step in range(how["steps"][0], how["steps"][1] + 1):
            engine = held(step)
            seen = run.responses(engine, step, step, rows=32)
            seen = {name: values[: how["rows"]] for name, values in seen.items()}
            columns = {
                "rollout_log_probs": seen["q"],
                "old_log_probs": seen["p"],
                "response_mask": seen["mask"].astype(np.int8),
                "token_ids": seen["tokens"],
                "group_id": np.arange(len(seen["q"])) // SAMPLES + 1000 * step,
                "step": np.full(len(seen["q"]), step),
            }
            if how["advantages"]:
                columns |= {"rewards": seen["rewards"], "advantages": normalised(seen["rewards"])}
            if how["lag"]:
                columns["policy_lag"] = np.full(len(seen["q"]), step - engine.version if stale else 0)
            writer.write(**columns)


def answer(path: Path) -> dict[str, Any]:
    """Return verdict and causes of a dump; and candidate → evidence that holds, where it lists candidates."""
    from offpol_diag.analyze import analyze

    kept: dict[str, list[str]] = {}
    usual = candidates.fitting

    def keeping(seen: Any) -> Any:
        kept.update((one.id, candidates.evidence(one, seen)) for one in candidates.able(seen))
        return usual(seen)

    candidates.fitting = keeping
    try:
        found = analyze(str(path), presets=[]).diagnosis
    finally:
        candidates.fitting = usual
    assert found is not None
    return {"verdict": found.verdict, "causes": [one.id for one in found.causes], "fits": kept}


# ---------------------------------------------------------------- learning


Weights = dict[str, dict[str, float]]


def learned(known: Sequence[Mapping[str, Any]]) -> Weights:
    """Return the weights that make the right causes likeliest; evidence for a cause has at least 0."""
    from scipy.optimize import minimize

    names = [(one.id, says) for one in CANDIDATES for says in ("prior", *_points(one))]
    bounds = [_bounds(one, says) for one in CANDIDATES for says in ("prior", *_points(one))]
    place = {name: at for at, name in enumerate(names)}
    rows = []
    for one in known:
        inside = np.zeros((len(one["fits"]) + 1, len(names)))
        for at, (cause, holds) in enumerate(one["fits"].items(), 1):
            inside[at, [place[cause, says] for says in ("prior", *holds)]] = 1
        right = np.array(
            [not set(one["right"]) & set(one["fits"]), *(cause in one["right"] for cause in one["fits"])]
        )
        rows.append((inside, right))

    def loss(weights: Any) -> tuple[float, Any]:
        total, slope = RIDGE * weights @ weights, 2 * RIDGE * weights
        for inside, right in rows:
            odds = inside @ weights
            likely = np.exp(odds - odds.max())
            likely /= likely.sum()
            among = likely * right / (likely @ right)
            total -= np.log(likely @ right)
            slope = slope + (likely - among) @ inside
        return total, slope

    best = minimize(loss, np.zeros(len(names)), jac=True, bounds=bounds, method="L-BFGS-B").x
    weights: Weights = {one.id: {} for one in CANDIDATES}
    for (cause, says), value in zip(names, best, strict=True):
        weights[cause][says] = round(float(value), 2) + 0.0
    return weights


def _points(one: Any) -> list[str]:
    return [says.__name__ for says in (*one.speaks_for, *one.speaks_against)]


def _bounds(one: Any, says: str) -> tuple[float | None, float | None]:
    if says == "prior":
        return None, None
    return (0.0, None) if says in {each.__name__ for each in one.speaks_for} else (None, 0.0)


def probabilities(one: Mapping[str, Any], weights: Weights) -> dict[str, float]:
    """Return the probability of each candidate of an example, and of none of them."""
    odds = {NONE: 0.0} | {
        cause: weights[cause]["prior"] + sum(weights[cause][says] for says in holds)
        for cause, holds in one["fits"].items()
    }
    most = max(odds.values())
    total = sum(np.exp(value - most) for value in odds.values())
    return {cause: float(np.exp(value - most) / total) for cause, value in odds.items()}


# ---------------------------------------------------------------- how often they are right


def judged(known: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each example's probabilities by weights that its architecture did not teach."""
    result = []
    for architecture in dict.fromkeys(one["architecture"] for one in known):
        others = [one for one in known if one["architecture"] not in (architecture, HELD_BACK)]
        weights = learned(others)
        for one in known:
            if one["architecture"] == architecture:
                result.append(
                    {"architecture": architecture, "right": one["right"], "kind": one["kind"]}
                    | {"likely": probabilities(one, weights)}
                )
    return result


def calibration(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return by fifths of the stated probability: how many, its mean, the share that is right."""
    pairs = [
        (value, cause in one["right"] or (cause == NONE and not set(one["right"]) & set(one["likely"])))
        for one in answers
        for cause, value in one["likely"].items()
    ]
    table = []
    for fifth in range(5):
        inside = [(value, right) for value, right in pairs if min(int(value * 5), 4) == fifth]
        if inside:
            stated, right = np.mean(inside, axis=0)
            table.append(
                {"from": fifth / 5, "many": len(inside), "stated": float(stated), "right": float(right)}
            )
    return table


def first_right(answers: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of examples whose likeliest candidate is right."""
    return float(np.mean([max(one["likely"], key=one["likely"].get) in one["right"] for one in answers]))


def main() -> None:
    """Make examples, or learn from them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--make", nargs="+", default=[], metavar="ARCHITECTURE")
    parser.add_argument("--cache", type=Path, default=HERE / ".cache")
    parser.add_argument("--examples", type=int, default=84)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    known = json.loads(EVIDENCE.read_text()) if EVIDENCE.exists() else []
    for architecture in given.make:
        import torch

        torch.set_num_threads(1)
        made = list(examples(architecture, given.examples, given.cache))
        known = [one for one in known if one["architecture"] != architecture] + made
        EVIDENCE.write_text("[\n" + ",\n".join(map(json.dumps, known)) + "\n]\n")
    open_ = [one for one in known if one["fits"]]
    for one in known:
        if one["causes"] and not {*one["causes"]} & {*one["right"], "stale"}:
            print(
                "named",
                one["causes"],
                {key: one[key] for key in ("architecture", "kind", "steps", "lag", "rows")},
            )
    answers = judged(open_)
    for name in [*dict.fromkeys(one["architecture"] for one in answers), ""]:
        some = [one for one in answers if name in ("", one["architecture"])]
        print(name or "all", len(some), f"first right {first_right(some):.2f}")
    for row in calibration(answers):
        print({key: round(value, 3) for key, value in row.items()})
    if given.write:
        weights = learned([one for one in open_ if one["architecture"] != HELD_BACK])
        lines = [HEAD]
        for cause, each in weights.items():
            lines += [f"[{cause}]", *(f"{says} = {value:g}" for says, value in each.items()), ""]
        WEIGHTS.write_text("\n".join(lines).rstrip() + "\n")


HEAD = """\
# What each candidate weighs, in log-odds against a cause that is none of them, and what each piece of
# evidence adds where it holds. Learned by `python benchmarks/doctor/learn.py --write`.
"""

if __name__ == "__main__":
    main()

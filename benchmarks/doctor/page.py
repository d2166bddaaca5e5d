"""Store diagnosed dumps, and write docs/doctor.md from them alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.doctor.faults import HONEST
from offpol_diag.diagnosis.causes import CAUSES

Row = dict[str, Any]
HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
DOCS = HERE.parents[1] / "docs" / "doctor.md"
ALWAYS = ("numerics", "moe_outliers", "low_precision_storage")
"""Causes without a size above the numerics: they are the numerics, or are counted exactly."""
ABOVE, TOKENS, SEQUENCES, ENOUGH = 3.0, 20, 8, 64
TITLES = {"final": "Final dumps", "second": "Second dumps", "development": "Development dumps"}
SIZES = ((16, 32), (32, 64), (64, 128), (128, 256), (256, 512), (512, 3001))
CHANGES = ((0, 1), (1, 3), (3, 10), (10, 100), (100, 1e9))
SHARES = ((0, 20), (20, 100), (100, 1000), (1000, 1e9))


def keep(split: str, rows: Sequence[Row]) -> None:
    """Replace the stored rows of one split."""
    kept = results() | {split: rows}
    lines = ",\n".join(
        f'"{name}": [\n' + ",\n".join(json.dumps(row, ensure_ascii=False) for row in some) + "\n]"
        for name, some in kept.items()
    )
    RESULTS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def results() -> dict[str, list[Row]]:
    """Load the stored rows, by split."""
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}


def write() -> None:
    """Write docs/doctor.md."""
    DOCS.write_text(text(results()), encoding="utf-8")


def text(kept: dict[str, list[Row]]) -> str:
    """Render docs/doctor.md."""
    return _ENVIRONMENT.get_template("page.md.j2").render(kept=kept, tables=tables, titles=TITLES)


def tables(rows: Sequence[Row]) -> str:
    """Render every table of one split."""
    return _ENVIRONMENT.get_template("tables.md.j2").render(
        single=[row for row in rows if not pair(row)],
        pairs=[row for row in rows if pair(row)],
        bugs=[row for row in rows if not honest(row) and not pair(row)],
        honest=[row for row in rows if honest(row)],
        hosts=[row for row in rows if row["where"]],
        alarms=[row for row in rows if honest(row) and row["verdict"] == "bug"],
    )


def pair(row: Row) -> bool:
    """Return whether there is more than one cause."""
    return len(row["causes"]) > 1


def honest(row: Row) -> bool:
    """Return whether nothing is wrong with the logged values."""
    return all(cause in HONEST for cause in row["causes"])


def said(row: Row) -> str:
    """Return the cause named first, or the verdict where none was."""
    return str(row["named"][0]) if row["named"] else str(row["verdict"])


def first(row: Row) -> bool:
    """Return whether a true cause was named first; for numerics, a verdict of healthy counts too."""
    right = {*row["causes"], *row["also"]}
    return said(row) in right or ("numerics" in right and said(row) == "healthy")


def among(row: Row) -> bool:
    """Return whether all true causes were named, in any order; for a single one, an equivalent counts too."""
    named = {*row["named"]}
    return {*row["causes"]} <= named or (not pair(row) and (first(row) or bool({*row["also"]} & named)))


def judged(row: Row) -> bool:
    """Return whether the verdict is a right one, or that several causes fit, a true one among them."""
    return row["verdict"] in row["verdicts"] or considered(row)


def considered(row: Row) -> bool:
    """Return whether no cause was named, and a true one is among the candidates."""
    return bool({*row["causes"], *row["also"]} & {*row.get("candidates", ())})


def likeliest(row: Row) -> bool:
    """Return whether the first candidate is a true cause."""
    return bool({*row["causes"], *row["also"]} & {*row.get("candidates", ())[:1]})


def misled(row: Row) -> bool:
    """Return whether a wrong cause was named first, with a fix."""
    named = CAUSES.get(row["named"][0]) if row["named"] else None  # of a run before a cause was renamed: none
    return named is not None and not first(row) and bool(named.fix)


def above(row: Row) -> bool:
    """Return whether the fault is larger than the mismatch beside it, in enough tokens and sequences."""
    if row["causes"][0] in ALWAYS:
        return True
    enough = row["off_tokens"] >= TOKENS and row["off_sequences"] >= SEQUENCES
    return bool(enough and row["change"] >= ABOVE * row["noise"])


def placed(row: Row) -> bool:
    """Return whether the faulty host is named."""
    return any(row["where"] in place for place in row["places"])


def undone(rows: Iterable[Row]) -> list[Row]:
    """Select bugs named first that have a number after the fix."""
    return [row for row in rows if first(row) and row["k3"] is not None and row["after"] is not None]


def near(row: Row) -> bool:
    """Return whether K3 after the fix is within a factor of 2 of K3 without the fault, or within 1e-6."""
    return row["k3"] / 2 - 1e-6 <= row["after"] <= 2 * row["k3"] + 1e-6


def aimed(rows: Iterable[Row]) -> list[Row]:
    """Select dumps of 64 sequences or more with a fault above the numerics."""
    return [row for row in rows if row["sequences"] >= ENOUGH and above(row)]


def share(rows: Sequence[Row], right: Callable[[Row], bool]) -> str:
    """Format a share: 12 / 13 (92%)."""
    many = sum(map(right, rows))
    return f"{many} / {len(rows)} ({100 * many / len(rows):.0f}%)" if rows else "–"


def by_cause(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Group dumps by true cause, honest ones last."""
    causes = dict.fromkeys(row["causes"][0] for row in sorted(rows, key=honest))
    return [(cause, [row for row in rows if row["causes"][0] == cause]) for cause in causes]


def confused(rows: Sequence[Row]) -> str:
    """Format the causes named first, most often first."""
    return ", ".join(f"{name} {many}" for name, many in Counter(map(said, rows)).most_common())


def between(rows: Sequence[Row], ends: tuple[float, float], what: str) -> list[Row]:
    """Select dumps by sequences, tokens off, or change over noise; the upper end is excluded."""
    low, high = ends
    if what == "ratio":
        return [row for row in rows if low <= row["change"] / max(row["noise"], 1e-9) < high]
    return [row for row in rows if low <= row[what] < high]


def seconds(rows: Sequence[Row], at: float) -> str:
    """Return a quantile of the time."""
    ordered = sorted(row["seconds"] for row in rows)
    return f"{ordered[min(len(ordered) - 1, int(at * len(ordered)))]:.2g} s" if ordered else "–"


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.globals |= {
    **{one.__name__: one for one in (said, first, among, judged, placed, near, aimed, undone, share)},
    **{one.__name__: one for one in (considered, likeliest, misled)},
    **{one.__name__: one for one in (by_cause, confused, between, seconds)},
    "sizes": SIZES,
    "changes": CHANGES,
    "off": SHARES,
}

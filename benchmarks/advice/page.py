"""Store the results of the advice benchmark, and write docs/advice.md from them alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from benchmarks.advice.judge import BATCHES, METHODS, TOKEN
from benchmarks.advice.worlds import Array

Row = dict[str, Any]
HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
DOCS = HERE.parents[1] / "docs" / "advice.md"
RECOMMENDED, REFERENCE = "recommended", "always token TIS 2"
HINDSIGHT = "best token method, in hindsight"
BUG = "fix the bug first"
NOISE = ("numerics", "heavy tails", "experts", "corrupted")
"""Kinds whose mismatch is drawn anew at every token."""
SMALL = 0.02
"""Largest k3 of an ordinary mismatch."""
WORST = 16
LENGTHS = {"up to 16": 16, "17–128": 128, "129–512": 512, "513–1,000": 1000}
"""Classes of the longest response → the longest of the class."""
KEPT = ("name", "family", "kind", "longest", "reward", "k3", "mean_length", "alignment", "best")
KEPT_OF_RULES = ("chosen", "decision", "stated", "healthy", "worse", "lacking")


def keep(split: str, rows: list[Row]) -> None:
    """Replace the stored rows of one split."""
    kept = results() | {split: [{key: _rounded(row[key]) for key in KEPT + KEPT_OF_RULES} for row in rows]}
    RESULTS.write_text(json.dumps(kept, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def results() -> dict[str, list[Row]]:
    """Load the stored results, by split."""
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}


def write() -> None:
    """Write docs/advice.md."""
    DOCS.write_text(text(results()), encoding="utf-8")


def text(kept: dict[str, list[Row]]) -> str:
    """Render docs/advice.md."""
    return _ENVIRONMENT.get_template("page.md.j2").render(splits=kept)


def tables(rows: list[Row]) -> str:
    """Render the tables of one split for a terminal."""
    macros = _ENVIRONMENT.get_template("tables.md.j2").module
    return str(macros.tables(rows))  # type: ignore[attr-defined]


# ---------------------------------------------------------------- numbers


def policies(rows: list[Row]) -> list[str]:
    """List the policies that were measured, and hindsight."""
    return [*rows[0]["chosen"], HINDSIGHT]


def scores(row: Row, policy: str) -> Array:
    """Return shares of the best alignment in hindsight, by dump and batch size, [dumps, batches]; 1 at most.

    Dumps that are said to have a bug are left out, under every policy: there no method is named.
    """
    judged = np.array([said != BUG for said in row["decision"]])
    found = []
    for batch in map(str, BATCHES):
        reached, best = row["alignment"][batch], row["best"][batch][1]
        token = max(TOKEN, key=reached.__getitem__)
        names = [token] * len(row["decision"]) if policy == HINDSIGHT else row["chosen"][policy]
        found.append([min(reached[name] / best, 1.0) for name in names])
    return np.array(found).T[judged]


def reached(rows: Iterable[Row], policy: str) -> str:
    """Format the mean / 5th percentile / minimum over regimes, dumps and batch sizes."""
    every = np.concatenate([np.zeros(0), *(scores(row, policy).ravel() for row in rows)])
    if not every.size:
        return "–"
    return f"{every.mean():.3f} / {np.percentile(every, 5):.3f} / {every.min():.2f}"


def ahead(rows: Iterable[Row], policy: str) -> str:
    """Format the mean difference to always token TIS 2 with a 95% interval, by a bootstrap over regimes."""
    both = [scores(row, policy) - scores(row, REFERENCE) for row in rows]
    apart = np.array([one.mean() for one in both if one.size])
    if not len(apart):
        return "–"
    drawn = apart[np.random.default_rng(0).integers(0, len(apart), (4000, len(apart)))].mean(1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return f"{apart.mean():+.4f} ({low:+.4f} to {high:+.4f})"


def share(values: Iterable[bool]) -> str:
    """Format the share of true flags, with their number."""
    found = [*values]
    return f"{np.mean(found):.0%} of {len(found)}" if found else "–"


def small(rows: Iterable[Row]) -> list[Row]:
    """Select the rows with an ordinary mismatch."""
    return [row for row in rows if row["k3"] <= SMALL]


def by_length(rows: list[Row]) -> dict[str, list[Row]]:
    """Group rows by class of the longest response."""
    first, found = 0, {}
    for name, last in LENGTHS.items():
        found[name] = [row for row in rows if first < row["longest"] <= last]
        first = last
    return {name: some for name, some in found.items() if some}


def by_floor(rows: list[Row]) -> dict[str, list[Row]]:
    """Divide the dumps of each row by whether K3 is below the noise floor."""
    return {"below": _dumps(rows, lambda row: row["healthy"]), "above": _dumps(rows, _above_floor)}


def _above_floor(row: Row) -> list[bool]:
    return [not below for below in row["healthy"]]


def _dumps(rows: Iterable[Row], which: Callable[[Row], list[bool]]) -> list[Row]:
    """Reduce each row to the dumps that `which` flags; rows without any are left out."""
    found = []
    for row in rows:
        at = [i for i, flag in enumerate(which(row)) if flag]
        chosen = {policy: [names[i] for i in at] for policy, names in row["chosen"].items()}
        found.append(row | {"chosen": chosen, "decision": [row["decision"][i] for i in at]})
    return [row for row in found if row["decision"]]


def outdone(rows: Iterable[Row]) -> str:
    """Format in how many dumps no correction is significantly worse than token TIS, and its alignment there.

    The alignment at 256 sequences is a share of that of token TIS.
    """
    judged = [
        (row, worse)
        for row in rows
        for worse, said in zip(row["worse"], row["decision"], strict=True)
        if said != BUG
    ]
    shares = [
        row["alignment"]["256"]["none"] / row["alignment"]["256"]["token_tis_2.0"]
        for row, worse in judged
        if worse
    ]
    return f"{len(shares)} of {len(judged)}" + (f"; {np.mean(shares):.2f}" if shares else "")


def stable(rows: Iterable[Row]) -> str:
    """Format the share of regimes whose dumps all get the same decision."""
    return share(len(set(row["decision"])) == 1 for row in rows)


def bugs(rows: Iterable[Row]) -> str:
    """Format the share of dumps called a bug; all but the kinds that are logged wrongly are honest."""
    return share(said == BUG for row in rows for said in row["decision"])


def covered(rows: Iterable[Row]) -> str:
    """Format the share of stated systematic errors that reach within 1% of 0, where the mismatch is noise.

    The share of min(r, 2) is not exactly 0 there: what the bound cuts off depends on the token a little.
    """
    stated = (one for row in rows if row["kind"] in NOISE for one in row["stated"] if one)
    return share(low <= 0.01 and high >= -0.01 for low, high in stated)


def opposite(rows: Iterable[Row], column: str) -> str:
    """Format the share of dumps whose advice turns from none to a correction, or back, without a column."""
    both = ((row["lacking"].get(column), row["chosen"][RECOMMENDED][0]) for row in rows)
    return share((one == "none") != (other == "none") for one, other in both if one is not None)


def worst(rows: Iterable[Row]) -> list[Row]:
    """Select the regimes in which the recommendation loses most."""
    judged = [row for row in rows if scores(row, RECOMMENDED).size]
    return sorted(judged, key=lambda row: float(scores(row, RECOMMENDED).min()))[:WORST]


def _template_functions() -> dict[str, Callable[..., object]]:
    of_rows = (reached, ahead, small, by_length, by_floor, outdone, stable, bugs, covered, opposite, worst)
    return {one.__name__: one for one in (policies, scores, *of_rows)}


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.globals |= _template_functions()
_ENVIRONMENT.globals |= {"batches": BATCHES, "methods": len(METHODS), "RECOMMENDED": RECOMMENDED}

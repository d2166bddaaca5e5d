"""Write `docs/coverage.md` from the stored results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from covering.truth import METRICS
from covering.worlds import WORLDS, World

Cells = Mapping[str, Mapping[str, Any]]
GROUPS = (8, 32, 128, 1024)
AIM = (0.93, 0.97)
RARE = ("rare", "rare prompts")
"""Worlds whose rare events a dump may lack."""


def write(path: Path, results: Mapping[str, Any], alarms: Mapping[str, Any]) -> None:
    """Write docs/coverage.md."""
    path.write_text(page(results, alarms), encoding="utf-8")


def page(results: Mapping[str, Any], alarms: Mapping[str, Any]) -> str:
    """Render docs/coverage.md."""
    usual = [world for world in WORLDS if world.name not in RARE]
    rare = [world for world in WORLDS if world.name in RARE]
    parts = [
        _HEAD,
        _table(("world", "what it is"), [(world.name, world.text) for world in WORLDS]),
        "## In short",
        _SHORT,
        _table(
            _SUMMARY, [row for many in GROUPS for world in usual for row in _summary(results, world, many)]
        ),
    ]
    for many in (1024, 128, 32, 8):
        parts += [f"## {many:,} prompts", _note(results, usual, many), _details(results, usual, many)]
    parts += [
        _NOT_SEEN,
        *(_details(results, rare, many) for many in (128, 1024)),
        _ALARMS,
        *_alarms(alarms),
        _AGAIN,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


_HEAD = """<!-- Made by `python benchmarks/covering/run.py`; do not edit. -->

# How often the intervals hold the truth

Dumps are drawn from policies whose true numbers are known, the product reads them, and its own 95%
intervals are held against the truth. A true number is a closed form given the length and the spread of a
response, averaged over 1.6 million responses; its standard error is at most a few hundredths of an
interval's half width. There are eight responses to a prompt; prompts and responses differ in length and
in the size of the mismatch, so that tokens are dependent twice over. What is resampled is the prompt.

How an interval is made stands in `offpol_diag/engine/formula.py`: the number ± t · √(G/(G − 1))
standard deviations of its bootstrap replicates, on the scale on which its range has no end (log for what
is positive, log-odds for a fraction), G being the number of groups in effect. Where no event was seen in
n responses, the upper end of its share is 3.7/n: a response that goes wrong may do so throughout.

`tis` is token TIS at 2.0, `mask` rejects tokens outside 0.5–2.0, `geo` rejects responses whose geometric
mean ratio is more than 1% off. `mask − geo` is the difference of the two presets as `compare` prints
it."""

_SUMMARY = ("prompts", "world", "dumps", "numbers", "median coverage", "within 93–97%*", "lowest")
_SHORT = """Over all numbers of a world that have a true value. *: no further outside 93–97% than twice
the binomial error of so many dumps. Dumps in which the product called the number unreliable (k̂ of the
tail) are left out of its coverage and counted below (u).

What falls short: an effective sample size near 1 that a handful of tokens decides (light, shifted: 1 −
ESS is a mean of squares with a heavy tail, of which a dump without the largest knows too little), and
small numbers of prompts where a few long responses hold most of the mismatch (lengths). There an interval
tends to lie on the side that looks healthier. A first version of lengths, with half as much spread again
between prompts, was covered at about 90 to 92% at 128 prompts; these intervals were chosen on these
worlds. Where a preset rejected nothing at all, its ESS of 1 stands without an interval
(`mask.ess_sequences`, few prompts); its rejected share has one."""

_NOT_SEEN = """## What was not seen

One token in 20,000 is wrong, or one prompt in 200. A dump in which the event did not happen cannot know
how large its effect on a mean is, and no interval made of that dump can: k2, k3, χ² and ESS are then
intervals of what was there. Shares of events (`f_2`, `tokens_rejected`) hold up, by their upper end for no
event."""

_ALARMS = """## The identities that decide "fix the bug first"

E[r] = 1 over all tokens and at every position, and k1 ≥ 0. The bound is 4 standard errors where groups
are many (6 in 100,000 normal means pass it), more where they are few (Student's t), and more at
positions, for their number (Bonferroni). The standard error is that of the interval's end towards the
identity. Every dump is judged here, also those whose tail the product would call too heavy to test."""

_AGAIN = """## Again

    python benchmarks/covering/run.py                  # all: about two minutes on two cores
    python benchmarks/covering/run.py --groups 128     # one number of prompts
    python benchmarks/covering/run.py --alarms 1500    # the identities

Each dump has a seed of its own, so the counts come out the same on any machine."""


def _cell(results: Mapping[str, Any], world: World, many: int) -> Cells:
    found: Cells = results.get(f"{world.name}|{many}", {})
    return found


def judged(one: Mapping[str, Any]) -> int:
    """Count intervals held against the truth."""
    return int(one["dumps"] - one["unreliable"] - one["none"])


def coverage(one: Mapping[str, Any]) -> float:
    """Return the share that holds it; NaN of fewer than half the dumps, which would be a biased selection."""
    return float(one["covered"] / judged(one)) if judged(one) >= one["dumps"] / 2 else math.nan


def error(one: Mapping[str, Any]) -> float:
    """Return the binomial standard error of a coverage of 95%."""
    return math.sqrt(0.05 * 0.95 / max(judged(one), 1))


def _summary(results: Mapping[str, Any], world: World, many: int) -> list[tuple[str, ...]]:
    cells = {name: one for name, one in _cell(results, world, many).items() if not math.isnan(coverage(one))}
    if not cells:
        return []
    shares = {name: coverage(one) for name, one in cells.items()}
    good = sum(
        AIM[0] - 2 * error(one) <= shares[name] <= AIM[1] + 2 * error(one) for name, one in cells.items()
    )
    lowest = min(shares, key=lambda name: shares[name])
    return [
        (
            f"{many:,}",
            world.name,
            str(max(one["dumps"] for one in cells.values())),
            str(len(cells)),
            f"{statistics.median(shares.values()):.1%}",
            f"{good} of {len(cells)}",
            f"{shares[lowest]:.1%} ({lowest})",
        )
    ]


def _note(results: Mapping[str, Any], worlds: Sequence[World], many: int) -> str:
    dumps = {one["dumps"] for world in worlds for one in _cell(results, world, many).values()}
    if not dumps:
        return "Not measured yet."
    spread = math.sqrt(0.05 * 0.95 / max(dumps))
    return (
        f"Coverage in % (binomial error {100 * spread:.1f}); in brackets the median width of an interval "
        "over the true number.\nu: share of dumps whose number was called unreliable. –: no true value, or "
        "fewer than half of the dumps left."
    )


def _details(results: Mapping[str, Any], worlds: Sequence[World], many: int) -> str:
    cells = [_cell(results, world, many) for world in worlds]
    if not any(cells):
        return ""
    rows = [(f"`{name}`", *(_said(cell.get(name)) for cell in cells)) for name in METRICS]
    return _table((f"{many:,} prompts", *(world.name for world in worlds)), rows)


def _said(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return "–"
    doubted = f" u {one['unreliable'] / one['dumps']:.0%}" if one["unreliable"] else ""
    share = coverage(one)
    return f"–{doubted}" if math.isnan(share) else f"{100 * share:.1f} ({one['width']:.2g}){doubted}"


def _alarms(alarms: Mapping[str, Any]) -> list[str]:
    if not alarms:
        return ["Not measured yet."]
    many = alarms["dumps"]
    honest = [
        (*name.split("|"), f"{found} of {many['honest']:,}") for name, found in alarms["honest"].items()
    ]
    faulty = [
        (*name.split("|"), f"{found} of {many['faulty']:,}") for name, found in alarms["faulty"].items()
    ]
    total, dumps = sum(alarms["honest"].values()), many["honest"] * len(honest)
    return [
        _table(("honest world", "prompts", "called a bug"), honest),
        f"Together {total} of {dumps:,}, or {total / dumps * 1e4:.1f} in 10,000.",
        _table(("fault, in the light world", "prompts", "called a bug"), faulty),
    ]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

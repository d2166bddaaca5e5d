"""What a report says of the drifts, whatever the preset."""

from __future__ import annotations

import torch

from offpol_diag import loglattice
from offpol_diag.accumulators import Counts
from offpol_diag.metrics import gap, tails
from offpol_diag.metrics.formula import Formula, missing, plain
from offpol_diag.metrics.gap import DRIFTS, Drift
from offpol_diag.readout.reading import Readout, typed
from offpol_diag.summary import Histogram, Numbers


def metrics(out: Readout) -> Numbers:
    """The policy gap and the raw weights, for drift 1, drift 2 and the total."""
    found: Numbers = {}
    for drift in DRIFTS:
        known = drift in out.study.drifts
        found |= _gap(out, drift) if known else _unknown(drift, out.study.columns)
    return found


def _gap(out: Readout, drift: Drift) -> Numbers:
    found = {drift.prefix + row.name: out.reader.number(row, drift.prefix) for row in gap.ROWS}
    found[drift.prefix + gap.SURROGATE.name] = (
        out.reader.number(gap.SURROGATE, drift.prefix)
        if "advantages" in out.study.columns
        else missing(gap.SURROGATE, ["advantages"])
    )
    for name, source, pick, unit, over, text in gap.EXTREMES:
        found[drift.prefix + name] = plain(pick(*out.ranges[drift.prefix + source]), unit, over, text)
    high = {name: pair[1] for name, pair in out.ranges.items()}
    found |= tails.numbers(out.reader, out.tally.states, drift, high)
    if drift.denominator == "old":
        for name, text in gap.SECOND_DRIFT.items():
            key = drift.prefix + name
            found[key] = found[key].model_copy(update={"formula": text})
    return _cautioned(found, out, drift)


MEANS_OF_RATIOS = {
    "mean_ratio": tails.doubt,
    "chi2_token": tails.doubt,
    "k3": tails.caution,
    "tv": tails.caution,
    "mult_prob_error": tails.caution,
}
"""Means over tokens of something that grows like r, and what a heavy tail makes of them."""


def _cautioned(found: Numbers, out: Readout, drift: Drift) -> Numbers:
    """Say where the tail of r cannot be trusted, and how often the overflow guard acted."""
    khat = found[f"{drift.prefix}khat_tokens"]
    overflow = float(out.reader.column("overflow", drift.prefix)[0]) / float(out.reader.sums["tokens"][0])
    for name, judge in MEANS_OF_RATIOS.items():
        number = judge(found[drift.prefix + name], khat)
        found[drift.prefix + name] = number.model_copy(update={"clamped": overflow})
    return found


def _unknown(drift: Drift, columns: frozenset[str]) -> Numbers:
    lacking = [column for column in drift.columns if column not in columns]
    rows: list[Formula] = [*gap.ROWS, gap.SURROGATE, gap.CHI2_SEQUENCE, tails.ESS_TOKENS, tails.ESS_SEQUENCES]
    return {drift.prefix + row.name: missing(row, lacking) for row in rows}


def histogram(out: Readout, drift: Drift, bins: int = 81) -> Histogram:
    """Count Δ in whole tokens, in bins that reach from the smallest Δ to the largest.

    Bins are about equally wide within the 0.01% and 99.99% quantiles, and grow by a quarter each beyond;
    their edges are edges of the lattice that Δ was counted on, so that no count is interpolated.
    """
    counts = typed(out.tally.states[f"{drift.prefix}bins.d"], Counts).counts.cpu()
    title, unit = f"log-ratio, {drift.title}", "nats"
    if not counts.any():
        return Histogram(title=title, unit=unit, edges=[0.0], counts=[])
    low, high = (float(end) for end in out.ranges[f"{drift.prefix}d"])
    reach = max(abs(loglattice.quantile(counts, q)) for q in (1e-4, 1 - 1e-4)) or 1e-6
    fine = loglattice.edges()
    occupied = torch.nonzero(counts).flatten()
    first, last = int(occupied[0]), int(occupied[-1]) + 1
    at = torch.searchsorted(fine, _edges(reach, max(-low, high, reach), bins)).unique()  # type: ignore[no-untyped-call]
    inner = at[(at > first) & (at < last)]
    below = torch.cat((torch.zeros(1, dtype=torch.float64), torch.cumsum(counts, 0)))
    cuts = torch.cat((torch.tensor([first]), inner, torch.tensor([last])))
    ends = [low, high] if low < high else fine[[first, last]].tolist()
    return Histogram(
        title=title,
        unit=unit,
        edges=[ends[0], *fine[inner].tolist(), ends[1]],
        counts=[round(count) for count in below[cuts].diff().tolist()],
    )


GROWTH = 1.25
"""How much wider each bin is than the one before it, beyond the equal ones."""


def _edges(reach: float, furthest: float, bins: int) -> torch.Tensor:
    """Edges to aim at, rising and symmetric: equal steps within ±reach, growing ones to ±furthest."""
    tails = [reach]
    while tails[-1] < furthest:
        tails.append(tails[-1] * GROWTH)
    beyond = torch.tensor(tails[1:], dtype=torch.float64)
    inner = torch.linspace(-reach, reach, bins + 1, dtype=torch.float64)
    return torch.cat((-beyond.flip(0), inner, beyond))

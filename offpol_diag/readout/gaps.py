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
    for name, source, pick, unit, over, text in gap.EXTREMES:
        found[drift.prefix + name] = plain(pick(*out.ranges[drift.prefix + source]), unit, over, text)
    high = {name: pair[1] for name, pair in out.ranges.items()}
    found |= tails.numbers(out.reader, out.tally.states, drift, high)
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
    rows: list[Formula] = [*gap.ROWS, gap.CHI2_SEQUENCE, tails.ESS_TOKENS, tails.ESS_SEQUENCES]
    return {drift.prefix + row.name: missing(row, lacking) for row in rows}


def histogram(out: Readout, drift: Drift, bins: int = 81) -> Histogram:
    """Δ over equal bins that span its 0.01 % to 99.99 % quantiles; the outermost take what lies beyond."""
    counts = typed(out.tally.states[f"{drift.prefix}bins.d"], Counts).counts.cpu()
    reach = max(abs(loglattice.quantile(counts, q)) for q in (1e-4, 1 - 1e-4)) or 1e-6
    edges = torch.linspace(-reach, reach, bins + 1, dtype=torch.float64)
    fine = loglattice.edges()
    below = torch.cat((torch.zeros(1, dtype=torch.float64), torch.cumsum(counts, 0)))
    at = torch.searchsorted(fine, edges).clamp(1, len(fine) - 1)
    share = ((edges - fine[at - 1]) / (fine[at] - fine[at - 1])).clamp(0, 1)
    cumulative = below[at - 1] + share * (below[at] - below[at - 1])
    cumulative[0], cumulative[-1] = 0.0, below[-1]
    return Histogram(
        title=f"log-ratio, {drift.title}",
        unit="nats",
        edges=edges.tolist(),
        counts=cumulative.diff().clamp(min=0).tolist(),
    )

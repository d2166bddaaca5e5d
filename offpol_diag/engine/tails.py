"""Uncorrected importance ratios: effective sample size, Pareto k̂, largest share, distribution of Δ."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from offpol_diag.engine import gap, loglattice, pareto
from offpol_diag.engine.accumulators import Bins, Counts, Floor, LogSums, State, Tail
from offpol_diag.engine.formula import Formula, Lookup, Reader, describe, plain
from offpol_diag.engine.gap import CHI2_SEQUENCE, Drift
from offpol_diag.engine.ratios import OVERFLOW
from offpol_diag.engine.scene import Scene
from offpol_diag.engine.terms import Array, Pair, Terms, joined, seen
from offpol_diag.summary import Number, Numbers

QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
_LN10 = math.log(10)


class Tails:
    """Collect histograms of Δ and of k3, and the largest Δ, over tokens."""

    def __init__(self, scene: Scene, drift: Pair) -> None:
        device = scene.batch.rollout.device
        self.tables = torch.zeros(3, loglattice.CODES, dtype=torch.float64, device=device)
        self.floor = scene.floor(_tail(drift, "tokens")) or Floor()
        self.known, self.many, self.largest = self.floor.at, 0, list[Array]()

    def see(self, terms: Terms) -> None:
        """Add the next block."""
        self._count(terms)
        self.many += len(terms.delta)
        self.largest.append(self._large(terms))

    def _count(self, terms: Terms) -> None:
        codes = terms.block.room["codes"]
        delta, k3, ones = map(torch.as_tensor, (terms.delta, terms.k3, terms.block.ones))
        counts, k3_counts, k3_sums = self.tables
        counts.scatter_add_(0, loglattice.code(delta, codes), ones)
        at = loglattice.code(k3, codes)
        k3_counts.scatter_add_(0, at, ones)
        k3_sums.scatter_add_(0, at, k3)

    def _large(self, terms: Terms) -> Array:
        """Return values that may be among the largest; on a CPU a copy, since the arrays are reused."""
        delta = terms.delta
        if isinstance(delta, Tensor):
            return delta
        return delta[np.flatnonzero(delta >= self.known)] if self.known > -math.inf else delta.copy()

    @property
    def states(self) -> tuple[Counts, Bins, Tail]:
        """Histograms of Δ and of k3, and the tail of Δ."""
        counts, k3_counts, k3_sums = loglattice.folded(self.tables)
        largest = Tail.of(joined(self.largest), self.floor)
        return Counts(counts), Bins(k3_counts, k3_sums), replace(largest, n=self.many)


def _tail(drift: Pair, over: str) -> str:
    return f"{drift.prefix}tail.{over}"


def states(scene: Scene, drift: Drift) -> dict[str, State]:
    """Compute histograms of Δ and k3, tails over tokens and sequences, and Σw and Σw² of sequences."""
    found = seen(scene, drift, Tails)
    if not found.largest:
        return {}
    delta, k3, largest = found.states
    there, total = scene.batch.lengths > 0, gap.columns(scene, drift)[f"{drift.prefix}d"]
    sequences = _tail(drift, "sequences")
    return {
        f"{drift.prefix}bins.d": delta,
        f"{drift.prefix}bins.k3": k3,
        _tail(drift, "tokens"): largest,
        sequences: Tail.of(total[_filled(scene)], scene.floor(sequences)),
        f"{drift.prefix}log.sequences": LogSums.of(torch.where(there, total, -torch.inf), scene.draws),
    }


def _filled(scene: Scene) -> Tensor:
    """Return the indices of sequences with a token; read from a GPU only once."""
    return scene.once("filled", lambda: torch.nonzero(scene.batch.lengths > 0).flatten())


def _ess_tokens(get: Lookup) -> Tensor:
    n = get("tokens")
    return (n + get("r1")) ** 2 / (n * (n + get("r2")))


ESS_TOKENS = Formula("ess_tokens", "fraction", "tokens", "(Σr)² / (n Σr²), raw token ratios", _ess_tokens)
ESS_SEQUENCES = Formula(
    "ess_sequences",
    "fraction",
    "sequences",
    "(Σw)² / (n Σw²), w = e^{ΣΔ}, raw product ratios",
    lambda get: get("ess"),
)


def numbers(reader: Reader, state: dict[str, State], drift: Drift, high: dict[str, float]) -> Numbers:
    """Read the uncorrected-ratio metrics of one drift, with a note where the tail makes them unreliable."""
    khat_t = _khat(state, f"{drift.prefix}tail.tokens", "tokens", "r")
    khat_s = _khat(state, f"{drift.prefix}tail.sequences", "sequences", "e^{ΣΔ}")
    logs = state[f"{drift.prefix}log.sequences"]
    assert isinstance(logs, LogSums)
    found = {
        "ess_tokens": doubt(reader.number(ESS_TOKENS, drift.prefix), khat_t),
        "ess_sequences": doubt(_ess_sequences(reader, logs), khat_s),
        "chi2_sequence": doubt(chi2_sequence(reader, logs, drift), khat_s),
        "khat_tokens": khat_t,
        "khat_sequences": khat_s,
        "max_weight_share": _share(reader, drift, high),
        "max_weight_share_sequences": _share_sequences(logs, high[f"{drift.prefix}s"]),
        "k3_top1_share": _top_share(state[f"{drift.prefix}bins.k3"]),
    }
    return {drift.prefix + name: number for name, number in (found | _quantiles(state, drift)).items()}


def _khat(state: dict[str, State], key: str, over: str, weight: str) -> Number:
    tail = state[key]
    assert isinstance(tail, Tail)
    text = (
        f"generalised Pareto shape of the largest weights {weight}; unreliable above min(1 − 1/log10 n, 0.7)"
    )
    k = pareto.khat(tail)
    if k is None:
        unknown = "the tail is constant or too short to fit"
        return describe("", over, text).model_copy(update={"unknown": unknown})
    number = plain(k, "", over, text)
    good = pareto.limit(tail.n)
    if k > good:
        return number.model_copy(
            update={"note": f"above {good:.2f}: means of these weights cannot be trusted"}
        )
    return number


def doubt(number: Number, khat: Number) -> Number:
    """Note that a mean of weights is unreliable where their tail is too heavy."""
    if not khat.note:
        return number
    return number.model_copy(
        update={"note": f"unreliable: k̂ = {khat.value:.2f} is {khat.note.split(':')[0]}"}
    )


def caution(number: Number, khat: Number) -> Number:
    """Note that a few tokens dominate a mean, where the tail of the weights is too heavy."""
    if not khat.note:
        return number
    return number.model_copy(update={"note": f"a few tokens decide it: k̂ = {khat.value:.2f}"})


def _ess_sequences(reader: Reader, logs: LogSums) -> Number:
    return reader.wrap(ess_of_sequences(reader, logs), ESS_SEQUENCES)


def ess_of_sequences(reader: Reader, logs: LogSums) -> Tensor:
    """Compute (Σw)² / (n Σw²) of the dump and of each replicate, [1+B]."""
    values: Tensor = logs.once**2 / (reader.sums["sequences"].to(logs.once.device) * logs.twice)
    return values.cpu()


def chi2_sequence(reader: Reader, logs: LogSums, drift: Drift) -> Number:
    """Compute E[e^{2ΣΔ}] − 1: by expm1 where that does not overflow, else as a log10."""
    if float(logs.shift) <= OVERFLOW:
        return reader.number(CHI2_SEQUENCE, drift.prefix)
    log = torch.log(logs.twice.cpu()) + 2 * logs.shift.cpu() - torch.log(reader.sums["sequences"])
    log10 = float(log[0]) / _LN10
    number = describe(CHI2_SEQUENCE.unit, CHI2_SEQUENCE.over, CHI2_SEQUENCE.text)
    return number.model_copy(
        update={"log10": log10, "unknown": "overflows float64; see its log10"}
        if math.isfinite(log10)
        else {"unknown": "overflows float64, and so does its log10"}
    )


def _share(reader: Reader, drift: Drift, high: dict[str, float]) -> Number:
    total = float((reader.column("tokens") + reader.column("r1", drift.prefix))[0])
    share = math.exp(min(high[f"{drift.prefix}d"], OVERFLOW)) / total if total > 0 else math.nan
    return plain(share, "fraction", "tokens", "max r / Σr")


def _share_sequences(logs: LogSums, largest: float) -> Number:
    total = float(logs.once[0])
    share = math.exp(largest - float(logs.shift)) / total if total > 0 else math.nan
    return plain(share, "fraction", "sequences", "max w / Σw, w = e^{ΣΔ}")


def _top_share(bins: State) -> Number:
    """Compute the share of Σk3 in the 1% of tokens with the largest k3; linear within a bin."""
    assert isinstance(bins, Bins)
    counts, sums = bins.counts.cpu().flip(0), bins.sums.cpu().flip(0)
    want = math.ceil(0.01 * float(counts.sum()))
    before = torch.cumsum(counts, 0) - counts
    taken = ((want - before) / counts.clamp(min=1)).clamp(0, 1)
    total = float(sums.sum())
    share = float((sums * taken).sum()) / total if total > 0 else math.nan
    return plain(share, "fraction", "tokens", "Σk3 of the 1% of tokens with the largest k3, over Σk3")


def _quantiles(state: dict[str, State], drift: Drift) -> Numbers:
    bins = state[f"{drift.prefix}bins.d"]
    assert isinstance(bins, Counts)
    text = "quantile of Δ, from a histogram of relative bin width 1/32"
    return {
        f"log_ratio_p{q * 100:g}".replace(".", "_"): plain(
            loglattice.quantile(bins.counts.cpu(), q), "nats", "tokens", text
        )
        for q in QUANTILES
    }

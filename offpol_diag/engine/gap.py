"""The gap between two policies on the sampled tokens: K1, K2, K3, χ², perplexities, probability differences.

Sums are taken of quantities that vanish on-policy (expm1, not exp), so that nothing is lost to cancellation
when the drift is tiny.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from offpol_diag.core.formulas import LARGEST
from offpol_diag.core.gap import (
    BEYOND,
    CHI2_SEQUENCE,
    DIFFER,
    DRIFTS,
    EXTREMES,
    REWARD,
    ROWS,
    SECOND_DRIFT,
    SURROGATE,
    Drift,
)
from offpol_diag.engine import segments
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.segments import Array
from offpol_diag.engine.terms import Terms, collected
from offpol_diag.presets import Policy


class Gap:
    """Collect sums over every sequence, and extremes over all tokens."""

    def __init__(self, context: BatchContext, drift: Drift) -> None:
        self.parts: list[dict[str, Array]] = []
        self.spans: dict[str, list[tuple[float, float]]] = {"d": [], "pd": []}

    def see(self, terms: Terms) -> None:
        """Add the next block."""
        self.parts.append(_token_sums(terms) | _probabilities(terms) | _surrogate(terms))
        for name, span in {"d": terms.span, "pd": segments.extremes(terms.pd)}.items():
            self.spans[name].append(span)

    @property
    def columns(self) -> dict[str, Array]:
        """Sums by name, [S] each; none when a policy is missing. Σ(r² − 1) is Σ(r − 1)² + 2Σ(r − 1)."""
        if not self.parts:
            return {}
        result = {name: np.concatenate([part[name] for part in self.parts]) for name in self.parts[0]}
        return result | {"r2": result.pop("r11") + 2 * result["r1"], "tv": result["tv"] / 2}

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest value by name."""
        return {name: _widest(spans) for name, spans in self.spans.items() if spans}


def _widest(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    low, high = np.array(spans).T
    return low.min(), high.max()


def columns(context: BatchContext, drift: Drift) -> dict[str, Array]:
    """Compute the per-sequence sums [S] that the formulas need; empty when a policy is missing."""
    return context.cached(("gap", drift.prefix), lambda: _columns(context, drift))


def _columns(context: BatchContext, drift: Drift) -> dict[str, Array]:
    named = collected(context, drift, Gap).columns
    return {
        drift.prefix + name: values
        for name, values in (named | _sequence_values(context, named, drift)).items()
    }


def _token_sums(terms: Terms) -> dict[str, Array]:
    """Compute sums of Δ, Δ², |Δ|, r and related terms."""
    names = {"d": "delta", "dd": "dd", "abs": "size", "r1": "r1", "r11": "r11", "k3": "k3", "mult": "mult"}
    return (
        {name: terms.sum(array) for name, array in names.items()} | {"tv": terms.sum("off")} | _counts(terms)
    )


def _counts(terms: Terms) -> dict[str, Array]:
    """Count the tokens of each sequence that differ, and beyond each bound: only |Δ| > `FAR` is looked at."""
    size, offsets = terms.size[terms.far], np.searchsorted(terms.far, terms.block.offsets)
    result = {"differ": segments.count(terms.delta != 0, terms.block.offsets)}
    return result | {name: segments.count(size > bound, offsets) for name, bound in BEYOND.items()}


def _probabilities(terms: Terms) -> dict[str, Array]:
    """Compute sums of the probabilities q (denominator) and p (numerator), their products and differences."""
    (q, qq), (p, pp) = map(terms.block.prob_sums, (terms.denominator, terms.numerator))
    result = {name: terms.sum(name) for name in ("pd", "pdd", "pq")}
    return result | {"q": q, "qq": qq, "p": p, "pp": pp}


def _surrogate(terms: Terms) -> dict[str, Array]:
    """Compute sums of A, of min(r, 2) − 1 and of their product."""
    block, a = terms.block, terms.block.advantages
    if a is None:
        return {}
    x = np.minimum(terms.r1, 1.0, out=block.out(""))
    return {"a": block.sum(a), "x": block.sum(x), "ax": block.sum(np.multiply(a, x, out=x))}


def _sequence_values(context: BatchContext, sums: Mapping[str, Array], drift: Drift) -> dict[str, Array]:
    """Compute values per sequence; an empty sequence has 0 everywhere."""
    if not sums:
        return {}
    there, mean = context.counts["sequences"], _mean(context, sums["d"])
    mean_q, mean_p = (_mean_log(context, policy) for policy in (drift.denominator, drift.numerator))
    return {
        "g": mean,
        "g_abs": np.abs(mean),
        "ppl_ratio": np.expm1(np.minimum(-mean, 2 * LARGEST)),
        "s2": np.expm1(np.minimum(2 * sums["d"], 2 * LARGEST)),
        "ppl_p": np.exp(np.minimum(-mean_p, 2 * LARGEST)) * there,
        "ppl_q": np.exp(np.minimum(-mean_q, 2 * LARGEST)) * there,
    }


def _mean(context: BatchContext, total: Array) -> Array:
    return total / np.maximum(context.batch.lengths, 1)


def _mean_log(context: BatchContext, policy: Policy) -> Array:
    log = context.batch.policy(policy)
    assert log is not None
    return context.cached(("mean log", policy), lambda: segments.mean(log, context.batch.cu_seqlens))


def ranges(context: BatchContext, drift: Drift) -> dict[str, tuple[float, float]]:
    """Compute smallest and largest Δ, |p − q|, mean Δ of a sequence and ΣΔ of a sequence."""
    return context.cached(("ranges", drift.prefix), lambda: _ranges(context, drift))


def _ranges(context: BatchContext, drift: Drift) -> dict[str, tuple[float, float]]:
    result = columns(context, drift)
    if not result:
        return {}
    there, total = context.batch.lengths > 0, result[drift.prefix + "d"]
    spans = collected(context, drift, Gap).ranges | {
        "g": segments.extremes(_mean(context, total), there),
        "s": segments.extremes(total, there),
    }
    return {drift.prefix + name: span for name, span in spans.items()}


def rewards(context: BatchContext) -> dict[str, Array]:
    """Return the reward of each sequence with a token, else 0, [S]; nothing without rewards."""
    given = context.batch.rewards
    return {} if given is None else {"reward": given * context.counts["sequences"]}


__all__ = ["CHI2_SEQUENCE", "DIFFER", "DRIFTS", "EXTREMES", "REWARD", "ROWS", "SECOND_DRIFT", "SURROGATE"]

"""Honest causes of a mismatch, with correctly logged numbers: staleness, precision, outliers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from offpol_diag.diagnosis.rows import SURE, Estimate, Rows, answered_again
from offpol_diag.diagnosis.signatures import Found, percent

QUANTISED = ("fp8", "float8", "e4m3", "e5m2", "int8", "int4", "w8a8", "w4a16", "nvfp4", "mxfp", "awq", "gptq")
"""Words in the provenance that mean quantised rollout weights."""


ROUNDED = 0.04
"""Largest scale of Δ/(1 − π_rollout) that rounding may explain."""
NOISE, SYSTEMATIC, OTHER_STEP = 0.05, 0.15, 0.42
"""Systematic share of r: below the first, noise of single tokens; above the second, not rounding; above the
third, weights of another step are likelier than quantised ones."""
STALE = 0.16
"""Scale of Δ/(1 − π_rollout) above which weights of another step are likelier than quantised ones."""


class Body(NamedTuple):
    """Robust statistics of |Δ|/(1 − π_rollout): noise of logits moves a log-prob by about noise × (1 − π).

    Attributes:
        scale: robust standard deviation (median of the absolute value / 0.6745).
        tail: share of tokens beyond 8 times the scale.
        share: share of ΣK3 (cut at 1 nat a token) that those tokens carry.
    """

    scale: float
    tail: float
    share: float


def body(rows: Rows) -> Body:
    """Compute the statistics over tokens with −8 < log π_rollout < −0.02; zeros for fewer than 30."""
    some = (rows.q < -0.02) & (rows.q > -8)
    if some.sum() < 30:
        return Body(0.0, 0.0, 0.0)
    scaled = np.abs(rows.delta[some]) / -np.expm1(rows.q[some])
    scale = float(np.median(scaled)) / 0.6745
    off = rows.k3_cut[some]
    far = scaled > 8 * scale
    return Body(scale, float(far.mean()), float(off[far].sum() / off.sum()) if off.sum() > 0 else 0.0)


def _sizes(rows: Rows, column: str) -> dict[float, float]:
    """Return the mean of min(K3, 1) by value of a numeric column, for values with at least 50 tokens."""
    values = rows.column(column)
    total, many = rows.sum(rows.k3_cut), rows.lengths
    found: dict[float, float] = {}
    for value in sorted({value for value in values if isinstance(value, int | float)}):
        at = np.array([one == value for one in values])
        if many[at].sum() >= 50:
            found[value] = float(total[at].sum() / many[at].sum())
    return found


def _text(sizes: dict[float, float], name: str) -> str:
    if len(sizes) > 6:
        keys = list(sizes)
        sizes = {key: sizes[key] for key in (*keys[:3], *keys[-3:])}
    rows = ", ".join(f"{key:g}: {size:.2g}" for key, size in sizes.items())
    return f"K3 (cut at 1 nat a token) by {name}: {rows}"


def stale(rows: Rows, moved: float | None) -> Found | None:
    """Find a mismatch that grows with the policy lag, or correlates with the advantages."""
    lags = _sizes(rows, "policy_lag")
    first, *later = lags.values() or [0.0]
    growing = bool(later) and float(np.mean(later)) > 2.5 * max(first, 1e-7)
    behind = not later and min(lags, default=0) > 0 and first > 1e-4
    if growing or behind:
        return Found.of_all("stale", _text(lags, "policy lag"), rows)
    if moved is not None and moved > SURE:
        statistic = (
            f"cov(A, min(r, 2)) is {moved:.1f} standard errors above 0: the trainer has moved along its "
            "advantages"
        )
        return Found.of_all("stale", statistic, rows)
    return None


def frozen(rows: Rows) -> Found | None:
    """Find a mismatch that grows with the training step."""
    steps = _sizes(rows, "step")
    sizes = np.array(list(steps.values()))
    if len(steps) < 4:
        rising = len(steps) > 1 and (np.diff(sizes) > 0).all() and sizes[-1] > 1.5 * sizes[0]
        if not rising or body(rows).scale < STALE:
            return None
        times = f"{sizes[-1] / max(sizes[0], 1e-8):.2g}"
    else:
        third = len(sizes) // 3
        first, last = float(np.median(sizes[:third])), float(np.median(sizes[-third:]))
        trend = np.corrcoef(np.argsort(np.argsort(sizes)), np.arange(len(sizes)))[0, 1]
        if last < 4 * max(first, 1e-8) or trend < 0.6 or last < 2e-5:
            return None
        times = f"{last / max(first, 1e-8):.0f}"
    return Found.of_all("frozen_sync", _text(steps, "step"), rows, fields={"times": times})


def outliers(rows: Rows) -> Found | None:
    """Find a mismatch carried by a few outliers, with all other tokens close."""
    seen = body(rows)
    if seen.scale > 0.045 or not 0.001 < seen.tail < 0.08 or seen.share < 0.8:
        return None
    statistic = (
        f"{percent(seen.tail)} of the uncertain tokens lie beyond 8 times the usual |Δ|/(1 − q) of "
        f"{seen.scale:.2g} and carry {percent(seen.share)} of K3"
    )
    return Found.of_all("moe_outliers", statistic, rows)


def broad(rows: Rows, provenance: dict[str, object], share: Estimate | None) -> Found:
    """Classify a mismatch as numerics, quantised or stale weights, by its scale and its systematic share.

    Quantised weights move tokens by more than rounding does, stale ones by more still, and both shift every
    occurrence of a kind of token alike; rounding does not.

    Args:
        rows: the tokens.
        provenance: the dump's metadata about its engine.
        share: systematic share of r (`laws.systematic`), or None if it cannot be estimated.
    """
    seen = body(rows)
    recorded = " ".join(str(value) for value in provenance.values()).lower()
    statistic = f"|Δ|/(1 − q) is {seen.scale:.2g} for a usual token (robust standard deviation)"
    if share is not None:
        statistic += (
            f"; {percent(max(share.value, 0.0))} of the variance of r is common to tokens of one kind "
            f"[{percent(max(share.low, 0.0))}, {percent(max(share.high, 0.0))}]"
        )
    in_sync = {value for value in rows.column("policy_lag") if value is not None} == {0}
    if share is not None and answered_again(rows) and share.high < NOISE and seen.scale <= STALE:
        cause = "numerics"
    elif share is not None and share.low > OTHER_STEP and not in_sync:
        cause = "stale"
    elif any(word in recorded for word in QUANTISED) or (in_sync and seen.scale > ROUNDED):
        cause = "quantized_rollout"
    elif seen.scale <= ROUNDED and (share is None or share.low < SYSTEMATIC):
        cause = "numerics"
    else:
        cause = "quantized_rollout" if seen.scale <= STALE else "stale"
    return Found.of_all(cause, statistic, rows)

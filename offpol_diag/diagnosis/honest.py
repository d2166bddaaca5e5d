"""What differs where nothing is wrong with the logged numbers: staleness, precision, outliers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from offpol_diag.diagnosis.rows import SURE, Estimate, Floats, Rows, answered_again
from offpol_diag.diagnosis.signatures import Found, percent

QUANTISED = ("fp8", "float8", "e4m3", "e5m2", "int8", "int4", "w8a8", "w4a16", "nvfp4", "mxfp", "awq", "gptq")
"""Words of provenance that say that the engine's weights were quantised."""


ROUNDED = 0.04
"""Scale of Δ/(1 − q) up to which a mismatch may be rounding."""
NOISE, SYSTEMATIC, OTHER_STEP = 0.05, 0.15, 0.42
"""Systematic share of r: below the first it is noise of single tokens, above the second no rounding, and
above the third it is likelier of another step's weights than of quantised ones."""
STALE = 0.16
"""Scale of Δ/(1 − q) above which weights of another step are likelier than quantised ones of the same."""


@dataclass(frozen=True)
class Body:
    """The shape of Δ over 1 − q, by which noise of logits moves a log-prob.

    Attributes:
        scale: robust standard deviation (from the median of the absolute value).
        tail: share of tokens beyond 8 such deviations.
        share: share of ΣK3, a token's cut at 1 nat, that lies in those.
    """

    scale: float
    tail: float
    share: float


def body(rows: Rows) -> Body:
    """Of tokens that are neither certain nor nearly impossible."""
    some = (rows.q < -0.02) & (rows.q > -8)
    if some.sum() < 30:
        return Body(0.0, 0.0, 0.0)
    scaled = np.abs(rows.delta[some]) / -np.expm1(rows.q[some])
    scale = float(np.median(scaled)) / 0.6745
    off = rows.k3_cut[some]
    far = scaled > 8 * scale
    return Body(scale, float(far.mean()), float(off[far].sum() / off.sum()) if off.sum() > 0 else 0.0)


def _sizes(rows: Rows, column: str) -> dict[float, float]:
    """Mean of min(K3, 1) by a numeric column, of values with at least 50 tokens."""
    values = rows.column(column)
    known = sorted({value for value in values if isinstance(value, int | float)})
    total, many = rows.sum(rows.k3_cut), rows.lengths
    found: dict[float, float] = {}
    for value in known:
        at = np.array([one == value for one in values])
        if many[at].sum() >= 50:
            found[value] = float(total[at].sum() / many[at].sum())
    return found


def _text(sizes: dict[float, float], name: str) -> str:
    if len(sizes) > 6:
        keys = list(sizes)
        sizes = {key: sizes[key] for key in (*keys[:3], *keys[-3:])}
    return (
        "K3 (cut at 1 nat a token) by " + name + ": " + ", ".join(f"{k:g}: {v:.2g}" for k, v in sizes.items())
    )


def stale(rows: Rows, moved: float | None) -> Found | None:
    """Find a mismatch that grows with the policy lag, or that goes with the advantages."""
    lags = _sizes(rows, "policy_lag")
    keys = list(lags)
    every = np.ones(rows.tokens, bool), np.ones(rows.sequences, bool)
    if len(keys) > 1 and lags[keys[0]] >= 0:
        later = np.mean([lags[key] for key in keys[1:]])
        if later > 2.5 * max(lags[keys[0]], 1e-7):
            return Found("stale", _text(lags, "policy lag"), *every, None)
    if len(keys) == 1 and keys[0] > 0 and next(iter(lags.values())) > 1e-4:
        return Found("stale", _text(lags, "policy lag"), *every, None)
    if moved is not None and moved > SURE:
        statistic = (
            f"cov(A, min(r, 2)) is {moved:.1f} standard errors above 0: the trainer has moved along its "
            "advantages"
        )
        return Found("stale", statistic, *every, None)
    return None


def frozen(rows: Rows) -> Found | None:
    """Find a mismatch that grows with the training step from the engine's own level."""
    steps = _sizes(rows, "step")
    sizes = np.array(list(steps.values()))
    if len(steps) < 4:
        rising = len(steps) > 1 and (np.diff(sizes) > 0).all() and sizes[-1] > 1.5 * sizes[0]
        if not rising or body(rows).scale < STALE:
            return None
        every = np.ones(rows.tokens, bool), np.ones(rows.sequences, bool)
        times = f"{sizes[-1] / max(sizes[0], 1e-8):.2g}"
        return Found("frozen_sync", _text(steps, "step"), *every, None, {"times": times})
    third = max(1, len(sizes) // 3)
    first, last = float(np.median(sizes[:third])), float(np.median(sizes[-third:]))
    ranks = np.argsort(np.argsort(sizes))
    trend = float(np.corrcoef(ranks, np.arange(len(sizes)))[0, 1])
    if last < 4 * max(first, 1e-8) or trend < 0.6 or last < 2e-5:
        return None
    times = f"{last / max(first, 1e-8):.0f}"
    every = np.ones(rows.tokens, bool), np.ones(rows.sequences, bool)
    return Found("frozen_sync", _text(steps, "step"), *every, None, {"times": times})


def outliers(rows: Rows) -> Found | None:
    """Find a tight body of tokens and a few far ones that carry the mismatch."""
    seen = body(rows)
    if seen.scale > 0.045 or not 0.001 < seen.tail < 0.08 or seen.share < 0.8:
        return None
    statistic = (
        f"{percent(seen.tail)} of the uncertain tokens lie beyond 8 times the usual |Δ|/(1 − q) of "
        f"{seen.scale:.2g} and "
        f"carry {percent(seen.share)} of K3"
    )
    every = np.ones(rows.tokens, bool), np.ones(rows.sequences, bool)
    return Found("moe_outliers", statistic, *every, None)


def broad(rows: Rows, provenance: dict[str, object], share: Estimate | None) -> Found:
    """Name a mismatch by its size and by whether it depends on the token.

    Quantised weights move every token by more than rounding does, stale ones by more still, and both move
    every occurrence of a kind of token alike; rounding does not.

    Args:
        rows: the tokens.
        provenance: what the dump says of its engine.
        share: systematic share of r (`laws.systematic`), or None where it cannot be measured.
    """
    seen = body(rows)
    said = " ".join(str(value) for value in provenance.values()).lower()
    every = np.ones(rows.tokens, bool), np.ones(rows.sequences, bool)
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
    elif any(word in said for word in QUANTISED) or (in_sync and seen.scale > ROUNDED):
        cause = "quantized_rollout"
    elif seen.scale <= ROUNDED and (share is None or share.low < SYSTEMATIC):
        cause = "numerics"
    else:
        cause = "quantized_rollout" if seen.scale <= STALE else "stale"
    return Found(cause, statistic, *every, None)


def levels(x: Floats) -> Floats:
    """Logarithm of a size, with a floor for 0."""
    return np.log(np.maximum(x, 1e-9))

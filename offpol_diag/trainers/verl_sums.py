"""Sums behind verl's logged metrics: distributions of statistics, the policy gap, and rejection counts.

Statistics over rows include empty ones (as 0), except the rejection statistics of 2026.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

from offpol_diag.presets import Over, Preset, Reject, Statistic, Weight
from offpol_diag.trainers.base import (
    EPS,
    K1,
    K2,
    K3,
    LOG,
    RATIO_HELD,
    RATIO_SQUARED,
    ROLLOUT,
    SAFETY,
    TRAIN,
    Columns,
    Ends,
    Measure,
    Ranges,
    among,
    ends,
)

if TYPE_CHECKING:
    from torch import Tensor

    from offpol_diag.engine.ratios import Ratios
    from offpol_diag.trainers.view import Tokens, View


@dataclass(frozen=True)
class Generation:
    """Names and layout of the metrics of one generation.

    Attributes:
        prefix: before every name; `gap` is put before the names of the policy-gap numbers.
        chi2: whether it logs χ².
        veto: whether it logs the veto's fractions.
        divergences: whether rejection is logged per k1/k2/k3 option (2026-01) or as one ratio band.
        weight_band: 2025-10: rejection is a mode of the weights and has no numbers of its own, and
            fractions beyond a threshold are taken over rows for product ratios only, over tokens for
            geometric means.
        applied: 2026-03: means, extremes, std and ESS are of the weights as the loss gets them, bounded
            to [0, C]; fractions beyond a threshold stay those of raw weights.
        debug: whether it has `training/` and `actor/` as well; golden numbers have neither.
    """

    prefix: str
    gap: str = ""
    chi2: bool = True
    veto: bool = True
    divergences: bool = False
    weight_band: bool = False
    applied: bool = False
    debug: bool = False


GENERATIONS = {
    "verl-2025-10": Generation("mismatch/", gap="mismatch_", chi2=False, weight_band=True),
    "verl-2025-11": Generation("rollout_corr/"),
    "verl-2026-01": Generation("rollout_corr/", veto=False, divergences=True),
    "verl-2026-03": Generation("rollout_corr/", veto=False, divergences=True, applied=True, debug=True),
}


def generation(preset: Preset) -> Generation:
    """Return the generation of a preset's logged metrics."""
    return GENERATIONS[preset.logs or ""]


@dataclass(frozen=True)
class Spread:
    """The sums behind mean, std, extremes, ESS and fractions of a statistic x.

    Attributes:
        key: prefix of its columns; equal keys mean equal numbers.
        low: below it x counts as low; for std and ESS x is clamped to it.
        high: above it x counts as high; likewise.
        center: taken off before squaring per-sequence means (1 for weights), so that nothing cancels.
        empty: whether rows without a token count.
    """

    key: str
    low: float
    high: float
    center: float
    empty: bool = True


@dataclass(frozen=True)
class Part:
    """One statistic whose distribution a preset logs, and the stem of its names.

    Attributes:
        stem: prefix of its names.
        spread: sums of the raw statistic.
        rule: the weight or rule that the statistic belongs to.
        applied: sums of the weights after truncation or masking, if the generation logs those.
    """

    stem: str
    spread: Spread
    rule: Weight | Reject
    applied: Spread | None = None

    @property
    def of_rows(self) -> bool:
        """Return whether the statistic has one value per row rather than per token."""
        return self.rule.over not in ("token", "segment")


def weight_part(preset: Preset, generation: Generation) -> Part | None:
    """The spread of the importance weights, thresholds [1/C, C] unless a lower bound is given."""
    if preset.weight is None:
        return None
    band = (_ratio_rule(preset) if generation.weight_band else None) or preset.weight
    high = band.upper or math.inf
    low = band.lower or 1 / high
    key = f"is/{preset.policy}/{preset.weight.over}/{low:.17g}/{high:.17g}"
    raw = Spread(key, low, high, 1.0)
    applied = Spread(f"{preset.weight.action}/{key}", 0.0, high, 1.0)
    return Part("rollout_is", raw, preset.weight, applied if generation.applied else None)


def _ratio_rule(preset: Preset) -> Reject | None:
    return next((_in_ratio(rule) for rule in preset.reject if rule.statistic in ("ratio", "k1")), None)


def _in_ratio(rule: Reject) -> Reject:
    """A band of k1 = −Δ in nats as the same band of r."""
    if rule.statistic != "k1":
        return rule
    lower = None if rule.upper is None else math.exp(-rule.upper)
    upper = None if rule.lower is None else math.exp(-rule.lower)
    return replace(rule, statistic="ratio", lower=lower, upper=upper)


def reject_parts(preset: Preset, generation: Generation) -> Iterator[Part]:
    """The spreads of the rejection statistics."""
    if generation.weight_band:
        return
    for rule in preset.reject:
        yield _divergence_part(preset, rule) if generation.divergences else _ratio_part(preset, rule)


def _ratio_part(preset: Preset, rule: Reject) -> Part:
    rule = _in_ratio(rule)
    high = rule.upper or math.inf
    low = rule.lower if rule.lower is not None else 1 / high
    key = f"is/{preset.policy}/{rule.over}/{low:.17g}/{high:.17g}"
    return Part("rollout_rs", Spread(key, low, high, 1.0), rule)


_AS_K1 = {"ratio": "k1"}


def _divergence_part(preset: Preset, rule: Reject) -> Part:
    """verl 2026-01 speaks of −log r where we speak of r: the band is mirrored."""
    name = _AS_K1.get(rule.statistic, rule.statistic)
    low, high = _divergence_limits(rule)
    option = f"token_{name}" if rule.over == "token" else f"seq_{rule.over}_{name}"
    key = f"rs/{preset.policy}/{name}/{rule.over}/{low:.17g}/{high:.17g}"
    return Part(f"rollout_rs_{option}", Spread(key, low, high, 0.0, empty=False), rule)


def _divergence_limits(rule: Reject) -> tuple[float, float]:
    if rule.statistic == "ratio":
        return -math.log(rule.upper or math.inf), -math.log(rule.lower) if rule.lower else math.inf
    if rule.statistic == "k1":
        return -math.inf if rule.lower is None else rule.lower, _or_inf(rule.upper)
    return rule.lower or 0.0, _or_inf(rule.upper)


def _or_inf(bound: float | None) -> float:
    return math.inf if bound is None else bound


@cache
def parts(preset: Preset) -> tuple[Part, ...]:
    """Every spread that this preset logs."""
    weight = weight_part(preset, generation(preset))
    return (*((weight,) if weight else ()), *reject_parts(preset, generation(preset)))


# ---------------------------------------------------------------- all that is summed


def columns(view: View) -> tuple[Columns, Ranges]:
    """Columns [S] of a preset, and what extremes are kept of; equal keys mean equal numbers."""
    own = {f"{view.preset.name}!{name}": x for name, x in _dropped(view).items()}
    found, ranges = view.once(("verl gap", view.preset.policy), lambda: _gap(view))
    columns, ranges = found | own, dict(ranges)
    for part in parts(view.preset):
        for spread, make in ((part.spread, _raw), (part.applied, _applied)):
            if spread is not None:
                made = view.once(spread, partial(_spread, view, spread, part, make))
                columns |= made[0]
                ranges |= made[1]
        if part.spread.center and part.of_rows:  # bounded nowhere
            ranges[f"{part.spread.key}/log"] = ends(view.ratios.aggregate("ratio", part.rule.over).values)
    return columns, ranges


def _gap(view: View) -> tuple[Columns, Ranges]:
    """The policy-gap numbers of verl's `compute_offpolicy_metrics`, per numerator policy."""
    n, total = view.n + EPS, view.total(LOG)
    log_train, log_rollout = view.total(TRAIN) / n, view.total(ROLLOUT) / n
    found = {
        "ppl": (-log_train).exp(),
        "log_ppl": -log_train,
        "rollout_ppl": (-log_rollout).exp(),
        "rollout_log_ppl": -log_rollout,
        "kl": -total,
        "k3": view.total(GAP_K3),
        "diff": log_rollout - log_train,
        "abs": (log_rollout - log_train).abs(),
        "ratio": (log_rollout - log_train).exp(),
        "rr": view.total(RATIO_SQUARED),
        "ss": (2 * total.clamp(-SAFETY, SAFETY)).exp(),
    }
    key = f"verl/{view.preset.policy}/"
    return {key + name: x for name, x in found.items()}, {key + "g": ends(view.mean_log)}


GAP_K3 = Measure("k3, finite", lambda x: x.k3().clamp(max=math.exp(2 * 345.0)), near=K3)
K1_BOUNDED = Measure("−Δ, within ±20", lambda x: x.ratios.token("k1", SAFETY), near=K1)
K2_BOUNDED = Measure("Δ²/2, Δ within ±20", lambda x: x.ratios.token("k2", SAFETY), near=K2)
K3_BOUNDED = Measure("k3, Δ within ±20", lambda x: x.k3(SAFETY), near=K3)
OF_TOKENS: dict[Statistic | None, Measure] = {
    None: RATIO_HELD,
    "k1": K1_BOUNDED,
    "k2": K2_BOUNDED,
    "k3": K3_BOUNDED,
}
"""Statistics of tokens, Δ clamped to ±20; None: the weight before truncation."""


# ---------------------------------------------------------------- spreads

Make = Callable[["View", Part], "Tensor | Measure"]
"""A statistic of rows [S], or of tokens."""


def _raw(view: View, part: Part) -> Tensor | Measure:
    """The raw statistic; spreads that differ in their limits share it."""
    name = _statistic(view.preset, part)
    if part.of_rows:
        return _level(view.ratios, name, part.rule.over)
    if part.rule.over == "token" and name in OF_TOKENS:
        return OF_TOKENS[name]
    return _dense(f"verl {name} over {part.rule.over}", lambda x: _level(x.ratios, name, part.rule.over))


def _dense(name: str, of: Callable[[Tokens], Tensor]) -> Measure:
    """Return a measure without an equivalent on near tokens, for turns or statistics that verl lacks."""
    return Measure(name, of, own=True)


def _statistic(preset: Preset, part: Part) -> Statistic | None:
    """The statistic of a rejection since 2026; None for a ratio, which is a weight before truncation."""
    if not isinstance(part.rule, Reject) or not generation(preset).divergences:
        return None
    return "k1" if part.rule.statistic == "ratio" else part.rule.statistic


def _level(ratios: Ratios, name: Statistic | None, over: Over) -> Tensor:
    """Return a statistic, or for None the raw weight exp(log-ratio clamped to ±20 after aggregation)."""
    if name is None:
        return ratios.log_ratio(over, SAFETY, "aggregate").values.exp()
    return ratios.aggregate(name, over, SAFETY).values


def _applied(view: View, part: Part) -> Tensor | Measure:
    """Return the weights that the loss gets; truncation there has no lower bound."""
    raw, weight = _raw(view, part), view.preset.weight
    assert weight is not None
    high = math.inf if weight.upper is None else weight.upper
    if not isinstance(raw, Measure):
        return view.weigh().final.values if weight.action == "mask" else raw.clamp(max=high)
    if weight.action == "mask":
        return Measure("masked weight", lambda x: x.weigh().final.values, own=True, near=raw.near)
    return Measure("truncated weight", lambda x: raw.of(x).clamp(max=high), own=True, near=raw.near)


def _spread(view: View, spread: Spread, part: Part, make: Make) -> tuple[Columns, Ranges]:
    """Columns of a statistic, and its extremes."""
    x = make(view, part)
    if isinstance(x, Measure):
        found, total, span = _within_tokens(view, spread, x), view.total(x), view.ends(x)
    else:
        found, total, span = _within_rows(view, spread, x), x * view.n, ends(x, view.there)
    mean = total / (view.n + EPS)
    off = mean - spread.center
    high, low = _beyond(view, spread, mean)
    counted = _counted(view, spread)
    found |= {"x": total, "m": mean, "m1": off, "m2": off.square(), "m_high": high, "m_low": low}
    ranges: dict[str, Ends] = {
        "x": span,
        "m": among((mean, mean), counted),
        "dev": among((off.abs(), off.abs()), counted),
    }
    key = f"{spread.key}/"
    return {key + name: one for name, one in found.items()}, {key + name: one for name, one in ranges.items()}


def _counted(view: View, spread: Spread) -> Tensor:
    """Flag the rows that count, [S] bool."""
    return view.n >= 0 if spread.empty else view.there


def _beyond(view: View, spread: Spread, x: Tensor) -> tuple[Tensor, Tensor]:
    """1 where x of a row that counts is above the limits, and below."""
    counted = _counted(view, spread)
    return ((x > spread.high) & counted) + view.zeros, ((x < spread.low) & counted) + view.zeros


def _within_tokens(view: View, spread: Spread, x: Measure) -> Columns:
    """Return the sums of the clamped statistic, and the counts of tokens beyond the limits."""
    inside, squares, high, low = view.within(x, spread.low, spread.high)
    rows = {"high_rows": view.zeros, "low_rows": view.zeros}
    return {"c": inside, "cc": squares, "high": high, "low": low, **rows}


def _within_rows(view: View, spread: Spread, x: Tensor) -> Columns:
    """Return the same sums if all tokens of a row share x: geometric means lie within 1e-3 of 1."""
    n, inside = view.n, x.clamp(spread.low, spread.high)
    off = inside - spread.center
    high, low = _beyond(view, spread, x)
    beyond = {"high_rows": high, "low_rows": low, "high": high * n, "low": low * n}
    return {"c": inside * n, "cc": inside * (inside * n), "c1": off * n, "cd": off.square() * n, **beyond}


# ---------------------------------------------------------------- rejected tokens


def _dropped(view: View) -> Columns:
    """Tokens that rejection (not the veto) removes, rule by rule and together; the veto's counts.

    In 2025 a row without a token has a ratio of 1, and is rejected where the band leaves that out.
    """
    preset, divergences = view.preset, generation(view.preset).divergences
    lost = view.failing(*preset.reject)
    hits = view.veto_hits(preset.veto)
    found = {
        "lost": lost,
        "lost_rows": (lost > 0) + view.zeros,
        "hits": hits,
        "vetoed": (hits > 0) + view.zeros,
    }
    if preset.reject and not divergences:
        found["lost_rows"] = ((lost > 0) | ~view.passed_rows(*preset.reject)) + view.zeros
    for i, rule in enumerate(preset.reject if divergences else ()):
        alone = view.failing_alone(rule)
        found |= {f"rule{i}": alone, f"rule{i}_rows": (alone > 0) + view.zeros}
    if preset.weight is not None and preset.weight.action == "mask":
        weighed = view.weigh()
        outside = weighed.high + weighed.low
        found["oob"] = outside * view.n if weighed.final.per == "sequence" else outside
    return found

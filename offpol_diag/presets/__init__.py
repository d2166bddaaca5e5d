"""Correction methods as data: a preset is a small frozen class.

Here are the classes; `catalogue` has those that ship, `grammar` reads them, `words` writes them as formulas.
Every bound is on r = π_train/π_rollout, or on a divergence of it; `over` names the aggregation that the bound
applies to. A field is a key of a preset file (`grammar.py`), and its type says which values it takes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Policy = Literal["old", "current", "rollout"]
Numerator = Literal["old", "current"]
Over = Literal["token", "sum", "mean", "max", "min", "segment", "batch"]
WeightOver = Literal["token", "sum", "mean", "segment"]
Action = Literal["truncate", "mask", "none"]
Binary = Literal["binary_kl", "binary_kl_max"]
Statistic = Literal["ratio", "k1", "k2", "k3", "k3_reverse", "mult_prob_error", "prob_diff", "tv", Binary]
Sign = Literal["any", "negative", "positive", "against", "against_or_zero", "away"]
Overflow = Literal["limit", "zero"]
Denominator = Literal["kept", "all"]
Loss = Literal["ppo_clip", "reinforce", "surrogate", "gspo", "cispo"]
Generation = Literal["verl-2025-10", "verl-2025-11"]
Kind = Literal["none", "token", "sequence", "geometric and k3", "bypass", "other"]
AGGREGATES = frozenset({"ratio", "k1"})
"""Statistics whose sequence form is an aggregated log-ratio, which a safety bound can act on."""
OF_SEQUENCES = frozenset({"sum", "mean", "max", "min"})
"""Aggregations `over` that give a sequence one number; the others give each token one."""
UNSIGNED = frozenset({"k2", "k3", "k3_reverse", "tv", *get_args(Binary)})
"""Statistics that are 0 on-policy and grow with the drift whichever way it goes."""
MEANS = frozenset({"ratio", "k1", "k3"})
"""Statistics whose mean over a sequence is its geometric mean of r, or its mean K3."""
FLOAT32_OVERFLOW = math.log(2.0**128 - 2.0**104)
"""Largest log weight, nats, that float32 holds: with the overflow `zero` trainers drop larger ones."""
SMALLEST_NORM = 1e-8
"""Normalisation divides only by mean weights above this, as in verl."""
BOUNDS = ("lower", "upper")


@dataclass(frozen=True)
class Weight:
    """The importance weight that multiplies the loss.

    Attributes:
        over: token, sum (product ratio of the sequence), mean (geometric mean), segment (geometric mean of a
            turn).
        action: truncate (clamp to the bounds), mask (0 outside the bounds, the token stays in the mask:
            IcePop), none (the raw ratio).
        upper: largest weight, or None. With `none` it bounds nothing: weights above it are only counted as
            truncated, and it is the threshold of what the trainer logs.
        lower: smallest weight, or None.
        normalize: divide by the mean of the weights as processed but before any rejection, over the trainer
            batch (the rows of one `step`): over tokens for `token`, over sequences (each one's mean weight)
            for the rest.
        safety: bound on |log weight| before exp, nats; None = no bound.
        safety_at: whether that bound acts on the aggregated log-ratio or on each token before aggregation.
        overflow: treatment of a weight that float32 cannot hold (log r > 88.7): `limit` leaves it to the
            bounds, `zero` drops it.
    """

    over: WeightOver = "token"
    action: Action = "truncate"
    upper: float | None = None
    lower: float | None = None
    normalize: bool = False
    safety: float | None = 20.0
    safety_at: Literal["aggregate", "token"] = "aggregate"
    overflow: Overflow = "limit"

    @property
    def on_tokens(self) -> bool:
        """Return whether tokens have weights of their own; else a sequence has one."""
        return self.over not in OF_SEQUENCES


@dataclass(frozen=True)
class Reject:
    """One rejection rule; what lies outside [lower, upper] (inclusive) leaves the loss mask.

    Attributes:
        statistic: ratio (r; bounds on r), k1 (−Δ; bounds in nats), k2 (Δ²/2), k3 (r−1−Δ), k3_reverse
            (1/r−1+Δ), mult_prob_error (e^|Δ|), prob_diff (π_train − π_rollout, signed), tv (|r−1|/2),
            binary_kl (KL from π_rollout to π_train of "this token or another", nats), binary_kl_max (the
            larger of both directions, probabilities clamped to [1e-8, 1 − 1e-8]).
        over: token, or how the sequence (sum, mean, max, min) or the turn (segment) aggregates it; batch: the
            tokens with the largest values in the trainer batch (the rows of one `step`) are dropped until
            the mean of the rest is below `upper`, the smallest never. For `ratio`: sum is the product ratio,
            mean the geometric mean.
        advantage: where the rule acts: any; negative/positive advantages only; against = a bound acts only
            where the update pushes further past it (upper where A > 0, lower where A < 0), against_or_zero =
            the same with A = 0 counted as negative; away = tokens whose update pushes r further from 1
            (A·Δ > 0). A rule on sequences looks at the sequence's mean advantage, `away` at each token's.
        safety: bound on |Δ| before the statistic, nats; None = no bound.
        safety_at: whether that bound acts on the aggregated log-ratio or on each token. The aggregate can be
            bounded for ratio and k1 only; every other statistic bounds each token's Δ.
    """

    statistic: Statistic = "ratio"
    over: Over = "token"
    lower: float | None = None
    upper: float | None = None
    advantage: Sign = "any"
    safety: float | None = None
    safety_at: Literal["aggregate", "token"] = "aggregate"

    @property
    def on_tokens(self) -> bool:
        """Return whether tokens fail one by one; else whole sequences do."""
        return self.over not in OF_SEQUENCES or self.advantage == "away"


@dataclass(frozen=True)
class Veto:
    """Drop a whole sequence if one token's unclamped r is strictly below `lower` or above `upper`."""

    lower: float | None = None
    upper: float | None = None


@dataclass(frozen=True)
class Clip:
    """Bounds at which the policy loss clips its own ratio π_θ/π_anchor.

    Attributes:
        low: the ratio is clipped below 1 − low; None: not clipped below.
        high: the ratio is clipped above 1 + high; None: not clipped above.
        dual: ppo_clip, gspo: where A < 0 the loss is at most −dual·A; None for no dual clip.
        safety: bound on |log| of that ratio before exp, nats (gspo: from above only); None = none.
    """

    low: float | None = 0.2
    high: float | None = 0.2
    dual: float | None = 3.0
    safety: float | None = 20.0


@dataclass(frozen=True)
class Preset:
    """One correction method.

    Attributes:
        name: as in the table's header.
        summary: one line for the catalogue.
        policy: numerator of r: old (decoupled, three policies), current (bypass, two).
        weight: the importance weight, or None when the loss is not weighted.
        reject: rejection rules; a token is kept only if all hold.
        veto: rule that drops whole sequences, or None.
        loss: the policy loss the weights enter: ppo_clip, reinforce (−A log π_θ), surrogate (−A; the weight
            is the loss's own ratio), gspo (PPO clip on the geometric mean of π_θ/π_anchor), cispo
            (−A log π_θ times the clipped, constant π_θ/π_anchor).
        clip: bounds at which that loss clips its own ratio.
        denominator: whether rejected tokens leave the loss's denominator (kept) or stay in it (all).
        at: places of the thresholds that may stand beside the name, in their order; left out, those of all
            bounds of weight, rules and veto that the preset has.
        aliases: other names people search for.
        generation: the older keys of verl that are printed beside the newest, or None.
        source: origin of the preset: trainer, version, function.
        note: caveats when comparing it with another preset.
    """

    name: str
    summary: str
    policy: Numerator = "old"
    weight: Weight | None = None
    reject: tuple[Reject, ...] = ()
    veto: Veto | None = None
    loss: Loss = "ppo_clip"
    clip: Clip = Clip()
    denominator: Denominator = "kept"
    at: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    generation: Generation | None = None
    source: str = ""
    note: str = ""

    @property
    def kind(self) -> Kind:
        """What the method does, as `presets` groups it: the first of these that holds.

        other: its loss has a ratio or a weight of its own. none: only PPO's own ratio corrects anything.
        bypass: r is of π_θ. geometric and k3: the geometric mean of r or the mean K3 of the sequence decides,
        whatever its length. sequence: another number of the sequence does. token: that of each token does.
        """
        parts = [part for part in (self.weight, *self.reject) if part is not None]
        if self.loss in ("gspo", "cispo"):
            return "other"
        if not parts and self.veto is None:
            return "none"
        if self.policy == "current":
            return "bypass"
        if any(part.over == "mean" and getattr(part, "statistic", "ratio") in MEANS for part in parts):
            return "geometric and k3"
        return "sequence" if any(part.over in OF_SEQUENCES for part in parts) else "token"

    @property
    def places(self) -> tuple[str, ...]:
        """The thresholds that may stand beside the name, in their order: `("weight.upper", "veto.lower")`."""
        parts = {"weight": self.weight, "reject": next(iter(self.reject), None), "veto": self.veto}
        bounds = [(name, side) for name in parts for side in ("lower", "upper")]
        own = [f"{name}.{side}" for name, side in bounds if getattr(parts[name], side, None) is not None]
        return self.at or tuple(own)

    def lacking(self, columns: Collection[str]) -> list[str]:
        """Return the columns that the preset reads and `columns` lack, e.g. `current_log_probs`."""
        read = [f"{self.policy}_log_probs"]
        if any(rule.advantage != "any" for rule in self.reject):
            read.append("advantages")
        return [column for column in read if column not in columns]


def problems(part: Weight | Reject | Veto | Clip | Preset) -> Iterator[tuple[str, str]]:
    """Yield what has the right type but makes no sense: a key, or "" for all keys, and the rule broken."""
    positive = not_negative = tuple[str, ...]()
    match part:
        case Weight():
            positive, not_negative = ("upper", "safety"), ("lower",)
        case Reject():
            factor = part.statistic in ("ratio", "mult_prob_error")
            positive = ("safety", *BOUNDS) if factor else ("safety",)
            not_negative = BOUNDS if part.statistic in UNSIGNED else ()
            if part.over == "batch" and part.statistic not in UNSIGNED:
                yield "statistic", f"over a batch it must be one of {', '.join(sorted(UNSIGNED))}"
            if part.over == "batch" and (part.lower is not None or part.advantage != "any"):
                yield "", "over a batch it takes upper alone, and any advantage"
        case Veto():
            positive = BOUNDS
        case Clip():
            positive, not_negative = ("safety",), ("low", "high")
            if part.dual is not None and part.dual <= 1:
                yield "dual", "it must be above 1"
        case Preset() if part.loss == "ppo_clip" and part.policy == "current" and part.weight is not None:
            already = "under ppo_clip the ratio holds that of π_θ already"
            yield "weight", f"{already}: say loss = reinforce, or no weight"
    values = {key: getattr(part, key) for key in (*positive, *not_negative)}
    for key, value in values.items():
        if value is not None and (value < 0 or (value == 0 and key in positive)):
            yield key, "it must be above 0" if key in positive else "it must not be negative"
    if isinstance(part, Weight | Reject | Veto):
        if part.lower is None and part.upper is None and getattr(part, "action", "") != "none":
            yield "", "it needs upper, lower or both"
        if part.lower is not None and part.upper is not None and part.lower > part.upper:
            yield "lower", f"it must not exceed upper = {part.upper}"

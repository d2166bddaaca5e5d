"""Slow reference implementation of every metric, with lists, `math.fsum` and, where needed, `mpmath`.

Written from DESIGN §3-§6, the docstrings of `presets.py` and the formula texts; nothing is shared with the
package.
A dump is a list of rows, as they would be in the file: dicts of plain lists, with a mask and all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

mpmath.mp.dps = 40

DRIFTS = {"": ("rollout", "old"), "drift2.": ("old", "current"), "total.": ("rollout", "current")}
OVERFLOW = 345.0  # LARGEST of core/formulas.py: |log-ratio| that is exponentiated at most
FLOAT32_OVERFLOW = math.log((2 - 2**-23) * 2.0**127)
COIN = 1e-8  # SMOOTHING and LEAST_PROBABILITY of core/formulas.py


@dataclass
class Sequence:
    """The unmasked tokens of one row; `turn` numbers the contiguous runs of unmasked tokens."""

    rollout: list[float]
    old: list[float]
    current: list[float]
    advantages: list[float]
    turn: list[int]
    group: Any
    response: int
    ident: str = ""
    step: Any = None

    @property
    def n(self) -> int:
        return len(self.rollout)

    def delta(self, numerator: str, denominator: str = "rollout") -> list[float]:
        return [p - q for p, q in zip(getattr(self, numerator), getattr(self, denominator), strict=True)]


def sequences(rows: list[dict[str, Any]]) -> list[Sequence]:
    """Return the rows without masked tokens."""
    found = []
    for row in rows:
        length = len(row["rollout_log_probs"])
        mask = row.get("response_mask", [1] * length)
        live = [t for t in range(length) if mask[t] == 1]
        turn, number = [], -1
        for t in live:
            number += t == 0 or mask[t - 1] != 1
            turn.append(number)
        advantages = row.get("advantages", 0.0)
        advantages = advantages if isinstance(advantages, list) else [advantages] * length
        logs = (row.get(f"{policy}_log_probs") for policy in ("rollout", "old", "current"))
        columns = [[] if x is None else [x[t] for t in live] for x in (*logs, advantages)]
        facts = row.get("group_id"), length, row.get("sequence_id", ""), row.get("step")
        found.append(Sequence(*columns, turn, *facts))
    return found


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def std(values: list[float]) -> float:
    """Compute the population's standard deviation, in two passes."""
    middle = mean(values)
    return math.sqrt(math.fsum((x - middle) ** 2 for x in values) / len(values)) if values else math.nan


def exact_mean(values: list[Any]) -> float:
    """Compute the mean of mpmath numbers."""
    return float(mpmath.fsum(values) / len(values)) if values else math.nan


# ---------------------------------------------------------------- the policy gap (§5)


def policy_gap(data: list[Sequence], prefix: str) -> dict[str, float]:
    """Compute every policy-gap metric of one drift, under its name."""
    below, above = DRIFTS[prefix]
    there = [s for s in data if s.n]
    per_sequence = [s.delta(above, below) for s in there]
    deltas = [d for one in per_sequence for d in one]
    q = [x for s in there for x in getattr(s, below)]
    p = [x for s in there for x in getattr(s, above)]
    probs_q, probs_p = [math.exp(x) for x in q], [math.exp(x) for x in p]
    gaps = [abs(exact_prob_diff(a, b)) for a, b in zip(p, q, strict=True)]
    mean_delta = [mean(one) for one in per_sequence]
    found = {
        "k1": mean([-d for d in deltas]),
        "k2": mean([d * d / 2 for d in deltas]),
        "k3": exact_mean([mpmath.expm1(d) - mpmath.mpf(d) for d in deltas]),
        "mean_ratio": exact_mean([mpmath.exp(d) for d in deltas]),
        "chi2_token": exact_mean([mpmath.expm1(2 * mpmath.mpf(d)) for d in deltas]),
        "ppl_train": mean([math.exp(-mean(getattr(s, above))) for s in there]),
        "ppl_rollout": mean([math.exp(-mean(getattr(s, below))) for s in there]),
        "ppl_ratio": exact_mean([mpmath.exp(-d) for d in mean_delta]),
        "ppl_ratio_pooled": math.exp(-mean(deltas)),
        "log_ppl_diff": mean([-d for d in mean_delta]),
        "log_ppl_abs_diff": mean([abs(d) for d in mean_delta]),
        "log_ppl_diff_max": max(-d for d in mean_delta),
        "log_ppl_diff_min": min(-d for d in mean_delta),
        "prob_diff_mean": mean(gaps),
        "prob_diff_std": std(gaps),
        "prob_diff_max": max(gaps),
        "pearson": pearson(probs_p, probs_q),
        "mult_prob_error": exact_mean([mpmath.exp(abs(d)) for d in deltas]),
        "abs_log_ratio": mean([abs(d) for d in deltas]),
        "log_ratio_std": std(deltas),
        "log_ratio_min": min(deltas),
        "log_ratio_max": max(deltas),
        "tv": exact_mean([abs(mpmath.expm1(d)) / 2 for d in deltas]),
        "surrogate_gain": surrogate_gain(there, prefix),
    }
    found["tokens_differ"] = sum(d != 0 for d in deltas) / len(deltas)
    for tau in (1.1, 2.0, 5.0, 10.0):
        name = "f_" + f"{tau:g}".replace(".", "_")
        found[name] = sum(abs(d) > math.log(tau) for d in deltas) / len(deltas)
    return found


def surrogate_gain(data: list[Sequence], prefix: str) -> float:
    """Compute cov(A, min(r, 2)) over tokens, in two passes; r − 1 varies as r does, and keeps its digits."""
    below, above = DRIFTS[prefix]
    a = [x for s in data for x in s.advantages]
    moved = [min(math.expm1(min(d, 1.0)), 1.0) for s in data for d in s.delta(above, below)]
    usual, middle = mean(a), mean(moved)
    return mean([(x - usual) * (y - middle) for x, y in zip(a, moved, strict=True)])


def exact_prob_diff(p: float, q: float) -> float:
    return float(mpmath.exp(p) - mpmath.exp(q))


def pearson(x: list[float], y: list[float]) -> float:
    mx, my = mean(x), mean(y)
    cov = math.fsum((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    spread = math.sqrt(math.fsum((a - mx) ** 2 for a in x) * math.fsum((b - my) ** 2 for b in y))
    return cov / spread if spread else math.nan


def ess(weights: list[Any], n: int) -> float:
    """Compute Kish's effective sample size, (Σw)² / (n Σw²)."""
    return float(mpmath.fsum(weights) ** 2 / (n * mpmath.fsum(w * w for w in weights)))


def raw_weights(data: list[Sequence], prefix: str) -> dict[str, float]:
    """Return the raw weights of DESIGN §5: r of tokens and e^{ΣΔ} of sequences."""
    below, above = DRIFTS[prefix]
    per_sequence = [s.delta(above, below) for s in data if s.n]
    deltas = [d for one in per_sequence for d in one]
    tokens = [mpmath.exp(d) for d in deltas]
    products = [mpmath.exp(mpmath.fsum(one)) for one in per_sequence]
    k3 = sorted((mpmath.expm1(d) - mpmath.mpf(d) for d in deltas), reverse=True)
    top = math.ceil(len(k3) / 100)
    total = mpmath.fsum(k3)
    return {
        "ess_tokens": ess(tokens, len(tokens)),
        "ess_sequences": ess(products, len(products)),
        "max_weight_share": float(max(tokens) / mpmath.fsum(tokens)),
        "max_weight_share_sequences": float(max(products) / mpmath.fsum(products)),
        "k3_top1_share": float(mpmath.fsum(k3[:top]) / total) if total else math.nan,
    }


def chi2_sequence(data: list[Sequence], prefix: str) -> Any:
    """Compute E[e^{2ΣΔ}] − 1 over sequences, an mpmath number: it need not fit a double."""
    below, above = DRIFTS[prefix]
    sums = [mpmath.fsum(s.delta(above, below)) for s in data if s.n]
    return mpmath.fsum(mpmath.expm1(2 * x) for x in sums) / len(sums)


def scales(data: list[Sequence], prefix: str) -> dict[str, float]:
    """Compute the mean absolute terms of means whose terms have both signs, which rounding is relative to."""
    below, above = DRIFTS[prefix]
    there = [s for s in data if s.n]
    deltas = [d for s in there for d in s.delta(above, below)]
    moved = [min(math.expm1(min(d, 1.0)), 1.0) for d in deltas]
    advantages = [a for s in there for a in s.advantages]
    sizes = [abs(a * x) for a, x in zip(advantages, moved, strict=True)]
    return {
        "surrogate_gain": mean(sizes) + abs(mean(advantages)) * mean([abs(x) for x in moved]),
        "k1": mean([abs(d) for d in deltas]),
        "chi2_token": mean([abs(math.expm1(min(2 * d, 700))) for d in deltas]),
        "log_ppl_diff": mean([abs(mean(s.delta(above, below))) for s in there]),
        "chi2_sequence": float(
            mpmath.fsum(abs(mpmath.expm1(2 * mpmath.fsum(s.delta(above, below)))) for s in there) / len(there)
        ),
    }


# ---------------------------------------------------------------- presets (§6)


@dataclass
class Applied:
    """Effect of a preset on a sequence: each token's final weight before normalisation, and kept tokens."""

    weights: list[float]
    kept: list[bool]
    vetoed: bool
    high: list[bool]  # one per weight: per token, or one for the sequence
    low: list[bool]
    catastrophic: int
    losses: list[float] = field(default_factory=list)
    clipped: list[bool] = field(default_factory=list)
    clipped_lower: list[bool] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)

    @property
    def kept_tokens(self) -> int:
        return sum(self.kept)


def clamp(x: float, bound: float | None) -> float:
    return x if bound is None else min(max(x, -bound), bound)


def weigh(s: Sequence, delta: list[float], weight: Any) -> tuple[list[float], list[bool], list[bool]]:
    """Compute each token's final weight, and which are above the upper and below the lower bound.

    The safety is a bound on the log of each ratio, or of what is aggregated of them.
    """
    each, whole = (weight.safety, None) if weight.safety_at == "token" else (None, weight.safety)
    logs = [clamp(x, whole) for x in _aggregated(s, [clamp(x, each) for x in delta], weight.over)]
    high = [weight.upper is not None and x > math.log(weight.upper) for x in logs]
    low = [bool(weight.lower) and x < math.log(weight.lower) for x in logs]
    final = []
    for log, above, below in zip(logs, high, low, strict=True):
        w = math.exp(clamp(log, OVERFLOW))
        if weight.action == "mask" and (above or below):
            w = 0.0
        if weight.action == "truncate":
            w = weight.upper if above else weight.lower if below else w
        if weight.overflow == "zero" and log > FLOAT32_OVERFLOW:
            w = 0.0
        final.append(w)
    return final, high, low


def other(log: Any) -> Any:
    """Compute the probability of any other token, from the log-probability of this one."""
    return -mpmath.expm1(log)


def coins(p: Any, q: Any) -> Any:
    """Compute KL(q || p) of "this token or another", probabilities held within [1e-8, 1 − 1e-8]."""
    held = [min(max(x, mpmath.mpf(COIN)), 1 - mpmath.mpf(COIN)) for x in (mpmath.exp(p), mpmath.exp(q))]
    (this_p, other_p), (this_q, other_q) = ((x, 1 - x) for x in held)
    return this_q * mpmath.log(this_q / this_p) + other_q * mpmath.log(other_q / other_p)


def smoothed(d: Any, q: Any) -> Any:
    """Compute the KL of "this token or another", with 1e-8 added to both probabilities of another."""
    train = max(other(q + d), mpmath.mpf(0))
    return -mpmath.exp(q) * d + other(q) * mpmath.log((other(q) + COIN) / (train + COIN))


EXACT = {
    "ratio": lambda d, q: d,  # in logs, like its bounds
    "k1": lambda d, q: -d,
    "k2": lambda d, q: d * d / 2,
    "k3": lambda d, q: mpmath.expm1(d) - d,
    "k3_reverse": lambda d, q: mpmath.expm1(-d) + d,
    "mult_prob_error": lambda d, q: mpmath.exp(abs(d)),
    "prob_diff": lambda d, q: mpmath.exp(q) * mpmath.expm1(d),
    "tv": lambda d, q: abs(mpmath.expm1(d)) / 2,
    "binary_kl": smoothed,
    "binary_kl_max": lambda d, q: max(coins(q + d, q), coins(q, q + d)),
}
"""Statistic of one token → its value, from the mpmath numbers Δ and log π_rollout."""


@cache
def value(statistic: str, d: float, q: float) -> float:
    """Compute a statistic of one token to 40 digits; cached, since presets ask for the same tokens."""
    return float(EXACT[statistic](mpmath.mpf(d), mpmath.mpf(q)))


def judged(s: Sequence, delta: list[float], rule: Any) -> list[float]:
    """Compute the number that a rejection rule judges at each token.

    The safety is a bound on a log-ratio: on the aggregated one where there is such a thing (ratio, k1 =
    −log r), on each token's for a statistic that is aggregated after it was taken.
    """
    is_log = rule.statistic in ("ratio", "k1")
    late = is_log and rule.safety_at == "aggregate"
    each, whole = (None, rule.safety) if late else (rule.safety, None)
    x = [value(rule.statistic, clamp(d, each), q) for d, q in zip(delta, s.rollout, strict=True)]
    return [clamp(y, whole) for y in _aggregated(s, x, rule.over)]


AGGREGATES = {"sum": math.fsum, "mean": mean, "max": max, "min": min}


def _aggregated(s: Sequence, x: list[float], over: str) -> list[float]:
    """Aggregate over the sequence or each turn."""
    if over in ("token", "batch"):
        return x
    how = AGGREGATES["mean" if over == "segment" else over]
    units = s.turn if over == "segment" else [0] * s.n
    found = {unit: how([y for y, at in zip(x, units, strict=True) if at == unit]) for unit in set(units)}
    return [found[unit] for unit in units]


def cut(values: list[float], upper: float) -> float:
    """Return the cut: tokens from this value on are dropped, until the mean of the rest is below `upper`.

    Never everything: the smallest value stays.
    """
    rest = sorted(values)
    smallest, gone = rest[0] if rest else 0.0, math.inf
    while rest and not math.fsum(rest) / len(rest) < upper:
        gone = rest.pop()
    return gone if gone > smallest else math.nextafter(smallest, math.inf)


Cuts = dict[Any, float]  # batch-wide rule → the value from which on tokens of a trainer batch are dropped


def passes(s: Sequence, delta: list[float], rule: Any, cuts: Cuts) -> list[bool]:
    """Return whether a rule keeps each token: its bounds hold, or it does not act."""
    if rule.over == "batch":
        return [x < cuts[rule] for x in judged(s, delta, rule)]
    in_log = rule.statistic == "ratio"
    upper = rule.upper if rule.upper is None or not in_log else math.log(rule.upper)
    lower = rule.lower if rule.lower is None or not in_log else math.log(rule.lower)
    of_tokens = rule.over in ("token", "segment") or rule.advantage == "away"  # else sequences are dropped
    out = []
    for t, x in enumerate(judged(s, delta, rule)):
        advantage = s.advantages[t] if of_tokens else mean(s.advantages)
        above, below = upper is not None and x > upper, lower is not None and x < lower
        gone = {
            "any": above or below,
            "positive": (above or below) and advantage > 0,
            "negative": (above or below) and advantage < 0,
            "against": (above and advantage > 0) or (below and advantage < 0),
            "against_or_zero": (above and advantage > 0) or (below and advantage <= 0),
            "away": (above or below) and advantage * delta[t] > 0,
        }[rule.advantage]
        out.append(not gone)
    return out


def cuts_of(data: list[Sequence], preset: Any) -> dict[Any, Cuts]:
    """Return the cuts of each trainer batch: the rows of one `step`, or all those without one."""
    found: dict[Any, Cuts] = {s.step: {} for s in data}
    for step, cuts in found.items():
        for rule in preset.reject:
            if rule.over == "batch":
                rows = [judged(s, s.delta(preset.policy), rule) for s in data if s.step == step]
                cuts[rule] = cut([x for row in rows for x in row], rule.upper)
    return found


def apply(s: Sequence, preset: Any, cuts: Cuts) -> Applied:
    """Apply one preset to one sequence."""
    delta, weight, veto = s.delta(preset.policy), preset.weight, preset.veto
    catastrophic = 0
    if veto:
        under, over = veto.lower and math.log(veto.lower), veto.upper and math.log(veto.upper)
        catastrophic = sum(
            (under is not None and d < under) or (over is not None and d > over) for d in delta
        )
    kept = [catastrophic == 0] * s.n
    for rule in preset.reject:
        kept = [k and ok for k, ok in zip(kept, passes(s, delta, rule, cuts), strict=True)]
    weights, high, low = [1.0] * s.n, [False] * s.n, [False] * s.n
    if weight:
        weights, high, low = weigh(s, delta, weight)
        if weight.over in ("sum", "mean"):
            high, low = high[:1], low[:1]
    done = Applied(weights, kept, catastrophic > 0, high, low, catastrophic)
    if s.current:
        _losses(done, s, preset)
    return done


def weighted_loss(preset: Any) -> bool:
    """Return whether the weight multiplies the loss: not if its own ratio is around the rollout."""
    return preset.policy == "old" or preset.loss in ("reinforce", "surrogate")


def _losses(done: Applied, s: Sequence, preset: Any) -> None:
    """Fill in each token's loss, whether it is clipped, by the dual clip too, and its KL."""
    anchor, clip = s.old if preset.policy == "old" else s.rollout, preset.clip
    logs = [now - then for now, then in zip(s.current, anchor, strict=True)]
    most = clip.safety or math.inf
    done.kl = [clamp(-u, most) if preset.loss in ("ppo_clip", "cispo") else -u for u in logs]
    if preset.loss == "gspo":  # the mean of u, bounded from above only
        logs = [mean(logs)] * s.n
    for a, now, u in zip(s.advantages, s.current, logs, strict=True):
        u = 0.0 if preset.loss in ("reinforce", "surrogate") else u  # they have no ratio
        r = math.exp(min(u, most) if preset.loss == "gspo" else clamp(u, most))
        held = r if clip.low is None else max(r, 1 - clip.low)
        held = held if clip.high is None else min(held, 1 + clip.high)
        loss, clipped, dual = {
            "reinforce": (-a * now, False, False),
            "surrogate": (-a, False, False),
            "cispo": (-a * held * now, held != r, False),
        }.get(preset.loss) or _ppo(a, r, held, clip)
        done.losses.append(loss)
        done.clipped.append(clipped)
        done.clipped_lower.append(dual)


def _ppo(a: float, r: float, held: float, clip: Any) -> tuple[float, bool, bool]:
    """Compute PPO with Schulman's clip and Ye's dual clip, for A < 0."""
    worse, clipped = max(-a * r, -a * held), -a * held > -a * r
    if a < 0 and clip.dual is not None and worse > -a * clip.dual:
        return -a * clip.dual, clipped, True
    return worse, clipped, False


def preset_metrics(data: list[Sequence], preset: Any) -> tuple[dict[str, float], list[dict[str, Any]], float]:
    """Compute every preset metric; per row kept tokens, weight sum, vetoed; the loss terms' mean size.

    That size is what the rounding of the losses is relative to.
    """
    cuts = cuts_of(data, preset)
    done = [apply(s, preset, cuts[s.step]) for s in data]
    norms = _norms(data, done, preset)
    for s, one in zip(data, done, strict=True):
        one.weights = [w / norms[s.step] for w in one.weights]
    pairs = [(s, one) for s, one in zip(data, done, strict=True) if s.n]
    tokens = sum(s.n for s, _ in pairs)
    kept = [w for _, one in pairs for w, k in zip(one.weights, one.kept, strict=True) if k]
    left = [[d for d, k in zip(s.delta(preset.policy), one.kept, strict=True) if k] for s, one in pairs]
    high = [x for _, one in pairs for x in one.high]
    low = [x for _, one in pairs for x in one.low]
    per_sequence = [
        math.fsum(w for w, k in zip(one.weights, one.kept, strict=True) if k) / s.n for s, one in pairs
    ]
    found = {
        "weight_mean": mean(kept),
        "weight_std": std(kept),
        "weight_min": min(kept, default=math.nan),
        "weight_max": max(kept, default=math.nan),
        "ess_tokens": _ess(kept, tokens),
        "ess_sequences": _ess(per_sequence, len(pairs)),
        "truncated_high": sum(high) / len(high),
        "truncated_low": sum(low) / len(low),
        "tokens_rejected": (tokens - len(kept)) / tokens,
        "tokens_weighted": sum(w > 0 for w in kept) / tokens,
        "sequences_dropped": sum(one.kept_tokens == 0 for _, one in pairs) / len(pairs),
        "sequences_touched": sum(one.kept_tokens < s.n for s, one in pairs) / len(pairs),
        "vetoed": sum(one.vetoed for _, one in pairs) / len(pairs),
        "catastrophic_tokens": sum(one.catastrophic for _, one in pairs) / tokens,
        # of the kept tokens; w² − 1 as (w − 1)(w + 1), for weights near 1
        "k3": mean([value("k3", d, 0.0) for deltas in left for d in deltas]),
        "ppl_ratio": mean([math.exp(-mean(deltas)) for deltas in left if deltas]),
        "chi2_token": mean([(w - 1) * (w + 1) for w in kept]),
        "chi2_sequence": mean(
            [(v - 1) * (v + 1) for v, some in zip(per_sequence, left, strict=True) if some]
        ),
    }
    if any(s.current for s, _ in pairs):
        found |= _loss_metrics(pairs, preset, tokens, len(kept), max(s.response for s in data))
    table = [
        {
            "kept_tokens": one.kept_tokens,
            "weight_sum": math.fsum(one.weights) if preset.weight else None,
            "vetoed": one.vetoed,
        }
        for one in done
    ]
    sizes = [
        abs(x) * (w if weighted_loss(preset) else 1.0)
        for one in done
        for x, w, k in zip(one.losses, one.weights, one.kept, strict=True)
        if k
    ]
    return found, table, math.fsum(sizes) / max(len(sizes), 1)


def dropped_by_length(data: list[Sequence], preset: Any) -> dict[str, float]:
    """Compute which share of the sequences of each octave of length is dropped."""
    cuts = cuts_of(data, preset)
    dropped: dict[str, list[float]] = {}
    for s in data:
        if s.n:
            low = 2 ** math.floor(math.log2(s.n))
            gone = apply(s, preset, cuts[s.step]).kept_tokens == 0
            dropped.setdefault(f"{low}–{2 * low - 1}", []).append(float(gone))
    return {lengths: mean(each) for lengths, each in dropped.items()}


def _ess(weights: list[float], n: int) -> float:
    return math.fsum(weights) ** 2 / (n * math.fsum(w * w for w in weights)) if any(weights) else math.nan


def _norms(data: list[Sequence], done: list[Applied], preset: Any) -> dict[Any, float]:
    """Compute per step the mean weight before rejection: over tokens for `token`, else over sequences.

    A mean of at most 1e-8 is not divided by (verl's guard).
    """
    steps = {s.step for s in data}
    if preset.weight is None or not preset.weight.normalize:
        return dict.fromkeys(steps, 1.0)
    parts: dict[Any, list[float]] = {step: [] for step in steps}
    for s, one in zip(data, done, strict=True):
        if s.n:
            parts[s.step] += one.weights if preset.weight.over == "token" else [mean(one.weights)]
    means = {step: mean(part) if part else 1.0 for step, part in parts.items()}
    return {step: found if found > 1e-8 else 1.0 for step, found in means.items()}


def _loss_metrics(
    pairs: list[tuple[Sequence, Applied]], preset: Any, tokens: int, kept: int, longest: int
) -> dict[str, float]:
    sums, means, clipped, lower, kl = [], [], 0, 0, []
    for _, one in pairs:
        weights = one.weights if weighted_loss(preset) else [1.0] * len(one.losses)
        terms = [w * x for w, x, k in zip(weights, one.losses, one.kept, strict=True) if k]
        sums.append(math.fsum(terms))
        if terms:
            means.append(mean(terms))
        clipped += sum(c and k for c, k in zip(one.clipped, one.kept, strict=True))
        lower += sum(c and k for c, k in zip(one.clipped_lower, one.kept, strict=True))
        kl += [x for x, k in zip(one.kl, one.kept, strict=True) if k]
    total, left = math.fsum(sums), len(means)

    of_kept, of_sequences = 1 / kept if kept else math.nan, 1 / left if left else math.nan
    return {
        "pg_loss": total * of_kept,
        "pg_loss_kept": total / tokens,
        "pg_loss_own": total / tokens if preset.denominator == "all" else total * of_kept,
        "pg_loss_seq_sum": total * of_sequences,
        "pg_loss_seq_mean": mean(means),
        "pg_loss_seq_norm": total * of_sequences / longest,
        "pg_clipfrac": clipped * of_kept,
        "pg_clipfrac_lower": lower * of_kept,
        "ppo_kl": mean(kl),
    }


# ---------------------------------------------------------------- dumps to try it on


def make_rows(sigma: float, seed: int = 0, many: int = 30, outliers: float = 0.0) -> list[dict[str, Any]]:
    """Make ragged rows: holes in the mask, rows all masked, an empty row, groups, both signs of advantage.

    `sigma` is the spread of Δ; `outliers` the share of tokens with 20 < |Δ| < 40, at most three to a row.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(many):
        n = 0 if i == 3 else int(rng.integers(1, 60))
        rollout = -rng.exponential(0.7, n)
        old = np.minimum(rollout + sigma * rng.standard_normal(n), 0.0)
        current = np.minimum(old + sigma / 2 * rng.standard_normal(n), 0.0)
        for t in np.flatnonzero(rng.random(n) < outliers)[:3]:
            jump = rng.uniform(20, 40) * rng.choice((-1, 1))
            rollout[t], old[t] = (-45.0, -45.0 + jump) if jump > 0 else (rollout[t], rollout[t] + jump)
            current[t] = min(old[t] + 0.1, 0.0)
        mask = (rng.random(n) > 0.15).astype(int) if i % 3 else np.ones(n, int)
        if i in (5, 11):
            mask[:] = 0
        sign = (-1.0, 1.0, 0.0, 1.0)[i % 4]
        rows.append(
            {
                "sequence_id": f"s{i:03d}",
                "group_id": f"g{i // 3}" if i % 7 else f"lone{i}",
                "step": i % 4,
                "policy_lag": i % 3,
                "host": f"h{i % 2}",
                "rollout_log_probs": rollout.tolist(),
                "old_log_probs": old.tolist(),
                "current_log_probs": current.tolist(),
                "response_mask": mask.tolist(),
                "advantages": (sign * rng.uniform(0.5, 2.0, n) + (0.7 if i % 5 == 0 else 0.0)).tolist(),
                "token_ids": rng.integers(0, 1000, n).tolist(),
            }
        )
    return rows


def write(rows: list[dict[str, Any]], path: Path, row_group: int | None = None, floats: Any = None) -> str:
    """Write the rows as a Parquet file; `floats` replaces float64 as the type of the lists."""
    table, lists = pa.Table.from_pylist(rows), pa.list_(pa.float64())
    if floats:
        kinds = [one.with_type(pa.list_(floats)) if one.type == lists else one for one in table.schema]
        table = table.cast(pa.schema(kinds))
    pq.write_table(table, path, row_group_size=row_group or max(len(rows), 1))
    return str(path)

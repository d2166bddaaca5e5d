"""Restatement of what slime 624b824a8 logs of a global batch, on plain lists; settings as in `slime`.

With `miles` what miles 31f1ca961 does: it compares the anchor with the rollout where slime has π_θ, and logs
the ESS of the update and a bounded k3 besides.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.trainers.samples import Listed, Sample, clamp, clip_wins, each, exp, mean

Rows = list[float]


def reduce(lists: Listed, batch: list[Sample]) -> float:
    """Apply the default reducer: a mean per sample, zeroed tokens included, then over all samples."""
    return math.fsum(math.fsum(one) / max(len(s), 1) for one, s in zip(lists, batch, strict=True)) / len(
        batch
    )


def spread(values: Rows, batch: list[Sample]) -> Listed:
    """Spread one number of a sample to each of its tokens: none for a sample without one."""
    return [[value] * len(s) for value, s in zip(values, batch, strict=True)]


def of_loss(batch: list[Sample], anchor: str, keep: Listed | None, miles: bool = False) -> dict[str, float]:
    """Log the loss's metrics: of the anchor against the rollout, or of π_θ when the anchor is the rollout."""
    keep = keep or spread([1.0] * len(batch), batch)

    def masked(lists: Listed) -> float:
        zeroed = [[x * on for x, on in zip(*pair, strict=True)] for pair in zip(lists, keep, strict=True)]
        return reduce(zeroed, batch)

    moves = [one.update(anchor) for one in batch]
    wins = [
        [float(clip_wins(exp(u), a)) for u, a in zip(move, one.advantages, strict=True)]
        for move, one in zip(moves, batch, strict=True)
    ]
    compared = anchor if miles else "current" if anchor == "rollout" else "old"
    gaps = [one.gap(compared) for one in batch]
    found = {
        "train_rollout_logprob_abs_diff": masked(each(abs, gaps)),
        "pg_clipfrac": masked(wins),
        "ppo_kl": masked(each(lambda u: -u, moves)),
    }
    if miles:
        found["ess_ratio"] = mean([ess(move) for move in moves])
        found["train_rollout_kl"] = masked(each(k3, gaps))
    return found


def ess(moves: Rows) -> float:
    """Compute the ESS of the weights of one sample."""
    w = [exp(clamp(u, -20, 20)) for u in moves]
    return math.fsum(w) ** 2 / (max(len(w), 1) * max(math.fsum(x * x for x in w), 1e-8))


def k3(d: float) -> float:
    """Compute e^d − 1 − d, d within ±20 and the result at most 10."""
    d = clamp(d, -20, 20)
    return clamp(math.expm1(d) - d, -10, 10)


def ois(batch: list[Sample]) -> float:
    return reduce([[exp(u) for u in one.update()] for one in batch], batch)


def tis(
    batch: list[Sample],
    *,
    tis_clip: float = 2.0,
    tis_clip_low: float = 0.0,
    icepop: bool = False,
    miles: bool = False,
) -> dict[str, float]:
    ratios = [[exp(d) for d in one.gap()] for one in batch]

    def weight(r: float) -> float:
        if icepop:
            return r if tis_clip_low <= r <= tis_clip else 0.0
        return clamp(r, tis_clip_low, tis_clip)

    found = {
        **of_loss(batch, "old", None, miles),
        "ois": ois(batch),
        "tis": reduce(ratios, batch),
        "tis_clipfrac": reduce(each(lambda r: float(weight(r) != r), ratios), batch),
        "tis_abs": reduce(each(lambda r: abs(r - 1), ratios), batch),
    }
    return {f"train/{name}": value for name, value in found.items()}


# ---------------------------------------------------------------- mis.py


def mis(
    batch: list[Sample],
    *,
    use_tis: bool = True,
    tis_level: str = "token",
    tis_mode: str = "truncate",
    tis_lower_bound: float | None = 0.5,
    tis_upper_bound: float = 2.0,
    use_rs: bool = False,
    rs_level: str = "token",
    rs_lower_bound: float | None = None,
    rs_upper_bound: float | None = None,
    rs_veto_threshold: float | None = None,
    tis_batch_normalize: bool = False,
    miles: bool = False,
) -> dict[str, float]:
    found = gap(batch)
    if not use_tis:
        return named(found, batch, None, miles)
    low = 1 / tis_upper_bound if tis_lower_bound is None else tis_lower_bound
    high, keep = tis_upper_bound, spread([1.0] * len(batch), batch)
    weights = level(batch, tis_level)
    found["tis_weight_before_bound"] = weights
    below, above = each(lambda w: float(w < low), weights), each(lambda w: float(w > high), weights)
    if tis_mode == "truncate":
        found["tis_truncate_fraction"] = above
        weights = each(lambda w: clamp(w, 0, high), weights)
    else:
        found |= {f"tis_{tis_mode}_fraction_low": below, f"tis_{tis_mode}_fraction_high": above}
    if tis_mode == "clip":
        weights = each(lambda w: clamp(w, low, high), weights)
    elif tis_mode == "mask":
        keep = inside(keep, below, above)
    found["tis_weight_after_bound"] = found["is_ratio_mean_after_tis_rs"] = weights
    if use_rs:
        bottom = low if rs_lower_bound is None else rs_lower_bound
        top = high if rs_upper_bound is None else rs_upper_bound
        judged = level(batch, rs_level)
        below, above = each(lambda w: float(w < bottom), judged), each(lambda w: float(w > top), judged)
        found |= {"rs_mask_fraction_low": below, "rs_mask_fraction_high": above}
        keep = inside(keep, below, above)
        if rs_veto_threshold is not None:
            hits = [[float(d < math.log(rs_veto_threshold)) for d in one.gap()] for one in batch]
            rows = spread([float(any(one)) for one in hits], batch)
            found |= {"rs_catastrophic_token_fraction": hits, "rs_catastrophic_seq_fraction": rows}
            keep = inside(keep, rows)
    if tis_batch_normalize:
        factor = batch_mean(weights, tis_level)
        weights = each(lambda w: w / factor, weights)
        found["batch_norm_factor"] = spread([factor] * len(batch), batch)
    for name, of in (("mean", mean), ("min", min), ("max", max)):
        found[f"is_ratio_{name}_final"] = spread([of(one) if one else 0.0 for one in weights], batch)
    return named(found, batch, keep, miles)


def named(
    found: dict[str, Listed], batch: list[Sample], keep: Listed | None, miles: bool = False
) -> dict[str, float]:
    """Log by name: the helper's own under the mask before it, the loss's under the mask after it."""
    own = {f"mis_{name}": reduce(lists, batch) for name, lists in found.items()}
    loss = of_loss(batch, "old", keep, miles) | {"ois": ois(batch)}
    return {f"train/{name}": x for name, x in (loss | own).items()}


def inside(keep: Listed, *flags: Listed) -> Listed:
    for one in flags:
        keep = [[k * (1 - f) for k, f in zip(*pair, strict=True)] for pair in zip(keep, one, strict=True)]
    return keep


def level(batch: list[Sample], name: str) -> Listed:
    gaps = [one.gap() for one in batch]
    if name != "token":
        aggregate: Callable[[Rows], float] = math.fsum if name == "sequence" else mean
        gaps = spread([aggregate(one) for one in gaps], batch)
    return each(lambda d: exp(clamp(d, -20, 20)), gaps)


def batch_mean(weights: Listed, name: str) -> float:
    """Compute the mean over tokens, or over all samples, one without a token being 0."""
    if name == "token":
        found = math.fsum(x for one in weights for x in one) / max(sum(len(one) for one in weights), 1)
    else:
        found = mean([mean(one) for one in weights])
    return found if found > 1e-8 else 1.0


def gap(batch: list[Sample]) -> dict[str, Listed]:
    old, rollout = [mean(one.old) for one in batch], [mean(one.rollout) for one in batch]
    difference = [r - o for r, o in zip(rollout, old, strict=True)]
    gaps = [one.gap() for one in batch]
    square = [mean([exp(2 * clamp(d, -20, 20)) for d in one]) - 1 for one in gaps]
    product = [exp(2 * clamp(math.fsum(one), -20, 20)) - 1 for one in gaps]
    rows = {
        "training_log_ppl": [-x for x in old],
        "training_ppl": [exp(-x) for x in old],
        "rollout_log_ppl": [-x for x in rollout],
        "rollout_ppl": [exp(-x) for x in rollout],
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": [abs(x) for x in difference],
        "ppl_ratio": [exp(x) for x in difference],
        "chi2_token": square,
        "chi2_seq": product,
    }
    found = {name: spread(values, batch) for name, values in rows.items()}
    return found | {"kl": each(lambda d: -d, gaps), "k3_kl": each(lambda d: exp(d) - d - 1, gaps)}

"""What trainers log of one training step: for each a function of the step's arrays → {logged name: number}.

A step is the rows (sequences) of one update, under the preset that corrects it. Numbers of its tokens are
[T], of its rows [S]. r = π_train/π_rollout = e^Δ of a token, Δ in nats; e^u is the ratio that the loss clips,
π_θ/π_anchor. Where a trainer averages over micro-batches or ranks without their sizes, the step is one. What
lacks a column is left out, what is undefined is NaN. Each function was read off the commit that it names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from offpol_diag.core.evaluate import loss_of, rules_of
from offpol_diag.core.gap import Tokens
from offpol_diag.core.segments import Array
from offpol_diag.core.study import Study
from offpol_diag.core.whole_steps import WholeSteps
from offpol_diag.dump.batch import Batch
from offpol_diag.presets import OF_SEQUENCES, SMALLEST_NORM, Over, Preset, Reject, Statistic, Veto, Weight
from offpol_diag.trainers import TRAINERS as ALL_TRAINERS

Logged = dict[str, float]
EPS, SAFETY = 1e-8, 20.0
"""What several trainers add to a denominator; bound on log-ratios before exp in most trainers, nats."""
LARGEST_K3, PRIME_LARGEST = math.exp(690.0), 1e30
"""Bounds on a token's k3: so that its sum stays finite, and that of prime-rl."""


def steps_of(batch: Batch, presets: Sequence[Preset], columns: Collection[str]) -> list[Step]:
    """Return a step under each preset whose columns the dump has; advantages may be made of rewards."""
    study = Study.of(columns, presets)
    whole = WholeSteps.of_batch(study, batch)
    batch = whole.filled(batch)
    tokens = Tokens.of(batch, partial(whole.cut, batch))
    return [Step(batch, preset, tokens) for preset in study.presets]


@dataclass(eq=False)
class Step:
    """A step, its rows with all columns that the trainer has, under the preset that corrected it.

    Attributes:
        runs: the tokens of each row, S rows of T tokens; `lengths` [S] of these, and `filled`: has a token.
        train, delta: log π_old, or log π_θ in bypass, and Δ, [T] nats; `held`: Δ within ±20.
        kept, kept_rows: tokens that pass all rules and the veto, [T] bool; rows that pass those on rows, [S].
        weights: of each token, [T]; `of_units`: before rejection and normalising, of each row where `by_row`.
        above, below, bounded: tokens of each row whose weight is beyond a bound, [S].
        token_u, u: log of the loss's own ratio, [T] nats; the same, or its mean over the row for GSPO.
    """

    batch: Batch
    preset: Preset
    tokens: Tokens

    def __post_init__(self) -> None:
        batch, tokens, policy, weight = self.batch, self.tokens, self.preset.policy, self.preset.weight
        rules, runs = rules_of(self.preset), tokens.sequences
        self.loss, self.runs, self.lengths, self.filled = loss_of(self.preset), runs, runs.n, runs.filled
        self.n_rows, self.n_tokens = batch.sequences, batch.tokens
        self.train, self.delta = tokens.log_probs[policy], tokens.log_ratio(policy, "rollout")
        self.held = self.delta.clip(-SAFETY, SAFETY)
        self.kept = tokens.kept(*rules)
        passing = tokens.passing_sequences(rules[1])
        self.kept_rows = np.ones(self.n_rows, bool) if passing is None else passing
        self.by_row, self.weights, self.bounded = False, np.ones(self.n_tokens), np.zeros(self.n_rows)
        if weight is not None:
            self.by_row, self.of_units = not weight.on_tokens, tokens.weight(policy, weight)
            self.weights = runs.spread(self.of_units) if self.by_row else self.of_units
            of_each = runs.n if self.by_row else 1
            self.above, self.below = (x * of_each for x in tokens.truncated(policy, weight))
            self.bounded = self.above + self.below
        if batch.current is not None:
            self.token_u = tokens.log_ratio("current", self.loss.anchor)
            self.u = runs.spread(runs.mean(self.token_u)) if self.loss.pooled else self.token_u

    def under(self, *rules: Reject, veto: Veto | None = None) -> Step:
        """Return the step under other rules and another veto, by default none."""
        return replace(self, preset=replace(self.preset, reject=rules, veto=veto))

    def rules(self, statistic: Statistic, over: str) -> list[Reject]:
        """Return the preset's rules on a statistic and what it is over."""
        return [rule for rule in self.preset.reject if (rule.statistic, rule.over) == (statistic, over)]

    def row_sum(self, x: Array) -> Array:
        """Sum over the tokens of each row, or count flags, [T] → [S]."""
        return self.runs.sum(x.astype(np.float64))

    def row_mean(self, x: Array, among: Array | None = None) -> Array:
        """Average over the tokens of each row, or those `among` them, [T] → [S]; 0 of a row without any."""
        if among is None:
            return self.row_sum(x) / self.runs.at_least_1
        return self.row_sum(np.where(among, x, 0.0)) / np.maximum(self.row_sum(among), 1)

    def mean_of_rows(self, x: Array) -> float:
        """Average over the tokens [T] of each row, then over rows; a row without tokens counts as 0."""
        return mean(self.row_mean(x))

    def over_tokens(self, x: Array) -> float:
        """Return a sum over tokens [T], or over what tokens of rows add up to [S], as verl's masked mean."""
        return float(x.sum() / (self.n_tokens + EPS))

    def k3(self, within: float | None = None) -> Array:
        """r − 1 − Δ of tokens, Δ within ±`within`, [T] nats."""
        return self.tokens.statistic("k3", self.preset.policy, within)

    def veto_hits(self, veto: Veto | None) -> Array:
        """Count the tokens of each row beyond a veto's bounds, [S]."""
        return self.tokens.veto_hits(self.preset.policy, veto) if veto else np.zeros(self.n_rows)

    @property
    def clipped(self) -> Array:
        """Tokens at which the clip of the loss acts, [T] bool."""
        flags = self.tokens.loss(self.loss).clipped
        return np.zeros(self.n_tokens, bool) if flags is None else flags


def named(prefix: str, numbers: Mapping[str, float]) -> Logged:
    """Return the numbers with a prefix before their names."""
    return {prefix + name: float(x) for name, x in numbers.items()}


def mean(x: Array) -> float:
    """Return the mean; NaN of nothing."""
    return float(x.sum() / np.float64(x.size))


def std(x: Array, less: int = 1) -> float:
    """Return the standard deviation with n − `less` of numbers that are near 0; NaN of too few."""
    squares = max((x**2).sum() - x.sum() ** 2 / max(x.size, 1), 0.0)
    return math.sqrt(squares / (x.size - less)) if x.size > less else math.nan


ENDS: Mapping[str, Callable[[Array], float]] = {
    "mean": mean,
    "avg": mean,
    "std": std,
    "min": lambda x: float(x.min(initial=math.inf)),
    "max": lambda x: float(x.max(initial=-math.inf)),
}
"""Word in a name → the number of an array; the extremes of nothing are ±inf."""


def ends(form: str, x: Array, words: str = "mean min max") -> Logged:
    """Return numbers of an array, named by their word in the place of `*`."""
    return {form.replace("*", word): ENDS[word](x) for word in words.split()}


def perplexities(train: Array, rollout: Array, average: Callable[[Array], float] = mean) -> Logged:
    """Return perplexities, by verl's names, of the mean log-probs of rows, [S] each."""
    of_rows = {
        "training_ppl": np.exp(-train),
        "training_log_ppl": -train,
        "rollout_ppl": np.exp(-rollout),
        "rollout_log_ppl": -rollout,
        "log_ppl_diff": rollout - train,
        "log_ppl_abs_diff": abs(rollout - train),
        "ppl_ratio": np.exp(rollout - train),
    }
    return {name: average(x) for name, x in of_rows.items()}


class Generation(NamedTuple):
    """In what a generation of verl's logs differs from the others."""

    since: tuple[int, ...]  # its first version
    groups: tuple[str, str] = ("rollout_corr/", "rollout_corr/")  # before numbers of the gap, and the rest
    rules: Literal["none", "ratio", "option"] = "option"  # of each: numbers of r, or of −log r by its option
    of_rows: tuple[str, ...] = ("sum", "mean")  # whose share beyond thresholds is of rows, not of tokens
    veto: bool = False  # it has one
    applied: bool = False  # weights are logged as they multiply the loss, not as r before truncation


GENERATIONS = {
    "2026-03": Generation((0, 8, 0), applied=True),
    "2026-01": Generation((0, 7, 1)),
    "2025-11": Generation((0, 6, 1), rules="ratio", veto=True),
    "2025-10": Generation((0,), ("mismatch/mismatch_", "mismatch/"), "none", ("sum",), veto=True),
}
"""verl's generations, the newest first."""


def verl(s: Step, generation: str) -> Logged:
    """verl 4424616d (2025-10), 418f964a (2025-11), b178a3cd (2026-01), 1dda039b (2026-03)."""
    g, preset, oldest = GENERATIONS[generation], s.preset, generation == "2025-10"
    gap = perplexities(*(s.row_sum(x) / (s.lengths + EPS) for x in (s.train, s.batch.rollout)))
    gap |= {"kl": s.over_tokens(-s.delta), "k3_kl": s.over_tokens(s.k3().clip(max=LARGEST_K3))}
    gap |= ends("log_ppl_diff_*", -s.row_mean(s.delta), "max min")
    if not oldest:
        gap["chi2_token"] = s.over_tokens(np.exp(s.held) ** 2) - 1
        gap["chi2_seq"] = mean(np.exp(2 * s.row_sum(s.delta).clip(-SAFETY, SAFETY))) - 1
    found = Logged()
    if preset.weight is not None:
        rules = [rule for rule in preset.reject if rule.statistic in ("ratio", "k1")]
        band = band_of(rules[0] if oldest and rules else preset.weight)
        found |= named("rollout_is_", verl_ratio(s, g, preset.weight.over, *band))
        if g.applied and preset.weight.action == "mask":
            found["rollout_is_oob_ratio"] = s.over_tokens(s.bounded)
        if preset.weight.normalize and not oldest:
            factor = mean(s.weights if preset.weight.over == "token" else s.row_mean(s.weights)[s.filled])
            found["rollout_is_batch_norm_factor"] = factor if factor > SMALLEST_NORM else 1.0
    if g.veto:
        hits = s.veto_hits(preset.veto)
        found["rollout_is_veto_fraction"] = mean(hits > 0)
        found["rollout_is_catastrophic_token_fraction"] = s.over_tokens(hits)
    for rule in preset.reject:
        if g.rules == "ratio":
            found |= named("rollout_rs_", verl_ratio(s, g, rule.over, *band_of(rule)))
        if g.rules == "option":
            found |= verl_option(s, rule)
    if preset.reject:
        bare, stem = s.under(*preset.reject), "rollout_is" if oldest else "rollout_rs"
        lost = s.row_sum(~bare.kept)
        found[f"{stem}_masked_fraction"] = s.over_tokens(lost)
        found[f"{stem}_seq_masked_fraction"] = mean((lost > 0) | (~bare.kept_rows & (g.rules != "option")))
    found = named(g.groups[0], gap) | named(g.groups[1], found)
    return found | (verl_trainer(s) if g.applied else {})


def verl_trainer(s: Step) -> Logged:
    """Return differences of the two policies' probabilities, and what the loss logs of its own ratio."""
    found = Logged()
    if s.preset.policy == "old":
        p, q = np.exp(s.train), np.exp(s.batch.rollout)
        found |= ends("training/rollout_probs_diff_*", abs(p - q), "max mean std")
        correlation = np.corrcoef(p, q)[0, 1] if s.n_tokens > 1 else math.nan
        found["training/rollout_actor_probs_pearson_corr"] = correlation
        found["training/rollout_probs_diff_valid"] = 1.0
    if s.batch.current is not None and s.batch.advantages is not None:
        loss, kl = s.tokens.loss(s.loss), s.tokens.loss_kl(s.loss.anchor, s.loss.kl_within)
        many = s.kept.sum() + EPS  # tokens that rejection leaves
        found["actor/ppo_kl"] = kl[s.kept].sum() / many
        for name, acts in (("pg_clipfrac", loss.clipped), ("pg_clipfrac_lower", loss.dual_clipped)):
            if s.preset.loss != "reinforce":
                found[f"actor/{name}"] = 0.0 if acts is None else acts[s.kept].sum() / many
    return found


def band_of(part: Weight | Reject) -> tuple[float, float]:
    """Return a part's bounds on r, [1/C, C] unless there is a lower one; those of k1 = −Δ are in nats."""
    low, high = part.lower, part.upper
    if isinstance(part, Reject) and part.statistic == "k1":
        low, high = (None if x is None else math.exp(-x) for x in (high, low))
    return low or 1 / (high or math.inf), high or math.inf


def verl_ratio(s: Step, g: Generation, over: Over, low: float, high: float) -> Logged:
    """Return `compute_is_metrics`: numbers of r over tokens or rows, or of the weights that are `applied`.

    Fractions beyond the thresholds are of r also there, and so are a row's extremes. std and ESS are of what
    is clamped to [low, high], of weights to [0, high].
    """
    log, weight = s.tokens.aggregate("ratio", s.preset.policy, over, None), s.preset.weight
    r, by_row = np.exp(log.clip(-SAFETY, SAFETY)), over in OF_SEQUENCES
    each = s.lengths if by_row else 1  # tokens that a number stands for
    if g.applied:
        x = s.of_units if weight is not None and weight.action == "mask" else np.minimum(r, high)
        found = verl_spread(s, x, by_row, 0.0, high, centre=1.0)
    else:
        found = verl_spread(s, r, by_row, low, high, centre=1.0)
    row = (r * s.lengths if by_row else s.row_sum(r)) / (s.lengths + EPS)
    found |= {"seq_fraction_high": mean(row > high), "seq_fraction_low": mean(row < low)}
    if by_row:
        found |= {"max": np.exp(log.max(initial=-math.inf).clip(max=SAFETY)), "min": np.exp(log).min()}
    share = mean if over in g.of_rows else lambda flags: s.over_tokens(flags * each)
    return found | {"ratio_fraction_high": share(r > high), "ratio_fraction_low": share(r < low)}


def verl_option(s: Step, rule: Reject) -> Logged:
    """Return `compute_rs_metrics` of one option: of −log r where presets speak of r."""
    statistic, low, high = rule.statistic, rule.lower, math.inf if rule.upper is None else rule.upper
    if statistic == "ratio":
        statistic, low, high = "k1", -math.log(high or math.inf), -math.log(low) if low else math.inf
    low = low if low is not None else -math.inf if statistic == "k1" else 0.0
    x, by_row = s.tokens.aggregate(statistic, s.preset.policy, rule.over, SAFETY), rule.over in OF_SEQUENCES
    found = verl_spread(s, x, by_row, low, high, centre=0.0)
    share, lost = mean if by_row else s.over_tokens, s.row_sum(~s.under(rule).kept)
    of = x[s.filled] if by_row else x
    found |= {"fraction_high": share(of > high), "fraction_low": share(of < low)}
    found |= {"masked_fraction": s.over_tokens(lost), "seq_masked_fraction": mean(lost[s.filled] > 0)}
    if statistic != "k1":  # the others have no lower threshold
        found["fraction_low"] = 0.0
        del found["seq_fraction_low"]
    del found["eff_sample_size"]
    option = f"token_{statistic}" if rule.over == "token" else f"seq_{rule.over}_{statistic}"
    return named(f"rollout_rs_{option}_", found)


def verl_spread(s: Step, x: Array, by_row: bool, low: float, high: float, centre: float) -> Logged:
    """Return mean, extremes, std, ESS and numbers of rows of a statistic, [T], or [S] with `by_row`.

    std and ESS are of x clamped to [low, high]; std is of sums about `centre`, what x is on-policy, so that
    nothing cancels: 1 of a ratio, where rows without tokens count as rows, and 0 of an option's statistic.
    """
    each = s.lengths if by_row else 1  # tokens that a number stands for
    held, short = x.clip(low, high), EPS / (s.n_tokens + EPS)  # 1 less verl's mean of 1
    first, second = s.over_tokens((held - centre) * each), s.over_tokens((held - centre) ** 2 * each)
    variance = second - first**2 + 2 * centre * first * short + centre**2 * (1 - short) * short
    row = (x * s.lengths if by_row else s.row_sum(x)) / (s.lengths + EPS)
    row = row if centre else row[s.filled]
    return {
        "mean": s.over_tokens(x * each),
        **ends("*", x[s.filled] if by_row else x, "max min"),
        "std": math.sqrt(max(variance, 0.0)) if s.n_tokens > 1 else 0.0,
        "eff_sample_size": (s.over_tokens(held * each) + EPS) ** 2
        / np.float64(s.over_tokens(held**2 * each)),
        **ends("seq_*", row),
        "seq_std": std(row - centre) if len(row) > 1 else 0.0,
        "seq_max_deviation": ENDS["max"](abs(row - centre)),
        "seq_fraction_high": mean(row > high),
        "seq_fraction_low": mean(row < low),
    }


def trl(s: Step) -> Logged:
    """TRL f2cd5771 (grpo_trainer.py:3218-3258): `sampling/` while its correction is on, `clip_ratio/`."""
    found, b, loss = Logged(), s.batch, s.loss
    if s.preset.weight is not None:
        found |= ends("sampling/sampling_logp_difference/*", abs(s.delta), "mean max")
        found |= ends("sampling/importance_sampling_ratio/*", s.of_units)
    if b.current is None or b.advantages is None:
        return found
    r, size = np.exp(s.u).clip(max=loss.dual), np.ones(s.n_rows) if loss.pooled else s.lengths
    cuts = (r < loss.low) & (b.advantages < 0), (r > loss.high) & (b.advantages > 0)
    if loss.kind == "cispo":
        found["cispo_clip_ratio"] = mean(cuts[1])
    if loss.kind in ("ppo_clip", "gspo"):
        low, high = (np.minimum(s.row_sum(flags), size) for flags in cuts)
        shares = {"low": low, "high": high, "region": low + high}
        found |= {f"clip_ratio/{name}_mean": x.sum() / size.sum() for name, x in shares.items()}
        found |= ends("clip_ratio/low_*", low[size > 0] / size[size > 0], "min")
        found |= ends("clip_ratio/high_*", high[size > 0] / size[size > 0], "max")
    return found


def openrlhf(s: Step) -> Logged:
    """OpenRLHF 3c3be623 (models/loss.py), with `is_filter_ratio` of September 2026 (pull request 1339)."""
    found, b, p = Logged(), s.batch, s.preset
    if b.current is not None and b.advantages is not None:
        found["ppo_clip_ratio"] = mean(s.clipped)
    if b.current is not None and b.old is not None:
        found["ppo_kl"] = mean(b.old - b.current)
    if b.old is not None and p.loss == "ppo_clip" and p.weight is not None:
        found["vllm_kl"] = mean(b.rollout - b.old)
        bare = s.under(*p.reject)
        of_tokens = mean(~bare.kept) if p.reject else s.bounded.sum() / s.n_tokens
        of_rows = any(not rule.on_tokens for rule in p.reject)
        found["is_filter_ratio"] = mean(s.filled & ~bare.kept_rows) if of_rows else of_tokens
    return found


def ms_swift(s: Step) -> Logged:
    """ms-swift 3602360a: verl's names; k3 of a token at most 10, chi2_seq of geometric means."""
    gap, weight = s.row_mean(-s.delta), s.preset.weight
    found = perplexities(s.row_mean(s.train), s.row_mean(s.batch.rollout))
    found |= {"kl": mean(-s.delta), "k3_kl": mean(s.k3(SAFETY).clip(max=10.0))}
    found |= ends("log_ppl_diff_*", gap, "max min")
    found["chi2_token"] = mean(np.exp(s.held) ** 2) - 1
    found["chi2_seq"] = mean(np.exp(-2 * gap.clip(-SAFETY, SAFETY))) - 1
    if weight is not None:
        gates = s.rules("ratio", "mean")
        bound = weight.upper or next((rule.upper for rule in gates), None) or math.inf
        above, w = s.tokens.aggregate("ratio", s.preset.policy, "mean", SAFETY) > math.log(bound), s.weights
        of_rows = weight.over != "token" or (weight.upper is None and bool(gates))
        if of_rows and not s.by_row:  # sequence_mask multiplies the ratios of tokens by 0 or 1
            w = np.where(s.runs.spread(above), 0.0, w)
        held, out = w.clip(1 / bound, bound), s.above + s.below * (weight.action == "mask")
        found["is_weight_mean"] = mean(w)
        found["ess"] = 1 / max(mean(held**2) / (mean(held) + EPS) ** 2, 1e-10)
        found["clipped_frac"] = mean(above) if of_rows else out.sum() / s.n_tokens
    return named("rollout_correction/", found)


def slime(s: Step, helper: bool, fork: bool = False) -> Logged:
    """slime 624b824a8, with its MIS helper or without; `fork`: miles 31f1ca961 (loss_hub/losses.py:290-385).

    A number is averaged over the tokens of each sample, then over samples, one without a token as 0. What the
    helper rejects counts as 0 in the loss's own numbers, and leaves none of those of `mis_`.
    """
    b, weight, kept = s.batch, s.preset.weight, s.kept if helper else s.under().kept
    found = {"train_rollout_logprob_abs_diff": s.mean_of_rows(abs(s.delta) * kept)}
    if fork:
        found["train_rollout_kl"] = s.mean_of_rows(s.k3(SAFETY).clip(max=10.0) * kept)
        if s.preset.policy != "old":  # the anchor is the rollout
            found = dict.fromkeys(found, 0.0)
    if b.current is not None:
        found["ppo_kl"], r = s.mean_of_rows(-s.u * kept), np.exp(s.u)
        if helper or weight is not None:
            found["ois"] = s.mean_of_rows(r)
        if b.advantages is not None:
            found["pg_clipfrac"] = s.mean_of_rows(s.clipped & kept)
        if fork:
            w = np.exp(s.token_u.clip(-SAFETY, SAFETY))
            ess = s.row_sum(w) ** 2 / (s.runs.at_least_1 * np.maximum(s.row_sum(w**2), EPS))
            found["ess_ratio"] = mean(s.filled if s.loss.pooled else ess)
    if helper:
        off, rows = np.expm1(s.held), (s.row_mean(s.train), s.row_mean(b.rollout))
        gap = perplexities(*rows, lambda x: mean(np.where(s.filled, x, 0.0)))
        gap |= {"kl": s.mean_of_rows(-s.delta), "k3_kl": s.mean_of_rows(s.k3())}
        gap["chi2_token"] = s.mean_of_rows(off * (off + 2))
        gap["chi2_seq"] = mean(np.expm1(2 * s.row_sum(s.delta).clip(-SAFETY, SAFETY)))
        found |= named("mis_", gap | ({} if weight is None else slime_weights(s, weight)))
    elif weight is not None:
        found["tis"], off = s.mean_of_rows(np.exp(s.delta)), np.expm1(s.delta)
        found["tis_abs"] = s.mean_of_rows(abs(off))
        found["tis_clipfrac"] = mean(s.bounded / s.runs.at_least_1)
    return named("train/", found)


def slime_weights(s: Step, weight: Weight) -> Logged:
    """Return the numbers of the MIS helper's tis_mode, use_rs, veto and batch normalisation."""
    p, n = s.preset, s.runs.at_least_1
    rules = [rule for rule in p.reject if rule.statistic == "ratio"]
    masks, rejects = (rules[:1], rules[1:2]) if weight.action == "none" else ([], rules[:1])

    def outside(name: str, some: list[Reject]) -> Logged:
        """Return shares of tokens beyond each bound of a rule, whatever else rejects them."""
        low = [s.mean_of_rows(~s.under(replace(rule, upper=None)).kept) for rule in some]
        high = [s.mean_of_rows(~s.under(replace(rule, lower=None)).kept) for rule in some]
        return {f"{name}_mask_fraction_low": sum(low), f"{name}_mask_fraction_high": sum(high)}

    raw = s.tokens.weight(p.policy, replace(weight, action="none"))
    found = {"tis_weight_before_bound": s.mean_of_rows(s.runs.spread(raw) if s.by_row else raw)}
    after = s.mean_of_rows(s.weights)
    found |= {"tis_weight_after_bound": after, "is_ratio_mean_after_tis_rs": after}
    if masks:
        found |= outside("tis", masks)
    elif weight.action == "truncate" and weight.lower is None:
        found["tis_truncate_fraction"] = mean(s.above / n)
    elif weight.action == "truncate":
        found |= {"tis_clip_fraction_low": mean(s.below / n), "tis_clip_fraction_high": mean(s.above / n)}
    if rejects or p.veto is not None:
        found |= outside("rs", rejects)
    if p.veto is not None:
        hits = s.veto_hits(p.veto)
        found["rs_catastrophic_token_fraction"] = mean(hits / n)
        found["rs_catastrophic_seq_fraction"] = mean(hits > 0)
    factor = 1.0
    if weight.normalize:
        average = mean(s.weights) if weight.over == "token" else after
        factor = average if average > SMALLEST_NORM else 1.0
        found["batch_norm_factor"] = factor * mean(s.filled)
    found["is_ratio_mean_final"] = after / factor
    for name, of_row in (("min", s.runs.min), ("max", s.runs.max)):
        found[f"is_ratio_{name}_final"] = mean(np.where(s.filled, of_row(s.weights), 0.0)) / factor
    return found


def nemo_rl(s: Step) -> Logged:
    """NeMo-RL 7ea279abf (loss_functions.py, grpo.py): nothing is clamped; the error mask comes first."""
    b, weight = s.batch, s.preset.weight
    masked = s.under(*s.rules("mult_prob_error", "mean"))
    left, rows, times = masked.kept, s.filled & masked.kept_rows, np.exp(abs(s.delta))
    tokens, lost, error = s.lengths[rows].sum() + EPS, s.filled & ~rows, s.row_mean(times)
    gaps = {
        "token_mult_prob_error": times,
        "gen_kl_error": s.k3(),
        "policy_kl_error": np.expm1(-s.delta) + s.delta,
        "js_divergence_error": np.log1p(2 * np.sinh(s.delta / 4) ** 2),
    }
    found = {name: x[left].sum() / tokens for name, x in gaps.items()}
    found["num_masked_seqs_by_logprob_error"] = lost.sum()
    for after, among in (("", s.filled), ("_after_mask", rows)):
        found |= ends(f"*_seq_mult_prob_error{after}", error[among] if among.any() else np.zeros(1))
    if b.rewards is not None:
        found["masked_correct_pct"] = (lost & (b.rewards == 1)).sum() / max(lost.sum(), 1)
    w = np.exp(s.delta) if weight is None else s.weights
    total = s.of_units[s.row_sum(s.kept) > 0].sum() if s.by_row else w[s.kept].sum()
    units = tokens if weight is None or weight.over == "token" else rows.sum() + EPS
    found["sampling_importance_ratio"] = total / units
    gates = s.rules("ratio", "mean")
    if gates:  # seq-mask-tis counts rows
        found["is_oob_ratio"] = (rows & ~s.under(*gates).kept_rows).sum() / (rows.sum() + EPS)
    elif weight is not None and weight.action in ("truncate", "mask"):
        found["is_oob_ratio"] = s.bounded[rows].sum() / tokens
    if b.current is not None:
        raw = clamped = b.current  # REINFORCE has no ratio
        if s.loss.kind != "reinforce":
            raw, clamped = np.exp(s.u), np.exp(s.u).clip(s.loss.low, s.loss.high)
        for name, x in (("probs_ratio", raw), ("probs_ratio_clamped", clamped)):
            found |= {name: x[left].sum() / tokens, **ends(f"{name}_*", x[left], "min max")}
        entropy = -np.exp(s.tokens.log_ratio("current", "rollout")) * b.current
        found["approx_entropy"] = entropy[left].sum() / tokens
    return named("train/", found)


def areal(s: Step) -> Logged:
    """AReaL 4aef98d8d (trainer/ppo/actor.py): average, smallest and largest over tokens of a denominator.

    That is the valid tokens (what M2PO leaves), or those that are kept with a weight above 0.
    """
    weight, kept, numbers = s.preset.weight, s.kept, list[tuple[str, Array, Array]]()
    valid = s.under(*(rule for rule in s.preset.reject if rule.over == "batch")).kept
    behave = kept & (s.weights > 0) if weight is not None and weight.action == "mask" else kept
    if s.batch.current is not None:
        both = s.tokens.log_ratio("current", "rollout")
        if s.loss.kind != "gspo":
            ratio = np.where(kept, np.exp(s.u), 0.0)
            numbers += [("importance_weight", ratio, valid), ("approx_kl", s.u, valid)]
        numbers += [
            ("compute_logp/kl_div_direct", -both, behave),
            ("compute_logp/kl_div_taylor", both**2 / 2, behave),
            ("compute_logp/kl_div_dual", s.tokens.statistic("k3", "current", None), behave),
        ]
    if weight is not None:
        numbers += [("behave_imp_weight", s.weights, behave), ("behave_approx_kl", s.delta, behave)]
    found = Logged()
    for name, x, among in numbers:
        found |= ends(f"{name}/*", x[among], "avg min max") if among.any() else {}
    if weight is not None and weight.action != "mask":
        changed = valid.sum() - kept.sum() + (s.bounded.sum() if weight.action == "truncate" else 0)
        found["rs_filtered_fraction"] = changed / max(valid.sum(), 1)
    return named("ppo_actor/update/", found)


def prime_rl(s: Step) -> Logged:
    """prime-rl 559b44772 (trainer/rl/loss.py): of all tokens; else mean and largest of the means of rows."""
    x = (np.expm1(s.delta).clip(max=PRIME_LARGEST) - s.delta).clip(max=PRIME_LARGEST)
    found, lost, a = ends("mismatch_kl/all/*", x, "mean std max"), ~s.kept, s.batch.advantages
    if s.batch.entropy is not None:
        found["kl_ent_ratio/mean"] = mean(x) / (mean(s.batch.entropy) or math.nan)
    rows = {"masked_mismatch_kl": s.row_mean(x, lost), "unmasked_mismatch_kl": s.row_mean(x, s.kept)}
    rows["is_masked"] = s.row_mean(lost)
    # `ipo`, whose mask does not depend on the advantage, logs less
    if a is not None and any(rule.advantage != "any" for rule in s.rules("prob_diff", "token")):
        for word, sign, flags in (("low", "negative", a < 0), ("high", "positive", a > 0)):
            rows[f"is_masked_{word}"] = s.row_mean(lost & flags)
            rows[f"masked_advantage_{sign}"] = s.row_mean(flags, lost)
    for name, x in rows.items():
        found |= ends(f"{name}/*", x, "mean max")
    return found


def skyrl(s: Step) -> Logged:
    """SkyRL a9564572e (off_policy_correction_utils.py, ppo_utils.py): log r within ±20.

    Some numbers are of the padded batch, rows × longest response, where all that is no loss token is 0.
    """
    p, gap, off, a = s.preset, abs(s.delta), np.expm1(s.held), s.batch.advantages
    hole, at_old = s.n_rows * (s.lengths + s.batch.masked).max() - s.n_tokens, p.policy == "old"
    space = "rollout_train" if at_old else "minibatch_rollout"
    found = named(f"policy/{space}_logprobs_abs_diff_", ends("*", gap) | {"std": std(gap, less=int(at_old))})
    if at_old:
        n = s.n_tokens + hole  # off is −1 in the hole
        variance = ((off**2).sum() + hole - (off.sum() - hole) ** 2 / n) / (n - 1)
        found |= {"is_ratio_mean": mean(off) + 1, "is_ratio_std": math.sqrt(max(variance, 0.0))}
        found |= ends("is_ratio_*", off + 1, "min max") | skyrl_corrections(s)
        if a is not None and s.batch.current is not None:
            above, below = beyond(s.token_u, s.loss.high), beyond(s.token_u, s.loss.low, below=True)
            found["clip_ratio"] = mean((above & (a > 0)) | (below & (a < 0)))
    else:  # of losses against the rollout: what is cut, zeroed or masked
        cut = s.n_tokens - s.kept.sum() + (0 if p.weight is None else (s.above + s.below).sum())
        found["clip_ratio"] = cut / max(s.n_tokens, 1)
        if p.weight is not None and p.weight.action == "truncate":
            found |= ends("cispo/ratio_*", off + 1) | {"cispo/ratio_clamped_mean": mean(s.weights)}
    padded = "is_ratio_min" if at_old else "policy/minibatch_rollout_logprobs_abs_diff_min"
    if hole > 0:
        found[padded] = min(found[padded], 0.0)
    return found


def beyond(log: Array, bound: float | None, below: bool = False) -> Array:
    """Flag where a log-ratio, clamped to ±20, is above the log of a bound, or below it."""
    held, edge = log.clip(-SAFETY, SAFETY), math.log(bound) if bound else -math.inf if below else math.inf
    return held < edge if below else held > edge


def skyrl_corrections(s: Step) -> Logged:
    """Return shares of outliers, token mask, cap and sequence mask, each over what those before it left."""
    p, weight, found = s.preset, s.preset.weight, Logged()
    of_tokens = [rule for rule in p.reject if rule.over == "token"]
    before, left = s.under(veto=p.veto).kept.sum(), s.under(*of_tokens, veto=p.veto).kept
    if p.veto is not None:
        high, low = replace(p.veto, lower=None), replace(p.veto, upper=None)
        for name, veto in (("masked", p.veto), ("over_high", high), ("under_low", low)):
            found[f"outlier_seq_{name}_ratio"] = mean(s.veto_hits(veto) > 0)
    if of_tokens:
        found["token_mask_ratio"] = (before - left.sum()) / max(before, 1)
    total, of_left = s.row_sum(np.where(left, s.delta, 0.0)), s.row_mean(s.delta, left)
    if weight is not None and weight.over == "token":
        found["tis_token_clip_high_ratio"] = beyond(s.delta, weight.upper)[left].sum() / max(left.sum(), 1)
    if weight is not None and weight.over == "sum":
        found["tis_seq_clip_high_ratio"] = mean(beyond(total, weight.upper))
    for name, over, x in (("geo", "mean", of_left), ("product", "sum", total)):
        for rule in s.rules("ratio", over):
            above, below = mean(beyond(x, rule.upper)), mean(beyond(x, rule.lower, below=True))
            shares = {"masked": above + below, "over_high": above, "under_low": below}
            found |= {f"{name}_sequence_mask_{word}_ratio": share for word, share in shares.items()}
    return found


LOGS: Mapping[str, Callable[[Step], Logged]] = {
    **{f"verl-{one}": partial(verl, generation=one) for one in GENERATIONS},
    **{f.__name__.replace("_", "-"): f for f in (trl, ms_swift, openrlhf, nemo_rl, areal, prime_rl, skyrl)},
    "slime": partial(slime, helper=False),
    "slime-mis": partial(slime, helper=True),
    "miles": partial(slime, helper=False, fork=True),
    "miles-mis": partial(slime, helper=True, fork=True),
}
"""Who logs, with the version or the helper that decides the names → the function."""
TRAINERS = tuple(one for one in ALL_TRAINERS if one == "verl" or one in LOGS)
"""Trainers whose logged numbers are known."""


def log_of(trainer: str, generation: str, preset: Preset) -> str:
    """Return the key of `LOGS`; slime and miles take the MIS helper for what their flags cannot express."""
    weight, kinds = preset.weight, [(rule.statistic, rule.over) for rule in preset.reject]
    if trainer == "verl":
        return f"verl-{generation}"
    if trainer not in ("slime", "miles") or weight is None:
        return trainer
    band = kinds == [("ratio", "token")] and weight.action == "none"
    helper = weight.over != "token" or weight.normalize or preset.veto is not None or (kinds and not band)
    return f"{trainer}-mis" if helper else trainer

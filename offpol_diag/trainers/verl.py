"""verl: what four generations log (2025-10 `mismatch/`; 2025-11, 2026-01 and 2026-03 `rollout_corr/`); keys.

Logged numbers are read off verl 4424616d, 418f964a, b178a3cd and 1dda039b. Two things to know before laying
these beside our own: verl clamps log-ratios to ±20, and its std and ESS are of weights clamped to [1/C, C]
([0, C] since 2026-03). Its masked mean divides by (Σmask + 1e-8), which is reproduced. Statistics over rows
include those without a token (as 0), except the rejection statistics of 2026.

The configuration has three generations of keys, and there are those of its fork for Flash-RL. Since 0.7.1
its k1 bounds are compared with −Δ, so bounds [lo, hi] on r are written "1/hi_1/lo". A threshold is always a
quoted string: YAML reads 0.5_2 as 0.52.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

from offpol_diag.errors import ConfigError
from offpol_diag.presets import Preset, Reject, Statistic, Weight
from offpol_diag.trainers import base, config, measures, schema
from offpol_diag.trainers.base import Range, Row, Sum, Totals, Value, ends, highest, lowest, per_row, table
from offpol_diag.trainers.config import ClipKeys, Guards, Parts, Settings, Snippet, Trainer, Translation
from offpol_diag.trainers.measures import EPS, K1, LOG, RATIO_SQUARED, ROLLOUT, SAFETY, TRAIN, Measure, exp

if TYPE_CHECKING:
    from offpol_diag.engine.ratios import Ratios
    from offpol_diag.engine.segments import Array
    from offpol_diag.trainers.view import View


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


def _mean(column: Sum) -> Value:
    """verl's masked mean over tokens."""
    return Value(lambda totals: totals(column) / (totals.tokens + EPS), (column,))


def _of_row(name: str, of: Callable[[Array, Array], Array]) -> Value:
    """Mean over rows of a function of a row's masked means of log π_train and log π_rollout."""

    def column(view: View) -> Array:
        n = view.counted + EPS
        return of(view.total(TRAIN) / n, view.total(ROLLOUT) / n)

    return per_row(Sum(name, column, shared=True))


# ---------------------------------------------------------------- the policy gap

_ROWS = "over all rows of the batch, each once; one without a token counts as {}"
GAPS = Range("g", lambda view: ends(view.mean_log), shared=True)
GAP_K3 = Measure("k3, finite", lambda x: x.k3().clip(max=math.exp(2 * 345.0)))
CHI2_SEQ = Sum("ss", lambda view: exp(2 * view.total(LOG).clip(-SAFETY, SAFETY)), shared=True)

GAP: dict[str, Row] = {
    "training_ppl": _of_row("ppl", lambda train, rollout: exp(-train)).means(
        f"e^(−mean log π_train) of a row, mean {_ROWS.format(1)}; not the perplexity of all tokens."
    ),
    "training_log_ppl": _of_row("log_ppl", lambda train, rollout: -train).means(
        f"−mean log π_train of a row, mean {_ROWS.format(0)}; nats."
    ),
    "kl": _mean(base.total(K1)).means(
        "Mean over tokens of log π_rollout − log π_train, nats (k1): unbounded, and it may be negative."
    ),
    "k3_kl": _mean(base.total(GAP_K3)).means(
        "Mean over tokens of r − 1 − log r. Neither r nor the result is bounded: one token can decide it."
    ),
    "rollout_ppl": _of_row("rollout_ppl", lambda train, rollout: exp(-rollout)).means(
        f"e^(−mean log π_rollout) of a row, mean {_ROWS.format(1)}."
    ),
    "rollout_log_ppl": _of_row("rollout_log_ppl", lambda train, rollout: -rollout).means(
        f"−mean log π_rollout of a row, mean {_ROWS.format(0)}; nats."
    ),
    "log_ppl_diff": _of_row("diff", lambda train, rollout: rollout - train).means(
        "Mean log π_rollout − mean log π_train of a row (verl's docs have the sign the other "
        f"way), mean {_ROWS.format(0)}; nats."
    ),
    "log_ppl_abs_diff": _of_row("abs", lambda train, rollout: abs(rollout - train)).means(
        f"|log_ppl_diff| of a row, mean {_ROWS.format(0)}; nats."
    ),
    "log_ppl_diff_max": (-lowest(GAPS)).means(
        "Largest log_ppl_diff of a row: where the trainer finds a text least likely; nats."
    ),
    "log_ppl_diff_min": (-highest(GAPS)).means("Smallest log_ppl_diff of a row, nats."),
    "ppl_ratio": _of_row("ratio", lambda train, rollout: exp(rollout - train)).means(
        f"Perplexity of π_train over that of π_rollout, row by row, mean {_ROWS.format(1)}; a mean "
        "of ratios, not the ratio of means."
    ),
}
CHI2: dict[str, Row] = {
    "chi2_token": (_mean(base.total(RATIO_SQUARED)) - 1).means(
        "Mean over tokens of r², log r bounded to ±20, minus 1; below 0 where the sample lacks the tail."
    ),
    "chi2_seq": (per_row(CHI2_SEQ) - 1).means(
        "The squared product of r over a row, its log bounded to ±20 before squaring, minus 1; mean "
        f"{_ROWS.format('r = 1')}. It cannot exceed e^40 ≈ 2.35e17, and sits there on long rows."
    ),
}

# ---------------------------------------------------------------- the distribution of one statistic

OF_TOKENS: dict[Statistic | None, Measure] = {
    None: measures.RATIO_CLAMPED,
    "k1": Measure("−Δ, within ±20", lambda x: x.ratios.token("k1", SAFETY)),
    "k2": Measure("Δ²/2, Δ within ±20", lambda x: x.ratios.token("k2", SAFETY)),
    "k3": Measure("k3, Δ within ±20", lambda x: x.k3(SAFETY)),
}
"""Statistics of tokens, Δ clamped to ±20; None: the weight before truncation."""
Statistics = dict[str, "Array"]


@dataclass(frozen=True)
class Spread:
    """A statistic x of tokens or rows, of which mean, std, extremes, ESS and fractions are logged.

    Attributes:
        rule: the weight or rule that the statistic belongs to.
        statistic: of a rejection since 2026; None for a ratio, which is a weight before truncation.
        key: prefix of its columns; equal keys mean equal numbers.
        low: below it x counts as low; for std and ESS x is clamped to it.
        high: above it x counts as high; likewise.
        center: taken off before squaring per-sequence means (1 for weights), so that nothing cancels.
        applied: whether x is the weight that the loss gets: truncation there has no lower bound.
    """

    rule: Weight | Reject
    statistic: Statistic | None
    key: str
    low: float
    high: float
    center: float = 1.0
    applied: bool = False

    @property
    def of_rows(self) -> bool:
        """Return whether the statistic has one value per row rather than per token."""
        return self.rule.over not in ("token", "segment", "batch")

    def sum(self, name: str) -> Sum:
        """Return one of its sums."""
        return Sum(f"{self.key}/{name}", lambda view: self._columns(view)[name], shared=True)

    def mean(self, name: str) -> Value:
        """Return the masked mean over tokens of one of its sums."""
        return _mean(self.sum(name))

    @cached_property
    def span(self) -> Range:
        """The extremes of x."""

        def of(view: View) -> tuple[Array, Array]:
            x = self._values(view)
            return view.ends(x) if isinstance(x, Measure) else ends(x, view.nonempty)

        return Range(f"{self.key}/x", of, shared=True)

    def row_span(self, name: str) -> Range:
        """Return the extremes of one number of each row that counts."""

        def of(view: View) -> tuple[Array, Array]:
            x = self._columns(view)[name]
            return base.among((x, x), self._counted(view))

        return Range(f"{self.key}/{name}", of, shared=True)

    def _counted(self, view: View) -> Array:
        """Flag the rows that count, [S] bool: for weights also those without a token."""
        return view.n >= 0 if self.center else view.nonempty

    def _rows(self, totals: Totals) -> float:
        """Number of rows that count."""
        return totals.rows if self.center else totals.sequences

    def _values(self, view: View) -> Array | Measure:
        """Return x of rows [S], or of tokens; spreads that differ in their limits share it."""
        raw, weight = self._raw(view), view.preset.weight
        if not self.applied or weight is None:
            return raw
        high = math.inf if weight.upper is None else weight.upper
        masks = weight.action == "mask"
        if not isinstance(raw, Measure):
            return view.weigh().final.values if masks else raw.clip(max=high)
        if masks:
            return Measure("masked weight", lambda x: x.weigh().final.values, own=True)
        return Measure("truncated weight", lambda x: raw.of(x).clip(max=high), own=True)

    def _raw(self, view: View) -> Array | Measure:
        over, statistic = self.rule.over, self.statistic

        def aggregate(ratios: Ratios) -> Array:
            if statistic is None:  # the log-ratio is clamped after aggregation
                return exp(ratios.log_ratio(over, SAFETY, "aggregate").values)
            return ratios.aggregate(statistic, over, SAFETY).values

        if self.of_rows:
            return aggregate(view.ratios)
        if over in ("token", "batch") and statistic in OF_TOKENS:
            return OF_TOKENS[statistic]
        return Measure(f"verl {statistic} over {over}", lambda x: aggregate(x.ratios), own=True)

    def _columns(self, view: View) -> Statistics:
        return view.once(("verl", view.preset.policy, self.key), lambda: self._computed(view))

    def _computed(self, view: View) -> Statistics:
        """Compute the sums of each row, [S]: of x, of x clamped to the limits, of its mean, and counts."""
        x, n = self._values(view), view.n
        if isinstance(x, Measure):
            inside, squares, high, low = view.within(x, self.low, self.high)
            found = {"c": inside, "cc": squares, "high": high, "low": low, "x": view.total(x)}
            found |= {"high_rows": view.zeros, "low_rows": view.zeros}
        else:  # all tokens of a row share x: geometric means lie within 1e-3 of 1
            inside = x.clip(self.low, self.high)
            off = inside - self.center
            high, low = self._beyond(view, x)
            found = {"c": inside * n, "cc": inside * (inside * n), "c1": off * n, "cd": off**2 * n}
            found |= {"high_rows": high, "low_rows": low, "high": high * n, "low": low * n, "x": x * n}
        mean = found["x"] / (view.counted + EPS)
        off = mean - self.center
        high, low = self._beyond(view, mean)
        found |= {"m": mean, "m1": off, "m2": off**2, "dev": abs(off), "m_high": high, "m_low": low}
        return found

    def _beyond(self, view: View, x: Array) -> tuple[Array, Array]:
        """1 where x of a row that counts is above the limits, and below."""
        counted = self._counted(view)
        return ((x > self.high) & counted) + view.zeros, ((x < self.low) & counted) + view.zeros

    # ------------------------------------------------------------ what is logged of it

    def std(self) -> Value:
        """Return the standard deviation of the clamped statistic over tokens; 0 for one token.

        From the sums about the center where there are some, so that little cancels; verl's means divide by
        n + 1e-8, which the last two terms make up for.
        """
        if not self.of_rows:
            clamped, squares = self.mean("c"), self.mean("cc")

            def of_tokens(totals: Totals) -> float:
                variance = squares.of(totals) - clamped.of(totals) ** 2
                return math.sqrt(max(variance, 0.0)) if totals.tokens >= 2 else 0.0

            return Value(of_tokens, (*clamped.columns, *squares.columns))
        first, second = self.mean("c1"), self.mean("cd")

        def of_rows(totals: Totals) -> float:
            n, off = totals.tokens, first.of(totals)
            if n < 2:
                return 0.0
            short, about = EPS / (n + EPS), second.of(totals) - off * off
            return math.sqrt(
                max(about + 2 * self.center * off * short + self.center**2 * (1 - short) * short, 0.0)
            )

        return Value(of_rows, (*first.columns, *second.columns))

    def ess(self) -> Value:
        """Return 1 / E[(w/E w)²] of the clamped weights, over tokens."""
        clamped, squares = self.mean("c"), self.mean("cc")

        def of(totals: Totals) -> float:
            normalised = squares.of(totals) / (clamped.of(totals) + EPS) ** 2
            return 1.0 / normalised if normalised > 0 else math.nan

        return Value(of, (*clamped.columns, *squares.columns))

    def per_row(self, column: Sum) -> Value:
        """Return the mean of a sum over the rows that count."""
        return Value(lambda totals: totals(column) / self._rows(totals), (column,))

    def row_std(self) -> Value:
        """Return the standard deviation over the rows that count of the row means (n − 1); 0 for one row."""
        first, second = self.sum("m1"), self.sum("m2")

        def of(totals: Totals) -> float:
            n = self._rows(totals)
            return base.std(totals(first), totals(second), n) if n >= 2 else 0.0

        return Value(of, (first, second))

    def share(self, side: str, of_rows: bool) -> Value:
        """Return the share of rows or of tokens beyond a limit ("high", "low")."""
        return self.per_row(self.sum(f"{side}_rows")) if of_rows else self.mean(side)


def _end_of_raw(spread: Spread, of: Spread, at: int) -> Value:
    """Return an extreme of x; of rows that of the raw weight, its log clamped from above alone."""
    if not spread.of_rows:
        return (lowest, highest)[at](of.span)
    over = spread.rule.over
    logs = Range(f"{spread.key}/log", lambda view: ends(view.ratios.aggregate("ratio", over).values), True)

    def of_raw(totals: Totals) -> float:
        log = totals.ends(logs)[at] if at == 0 else min(totals.ends(logs)[at], SAFETY)
        return math.exp(log) if log < 709 else math.inf  # infinite on overflow as in the trainer

    return Value(of_raw, (logs,))


def _ratios(spread: Spread, of: Spread, rows: bool, what: str, clamp: str, level: str) -> dict[str, Row]:
    """verl's `compute_is_metrics`: of weights, or (2025) of the ratio that rejects.

    `spread` is of the raw ratio, `of` of the weight as applied where that is logged; fractions are of rows or
    of tokens; the words are for `of`, its limits, and the level at which extremes are raw.
    """
    return {
        "mean": of.mean("x").means(
            f"Mean over tokens of {what}; at sequence level each row thus counts by its length."
        ),
        "max": _end_of_raw(spread, of, 1).means(
            f"Largest of {what}; {level} e^(log-ratio bounded above to 20) before truncation."
        ),
        "min": _end_of_raw(spread, of, 0).means(
            f"Smallest of {what}; {level} e^(log-ratio) before truncation, bounded nowhere."
        ),
        "ratio_fraction_high": spread.share("high", rows).means(
            "Share with raw r above the upper threshold: of tokens, at sequence level of rows."
        ),
        "ratio_fraction_low": spread.share("low", rows).means(
            "Share with raw r below the lower threshold (1/C unless one is set, though a "
            "truncation acts from above only): of tokens, at sequence level of rows."
        ),
        "std": of.std().means(
            f"Standard deviation over tokens of {what} clamped to {clamp}; of the tail it knows nothing."
        ),
        "eff_sample_size": of.ess().means(
            f"1/E[(w/E[w])²] over tokens, a fraction, of {what} clamped to {clamp}: not the "
            "ESS of what was sampled, and token-weighted at sequence level too."
        ),
        "seq_mean": of.per_row(of.sum("m")).means(f"A row's mean of {what}, mean {_ROWS.format(0)}."),
        "seq_std": of.row_std().means(
            f"Standard deviation (n − 1) of the rows' means of {what}; 0 for one row."
        ),
        "seq_max": highest(of.row_span("m")).means(f"Largest mean of {what} in a row."),
        "seq_min": lowest(of.row_span("m")).means(
            f"Smallest mean of {what} in a row; 0 as soon as one has no token."
        ),
        "seq_max_deviation": highest(of.row_span("dev")).means(f"Largest |mean of {what} in a row − 1|."),
        "seq_fraction_high": spread.per_row(spread.sum("m_high")).means(
            "Rows whose mean raw r is above the upper threshold, over all rows; at token "
            "level a mean is compared with a threshold meant for tokens."
        ),
        "seq_fraction_low": spread.per_row(spread.sum("m_low")).means(
            "Rows whose mean raw r is below the lower threshold, over all rows; one without "
            "a token has a mean of 0."
        ),
    }


WORDS = {
    "k1": "k1 = −log r (bounded to ±20), compared with [ln lower, ln upper]",
    "k2": "k2 = (log r)²/2, log r bounded to ±20",
    "k3": "k3 = r − 1 − log r, log r bounded to ±20",
}


def _option(spread: Spread, rule: Reject, at: int) -> dict[str, Row]:
    """verl 2026's `compute_rs_metrics`, of one option; sequence fractions are over rows with a token."""
    of_rows = spread.of_rows
    k1 = spread.statistic == "k1"
    what = WORDS.get(str(spread.statistic), str(spread.statistic))
    sign = " k1 is −log r, so this is r too LOW." if k1 else ""
    alone = Sum(f"rule{at}", lambda view: view.mine(f"rule{at}", lambda: view.dropped_by(rule)))
    rejected_rows = Sum(f"rule{at}_rows", lambda view: (alone.of(view) > 0) + view.zeros)
    low: Row = Value(lambda totals: 0.0, ()).means("0: the statistic has no lower threshold.")
    if k1:
        low = spread.share("low", of_rows).means(
            f"Share of {what} below the lower threshold, that is of r too HIGH: of tokens, "
            "under sequence options of rows with a token."
        )
    found: dict[str, Row] = {
        "mean": spread.mean("x").means(
            f"Mean over tokens of {what} as the option aggregates it: a sequence option's value "
            "counts once per token."
        ),
        "max": highest(spread.span).means(f"Largest {what}: of a token, under sequence options of a row."),
        "min": lowest(spread.span).means(f"Smallest {what}: of a token, under sequence options of a row."),
        "fraction_high": spread.share("high", of_rows).means(
            f"Share above the upper threshold, of tokens, under sequence options of rows with a token.{sign}"
        ),
        "fraction_low": low,
        "std": spread.std().means(f"Standard deviation over tokens of {what} clamped to the thresholds."),
        "seq_mean": spread.per_row(spread.sum("m")).means(
            f"Mean over rows with a token of their {what}; token options take a row's mean."
        ),
        "seq_std": spread.row_std().means(
            f"Standard deviation (n − 1) over rows with a token of their {what}; 0 for one row."
        ),
        "seq_max": highest(spread.row_span("m")).means(
            f"Largest {what} of a row with a token; token options take a row's mean."
        ),
        "seq_min": lowest(spread.row_span("m")).means(
            f"Smallest {what} of a row with a token; token options take a row's mean."
        ),
        "seq_max_deviation": highest(spread.row_span("dev")).means(
            f"Largest absolute {what} of a row with a token."
        ),
        "seq_fraction_high": spread.per_row(spread.sum("m_high")).means(
            "Share of rows with a token whose value is above the upper threshold; under "
            f"token options that compares a mean with a threshold meant for tokens.{sign}"
        ),
        "seq_fraction_low": spread.per_row(spread.sum("m_low")).means(
            "Share of rows with a token whose value is below the lower threshold: r too HIGH."
        ),
        "masked_fraction": _mean(alone).means("Tokens that this option alone rejects, over all tokens."),
        "seq_masked_fraction": spread.per_row(rejected_rows).means(
            "Rows with a token that this option rejects, over rows with a token."
        ),
    }
    if not k1:
        del found["seq_fraction_low"]
    return found


# ---------------------------------------------------------------- weights, rejection and veto


def _ratio_band(rule: Reject) -> Reject:
    """A band of k1 = −Δ in nats as the same band of r."""
    if rule.statistic != "k1":
        return rule
    lower = None if rule.upper is None else math.exp(-rule.upper)
    upper = None if rule.lower is None else math.exp(-rule.lower)
    return replace(rule, statistic="ratio", lower=lower, upper=upper)


def weight_spread(preset: Preset, weight: Weight, generation: Generation) -> Spread:
    """Return the spread of the importance weights, thresholds [1/C, C] unless a lower bound is given."""
    rules = (_ratio_band(rule) for rule in preset.reject if rule.statistic in ("ratio", "k1"))
    band = (next(rules, None) if generation.weight_band else None) or weight
    high = band.upper or math.inf
    low = band.lower or 1 / high
    return Spread(weight, None, f"is/{weight.over}/{low:.17g}/{high:.17g}", low, high)


def reject_spread(rule: Reject, generation: Generation) -> Spread:
    """Return the spread of a rejection statistic.

    verl 2026-01 speaks of −log r where we speak of r: the band is mirrored.
    """
    if not generation.divergences:
        rule = _ratio_band(rule)
        high = rule.upper or math.inf
        low = rule.lower if rule.lower is not None else 1 / high
        return Spread(rule, None, f"is/{rule.over}/{low:.17g}/{high:.17g}", low, high)
    high = math.inf if rule.upper is None else rule.upper
    statistic, low = rule.statistic, rule.lower or 0.0
    if statistic == "ratio":
        statistic, low = "k1", -math.log(rule.upper or math.inf)
        high = -math.log(rule.lower) if rule.lower else math.inf
    elif statistic == "k1":
        low = -math.inf if rule.lower is None else rule.lower
    key = f"rs/{statistic}/{rule.over}/{low:.17g}/{high:.17g}"
    return Spread(rule, statistic, key, low, high, 0.0)


def _rejected_tokens(view: View) -> Array:
    """Count the tokens that rejection (not the veto) removes, [S]."""
    return view.mine("lost", lambda: view.dropped_by(*view.preset.reject))


def _out_of_bounds(view: View) -> Array:
    weighed = view.weigh()
    outside = weighed.high + weighed.low
    return outside * view.n if weighed.final.per == "sequence" else outside


def _norm(totals: Totals) -> float:
    mean = _of_preset(totals, "norm") / _of_preset(totals, "norm_units")
    return mean if mean > base.SMALLEST_NORM else 1.0


def _of_preset(totals: Totals, name: str) -> float:
    """Return a sum that the engine makes of each preset; absent if the dump lacks a column for it."""
    key = f"{totals.preset.name}|{name}"
    if key not in totals.read.sums:
        raise base.Absent(key)
    return totals.read.sums[key]


OUT_OF_BOUNDS: Row = _mean(Sum("oob", _out_of_bounds)).means(
    "IcePop only: share of tokens whose weight is 0 because r lies outside [lower, "
    "upper]; at sequence level every token of a row counts."
)
NORM: Row = Value(_norm, ()).means(
    "What batch normalisation divided by: the mean weight before rejection "
    "(at sequence level of rows with a token), 1 where it was too small to divide by. The other rollout_is_ "
    "numbers are taken before that division."
)
HITS = Sum("hits", lambda view: view.mine("hits", lambda: view.veto_hits(view.preset.veto)))
VETO: dict[str, Row] = {
    "rollout_is_veto_fraction": per_row(Sum("vetoed", lambda view: (HITS.of(view) > 0) + view.zeros)).means(
        "Rows with a token whose unbounded r is below the veto threshold, over all "
        "rows. Logged as 0 where there is no veto."
    ),
    "rollout_is_catastrophic_token_fraction": _mean(HITS).means(
        "Tokens whose unbounded r is below the veto threshold, over all tokens."
    ),
}


def _masked(divergences: bool) -> dict[str, Row]:
    def rows(view: View) -> Array:
        """Flag rows with a rejected token; in 2025 one without a token has r = 1, and may be rejected."""
        rejected = _rejected_tokens(view) > 0
        return (rejected if divergences else rejected | ~view.passing_sequences()) + view.zeros

    return {
        "masked_fraction": _mean(Sum("lost", _rejected_tokens)).means(
            "Tokens that rejection removes, over all tokens; what a veto removes besides is not in it."
        ),
        "seq_masked_fraction": per_row(Sum("lost_rows", rows)).means(
            "Rows with at least one rejected token, over all rows: for rules on "
            "tokens that is not the share of rows dropped."
        ),
    }


# ---------------------------------------------------------------- the update


def _probability(of: Callable[[Mapping[str, float], float], float]) -> Value:
    """Return a number of probabilities, from the sums that the policy gap has made and the tokens."""
    return Value(lambda totals: of(totals.read.sums, totals.tokens), ())


def _pearson(sums: Mapping[str, float], n: float) -> float:
    """Return the Pearson correlation of both probabilities; NaN if one does not vary."""
    p, q = sums["p"] / n, sums["q"] / n
    of_p, of_q = sums["pp"] / n - p * p, sums["qq"] / n - q * q
    return (sums["pq"] / n - p * q) / math.sqrt(of_p * of_q) if of_p > 0 and of_q > 0 else math.nan


def _kept(name: str) -> Value:
    """Return a mean over the tokens kept; absent if the dump has no update."""
    return Value(lambda totals: _of_preset(totals, name) / (_of_preset(totals, "kept") + EPS), ())


PROBABILITIES: dict[str, Row] = {
    "training/rollout_probs_diff_valid": Value(lambda totals: 1.0, ()).means(
        "1: there was a token to compare."
    ),
    "training/rollout_probs_diff_max": Value(lambda totals: totals.read.ranges["pd"][1], ()).means(
        "Largest |π_old − π_rollout| of a sampled token: probabilities, not "
        "logs. Decoupled runs only, as all of training/rollout_*."
    ),
    "training/rollout_probs_diff_mean": _probability(lambda sums, n: sums["pd"] / n).means(
        "Mean |π_old − π_rollout| over tokens: probabilities, so unlikely "
        "tokens, which carry the mismatch, hardly show."
    ),
    "training/rollout_probs_diff_std": _probability(
        lambda sums, n: base.std(sums["pd"], sums["pdd"], n)
    ).means("Standard deviation (n − 1) of |π_old − π_rollout| over tokens."),
    "training/rollout_actor_probs_pearson_corr": _probability(_pearson).means(
        "Correlation of the two probabilities over tokens; near 1 "
        "for any two policies that agree on which tokens are sure."
    ),
}
"""Of decoupled presets, whose old policy the trainer computed."""
_MASK = "over tokens that rejection leaves; of the dump's current policy, where verl averages mini-batches"
CLIPS: dict[str, Row] = {
    "actor/pg_clipfrac": _kept("clipped").means(
        f"Share where the clipped term of the PPO loss is the larger one, {_MASK}."
    ),
    "actor/pg_clipfrac_lower": _kept("clipped_lower").means(
        f"Share where A < 0 and the dual clip decides, {_MASK}."
    ),
}
"""Of losses that clip."""
KL: dict[str, Row] = {
    "actor/ppo_kl": _kept("kl").means(
        f"Mean log π_anchor − log π_θ, nats, the anchor being π_old (π_rollout in bypass), "
        f"{_MASK}: it may be negative. PPO and CISPO bound it to ±20 per token; REINFORCE and GSPO do not."
    ),
}

# ---------------------------------------------------------------- all that a generation logs


@cache
def _entries(generation: Generation, preset: Preset) -> tuple[base.Entry, ...]:
    """Return what the generation logs under a preset."""
    prefix, weight, rules = generation.prefix, preset.weight, preset.reject
    level = "at sequence or geometric level"
    found = [*table(GAP | (CHI2 if generation.chi2 else {}), prefix + generation.gap)]
    if weight is not None:
        raw = of = weight_spread(preset, weight, generation)
        words = "the weights before truncation (e^(log-ratio bounded to ±20))", "[1/C, C]", level
        if generation.applied:
            of = replace(raw, key=f"{weight.action}/{raw.key}", low=0.0, applied=True)
            words = "the weights as applied", "[0, C]", "at sequence level"
        of_rows = weight.over == "sum" or (weight.over == "mean" and not generation.weight_band)
        names = _ratios(raw, of, of_rows, *words)
        if generation.applied and weight.action == "mask":
            names["oob_ratio"] = OUT_OF_BOUNDS
        if weight.normalize and not generation.weight_band:
            names["batch_norm_factor"] = NORM
        found += table(names, f"{prefix}rollout_is_")
    if generation.veto:
        found += table(VETO, prefix)
    for at, rule in enumerate(() if generation.weight_band else rules):
        spread = reject_spread(rule, generation)
        if generation.divergences:
            over = "token" if rule.over == "token" else f"seq_{rule.over}"
            found += table(_option(spread, rule, at), f"{prefix}rollout_rs_{over}_{spread.statistic}_")
        else:
            of_rows = rule.over in ("sum", "mean")
            names = _ratios(spread, spread, of_rows, "the ratio that rejects", "the thresholds", level)
            found += table(names, f"{prefix}rollout_rs_")
    if rules:
        stem = "rollout_is_" if generation.weight_band else "rollout_rs_"
        found += table(_masked(generation.divergences), prefix + stem)
    if generation.debug:
        found += table(PROBABILITIES if preset.policy == "old" else {})
        found += table((CLIPS if preset.loss != "reinforce" else {}) | KL)
    return tuple(found)


class Verl(base.Log):
    """One generation; what it logs follows from the preset's own weight and rules."""

    def entries_of(self, preset: Preset) -> tuple[base.Entry, ...]:
        """Return what is logged under a preset."""
        return _entries(GENERATIONS[self.name], preset)

    def names(self) -> Mapping[str, str]:
        """Return logged name → meaning, `*` for the part of an option's name before its statistic."""
        band = Reject("k1", lower=-1.0, upper=1.0)
        weight = Weight(upper=2.0, action="mask", normalize=True)
        rules = (band, Reject("k2", upper=1.0), Reject("k3", upper=1.0))
        several = GENERATIONS[self.name].divergences
        every = self.entries_of(Preset("", "", weight=weight, reject=rules if several else rules[:1]))
        return {re.sub(r"rs_token_(k\d)", r"rs_*_\1", one.name): one.meaning for one in every}


# ---------------------------------------------------------------- configuration

BLOCK = "algorithm.rollout_correction."
ACTOR = "actor_rollout_ref.actor."
LOSS = "actor_rollout_ref.actor.policy_loss."
LOG_PROBS = {"actor_rollout_ref.rollout.calculate_log_probs": True}
CLIP = ClipKeys("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", dual_default=3.0)
LEVELS = {"token": "token", "sum": "sequence", "mean": "geometric"}
MODES = {
    "ppo_clip": "vanilla",
    "gspo": "gspo",
    "cispo": "cispo",
    "sapo": "sapo",
    "gmpo": "geo_mean",
    "dro": "dro",
    "reinforce": "gpg",
}
"""Losses that the decoupled form can have → loss_mode."""
DPPO = {("prob_diff", "against_or_zero"): "dppo_tv", ("binary_kl", "away"): "dppo_kl"}
"""Statistic and advantage of a rule on tokens → loss_mode."""
TAUS = {"tau_positive": "tau_pos", "tau_negative": "tau_neg"}
OPTIONS = {"token": "token", "sum": "seq_sum", "mean": "seq_mean", "max": "seq_max"}


def verl(parts: Parts) -> Translation:
    """Today's keys, and those of the generation whose logs the preset has, or that could still express it."""
    preset = parts.preset
    found: list[Translation] = []
    failed: list[ConfigError] = []
    refused = ""
    for keys in (january, november, october):
        if keys is november and not failed and preset.logs not in ("verl-2025-10", "verl-2025-11"):
            break
        if keys is october and preset.logs != "verl-2025-10":
            break
        try:
            found.append(keys(Parts(preset)))
        except ConfigError as error:
            failed.append(error)
            if keys is january:
                refused = f"verl from 0.7.1 cannot say this: {error.message}"
    if not found:
        raise failed[0]
    texts = dict.fromkeys(text for _, remarks in found for text in remarks)
    return tuple(one for snippets, _ in found for one in snippets), (*texts, *config.remarks(refused))


def _translation(settings: Settings, preset: Preset, *notes: object, added: str = "") -> Translation:
    config.no_dual_clip(preset)
    settings = {**settings, **LOG_PROBS, **config.clip_settings(preset, CLIP, ACTOR)}
    idle = "bounds of 1.0e-9 and 1.0e+9 are idle: the log-ratio is clamped to ±20"
    found = config.remarks(*notes, config.idle(settings) and idle, CLIP.remark(preset))
    return schema.yaml_and_hydra("verl", settings, added), found


def october(parts: Parts) -> Translation:
    """0.6.0: algorithm.rollout_is*: one level for weight and bounds; bounds on r itself."""
    preset = parts.preset
    parts.need(("old",), ("ppo_clip",))
    settings: Settings = {"rollout_is": preset.apply and not parts.bare}
    weighted = parts.weight is not None
    if weighted:
        settings |= _october_weight(parts)
    veto = parts.take_veto()
    if veto is not None and not weighted:
        config.cannot("a veto without a weight")
    settings["rollout_is_veto_threshold"] = veto.lower if veto else None
    parts.preset = Preset(preset.name, preset.summary)  # `apply` is in the settings
    parts.finish()
    drops = settings["rollout_is_veto_threshold"] or settings.get("rollout_is_mode") == "mask"
    zeroed = "in verl 0.6.0 what is dropped stays in the denominator: its weight is 0"
    return _translation(config.prefixed("algorithm.", settings), preset, drops and zeroed)


def _october_weight(parts: Parts) -> Settings:
    over = parts.weight.over if parts.weight else ""
    level = LEVELS.get(over) or config.cannot("weights of a turn")
    band = parts.take_band(over) if parts.rules or (parts.weight and parts.weight.action == "mask") else None
    if band is not None:
        low, high = config.idle_bounds(*band)
        mode = {"rollout_is_mode": "mask", "rollout_is_threshold": high, "rollout_is_threshold_lower": low}
        return {"rollout_is_level": level, **mode}
    weight = parts.take_weight(over)
    _, upper = config.idle_bounds(None, weight.upper if weight else None)
    return {"rollout_is_level": level, "rollout_is_mode": "truncate", "rollout_is_threshold": upper}


def november(parts: Parts) -> Translation:
    """0.6.1 and 0.7.0: algorithm.rollout_correction with rollout_rs and the veto; bounds on r itself.

    In bypass mode these releases set the loss where the actors do not see it, so that a PPO clip against the
    rollout is all they can do.
    """
    bypass = parts.policy == "current"
    parts.need(("old", "current"), ("ppo_clip",))
    if bypass and not parts.bare:
        config.cannot("weights or rules of π_θ")
    parts.split_mask()
    settings: Settings = {"rollout_is": None}
    weight = parts.take_weight("token", "sum")
    if weight is not None:
        _, upper = config.idle_bounds(None, weight.upper)
        settings = {"rollout_is": LEVELS[weight.over], "rollout_is_threshold": upper}
    rule = next((rule for over in LEVELS if (rule := parts.take("ratio", over))), None)
    settings["rollout_rs"] = LEVELS[rule.over] if rule else None
    if rule is not None:
        low, high = config.idle_bounds(rule.lower, rule.upper)
        settings |= {"rollout_rs_threshold": high, "rollout_rs_threshold_lower": low}
    veto = parts.take_veto()
    settings["rollout_token_veto_threshold"] = veto.lower if veto else None
    settings["bypass_mode"] = bypass
    parts.finish()
    return _translation(config.prefixed(BLOCK, settings), parts.preset)


def january(parts: Parts) -> Translation:
    """Since 0.7.1: algorithm.rollout_correction with the k1, k2, k3 options."""
    bypass = parts.policy == "current"
    parts.need(("old", "current"), ("ppo_clip", "reinforce") if bypass else tuple(MODES))
    dppo = _dppo(parts) if bypass else None
    if dppo is not None:
        parts.finish()
        anchored = "needs the V1 trainer (the default): the legacy one replaces loss_mode in bypass mode"
        return _translation(dppo, parts.preset, anchored)
    if parts.loss == "gmpo" and parts.weight is not None and parts.weight.over == "token":
        config.cannot("weights of tokens under GMPO, of which it takes the sequence's geometric mean")
    if bypass and parts.loss == "ppo_clip" and parts.weight is not None:
        config.cannot(
            "weights of π_θ under a PPO clip: bypass_mode applies them to loss_type reinforce alone"
        )
    settings = {**_january_weight(parts), **_january_rules(parts)}
    settings |= {"bypass_mode": bypass, **({"loss_type": parts.loss} if bypass else {})}
    if parts.veto is not None:
        config.cannot(
            "a veto on one token, which is gone since 2026-01-14 (its nearest is rollout_rs=seq_max_k2)"
        )
    parts.finish()
    block = config.prefixed(BLOCK, settings)
    if bypass:
        block |= {ACTOR + "use_rollout_log_probs": True, LOSS + "loss_mode": "bypass_mode"}
        block |= config.prefixed(f"{LOSS}rollout_correction.", settings)
    elif parts.loss != "ppo_clip":
        block[LOSS + "loss_mode"] = MODES[parts.loss]
        block |= config.prefixed(ACTOR, config.shape_settings(parts.preset, TAUS))
        if parts.loss == "dro":
            block[LOSS + "dro_beta"] = parts.preset.shape.penalty
    rules = settings["rollout_rs"] is not None
    return _translation(
        block,
        parts.preset,
        rules
        and any(rule.statistic in ("ratio", "k1") for rule in parts.preset.reject)
        and "since 0.7.1 verl compares k1 bounds with -log r: these thresholds are on 1/r",
        rules
        and not bypass
        and "the V1 trainer (the default) counts rejected tokens in the denominator, the legacy one not",
        bypass and "without the second block the loss falls back to sequence weights with threshold 2",
        added=LOSS + "rollout_correction",
    )


def _dppo(parts: Parts) -> Settings | None:
    """Return the settings of a DPPO mask with its truncated ratio; None if there is none.

    Its bounds are clip_ratio_low and _high, on a divergence from the anchor: the rollout, in bypass mode.
    """
    weight = parts.weight
    mode = next((name for rule in parts.rules if (name := DPPO.get((rule.statistic, rule.advantage)))), None)
    if parts.loss != "reinforce" or mode is None or weight is None or weight.upper is None:
        return None
    rule = parts.rules.pop()
    low = rule.upper if mode == "dppo_kl" else rule.lower and -rule.lower
    if parts.rules or rule.over != "token" or config.unusual(rule) or None in (low, rule.upper):
        config.cannot(f"this rule beside {mode}")
    parts.take_weight("token", actions=("truncate",))
    return {
        BLOCK + "bypass_mode": True,
        LOSS + "loss_mode": mode,
        ACTOR + "clip_ratio_low": low,
        ACTOR + "clip_ratio_high": rule.upper,
        ACTOR + "clip_ratio_c": weight.upper,
    }


def _january_weight(parts: Parts) -> Settings:
    weight = parts.take_weight("token", "sum", actions=("truncate", "none", "mask"), normalize=True)
    if weight is None:
        return {"rollout_is": None}
    low, high = config.idle_bounds(weight.lower, weight.upper)
    band = f"{schema.number(low)}_{schema.number(high)}"
    found = {
        "rollout_is": LEVELS[weight.over],
        "rollout_is_threshold": band if weight.action == "mask" else high,
    }
    return {**found, **({"rollout_is_batch_normalize": True} if weight.normalize else {})}


def _january_rules(parts: Parts) -> Settings:
    options: dict[str, str] = {}
    for rule in tuple(parts.rules):
        option, threshold = _option_of(rule) or ("", "")
        if option and option not in options and parts.take(rule.statistic, rule.over):
            options[option] = threshold
    if not options:
        return {"rollout_rs": None}
    return {"rollout_rs": ",".join(options), "rollout_rs_threshold": ",".join(options.values())}


def _option_of(rule: Reject) -> tuple[str, str] | None:
    """Return (option, threshold) of a rule; None if there is none.

    A k1 option has bounds on 1/r; a missing one is idle where the clamp makes it so.
    """
    over, statistic, open_ended = OPTIONS.get(rule.over), rule.statistic, None in (rule.lower, rule.upper)
    if over is None:
        return None
    if statistic in ("k2", "k3") and rule.lower is None and rule.upper is not None:
        return f"{over}_{statistic}", schema.number(rule.upper)
    if statistic not in ("ratio", "k1") or rule.over == "max" or (rule.over == "sum" and open_ended):
        return None  # tokens are clamped, their sum is not
    low, high = rule.lower, rule.upper
    if statistic == "ratio":
        low, high = high and schema.inverse(high), low and schema.inverse(low)
    else:
        low, high = (None if bound is None else math.exp(bound) for bound in (low, high))
    return f"{over}_k1", "_".join(map(schema.number, config.idle_bounds(low, high)))


def flash_rl(parts: Parts) -> Translation:
    """yaof20/verl, the fork for Flash-RL: an upper bound on the token weight, and nothing else."""
    parts.need(("old",), ("ppo_clip",))
    weight = parts.take_weight("token", actions=("truncate",))
    parts.finish()
    cap = -1.0 if weight is None else weight.upper
    clip = config.clip_settings(parts.preset, CLIP, ACTOR)
    remark = "key of the fork yaof20/verl, main; its branch flash-rl calls it imp_ratio_cap"
    settings = {ACTOR + "tis_imp_ratio_cap": cap, **LOG_PROBS, **clip}
    return schema.yaml_and_hydra("flash-rl", settings), (remark,)


def _guards(preset: Preset, snippets: tuple[Snippet, ...]) -> Guards:
    """Return the guards of the newest version that can express the preset."""
    if all(one.age[0] for one in snippets):
        return Guards(20.0, denominator="kept")
    unclamped: frozenset[Statistic] = frozenset({"prob_diff", "binary_kl"})
    return Guards(20.0, "aggregate", "token", unclamped, None if preset.policy == "old" else "all")


TRAINER = Trainer("verl", verl, _guards, logs=tuple(Verl(name, shares="verl") for name in GENERATIONS))
FLASH_RL = Trainer("flash-rl", flash_rl, clip=CLIP)

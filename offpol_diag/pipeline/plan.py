"""Presets → tables of numbers, made once: what rows are made of, and which sums are wanted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from offpol_diag.pipeline import tables as t
from offpol_diag.pipeline.formulas import LARGEST
from offpol_diag.presets import AGGREGATES, FLOAT32_OVERFLOW, Policy, Preset, Reject, Veto, Weight

# ---------------------------------------------------------------- Losses


class Loss(NamedTuple):
    """What the plan must know of a policy loss beside its formula.

    Attributes:
        always: whether the preset's weight multiplies it for any anchor; else for the anchor π_old alone:
            with the anchor π_rollout its own ratio is already the correction.
        ratio: whether it has a ratio of its own, within the preset's `clip`.
        pooled: whether all tokens of a sequence share that ratio.
    """

    always: bool = False
    ratio: bool = True
    pooled: bool = False


LOSSES = {
    "ppo_clip": Loss(),
    "reinforce": Loss(always=True, ratio=False),
    "surrogate": Loss(always=True, ratio=False),
    "gspo": Loss(pooled=True),
    "cispo": Loss(),
}


def anchor_of(policy: Policy) -> Policy:
    """Return the denominator of the loss's own ratio: π_old for decoupled presets, else π_rollout."""
    return "old" if policy == "old" else "rollout"


def weighted(preset: Preset) -> bool:
    """Return whether the preset's weight multiplies its loss."""
    return LOSSES[preset.loss].always or preset.policy == "old"


def loss_key(preset: Preset) -> tuple[object, ...]:
    """Return what tells losses of tokens apart."""
    return preset.loss, anchor_of(preset.policy), preset.clip if LOSSES[preset.loss].ratio else None


# ---------------------------------------------------------------- The plan

COLUMNS = frozenset({"advantages", "current"})
"""Columns of a dump without which some sums are left out."""


class OfSequences(NamedTuple):
    """What decides about whole sequences under each preset: places, [P]; −1 where there is none.

    Attributes:
        kept: row of the sequences that rules on sequences and the veto keep.
        weight: row of the weights of sequences.
        hits: number of tokens beyond the veto's bounds.
        high: number of weights above their upper bound: of tokens, or 1 for a sequence's.
        low: the same below the lower bound.
        bounded: number of weights or tokens on which the safety bound acts.
        of_tokens: 1 where `high` and `low` count tokens, 0 where they count sequences.
        bounded_of_tokens: the same of `bounded`.
    """

    kept: t.Ints
    weight: t.Ints
    hits: t.Ints
    high: t.Ints
    low: t.Ints
    bounded: t.Ints
    of_tokens: t.Ints
    bounded_of_tokens: t.Ints


@dataclass(frozen=True)
class Decisions:
    """What rules, weights and vetoes of whole sequences are decided from.

    The tables are those of tokens, with numbers of sequences for rows; places below `FIXED_ROWS` depend on
    the sequence's mean advantage.
    """

    numbers: t.SequenceNumbers
    weights: t.Weights
    rules: t.Rules
    masks: int
    of_preset: OfSequences


@dataclass(frozen=True)
class Plan:
    """What to compute for some presets.

    Attributes:
        first: rows of tokens that sums over sequences and turns need.
        rows: rows of tokens that weights, masks, losses and sums need.
        sequences, turns: numbers of sequences and turns, from those sums.
        of_preset: per kind of sum, the line of each preset, [P]; −1 where it has none.
        over_all: line of each preset's weights summed over all tokens, also rejected ones, [P]; −1 for none.
        decisions: what concerns whole sequences.
        cut_off: (policy, rule) of each column of tokens that a rule on whole trainer batches drops.
    """

    first: t.TokenRows
    rows: t.TokenRows
    sequences: t.SequenceNumbers
    turns: t.TurnNumbers
    weights: t.Weights
    rules: t.Rules
    losses: t.Losses
    sums: t.SumTables
    sizes: t.Sizes
    of_preset: t.SumTables
    over_all: t.Ints
    decisions: Decisions
    cut_off: list[tuple[Policy, Reject]]

    @cached_property
    def nothing(self):
        """Weights, rules, losses and sums without a line: what a pass for rows alone computes."""
        every = self.weights, self.rules, self.losses, self.sums
        return tuple(t.without_lines(each) for each in every)

    @classmethod
    def of(cls, presets, columns=COLUMNS, losses=True, over_all=False):
        """Make the plan.

        Args:
            presets: the presets, all of whose log-probs the dump has.
            columns: those of `COLUMNS` that the dump has.
            losses: whether the sums of losses are wanted.
            over_all: whether Σ w over all tokens is wanted of presets that do not normalise by it.
        """
        builder = _Builder(frozenset(columns))
        return builder.plan(presets, losses=losses, over_all=over_all)


class Distinct(dict[Any, int]):
    """Numbers that keys get in order of first use."""

    def number(self, key):
        """Return the number of a key; −1 for None."""
        return -1 if key is None else self.setdefault(key, len(self))


class _Builder:
    """Collects the lines of all tables."""

    def __init__(self, columns):
        self.columns = columns
        self.records = {}  # table → its lines
        self.rows = {}  # (table, line without its row) → row
        self.numbers = {"sequence": Distinct(), "turn": Distinct(), "decision": Distinct()}
        self.tables_of_numbers = {}  # ("sequence", "turn" or "decision", table) → its lines
        self.cut_off = Distinct()

    # ---- rows and numbers, each made once

    def row(self, table, *line):
        """Return the row of tokens that a table computes from `line`."""
        key = table, line
        if key not in self.rows:
            self.rows[key] = t.FIXED_ROWS + len(self.rows)
            self.records.setdefault(table, []).append((self.rows[key], *line))
        return self.rows[key]

    def number(self, per, table, *line):
        """Return the number per sequence or turn, or of a sequence's decisions, that a table computes."""
        numbers, key = self.numbers[per], (table, line)
        first = t.FIXED_ROWS if per == "decision" else 0
        if key not in numbers:
            self.tables_of_numbers.setdefault((per, table), []).append((first + len(numbers), *line))
        return first + numbers.number(key)

    def spread(self, per, number):
        """Return the row that gives each token the number of its sequence or turn."""
        return self.row(t.OfSequences if per == "sequence" else t.OfTurns, number)

    def aggregate(self, per, over, row):
        """Return the number of a sequence or turn that a row of tokens is aggregated to.

        Args:
            per: sequence, turn, or decision: a sequence's number that no token needs.
            over: sum, mean, max, min, or segment for the mean of a turn.
            row: the row.
        """
        if over in ("max", "min"):
            return self.number(per, t.Extremes, row, 1 if over == "max" else -1)
        return self.number(per, t.Totals if over == "sum" else t.Means, row)

    def log_ratio(self, policy, before="rollout", bound=None):
        row = self.row(t.LogRatios, t.LOG_PROBS[policy], t.LOG_PROBS[before])
        return row if bound is None else self.row(t.BoundedLogRatios, row, bound)

    def statistic(self, name, policy, safety=None):
        log_ratio = self.log_ratio(policy)
        bound = math.inf if safety is None else safety
        most = math.inf if bound > MOST_NATS else math.expm1(bound)
        least = -1.0 if safety is None else math.expm1(-safety)
        ratio_minus_one = self.row(t.RatiosMinusOne, log_ratio)
        return self.row(
            t.Statistics, log_ratio, ratio_minus_one, t.KINDS.index(name), -bound, bound, least, most
        )

    # ---- lines of weights, rules, losses

    def weight(self, policy, weight):
        """Return a line of `Weights`, of a weight of tokens or turns."""
        if weight.over == "token":
            log_ratio = self.log_ratio(policy)
            return log_ratio, self.row(t.Ratios, log_ratio), *weight_bounds(weight)
        mean = self.aggregate("turn", "segment", self.log_ratio(policy, bound=early_bound(weight)))
        ratio = self.spread("turn", self.number("turn", t.MeanRatios, mean))
        return self.spread("turn", mean), ratio, *weight_bounds(weight)

    def weight_of_sequences(self, policy, weight):
        """Return a line of `Weights`, of a weight of whole sequences."""
        row = self.log_ratio(policy, bound=early_bound(weight))
        log_ratio = self.aggregate("decision", weight.over, row)
        ratio = self.number("decision", t.MeanRatios, log_ratio)
        return log_ratio, ratio, *weight_bounds(weight)

    def counts(self, policy, weight):
        """Return the numbers of weights above and below their bounds, and of those the safety acts on."""
        bound = early_bound(weight)
        lower, upper = log_bounds(weight, weight.safety if bound is None else None)
        safety = LARGEST if weight.safety is None else weight.safety
        within = "token" if weight.safety_at == "token" and weight.safety is not None else weight.over
        return (
            self.outside(policy, weight.over, bound, -math.inf, upper),
            self.outside(policy, weight.over, bound, lower, math.inf),
            self.outside(policy, within, None, -safety, safety),
        )

    def outside(self, policy, over, bound, lower, upper):
        """Return the number of tokens, or 1 for a sequence, whose log-ratio is outside; −1 if none can be."""
        if lower == -math.inf and upper == math.inf:
            return -1
        row = self.log_ratio(policy, bound=bound)
        if over in ("sum", "mean"):
            number = self.aggregate("decision", over, row)
            return self.number("decision", t.Beyond, number, lower, upper)
        if over == "segment":
            row = self.spread("turn", self.aggregate("turn", over, row))
        return self.number("decision", t.Totals, self.row(t.Outside, row, lower, upper))

    def rule(self, mask, policy, rule):
        """Return a line of `Rules`, of a rule on tokens."""
        if rule.over == "batch":
            value = self.row(t.CutOff, self.cut_off.number((policy, rule)))
            return mask, value, t.ONE, t.ONE, -math.inf, 0.5
        if rule.advantage == "away":
            counts = (self.row(t.Away, self.log_ratio(policy)),) * 2
        else:
            counts = t.COUNTS[rule.advantage]
        value, late = self.judged(rule, policy), late_bound(rule)
        if rule.over != "token":
            per = "turn" if rule.over == "segment" else "sequence"
            value = self.spread(per, self.aggregate(per, rule.over, value))
        bounds = log_bounds if rule.statistic == "ratio" else plain_bounds
        return mask, value, *counts, *bounds(rule, late)

    def rule_on_sequences(self, mask, policy, rule):
        """Return a line of `Rules`, of a rule on sequences or of a veto."""
        if isinstance(rule, Veto):
            return mask, self.hits(policy, rule), t.ONE, t.ONE, -math.inf, 0.5
        value, late = self.aggregate("decision", rule.over, self.judged(rule, policy)), late_bound(rule)
        bounds = log_bounds if rule.statistic == "ratio" else plain_bounds
        return mask, value, *t.COUNTS[rule.advantage], *bounds(rule, late)

    def judged(self, rule, policy):
        """Return the row that a rule judges, or that is aggregated to what it judges."""
        return self.statistic(rule.statistic, policy, rule.safety if late_bound(rule) is None else None)

    def hits(self, policy, veto):
        """Return the number of tokens beyond a veto's bounds."""
        return self.outside(policy, "token", None, *log_bounds(veto, None))

    def loss(self, at, preset):
        """Return the table of a preset's loss and its line there."""
        kind, clip = preset.loss, preset.clip
        if kind in ("reinforce", "surrogate"):
            return t.ReinforceLosses, (at, t.CURRENT if kind == "reinforce" else t.ONE)
        log_ratio = self.log_ratio("current", anchor_of(preset.policy))
        low = 0.0 if clip.low is None else 1.0 - clip.low
        high = math.inf if clip.high is None else 1.0 + clip.high
        dual = math.inf if clip.dual is None else clip.dual
        highest = LARGEST if clip.safety is None else clip.safety
        lowest = -LARGEST if kind == "gspo" else -highest  # a mean is bounded from above only
        safety_of_r = math.exp(lowest), math.exp(highest)
        if kind == "cispo":
            return t.CispoLosses, (at, self.row(t.Ratios, log_ratio), low, high, *safety_of_r)
        ratio = self.row(t.Ratios, log_ratio)
        if kind == "gspo":
            mean = self.aggregate("sequence", "mean", log_ratio)
            ratio = self.spread("sequence", self.number("sequence", t.MeanRatios, mean))
        return t.PpoLosses, (at, ratio, low, high, dual, *safety_of_r)

    # ---- all together

    def plan(self, presets, losses, over_all):
        """Return the plan of some presets: see `Plan.of`."""
        weights, masks = Distinct(), Distinct()
        weight_of = [weights.number(weight_key(p)) for p in presets]
        mask_of = [masks.number(mask_key(p)) for p in presets]
        weight_lines = [self.weight(*key) for key in weights]
        rule_lines = [self.rule(at, *rule) for rules, at in masks.items() for rule in rules]
        decisions = self.decide(presets)

        losses = losses and {"advantages", "current"} <= self.columns
        loss_tables, loss_of = self.losses(presets if losses else [])
        kls = Distinct()
        in_loss = [losses and weighted(p) for p in presets]

        wanted = t.SumTables(*(Distinct() for _ in t.SumTables._fields))
        of_preset = t.SumTables(*([] for _ in t.SumTables._fields))
        everywhere, no_weight = len(masks), len(weights)
        lines_over_all = []
        for at, (p, weight, mask) in enumerate(zip(presets, weight_of, mask_of, strict=True)):
            mask = mask if mask >= 0 else everywhere
            if losses:
                loss, clips, dual_clips = loss_of[at]
                of_loss = weight if weight >= 0 and in_loss[at] else no_weight
            lines = t.SumTables(
                kept=(mask,),
                gap=(*self.gap_rows(p.policy), mask),
                weight=(weight, mask) if weight >= 0 else None,
                clip=(loss, mask) if losses and clips else None,
                dual_clip=(loss, mask) if losses and dual_clips else None,
                kl=(kls.number(self.kl_line(p)), mask) if losses else None,
                loss=(loss, of_loss, mask) if losses else None,
            )
            for line, keys, numbers in zip(lines, wanted, of_preset, strict=True):
                numbers.append(keys.number(line))
            over = weight >= 0 and (over_all or p.weight.normalize)
            lines_over_all.append(wanted.weight.number((weight, everywhere) if over else None))

        sums = t.tables(t.SumTables, wanted)
        sequences = self.numbers_of("sequence", t.SequenceNumbers)
        turns = self.numbers_of("turn", t.TurnNumbers)
        loss_tables = t.tables(
            t.Losses, [list(kls) if n == "kls" else loss_tables.get(c, []) for n, c in t.parts(t.Losses)]
        )
        weight_table, rule_table = t.table(t.Weights, weight_lines), t.table(t.Rules, rule_lines)
        every = t.tables(t.TokenRows, [self.records.get(c, []) for _, c in t.parts(t.TokenRows)])
        of_numbers = t.OfSequences, t.OfTurns, t.Outside
        second = [weight_table, rule_table, *loss_tables, sums.gap]
        return Plan(
            first=t.only(every, t.summed(sequences) | t.summed(turns), without=of_numbers),
            rows=t.only(every, t.summed(decisions.numbers).union(*map(t.inputs, second))),
            sequences=sequences,
            turns=turns,
            weights=weight_table,
            rules=rule_table,
            losses=loss_tables,
            sums=sums,
            sizes=t.Sizes(
                rows=t.FIXED_ROWS + len(self.rows),
                weights=len(weights),
                masks=len(masks),
                losses=len({loss for loss, *_ in loss_of}),
                kls=len(kls),
                sums=sum(len(keys) * width for keys, width in zip(wanted, t.WIDTHS.values(), strict=True)),
            ),
            of_preset=t.SumTables(*(np.array(lines, np.int64) for lines in of_preset)),
            over_all=np.array(lines_over_all, np.int64),
            decisions=decisions,
            cut_off=list(self.cut_off),
        )

    def losses(self, presets):
        """Return the lines of losses by table; and each preset's, with whether its clips can act."""
        losses = Distinct()
        loss_of = [losses.number(loss_key(p)) for p in presets]
        first_with = {loss: p for p, loss in zip(reversed(presets), reversed(loss_of), strict=True)}
        lines = [self.loss(at, first_with[at]) for at in range(len(losses))]
        by_kind = {kind: [line for k, line in lines if k is kind] for kind, _ in lines}
        made = [kind._make(line) for kind, line in lines]
        dual = [isinstance(line, t.PpoLosses) and line.dual < math.inf for line in made]
        return by_kind, [(at, acts(made[at]), dual[at]) for at in loss_of]

    def decide(self, presets):
        """Return what is decided of whole sequences."""
        weights, masks, lines = Distinct(), Distinct(), []
        for p in presets:
            weight, hits = p.weight, -1 if p.veto is None else self.hits(p.policy, p.veto)
            counts, of_tokens, bounded_of_tokens = (-1, -1, -1), True, True
            if weight is not None:
                counts = self.counts(p.policy, weight)
                of_tokens = weight.over in ("token", "segment")
                bounded_of_tokens = of_tokens or (weight.safety_at == "token" and weight.safety is not None)
            own = masks.number(sequence_mask_key(p)), weights.number(sequence_weight_key(p))
            lines.append((*own, hits, *counts, of_tokens, bounded_of_tokens))
        weight_lines = [self.weight_of_sequences(*key) for key in weights]
        rule_lines = [self.rule_on_sequences(at, *rule) for rules, at in masks.items() for rule in rules]
        lines = [(mask if mask >= 0 else len(masks), *rest) for mask, *rest in lines]
        return Decisions(
            self.numbers_of("decision", t.SequenceNumbers),
            t.table(t.Weights, weight_lines),
            t.table(t.Rules, rule_lines),
            len(masks),
            OfSequences(*np.array(lines, np.int64).reshape(len(lines), len(OfSequences._fields)).T),
        )

    def numbers_of(self, per, cls):
        return t.tables(cls, [self.tables_of_numbers.get((per, c), []) for _, c in t.parts(cls)])

    def gap_rows(self, policy):
        """Return the rows of k3, its r bounded so that sums stay finite, and of Δ."""
        log_ratio = self.log_ratio(policy)
        ratio_minus_one = self.row(t.RatiosMinusOne, log_ratio)
        bounds = -math.inf, LARGEST, -1.0, math.expm1(LARGEST)
        return self.row(t.Statistics, log_ratio, ratio_minus_one, t.KINDS.index("k3"), *bounds), log_ratio

    def kl_line(self, preset):
        row = LOSSES[preset.loss]
        bounded = row.ratio and not row.pooled and preset.clip.safety is not None
        log_ratio = self.log_ratio("current", anchor_of(preset.policy))
        return log_ratio, preset.clip.safety if bounded else math.inf


# ---------------------------------------------------------------- Keys and bounds


def weight_key(preset):
    """Return what tells weights of tokens apart; None without one, or for one of sequences."""
    if preset.weight is None or not preset.weight.on_tokens:
        return None
    return preset.policy, preset.weight


def sequence_weight_key(preset):
    """Return what tells weights of sequences apart; None without one, or for one of tokens."""
    if preset.weight is None or preset.weight.on_tokens:
        return None
    return preset.policy, preset.weight


def mask_key(preset):
    """Return what tells masks of tokens apart; None if no rule acts on tokens."""
    return tuple((preset.policy, rule) for rule in preset.reject if rule.on_tokens) or None


def sequence_mask_key(preset):
    """Return what tells masks of sequences apart; None if no rule acts on sequences."""
    rules = *(rule for rule in preset.reject if not rule.on_tokens), preset.veto
    return tuple((preset.policy, rule) for rule in rules if rule is not None) or None


def early_bound(weight):
    """Return the safety bound on each token's log-ratio before it is aggregated; None for none."""
    return weight.safety if weight.over != "token" and weight.safety_at == "token" else None


def late_bound(rule):
    """Return the safety bound on the log-ratio that a rule judges; None for none, or one on each token."""
    of_aggregate = rule.safety_at == "aggregate" or rule.over == "token"
    return rule.safety if rule.statistic in AGGREGATES and of_aggregate else None


def acts(line):
    """Whether a loss's clip can act."""
    return not isinstance(line, t.ReinforceLosses) and (line.low > 0 or line.high < math.inf)


def plain_bounds(part, safety):
    """Return the bounds below and above which a statistic is outside, clipped to ±safety before."""
    return one_bound(part.lower, -1, safety), one_bound(part.upper, 1, safety)


def log_bounds(part, safety):
    """Return the same for bounds of r, as logs: nothing is below the log of 0."""
    lower = None if part.lower is None or part.lower <= 0 else math.log(part.lower)
    upper = None if part.upper is None else math.log(part.upper)
    return one_bound(lower, -1, safety), one_bound(upper, 1, safety)


def one_bound(bound, sign, safety):
    """Return the number beyond which x is outside; sign is 1 for an upper bound.

    Where x is clipped to ±safety, a bound that is not within is never exceeded, and one beyond the other end
    always is.
    """
    if bound is None:
        return sign * math.inf
    reach = math.inf if safety is None else safety
    if sign * bound >= reach:
        return sign * math.inf
    return -sign * math.inf if sign * bound < -reach else bound


# ---------------------------------------------------------------- A preset as numbers


class Numbers(NamedTuple):
    """One line of a preset's tables.

    Attributes:
        part: the part of the preset.
        of: what is bounded, per token, turn or sequence.
        lower: the number below which it is outside, or what it is held to; −inf for none.
        upper: the number above which it is outside; inf for none.
    """

    part: str
    of: str
    lower: float
    upper: float


def numbers(preset: Preset) -> list[Numbers]:
    """Return a preset as the numbers that the formulas get.

    Bounds of r are compared as logs; a strict bound is the number next to it; a bound that a safety bound
    keeps out of reach is infinite. What has no bound is left out.
    """
    result = []
    if preset.weight is not None:
        lower, upper, below, above = weight_bounds(preset.weight)
        of = PER[preset.weight.over]
        result.append(Numbers("weight is held to", f"r{of}", lower, upper))
        result.append(Numbers("weight is 0 outside", f"log r{of}", below, above))
    for place, rule in enumerate(preset.reject, 1):
        bounds = log_bounds if rule.statistic == "ratio" else plain_bounds
        name = "log r" if rule.statistic == "ratio" else rule.statistic
        of = f"{name}{PER[rule.over]}"
        result.append(Numbers(f"rule {place} keeps", of, *bounds(rule, late_bound(rule))))
    if preset.veto is not None:
        result.append(Numbers("veto keeps", "log r of every token", *log_bounds(preset.veto, None)))
    if LOSSES[preset.loss].ratio:
        clip, of = preset.clip, "π_θ/π_anchor"
        low = 0.0 if clip.low is None else 1.0 - clip.low
        high = math.inf if clip.high is None else 1.0 + clip.high
        result.append(Numbers("loss is clipped to", of, low, high))
        if clip.dual is not None and preset.loss in ("ppo_clip", "gspo"):
            result.append(Numbers("dual clip, where A < 0", of, -math.inf, clip.dual))
    return [one for one in result if one.lower not in (0.0, -math.inf) or one.upper < math.inf]


PER = {
    "token": " of a token",
    "segment": ", mean of a turn",
    "mean": ", mean of a sequence",
    "sum": ", sum over a sequence",
    "max": ", largest of a sequence",
    "min": ", smallest of a sequence",
    "batch": ", mean of the trainer batch",
}
"""What a weight or rule is over → in words."""
MOST_NATS = 709.0
"""Largest x, of whole ones, of which e^x is a float."""


def weight_bounds(weight: Weight) -> tuple[float, float, float, float]:
    """Return the bounds that r is held to, and the band of log r outside which the weight is 0.

    A safety bound on the log-ratio of what is weighed is one on r.
    """
    safety = weight.safety if early_bound(weight) is None else None
    bound = math.inf if safety is None or safety > MOST_NATS else safety
    lower, upper = math.exp(-bound), math.exp(bound)
    below, above = -math.inf, math.inf
    if weight.action == "truncate":
        least, most = weight.lower or 0.0, math.inf if weight.upper is None else weight.upper
        lower, upper = (min(max(bound, least), most) for bound in (lower, upper))  # the safety acts first
    elif weight.action == "mask":
        below, above = log_bounds(weight, safety)
    if weight.overflow == "zero" and (weight.safety is None or weight.safety > FLOAT32_OVERFLOW):
        above = min(above, FLOAT32_OVERFLOW)
    return lower, upper, below, above

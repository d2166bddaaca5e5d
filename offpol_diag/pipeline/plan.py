"""Presets → tables of numbers, made once: what rows are made of, and which sums are wanted."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from offpol_diag.pipeline import tables as t
from offpol_diag.pipeline.formulas import LARGEST, LOG_W_HIGHEST
from offpol_diag.presets import AGGREGATES, FLOAT32_OVERFLOW, Policy, Preset, Reject, Veto, Weight

# ---------------------------------------------------------------- Losses


class Loss(NamedTuple):
    """What the plan must know of a policy loss beside its formula.

    Attributes:
        weighted: whether the preset's weight multiplies it for any anchor, for the anchor π_old alone (with
            the anchor π_rollout its own ratio is already the correction), or never.
        ratio: whether it has a ratio of its own, within the preset's `clip`.
        pooled: whether all tokens of a sequence share that ratio.
    """

    weighted: Literal["always", "old", "never"] = "old"
    ratio: bool = True
    pooled: bool = False


LOSSES = {
    "ppo_clip": Loss(),
    "reinforce": Loss("always", ratio=False),
    "surrogate": Loss("always", ratio=False),
    "gspo": Loss(pooled=True),
    "luspo": Loss(pooled=True),
    "cispo": Loss(),
    "sapo": Loss(),
    "topr": Loss(),
    "gmpo": Loss(),
    "fipo": Loss(),
    "dro": Loss(ratio=False),
    "vespo": Loss("never", ratio=False),
}


BOUNDS: dict[str, tuple[float | None, float | None, str]] = {
    "verl": (20.0, 10.0, "1dda039b core_algos.py:1338,2070 (vanilla, cispo), 1590 (gspo, above only)"),
    "openrlhf": (
        20.0,
        20.0,
        "3c3be623 openrlhf/models/loss.py:168; GSPO since pull request 1339, September 2026",
    ),
    "skyrl": (20.0, 10.0, "a9564572e ppo_utils.py:567,782 (regular, cispo), 709 (gspo, above only)"),
    "miles": (20.0, 20.0, "31f1ca961 loss_hub/math_utils.py:19-33"),
    "slime": (None, None, "624b824a8 slime/utils/ppo_utils.py:125-171"),
    "trl": (None, None, "f2cd57710 trl/trainer/grpo_trainer.py:3066"),
    "ms-swift": (None, None, "3602360a5 swift/rlhf_trainers/grpo_trainer.py:1039"),
    "nemo-rl": (None, None, "7ea279abf nemo_rl/algorithms/loss/loss_functions.py:527-540"),
    "areal": (None, None, "4aef98d8d areal/utils/functional/functional.py:509"),
}
"""Trainer → its bound on a token's |u| before exp, its bound on GSPO's sequence mean of u, and the source.

None: no bound. Beyond a bound r is constant, and a loss that depends on r has no gradient.
"""


def anchor_of(policy: Policy) -> Policy:
    """Return the denominator of the loss's own ratio: π_old for decoupled presets, else π_rollout."""
    return "old" if policy == "old" else "rollout"


def weighted(preset: Preset) -> bool:
    """Return whether the preset's weight multiplies its loss."""
    when = LOSSES[preset.loss].weighted
    return when == "always" or (when == "old" and preset.policy == "old")


def loss_key(preset: Preset) -> tuple[object, ...]:
    """Return what tells losses of tokens apart."""
    row = LOSSES[preset.loss]
    within = preset.weight if row.weighted == "never" else None
    return preset.loss, anchor_of(preset.policy), preset.clip if row.ratio else None, preset.shape, within


# ---------------------------------------------------------------- The plan

COLUMNS = frozenset({"advantages", "current", "rewards"})
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


class Left(NamedTuple):
    """A number of sequences or turns over the tokens that the rules and the veto of a preset leave.

    Attributes:
        preset: the place of that preset in the plan of such presets.
        over: how a row of tokens is aggregated: sum, mean, max, min, or segment for the mean of a turn. For
            VESPO: `weights` for the sum of the logs of tokens' weights over all tokens, `weight` for the log
            of the sequence's weight.
        row: the line of the row's sum.
        tokens: for segment the line of the number of tokens.
    """

    preset: int
    over: str
    row: int
    tokens: int


@dataclass(frozen=True)
class Plan:
    """What to compute for some presets.

    Attributes:
        first: rows of tokens that sums over sequences, turns and later tokens need.
        rows: rows of tokens that weights, masks, losses and sums need.
        sequences, turns: numbers of sequences and turns, from those sums.
        of_preset: per kind of sum, the line of each preset, [P]; −1 where it has none.
        over_all: line of each preset's weights summed over all tokens, also rejected ones, [P]; −1 for none.
        decisions: what concerns whole sequences.
        smoothed: (policy, weight) of each column of smoothed log-ratios.
        cut_off: (policy, rule) of each column of tokens that a rule on whole trainer batches drops.
        given: (policy, weight) of each smoothed log-ratio of sequences.
        left: numbers of sequences and turns over what other rules leave, from the sums of `before`.
        before: the plan of those rules; None if there are none.
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
    smoothed: list[tuple[Policy, Weight]]
    cut_off: list[tuple[Policy, Reject]]
    given: list[tuple[Policy, Weight]]
    left: list[Left]
    before: Plan | None

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

    def __init__(self, columns, result=None):
        self.columns = columns
        self.records = {}  # table → its lines
        self.rows = {}  # (table, line without its row) → row
        self.numbers = {"sequence": Distinct(), "turn": Distinct(), "decision": Distinct()}
        self.tables_of_numbers = {}  # ("sequence", "turn" or "decision", table) → its lines
        # found before the pass, and shared with the plan of what comes before
        self.known = result or (Distinct(), Distinct(), Distinct())
        self.smoothed, self.cut_off, self.given = self.known
        self.later, self.left = Distinct(), Distinct()

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

    def aggregate(self, per, over, what, among):
        """Return the number of a sequence or turn that a row of tokens is aggregated to.

        Args:
            per: sequence, turn, or decision: a sequence's number that no token needs.
            over: sum, mean, max, min, or segment for the mean of a turn.
            what: the name of a method that makes the row, and its arguments.
            among: None for all tokens, else a preset whose rules on tokens and veto leave those that count.
        """
        if among is not None:
            return self.number(per, t.Left, self.left.number((among, what, over)))
        row = getattr(self, what[0])(*what[1:])
        if over in ("max", "min"):
            return self.number(per, t.Extremes, row, 1 if over == "max" else -1)
        return self.number(per, t.Totals if over == "sum" else t.Means, row)

    def mean(self, per, summed):
        return self.number(per, t.Means, summed)

    def log_ratio(self, policy, before="rollout", bound=None):
        row = self.row(t.LogRatios, t.LOG_PROBS[policy], t.LOG_PROBS[before])
        return row if bound is None else self.row(t.BoundedLogRatios, row, bound)

    def pooled(self, per, log_ratio):
        """Return the rows of a log-ratio's mean over its sequence or turn, and of e^mean."""
        return self.spread_both(per, self.mean(per, log_ratio))

    def spread_both(self, per, log_ratio):
        """Return the rows of a log-ratio of sequences or turns, and of the ratio."""
        ratio = self.number(per, t.MeanRatios, log_ratio)
        return self.spread(per, log_ratio), self.spread(per, ratio)

    def statistic(self, name, policy, safety=None):
        log_ratio = self.log_ratio(policy)
        bound = math.inf if safety is None else safety
        most = math.inf if safety is None else math.expm1(safety)
        least = -1.0 if safety is None else math.expm1(-safety)
        ratio_minus_one = self.row(t.RatiosMinusOne, log_ratio)
        return self.row(
            t.Statistics, log_ratio, ratio_minus_one, t.KINDS.index(name), -bound, bound, least, most
        )

    # ---- lines of weights, rules, losses

    def weight(self, policy, weight, among):
        """Return a line of `Weights`, of a weight of tokens or turns."""
        if weight.action == "psis":
            log_ratio = self.row(t.SmoothedLogRatios, self.smoothed.number((policy, weight)))
            return log_ratio, self.row(t.Ratios, log_ratio), *weight_bounds(weight)
        if weight.over == "token":
            log_ratio = self.log_ratio(policy)
            ratio = self.row(t.Ratios, log_ratio)
        else:
            early = weight.safety if weight.safety_at == "token" else None
            what = "log_ratio", policy, "rollout", early
            log_ratio, ratio = self.spread_both("turn", self.aggregate("turn", "segment", what, among))
        return log_ratio, ratio, *weight_bounds(weight)

    def weight_of_sequences(self, policy, weight, among):
        """Return a line of `Weights`, of a weight of whole sequences."""
        if weight.action == "psis":
            log_ratio = self.number("decision", t.Given, self.given.number((policy, weight)))
        else:
            early = weight.safety if weight.safety_at == "token" else None
            what = "log_ratio", policy, "rollout", early
            log_ratio = self.aggregate("decision", weight.over, what, among)
        ratio = self.number("decision", t.MeanRatios, log_ratio)
        return log_ratio, ratio, *weight_bounds(weight)

    def counts(self, policy, weight, among):
        """Return the numbers of weights above and below their bounds, and of those the safety acts on."""
        early = weight.over != "token" and weight.safety_at == "token"
        lower, upper = log_bounds(weight, None if early else weight.safety)
        bound = weight.safety if early else None
        safety = LARGEST if weight.safety is None else weight.safety
        by_token = weight.safety_at == "token" and weight.safety is not None
        within = "token" if by_token else weight.over
        return (
            self.outside(policy, weight.over, bound, among, -math.inf, upper),
            self.outside(policy, weight.over, bound, among, lower, math.inf),
            self.outside(policy, within, None, None if by_token else among, -safety, safety),
        )

    def outside(self, policy, over, bound, among, lower, upper):
        """Return the number of tokens, or 1 for a sequence, whose log-ratio is outside; −1 if none can be."""
        if lower == -math.inf and upper == math.inf:
            return -1
        what = "log_ratio", policy, "rollout", bound
        if over in ("sum", "mean"):
            number = self.aggregate("decision", over, what, among)
            return self.number("decision", t.Beyond, number, lower, upper)
        row = self.log_ratio(*what[1:])
        if over == "segment":
            row = self.spread("turn", self.aggregate("turn", over, what, among))
        return self.number("decision", t.Totals, self.row(t.Outside, row, lower, upper))

    def rule(self, mask, policy, rule, among):
        """Return a line of `Rules`, of a rule on tokens."""
        policy = rule.policy or policy
        if rule.over == "batch":
            value = self.row(t.CutOff, self.cut_off.number((policy, rule)))
            return mask, value, t.ONE, t.ONE, -math.inf, 0.5
        if rule.advantage == "away":
            counts = (self.row(t.Away, self.log_ratio(policy)),) * 2
        else:
            counts = t.COUNTS[rule.advantage]
        what, late = judged(rule, policy)
        if rule.over == "token":
            value = getattr(self, what[0])(*what[1:])
        else:
            per = "turn" if rule.over == "segment" else "sequence"
            value = self.spread(per, self.aggregate(per, rule.over, what, among))
        bounds = log_bounds if rule.statistic == "ratio" else plain_bounds
        return mask, value, *counts, *bounds(rule, late)

    def rule_on_sequences(self, mask, policy, rule, among):
        """Return a line of `Rules`, of a rule on sequences or of a veto."""
        if isinstance(rule, Veto):
            return mask, self.hits(policy, rule), t.ONE, t.ONE, -math.inf, 0.5
        what, late = judged(rule, rule.policy or policy)
        value = self.aggregate("decision", rule.over, what, among)
        bounds = log_bounds if rule.statistic == "ratio" else plain_bounds
        return mask, value, *t.COUNTS[rule.advantage], *bounds(rule, late)

    def hits(self, policy, veto):
        """Return the number of tokens beyond a veto's bounds."""
        return self.outside(
            policy, "token", None, None, *log_bounds(Bounds(veto.lower, veto.upper, False), None)
        )

    def loss(self, at, preset):
        """Return the table of a preset's loss and its line there."""
        kind, clip, shape = preset.loss, preset.clip, preset.shape
        anchor = anchor_of(preset.policy)
        log_ratio = self.log_ratio("current", anchor)
        low = 0.0 if clip.low is None else 1.0 - clip.low
        high = math.inf if clip.high is None else 1.0 + clip.high
        dual = math.inf if clip.dual is None else clip.dual
        highest = LARGEST if clip.safety is None else clip.safety
        lowest = -LARGEST if kind in ("gspo", "luspo") else -highest  # a mean is bounded from above only
        safety_of_r = math.exp(lowest), math.exp(highest)
        if kind in ("gspo", "luspo"):
            pooled = self.pooled("sequence", log_ratio)
            return t.PpoLosses, (at, *pooled, t.ONE, low, high, dual, lowest, highest, *safety_of_r)
        if kind in ("ppo_clip", "fipo"):
            ratio, influence = self.row(t.Ratios, log_ratio), t.ONE
            if kind == "fipo":
                influence = self.influence(log_ratio, ratio, dual, shape, safety_of_r)
            own = at, log_ratio, ratio, influence
            return t.PpoLosses, (*own, low, high, dual, lowest, highest, *safety_of_r)
        if kind in ("reinforce", "surrogate"):
            return t.ReinforceLosses, (at, t.CURRENT if kind == "reinforce" else t.ONE)
        if kind == "cispo":
            return t.CispoLosses, (at, self.row(t.Ratios, log_ratio), low, high, *safety_of_r)
        if kind == "topr":
            good = t.POSITIVE
            if "rewards" in self.columns:
                good = self.spread("sequence", self.number("sequence", t.Good))
            return t.ToprLosses, (at, self.row(t.Ratios, log_ratio), good, low, high, *safety_of_r)
        if kind == "sapo":
            own = at, log_ratio, self.row(t.Ratios, log_ratio)
            taus = shape.tau_positive, shape.tau_negative
            return t.SapoLosses, (*own, *taus, lowest, highest, *safety_of_r)
        if kind == "dro":
            return t.DroLosses, (at, log_ratio, shape.penalty)
        if kind == "gmpo":
            low = -math.inf if clip.low is None else -clip.low
            high = math.inf if clip.high is None else clip.high
            held = self.mean("sequence", self.row(t.GmpoLogRatios, log_ratio, low, high))
            advantage = self.mean("sequence", t.ADVANTAGE)
            shared = self.number("sequence", t.GmpoNumbers, advantage, held)
            return t.GmpoLosses, (at, log_ratio, self.spread("sequence", shared), low, high)
        assert kind == "vespo", kind
        return t.VespoLosses, (at, *self.vespo_factors(log_ratio, preset))

    def influence(self, log_ratio, ratio, dual, shape, safety_of_r):
        """Return the row of FIPO's influence."""
        counted = self.row(t.FipoLogRatios, log_ratio, ratio, dual, *safety_of_r)
        column = self.later.number((counted, shape.half_life))
        later = self.row(t.Later, counted, column, shape.half_life)
        bounds = shape.lowest, shape.highest, shape.threshold
        return self.row(t.FipoInfluences, ratio, later, *bounds, *safety_of_r)

    def vespo_factors(self, log_ratio, preset):
        """Return the rows of VESPO's φ for A >= 0 and for A < 0."""
        log_weights, shape = -1, preset.shape
        if preset.weight is not None:
            policy, weight, among = preset.policy, preset.weight, left_by(preset)
            if weight.over == "token" and weight.action != "psis":
                log_weights = self.number("sequence", t.Totals, self.log_weight(policy, weight, None))
            else:
                own = Preset("", "", policy, weight, *((among.reject, among.veto) if among else ()))
                over = "weight" if weight.over in ("sum", "mean") else "weights"
                log_weights = self.number("sequence", t.Left, self.left.number((own, None, over)))
        bounded = self.row(t.BoundedLogRatios, log_ratio, LOG_W_HIGHEST)
        log_ratios = self.number("sequence", t.Totals, bounded)
        pairs = (
            (shape.k_positive, shape.lambda_positive),
            (shape.k_negative, shape.lambda_negative),
        )
        for pair in pairs:
            factor = self.number("sequence", t.VespoNumbers, log_ratios, log_weights, *pair)
            yield self.spread("sequence", factor)

    def log_weight(self, policy, weight, among):
        """Return the row of the bounded log of a token's weight, as VESPO multiplies it."""
        log_ratio, ratio, *bounds = self.weight(policy, weight, among)
        return self.row(t.VespoLogWeights, ratio, log_ratio, *bounds)

    # ---- all together

    def plan(self, presets, losses=True, over_all=False, rows=(), turn_rows=()):
        """Return the plan of some presets.

        `rows` and `turn_rows` are further rows of tokens that are wanted, each with the preset whose rules on
        tokens decide what is summed over sequences or turns; None for all tokens.
        """
        own_presets = presets
        presets = [p if p.apply else replace(p, weight=None, reject=(), veto=None) for p in presets]
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
                row=None,
                turn_row=None,
            )
            for line, keys, numbers in zip(lines, wanted, of_preset, strict=True):
                numbers.append(keys.number(line))
            over = weight >= 0 and (over_all or p.weight.normalize)
            lines_over_all.append(wanted.weight.number((weight, everywhere) if over else None))

        left, before = self.what_is_left()
        mask_by = {None: everywhere} | dict(zip(own_presets, mask_of, strict=True))
        of_rows = ([(row, mask_by[preset]) for row, preset in each] for each in (rows, turn_rows))
        lines = ([(row, mask if mask >= 0 else everywhere) for row, mask in each] for each in of_rows)
        wanted = wanted._replace(**dict(zip(("row", "turn_row"), lines, strict=True)))
        sums = t.tables(t.SumTables, wanted)
        sequences = self.numbers_of("sequence", t.SequenceNumbers)
        turns = self.numbers_of("turn", t.TurnNumbers)
        loss_tables = t.tables(
            t.Losses, [list(kls) if n == "kls" else loss_tables.get(c, []) for n, c in t.parts(t.Losses)]
        )
        weight_table, rule_table = t.table(t.Weights, weight_lines), t.table(t.Rules, rule_lines)
        every = t.tables(t.TokenRows, [self.records.get(c, []) for _, c in t.parts(t.TokenRows)])
        summed = [*map(t.summed, (sequences, turns)), every.later.summed.tolist()]
        of_numbers = t.OfSequences, t.OfTurns, t.Later, t.Outside, t.FipoInfluences
        second = [weight_table, rule_table, *loss_tables, sums.gap, sums.row, sums.turn_row]
        return Plan(
            first=t.only(every, set().union(*summed), without=of_numbers),
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
            smoothed=list(self.smoothed),
            cut_off=list(self.cut_off),
            given=list(self.given),
            left=left,
            before=before,
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
                counts = self.counts(p.policy, weight, left_by(p))
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

    def what_is_left(self):
        """Return the numbers over what other rules leave, and the plan whose sums they are made of."""
        if not self.left:
            return [], None
        own, presets = _Builder(self.columns, self.known), Distinct()
        rows, turn_rows, left = Distinct(), Distinct(), []
        for before, what, over in self.left:
            preset, row, count = presets.number(before), -1, -1
            mask = before  # the line of its mask is known when the plan is made
            if over == "weights":
                row = own.log_weight(before.policy, before.weight, left_by(before))
                row = rows.number((row, None))
            elif over == "segment":
                row = turn_rows.number((getattr(own, what[0])(*what[1:]), mask))
                count = turn_rows.number((t.ONE, mask))
            elif over != "weight":
                row = rows.number((getattr(own, what[0])(*what[1:]), mask))
            left.append(Left(preset, over, row, count))
        return left, own.plan(list(presets), losses=False, rows=list(rows), turn_rows=list(turn_rows))

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


def left_by(preset, at=None):
    """Return a preset of the rules on tokens and the veto that the weight, or the rule `at`, comes after.

    None where that weight or rule is over all tokens anyway.
    """
    part = preset.weight if at is None else preset.reject[at]
    if part.among == "all" or part.over == "token":
        return None
    before = tuple(rule for rule in preset.reject[:at] if rule.on_tokens)
    return Preset("", "", preset.policy, None, before, preset.veto)


def weight_key(preset):
    """Return what tells weights of tokens apart; None without one, or for one of sequences."""
    if preset.weight is None or preset.weight.over in ("sum", "mean"):
        return None
    return preset.policy, preset.weight, left_by(preset)


def sequence_weight_key(preset):
    """Return what tells weights of sequences apart; None without one, or for one of tokens."""
    if preset.weight is None or preset.weight.over not in ("sum", "mean"):
        return None
    return preset.policy, preset.weight, left_by(preset)


def mask_key(preset):
    """Return what tells masks of tokens apart; None if no rule acts on tokens."""
    return _rules_of(preset, True) or None


def sequence_mask_key(preset):
    """Return what tells masks of sequences apart; None if no rule acts on sequences."""
    veto = () if preset.veto is None else ((preset.policy, preset.veto, None),)
    return (*_rules_of(preset, False), *veto) or None


def _rules_of(preset, on_tokens):
    return tuple(
        (rule.policy or preset.policy, rule, left_by(preset, at))
        for at, rule in enumerate(preset.reject)
        if rule.on_tokens is on_tokens
    )


def judged(rule, policy):
    """Return how the row that a rule judges is made, and the safety bound on what it is aggregated to."""
    of_aggregate = rule.safety_at == "aggregate" or rule.over == "token"
    late = rule.safety if rule.statistic in AGGREGATES and of_aggregate else None
    return ("statistic", rule.statistic, policy, rule.safety if late is None else None), late


def acts(line):
    """Whether a loss's clip can act."""
    kind = type(line)
    if kind is t.GmpoLosses:
        return True
    with_clip = t.PpoLosses, t.CispoLosses, t.ToprLosses
    return kind in with_clip and (line.low > 0 or line.high < math.inf)


def plain_bounds(part, safety):
    """Return the bounds below and above which a statistic is outside, clipped to ±safety before."""
    return tuple(one_bound(x, sign, part.strict, safety) for x, sign in ((part.lower, -1), (part.upper, 1)))


def log_bounds(part, safety):
    """Return the same for bounds of r, as logs: nothing is below the log of 0."""
    lower = None if part.lower is None or part.lower <= 0 else math.log(part.lower)
    upper = None if part.upper is None else math.log(part.upper)
    return plain_bounds(Bounds(lower, upper, part.strict), safety)


class Bounds(NamedTuple):
    """Bounds of a weight or rule."""

    lower: float | None
    upper: float | None
    strict: bool


def one_bound(bound, sign, strict, safety):
    """Return the number beyond which x is outside; sign is 1 for an upper bound.

    Where x is clipped to ±safety, a bound further out is never exceeded, one at ±safety only if it
    is strict; and one beyond the other end always is.
    """
    if bound is None:
        return sign * math.inf
    reach = math.inf if safety is None else safety
    if sign * bound > reach or (sign * bound == reach and not strict):
        return sign * math.inf
    if sign * bound < -reach or (sign * bound == -reach and strict):
        return -sign * math.inf
    return float(np.nextafter(bound, -sign * math.inf)) if strict else bound


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
        late = rule.safety if rule.safety_at == "aggregate" and rule.statistic in AGGREGATES else None
        bounds = log_bounds if rule.statistic == "ratio" else plain_bounds
        name = "log r" if rule.statistic == "ratio" else rule.statistic
        result.append(Numbers(f"rule {place} keeps", f"{name}{PER[rule.over]}", *bounds(rule, late)))
    if preset.veto is not None:
        within = log_bounds(Bounds(preset.veto.lower, preset.veto.upper, strict=False), None)
        result.append(Numbers("veto keeps", "log r of every token", *within))
    if LOSSES[preset.loss].ratio:
        clip, of, off, none = preset.clip, "π_θ/π_anchor", 1.0, 0.0
        if preset.loss == "gmpo":
            of, off, none = f"log {of}", 0.0, -math.inf
        low = none if clip.low is None else off - clip.low
        high = math.inf if clip.high is None else off + clip.high
        result.append(Numbers("loss is clipped to", of, low, high))
        if clip.dual is not None and preset.loss in ("ppo_clip", "gspo", "luspo", "fipo"):
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


def weight_bounds(weight: Weight) -> tuple[float, float, float, float]:
    """Return the bounds that r is held to, and the band of log r outside which the weight is 0.

    A safety bound on the log-ratio of what is weighed is one on r.
    """
    early = weight.over != "token" and weight.safety_at == "token"  # then each token's is bounded before
    early = early or weight.action == "psis"  # so is what is smoothed
    safety = None if early else weight.safety
    lower, upper = (0.0, math.inf) if safety is None else (math.exp(-safety), math.exp(safety))
    below, above = -math.inf, math.inf
    if weight.action == "truncate":
        least, most = weight.lower or 0.0, math.inf if weight.upper is None else weight.upper
        lower, upper = (min(max(bound, least), most) for bound in (lower, upper))  # the safety acts first
    elif weight.action == "mask":
        below, above = log_bounds(weight, safety)
    if weight.overflow == "zero" and (weight.safety is None or weight.safety > FLOAT32_OVERFLOW):
        above = min(above, FLOAT32_OVERFLOW)
    return lower, upper, below, above

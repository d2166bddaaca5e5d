"""Presets → tables of numbers, made once: what rows are made of, and which sums are wanted."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from offpol_diag.pipeline import tables as t
from offpol_diag.pipeline.formulas import LARGEST, LOG_W_HIGHEST
from offpol_diag.presets import AGGREGATES, Policy, Preset, Reject, Weight

FLOAT32_OVERFLOW = math.log(float(np.finfo(np.float32).max))  # nats: larger weights are inf there

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


@dataclass(frozen=True)
class Plan:
    """What to compute for some presets.

    Attributes:
        first: rows of tokens that sums over sequences, turns and later tokens need.
        rows: rows of tokens that weights, masks, losses and sums need.
        sequences, turns: numbers of sequences and turns, from those sums.
        of_preset: per kind of sum, the line of each preset, [P]; −1 where it has none.
        smoothed: (policy, weight) of each column of smoothed log-ratios.
        cuts: (policy, rule) of each number that is a cut.
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
    smoothed: list[tuple[Policy, Weight]]
    cuts: list[tuple[Policy, Reject]]

    @property
    def nothing(self):
        """Weights, rules, losses and sums without a line: what a pass for rows alone computes."""
        every = self.weights, self.rules, self.losses, self.sums
        return tuple(t.without_lines(each) for each in every)

    @classmethod
    def of(cls, presets, rewards=False):
        """Make the plan; `rewards` says whether the dump has them (TOPR)."""
        return _Builder(rewards).plan(presets)


class Distinct(dict[Any, int]):
    """Numbers that keys get in order of first use."""

    def number(self, key):
        """Return the number of a key; −1 for None."""
        return -1 if key is None else self.setdefault(key, len(self))


class _Builder:
    """Collects the lines of all tables."""

    def __init__(self, rewards):
        self.rewards = rewards
        self.records = {}  # table → its lines
        self.rows = {}  # (table, line without its row) → row
        self.numbers = {"sequence": Distinct(), "turn": Distinct()}
        self.tables_of_numbers = {}  # ("sequence" or "turn", table) → its lines
        self.smoothed, self.cuts, self.later = Distinct(), Distinct(), Distinct()

    # ---- rows and numbers, each made once

    def row(self, table, *line):
        """Return the row of tokens that a table computes from `line`."""
        key = table, line
        if key not in self.rows:
            self.rows[key] = t.FIXED_ROWS + len(self.rows)
            self.records.setdefault(table, []).append((self.rows[key], *line))
        return self.rows[key]

    def number(self, per, table, *line):
        """Return the number per sequence or per turn that a table computes from `line`."""
        numbers, key = self.numbers[per], (table, line)
        if key not in numbers:
            self.tables_of_numbers.setdefault((per, table), []).append((len(numbers), *line))
        return numbers.number(key)

    def spread(self, per, number):
        """Return the row that gives each token the number of its sequence or turn."""
        return self.row(t.OfSequences if per == "sequence" else t.OfTurns, number)

    def mean(self, per, summed):
        return self.number(per, t.Means, summed)

    def log_ratio(self, policy, before="rollout", bound=None):
        row = self.row(t.LogRatios, t.LOG_PROBS[policy], t.LOG_PROBS[before])
        return row if bound is None else self.row(t.BoundedLogRatios, row, bound)

    def pooled(self, per, log_ratio):
        """Return the rows of a log-ratio's mean over its sequence or turn, and of e^mean."""
        mean = self.mean(per, log_ratio)
        return self.spread(per, mean), self.spread(per, self.number(per, t.MeanRatios, mean))

    def statistic(self, name, policy, safety=None):
        log_ratio = self.log_ratio(policy)
        bound = math.inf if safety is None else safety
        most = math.inf if safety is None else math.expm1(safety)
        least = -1.0 if safety is None else math.expm1(-safety)
        excess = self.row(t.RatiosMinusOne, log_ratio)
        return self.row(t.Statistics, log_ratio, excess, t.KINDS.index(name), bound, least, most)

    # ---- lines of weights, rules, losses

    def weight(self, policy, weight):
        """Return a line of `Weights`."""
        if weight.among != "all":
            raise NotImplementedError(f"weights among the tokens that rules leave: {weight}")
        if weight.action == "psis":
            log_ratio = self.row(t.SmoothedLogRatios, self.smoothed.number((policy, weight)))
            return log_ratio, self.row(t.Ratios, log_ratio), 0.0, math.inf, -math.inf, math.inf
        if weight.over == "token":
            log_ratio = self.log_ratio(policy)
            ratio = self.row(t.Ratios, log_ratio)
        else:
            early = weight.safety if weight.safety_at == "token" else None
            log_ratio, ratio = self.pooled("turn", self.log_ratio(policy, bound=early))
        return log_ratio, ratio, *weight_bounds(weight)

    def rule(self, mask, policy, rule):
        """Return a line of `Rules`."""
        if rule.among != "all":
            raise NotImplementedError(f"rules among the tokens that others leave: {rule}")
        policy = rule.policy or policy
        if rule.over == "batch":
            cut = self.spread("sequence", self.number("sequence", t.Cuts, self.cuts.number((policy, rule))))
            value = self.row(t.AtLeastCut, self.statistic(rule.statistic, policy, rule.safety), cut)
            return mask, value, t.ONE, t.ONE, -math.inf, 0.5
        if rule.advantage == "away":
            counts = (self.row(t.Away, self.log_ratio(policy)),) * 2
        else:
            counts = t.COUNTS[rule.advantage]
        of_aggregate = rule.safety_at == "aggregate" or rule.over == "token"
        late = rule.safety if rule.statistic in AGGREGATES and of_aggregate else None
        value = self.statistic(rule.statistic, policy, rule.safety if late is None else None)
        if rule.over != "token":
            per = {"mean": "sequence", "segment": "turn"}[rule.over]
            value = self.spread(per, self.mean(per, value))
        bounds = log_bounds if rule.statistic == "ratio" else plain_bounds
        return mask, value, *counts, *bounds(rule, late)

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
            if self.rewards:
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
            if preset.weight.over != "token":
                raise NotImplementedError(f"VESPO with weights of more than a token: {preset.weight}")
            log_r, r, *bounds = self.weight(preset.policy, preset.weight)
            log_weight = self.row(t.VespoLogWeights, r, log_r, *bounds)
            log_weights = self.number("sequence", t.Totals, log_weight)
        bounded = self.row(t.BoundedLogRatios, log_ratio, LOG_W_HIGHEST)
        log_ratios = self.number("sequence", t.Totals, bounded)
        pairs = (
            (shape.k_positive, shape.lambda_positive),
            (shape.k_negative, shape.lambda_negative),
        )
        for pair in pairs:
            factor = self.number("sequence", t.VespoNumbers, log_ratios, log_weights, *pair)
            yield self.spread("sequence", factor)

    # ---- all together

    def plan(self, presets):
        """Return the plan of some presets."""
        presets = [p if p.apply else replace(p, weight=None, reject=(), veto=None) for p in presets]
        weights, masks, losses, kls = Distinct(), Distinct(), Distinct(), Distinct()
        weight_of = [weights.number(weight_key(p)) for p in presets]
        mask_of = [masks.number(mask_key(p)) for p in presets]
        loss_of = [losses.number(loss_key(p)) for p in presets]
        first_with = {loss: p for p, loss in zip(reversed(presets), reversed(loss_of), strict=True)}

        weight_lines = [self.weight(*key) for key in weights]
        rule_lines = [self.rule(at, *rule) for rules, at in masks.items() for rule in rules]
        loss_lines = [self.loss(at, first_with[at]) for at in range(len(losses))]
        by_kind = {kind: [line for k, line in loss_lines if k is kind] for kind, _ in loss_lines}
        kl_of_loss = [kls.number(self.kl_line(first_with[at])) for at in range(len(losses))]
        clips = {line[0] for kind, line in loss_lines if acts(kind._make(line))}
        ppo_lines = [t.PpoLosses(*line) for line in by_kind.get(t.PpoLosses, [])]
        duals = {line.loss for line in ppo_lines if line.dual < math.inf}
        wanted = t.SumTables(*(Distinct() for _ in t.SumTables._fields))
        of_preset = t.SumTables(*([] for _ in t.SumTables._fields))
        for p, weight, mask, loss in zip(presets, weight_of, mask_of, loss_of, strict=True):
            mask = mask if mask >= 0 else len(masks)
            in_loss = weight if weight >= 0 and weighted(p) else len(weights)
            zeroes = in_loss < len(weights) and can_be_zero(p.weight)
            lines = t.SumTables(
                kept=(mask,),
                gap=(*self.gap_rows(p.policy), mask),
                weight=(weight, mask) if weight >= 0 else None,
                clip=(loss, mask) if loss in clips else None,
                dual_clip=(loss, mask) if loss in duals else None,
                kl=(kl_of_loss[loss], mask),
                loss=(loss, in_loss, mask),
                still=(loss, in_loss if zeroes else len(weights), mask),
            )
            for line, keys, numbers in zip(lines, wanted, of_preset, strict=True):
                numbers.append(keys.number(line))

        sums = t.tables(t.SumTables, wanted)
        sequences = self.numbers_of("sequence", t.SequenceNumbers)
        turns = self.numbers_of("turn", t.TurnNumbers)
        tables_of_losses = t.tables(
            t.Losses,
            [list(kls) if n == "kls" else by_kind.get(c, []) for n, c in t.parts(t.Losses)],
        )
        weight_table, rule_table = t.table(t.Weights, weight_lines), t.table(t.Rules, rule_lines)
        every = t.tables(t.TokenRows, [self.records.get(c, []) for _, c in t.parts(t.TokenRows)])
        summed = [
            sequences.totals.summed,
            sequences.means.summed,
            turns.means.summed,
            every.later.summed,
        ]
        of_numbers = t.OfSequences, t.OfTurns, t.Later, t.AtLeastCut, t.FipoInfluences
        second = [weight_table, rule_table, *tables_of_losses, sums.gap]
        return Plan(
            first=t.only(every, set(np.concatenate(summed).tolist()), without=of_numbers),
            rows=t.only(every, set().union(*map(t.inputs, second))),
            sequences=sequences,
            turns=turns,
            weights=weight_table,
            rules=rule_table,
            losses=tables_of_losses,
            sums=sums,
            sizes=t.Sizes(
                rows=t.FIXED_ROWS + len(self.rows),
                weights=len(weights),
                masks=len(masks),
                losses=len(losses),
                kls=len(kls),
                sums=sum(len(keys) * width for keys, width in zip(wanted, t.WIDTHS.values(), strict=True)),
            ),
            of_preset=t.SumTables(*map(np.array, of_preset)),
            smoothed=list(self.smoothed),
            cuts=list(self.cuts),
        )

    def numbers_of(self, per, cls):
        return t.tables(cls, [self.tables_of_numbers.get((per, c), []) for _, c in t.parts(cls)])

    def gap_rows(self, policy):
        """Return the rows of k3, its r bounded so that sums stay finite, and of Δ."""
        log_ratio = self.log_ratio(policy)
        excess = self.row(t.RatiosMinusOne, log_ratio)
        bounds = math.inf, -1.0, math.expm1(LARGEST)
        return self.row(t.Statistics, log_ratio, excess, t.KINDS.index("k3"), *bounds), log_ratio

    def kl_line(self, preset):
        row = LOSSES[preset.loss]
        bounded = row.ratio and not row.pooled and preset.clip.safety is not None
        log_ratio = self.log_ratio("current", anchor_of(preset.policy))
        return log_ratio, preset.clip.safety if bounded else math.inf


# ---------------------------------------------------------------- Keys and bounds


def weight_key(preset):
    """Return what tells weights of tokens apart; None without one, or for one of sequences."""
    if preset.weight is None or preset.weight.over in ("sum", "mean"):
        return None
    return preset.policy, preset.weight


def mask_key(preset):
    """Return what tells masks of tokens apart; None if no rule acts on tokens."""
    return tuple((r.policy or preset.policy, r) for r in preset.reject if r.on_tokens) or None


def can_be_zero(weight):
    """Whether a weight may be 0, so that its token has no gradient."""
    return weight.action == "mask" or weight.overflow == "zero"


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

    Where x is clipped to ±safety, a bound further out is never exceeded; one at ±safety only if it
    is strict.
    """
    if bound is None:
        return sign * math.inf
    reach = math.inf if safety is None else safety
    if sign * bound > reach or (sign * bound == reach and not strict):
        return sign * math.inf
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
    found = []
    if preset.weight is not None:
        lower, upper, below, above = weight_bounds(preset.weight)
        of = PER[preset.weight.over]
        found.append(Numbers("weight is held to", f"r{of}", lower, upper))
        found.append(Numbers("weight is 0 outside", f"log r{of}", below, above))
    for place, rule in enumerate(preset.reject, 1):
        late = rule.safety if rule.safety_at == "aggregate" and rule.statistic in AGGREGATES else None
        bounds = log_bounds if rule.statistic == "ratio" else plain_bounds
        name = "log r" if rule.statistic == "ratio" else rule.statistic
        found.append(Numbers(f"rule {place} keeps", f"{name}{PER[rule.over]}", *bounds(rule, late)))
    if preset.veto is not None:
        within = log_bounds(Bounds(preset.veto.lower, preset.veto.upper, strict=False), None)
        found.append(Numbers("veto keeps", "log r of every token", *within))
    if LOSSES[preset.loss].ratio:
        clip, of, off, none = preset.clip, "π_θ/π_anchor", 1.0, 0.0
        if preset.loss == "gmpo":
            of, off, none = f"log {of}", 0.0, -math.inf
        low = none if clip.low is None else off - clip.low
        high = math.inf if clip.high is None else off + clip.high
        found.append(Numbers("loss is clipped to", of, low, high))
        if clip.dual is not None and preset.loss in ("ppo_clip", "gspo", "luspo", "fipo"):
            found.append(Numbers("dual clip, where A < 0", of, -math.inf, clip.dual))
    return [one for one in found if one.lower not in (0.0, -math.inf) or one.upper < math.inf]


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
    safety = None if early else weight.safety
    lower, upper = (0.0, math.inf) if safety is None else (math.exp(-safety), math.exp(safety))
    below, above = -math.inf, math.inf
    if weight.action == "truncate":
        lower = max(lower, weight.lower or 0.0)
        upper = min(upper, math.inf if weight.upper is None else weight.upper)
    elif weight.action == "mask":
        below, above = log_bounds(weight, safety)
    if weight.overflow == "zero" and (weight.safety is None or weight.safety > FLOAT32_OVERFLOW):
        above = min(above, FLOAT32_OVERFLOW)
    return lower, upper, below, above

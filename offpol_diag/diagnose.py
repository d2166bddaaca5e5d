"""Is it a bug, or honest mismatch? What two exact identities and the data's own marks can decide.

If tokens were drawn from the π_rollout that was logged and π_train covers it, then E[r] = 1, at every
position, and k1 ≥ 0, whatever the cause of the mismatch (precision, quantisation, stale weights). An
identity that fails beyond its clustered error is proof that the logged numbers are not what they are called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from offpol_diag.numerals import counted, say
from offpol_diag.student import Z, quantile
from offpol_diag.summary import Cause, Diagnosis, Number, Summary

SURE = 4.0
"""Standard errors beyond which an identity counts as broken where groups are many: two-sided p = 6e-5. How
often honest clustered dumps get there is measured in `docs/coverage.md`.
"""
VISIBLE = 2e-3
"""Smallest |E[r] − 1| worth calling a bug: kernels that round their own log-probs stay below it."""
FEWEST_GROUPS, FEWEST_TOKENS = 20, 1000
FEWEST_SEQUENCES, FEWEST_INTERVAL = 50, 5
"""Sequences below which nothing is said, and prompts below which no interval is believed."""
SAMPLES = 16
"""Rows that one prompt may have where no column says which share one; each is its own group by name only."""
HEALTHY_K3 = 1e-3
NO_MEAN = 1.0
"""k̂ from which on the weights have no mean at all."""


@dataclass(frozen=True)
class Evidence:
    """The main drift's numbers: drift 1, or the total of a two-policy dump."""

    summary: Summary

    @property
    def prefix(self) -> str:
        """'' for drift 1, 'total.' when the dump has no old log-probs."""
        return "" if self.number("k3", "").value is not None else "total."

    def number(self, name: str, prefix: str | None = None) -> Number:
        """A metric, or an empty one."""
        return self.summary.metrics.get((self.prefix if prefix is None else prefix) + name, Number())

    def value(self, name: str) -> float:
        """Its value; NaN when unknown, so that every comparison with it is false."""
        found = self.number(name).value
        return float("nan") if found is None else found

    def sure(self, looks: int = 1) -> float:
        """Standard errors beyond which an identity counts as broken, with this many groups."""
        return sure(self.summary.dump.groups, looks)

    @property
    def prompts(self) -> int:
        """Distinct groups; where the dump does not name them, as few as there may be."""
        dump = self.summary.dump
        return dump.groups if "group_id" in dump.columns else dump.sequences // SAMPLES

    @property
    def few(self) -> bool:
        """Whether there is too little data to tell.

        That the mismatch is small needs fewer prompts than anything else, and the same with and without
        `group_id`.
        """
        dump = self.summary.dump
        if dump.sequences < FEWEST_SEQUENCES or dump.tokens < FEWEST_TOKENS:
            return True
        return self.prompts < (FEWEST_INTERVAL if self.small else FEWEST_GROUPS)

    @property
    def small(self) -> bool:
        """Whether the interval of k3 lies below what is healthy, and hardly a token is far off."""
        ends = self.number("k3").interval
        return ends is not None and ends[1] <= HEALTHY_K3 and self.value("f_2") <= HEALTHY_K3

    def trusted(self, name: str) -> bool:
        """Whether the tail of the weights lets the number be believed."""
        return self.number(name).note is None


def standard_errors(number: Number, target: float) -> float:
    """How many standard errors a number lies above `target`; 0 when it has no interval.

    The error is that of the interval's end towards the target: an interval may be skewed.
    """
    if number.value is None or number.interval is None:
        return 0.0
    low, high = number.interval
    error = (number.value - low if number.value > target else high - number.value) / Z
    return (number.value - target) / error if error > 0 else 0.0


def sure(groups: int, looks: int = 1) -> float:
    """Standard errors that any of so many looks is beyond as rarely as a normal number is beyond `SURE`.

    Each look has its share of that chance (Bonferroni), and the tails are those of Student's t, by Wallace's
    normal score of t (1959). The errors are those of `standard_errors`: a half width over 1.96, where the
    interval took its t quantile.
    """
    normal, freedom = NormalDist(), max(groups - 1, 2)
    score = normal.inv_cdf(normal.cdf(-SURE) / max(looks, 1)) * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(score**2 / freedom)) * Z / quantile(freedom)


@dataclass(frozen=True)
class Test:
    """One hypothesis: when it holds, and what to say then.

    Attributes:
        id: of the cause.
        holds: the condition.
        statement: what is wrong.
        statistic: the numbers it saw, in words.
        confirm: what would settle it.
        fix: what to do.
        ruled_out: what may be said when it does not hold.
    """

    id: str
    holds: Callable[[Evidence], bool]
    statement: str
    statistic: Callable[[Evidence], str]
    confirm: str
    fix: str
    ruled_out: str = ""


def _no_log_probs(seen: Evidence) -> bool:
    return any("no log-probabilities" in note for note in seen.summary.dump.notes)


def _identical(seen: Evidence) -> bool:
    """Whether Δ is exactly 0 at every token."""
    return seen.value("log_ratio_min") == 0.0 == seen.value("log_ratio_max")


def _unit_mean(seen: Evidence) -> float:
    return standard_errors(seen.number("mean_ratio"), 1.0)


def _mean_broken(seen: Evidence, sign: int) -> bool:
    off = sign * (seen.value("mean_ratio") - 1)
    return seen.trusted("mean_ratio") and off > VISIBLE and sign * _unit_mean(seen) > seen.sure()


def _k1_negative(seen: Evidence) -> bool:
    return standard_errors(seen.number("k1"), 0.0) < -seen.sure() and seen.value("k1") < -1e-5


def _uncorrelated(seen: Evidence) -> bool:
    return seen.value("pearson") < 0.3 and seen.value("f_2") > 0.3


def _one_sided(seen: Evidence) -> bool:
    return _mean_broken(seen, -1) and seen.value("log_ratio_p99") < 1e-3 + seen.value("log_ratio_std") / 50


def _ratio_text(seen: Evidence) -> str:
    return f"E[r] = {say(seen.number('mean_ratio'))}, {_unit_mean(seen):+.1f} standard errors from 1"


def _k1_text(seen: Evidence) -> str:
    errors = standard_errors(seen.number("k1"), 0.0)
    return f"k1 = {say(seen.number('k1'))} nats, {errors:+.1f} standard errors from 0; {_ratio_text(seen)}"


def _pearson_text(seen: Evidence) -> str:
    share = seen.value("f_2")
    return f"pearson = {say(seen.number('pearson'))}; {share:.1%} of tokens differ by more than 2×"


def _notes_text(seen: Evidence) -> str:
    return " ".join(seen.summary.dump.notes)


def _place_text(seen: Evidence) -> str:
    return "; ".join(f"position {key}: k3 = {value}" for key, value in _broken_places(seen))


def _off_places(seen: Evidence) -> Iterator[tuple[str, str]]:
    """Positions whose E[r] is not 1, by a bound that allows for the number of positions looked at."""
    where = seen.summary.by.get("position")
    found = [(place.key, place.metrics["mean_ratio"]) for place in (where.places if where else [])]
    known = [(key, number, number.value) for key, number in found if number.value is not None]
    beyond = seen.sure(len(known))
    for key, number, value in known if seen.trusted("mean_ratio") else []:
        errors = standard_errors(number, 1.0)
        if abs(value - 1) > VISIBLE and abs(errors) > beyond:
            yield key, f"{say(number)}, {errors:+.1f} standard errors from 1"


def _off_text(seen: Evidence) -> str:
    return "; ".join(f"position {key}: E[r] = {text}" for key, text in _off_places(seen))


def _broken_places(seen: Evidence) -> Iterator[tuple[str, str]]:
    """Positions whose k3 lies, by its interval, an order of magnitude above that of every other position."""
    where = seen.summary.by.get("position")
    found = [(place.key, place.metrics["k3"]) for place in (where.places if where else [])]
    for key, number in found:
        others = [other.interval[1] for name, other in found if name != key and other.interval]
        if (
            number.interval
            and others
            and number.interval[0] > 10 * max(others)
            and number.interval[0] > VISIBLE
        ):
            yield key, say(number)


TESTS = (
    Test(
        "sentinel",
        _no_log_probs,
        "a log-prob column holds positive values, which no log-probability can be",
        _notes_text,
        "look at the rows named above in the trainer's tensors",
        "log log-softmax values of the sampled token, in float32",
        "positive log-probs",
    ),
    Test(
        "off_by_one",
        _uncorrelated,
        "the two log-prob columns do not belong to the same tokens: off by one, or rows permuted",
        _pearson_text,
        "shift one column by one token, or match rows by content, and look whether k3 falls",
        "align both columns on the sampled token and keep the rows in one order",
        "columns that belong to different tokens",
    ),
    Test(
        "truncated_sampling",
        _one_sided,
        "π_rollout is renormalised over a truncated vocabulary (top-p or top-k) and π_train is not",
        _ratio_text,
        "Δ is never above 0; E[r] is the mean kept probability mass",
        "sample with top_p = 1 and no top_k, or apply the same filter in the trainer",
    ),
    Test(
        "rollout_raw_logprobs",
        _k1_negative,
        "the tokens were not drawn from the logged π_rollout (raw log-probs beside a temperature, say)",
        _k1_text,
        "compare the logged value with log-softmax(logits / temperature) of one sampled token",
        "log processed log-probs in the engine (vLLM: logprobs_mode = processed_logprobs)",
        "k1 < 0 (tokens drawn from another distribution than the logged one)",
    ),
    Test(
        "rollout_raw_logprobs",
        lambda seen: _mean_broken(seen, 1) or (_mean_broken(seen, -1) and not _one_sided(seen)),
        "E[r] is not 1: the logged π_rollout is not what the tokens were drawn from",
        _ratio_text,
        "check temperature, top-p and the mask; look whether one position or one column value carries it",
        "log processed log-probs of the sampled token on unmasked positions only",
        "E[r] ≠ 1 over all tokens",
    ),
    Test(
        "boundary",
        lambda seen: next(_broken_places(seen), None) is not None,
        "the mismatch sits at one position of the response: tokens there are misaligned or wrongly unmasked",
        _place_text,
        "look at the tokens at these positions: first token, end of turn, inserted tokens",
        "mend the alignment or the mask there",
        "a single position that carries the mismatch",
    ),
    Test(
        "boundary",
        lambda seen: next(_off_places(seen), None) is not None,
        "E[r] is not 1 at some positions of the response: what is logged there is not what was sampled from",
        _off_text,
        "look at the tokens at these positions: first token, end of turn, inserted tokens, a forced prefix",
        "mend the alignment or the mask there",
        "E[r] ≠ 1 at a position",
    ),
)


def diagnose(summary: Summary) -> Diagnosis:
    """The verdict, its causes with their evidence, what is ruled out, and what this dump cannot decide."""
    seen = Evidence(summary)
    causes = [_cause(test, seen) for test in TESTS if test.holds(seen)]
    if causes:
        headline = f"The logged numbers contradict each other: {causes[0].statement}."
        return Diagnosis(
            verdict="bug", headline=headline, causes=_distinct(causes), undecidable=_undecidable(seen)
        )
    if _identical(seen):
        headline = (
            "The two columns hold the same numbers, token for token: was one copied from the other? "
            "Engines that agree to the last bit exist; then this is what to expect."
        )
        return Diagnosis(verdict="cannot_tell", headline=headline)
    if seen.few:
        headline = f"{_held(seen)} are too few to tell."
        return Diagnosis(verdict="cannot_tell", headline=headline, undecidable=_undecidable(seen))
    return _no_bug(seen)


def _held(seen: Evidence) -> str:
    dump = seen.summary.dump
    sequences, tokens = counted(dump.sequences, "sequence"), counted(dump.tokens, "token")
    if "group_id" in dump.columns:
        return f"{counted(dump.groups, 'group')}, {sequences} and {tokens}"
    return f"{sequences} and {tokens}, with no column group_id to say which share a prompt,"


def _no_bug(seen: Evidence) -> Diagnosis:
    ruled_out = [test.ruled_out for test in TESTS if test.ruled_out and _decided(test, seen)]
    if seen.value("khat_tokens") > NO_MEAN:
        headline = f"Neither identity can be tested: the token ratios have no mean ({_tail_text(seen)})."
        return Diagnosis(verdict="cannot_tell", headline=headline, undecidable=_undecidable(seen))
    healthy = seen.value("k3") <= HEALTHY_K3 and seen.value("f_2") <= HEALTHY_K3
    size = "as small as rounding" if healthy else "larger than rounding, and real"
    headline = f"Nothing contradicts the logging ({_consistent(seen)}); the mismatch is {size}."
    verdict: Literal["healthy", "honest_mismatch"] = "healthy" if healthy else "honest_mismatch"
    return Diagnosis(verdict=verdict, headline=headline, ruled_out=ruled_out, undecidable=_undecidable(seen))


def _consistent(seen: Evidence) -> str:
    """The identity that holds: E[r] = 1 where its tail allows the test, else k1 ≥ 0."""
    if seen.trusted("mean_ratio"):
        return _ratio_text(seen)
    return f"k1 = {say(seen.number('k1'))} nats, not below 0; E[r] is not tested, {_tail_text(seen)}"


def _tail_text(seen: Evidence) -> str:
    return f"k̂ = {seen.value('khat_tokens'):.2f}"


def _decided(test: Test, seen: Evidence) -> bool:
    """Whether the test had what it needs."""
    return "E[r]" not in test.ruled_out or seen.trusted("mean_ratio")


def _cause(test: Test, seen: Evidence) -> Cause:
    return Cause(
        id=test.id,
        statement=test.statement,
        statistic=test.statistic(seen),
        confirm=test.confirm,
        fix=test.fix,
    )


def _distinct(causes: list[Cause]) -> list[Cause]:
    """The first of each id."""
    return list({cause.id: cause for cause in reversed(causes)}.values())[::-1]


def _undecidable(seen: Evidence) -> list[str]:
    """What a test would have read and could not."""
    return [] if seen.trusted("mean_ratio") else [f"E[r] = 1: the tail is too heavy, {_tail_text(seen)}"]

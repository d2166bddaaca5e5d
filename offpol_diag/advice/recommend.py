"""Recommendation of a correction, if any: the first rule of an ordered table whose condition holds decides.

Certain cases come first: a bug, too little data, no mismatch. A mismatch under the noise floor needs no
correction unless a method's estimated error (`engine/ranking.py`) is significantly lower, or it depends on
the token and adds up over long responses. Above the floor the default applies: no rule that looks further was
better in worlds with known gradients (docs/advice.md). Published thresholds are alerts; each names its source
and its regime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from offpol_diag.advice.prescription import expressible, prescribed
from offpol_diag.diagnosis.numbers import FEWEST_GROUPS, FEWEST_SEQUENCES, FEWEST_TOKENS, SAMPLES, Evidence
from offpol_diag.metrics import METRICS, crossed
from offpol_diag.number import Number
from offpol_diag.numerals import say
from offpol_diag.presets.candidates import CANDIDATES, DEFAULT, ICEPOP, NOTHING, Candidate
from offpol_diag.result import MARGIN, Decision, Fired, Label, Ranked, Recommendation, Result

NOISE = 0.15
"""A systematic share whose lower end is below this may be that of noise of single tokens.

In the rollouts of `benchmarks/doctor` the share is 0 to 0.12 for rounding and different expert routing, and
0.24 to 0.8 for stale weights.
"""
ADDS_UP = 0.05
"""Systematic KL of a whole response, in nats, from which a mismatch that is small per token is not small.

In the development worlds of `benchmarks/advice` whose K3 is below the noise floor, no correction reaches 0.97
of the best alignment on average, and −0.59 at worst; with token TIS from this value on it is 0.997 and 0.91.
"""
VISIBLE = 3.0
"""Standard errors of the surrogate gain above 0 at which staleness is visible."""


@dataclass(frozen=True)
class Rule:
    """One rule of the recommendation, or one alert.

    Attributes:
        name: short, stable id.
        holds: the condition.
        saw: names of the metrics to report, or a function that returns name → value.
        sentence: text for the user.
        source: origin of the threshold, and the regime it applies to.
        decision: the decision; None for an alert.
        label: whether the decision was measured or is the default.
        despite: why it is advised also where an alternative's estimated error is measurably lower.
        offers: the methods to recommend, the preferred one first; None if the rule recommends none.
    """

    name: str
    holds: Callable[[Evidence], bool]
    saw: tuple[str, ...] | Callable[[Evidence], dict[str, float | None]]
    sentence: str
    source: str
    decision: Decision | None = None
    label: Label | None = None
    offers: Callable[[Evidence], Sequence[Candidate]] | None = None
    despite: str = ""


def _held(seen: Evidence) -> dict[str, float | None]:
    dump = seen.summary.dump
    groups = dump.groups if "group_id" in dump.columns else None
    return {"groups": groups, "sequences": dump.sequences, "tokens": dump.tokens}


def _verdict(seen: Evidence) -> str:
    return seen.summary.diagnosis.verdict if seen.summary.diagnosis else ""


def _above(seen: Evidence, one: Candidate, other: Candidate) -> Number:
    """Return by what share the estimated error of one candidate is above another's."""
    return seen.summary.candidates.get(one.name, {}).get(f"error_above.{other.name}", Number())


def _beats(seen: Evidence, one: Candidate, other: Candidate) -> bool:
    """Return whether a candidate is significantly better than another."""
    ends = _above(seen, other, one).interval
    return ends is not None and ends[0] > MARGIN


def _better(seen: Evidence) -> list[Candidate]:
    """Return the methods that are significantly better than no correction and not worse than another.

    The simplest is first.
    """
    some = [one for one in CANDIDATES if _beats(seen, one, NOTHING)]
    return [one for one in some if not any(_beats(seen, other, one) for other in some)]


def _added_up(seen: Evidence) -> float | None:
    """Return the systematic KL of a whole response: K3 · lower end of the systematic share · mean length.

    The KL of a response is the sum over its tokens. In nats; None without the share, 0 if it may be noise.
    """
    if seen.systematic is None:
        return None
    share = seen.systematic[0]
    return seen.value("k3") * share * seen.summary.dump.mean_length if share > NOISE else 0.0


def _grouped(seen: Evidence) -> bool:
    """Return whether the dump has group_id, with at least two responses per prompt on average."""
    dump = seen.summary.dump
    return "group_id" in dump.columns and dump.sequences >= 2 * dump.groups


def _measured(seen: Evidence) -> dict[str, float | None]:
    low, high = seen.systematic or (None, None)
    return {
        seen.prefix + "k3": seen.number("k3").value,
        seen.prefix + "f_2": seen.number("f_2").value,
        "systematic share of r, lower end": low,
        "systematic share of r, upper end": high,
        "systematic KL of a response, nats": _added_up(seen),
        "staleness, standard errors": seen.errors("surrogate_gain"),
    }


def _growing(seen: Evidence) -> bool:
    first, last = _thirds(seen).values()
    return (last or 0.0) > max(5 * (first or 0.0), 1e-4)


def _thirds(seen: Evidence) -> dict[str, float | None]:
    """Return the median K3 of the first third of the steps, and of the last."""
    found = [place.numbers["k3"].value for place in seen.summary.at("step")]
    known = [value for value in found if value is not None]
    ends = (known[: len(known) // 3], known[len(known) - len(known) // 3 :])
    words = ("first third, median k3", "last third, median k3")
    return {word: median(end) if end else None for word, end in zip(words, ends, strict=True)}


UNSEEN = "a dump of this size hardly shows bias"
BELOW = "a usual token differs as little as rounding makes it"
RULES = (
    Rule(
        "bug",
        lambda seen: _verdict(seen) == "bug",
        ("mean_ratio", "k1", "k3"),
        "Fix it before choosing a correction: what a correction does to wrong numbers says little of what it "
        "does to the right ones.",
        "E_rollout[r] = 1 and k1 ≥ 0 hold for any honest mismatch",
        "fix the bug first",
    ),
    Rule(
        "few",
        lambda seen: seen.few,
        _held,
        f"Too little data to choose a method: at least {FEWEST_GROUPS} groups (prompts), {FEWEST_SEQUENCES} "
        f"sequences and {FEWEST_TOKENS:,} tokens are needed; without a column group_id, which says what rows "
        f"share a prompt, {FEWEST_GROUPS * SAMPLES} sequences.",
        "bootstrap over groups",
        "not enough data",
    ),
    Rule(
        "identical",
        lambda seen: seen.value("log_ratio_min") == 0.0 == seen.value("log_ratio_max"),
        ("log_ratio_min", "log_ratio_max"),
        "The same numbers twice: was one column copied from the other? Check what is logged; if both engines "
        "really agree to the last bit, no correction is needed.",
        "two engines that compute apart do not agree exactly at every token",
        "not enough data",
    ),
    Rule(
        "unknown",
        lambda seen: seen.number("k3").value is None,
        (),
        "The mismatch of this dump could not be measured.",
        "",
        "not enough data",
    ),
    Rule(
        "aligned",
        lambda seen: seen.value("k3") < 1e-6,
        ("k3",),
        "The two policies agree to rounding; a correction would change next to nothing.",
        "bitwise aligned engines are gated at 1e-6 (slime, vLLM × TorchTitan)",
        "no correction needed",
        "no difference detected",
        despite=BELOW,
    ),
    Rule(
        "better",
        lambda seen: _verdict(seen) == "healthy" and bool(_better(seen)),
        _measured,
        f"Small as the mismatch is, this method lowers an update's estimated error by {MARGIN:.0%} or more.",
        "interval of the paired difference of the estimated error (docs/choosing.md)",
        "METHOD at THRESHOLD",
        "measured",
        _better,
        f"the difference may be below {MARGIN:.0%}",
    ),
    Rule(
        "adds up",
        lambda seen: _verdict(seen) == "healthy" and (_added_up(seen) or 0.0) > ADDS_UP,
        _measured,
        "Each token differs little, but in the same way in every response: over responses of this length "
        "that adds up, and can bias the gradient.",
        f"systematic KL of a response above {ADDS_UP} nats; judged in worlds with known gradients",
        "METHOD at THRESHOLD",
        "default",
        lambda seen: (DEFAULT,),
        UNSEEN,
    ),
    Rule(
        "healthy",
        lambda seen: _verdict(seen) == "healthy",
        _measured,
        "A usual token differs as little as rounding makes it: a correction has little to mend.",
        "k3 and the share of tokens that differ by more than 2× at most 1e-3",
        "no correction needed",
        "no difference detected",
        despite=BELOW,
    ),
    Rule(
        "hopeless",
        lambda seen: seen.value("f_2") > 0.5,
        ("f_2", "k3"),
        "Most tokens differ by more than a factor of 2: no weight mends that. Change the source of the drift "
        "(weight sync, precision, replay).",
        "a share of tokens, which no single outlier moves",
        "no method helps",
    ),
    Rule(
        "undecided",
        lambda seen: seen.summary.undecided is not None,
        _measured,
        "This limits the harm until the cause is known, and mends nothing: several causes fit this dump. "
        "Measure first what decides between them.",
        "best simple rule in worlds with known gradients (docs/advice.md)",
        "METHOD at THRESHOLD",
        "default",
        lambda seen: (DEFAULT,),
        "the cause is not known, and a bound limits what it can do",
    ),
    Rule(
        "default",
        lambda seen: True,
        _measured,
        "The default: among the best simple rules where the true gradient is known.",
        "best simple rule in worlds with known gradients (docs/advice.md)",
        "METHOD at THRESHOLD",
        "default",
        lambda seen: (DEFAULT,),
        UNSEEN,
    ),
)

ALERTS = (
    Rule(
        "growing",
        _growing,
        _thirds,
        "K3 grew more than 5-fold from the first third of the steps to the last",
        "Ring and LR-decay reports: growth is an optimisation symptom; corrections alone fail in long runs",
    ),
    Rule(
        "heavy tail",
        lambda seen: seen.number("ess_tokens").note is not None,
        ("khat_tokens",),
        "k̂ of tokens above its limit: means of the ratios are unreliable",
        "Vehtari et al. 2024: k̂ above min(1 − 1/log10 n, 0.7)",
    ),
)
"""Warnings that are no level of one number; those are in `metrics.py`."""


def advised(summary: Result, trainer: str | None = None) -> Result:
    """Add the recommendation to the summary, with the configuration of `trainer` if one is named."""
    given = recommend(summary, trainer)
    config = prescribed(given, trainer, Evidence(summary).policy) if trainer else None
    return summary.model_copy(update={"recommendation": given.model_copy(update={"config": config})})


def recommend(summary: Result, trainer: str | None = None) -> Recommendation:
    """Return the decision of the first rule that holds, with reasons, unknowns and alerts.

    Args:
        summary: the numbers of a dump and its diagnosis.
        trainer: methods that this trainer cannot express are skipped.
    """
    seen = Evidence(summary)
    rule, one = next(
        (rule, one)
        for rule in RULES
        if rule.holds(seen)
        for one in (rule.offers(seen) if rule.offers else [None])
        if one is None or rule is RULES[-1] or _sayable(one, seen, trainer)
    )
    sentence, causes = rule.sentence, summary.diagnosis.causes if summary.diagnosis else []
    where = next((cause.where for cause in causes if cause.kind == "bug" and cause.where), "")
    if rule.name == "bug" and where:
        sentence += f" Until then, leave out the sequences with {where}."
    alerts = [_fired(alert, seen, "alert") for alert in ALERTS if alert.holds(seen)] + levels(seen)
    given = Recommendation(
        decision=rule.decision or "not enough data",
        label=rule.label,
        sentence=sentence,
        rule=rule.name,
        longest_response=summary.lengths.longest if summary.lengths else None,
        fired=[_fired(rule, seen, "decision"), *alerts],
    )
    if rule.label is None:
        return given
    chosen = one or NOTHING
    weights = {one.name: summary.candidates.get(one.name, {}) for one in CANDIDATES}
    errors = [(weights[other.name].get("error", Number()).value, other) for other in CANDIDATES]
    ranked = sorted(((error, other) for error, other in errors if error), key=lambda pair: pair[0])
    found: dict[str, object] = {
        "reasons": _reasons(seen),
        "unknown": _unknown(seen),
        "despite": rule.despite,
        "ranking": [
            Ranked(
                title=other.title,
                score=100 * ranked[0][0] / error,
                behind=None if other is chosen else _above(seen, other, chosen),
            )
            for error, other in ranked
        ],
    }
    shown: list[Candidate | None] = [NOTHING, DEFAULT]
    if one is not None:
        second = ICEPOP if one is DEFAULT else DEFAULT
        runner_up = second if _sayable(second, seen, trainer) else None
        shown = [one, runner_up, NOTHING]
        found |= {
            "title": one.title,
            "method": one.preset_name(seen.policy),
            "threshold": one.threshold,
            "settings": one.changes(seen.policy),
            "runner_up": runner_up.title if runner_up else None,
        }
    numbers = {one.title: weights[one.name] for one in shown if one and weights[one.name]}
    return given.model_copy(update=found | {"numbers": numbers})


def _sayable(one: Candidate, seen: Evidence, trainer: str | None) -> bool:
    name = one.preset_name(seen.policy)
    return trainer is None or expressible(name, one.changes(seen.policy), trainer)


# The reasons, in words.


def _reasons(seen: Evidence) -> list[str]:
    """State the size of the mismatch, and whether staleness and dependence on the token are visible."""
    f_2 = say(seen.number("f_2"))
    found = [f"Mismatch: K3 = {say(seen.number('k3'))} nats; {f_2} of the tokens differ by more than 2×."]
    errors = seen.errors("surrogate_gain")
    if errors is not None:
        shown = "visible" if errors > VISIBLE else "not visible"
        side = "above" if errors >= 0 else "below"
        found.append(
            f"Staleness {shown} in the advantages: cov(A, min(r, 2)) is {abs(errors):.1f} standard errors "
            f"{side} 0."
        )
    share = seen.summary.diagnosis.systematic if seen.summary.diagnosis else None
    if share is not None and _grouped(seen):
        found.append(
            f"Dependence on the token: {say(share)} of the variance of r is common to tokens of one kind; 0 "
            "for noise."
        )
    return found


def _unknown(seen: Evidence) -> list[str]:
    """List the questions that the dump cannot answer, and the columns that would."""
    found = ["How far the gradient is off without a correction: a dump holds no gradients."]
    columns = seen.summary.dump.columns
    if "advantages" not in columns and not {"rewards", "group_id"} <= set(columns):  # of which they are made
        beside = " (or group_id, beside the rewards)" if "rewards" in columns else ""
        found.append(f"Whether staleness shows: needs the column advantages{beside}.")
    if seen.systematic is None or not _grouped(seen):
        lacking = " and ".join(name for name in ("token_ids", "group_id") if name not in columns)
        why = f"needs {lacking}" if lacking else "too few tokens repeat among a prompt's responses"
        found.append(f"Whether the mismatch is noise or depends on the token: {why}.")
    if "group_id" not in columns:
        found.append("How wide the intervals are where a prompt was sampled more than once: needs group_id.")
    return found


def levels(seen: Evidence) -> list[Fired]:
    """Return the published warning levels that the numbers of the main pair of policies cross."""
    return [
        Fired(
            rule=level.name,
            level="alert",
            sentence=level.sentence,
            saw={seen.prefix + name: seen.number(name).value for name in (metric.name, level.beside) if name},
            source=level.source,
        )
        for metric in METRICS.values()
        for level in crossed(metric, seen.value(metric.name))
    ]


def _fired(rule: Rule, seen: Evidence, level: Literal["decision", "alert"]) -> Fired:
    of = {} if callable(rule.saw) else {seen.prefix + name: seen.number(name).value for name in rule.saw}
    saw = rule.saw(seen) if callable(rule.saw) else of
    return Fired(rule=rule.name, level=level, sentence=rule.sentence, saw=saw, source=rule.source)

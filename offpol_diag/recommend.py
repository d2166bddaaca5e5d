"""Which correction, if any: an ordered table of rules; the first whose condition holds decides.

What is certain comes first (a bug, too few data, no mismatch), then the ladder decides by the estimates of
`alignment`. Thresholds and bands that the field has published are alerts; each names its source and its
regime. What a rule saw is printed with it, so that a reader can disagree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Literal

from offpol_diag.candidates import DEFAULT, NOTHING
from offpol_diag.diagnose import FEWEST_GROUPS, FEWEST_SEQUENCES, FEWEST_TOKENS, SAMPLES, Evidence
from offpol_diag.guards import guarded
from offpol_diag.ladder import AHEAD, Choice, choose, instead_of, sure
from offpol_diag.prescription import prescribed, sayable
from offpol_diag.summary import AlignmentRow, Decision, Fired, Recommendation, Summary

WORTH = 0.001
"""A gain in alignment that is worth a correction."""


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: short, stable.
        holds: its condition.
        saw: the metrics it looks at, or a function that names what it saw.
        sentence: what it says.
        source: where the threshold comes from, and its regime.
        decision: what it decides; None for an alert.
        offers: whether the ladder's choice is named.
    """

    name: str
    holds: Callable[[Evidence], bool]
    saw: tuple[str, ...] | Callable[[Evidence], dict[str, float | None]]
    sentence: str
    source: str
    decision: Decision | None = None
    offers: bool = False


def _held(seen: Evidence) -> dict[str, float | None]:
    dump = seen.summary.dump
    groups = dump.groups if "group_id" in dump.columns else None
    return {"groups": groups, "sequences": dump.sequences, "tokens": dump.tokens}


def _aligned(seen: Evidence) -> bool:
    return seen.value("k3") < 1e-6


def _hopeless(seen: Evidence) -> bool:
    return seen.value("k3") > 1.0 or seen.value("ess_tokens") < 0.05 or seen.value("f_2") > 0.5


def _is_healthy(seen: Evidence) -> bool:
    diagnosis = seen.summary.diagnosis
    return diagnosis is not None and diagnosis.verdict == "healthy"


def _surely_ahead(seen: Evidence) -> bool:
    """Whether a correction is ahead of none by more than its error, and by as much as matters."""
    choice, alignment = _choice(seen.summary), seen.summary.alignment
    return choice is not None and alignment is not None and choice.gain >= AHEAD and sure(alignment, choice)


def _compared(seen: Evidence) -> dict[str, float | None]:
    """The mismatch, and the estimates where there are any."""
    level = {seen.prefix + name: seen.number(name).value for name in ("k3", "f_2")}
    return level | (_spared(seen) if _chosen(seen) else {})


def _identical(seen: Evidence) -> bool:
    """Whether Δ is exactly 0 at every token: one column may be a copy of the other."""
    return seen.value("log_ratio_min") == 0.0 == seen.value("log_ratio_max")


def _idle(seen: Evidence) -> bool:
    choice = _choice(seen.summary)
    if choice is None or choice.best == NOTHING.name:
        return choice is not None
    return abs(choice.gain) < WORTH if choice.best == DEFAULT.name else choice.gain < AHEAD


def _chosen(seen: Evidence) -> bool:
    return _choice(seen.summary) is not None


def _choice(summary: Summary) -> Choice | None:
    return choose(summary.alignment) if summary.alignment else None


def _weighed(seen: Evidence) -> dict[str, float | None]:
    """The estimates that decided: of the choice, of the runner-up and of no correction."""
    choice = _choice(seen.summary)
    assert choice is not None
    return _told(seen, choice, choice.gain)


def _spared(seen: Evidence) -> dict[str, float | None]:
    """The same where no correction is the advice; the gain is that of the ladder's choice over it."""
    choice, alignment = _choice(seen.summary), seen.summary.alignment
    assert choice is not None
    assert alignment is not None
    return _told(seen, instead_of(alignment.rows, NOTHING.name), choice.gain)


def _told(seen: Evidence, choice: Choice, gain: float) -> dict[str, float | None]:
    alignment = seen.summary.alignment
    assert alignment is not None
    rows = [name for name in (choice.best, choice.next, NOTHING.name) if name is not None]
    return {f"{alignment.rows[name].title}, noise": alignment.rows[name].noise for name in rows} | {
        "gain over no correction": gain,
        "price of the runner-up": choice.price,
        "trainer moved, standard errors": alignment.moved,
        "sequences in an update": alignment.batch_sequences,
    }


def _growing(seen: Evidence) -> bool:
    first, last = _thirds(seen).values()
    return (last or 0.0) > max(5 * (first or 0.0), 1e-4)


def _thirds(seen: Evidence) -> dict[str, float | None]:
    """The median k3 of the first third of the steps, and of the last."""
    where = seen.summary.by.get("step")
    found = [place.metrics["k3"].value for place in (where.places if where else [])]
    known = [value for value in found if value is not None]
    ends = (known[: len(known) // 3], known[len(known) - len(known) // 3 :])
    words = ("first third, median k3", "last third, median k3")
    return {word: median(end) if end else None for word, end in zip(words, ends, strict=True)}


RULES = (
    Rule(
        "bug",
        lambda seen: seen.summary.diagnosis is not None and seen.summary.diagnosis.verdict == "bug",
        ("mean_ratio", "k1", "k3"),
        "No correction mends numbers that are logged wrongly, and one may make things worse.",
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
        _identical,
        ("log_ratio_min", "log_ratio_max"),
        "The two columns hold the same numbers: they say nothing about a mismatch, unless both engines "
        "really agree to the last bit.",
        "two engines that compute apart do not agree exactly at every token",
        "not enough data",
    ),
    Rule(
        "aligned",
        _aligned,
        ("k3",),
        "The two policies agree to rounding; a correction would change nothing.",
        "bitwise aligned engines are gated at 1e-6 (slime, vLLM × TorchTitan)",
        "no correction needed",
    ),
    Rule(
        "healthy",
        lambda seen: _is_healthy(seen) and not _surely_ahead(seen),
        _compared,
        "The mismatch is as small as rounding, and no correction is ahead of none beyond doubt.",
        "k3 and the share of tokens that differ by more than 2× at most 1e-3; alignment of the gradient, "
        "estimated from this dump (docs/advice.md)",
        "no correction needed",
        offers=True,
    ),
    Rule(
        "hopeless",
        _hopeless,
        ("k3", "ess_tokens", "f_2"),
        "The drift is too large for any reweighting; change its source (weight sync, precision, replay).",
        "slime and miles debugging notes: k3 above 1 at step 1 is a configuration error",
        "no method helps",
    ),
    Rule(
        "no gain",
        _idle,
        _spared,
        "No correction makes the gradient point better by a tenth of a percent or more.",
        "alignment of the gradient, estimated from this dump (docs/advice.md)",
        "no correction needed",
        offers=True,
    ),
    Rule(
        "ladder",
        _chosen,
        _weighed,
        "Of the methods that judge single tokens its gradient is believed to point best in updates of this "
        "size: little noise, and no bias that shows.",
        "alignment of the gradient, estimated from this dump (docs/advice.md)",
        "METHOD at THRESHOLD",
        offers=True,
    ),
    Rule(
        "unknown",
        lambda seen: True,
        (),
        "The mismatch of this dump could not be measured.",
        "",
        "not enough data",
    ),
)

ALERTS = (
    Rule(
        "weights off centre",
        lambda seen: abs(seen.value("mean_ratio") - 1) > 0.5,
        ("mean_ratio",),
        "The mean ratio is below 0.5 or above 1.5.",
        "verl guide: rollout_is_mean < 0.5 or > 2 is a wiring error",
    ),
    Rule(
        "low ESS",
        lambda seen: seen.value("ess_tokens") < 0.3,
        ("ess_tokens",),
        "Less than 30% of the tokens count effectively.",
        "verl guide: ESS < 0.3 is bad (there of clamped weights, which stay above E[w]/C; here of raw ones)",
    ),
    Rule(
        "large KL",
        lambda seen: abs(seen.value("k1")) > 0.1,
        ("k1",),
        "|k1| is above 0.1 nats per token.",
        "verl guide: |kl| > 0.1",
    ),
    Rule(
        "large χ²",
        lambda seen: seen.value("chi2_token") > 1,
        ("chi2_token",),
        "The token χ² is above 1: the variance of the weights exceeds their mean squared.",
        "verl guide: chi2_token > 1",
    ),
    Rule(
        "above the merge gate",
        lambda seen: seen.value("k3") > 0.015,
        ("k3",),
        "k3 is above the level at which a new model is refused.",
        "prime-rl: KL < 0.015 at each of 20 steps before a model is merged",
    ),
    Rule(
        "probability difference",
        lambda seen: seen.value("prob_diff_mean") > 0.01,
        ("prob_diff_mean",),
        "The mean probability difference points at the engine's precision.",
        "verl FAQ: normally below 0.005; above 0.01 is a precision problem of the engine",
    ),
    Rule(
        "multiplicative error",
        lambda seen: seen.value("mult_prob_error") > 1.05,
        ("mult_prob_error",),
        "Tokens differ by more than 5% on average.",
        "NeMo-RL: token_mult_prob_error above 1.05 is to be investigated",
    ),
    Rule(
        "growing",
        _growing,
        _thirds,
        "The mismatch grows over the steps: k3 of the last third is more than five times that of the first.",
        "Ring and LR-decay reports: growth is an optimisation symptom; corrections alone fail in long runs",
    ),
    Rule(
        "heavy tail",
        lambda seen: not seen.trusted("ess_tokens"),
        ("khat_tokens",),
        "The tail of the token ratios is too heavy for their means to be trusted.",
        "Vehtari et al. 2024: k̂ above min(1 − 1/log10 n, 0.7)",
    ),
    Rule(
        "product ratios unusable",
        lambda seen: seen.value("ess_sequences") < 0.1,
        ("ess_sequences", "khat_sequences"),
        "Sequence-level importance sampling keeps less than 10% of its sample size at these lengths.",
        "ESS ≈ e^{−2·KL·T} for log-normal ratios (length trap)",
    ),
)


def advised(summary: Summary, trainer: str | None = None) -> Summary:
    """The summary with what guards refuse and with the recommendation, as `trainer` is told it."""
    summary = guarded(summary)
    if trainer and summary.alignment:
        summary = summary.model_copy(update={"alignment": sayable(summary.alignment, trainer)})
    given = recommend(summary)
    said = prescribed(given, trainer) if trainer else None
    return summary.model_copy(update={"recommendation": given.model_copy(update={"config": said})})


def recommend(summary: Summary) -> Recommendation:
    """The first rule that holds, and every alert."""
    seen = Evidence(summary)
    rule = next(rule for rule in RULES if rule.holds(seen))
    alerts = [_fired(alert, seen, "alert") for alert in ALERTS if alert.holds(seen)]
    given = Recommendation(
        decision=rule.decision or "not enough data",
        sentence=rule.sentence,
        rule=rule.name,
        longest_response=summary.lengths.longest if summary.lengths else None,
        fired=[_fired(rule, seen, "decision"), *alerts],
    )
    choice = _choice(summary) if rule.offers else None
    return _with(given, choice, summary) if choice else given


def _with(given: Recommendation, choice: Choice, summary: Summary) -> Recommendation:
    """The recommendation with the ladder's choice, and the price of the one after it."""
    assert summary.alignment is not None
    rows = summary.alignment.rows
    if given.decision == "no correction needed":
        choice = instead_of(rows, NOTHING.name)
    told = dict.fromkeys(name for name in (choice.best, choice.next, NOTHING.name) if name in rows)
    found: dict[str, object] = {
        "price": choice.price,
        "runner_up": _named(rows, choice.next),
        "numbers": {rows[name].title: rows[name].metrics for name in told},
    }
    if given.decision == "METHOD at THRESHOLD":
        best = rows[choice.best]
        found |= {"title": best.title, "method": best.method}
        found |= {"threshold": best.threshold, "settings": best.settings}
    return given.model_copy(update=found)


def _named(rows: dict[str, AlignmentRow], name: str | None) -> str | None:
    return None if name is None else rows[name].title


def _fired(rule: Rule, seen: Evidence, level: Literal["decision", "alert"]) -> Fired:
    saw = (
        rule.saw(seen)
        if callable(rule.saw)
        else {seen.prefix + name: seen.number(name).value for name in rule.saw}
    )
    return Fired(rule=rule.name, level=level, sentence=rule.sentence, saw=saw, source=rule.source)

"""Which correction, if any: an ordered table of rules; the first whose condition holds decides.

Thresholds and bands are those the field has published; each rule names its source and its regime. What a
rule saw is printed with it, so that a reader can disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Literal

from offpol_diag.diagnose import Evidence
from offpol_diag.summary import Decision, Fired, Recommendation, Summary


@dataclass(frozen=True)
class Method:
    """A preset and its bound, per kind of dump: three policies (decoupled) or two (bypass)."""

    decoupled: tuple[str, str]
    bypass: tuple[str, str]

    def here(self, seen: Evidence) -> tuple[str, str]:
        """The preset for this dump, and its bound."""
        return self.bypass if seen.prefix else self.decoupled


TOKEN_TIS = Method(("token_is", "2.0"), ("bypass_ppo_clip", "0.8–1.2"))
ICEPOP = Method(("decoupled_token_icepop", "0.5–5.0"), ("bypass_pg_token_icepop", "0.5–5.0"))
SEQUENCE_TIS = Method(("seq_is", "2.0"), ("pure_is", "2.0"))


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
        method: for the decision METHOD at THRESHOLD.
        runner_up: the method to try next.
    """

    name: str
    holds: Callable[[Evidence], bool]
    saw: tuple[str, ...] | Callable[[Evidence], dict[str, float | None]]
    sentence: str
    source: str
    decision: Decision | None = None
    method: Method | None = None
    runner_up: Method | None = None


def _few(seen: Evidence) -> bool:
    dump = seen.summary.dump
    return dump.groups < 20 or dump.sequences < 50 or dump.tokens < 1000


def _aligned(seen: Evidence) -> bool:
    return seen.value("k3") < 1e-6


def _hopeless(seen: Evidence) -> bool:
    return seen.value("k3") > 1.0 or seen.value("ess_tokens") < 0.05 or seen.value("f_2") > 0.5


def _small(seen: Evidence) -> bool:
    return seen.value("k3") <= 1e-3 and seen.value("f_2") <= 1e-3


def _outliers(seen: Evidence) -> bool:
    return seen.value("k3_top1_share") > 0.97 and seen.value("f_10") > 1e-4


def _severe_and_short(seen: Evidence) -> bool:
    usable = seen.value("ess_sequences") >= 0.5 and seen.trusted("ess_sequences")
    return seen.value("k3") > 0.02 and usable


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


def _always(seen: Evidence) -> bool:
    return not math.isnan(seen.value("k3"))


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
        _few,
        (),
        "Too little data to choose a method: at least 20 groups, 50 sequences and 1,000 tokens are needed.",
        "bootstrap over groups",
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
        "hopeless",
        _hopeless,
        ("k3", "ess_tokens", "f_2"),
        "The drift is too large for any reweighting; change its source (weight sync, precision, replay).",
        "slime and miles debugging notes: k3 above 1 at step 1 is a configuration error",
        "no method helps",
    ),
    Rule(
        "small",
        _small,
        ("k3", "f_2"),
        "The mismatch is that of a dense BF16 model; token TIS would be harmless and unnecessary.",
        "SGLang/miles: dense BF16 k3 lies in 1e-5…1e-3; four arms with and without IS were alike",
        "no correction needed",
        runner_up=TOKEN_TIS,
    ),
    Rule(
        "outliers",
        _outliers,
        ("k3_top1_share", "f_10", "k3"),
        "A few tokens carry nearly all of the mismatch; a mask removes them and leaves the rest alone.",
        "NeMo-RL and OpenRLHF: IcePop 0.5–5 for rare outliers (MoE routing)",
        "METHOD at THRESHOLD",
        ICEPOP,
        TOKEN_TIS,
    ),
    Rule(
        "severe and short",
        _severe_and_short,
        ("k3", "ess_sequences", "khat_sequences"),
        "The drift is severe and the responses short enough for product ratios to keep their sample size.",
        "verl rollout correction guide: severe drift (replay, old data) → sequence TIS; guarded by ESS and k̂",
        "METHOD at THRESHOLD",
        SEQUENCE_TIS,
        TOKEN_TIS,
    ),
    Rule(
        "severe",
        lambda seen: seen.value("k3") > 0.1,
        ("k3", "ess_tokens", "ess_sequences"),
        "The drift is severe: a bound on each token's ratio limits the damage, but mend the source as well "
        "(sync weights more often, sample at higher precision, replay less).",
        "verl correction guide: severe drift is past what truncation leaves unbiased; k3 above 0.1 nats",
        "METHOD at THRESHOLD",
        TOKEN_TIS,
        ICEPOP,
    ),
    Rule(
        "moderate",
        _always,
        ("k3", "ess_tokens", "ess_sequences"),
        "The mismatch is real and moderate; a bound on each token's ratio holds the few large ones.",
        "verl correction guide: moderate drift → token TIS, 1.5–5; FP8 recipes of verl and NeMo-RL use 2",
        "METHOD at THRESHOLD",
        TOKEN_TIS,
        ICEPOP,
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
        "Less than 30 % of the tokens count effectively.",
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
        "Tokens differ by more than 5 % on average.",
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
        "Sequence-level importance sampling keeps less than 10 % of its sample size at these lengths.",
        "ESS ≈ e^{−2·KL·T} for log-normal ratios (length trap)",
    ),
)


def recommend(summary: Summary) -> Recommendation:
    """The first rule that holds, and every alert."""
    seen = Evidence(summary)
    rule = next(rule for rule in RULES if rule.holds(seen))
    alerts = [_fired(alert, seen, "alert") for alert in ALERTS if alert.holds(seen)]
    method, threshold = rule.method.here(seen) if rule.method else (None, None)
    return Recommendation(
        decision=rule.decision or "not enough data",
        method=method,
        threshold=threshold,
        sentence=rule.sentence,
        rule=rule.name,
        runner_up=rule.runner_up.here(seen)[0] if rule.runner_up else None,
        fired=[_fired(rule, seen, "decision"), *alerts],
    )


def _fired(rule: Rule, seen: Evidence, level: Literal["decision", "alert"]) -> Fired:
    saw = (
        rule.saw(seen)
        if callable(rule.saw)
        else {seen.prefix + name: seen.number(name).value for name in rule.saw}
    )
    return Fired(rule=rule.name, level=level, sentence=rule.sentence, saw=saw, source=rule.source)

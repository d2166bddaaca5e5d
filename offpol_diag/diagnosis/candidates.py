"""Where no cause is established: those that fit, what speaks for and against each, and what would decide."""

from __future__ import annotations

from offpol_diag.diagnosis.main_gap import HEALTHY_K3
from offpol_diag.diagnosis.profile import CUT, FLAT, MOSTLY, OUTLYING, ROUNDED, STALE, Common, Profile
from offpol_diag.diagnosis.registry import BY_ID, CANDIDATES
from offpol_diag.result import CandidateCause

MOST = 3
"""Most candidates that are listed."""

ALWAYS = ("quantized_rollout", "weights_not_synced")
"""Candidates where none fits by its own condition: nothing rules them out."""


def evidence(profile: Profile) -> list[tuple[str, bool, str]]:
    """Return what `Cause.speaks_for` and `speaks_against` name: name, whether it holds, and a sentence."""
    usual, course, metadata = profile.usual, profile.course, profile.metadata
    level = f"|Δ|/(1 − q) is {usual:.2g} for a usual token"
    wide = f"{level}; 8-bit weights leave 0.06 to 0.13."
    at_0, rounded, body = profile.lags.get(0, 0.0), usual <= ROUNDED, profile.outliers < OUTLYING
    normal = f"engines of a dense model in bf16 stay below {HEALTHY_K3:g} as a rule"
    other_weights = profile.common >= Common.OTHER_WEIGHTS
    return [
        ("behind", profile.behind, "No row is at a policy_lag of 0."),
        ("at lag 0", at_0 > HEALTHY_K3, f"K3 is {at_0:.2g} ({CUT}) at a policy_lag of 0."),
        (
            "flat over lag",
            profile.over_lag <= FLAT,
            f"K3 does not rise with the lag: {profile.lags_text}, {CUT}.",
        ),
        ("grows", course.growth > 0, f"|Δ|/(1 − q) grows over the steps: {course.text}."),
        ("back", course.back, f"|Δ|/(1 − q) by step falls back to rounding: {course.text}."),
        ("shared", other_weights, f"{profile.common_text}; quantised weights leave 10% to 25%."),
        ("noise", profile.common <= Common.ROUNDING, f"{profile.common_text}: noise of single tokens."),
        ("wide", usual > STALE, wide),
        ("broad", ROUNDED < usual <= STALE, f"Every token is off: {wide}"),
        ("close", rounded and body, f"{level}, as rounding leaves it."),
        ("partly", rounded and not body, f"{level}, and a part of the tokens is far beyond that."),
        ("beyond rounding", profile.k3 > HEALTHY_K3, f"K3 is {profile.k3:.2g} ({CUT}); {normal}."),
        ("outliers", profile.few_carry >= MOSTLY, f"{profile.outliers_text}."),
        ("quantised", bool(metadata.quantised), f"The dump says {metadata.quantised}."),
        ("plain", bool(metadata.plain), f"The dump says {metadata.plain}."),
    ]


def fitting(profile: Profile) -> list[CandidateCause]:
    """Return the causes that fit, the least contradicted first, with what speaks for and against each."""
    holding = {name: sentence for name, holds, sentence in evidence(profile) if holds}
    fit = [name for name in CANDIDATES if BY_ID[name].fits(profile)]
    if not fit or (fit == ["weights_not_synced"] and not profile.course.back):
        fit = [name for name in CANDIDATES if name in fit or name in ALWAYS]
    found: list[tuple[int, CandidateCause]] = []
    for cause in map(BY_ID.__getitem__, fit):
        pro = [holding[name] for name in cause.speaks_for if name in holding]
        contra = [holding[name] for name in cause.speaks_against if name in holding]
        recorded = "quantised" in holding and "quantised" in cause.speaks_for
        candidate = CandidateCause(
            id=cause.id, kind=cause.verdict, statement=cause.statement, for_=pro[:1], against=contra[:1]
        )
        found.append((len(contra) - recorded, candidate))
    return [candidate for _, candidate in sorted(found, key=lambda pair: pair[0])][:MOST]


# ---------------------------------------------------------------- what would decide

SCORE_TWICE = (
    "Score the same 64 responses twice with the trainer: if the two scorings differ as much, it is noise "
    "of kernels, the router or dropout; if they are equal, engine and trainer compute different things."
)
WRITE_LAG = (
    "Write policy_lag (or rollout_version and train_version) into the next dump: with stale weights K3 "
    "rises with the lag and is as small as rounding at lag 0; with weights that do not arrive, or any "
    "other cause, it is larger at lag 0 too."
)
AT_LAG_0 = (
    "Write policy_lag for a step whose responses are sampled right after a sync, at lag 0: with stale "
    "weights K3 is as small as rounding there; with any other cause it is larger there too."
)
IN_BF16 = (
    "Repeat the step with the engine in bf16, eager, without prefix cache: if K3 falls to rounding, it was "
    "the precision or a kernel; if it stays, the weights or the texts differ."
)
CHECKSUM = (
    "Score the same 64 responses twice, once by the engine as it runs and once by an engine that has "
    "just loaded the trainer's checkpoint: if only the second agrees with the trainer, the weights did "
    "not arrive. Or write the digests of both sides' weights (docs/dumps.md) into the next dump."
)
DECIDES = {
    WRITE_LAG: {"stale"},
    AT_LAG_0: {"stale"},
    IN_BF16: {"quantized_rollout", "numerics", "moe_outliers"},
    CHECKSUM: {"stale", "weights_not_synced"},
}
"""Measurement, with what each outcome would mean → the candidates of one outcome."""


def deciding(profile: Profile, names: list[str]) -> str:
    """Return the measurement that separates the first candidate from the second, or else from a later one."""
    if profile.common == Common.NOISE or profile.outlying:
        return SCORE_TWICE
    possible = [WRITE_LAG] * (not profile.lags) + [AT_LAG_0] * profile.behind + [IN_BF16, CHECKSUM]
    first, *others = names
    separates = [
        measurement
        for rival in others
        for measurement in possible
        if (first in DECIDES[measurement]) != (rival in DECIDES[measurement])
    ]
    return (separates + [one for one in possible if first in DECIDES[one]] + [""])[0]

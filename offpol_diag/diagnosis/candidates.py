"""Candidates: the causes that fit a mismatch which nothing in the dump establishes, and how to decide.

Each row of `CANDIDATES` has the evidence for it and against it: functions of what was seen that return a
sentence, or nothing. They are listed by how much speaks against them. None has a fix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from offpol_diag.diagnosis.causes import CAUSES
from offpol_diag.diagnosis.definition import OCTAVES, faded
from offpol_diag.diagnosis.floors import MOST_EXCUSED, ceiling
from offpol_diag.diagnosis.honest import (
    GROWN,
    NOISE,
    OUTLYING,
    RISING,
    ROUNDED,
    STALE,
    SYSTEMATIC,
    Seen,
    listed,
    unsystematic,
)
from offpol_diag.diagnosis.laws import SHAPES
from offpol_diag.diagnosis.numbers import HEALTHY_K3
from offpol_diag.diagnosis.rows import SURE, estimate, numbers, uncertain
from offpol_diag.diagnosis.signatures import percent
from offpol_diag.numerals import rounded
from offpol_diag.result import CandidateCause

MOST = 3
"""Most candidates that are listed."""
WIDELY = 0.5
"""Scale of Δ/(1 − π_rollout) above which quantised weights alone are no candidate: 4 bits give up to 0.46 in
the rollouts of `benchmarks/doctor`."""
USUAL_K3 = 0.015
"""K3, nats, below which mixtures of experts in bf16 and fp8 rollouts stay as a rule (SGLang/miles study)."""
SHARED = 0.25
"""Systematic share of r above which other weights are likelier than quantised ones: weights of another step
give 24% to 50% in the rollouts of `benchmarks/doctor`, quantised ones 10% to 28%."""
CUT = "cut at 1 nat a token"

Says = Callable[[Seen], str]


class Candidate(NamedTuple):
    """One row of the table.

    Attributes:
        id: the cause.
        statement: what would be wrong, as a sentence.
        fits: whether it is a candidate at all.
        speaks_for: evidence for it.
        speaks_against: evidence against it.
    """

    id: str
    statement: str
    fits: Callable[[Seen], bool]
    speaks_for: tuple[Says, ...]
    speaks_against: tuple[Says, ...]


class Measurement(NamedTuple):
    """A measurement that tells some candidates from all others.

    Attributes:
        text: what to do and how to read it.
        candidates: ids of the candidates on one side.
        offered: whether it is of use, given what the dump holds.
        lines: trainer → the line that makes it there.
    """

    text: str
    candidates: frozenset[str]
    offered: Callable[[Seen], bool]
    lines: Mapping[str, str]


# Evidence. Each function returns a sentence, or an empty one where it does not hold.


def all_behind(seen: Seen) -> str:
    """State that no row is at lag 0."""
    if not seen.behind:
        return ""
    lags = sorted({lag for lag in seen.rows.column("policy_lag") if lag is not None})
    said = f"policy_lag is {lags[0]:g}" + (f" to {lags[-1]:g}" if len(lags) > 1 else "")
    return f"{said}: no row is at lag 0."


def follows_lag(seen: Seen) -> str:
    """State that K3 rises a little with the lag."""
    times = _over_lag(seen)
    return f"K3 rises with the lag: {listed(seen.lags)}, {CUT}." if times and 1.5 < times <= RISING else ""


def level_over_lag(seen: Seen) -> str:
    """State that K3 does not follow the lag."""
    times = _over_lag(seen)
    return f"K3 does not rise with the lag: {listed(seen.lags)}, {CUT}." if times and times <= 1.5 else ""


def _over_lag(seen: Seen) -> float | None:
    first, *later = seen.lags.values() or [0.0]
    return float(np.mean(later)) / max(first, 1e-7) if later else None


def moved(seen: Seen) -> str:
    """State that the trainer has moved along its advantages."""
    if seen.moved is None or seen.moved <= SURE:
        return ""
    return (
        f"cov(A, min(r, 2)) is {seen.moved:.1f} standard errors above 0: the trainer has moved along its "
        "advantages since the tokens were sampled."
    )


def grows(seen: Seen) -> str:
    """State that K3 grows over the steps."""
    if seen.growth is None:
        return ""
    (first, low), *_, (last, high) = seen.steps.items()
    ends = f"{low:.2g} (step {first:g}) to {high:.2g} (step {last:g})"
    return f"K3 grows {rounded(seen.growth)}-fold over the steps: {ends}, {CUT}."


def level_over_steps(seen: Seen) -> str:
    """State that K3 does not grow over at least four steps."""
    steps = list(seen.steps.values())
    if (
        len(steps) < 4
        or seen.growth is not None
        or seen.returns
        or max(steps) > GROWN * max(min(steps), 1e-8)
    ):
        return ""
    return f"K3 does not grow over the steps: it is {min(steps):.2g} to {max(steps):.2g}, {CUT}."


def returns(seen: Seen) -> str:
    """State that K3 falls back to rounding at some steps."""
    if not seen.returns:
        return ""
    low = max(seen.steps[step] for step in seen.returns)
    at = ", ".join(f"{step:g}" for step in seen.returns[:4]) + (" …" if len(seen.returns) > 4 else "")
    high = max(seen.steps.values())
    return f"K3 falls back to {low:.2g} at step {at}, and is up to {high:.2g} before, {CUT}."


def shared_much(seen: Seen) -> str:
    """State that tokens of one kind have more in common than quantised weights leave."""
    large = seen.share is not None and seen.share.low > SYSTEMATIC and seen.share.value > SHARED
    return f"{seen.common}; quantised weights leave 10% to 25%." if large else ""


def shared_some(seen: Seen) -> str:
    """State that tokens of one kind have as much in common as quantised weights leave."""
    some = seen.share is not None and seen.share.low > 0 and NOISE < seen.share.value <= SHARED
    return f"{seen.common}; quantised weights leave 10% to 25%." if some else ""


def shared_at_all(seen: Seen) -> str:
    """State that tokens of one kind have more in common than rounding leaves."""
    large = seen.share is not None and seen.share.low > SYSTEMATIC
    return f"{seen.common}; rounding leaves at most 12%." if large else ""


def noise(seen: Seen) -> str:
    """State that the mismatch is noise of single tokens."""
    return f"{seen.common}: noise of single tokens." if unsystematic(seen.share) else ""


def wide(seen: Seen) -> str:
    """State that a usual token is off by more than quantised weights of 8 bits move it."""
    return f"{_usual(seen)}; 8-bit weights leave 0.06 to 0.13." if seen.body.scale > STALE else ""


def broad(seen: Seen) -> str:
    """State that every token is off by as much as quantised weights of 8 bits move it."""
    some = ROUNDED < seen.body.scale <= STALE
    return f"Every token is off: {_usual(seen)}; 8-bit weights leave 0.06 to 0.13." if some else ""


def close(seen: Seen) -> str:
    """State that a usual token is off by no more than rounding."""
    return f"{_usual(seen)}, as rounding leaves it." if seen.body.scale <= ROUNDED else ""


def off(seen: Seen) -> str:
    """State that a usual token is off by more than rounding."""
    return f"{_usual(seen)}; rounding leaves at most {ROUNDED:g}." if seen.body.scale > ROUNDED else ""


def _usual(seen: Seen) -> str:
    return f"|Δ|/(1 − q) is {seen.body.scale:.2g} for a usual token"


def outliers(seen: Seen) -> str:
    """State that a few tokens carry the mismatch."""
    tail = seen.body
    if not 0.001 < tail.tail < OUTLYING or tail.share < 0.5:
        return ""
    return f"{percent(tail.tail)} of the uncertain tokens carry {percent(tail.share)} of K3."


def no_outliers(seen: Seen) -> str:
    """State that many tokens carry the mismatch."""
    return f"The outliers carry only {percent(seen.body.share)} of K3." if seen.body.share < 0.5 else ""


def says_quantised(seen: Seen) -> str:
    """State that the metadata says so."""
    return f"The dump says {seen.recorded.quantised}." if seen.recorded.quantised else ""


def says_plain(seen: Seen) -> str:
    """State that the metadata names another number format."""
    return f"The dump says {seen.recorded.plain}." if seen.recorded.plain else ""


def says_experts(seen: Seen) -> str:
    """State that the metadata names experts."""
    return f"The dump says {seen.recorded.experts}." if seen.recorded.experts else ""


def in_sync(seen: Seen) -> str:
    """State that it is there at a recorded lag of 0."""
    k3 = seen.lags.get(0)
    if k3 is None or k3 <= HEALTHY_K3:
        return ""
    return f"K3 is {k3:.2g} ({CUT}) at a policy_lag of 0, where the weights should be the trainer's."


def beyond_dense(seen: Seen) -> str:
    """State that K3 is above what two engines differ by."""
    if not seen.k3 > HEALTHY_K3:
        return ""
    usual = f"two engines of a dense model in bf16 stay below {HEALTHY_K3:g} as a rule"
    return f"K3 is {seen.k3:.2g} ({CUT}); {usual}."


def beyond_usual(seen: Seen) -> str:
    """State that K3 is above what experts in bf16 and fp8 rollouts leave."""
    if not seen.k3 > USUAL_K3:
        return ""
    return f"K3 is {seen.k3:.2g} ({CUT}); experts in bf16 and fp8 rollouts stay below {USUAL_K3:g} as a rule."


def concentrated(seen: Seen) -> str:
    """State that few responses carry the mismatch."""
    level, total = seen.rows.level, seen.rows.sum(seen.rows.k3_cut)
    apart = level > 5 * np.median(level)
    carried = float(total[apart].sum() / total.sum()) if total.sum() > 0 else 0.0
    if not 0 < apart.mean() < 0.4 or carried < 0.5:
        return ""
    return f"{int(apart.sum()):,} of {len(level):,} responses carry {percent(carried)} of K3."


def jumps(seen: Seen) -> str:
    """State that the level jumps at one step for good."""
    if seen.jump is None:
        return ""
    step, low, high = seen.jump
    return f"|Δ|/(1 − q) jumps at step {step:g}, from {low:.2g} to {high:.2g}, and stays there."


def at_step_0(seen: Seen) -> str:
    """State that it is there at step 0, before any weight has changed, as at later steps."""
    if seen.start is None or seen.body.scale <= ROUNDED:
        return ""
    return f"It is there at step 0, before any weight has changed: |Δ|/(1 − q) by step {seen.start.text}."


def not_at_step_0(seen: Seen) -> str:
    """State that it is not there at step 0, at a lag of 0."""
    steps = seen.steps if seen.in_sync else {}
    if len(steps) < 4 or 0 not in steps or steps[0] > max(steps.values()) / 10:
        return ""
    return f"At step 0, before any weight has changed, K3 is {steps[0]:.2g}, {CUT}."


def by_place(seen: Seen) -> str:
    """State that it grows with the place in prompt and response."""
    lengths = numbers(seen.rows.column("prompt_length"))
    if not np.isfinite(lengths).all():
        return ""
    place = seen.rows.position + lengths.astype(np.int64)[seen.rows.owner]
    some = uncertain(seen.rows)
    ends = np.quantile(place[some], (0.2, 0.8)) if some.any() else (0, 0)
    near, far = (
        estimate(seen.rows, seen.rows.scaled, some & at) for at in (place <= ends[0], place >= ends[1])
    )
    apart = far.value - near.value > 4 * np.hypot(near.error, far.error)
    if not apart or far.value < 1.3 * near.value:
        return ""
    return (
        f"|Δ|/(1 − q) grows with the place in prompt and response: {near.value:.2g} up to {ends[0]:.0f}, "
        f"{far.value:.2g} from {ends[1]:.0f} on."
    )


def _goes_with(key: str, name: str) -> Says:
    """Return evidence that the mismatch goes with something: a measurement, which names no cause."""

    def says(seen: Seen) -> str:
        found = seen.carried.get(key)
        if found is None:
            return ""
        what, share, chance = found
        return (
            f"{percent(share)} of its variance goes with the {what} (with shuffled rows {percent(chance)}): "
            f"{SHAPES[key].means}."
        )

    says.__name__ = name
    return says


goes_with_kind = _goes_with("kind", "goes_with_kind")
goes_with_length = _goes_with("length", "goes_with_length")
goes_with_prompt = _goes_with("prompt", "goes_with_prompt")
goes_with_group = _goes_with("group", "goes_with_group")


def fades(seen: Seen) -> str:
    """State that it fades along the response, as after another prompt."""
    level = faded(seen.rows)
    if level is None:
        return ""
    places = ", ".join(f"{a} to {b - 1}: {x:.2g}" for (a, b), x in zip(OCTAVES, level, strict=True))
    return f"|Δ|/(1 − q) fades along the response: tokens {places}."


# The candidates.


def _possible_stale(seen: Seen) -> bool:
    return not seen.in_sync


def _possible_frozen(seen: Seen) -> bool:
    return seen.body.scale > ROUNDED or bool(seen.returns) or seen.growth is not None


def _possible_quantised(seen: Seen) -> bool:
    return seen.body.scale <= WIDELY and not seen.returns


def _possible_numerics(seen: Seen) -> bool:
    if seen.body.scale <= ROUNDED and seen.k3 > HEALTHY_K3:
        return False  # something else moves the tokens that carry K3
    little = seen.body.scale <= 2 * ROUNDED or bool(noise(seen))
    return little and not (seen.returns or shared_at_all(seen))


def _possible_experts(seen: Seen) -> bool:
    shaped = bool(outliers(seen)) and seen.body.scale <= 3 * ROUNDED
    return (shaped or bool(seen.recorded.experts)) and not seen.returns


def _possible_other(seen: Seen) -> bool:
    return not seen.returns and seen.lags.get(0, 1.0) > HEALTHY_K3


CANDIDATES: tuple[Candidate, ...] = (
    Candidate(
        "stale",
        "Stale weights: the engine's are older than the trainer's.",
        _possible_stale,
        (all_behind, follows_lag, moved, grows, shared_much, goes_with_kind, wide, not_at_step_0),
        (level_over_lag, noise, in_sync, close),
    ),
    Candidate(
        "sync_stopped",
        "Weights that do not reach the engine, or not at every step.",
        _possible_frozen,
        (returns, grows, in_sync, shared_much, not_at_step_0),
        (noise, at_step_0),
    ),
    Candidate(
        "quantized_rollout",
        "A quantised rollout: weights, activations or cache of few bits.",
        _possible_quantised,
        (says_quantised, broad, shared_some, level_over_steps, in_sync, jumps, at_step_0),
        (
            *(by_place, fades, says_plain, close, grows, moved, wide, shared_much, noise),
            *(beyond_usual, goes_with_length, goes_with_prompt),
        ),
    ),
    Candidate(
        "weights_differ",
        "Other weights at every step: an adapter, a head or experts not loaded.",
        _possible_other,
        (in_sync, shared_much, goes_with_kind, goes_with_group, wide, level_over_steps, not_at_step_0),
        (grows, noise, close, at_step_0),
    ),
    Candidate(
        "model_differs",
        "Another model definition: RoPE, a window, sinks, a soft-cap or norms computed otherwise.",
        _possible_other,
        (in_sync, wide, level_over_steps, at_step_0, by_place, goes_with_length, goes_with_group),
        (grows, noise, close, shared_much, not_at_step_0, fades, goes_with_kind),
    ),
    Candidate(
        "moe_outliers",
        "Experts routed otherwise in the engine than in the trainer.",
        _possible_experts,
        (outliers, says_experts, noise),
        (grows, shared_at_all, no_outliers, beyond_usual),
    ),
    Candidate(
        "numerics",
        "Other kernels: the same weights, computed otherwise.",
        _possible_numerics,
        (close, noise),
        (off, grows, beyond_dense),
    ),
    Candidate(
        "wrong_context",
        "Responses scored after another prompt, or as another text.",
        lambda seen: bool(concentrated(seen) or fades(seen) or goes_with_prompt(seen)),
        (concentrated, fades, goes_with_prompt),
        (shared_at_all,),
    ),
)
"""The candidates, more common ones first: of two that as much speaks against, the earlier one is first."""

OF_WEIGHTS = frozenset({"stale", "sync_stopped", "weights_differ"})
"""Candidates of weights that are not the trainer's."""
PLAIN = {
    "verl": "actor_rollout_ref.rollout.dtype=bfloat16 actor_rollout_ref.rollout.enforce_eager=True "
    "actor_rollout_ref.rollout.enable_prefix_caching=False",
    "TRL": "trl vllm-serve --dtype bfloat16 --enforce_eager True --enable_prefix_caching False",
    "slime": "--sglang-dtype bfloat16 --sglang-disable-cuda-graph --sglang-disable-radix-cache",
}
"""Trainer → what makes its engine compute in bf16, eager, without prefix cache."""
LAG = {
    name: f"docs/trainers/{name.lower()}.md has a hook that writes it" for name in ("verl", "TRL", "slime")
}
"""Trainer → what writes the policy lag."""
MEASUREMENTS = (
    Measurement(
        "Score the same 64 responses twice with the trainer: if the two scorings differ as much, it is noise "
        "of kernels or of the router; if they are equal, engine and trainer compute different things.",
        frozenset({"moe_outliers", "numerics"}),
        lambda seen: seen.outlying,
        {},
    ),
    Measurement(
        "Write policy_lag (or rollout_version and train_version) into the next dump: with stale weights K3 "
        "rises with the lag and is as small as rounding at lag 0; with weights that do not arrive, or any "
        "other cause, it is larger at lag 0 too.",
        frozenset({"stale"}),
        lambda seen: not seen.known,
        LAG,
    ),
    Measurement(
        "Write policy_lag for a step whose responses are sampled right after a sync, at lag 0: with stale "
        "weights K3 is as small as rounding there; with any other cause it is larger there too.",
        frozenset({"stale"}),
        lambda seen: seen.behind,
        LAG,
    ),
    Measurement(
        "The same step with the engine in bf16, eager, without prefix cache: if K3 falls to rounding, it was "
        "the precision or a kernel; if it stays, the weights or the texts differ.",
        frozenset({"quantized_rollout", "numerics", "moe_outliers"}),
        lambda seen: True,
        PLAIN,
    ),
    Measurement(
        "Score the same 64 responses twice, once by the engine as it runs and once by an engine that has "
        "just loaded the trainer's checkpoint: if only the second agrees with the trainer, the weights did "
        "not arrive. Or write the digests of both sides' weights (docs/dumps.md) into the next dump.",
        OF_WEIGHTS,
        lambda seen: True,
        {},
    ),
)
"""The first that tells two candidates apart is taken; all can be made today."""


ALWAYS = ("quantized_rollout", "weights_differ")
"""Candidates where none fits by its own condition: nothing rules them out."""


RECORDED = (says_quantised, says_experts)
"""Evidence from the metadata, which outweighs one point against."""


def fitting(seen: Seen) -> list[CandidateCause]:
    """Return the causes that fit, the least contradicted first, with what speaks for and against each."""
    found = []
    for one in able(seen):
        speaks_for = [text for says in one.speaks_for if (text := says(seen))]
        against = [text for says in one.speaks_against if (text := says(seen))]
        recorded = any(says(seen) for says in one.speaks_for if says in RECORDED)
        cause = CandidateCause(
            id=one.id,
            kind=CAUSES[one.id].kind,
            statement=one.statement,
            for_=speaks_for,
            against=against,
        )
        found.append((len(against) - recorded, cause))
    return [cause for _, cause in sorted(found, key=lambda pair: pair[0])][:MOST]


def able(seen: Seen) -> list[Candidate]:
    """Return the candidates that nothing rules out, and `ALWAYS` where there is no other than the sync."""
    fits = {one.id: one for one in CANDIDATES if one.fits(seen)}
    if seen.returns or not fits.keys() <= {"sync_stopped"}:
        return [*fits.values()]
    return [one for one in CANDIDATES if one.id in fits or one.id in ALWAYS]


def deciding(seen: Seen, found: Sequence[CandidateCause]) -> Measurement | None:
    """Return the measurement that tells the first candidate from the second, or else from any other."""
    first, *others = [one.id for one in found]
    able = [one for one in MEASUREMENTS if one.offered(seen)]
    tells = (
        one for rival in others for one in able if (first in one.candidates) != (rival in one.candidates)
    )
    return next(tells, None) or next((one for one in able if first in one.candidates), None)


def explained(seen: Seen) -> str:
    """Return what has to be explained, in a clause."""
    if seen.inexcusable and seen.synced is not None:
        at, most = "K3 at lag 0 is" if seen.known else "K3 is", ceiling(seen.recorded)
        of = seen.recorded.precision if most < MOST_EXCUSED else "a number format"
        return f"{at} above {seen.synced:.2g}, and {of} excuses no more than {most:.2g}"
    if seen.returns:
        return "K3 is large at some steps and rounding at others"
    if seen.growth is not None:
        return f"K3 grows {rounded(seen.growth)}-fold over the steps"
    if seen.outlying:
        return "a few tokens differ by much"
    if seen.body.tail >= OUTLYING and seen.body.scale <= ROUNDED:
        return "a part of the tokens differs by much"
    if seen.noise:
        return "the noise of single tokens is larger than rounding makes it"
    return "the tokens differ by more than rounding makes them"

"""Other weights than the trainer's at a recorded lag of 0, another model, or one group that stands out."""

from __future__ import annotations

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.estimates import percent
from offpol_diag.diagnosis.main_gap import HEALTHY_K3
from offpol_diag.diagnosis.profile import ROUNDED, SYNCED, Common, Course, Profile
from offpol_diag.diagnosis.rows import MACHINES, Rows, jittered, partitions
from offpol_diag.dump.schema import DIGESTS

FEWEST_STEPS, FEWEST_ROWS, ODD = 4, 16, 3
"""Fewest steps by which digests that stay differ from a constant lag that is not written down; fewest
sequences at lag 0; and fewest steps that are off where later ones are in sync again: one may be odd."""


class WeightsNotSynced(Cause):
    """At lag 0 the engine does not have the trainer's weights.

    At a recorded lag of 0 the level |Δ|/(1 − π_rollout) rises from rounding (up to 0.06) to more than 8 bits
    make it (0.12), from a step on or at some steps; or digests of the two sides' weights differ. An adapter
    may be never sent, or its scale, a head or experts may be others at every step.
    """

    id = "weights_not_synced"
    kind = "weights"
    speaks_for = ("back", "grows", "wide", "shared", "at lag 0")
    speaks_against = ("noise", "close")
    sentence = "the engine does not have the trainer's weights {since}, though the dump says policy_lag 0"
    evidence = (
        "engine and trainer have other digests in {:,} of {:,} rows of policy lag 0: {:,} of the engine, "
        "{:,} of the trainer"
    )
    confirm = "compare a checksum of one weight tensor on both sides after the next sync"
    fix = (
        "check how weights are transferred: adapters never sent or misnamed, a sync that fails or is skipped"
    )
    after = "without these sequences"
    statement = "Weights that do not reach the engine, or only some of them: an adapter, a head or experts."
    apart = {"stale": "The recorded lag explains the mismatch."}

    def fits(self, profile: Profile) -> bool:
        unlike = profile.usual > ROUNDED or profile.changes
        return unlike or profile.lags.get(0, 1.0) > HEALTHY_K3

    def look(self, rows: Rows) -> Found | None:
        """Find rows at policy lag 0 whose weights are not the trainer's, by their digests.

        A digest of the engine that stays while the trainer's changes, or rows that differ at steps between
        others that do not. Digests that are equal at no later step may be of another dtype, or of a constant
        lag that is not written down.
        """
        pairs = list(zip(*(rows.column(name) for name in DIGESTS), strict=True))
        step, synced = rows.numbers("step"), rows.numbers("policy_lag") == 0
        known = synced & np.array([None not in pair for pair in pairs])
        differ = known & np.array([engine != trainer for engine, trainer in pairs])
        equal = known & ~differ
        if not differ.any() or not equal.any():
            return None
        held, wanted = (len({pairs[i][side] for i in np.flatnonzero(differ)}) for side in (0, 1))
        between = (step >= step[equal].min()) & (step <= step[equal].max())
        if not (differ & between).any() and (held > 1 or wanted < FEWEST_STEPS):
            return None
        evidence = self.evidence.format(differ.sum(), known.sum(), held, wanted)
        words, tokens = {"since": f"in {percent(float(differ.mean()))} of the responses"}, differ[rows.owner]
        return Found(self, evidence, rows, tokens, rows.only(~differ), exact=True, words=words)

    def look_alone(self, rows: Rows) -> Found | None:
        """Find steps at a recorded lag of 0 whose level is far beyond that of others, which is rounding."""
        synced = rows.numbers("policy_lag") == 0
        if synced.sum() < FEWEST_ROWS:
            return None
        course = Course(rows.only(synced))
        if not (high := course.high).any():
            return None
        first, again = int(np.argmax(high)), int(np.sum(np.diff(high.astype(int)) == -1))
        since = f"since step {course.steps[first]:g}"
        if not high[first:].all():
            if again < 2 and high.sum() < ODD:
                return None
            back = course.steps[first + int(np.argmin(high[first:]))]
            since = f"at {int(high.sum())} of {len(high)} steps (in sync again at step {back:g})"
        off = synced & np.isin(rows.numbers("step"), course.steps[high])
        evidence = f"|Δ|/(1 − q) by step at lag 0: {course.text}; the same weights leave up to {SYNCED:g}"
        return Found(self, evidence, rows, off[rows.owner], rows.only(~off), words={"since": since})

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Let the trainer move on from the third of five steps on, ever more, at a recorded lag of 0."""
        step = np.arange(rows.sequences) * 5 // rows.sequences
        size = np.where(step < 2, 0.0, 0.2 * step)[rows.owner]
        return jittered(rows, size, rng, step=step.tolist(), policy_lag=[0] * rows.sequences)


DIFFERENT = 0.25
"""Level of a usual token that no engine reaches whose number format is not a quantised one: in bf16 it is
0.04, 8 bits give 0.04 to 0.13, and 4 bits 0.10 to 0.25."""


class ModelDiffers(Cause):
    """The two sides compute different models.

    At lag 0, from the first step on, and with no quantised format recorded: a usual token is off by 0.25 to
    0.50 of its uncertainty (bf16 0.03 to 0.04, fp8 0.065, int8 0.13), and K3 is ten times that of other runs
    of the model. It may depend on place, length, kind of token or prompt, and does not change over steps.
    """

    kind = "model"
    id = "model_differs"
    speaks_for = ("wide", "at lag 0")
    speaks_against = ("grows", "noise", "shared", "close")
    sentence = "engine and trainer compute different models, from the first step on"
    evidence = (
        "{}; by step {}, at a recorded lag of 0; the dump says {}, with which two engines differ by 0.04"
    )
    confirm = "score the same responses once more with the checkpoint that both sides loaded"
    fix = "find out which side it is: offpol-diag rescore DUMP --model CHECKPOINT --try all"
    statement = "Another model definition: RoPE, a window, sinks, a soft-cap or norms computed differently."
    apart = {"weights_not_synced": "The weights differ, not the model: digests of single tensors show it."}

    def fits(self, profile: Profile) -> bool:
        return not profile.course.back and profile.lags.get(0, 1.0) > HEALTHY_K3

    def look_alone(self, rows: Rows) -> Found | None:
        """Find a level that no unquantised engine reaches, at a recorded lag of 0, at step 0 as at any other.

        An adapter that is missing, and weights that do not arrive, are the trainer's own at step 0.
        """
        profile = rows.once(Profile)
        plain, course = profile.metadata.plain, profile.course
        noise = profile.common <= Common.ROUNDING if profile.share else bool(profile.metadata.experts)
        from_start = profile.in_sync and course.at_first
        if not plain or profile.usual < DIFFERENT or noise or not from_start:
            return None
        evidence = self.evidence.format(profile.evidence, course.text, plain)
        return Found(self, evidence, rows, rows.every)


ERRORS, TIMES, PLAIN_TIMES = 5.5, 2.5, 5.0
"""Standard errors and factor of mean |Δ| from which a group stands out; and the factor of a group that is not
one of machines: prompts of another kind may be harder to agree on, machines all do the same work."""
FEWEST, MOST = 6, 0.6
"""Fewest sequences inside and outside a group, and most of all sequences that it may have."""


class GroupFault(Cause):
    """One engine, host or other group stands out.

    Responses of one value of a column (host, engine, env) differ several-fold more than those of the others,
    within the same step and lag. The others are at the usual level.
    """

    kind = "weights"
    id = "group_fault"
    sentence = "sequences with {where} differ {times}-fold more than the others"
    evidence = (
        "mean |Δ| of a sequence is {:.2g} nats with {} ({:,} sequences) and {:.2g} with others, medians"
    )
    confirm = "restart or replace what is behind {where}, and compare again"
    fix = "check the weights, the version and the flags of {where}: did it miss a weight sync?"
    after = "without these sequences"
    apart = {"quantized_rollout": "A group at another precision is honest if the dump says so."}
    blanks = {"where": "one value of a column"}

    def look_alone(self, rows: Rows) -> Found | None:
        """Find the group that differs most in mean |Δ| from what is usual at its own step and lag."""
        best, found, logs, weights = 0.0, None, np.log(np.maximum(rows.mean_gap, 1e-9)), rows.weights
        for one in np.unique(weights):
            logs[weights == one] -= np.median(logs[weights == one])
        every = ((name, *one) for name, parts in partitions(rows) if name != "step" for one in parts.items())
        for name, value, at in every:
            if min(at.sum(), (~at).sum()) < FEWEST or at.mean() > MOST:
                continue
            gap = float(logs[at].mean() - logs[~at].mean())
            error = np.hypot(*(logs[some].std() / np.sqrt(some.sum()) for some in (at, ~at)))
            times = TIMES if MACHINES.search(name.lower()) else PLAIN_TIMES
            if gap > max(best, ERRORS * error, np.log(times)):
                where = f"{name} = {value}"
                inside, outside = (np.median(rows.mean_gap[some]) for some in (at, ~at))
                evidence = self.evidence.format(inside, where, at.sum(), outside)
                words = {"times": f"{np.exp(gap):.0f}", "where": where}
                best, found = gap, Found(self, evidence, rows, at[rows.owner], rows.only(~at), words=words)
        return found

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        host = [f"h{i % 4}" for i in range(rows.sequences)]
        return jittered(rows, np.where(np.array(host) == "h2", 0.4, 0.0)[rows.owner], rng, host=host)

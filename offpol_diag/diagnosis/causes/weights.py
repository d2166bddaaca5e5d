"""The engine has other weights than the trainer, though the dump says that it has not; or another model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.numbers import HEALTHY_K3
from offpol_diag.diagnosis.rows import Rows, jittered, percent
from offpol_diag.diagnosis.seen import ROUNDED, SYNCED, Course, Seen
from offpol_diag.dump.schema import DIGESTS

FEWEST_STEPS, FEWEST_ROWS, ODD = 4, 16, 3
"""Fewest steps by which digests that stay are told from a constant lag that is not written down; fewest
sequences at lag 0; and fewest steps that are off where later ones are in sync again: one may be odd."""
DIFFERENT = 0.25
"""Level of a usual token that no engine reaches whose number format is not a quantised one: in bf16 it is
0.04, 8 bits give 0.04 to 0.13, and 4 bits 0.10 to 0.25."""


class WeightsNotSynced(Cause):
    """At lag 0 the engine does not have the trainer's weights.

    At a recorded lag of 0 the level |Δ|/(1 − π_rollout) rises from rounding (up to 0.06) to more than 8 bits
    make it (0.12), from a step on or at some steps; or digests of the two sides' weights differ. An adapter
    may be never sent, or its scale, a head or experts may be others at every step.
    """

    id = "weights_not_synced"
    kind = "weights"
    sentence = "the engine does not have the trainer's weights {since}, though the dump says policy_lag 0"
    confirm = "compare a checksum of one weight tensor on both sides after the next sync"
    fix = "look at what carries weights over: adapters never sent or named, a sync that fails or is skipped"
    after = "without these sequences"
    apart = {"stale": "There the recorded lag says it."}
    statement = "Weights that do not reach the engine, or only in part: an adapter, a head or experts."
    speaks_for = ("back", "grows", "wide", "shared", "at lag 0")
    speaks_against = ("noise", "close")

    def fits(self, seen: Seen) -> bool:
        unlike = seen.scale > ROUNDED or seen.course.back or seen.course.growth
        return bool(unlike) or seen.lags.get(0, 1.0) > HEALTHY_K3

    def look(self, rows: Rows) -> Found | None:
        """Find rows at policy lag 0 whose weights are not the trainer's, by their digests.

        A digest of the engine that stays while the trainer's changes, or rows that differ at steps between
        others that do not. Digests that are equal at no later step may be of another dtype, or of a constant
        lag that is not written down.
        """
        pairs = list(zip(*(rows.column(name) for name in DIGESTS), strict=True))
        step, synced = rows.numbers("step"), rows.numbers("policy_lag") == 0
        known = synced & np.array([None not in pair for pair in pairs])
        differ = known & np.array([own != theirs for own, theirs in pairs])
        equal = known & ~differ
        if not differ.any() or not equal.any():
            return None
        held, wanted = (len({pairs[i][side] for i in np.flatnonzero(differ)}) for side in (0, 1))
        between = (step >= step[equal].min()) & (step <= step[equal].max())
        if not (differ & between).any() and (held > 1 or wanted < FEWEST_STEPS):
            return None
        evidence = f"engine and trainer have other digests in {differ.sum():,} of {known.sum():,} rows of "
        evidence += f"policy lag 0: {held:,} of the engine, {wanted:,} of the trainer"
        words = {"since": f"in {percent(float(differ.mean()))} of the responses"}
        return self.of_sequences(evidence, rows, differ, repaired=rows.only(~differ), exact=True, words=words)

    def look_alone(self, rows: Rows) -> Found | None:
        """Find steps at a recorded lag of 0 whose level is far beyond that of others, which is rounding."""
        synced = rows.numbers("policy_lag") == 0
        if synced.sum() < FEWEST_ROWS:
            return None
        seen = Course(rows.only(synced))
        if not (high := seen.high).any():
            return None
        first, again = int(np.argmax(high)), int(np.sum(np.diff(high.astype(int)) == -1))
        since = f"since step {seen.steps[first]:g}"
        if not high[first:].all():
            if again < 2 and high.sum() < ODD:
                return None
            back = seen.steps[first + int(np.argmin(high[first:]))]
            since = f"at {int(high.sum())} of {len(high)} steps (in sync again at step {back:g})"
        off = synced & np.isin(rows.numbers("step"), seen.steps[high])
        evidence = f"|Δ|/(1 − q) by step at lag 0: {seen.text}; the same weights leave up to {SYNCED:g}"
        return self.of_sequences(evidence, rows, off, repaired=rows.only(~off), words={"since": since})

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Let the trainer move on from the third of five steps on, ever more, at a recorded lag of 0."""
        step = np.arange(rows.sequences) * 5 // rows.sequences
        size = np.where(step < 2, 0.0, 0.2 * step)[rows.owner]
        said = {"step": step.tolist(), "policy_lag": [0] * rows.sequences}
        return replace(rows, p=jittered(rows, size, rng), scalars={**rows.scalars, **said})


class ModelDiffers(Cause):
    """The two sides compute different models.

    At lag 0, from the first step on, with nothing recorded that is quantised: a usual token is off by 0.25 to
    0.50 of its uncertainty (bf16 0.03 to 0.04, fp8 0.065, int8 0.13), and K3 is ten times that of other runs
    of the model. It may depend on place, length, kind of token or prompt, and does not change over steps.
    """

    kind = "model"
    id = "model_differs"
    sentence = "engine and trainer compute different models, from the first step on"
    confirm = "score the same responses once more with the checkpoint that both sides loaded"
    fix = "measure it: offpol-diag rescore DUMP --model CHECKPOINT --try all says which side it is"
    apart = {"weights_not_synced": "There the weights are others; digests of single tensors tell."}
    statement = "Another model definition: RoPE, a window, sinks, a soft-cap or norms computed otherwise."
    speaks_for = ("wide", "at lag 0")
    speaks_against = ("grows", "noise", "shared", "close")

    def fits(self, seen: Seen) -> bool:
        return not seen.course.back and seen.lags.get(0, 1.0) > HEALTHY_K3

    def look_alone(self, rows: Rows) -> Found | None:
        """Find a level that no unquantised engine reaches, at a recorded lag of 0, at step 0 as at any other.

        An adapter that is missing, and weights that do not arrive, are the trainer's own at step 0.
        """
        seen = rows.once(Seen)
        single = seen.unsystematic if seen.share is not None else bool(seen.recorded.experts)
        from_start = seen.in_sync and seen.course.at_first
        if not seen.recorded.plain or seen.scale < DIFFERENT or single or not from_start:
            return None
        evidence = f"{seen.evidence}; by step {seen.course.text}, at a recorded lag of 0; the dump says "
        evidence += f"{seen.recorded.plain}, with which two engines differ by 0.04"
        return self.of_all(evidence, rows)

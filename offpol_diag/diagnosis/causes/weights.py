"""Weights of the engine that are not the trainer's, though the dump says that they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.numbers import HEALTHY_K3
from offpol_diag.diagnosis.rows import Rows, jittered, numbers, percent
from offpol_diag.diagnosis.seen import ROUNDED, SYNCED, Course, Seen

DIGESTS = ("weight_digest_rollout", "weight_digest_train")
"""Columns with a digest of the weights that sampled a row, and of those that scored it."""
FEWEST_STEPS = 4
"""Fewest steps by which digests that stay are told from a constant lag that is not written down."""
FEWEST_ROWS, ODD = 16, 3
"""Fewest sequences at lag 0, and fewest steps that are off where later ones are in sync again: one step may
be odd."""


class WeightsNotSynced(Cause):
    """At lag 0 the engine does not have the trainer's weights.

    At a recorded lag of 0 the level |Δ|/(1 − π_rollout) rises from rounding (up to 0.06) to more than 8 bits
    make it (0.12), from a step on or at some steps; or digests of the two sides' weights differ. Weights that
    stopped arriving grow with the step; with an adapter that is never sent the engine samples from the base
    model; a head, experts or an adapter's scale that are others are there at every step.
    """

    id = "weights_not_synced"
    kind = "weights"
    sentence = "the engine does not have the trainer's weights {since}, though the dump says policy_lag 0"
    violates = "at policy lag 0 the engine has the trainer's weights"
    confirm = (
        "compare a checksum of one weight tensor on both sides after the next sync (columns "
        "weight_digest_rollout and weight_digest_train), and list the adapters that the engine holds"
    )
    fix = (
        "look at what carries the weights over: adapters never sent or not named in the request (vLLM: "
        "enable_lora), names the engine does not know, a sync that fails or is skipped, sleep level 2, "
        "repacked experts; if a sync every n steps is meant, write policy_lag"
    )
    after = "without these sequences"
    blanks = {"since": "since some step, or at some steps"}
    apart = {
        "stale": "There the recorded lag says it; of rows that are all behind, only a checksum tells.",
        "quantized_rollout": "Few bits are there at step 0 too, and stay below 0.13 a token at 8 bits.",
        "model_differs": "There the weights are equal, and it is there at step 0 as at later steps.",
        "numerics": "Kernels leave a level of at most 0.04 at every step.",
    }
    statement = "Weights that do not reach the engine, or only in part: an adapter, a head or experts."
    speaks_for = ("back", "grows", "share of others", "wide", "at lag 0")
    speaks_against = ("noise", "close")

    def fits(self, seen: Seen) -> bool:
        unlike = seen.body.scale > ROUNDED or seen.course.back.any() or seen.course.growth
        return bool(unlike) or seen.lags.get(0, 1.0) > HEALTHY_K3

    def look(self, rows: Rows) -> Found | None:
        """Find rows at policy lag 0 whose weights are not the trainer's, by their digests.

        A digest of the engine that stays while the trainer's changes, or rows that differ at steps between
        others that do not. Digests that are equal at no later step may be of another dtype, or of a constant
        lag that is not written down.
        """
        pairs = list(zip(*(rows.column(name) for name in DIGESTS), strict=True))
        step, synced = numbers(rows.column("step")), numbers(rows.column("policy_lag")) == 0
        known = synced & np.array([None not in two for two in pairs], np.bool_)
        differ = known & np.array([own != theirs for own, theirs in pairs], np.bool_)
        equal = known & ~differ
        if not differ.any() or not equal.any():
            return None
        held, wanted = (len({pairs[i][side] for i in np.flatnonzero(differ)}) for side in (0, 1))
        between = (step >= step[equal].min()) & (step <= step[equal].max())
        if not (differ & between).any() and (held > 1 or wanted < FEWEST_STEPS):
            return None
        evidence = (
            f"engine and trainer have other digests in {int(differ.sum()):,} of {int(known.sum()):,} rows of "
            f"policy lag 0: {held:,} of the engine, {wanted:,} of the trainer"
        )
        words = {"since": f"in {percent(float(differ.mean()))} of the responses"}
        return self.of_sequences(evidence, rows, differ, repaired=rows.only(~differ), exact=True, words=words)

    def look_alone(self, rows: Rows) -> Found | None:
        """Find steps at a recorded lag of 0 whose level is far beyond that of others, which is rounding."""
        synced = numbers(rows.column("policy_lag")) == 0
        if synced.sum() < FEWEST_ROWS:
            return None
        seen = Course.of(rows.only(synced))
        high = seen.high
        if not high.any():
            return None
        first, again = int(np.argmax(high)), int(np.sum(np.diff(high.astype(int)) == -1))
        since = f"since step {seen.steps[first]:g}"
        if not high[first:].all():
            if again < 2 and high.sum() < ODD:
                return None
            back = seen.steps[first + int(np.argmin(high[first:]))]
            since = f"at {int(high.sum())} of {len(high)} steps (in sync again at step {back:g})"
        off = synced & np.isin(numbers(rows.column("step")), seen.steps[high])
        evidence = f"|Δ|/(1 − q) by step at lag 0: {seen.text}; the same weights leave up to {SYNCED:g}"
        return self.of_sequences(evidence, rows, off, repaired=rows.only(~off), words={"since": since})

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Let the trainer move on from the third of five steps on, ever more, at a recorded lag of 0."""
        step = np.arange(rows.sequences) * 5 // rows.sequences
        size = np.where(step < 2, 0.0, 0.2 * step)[rows.owner]
        said = {"step": step.tolist(), "policy_lag": [0] * rows.sequences}
        return replace(rows, p=jittered(rows, size, rng), scalars={**rows.scalars, **said})

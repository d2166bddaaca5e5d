"""Signatures of a model that is computed otherwise, and of a prompt that was changed at its beginning.

A prompt that was changed fades along the response, and another model is there from the first step on.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from offpol_diag.diagnosis.honest import Seen, unsystematic
from offpol_diag.diagnosis.rows import Rows, numbers, uncertain
from offpol_diag.diagnosis.signatures import Found
from offpol_diag.diagnosis.sync import from_start

DIFFERENT = 0.25
"""Scale of Δ/(1 − π_rollout) that no engine reaches whose number format is not a quantised one. In bf16 it is
0.04 (0.09 at a temperature of 0.15); 8 bits give 0.04 to 0.13, and 4 bits 0.10 to 0.25 at temperatures from
0.6 on: so it stays a bug where the metadata names the wrong format of these."""


def model_differs(seen: Seen) -> Found | None:
    """Find two models: a usual token is far off from step 0 on, and no quantised weights explain it.

    Experts that are routed otherwise are noise of single tokens, which another model is not.
    """
    noise = unsystematic(seen.share) if seen.share is not None else bool(seen.recorded.experts)
    if not seen.recorded.plain or seen.body.scale < DIFFERENT or noise:
        return None
    if seen.start is None:
        return None
    statistic = (
        f"{seen.statistic}; by step {seen.start.text}, at a recorded lag of 0; the dump says "
        f"{seen.recorded.plain}, with which two engines differ by 0.04"
    )
    return Found.of_all("model_differs", statistic, seen.rows)


OCTAVES = ((0, 8), (8, 16), (16, 32), (32, 64))
EACH, WHOLE, FAR, NEAR = 1.1, 2.0, 0.06, 0.15
"""Least factor between octaves of a response, and from the first to the last, of |Δ|/(1 − π_rollout) after a
changed prompt: 1.11 and 2.1. And shares of tokens above 8 times the usual size and below an eighth of it from
which two kinds of tokens are mixed: 0.12 and 0.16 where weights were updated on the way, 0.02 and 0.12 after
another prompt."""


def faded(rows: Rows) -> list[float] | None:
    """Return |Δ|/(1 − π_rollout) of uncertain tokens by octave of the response if it fades in each; or None.

    It does not count where later tokens are more certain, where a part of the sequences is clean as the
    first of each pack is, or where a part of the tokens is, as behind an update of the weights.
    """
    some = uncertain(rows)
    octaves = [(rows.index >= a) & (rows.index < b) for a, b in OCTAVES]
    if min((some & at).sum() for at in octaves) < 200:
        return None
    level = [float(rows.scaled[some & at].mean()) for at in octaves]
    sure = [float(some[at].mean()) for at in octaves]
    steps = [a / b for a, b in pairwise(level)]
    if min(steps) < EACH or level[0] < WHOLE * level[-1] or sure[-1] < 0.8 * sure[0]:
        return None
    begin = rows.keep(some & octaves[0])
    rows_ = begin.mean(begin.scaled)
    usual = float(np.median(rows.scaled[some])) / 0.6745
    clean = float(np.quantile(rows_, 0.1)) < 0.3 * float(np.median(rows_))
    size = rows.scaled[some] / usual
    return None if clean or np.mean(size > 8) > FAR or np.mean(size < 1 / 8) > NEAR else level


def fading(rows: Rows) -> Found | None:
    """Find a prompt that was changed at its beginning: the mismatch fades along the response, from step 0 on.

    Keys of older weights fade alike, but are the trainer's own at step 0, and padding does where the length
    of the prompt is not known.
    """
    if not np.isfinite(numbers(rows.column("prompt_length"))).all():
        return None
    level = faded(rows)
    if level is None or from_start(rows) is None:
        return None
    places = ", ".join(f"{a} to {b - 1}: {x:.2g}" for (a, b), x in zip(OCTAVES, level, strict=True))
    statistic = f"|Δ|/(1 − q) fades along the response, from step 0 on: tokens {places}"
    return Found.of_all("wrong_context", statistic, rows, fields={"share": "all"}, approximate=True)

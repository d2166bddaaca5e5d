"""Signatures of a model that is computed otherwise: padding that counts, packs that leak, another model.

A prompt that was changed fades along the response, and another model is there from the first step on.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from offpol_diag.diagnosis.drift import numbers, uncertain
from offpol_diag.diagnosis.honest import Seen, unsystematic
from offpol_diag.diagnosis.rows import (
    Floats,
    Rows,
    alike,
    bound,
    clusters,
)
from offpol_diag.diagnosis.signatures import Found, percent
from offpol_diag.diagnosis.sync import from_start

LEAST_TIMES = 4.0
"""Ratio of the 90% to the 10% quantile of |Δ|/(1 − π) by prompt from which a mismatch belongs to the prompt:
5 to 100 of padding that is attended to, 1.0 to 2.5 of honest dumps within one step and lag."""


def prompt_positions(rows: Rows) -> Found | None:
    """Find a mismatch that belongs to the prompt, and is larger the shorter the prompt: padding counts."""
    lengths = numbers(rows.column("prompt_length"))
    if np.isnan(lengths).any():
        return None
    group = clusters(rows)
    key = alike(rows) * (int(group.max()) + 1) + group
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    level = np.bincount(which, rows.sum(rows.scaled)) / np.bincount(which, rows.lengths)
    weights, length = alike(rows)[first], lengths[first]
    ranks: list[Floats] = []
    order: list[Floats] = []
    spread: list[float] = []
    for one in np.unique(weights):
        at = np.flatnonzero(weights == one)
        if len(at) < 6 or len(np.unique(length[at])) < 4:
            continue
        low, high = np.quantile(level[at], (0.1, 0.9))
        spread.append(float(high / max(low, 1e-9)))
        ranks.append(_ranks(level[at]))
        order.append(_ranks(length[at]))
    if not ranks or np.median(spread) < LEAST_TIMES:
        return None
    x, y = np.concatenate(ranks), np.concatenate(order)
    together = float((x * y).mean() / np.sqrt((x * x).mean() * (y * y).mean()))
    within = np.log(np.maximum(rows.level, 1e-9))
    mean = np.bincount(which, within) / np.bincount(which)
    own = 1 - float(np.square(within - mean[which]).sum() / np.square(within - within.mean()).sum())
    if together > -0.6 or -together * np.sqrt(len(x)) < bound(len(x)) / 2 or own < 0.5:
        return None
    low, high = np.quantile(level, (0.1, 0.9))
    statistic = (
        f"|Δ|/(1 − q) of a prompt's responses is {low:.2g} to {high:.2g} (10% and 90% of {len(level):,} "
        f"prompts); prompts explain {percent(own)} of its variance, and it falls with their length (rank "
        f"correlation {together:.2f} within a step)"
    )
    off = rows.mean(rows.scaled) > 3 * low
    fields = EITHER if _fades(rows.only(off)) > HIDDEN else {}
    return Found.of_sequences(
        "prompt_positions", statistic, rows, off, repaired=rows.only(~off), fields=fields
    )


HIDDEN = 6.0
"""Factor by which |Δ|/(1 − π) falls from tokens 0 to 7 to those from 32 on where layers with a window soon
hide what precedes the prompt: 14 to 20 after another beginning of it, 4 to 16 of padding, which is 1.4 to 3.1
without windows. Without them another beginning is seen after long prompts, too."""
EITHER = {
    "sentence": "what precedes the prompt differs between the two sides: padding that counts on one, or "
    "another beginning of the prompt (template, system prompt)",
    "confirm": "print token ids, attention_mask and position_ids of a short prompt on both sides",
    "fix": "give both sides the same ids from the first token on, and pass attention_mask and position_ids "
    "that begin there where the batch is padded on the left",
}


def _fades(rows: Rows) -> float:
    """Return by what factor the level of uncertain tokens falls along a response, or 1."""
    some = uncertain(rows)
    early, late = some & (rows.index < 8), some & (rows.index >= 32)
    if min(early.sum(), late.sum()) < 100:
        return 1.0
    return float(rows.scaled[early].mean() / max(rows.scaled[late].mean(), 1e-9))


def _ranks(x: Floats) -> Floats:
    """Return ranks less their mean."""
    ranks = np.argsort(np.argsort(x)).astype(np.float64)
    return np.asarray(ranks - ranks.mean())


CLEAN = 0.2
"""Largest level of the first sequences of packs, in that of the others, of packs that leak."""


def packing_leak(rows: Rows) -> Found | None:
    """Find sequences that see others of their pack: the first of each pack agrees, all others differ.

    Where their places are not known, one sequence of nearly every pack is clean, and one only.
    """
    place, level = numbers(rows.column("pack_index")), rows.mean(rows.scaled)
    known = not np.isnan(place).any()
    if not known and (ranked := _ranked(rows, level)) is not None:
        place = ranked
    first = place == 0
    if np.isnan(place).any() or min(first.sum(), (~first).sum()) < 8:
        return None
    clean, others = float(np.median(level[first])), float(np.median(level[~first]))
    if others < 0.02 or clean > CLEAN * others or np.mean(level[~first] > 2 * clean) < 0.8:
        return None
    which = "first sequences of a pack" if known else "sequences that differ least, one of each pack"
    statistic = (
        f"|Δ|/(1 − q) is {clean:.2g} in the {int(first.sum()):,} {which}, and {others:.2g} "
        f"in the {int((~first).sum()):,} others (medians)"
    )
    fields = {"column": "train"}
    return Found.of_sequences(
        "packing_leak", statistic, rows, ~first, repaired=rows.only(first), fields=fields
    )


def _ranked(rows: Rows, level: Floats) -> Floats | None:
    """Return the rank of each sequence within its pack, by its level; None where not one alone is clean."""
    if None in rows.column("pack_id"):
        return None
    pack = clusters(rows, "pack_id")
    order = np.lexsort((level, pack))
    begins = np.flatnonzero(np.diff(pack[order], prepend=-1))
    sizes = np.diff(begins, append=len(order))
    ranks = np.empty(len(order))
    ranks[order] = np.arange(len(order)) - np.repeat(begins, sizes)
    some = begins[sizes > 2]
    if len(some) < 8 or np.mean(level[order[some]] < CLEAN * level[order[some + 1]]) < 0.8:
        return None
    return ranks


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

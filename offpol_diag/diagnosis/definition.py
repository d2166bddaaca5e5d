"""Signatures of a model that is computed otherwise: padding that counts, packs that leak."""

from __future__ import annotations

import numpy as np

from offpol_diag.diagnosis.rows import Floats, Rows, alike, bound, clusters
from offpol_diag.diagnosis.signatures import Found, percent

LEAST_TIMES = 4.0
"""Ratio of the 90% to the 10% quantile of |Δ|/(1 − π) by prompt from which a mismatch belongs to the prompt:
5 to 100 of padding that is attended to, 1.0 to 2.5 of honest dumps within one step and lag."""


def prompt_positions(rows: Rows) -> Found | None:
    """Find a mismatch that belongs to the prompt, and is larger the shorter the prompt: padding counts."""
    lengths = np.array([np.nan if x is None else x for x in rows.column("prompt_length")], np.float64)
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
    tokens = rows.mean(rows.scaled) > 3 * low
    return Found.of_sequences("prompt_positions", statistic, rows, tokens, repaired=rows.only(~tokens))


def _ranks(x: Floats) -> Floats:
    """Return ranks less their mean."""
    ranks = np.argsort(np.argsort(x)).astype(np.float64)
    return np.asarray(ranks - ranks.mean())


CLEAN = 0.2
"""Largest level of the first sequences of packs, in that of the others, of packs that leak."""


def packing_leak(rows: Rows) -> Found | None:
    """Find sequences that see others of their pack: the first of each pack agrees, all others differ."""
    place = np.array([np.nan if x is None else x for x in rows.column("pack_index")], np.float64)
    if np.isnan(place).any():
        return None
    first, level = place == 0, rows.mean(rows.scaled)
    if min(first.sum(), (~first).sum()) < 8:
        return None
    clean, others = float(np.median(level[first])), float(np.median(level[~first]))
    if others < 0.02 or clean > CLEAN * others or np.mean(level[~first] > 2 * clean) < 0.8:
        return None
    statistic = (
        f"|Δ|/(1 − q) is {clean:.2g} in the {int(first.sum()):,} first sequences of a pack and {others:.2g} "
        f"in the {int((~first).sum()):,} others (medians)"
    )
    fields = {"column": "train"}
    return Found.of_sequences(
        "packing_leak", statistic, rows, ~first, repaired=rows.only(first), fields=fields
    )

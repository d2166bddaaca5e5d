"""A first or last token, or one beside masked ones, that is logged wrongly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.causes.sampling import MASS, VISIBLE, few_far
from offpol_diag.diagnosis.rows import Estimate, Flags, Ints, Rows, clusters, estimate, percent

FEWEST, OFTEN = 8, 5
"""Fewest tokens at a place, and fewest of them that are far off."""
LEAST, TIMES, APART = 0.12, 8.0, 2.5
"""Least mean |Δ| at a place, nats; its least factor over that of other tokens, up to a nat; and beyond it."""
SHARE, MASKED, BROADLY = 0.2, 0.4, 0.9
"""Least share of the tokens at a place that are far off; beside masked tokens; and there beside a mismatch
that is not small, as what follows a tool's answer changes most with the weights."""
BROAD = 0.3
"""Mean |Δ| from which a mismatch is so broad that a single place or E[r] shows nothing, nats."""
GOES_ON, EARLY = 1.6, 8
"""|Δ|/(1 − π_rollout) of the second and third token, in that of later ones, from which the mismatch of the
first goes on: after another prompt, or keys of older weights, it fades by octaves."""
COPIED, BESIDE = 0.1, 10.0
"""Least share of rows with an exact copy of another row's value, and its factor over that of tokens
elsewhere."""


class Boundary(Cause):
    """The first or the last token of a response is logged wrongly.

    One position per sequence carries K3, ten times the others or more; the rest agrees to rounding. With the
    end-of-sequence token the last position of responses that ended, not of those that were cut.
    """

    id = "boundary"
    sentence = "{place} is logged wrongly"
    violates = "a mismatch of kernels or weights does not single out one position"
    confirm = "compare both columns at {place} of a few sequences with log-softmax of its logits"
    fix = (
        "shift within each sequence and not across packed ones (use cu_seqlens, not torch.roll), and log the "
        "end-of-sequence token as it was sampled"
    )
    after = "without these tokens"
    ruled_out = "a first or last token that carries the mismatch"
    apart = {
        "sentinel": "There the value is a constant.",
        "wrong_context": (
            "After another prompt the first token is worst as well, but the excess decays over tens of "
            "tokens."
        ),
        "special_token": "There the id decides, wherever it stands.",
    }
    blanks = {"place": "the first or the last token"}

    def look(self, rows: Rows) -> Found | None:
        """Find a mismatch at the first or last token, or beside masked tokens."""
        gaps = np.zeros(rows.tokens, bool)
        gaps[1:] = (np.diff(rows.position) > 1) & (rows.index[1:] > 0)
        before_gap = np.append(gaps[1:], False)
        places = {
            "the first token": rows.index == 0,
            "the last token": rows.from_end == 0,
            "the token after masked ones": gaps,
            "the token before masked ones": before_gap,
        }
        edge = np.logical_or.reduce([*places.values()])
        inner = rows.size[~edge]
        if len(inner) < 20:
            return None
        copied = self._copies(rows, rows.index == 0, rows.from_end == 0)
        if copied is not None:
            return copied
        usual = float(inner.mean())
        far = min(max(0.2, float(np.quantile(inner, 0.99))), 1.0)
        base = float(np.mean(inner > far))
        broad = usual > BROAD or base > 0.08
        for name, at in places.items():
            many, first = int(at.sum()), name == "the first token"
            if many < FEWEST or (broad and not first):
                continue  # what follows a tool's answer or ends a response changes most with the weights
            if first and (_goes_on(rows, far, usual, ~edge) or _two_policies(rows, at, broad)):
                continue  # no single token: what follows differs too; or a right value before an update
            mean, share = float(rows.size[at].mean()), float(np.mean(rows.size[at] > far))
            stands_out = mean > max(LEAST, min(TIMES * usual, 1.0), APART * usual)
            often = share * many >= OFTEN and share > max(SHARE, min(12 * base, 0.5))
            if "masked" in name:
                often &= share > (MASKED if usual < 0.03 else BROADLY)
            if stands_out and often:
                tokens = at & (rows.size > far) if share < 0.5 else at
                evidence = (
                    f"{name} differs by {mean:.2g} nats on average, tokens elsewhere by {usual:.2g}; "
                    f"{percent(share)} of {many:,} are beyond {far:.2g} nats, {percent(base)} elsewhere"
                )
                return self.of_tokens(evidence, rows, tokens, repaired=rows.keep(~at), words={"place": name})
        return None

    def look_alone(self, rows: Rows) -> Found | None:
        """Find a range of positions where E[r] is not 1, while it is 1 elsewhere."""
        octave, broken = _broken_octaves(rows)
        if not broken or len(broken) > max(1, (int(octave.max()) + 1) // 3):
            return None
        if broken[-1][0] - broken[0][0] >= len(broken):
            return None  # here and there: no place
        tokens = np.isin(octave, [k for k, _ in broken])
        if not tokens.all() and rows.size[~tokens].mean() > BROAD:
            return None  # of two models that differ everywhere, E[r] misses what neither of them samples
        far = np.abs(rows.delta) > 1.0
        everywhere = far[tokens].mean() < 2 * far.mean()
        if everywhere and few_far(rows) and not _broken_octaves(rows.keep(~far))[1]:
            return None  # a few tokens that are far off at any place
        names = [f"{2**k - 1}" if k == 0 else f"{2**k - 1}–{2 ** (k + 1) - 2}" for k, _ in broken]
        place = f"position {', '.join(names)}" if names != ["0"] else "the first token"
        evidence = "; ".join(
            f"position {name}: E[r] = {seen.text}" for name, (_, seen) in zip(names, broken, strict=True)
        )
        return self.of_tokens(evidence, rows, tokens, words={"place": place})

    def _copies(self, rows: Rows, first: Flags, last: Flags) -> Found | None:
        """Find first tokens with the last value of another row, or last ones with the first value of one."""
        found: list[tuple[float, Found]] = []
        sides = (("first", first, "last", last), ("last", last, "first", first))
        for column, x in (("rollout", rows.q), ("train", rows.p)):
            unsure = (x < -1e-3) & (rows.size > 1e-3)
            for name, at, source, there in sides:
                taken = np.isin(x, x[there & (x < -1e-3)]) & unsure
                inner, tokens = unsure & ~(first | last), taken & at
                beside = float(taken[inner].sum() / max(inner.sum(), 1))
                share = float(tokens.sum() / max((unsure & at).sum(), 1))
                if tokens.sum() < FEWEST or share < max(COPIED, BESIDE * beside):
                    continue
                evidence = (
                    f"{percent(share)} of {int(at.sum()):,} rows hold at the {name} token, in the {column} "
                    f"column, exactly the value at the {source} token of another row; {percent(beside)} of "
                    "tokens elsewhere do"
                )
                concerned, words = at if share > 0.5 else tokens, {"place": f"the {name} token"}
                rest = {"repaired": rows.keep(~at), "words": words, "exact": True}
                found.append(
                    (float(rows.size[tokens].mean()), self.of_tokens(evidence, rows, concerned, **rest))
                )
        return (
            max(found, key=lambda one: one[0])[1] if found else None
        )  # what is copied fits, at its own place

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Put a number of another token's at the last token of each row, in the train column."""
        wrong = -1 - 3 * rng.random(rows.tokens)
        return replace(rows, p=np.where(rows.from_end == 0, wrong, rows.p))


def _goes_on(rows: Rows, far: float, usual: float, interior: Flags) -> bool:
    """Return whether the mismatch of the first token continues in the tokens after it."""
    near = (rows.index > 0) & (rows.index < 4) & interior
    if not near.any():
        return False
    after, later = near & (rows.index < 3), (rows.index >= EARLY) & interior
    if (
        after.sum() >= 16
        and later.sum() >= 64
        and rows.scaled[after].mean() > GOES_ON * rows.scaled[later].mean()
    ):
        return True
    if rows.size[near].mean() > max(4 * usual, 0.2):
        return True
    off = rows.of(rows.owner[(rows.index == 0) & (rows.size > far)])
    there, elsewhere = rows.size[near & off[rows.owner]], rows.size[near & ~off[rows.owner]]
    beside = max(float(elsewhere.mean()) if len(elsewhere) else 0.0, usual)
    return len(there) >= 12 and float(there.mean()) > 4 * beside


def _two_policies(rows: Rows, at: Flags, broad: bool) -> bool:
    """Return whether tokens [T], one of each sequence, look like right values of two policies.

    Then responses to one prompt that begin with one token have both log-probs in common, and E[r] is 1. A
    wrong value is the log-prob of a token that was not sampled there. Beside a broad mismatch E[r] shows
    nothing.
    """
    q, p, group = rows.q[at], rows.p[at], clusters(rows)[rows.owner[at]]
    both = other = 0
    for one in np.flatnonzero(np.bincount(group) > 1):
        here = group == one
        near = [np.abs(x[here][:, None] - x[here]) < 0.02 for x in (q, p)]
        upper = np.triu(near[0] | near[1], 1)
        agree = int(np.sum(upper & near[0] & near[1]))
        both, other = both + agree, other + int(upper.sum()) - agree
    if both + other >= 20:
        return both > 2 * other
    ratio = estimate(rows, 1 + np.expm1(np.minimum(rows.delta, 3.0)), at)
    return broad or abs(ratio.value - 1) <= max(0.15, 3 * ratio.error)


def _broken_octaves(rows: Rows) -> tuple[Ints, list[tuple[int, Estimate]]]:
    """Return the octave of each token's position, [T], and those where E[r] differs from 1, with E[r].

    Octave 0 is position 0; 1 is 1 and 2; 2 is 3 to 6; and so on.
    """
    octave = np.log2(rows.position + 1).astype(np.int64)
    off, many, broken = np.expm1(np.minimum(rows.delta, 3.0)), int(octave.max()) + 1, []
    for k in range(many):
        at = octave == k
        seen = estimate(rows, 1 + off, at)
        tame = not (rows.delta[at] > MASS).any()  # E[r] is also below 1 if a heavy tail was not sampled
        if seen.off(1, many) > (-2 if tame else 0) and seen.off(1, many) and abs(seen.value - 1) > VISIBLE:
            broken.append((k, seen))
    return octave, broken

"""Sequences whose columns disagree from some token on; and positions from which all do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.causes.values import WrongMask
from offpol_diag.diagnosis.estimates import against_chance, percent
from offpol_diag.diagnosis.rows import Rows, jittered

JUMPS = tuple(round(2 ** (k / 4)) for k in range(16, 51))
"""Positions tested for a jump: 16 to 5,793, four to an octave."""
TIMES, NATS, ROWS, MOST_ROWS = 3.0, 0.03, 8, 0.4
"""Factor of a jump, its least |Δ| there (nats), fewest sequences behind it, and share that have it."""


class LongContext(Cause):
    """Beyond some position engine and trainer compute different things.

    A position, in the response or with prompt_length in the context, from which on the mismatch jumps: 0.027
    before, 0.07 after. Short responses are clean.
    """

    kind = "model"
    id = "long_context"
    sentence = "beyond about token {position}, engine and trainer compute different things"
    evidence = "tokens {} differ by {:.2g} nats on average, tokens {} by {:.2g}, {:.1f} times as much"
    confirm = (
        "score one long response with the engine's prefill, with its decode and with the trainer: see which "
        "one stands alone"
    )
    fix = (
        "switch these off one by one: cascade attention, an fp8 cache, a window, RoPE scaling, position ids "
        "in bf16"
    )
    after = "without what lies beyond"
    apart = {"retokenization": "Each sequence breaks at a position of its own."}

    def look(self, rows: Rows) -> Found | None:
        """Find the position, in the response or in the whole context, at which |Δ| jumps most."""
        positions, before = {"": rows.position.astype(np.float64)}, rows.numbers("prompt_length")
        if np.isfinite(before).all():
            positions[" of prompt and response"] = rows.position + before[rows.owner]
        best, found = TIMES, None
        for (place, position), at in product(positions.items(), JUMPS):
            sides = (position >= at / 1.5) & (position < at), (position >= at) & (position < 1.5 * at)
            enough = np.minimum(*map(rows.sum, sides)) >= 3
            if enough.sum() < ROWS:
                continue
            low, high = (rows.sum(rows.gap * part)[enough] / rows.sum(part)[enough] for part in sides)
            times = float(high.mean() / max(low.mean(), 1e-9))
            several = np.mean(high > 2 * low + 0.01) >= MOST_ROWS  # not each at a token of its own
            if times > best and several and high.mean() > NATS:
                ranges = f"{at / 1.5:.0f} to {at}{place}", f"{at} to {1.5 * at:.0f}"
                evidence = self.evidence.format(ranges[0], low.mean(), ranges[1], high.mean(), times)
                words, beyond = {"position": f"{at}{place}"}, position >= at
                best, found = times, Found(self, evidence, rows, beyond, rows.keep(~beyond), words=words)
        return found

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows | None:
        """Move all tokens from the median length's half on."""
        at = 2 ** int(np.log2(np.median(rows.lengths) / 2))
        return jittered(rows, np.where(rows.index >= at, 1.0, 0.0), rng)


CHANCE, QUIET_CHANCE, CLOSELY = 0.9, 0.5, (8, 0.15, 0.8)
"""`against_chance` from which the columns of a block are unrelated, and where they agree closely outside it;
honest ones stay below 0.85. Closely: fewest tokens inside, |Δ| of most outside, and mean inside, nats."""
INSIDE, OUTSIDE, OFF, OFTEN, BEYOND = 3, 4, 0.3, 0.25, (6.0, 0.1)
"""Fewest tokens inside a block and outside it; |Δ| of a token of other text, nats, and least share of these
inside, so that it is not a few tokens; and factor and nats that |Δ| inside is beyond that of others."""
SHORTEST, BAD, FEWEST, SHARE = 12, 0.03, 3, 0.02
"""Fewest tokens and least mean |Δ| (nats) of a sequence that is looked at; fewest sequences that break, and
their least share."""
OTHER_TEXT, FADES, QUIET = 7.0, 1.8, 0.05
"""Least factor of mean |Δ| in other text than outside it (5.4 in a peaked policy of 4 bits, whose outliers
come in runs); least factor of a block's first third over its last, where one changed token is the reason; and
most mean |Δ| outside blocks of tokens that were not sampled, in that inside."""


class Retokenization(Cause):
    """The response was tokenized again, into other ids.

    Columns agree up to a token and not after it; breaks gather at turns, at the end of thinking and at
    numbers. Often 1% to 20% of the sequences, with r of 10⁶ after the break.
    """

    id = "retokenization"
    sentence = "{share} of the sequences break at a token: after it the columns belong to different text"
    evidence = "{:,} of {:,} sequences agree to {:.2g} nats a token outside and differ by {:.2g} inside"
    confirm = "decode token_ids of these sequences around the break, and compare with the engine's ids"
    fix = (
        "train on the engine's token ids (vLLM: return_token_ids; SGLang: output_ids), not on text that is "
        "tokenized again"
    )
    after = "without what follows the breaks"
    apart = {"off_by_one": "The whole response is shifted, from its first token on."}

    def look(self, rows: Rows) -> Found | None:
        """Find a block in each sequence: to its end, one that fades, or one that was not sampled."""
        usual, long = float(np.median(rows.mean_gap)), rows.lengths >= SHORTEST
        bad = np.flatnonzero((rows.mean_gap > BAD) & long)
        blocks = {i: block for i in bad.tolist() if (block := _block(rows, i, usual))}
        if len(blocks) < max(FEWEST, SHARE * rows.sequences):
            return None
        first, end = np.zeros((2, rows.sequences), np.int64)
        broken = np.array(list(blocks))
        first[broken], end[broken] = np.array(list(blocks.values())).T
        tokens = (rows.index >= first[rows.owner]) & (rows.index < end[rows.owner])
        rest, inside = rows.keep(~tokens), rows.gap[tokens].mean()
        if np.mean(first[broken] > 0) < 0.6 or inside < OTHER_TEXT * rest.gap.mean():
            return None
        thirds = [np.array_split(rows.gap[rows.starts[i] :][slice(*block)], 3) for i, block in blocks.items()]
        early, late = (np.mean([third[k].mean() for third in thirds]) for k in (0, -1))
        to_end = np.mean(end[broken] == rows.lengths[broken]) > 0.5
        # what follows one changed token fades; text that was not sampled does not
        cause = self if to_end or early > FADES * late else WrongMask()
        if cause is not self and rest.gap.mean() >= QUIET * inside:
            return None
        evidence = self.evidence.format(len(broken), long.sum(), rest.gap.mean(), inside)
        words = {"share": percent(len(broken) / int(long.sum()))}
        return Found(cause, evidence, rows, tokens, rest, approximate=True, words=words)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Let one row in eight score other text from a token of its own on."""
        p = rows.p.copy()
        for a, b in zip(rows.starts[:-1:8], rows.starts[1::8], strict=False):
            at = a + int((b - a) * rng.uniform(0.3, 0.6))
            p[at:b] = np.roll(p[at:b], 1) - rng.exponential(1.0, b - at)
        return replace(rows, p=p)


def _block(rows: Rows, i: int, usual: float) -> tuple[int, int] | None:
    """Find the tokens [first, end) of sequence i whose columns are unrelated, though they agree elsewhere.

    `usual` is the median of the mean |Δ| of sequences.
    """
    a, b = rows.starts[i], rows.starts[i + 1]
    gap = rows.gap[a:b]
    excess = np.cumsum(gap - max(0.15, 0.5 * gap.mean()))
    before = np.concatenate(([0.0], excess[:-1]))
    end = int((excess - np.minimum.accumulate(before)).argmax()) + 1
    begin = int(before[:end].argmin())
    inside, outside = gap[begin:end], np.concatenate((gap[:begin], gap[end:]))
    if len(outside) < OUTSIDE or (inside > OFF).sum() < max(INSIDE, OFTEN * len(inside)):
        return None
    if not inside.mean() > BEYOND[0] * max(outside.mean(), usual) + BEYOND[1]:
        return None
    many, most, mean = CLOSELY
    quiet = len(inside) >= many and np.quantile(outside, 0.95) < most and inside.mean() > mean
    if not against_chance(rows, a + begin, a + end) > (QUIET_CHANCE if quiet else CHANCE):
        return None
    to_end = len(gap) - end < 6 or against_chance(rows, a + begin, b) > CHANCE
    return begin, len(gap) if to_end else end

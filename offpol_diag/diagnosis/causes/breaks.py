"""Sequences whose columns disagree from some token on, or in a block; and positions from which all do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.causes.constants import IN_BLOCKS, WRONG_MASK
from offpol_diag.diagnosis.rows import (
    CAP,
    Floats,
    Ints,
    Rows,
    against_chance,
    bound,
    jittered,
    numbers,
    percent,
)

CHANCE, QUIET_CHANCE = 0.9, 0.5
"""`against_chance` from which the columns of a run of tokens are unrelated, and where they agree closely
outside it; honest ones stay below 0.85."""
SHORTEST, BAD, FEWEST, SHARE = 12, 0.03, 3, 0.02
"""Fewest tokens and least mean |Δ| (nats) of a sequence that is looked at; fewest sequences that break, and
their least share."""
OTHER_TEXT = 7.0
"""Least factor of mean |Δ| in other text than outside it: 5.4 in a peaked policy of 4 bits, whose outliers
come in runs."""
JUMPS = tuple(round(2 ** (k / 4)) for k in range(16, 51))
"""Positions tested for a jump: 16 to 5,793, four to an octave."""
TIMES, NATS, MOST_ROWS, CLEAN = 3.0, 0.03, 0.6, 0.5
"""Factor of a jump, its least |Δ| behind it (nats), share of the sequences that have it, and most that
sequences may differ in front of it, in what they do behind it."""


class LongContext(Cause):
    """Beyond some position engine and trainer compute different things.

    A position, in the response or with prompt_length in the context, from which on the mismatch jumps: 0.027
    before, 0.07 after. Short responses are clean.
    """

    kind = "model"
    id = "long_context"
    sentence = "beyond about token {where} engine and trainer compute different things"
    violates = "kernels and weights differ at every position alike"
    confirm = (
        "score one long response with the engine's prefill (prompt_logprobs), with its decode, and with the "
        "trainer at batch size 1; the one that stands alone beyond token {where} is off"
    )
    fix = (
        "switch off what only acts on long contexts: vLLM --disable-cascade-attn, "
        "--no-enable-chunked-prefill, a KV cache in fp8, a sliding window, rope scaling that differs, "
        "position ids in bf16 (exact up to 256)"
    )
    after = "without what lies beyond"
    ruled_out = "a position from which on the columns disagree"
    apart = {
        "retokenization": "There each sequence breaks at a place of its own.",
        "model_differs": "There all positions are off, some more.",
        "stale": "Partial rollouts switch weights at a place of their own: weight_versions tell.",
    }
    blanks = {"where": "N"}

    def look(self, rows: Rows) -> Found | None:
        """Try positions in the response and, where the dump has prompt_length, in prompt and response."""
        found = [one for position, place in _positions(rows) if (one := self._jump(rows, position, place))]
        return max(found, key=lambda one: one[0])[1] if found else None

    def _jump(self, rows: Rows, position: Ints, place: str) -> tuple[float, Found] | None:
        """Return by which factor the mismatch jumps most, and the finding; None if it does not jump."""
        best: tuple[float, int, float, float] | None = None
        for at in JUMPS:
            before = (position >= at / 1.5) & (position < at)
            after = (position >= at) & (position < 1.5 * at)
            enough = (rows.sum(before) >= 3) & (rows.sum(after) >= 3)
            if enough.sum() < 6:
                continue
            low, high = (
                rows.sum(rows.size * part)[enough] / rows.sum(part)[enough] for part in (before, after)
            )
            gain = high - low
            errors = float(gain.mean() / max(gain.std(ddof=1) / np.sqrt(len(gain)), 1e-12))
            times = float(high.mean() / max(low.mean(), 1e-9))
            if (
                np.mean(high > 2 * low + 0.01) >= MOST_ROWS  # no sequences that break, each at its own token
                and times > TIMES
                and errors > bound(len(gain), 2 * len(JUMPS))
                and high.mean() > NATS
                and (best is None or times > best[0])
            ):
                best = times, at, float(low.mean()), float(high.mean())
        if best is None:
            return None
        times, at, below, above = best
        evidence = (
            f"tokens {at / 1.5:.0f} to {at}{place} differ by {below:.2g} nats on average, tokens {at} to "
            f"{1.5 * at:.0f} by {above:.2g}, {times:.1f} times as much"
        )
        return times, self.of_tokens(evidence, rows, position >= at, words={"where": f"{at}{place}"})

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows | None:
        """Move all tokens from the median length's half on."""
        at = 2 ** int(np.log2(np.median(rows.lengths) / 2))
        return replace(rows, p=jittered(rows, np.where(rows.index >= at, 1.0, 0.0), rng))


def _positions(rows: Rows) -> Iterator[tuple[Ints, str]]:
    """Yield the position of each token, [T], in the response and in the whole context, with its name."""
    yield rows.position, ""
    lengths = numbers(rows.column("prompt_length"))
    if np.isfinite(lengths).all():
        yield rows.position + lengths.astype(np.int64)[rows.owner], " of prompt and response"


class Retokenization(Cause):
    """The response was tokenized again, and the ids are others.

    Columns agree up to a token and not behind it; breaks gather at turns, at the end of thinking and at
    numbers. Often 1% to 20% of the sequences, with r of 10⁶ behind the break.
    """

    id = "retokenization"
    sentence = (
        "{share} of the sequences break at some token: from there on the columns belong to different text"
    )
    violates = "columns that agree token by token do not stop to within a sequence"
    confirm = (
        "decode token_ids of the sequences named here around the break; compare with the ids that the engine "
        "returned"
    )
    fix = (
        "train on the engine's token ids (vLLM: return_token_ids / prompt_token_ids; SGLang: output_ids) "
        "instead of tokenizing the text again"
    )
    after = "without what follows the breaks"
    ruled_out = "sequences that break at a token"
    apart = {
        "off_by_one": "There the whole response is shifted, from its first token on.",
        "wrong_context": "There the whole response differs, most at its beginning.",
        "long_context": "There the break is at the same position in all sequences.",
    }
    blanks = {"share": "some"}

    def look(self, rows: Rows) -> Found | None:
        usual, long = float(np.median(rows.level)), rows.lengths >= SHORTEST
        found = {i: _block(rows, i, usual) for i in np.flatnonzero((rows.level > BAD) & long).tolist()}
        blocks = {i: block for i, block in found.items() if block}
        many, longer = len(blocks), max(int(long.sum()), 1)
        if many < max(FEWEST, SHARE * rows.sequences):
            return None
        own, (begins, ends) = np.array(list(blocks)), np.array(list(blocks.values())).T
        if (begins > 0).sum() < 0.6 * many:
            return None
        tokens, broken = np.zeros(rows.tokens, bool), rows.of(own)
        places = [
            slice(*each) for each in zip(rows.starts[own] + begins, rows.starts[own] + ends, strict=True)
        ]
        for place in places:
            tokens[place] = True
        where = float(np.median(begins))
        reach = rows.lengths > where * 1.25 + 6
        same = (
            reach.sum() >= 3
            and np.mean(broken[reach]) > 0.3
            and np.mean(np.abs(begins - where) <= 0.15 * where + 3) > 0.7
        )
        in_place, to_end = rows.keep(~tokens), np.mean(ends >= rows.lengths[own] - 1)
        evidence = (
            f"{many:,} of {int(long.sum()):,} sequences agree to {in_place.size.mean():.2g} nats a token "
            f"outside and differ by {rows.size[tokens].mean():.2g} inside"
        )
        words, cause = {"where": f"{where:.0f}", "share": percent(many / longer)}, Cause()
        if same and to_end > 0.6:
            lengths, cause = numbers(rows.column("prompt_length"))[own], LongContext()
            whole = begins + lengths  # positions in prompt and response, where these are known
            if np.isfinite(lengths).all() and np.std(whole) <= np.std(begins) + 0.5:
                words |= {"where": f"{np.median(whole):.0f} of prompt and response"}
        elif to_end > 0.5 or _fading([np.abs(rows.delta[place]) for place in places]):
            if rows.size[tokens].mean() < OTHER_TEXT * in_place.size.mean():
                return None
            cause = self
        elif _before_as_after(rows, own, begins, ends) and np.mean(tokens[rows.size > 1.0]) > 0.2:
            cause = WRONG_MASK
            words |= {"place": IN_BLOCKS, "column": "one", "value": ""}
        else:
            return None
        return Found(cause, evidence, rows, tokens, broken, in_place, words=words, approximate=True)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Let one row in eight score other text from a token of its own on."""
        p = rows.p.copy()
        for a, b in zip(rows.starts[:-1:8], rows.starts[1::8], strict=False):
            at = a + int((b - a) * rng.uniform(0.3, 0.6))
            p[at:b] = np.roll(p[at:b], 1) - rng.exponential(1.0, b - at)
        return replace(rows, p=p)


def _block(rows: Rows, i: int, usual: float) -> tuple[int, int] | None:
    """Find the tokens [first, end) of a sequence whose columns are unrelated, though they agree elsewhere.

    Args:
        rows: the tokens.
        i: index of the sequence.
        usual: median of the mean |Δ| of sequences.
    """
    a, b = rows.starts[i], rows.starts[i + 1]
    size = rows.size[a:b]
    excess = np.cumsum(size - max(0.15, 0.5 * size.mean()))
    before = np.concatenate(([0.0], excess[:-1]))
    end = int((excess - np.minimum.accumulate(before)).argmax())
    begin = int(before[: end + 1].argmin())
    inside, outside = size[begin : end + 1], np.concatenate((size[:begin], size[end + 1 :]))
    if (inside > 0.3).sum() < max(3, 0.25 * len(inside)):
        return None  # a few tokens that are far off
    if len(outside) < 4 or (len(inside) < 5 and not (len(inside) > 2 and inside.mean() > 1.2)):
        return None
    to_end = len(size) - end - 1 < 6
    quiet = (
        len(inside) >= 8
        and inside.mean() > max(0.8, 20 * outside.mean(), 10 * usual)
        and np.quantile(outside, 0.95) < 0.15
    )
    least = QUIET_CHANCE if quiet and to_end else CHANCE
    if (
        not inside.mean() > max(6 * outside.mean() + 0.1, 6 * usual)
        or not against_chance(rows, a + begin, a + end + 1) > least
    ):
        return None
    on = to_end or against_chance(rows, a + begin, b) > CHANCE
    return begin, len(size) if on else end + 1


def _before_as_after(rows: Rows, own: Ints, begins: Ints, ends: Ints) -> bool:
    """Return whether sequences agree before their blocks as they do after them, far better than inside.

    Where weights were updated during a response, its first part differs throughout.
    """
    first, end = np.zeros(rows.sequences, np.int64), np.zeros(rows.sequences, np.int64)
    first[own], end[own] = begins, ends
    there = rows.of(own)[rows.owner]
    before, after = (there & part for part in (rows.index < first[rows.owner], rows.index >= end[rows.owner]))
    inside = float(rows.size[there & ~before & ~after].mean())
    if before.sum() < 8 or after.sum() < 8:
        return bool(rows.size[there & (before | after)].mean() < 0.05 * inside)
    return bool(rows.size[before].mean() < min(0.15 * inside, 3 * rows.size[after].mean() + 0.01))


def _fading(blocks: Sequence[Floats]) -> bool:
    """Return whether |Δ| is largest at the start of blocks and then fades, as after one changed token.

    In blocks that the engine never sampled, all tokens differ alike.
    """
    parts = [(off, max(1, len(off) // 3)) for off in blocks if len(off) >= 3]
    first = [off.argmax() < 2 for off, _ in parts]
    begin = [np.minimum(off[:third], 4 * CAP).mean() for off, third in parts]
    end = [np.minimum(off[-third:], 4 * CAP).mean() for off, third in parts]
    return not parts or bool(np.mean(first) > 0.6 and np.mean(begin) > 1.8 * np.mean(end))

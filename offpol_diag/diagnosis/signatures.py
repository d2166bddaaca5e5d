"""Signatures: detectors of faults in the log-probs.

A signature takes `Rows` and returns a `Found` or None: the tokens and sequences affected, the evidence, and
the rows with the fault repaired. The next signature works on the repaired rows, so that several simultaneous
faults are all found. Statistics cut |Δ| at `CAP` nats a token, so that no single outlier decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from offpol_diag.diagnosis.rows import CAP, Flags, Floats, Ints, Rows, bound, clusters, estimate, numbers

IMPOSSIBLE, LOWEST = -90.0, -1000.0
"""Log-prob below which no token is ever sampled, nats, and below which none is computed."""
CHANCE = 0.9
"""`against_chance` from which the columns of a run of tokens are unrelated; honest ones stay below 0.85."""
UNSURE = -0.05
"""Log-prob below which a policy is not certain of a token, nats."""
FAR = 0.7
"""|Δ| from which two log-probs of one token count as different, nats: a factor of 2."""


@dataclass(frozen=True)
class Found:
    """The result of a signature that found its fault.

    Attributes:
        cause: id of the cause.
        statistic: the evidence, in words.
        rows: the rows in which it was found.
        tokens: flags of the affected tokens, [T].
        sequences: flags of the affected sequences, [S].
        repaired: the rows with the fault undone, or without the affected tokens; None if no repair is known.
        exact: whether the evidence is a count and needs no interval.
        approximate: whether the repair is approximate.
        fields: field → text to fill into the cause's sentences.
        where: the group of sequences that has the fault (`host = b`), or empty.
    """

    cause: str
    statistic: str
    rows: Rows
    tokens: Flags
    sequences: Flags
    repaired: Rows | None = None
    exact: bool = False
    approximate: bool = False
    fields: dict[str, str] = field(default_factory=dict)
    where: str = ""

    @classmethod
    def of_sequences(cls, cause: str, statistic: str, rows: Rows, sequences: Flags, **rest: Any) -> Found:
        """Return a fault of whole sequences, [S]."""
        return cls(cause, statistic, rows, sequences[rows.owner], sequences, **rest)

    @classmethod
    def of_all(cls, cause: str, statistic: str, rows: Rows, **rest: Any) -> Found:
        """Return a fault of all tokens."""
        return cls.of_sequences(cause, statistic, rows, np.ones(rows.sequences, bool), **rest)

    @classmethod
    def of_tokens(cls, cause: str, statistic: str, rows: Rows, tokens: Flags, **rest: Any) -> Found:
        """Return a fault of single tokens [T], which the repair leaves out."""
        return cls(
            cause, statistic, rows, tokens, rows.sum(tokens) > 0, **{"repaired": rows.keep(~tokens)} | rest
        )


def percent(share: float) -> str:
    """Format a share: 16%, 0.42%."""
    return f"{100 * share:.2g}%" if share < 0.995 else f"{100 * share:.3g}%"


# Sentinels: one constant in place of log-probs.


def sentinels(rows: Rows) -> Found | None:
    """Find a constant that stands for a log-prob: 0.0, −9999, a clamp, log(1/V), or a whole column."""
    for name, x, other in (("rollout", rows.q, rows.p), ("train", rows.p, rows.q)):
        whole = _whole_column(rows, name, x, other)
        if whole is not None:
            return whole
        value = _constant(x, other)
        if value is None or _same_context(rows, x == value, value):
            continue
        same = x == value
        if _written(x, value) or (np.mean(rows.sum(same) > 0) >= 0.3 and _at_many_ids(rows, same)):
            first, length = _runs(rows, same)
            run = np.repeat(np.arange(len(first)), length)
            sure = np.bincount(run[np.abs(other[same] - value) > 1e-3], minlength=len(first)) > 0
            tokens = np.zeros_like(same)
            tokens[same] = sure[run]  # a run of the constant needs one token that is off
            return _placed(rows, name, value, tokens)
    return _padding(rows)


PADDED = 0.3
"""Smallest share of sequences that end in padding."""


def _padding(rows: Rows) -> Found | None:
    """Find sequences of one length that end in runs of one constant in both columns.

    Where a policy repeats itself until the longest length, it becomes certain to the last bit by degrees, and
    each response repeats tokens of its own.
    """
    full = rows.lengths == rows.lengths.max()
    last = rows.starts[1:] - 1
    constant = (rows.q == rows.q[last][rows.owner]) & (rows.p == rows.p[last][rows.owner])
    other = np.where(constant, -1, rows.index)
    run = rows.lengths - 1 - np.maximum.reduceat(other, rows.starts[:-1])
    ends = full & (run > 1) & (run < rows.lengths)
    if full.mean() < 0.9 or ends.sum() < max(8, PADDED * rows.sequences):
        return None
    q, p, before = rows.q[last[ends]], rows.p[last[ends]], rows.q[last[ends] - run[ends]]
    one = all(x.min() == x.max() for x in (q, p)) and len(np.unique(run[ends])) > 3
    if not one or np.mean(before < -1e-4) < 0.3:
        return None
    ends = (rows.q[last] == q[0]) & (rows.p[last] == p[0])  # of one token, too
    tokens = constant & (rows.from_end < run[rows.owner]) & ends[rows.owner]
    if rows.ids is not None and len(np.unique(rows.ids[tokens])) > 1:
        return None
    statistic = (
        f"{int(tokens.sum()):,} tokens at the end of {int(ends.sum()):,} sequences hold {_text(q[0])} "
        f"in the rollout column and {_text(p[0])} in the train column, exactly"
    )
    fields = {"value": _text(q[0]), "column": "rollout", "place": "padding at the end"}
    return Found.of_tokens("wrong_mask", statistic, rows, tokens, fields=fields, exact=True)


def _whole_column(rows: Rows, column: str, x: Floats, other: Floats) -> Found | None:
    """Find a column of one value, or of one value in each sequence where the other column varies."""
    begins = rows.starts[:-1]
    tokens, fields = np.ones(rows.tokens, bool), {"column": column}
    if x.min() < x.max():
        varies = np.maximum.reduceat(other, begins) - np.minimum.reduceat(other, begins) > 1e-3
        same = np.maximum.reduceat(x, begins) == np.minimum.reduceat(x, begins)
        varied = varies & (rows.lengths >= 4)
        if varied.sum() < 8 or not same[varied].mean() > 0.95:
            return None
        off = float(np.median(np.abs(x[begins] - rows.mean(other))))
        statistic = (
            f"{int(same[varied].sum()):,} of {int(varied.sum()):,} sequences hold one value throughout in "
            f"the {column} column, {off:.2g} nats from the mean of the other column (median)"
        )
        return Found.of_tokens("copied_mean", statistic, rows, tokens, fields=fields, exact=True)
    if np.abs(x - other).max() <= 1e-3:
        return None  # the policies agree: both are as good as certain of every token
    text = _text(float(x[0]))
    fields |= {
        "value": text,
        "sentence": f"the {column} column holds nothing but the constant {text}, in place of log-probs",
        "confirm": "look at one sequence of the {column} column: no two log-probs of a response are equal",
        "fix": "write the log-prob of each sampled token, as the {side} computed it",
    }
    statistic = f"all {rows.tokens:,} tokens hold exactly {text} in the {column} column"
    return Found.of_tokens("sentinel", statistic, rows, tokens, fields=fields, exact=True)


def _same_context(rows: Rows, tokens: Flags, value: float) -> bool:
    """Return whether a value may be one token repeated in one context: same position, same id."""
    if value == 0 or np.bincount(rows.index[tokens]).max() < 0.8 * tokens.sum():
        return False
    if rows.ids is not None:
        return len(np.unique(rows.ids[tokens])) == 1
    return bool(tokens.sum() < 0.9 * rows.sequences)


def _constant(x: Floats, other: Floats) -> float | None:
    """Find a constant at several tokens whose other log-prob varies and is far off, or None.

    Log-probs also repeat honestly if contexts do (the first tokens after one prompt), but no such value is
    much more frequent than the next one. A sentinel is, or it is too low to be a log-prob.
    """
    if _zeros(x, other):
        return 0.0
    values, counts = np.unique(x[x < -1e-2], return_counts=True)
    often = np.argsort(-counts)[:12]
    alone: list[tuple[float, int, float]] = []  # value, count, median |Δ|: if the other column varies
    for at in often[counts[often] >= 2]:
        beside = other[x == values[at]]
        if len(np.unique(beside)) > 0.5 * counts[at] or _impossible(float(values[at])):
            alone.append((float(values[at]), int(counts[at]), float(np.median(np.abs(beside - values[at])))))
    size = np.abs(x - other)
    for rank, (value, many, off) in enumerate(alone):
        others = [count for one, count, _ in alone[rank + 1 :] if not _impossible(one)]
        frequent = many >= 6 and many > 2.5 * max(others, default=1)
        if _impossible(value) or frequent:
            rest = size[x != value]  # the constant may be most of the column
            if off > max(0.3, 10 * float(np.median(rest)) if len(rest) else 0.0):
                return value
    return None


def _zeros(x: Floats, other: Floats) -> bool:
    """Return whether 0.0 is written at tokens that are not certain.

    Where a policy is certain to the last bit, another one may not be. Then it is no more certain of tokens
    whose log-prob is just below 0, so that exact zeros are not apart.
    """
    zero = (x == 0) & (other < -1e-3)
    far = zero & (other < -FAR)
    if zero.sum() < 3 or not far.any() or far.sum() <= 0.02 * zero.sum():
        return False
    near = x < 0
    for least in (-1e-2, -1e-3, -1e-4, -1e-5):
        closer = (x < 0) & (x > least)
        near = closer if closer.sum() >= 100 or least == -1e-2 else near
    rate = (float(np.sum(other[near] < -FAR)) + 1) / (float(near.sum()) + 30)
    if not far.sum() > 3 * rate * np.sum(x == 0) or _truncated(x, other):
        return False
    return _ordinary(other[x == 0], other[x < 0])


def _truncated(x: Floats, other: Floats) -> bool:
    """Return whether zeros are of tokens that truncated sampling left alone.

    Then the other policy gives a lower log-prob to all tokens, and to these by no more than to the rest.
    """
    difference, zero = other - x, x == 0
    rest = difference[~zero]
    return len(rest) >= 100 and bool(
        np.mean(rest < 0) > 0.98 and np.quantile(difference[zero], 0.05) > np.quantile(rest, 0.01)
    )


def _ordinary(other: Floats, usual: Floats) -> bool:
    """Return whether tokens are as improbable under the other policy as tokens of any kind.

    Of those of which it is not certain, 21 to 55% are below −1 in models of six architectures. Where one
    policy is certain to the last bit, another model may not be, but is seldom that far off.
    """
    theirs, all_ = (x[x < UNSURE] for x in (other, usual))
    if not len(theirs) or len(all_) < 30:
        return True
    return bool(np.mean(theirs < -1) > 0.5 * np.mean(all_ < -1))


def _impossible(value: float) -> bool:
    """Return whether a value is no log-prob of a sampled token, but a number such as −100 or −9999.

    Broken weights give a token −100.37 too.
    """
    return value < IMPOSSIBLE and (value < LOWEST or abs(value - round(value)) < 1e-3)


def _written(x: Floats, value: float) -> bool:
    """Return whether a value looks written: a bound of its column, a round number or −log of an integer.

    Any other value may repeat where a policy repeats itself word by word.
    """
    small = x[(x < -1e-2) & (x >= IMPOSSIBLE)]
    if _impossible(value) or value == 0 or value <= small.min() or value >= small.max():
        return True
    whole = np.exp(-value)
    return abs(value * 1000 - round(value * 1000)) < 1e-3 or abs(whole - round(whole)) < 1e-6 * whole


def _at_many_ids(rows: Rows, tokens: Flags) -> bool:
    """Return whether a value stands at several token ids: weights without an input give each id one value."""
    return rows.ids is not None and len(np.unique(rows.ids[tokens])) > 2


def _text(value: float) -> str:
    return "0.0" if value == 0 else f"{value:.7g}"


def _runs(rows: Rows, tokens: Flags) -> tuple[Ints, Ints]:
    """Return the first token and the length of each run of consecutive flagged tokens within a sequence."""
    start = tokens.copy()
    start[1:] &= ~(tokens[:-1] & (rows.index[1:] > 0))
    first = np.flatnonzero(start)
    which = np.cumsum(start) - 1
    return first, np.bincount(which[tokens], minlength=len(first))


def _placed(rows: Rows, column: str, value: float, tokens: Flags) -> Found:
    """Classify constants by position: single tokens, an edge, or blocks that the engine did not sample."""
    first, length = _runs(rows, tokens)
    many, hit = int(tokens.sum()), rows.sum(tokens) > 0
    density = many / max(int(rows.lengths[hit].sum()), 1)
    blocks = len(first) >= 2 and float(length.mean()) > max(1.6, 1.5 / max(1 - density, 0.05))
    last, begins = (np.mean(at[tokens] == 0) > 0.8 for at in (rows.from_end, rows.index))
    if blocks and column == "rollout":
        to_end = (rows.from_end[first + length - 1] == 0).mean() > 0.9
        cause = "wrong_mask"
        place = "padding at the end" if to_end else "blocks inside the response (tool output?)"
    elif last or begins:
        cause, place = "boundary", f"the {'last' if last else 'first'} token of the response"
    else:
        cause, place = "sentinel", "blocks" if blocks else "single tokens"
    text = _text(value)
    statistic = (
        f"{many:,} tokens of {int(hit.sum()):,} sequences hold exactly {text} in the {column} column, in "
        f"runs of {float(length.mean()):.2g} on average"
    )
    fields = {"value": text, "column": column, "place": place}
    return Found.of_tokens(cause, statistic, rows, tokens, fields=fields, exact=True)


# Alignment: columns shifted against each other, or permuted between rows.

LAGS = tuple(lag for k in range(1, 9) for lag in (k, -k))
OVERLAP, SHIFTED = 8, 0.03
"""Fewest tokens that both columns of a sequence have at a shift, and smallest share of sequences to have it:
a few tokens agree at one of so many lags by chance."""


def _pairs(rows: Rows, lag: int) -> tuple[Floats, Floats, Ints]:
    """Return p_t, q_{t+lag} and the index of the sequence of all pairs of tokens of one sequence."""
    k = abs(lag)
    p, q = (rows.p[:-k], rows.q[k:]) if lag > 0 else (rows.p[k:], rows.q[:-k])
    same = rows.owner[k:] == rows.owner[:-k]
    return p[same], q[same], rows.owner[k:][same]


def _at_lag(rows: Rows, lag: int) -> Floats:
    """Return the mean of min(|p_t − q_{t+lag}|, CAP) of each sequence, [S]; infinite without a pair."""
    p, q, owner = _pairs(rows, lag)
    many = np.bincount(owner, minlength=rows.sequences)
    total = np.bincount(owner, np.minimum(np.abs(p - q), CAP), minlength=rows.sequences)
    return np.where(many > 0, total / many, np.inf)


def correlation(x: Floats, y: Floats) -> float:
    """Return the Pearson correlation of log-probs cut at −20; NaN for fewer than 3 values or a constant."""
    if len(x) < 3:
        return float("nan")
    x, y = np.maximum(x, -20), np.maximum(y, -20)
    sx, sy = x.std(), y.std()
    return float(np.mean((x - x.mean()) * (y - y.mean())) / (sx * sy)) if sx > 0 and sy > 0 else float("nan")


def shifts(rows: Rows) -> Found | None:
    """Find sequences whose columns agree if one is shifted by a few tokens, and not in place."""
    bad = rows.level > 0.02
    if bad.sum() < 2:
        return None
    among = rows.only(bad)
    long = {lag: rows.lengths - abs(lag) >= OVERLAP for lag in LAGS}
    every = np.stack([_at_lag(among, lag) for lag in LAGS])
    at = np.where(np.stack([long[lag][bad] for lag in LAGS]), every, np.inf)
    best = at.argmin(axis=0)
    least = at.min(axis=0)
    gain = (among.level - least) * among.lengths
    moved = (least < 0.35 * among.level) & (gain > 2.0)
    if moved.sum() < 2:
        return None
    votes = np.bincount(best[moved], minlength=len(LAGS))
    if votes.max() < 0.5 * votes.sum():
        return None  # short sequences that fit at one of so many lags by chance
    lag = LAGS[int(votes.argmax())]
    moved &= best == LAGS.index(lag)
    if _periodic(among.only(moved), lag):
        return None  # text that repeats itself fits there too
    telling = max(int(long[lag][bad].sum()), 1)
    share = moved.sum() / telling
    if moved.sum() < max(2, SHIFTED * long[lag].sum()) or not _whole(among, moved, lag):
        return None
    least = every[LAGS.index(lag)]  # short sequences may have what longer ones show
    moved |= (
        (least < 0.35 * among.level) & ((among.level - least) * among.lengths > 2.0) & (among.lengths >= 6)
    )
    if share > 0.3:  # then it is the rule: also where a large mismatch hides it
        moved |= least < 0.9 * among.level
    sequences = rows.of(np.flatnonzero(bad)[moved])
    if sequences.mean() > 0.8:
        sequences[:] = True  # the rest is too short, or too certain, to show it
    return _shifted(rows, sequences, lag, share)


def turns(rows: Rows) -> Found | None:
    """Find a shift that begins behind masked tokens, as after a tool's answer: in each run by itself."""
    new = np.ones(rows.tokens, bool)
    new[1:] = (np.diff(rows.position) != 1) | (rows.index[1:] == 0)
    begins = np.flatnonzero(new)
    owner = rows.owner[begins]
    scalars = {name: [column[i] for i in owner] for name, column in rows.scalars.items()}
    runs = replace(rows, starts=np.append(begins, rows.tokens), scalars=scalars)
    later = np.append(False, owner[1:] == owner[:-1])
    if later.sum() < 8:
        return None
    found = shifts(runs.only(later))
    if found is None or found.sequences.mean() < 0.3:
        return None
    run = np.zeros(len(begins), bool)
    run[np.flatnonzero(later)[found.sequences]] = True
    tokens = run[np.cumsum(new) - 1]
    statistic = f"behind masked tokens {found.statistic.replace('sequences', 'runs of tokens')}"
    fields = found.fields | {"after": "without what lies behind masked tokens"}
    return Found.of_tokens("off_by_one", statistic, rows, tokens, fields=fields, exact=True)


def _periodic(rows: Rows, lag: int) -> bool:
    """Return whether most tokens have the id of the token at this distance."""
    if rows.ids is None:
        return False
    k = abs(lag)
    same = rows.owner[k:] == rows.owner[:-k]
    return bool(np.mean((rows.ids[k:] == rows.ids[:-k])[same]) > 0.5)


def _whole(rows: Rows, moved: Flags, lag: int) -> bool:
    """Return whether the shift starts at the first tokens of most sequences."""
    k = abs(lag)
    head = rows.only(moved)
    begin = head.keep(head.index < 4 + k)
    here, there = begin.keep(begin.index < 4).level, _at_lag(begin, lag)
    in_place, shifted = there > 3 * here + 0.1, here > 3 * there + 0.1
    if in_place.sum() > 0.3 * max(int((in_place | shifted).sum()), 1):
        return False  # sequences that agree in place until a token is left out
    head = head.keep(head.index < np.maximum(6, head.lengths[head.owner] // 3) + k)
    return float(np.mean(_at_lag(head, lag) < 0.6 * np.maximum(head.level, 1e-9))) > 0.5


def _shifted(rows: Rows, sequences: Flags, lag: int, share: float) -> Found | None:
    k, tokens, there = abs(lag), sequences[rows.owner], rows.only(sequences)
    apart, placed = (
        round(correlation(p, q), 2) + 0.0 for p, q in (_pairs(there, lag)[:2], (there.p, there.q))
    )
    if not apart > placed:
        return None  # also where a column is constant, and correlates with nothing
    moved = rows.q.copy()
    first, last = edges(rows)  # masked tokens lie between runs: what would come from there is not in the dump
    takes = tokens & ((last if lag > 0 else first) >= k)
    moved[takes] = rows.q[np.flatnonzero(takes) + lag]
    mended = rows.with_q(moved).keep(~tokens | takes)
    if share > 0.3 and (mended.level < 0.5).any():  # rows that still differ likely have the fault too
        mended = mended.only(mended.level < 0.5)
    statistic = (
        f"the columns correlate {apart:.2f} at {k} token{'s' if k > 1 else ''} apart and {placed:.2f} in "
        f"place, in {int(sequences.sum()):,} of {rows.sequences:,} sequences"
    )
    old, rollout = (f":-{k}", f"{k}:") if lag > 0 else (f"{k}:", f":-{k}")
    fields = {
        "lag": str(k),
        "tokens": "one token" if k == 1 else f"{k} tokens",
        "slice": f"old_log_probs[:, {old}] belongs to rollout_log_probs[:, {rollout}]",
    }
    return Found("off_by_one", statistic, rows, tokens, sequences, mended, fields=fields, exact=True)


HEAD = 32
"""Number of first tokens by which sequences are compared with each other."""
PROBED = 128
"""Number of sequences that are matched against all others first, before all are."""


def _heads(rows: Rows, x: Floats) -> Floats:
    """Return the first `HEAD` values of each sequence, [S, HEAD]; NaN beyond its end."""
    found = np.full((rows.sequences, HEAD), np.nan)
    at = rows.index < HEAD
    found[rows.owner[at], rows.index[at]] = np.maximum(x[at], -20)
    return found


def permutations(rows: Rows) -> Found | None:
    """Find sequences whose train log-probs are those of another sequence's rollout."""
    inner = (rows.from_end > 0) & (rows.index > 0)  # a fault of the last token alone is none of this
    level = rows.sum(np.where(inner, rows.size, 0.0)) / np.maximum(rows.lengths - 2, 1)
    many = rows.mean(inner & (rows.size > 0.1)) > 0.12  # not a few tokens that are far off
    bad = np.flatnonzero((level > 0.1) & many & (rows.lengths >= 6))
    if len(bad) < 2:
        return None
    q, p = _heads(rows, np.where(inner, rows.q, np.nan)), _heads(rows, np.where(inner, rows.p, np.nan))
    own = np.nanmean(np.minimum(np.abs(p[bad] - q[bad]), CAP), axis=1)
    probe = np.arange(0, len(bad), max(1, len(bad) // PROBED))  # every row is compared only where these match
    for some in (probe, np.arange(len(bad))):
        mate, least = _nearest(p[bad[some]], q, bad[some])
        matched = (least < 0.25 * own[some]) & (own[some] > 0.1)
        if matched.sum() < 2 or matched.mean() < 0.3:
            return _unmatched(rows, bad)
    who, mates = bad[matched], mate[matched]
    statistic = (
        f"{len(who):,} of {rows.sequences:,} sequences agree with another sequence to "
        f"{least[matched].mean():.2g} nats a token and with their own to {own[matched].mean():.2g}"
    )
    names, pairs, within = rows.column("sequence_id"), list(zip(who, mates, strict=True)), "the dump"
    for name, words in (("step", "its step"), ("group_id", "its prompt")):
        column = rows.column(name)
        if any(x is not None for x in column) and all(column[i] == column[j] for i, j in pairs):
            within = words
    repaired = _matched(rows, who, mates, np.setdiff1d(bad, who))
    fields = {"within": within, "examples": ", ".join(f"{names[i]} → {names[j]}" for i, j in pairs[:3])}
    return Found.of_sequences(
        "row_permutation", statistic, rows, rows.of(who), repaired=repaired, fields=fields, exact=True
    )


UNRELATED = 0.6
"""Correlation of the columns of a response below which they belong to different responses."""


def _unmatched(rows: Rows, bad: Ints) -> Found | None:
    """Find permuted rows whose partners are not in the sample: equal distributions, unrelated columns.

    After another prompt or a changed token, in contrast, a response is less probable under the trainer.
    """
    among = rows.only(rows.of(bad[:: max(1, len(bad) // PROBED)]))
    chance = [against_chance(among, a, b) for a, b in zip(among.starts[:-1], among.starts[1:], strict=True)]
    apart = np.array(chance) > 0.8
    begun = among.sum(np.where(among.index < 4, among.size, 0.0)) / np.minimum(among.lengths, 4)
    apart &= begun > 0.1
    if apart.sum() < 8 or len(bad) < 0.02 * rows.sequences or apart.mean() < 0.5:
        return None
    there = among.only(apart)
    head = there.keep(there.index < 8)
    gap = float(np.mean(np.clip(head.delta, -CAP, CAP)))
    ends = zip(there.starts[:-1], there.starts[1:], strict=True)
    together = float(np.median([correlation(there.p[a:b], there.q[a:b]) for a, b in ends]))
    if abs(gap) > 0.15 * float(head.size.mean()) or together > UNRELATED:
        return None
    sequences = rows.of(bad)
    statistic = (
        f"{len(bad):,} of {rows.sequences:,} sequences differ by more than 0.1 nats a token; in "
        f"{int(apart.sum())} of {among.sequences} of these that were compared the columns differ by "
        f"{there.size.mean():.2g} nats a token, correlate {together:.2f} and have the same mean "
        f"to {abs(gap):.2g} nats: other rows' values; their own are not in the sample"
    )
    fields = {
        "within": "the dump",
        "examples": "compare the first tokens of all rows of a step",
        "after": "without these sequences",
    }
    return Found.of_sequences(
        "row_permutation",
        statistic,
        rows,
        sequences,
        repaired=rows.only(~sequences),
        fields=fields,
        approximate=True,
    )


def _nearest(p: Floats, q: Floats, own: Ints) -> tuple[Ints, Floats]:
    """Find the nearest other row of q for each row of p, and its distance: mean of min(|p − q|, CAP)."""
    mate, least = np.zeros(len(p), np.int64), np.full(len(p), np.inf)
    there = (~np.isnan(q)).astype(np.float32)
    filled, known = np.nan_to_num(q).astype(np.float32), ~np.isnan(p)
    for i in range(len(p)):
        at = known[i]
        off = np.minimum(np.abs(filled[:, at] - p[i, at].astype(np.float32)), CAP)
        many = there[:, at].sum(axis=1)
        mean = np.where(many >= 5, np.einsum("sh,sh->s", off, there[:, at]) / many, np.inf)
        mean[own[i]] = np.inf
        mate[i] = int(mean.argmin())
        least[i] = mean[mate[i]]
    return mate, least


def _matched(rows: Rows, who: Ints, mates: Ints, lost: Ints) -> Rows:
    """Give rows `who` the rollout log-probs of rows `mates` at common positions; drop the rows `lost`."""
    q, kept = rows.q.copy(), np.ones(rows.tokens, bool)
    for i, j in zip(who, mates, strict=True):
        a, b = rows.starts[i], rows.starts[j]
        mine, theirs = rows.position[a : rows.starts[i + 1]], rows.position[b : rows.starts[j + 1]]
        _, at, place = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
        q[a + at] = rows.q[b + place]
        kept[a : rows.starts[i + 1]] = np.isin(mine, theirs)
    kept &= ~np.isin(rows.owner, lost)
    found = rows.with_q(q).keep(kept)
    fits = found.level < 10 * np.median(found.level) + 0.05  # a row without a mate shows it
    return found.only(fits) if fits.any() else found


# Breaks: the columns disagree from some token on, or in a block.


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
    least = 0.5 if quiet and to_end else CHANCE
    if (
        not inside.mean() > max(6 * outside.mean() + 0.1, 6 * usual)
        or not against_chance(rows, a + begin, a + end + 1) > least
    ):
        return None
    on = to_end or against_chance(rows, a + begin, b) > CHANCE
    return begin, len(size) if on else end + 1


def against_chance(rows: Rows, first: int, last: int) -> float:
    """Return the ratio of mean |p − q| of tokens to that of all pairs (p, q) of them; 1: unrelated."""
    last = min(last, first + 256)
    p, q = rows.p[first:last], rows.q[first:last]
    pairs = np.minimum(np.abs(p[:, None] - q[None, :]), CAP).mean()
    return float(np.minimum(np.abs(p - q), CAP).mean() / pairs) if pairs > 0 else 0.0


OTHER_TEXT = 7.0
"""Least factor of mean |Δ| in other text than outside it: 5.4 in a peaked policy of 4 bits, whose outliers
come in runs."""


def breaks(rows: Rows) -> Found | None:
    """Find sequences whose columns disagree from some token on, or in a block."""
    usual, long = float(np.median(rows.level)), rows.lengths >= 12
    found = {i: _block(rows, i, usual) for i in np.flatnonzero((rows.level > 0.03) & long).tolist()}
    blocks = {i: block for i, block in found.items() if block}
    many, longer = len(blocks), max(int(long.sum()), 1)
    if many < max(3, 0.02 * rows.sequences):
        return None
    own = np.array(list(blocks))
    begins, ends = np.array(list(blocks.values())).T
    if (begins > 0).sum() < 0.6 * many:
        return None
    tokens, broken = np.zeros(rows.tokens, bool), rows.of(own)
    places = [slice(*ends) for ends in zip(rows.starts[own] + begins, rows.starts[own] + ends, strict=True)]
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
    statistic = (
        f"{many:,} of {int(long.sum()):,} sequences agree to {in_place.size.mean():.2g} nats a token outside "
        f"and differ by {rows.size[tokens].mean():.2g} inside"
    )
    fields = {"where": f"{where:.0f}", "share": percent(many / longer)}
    if same and to_end > 0.6:
        cause = "long_context"
    elif to_end > 0.5 or _fading([np.abs(rows.delta[place]) for place in places]):
        if rows.size[tokens].mean() < OTHER_TEXT * in_place.size.mean():
            return None
        cause = "retokenization"
    elif _before_as_after(rows, own, begins, ends) and np.mean(tokens[rows.size > 1.0]) > 0.2:
        cause = "wrong_mask"
        fields |= {"place": "blocks inside the response (tool output?)", "column": "one", "value": ""}
    else:
        return None
    return Found(cause, statistic, rows, tokens, broken, in_place, fields=fields, approximate=True)


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


JUMPS = tuple(round(2 ** (k / 4)) for k in range(16, 51))
"""Positions tested for a jump: 16 to 5,793, four to an octave."""


def jumps(rows: Rows) -> Found | None:
    """Find a position at which the mismatch jumps in nearly all sequences that reach it.

    Positions are those in the response and, where the dump has prompt_length, in prompt and response.
    """
    found = [one for position, place in _positions(rows) if (one := _jump(rows, position, place))]
    return max(found, key=lambda one: one[0])[1] if found else None


def _positions(rows: Rows) -> Iterator[tuple[Ints, str]]:
    """Yield the position of each token, [T], in the response and in the whole context, with its name."""
    yield rows.position, ""
    lengths = numbers(rows.column("prompt_length"))
    if np.isfinite(lengths).all():
        yield rows.position + lengths.astype(np.int64)[rows.owner], " of prompt and response"


def _jump(rows: Rows, position: Ints, place: str) -> tuple[float, Found] | None:
    """Return by which factor the mismatch jumps most, and the finding; None if it does not jump."""
    best: tuple[float, int, float, float] | None = None
    for at in JUMPS:
        before = (position >= at / 1.5) & (position < at)
        after = (position >= at) & (position < 1.5 * at)
        enough = (rows.sum(before) >= 3) & (rows.sum(after) >= 3)
        if enough.sum() < 6:
            continue
        low, high = (rows.sum(rows.size * part)[enough] / rows.sum(part)[enough] for part in (before, after))
        gain = high - low
        errors = float(gain.mean() / max(gain.std(ddof=1) / np.sqrt(len(gain)), 1e-12))
        times = float(high.mean() / max(low.mean(), 1e-9))
        if (
            np.mean(high > 2 * low + 0.01) >= 0.6  # no sequences that break, each at its own token
            and times > 3
            and errors > bound(len(gain), 2 * len(JUMPS))
            and high.mean() > 0.03
            and (best is None or times > best[0])
        ):
            best = times, at, float(low.mean()), float(high.mean())
    if best is None:
        return None
    times, at, below, above = best
    statistic = (
        f"tokens {at / 1.5:.0f} to {at}{place} differ by {below:.2g} nats on average, tokens {at} to "
        f"{1.5 * at:.0f} by {above:.2g}, {times:.1f} times as much"
    )
    fields = {"where": f"{at}{place}"}
    return times, Found.of_tokens("long_context", statistic, rows, position >= at, fields=fields)


# Places: the first or last token, one token id.


APART = 2.5
"""Least factor between the mean |Δ| of one position and that of all others."""


def boundaries(rows: Rows) -> Found | None:
    """Find a mismatch at the first or last token, or beside masked tokens."""
    gaps = np.zeros(rows.tokens, bool)
    gaps[1:] = (np.diff(rows.position) > 1) & (rows.index[1:] > 0)
    before_gap = np.zeros(rows.tokens, bool)
    before_gap[:-1] = gaps[1:]
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
    usual = float(inner.mean())
    far = min(max(0.2, float(np.quantile(inner, 0.99))), 1.0)
    base = float(np.mean(inner > far))
    copied = _copies(rows, rows.index == 0, rows.from_end == 0)
    if copied is not None:
        return copied
    broad = usual > 0.3 or base > 0.08
    for name, at in places.items():
        many = int(at.sum())
        if many < 8 or (broad and name != "the first token"):
            continue  # what follows a tool's answer or ends a response changes most with the weights
        mean, share = float(rows.size[at].mean()), float(np.mean(rows.size[at] > far))
        if name == "the first token" and _goes_on(rows, far, usual, ~edge):
            continue  # no single token: what follows differs too
        if name == "the first token" and _two_policies(rows, at, broad):
            continue  # a right value: the weights were updated after it
        if (
            share * many >= 5
            and share > max(0.2, min(12 * base, 0.5))
            and mean > max(0.12, min(8 * usual, 1.0), APART * usual)
            and ("masked" not in name or share > (0.4 if usual < 0.03 else 0.9))  # where weights change most
        ):
            tokens = at & (rows.size > far) if share < 0.5 else at
            statistic = (
                f"{name} differs by {mean:.2g} nats on average, tokens elsewhere by {usual:.2g}; "
                f"{percent(share)} of {many:,} are beyond {far:.2g} nats, {percent(base)} elsewhere"
            )
            repaired = rows.keep(~at)
            return Found.of_tokens(
                "boundary", statistic, rows, tokens, repaired=repaired, fields={"place": name}
            )
    return None


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
        return True  # after another prompt, or keys of older weights, it fades by octaves
    if rows.size[near].mean() > max(4 * usual, 0.2):
        return True
    off = rows.of(rows.owner[(rows.index == 0) & (rows.size > far)])
    there, elsewhere = rows.size[near & off[rows.owner]], rows.size[near & ~off[rows.owner]]
    beside = max(float(elsewhere.mean()) if len(elsewhere) else 0.0, usual)
    return len(there) >= 12 and float(there.mean()) > 4 * beside


GOES_ON = 1.6
"""|Δ|/(1 − π_rollout) of the second and third token, in that of later ones, from which the mismatch of the
first goes on."""


def _two_policies(rows: Rows, at: Flags, broad: bool) -> bool:
    """Return whether tokens [T], one of each sequence, look like right values of two policies.

    Then responses to one prompt that begin with one token have both log-probs in common, and E[r] is 1. A
    wrong value is the log-prob of a token that was not sampled there. Beside a broad mismatch E[r] shows
    nothing.
    """
    q, p, group = rows.q[at], rows.p[at], clusters(rows)[rows.owner[at]]
    alike = other = 0
    for one in np.flatnonzero(np.bincount(group) > 1):
        here = group == one
        near = [np.abs(x[here][:, None] - x[here]) < 0.02 for x in (q, p)]
        upper = np.triu(near[0] | near[1], 1)
        both = int(np.sum(upper & near[0] & near[1]))
        alike, other = alike + both, other + int(upper.sum()) - both
    if alike + other >= 20:
        return alike > 2 * other
    ratio = estimate(rows, 1 + np.expm1(np.minimum(rows.delta, 3.0)), at)
    return broad or abs(ratio.value - 1) <= max(0.15, 3 * ratio.error)


def _copies(rows: Rows, first: Flags, last: Flags) -> Found | None:
    """Find first tokens with the last value of another row, or last tokens with the first value of one."""
    found: list[tuple[float, Found]] = []
    sides = (("first", first, "last", last), ("last", last, "first", first))
    for column, x in (("rollout", rows.q), ("train", rows.p)):
        uncertain = (x < -1e-3) & (rows.size > 1e-3)
        for name, at, source, there in sides:
            taken = np.isin(x, x[there & (x < -1e-3)]) & uncertain
            inner, tokens = uncertain & ~(first | last), taken & at
            beside = float(taken[inner].sum() / max(inner.sum(), 1))
            share = float(tokens.sum() / max((uncertain & at).sum(), 1))
            if tokens.sum() < 8 or share < max(0.1, 10 * beside):
                continue
            statistic = (
                f"{percent(share)} of {int(at.sum()):,} rows hold at the {name} token, in the {column} "
                f"column, exactly the value at the {source} token of another row; {percent(beside)} of "
                "tokens elsewhere do"
            )
            rest: dict[str, Any] = {"repaired": rows.keep(~at), "fields": {"place": f"the {name} token"}}
            one = Found.of_tokens(
                "boundary", statistic, rows, at if share > 0.5 else tokens, exact=True, **rest
            )
            found.append((float(rows.size[tokens].mean()), one))
    return max(found, key=lambda one: one[0])[1] if found else None  # what is copied fits, at its own place


def _usual(rows: Rows, at: Flags) -> float:
    """Return the mean |Δ| of unflagged tokens, weighted to the probabilities or the places of flagged ones.

    The larger of the two: an id that only begins responses is no worse than other tokens that do.
    """
    cuts = np.quantile(rows.q, np.linspace(0, 1, 13)[1:-1])
    places = np.minimum(np.log2(rows.index + 1).astype(np.int64), 3)  # 0; 1 and 2; 3 to 6; later
    found = []
    for cell in (np.searchsorted(cuts, rows.q), places):
        others = np.bincount(cell[~at], minlength=len(cuts) + 1)
        total = np.bincount(cell[~at], rows.size[~at], minlength=len(cuts) + 1)
        found.append(float(np.mean((total / np.maximum(others, 1))[cell[at]])))
    return max(found)


def edges(rows: Rows) -> tuple[Ints, Ints]:
    """Return the distance of each token from both ends of its run of unmasked tokens, [T] each."""
    new = np.ones(rows.tokens + 1, bool)
    new[1:-1] = (np.diff(rows.position) != 1) | (rows.index[1:] == 0)
    at = np.flatnonzero(new)
    which = np.cumsum(new[:-1]) - 1
    place = np.arange(rows.tokens)
    return place - at[which], at[which + 1] - 1 - place


LEAST_OFF, LEAST_APART = 0.15, 0.5
"""Least mean |Δ| of a token id that is scored differently, nats: at a recorded lag of 0, and where older
weights may be the reason, for an update can move one frequent id by 0.2 nats and others by 0.04."""


def special_tokens(rows: Rows) -> Found | None:
    """Find a few token ids that carry the mismatch at any position."""
    if rows.ids is None:
        return None
    values, which = np.unique(rows.ids, return_inverse=True)
    many = np.bincount(which)
    total = np.bincount(which, rows.size)
    mean = total / many
    far = max(0.2, float(np.quantile(rows.size, 0.99)))
    share = np.bincount(which, rows.size > np.maximum(0.1, 0.5 * np.minimum(mean, far)[which])) / many
    order = np.argsort(-np.where(many >= 5, mean, 0))
    worst: list[int] = []
    least = LEAST_OFF if set(rows.column("policy_lag")) == {0} else LEAST_APART
    for at in order[:8]:
        rest = np.delete(np.arange(len(values)), [*worst, at])
        if not many[rest].sum():
            break
        others = total[rest].sum() / many[rest].sum()
        beyond = share[at] > 0.75 and mean[at] > 8 * others
        nearly_all = (
            share[at] > 0.9 and mean[at] > 3 * others and share[rest] @ many[rest] < 0.15 * many[rest].sum()
        )
        anew = share[at] > 0.85 and mean[at] > 2.0 and mean[at] > 12 * _before(rows, which == at)
        if many[at] < 8 or mean[at] < least or not (beyond or nearly_all or anew):
            continue
        if mean[at] > 3 * _usual(rows, np.isin(which, [*worst, at])):
            worst.append(int(at))
    if not worst:
        return None
    tokens = np.isin(which, worst)
    if tokens.mean() > 0.3 or total[worst].sum() < 0.1 * total.sum():
        return None
    others = ~tokens & (rows.q < -0.02) & (rows.q > -8)
    if others.sum() >= 100 and 2 * rows.scaled[others].mean() > rows.scaled[tokens].mean():
        return None  # wherever the other tokens are uncertain, they are off as well
    elsewhere = float(rows.size[~tokens].mean())
    names = ", ".join(str(values[at]) for at in worst)
    statistic = (
        f"{int(tokens.sum()):,} tokens with id {names} differ by {rows.size[tokens].mean():.2g} nats on "
        f"average, all others by {elsewhere:.2g}"
    )
    return Found.of_tokens("special_token", statistic, rows, tokens, fields={"ids": names})


def _before(rows: Rows, at: Flags) -> float:
    """Return the mean |Δ| of tokens with no flagged one before them in their sequence, nats.

    A token whose embedding is another one on one side disturbs all that follow it, too. Where there are too
    few such tokens, it is the mean of all that are not flagged.
    """
    seen = np.cumsum(at)
    clean: Flags = seen == (seen - at)[rows.starts[:-1]][rows.owner]
    return float(rows.size[clean if clean.sum() >= 100 else ~at].mean())


EARLY, LATE = 8, 32
"""A wrong prompt affects the first `EARLY` tokens of a response most, and tokens from `LATE` on less."""
AT_FIRST = 1.8
"""Least mean |Δ|/(1 − π_rollout), cut at `CAP`, of first tokens after another prompt: it is 2.4 to 2.9 as a
rule, and 0.2 to 1.5 where the weights were updated during the response."""
STEEP = (1.0, 3.0)
"""The same where it fades at once: its least size, and least factor of it in that of the fourth to eighth
token, which is at most 1.7 where the weights were updated."""


FADES = 1.6
"""Least factor of |Δ|/(1 − π_rollout), of uncertain tokens, by which the effect of another prompt fades."""


FADED = 0.2
"""Most mean |Δ| from `LATE` on where all responses follow another prompt, nats: at most 0.12 in the rollouts
of `benchmarks/doctor`, and 0.29 where an adapter counts twice and moves the first tokens most."""


def contexts(rows: Rows) -> Found | None:
    """Find responses scored after another prompt: a mismatch that is large at first and smaller later."""
    long = rows.lengths >= LATE + 8
    if long.sum() < 6:
        return None
    first, later = rows.index < EARLY, rows.index >= LATE
    heads = np.where(first, rows.size, 0.0)
    worst = np.maximum.reduceat(heads, rows.starts[:-1])  # one token that is far off is no context
    early = (rows.sum(heads) - worst) / np.maximum(np.minimum(rows.lengths, EARLY) - 1, 1)
    late = rows.sum(np.where(later, rows.size, 0)) / np.maximum(rows.lengths - LATE, 1)
    usual = float(np.quantile(early[long], 0.25))
    falling = long & (early > 0.15) & (early > 3 * late)
    rising = long & (late > 0.15) & (late > 3 * early)
    excess = (falling.sum() - rising.sum()) / np.sqrt(max(falling.sum() + rising.sum(), 1))
    if falling.sum() < max(4, 0.02 * long.sum()) or excess < 2 or falling.sum() < 4 * rising.sum():
        return None
    share = float(falling.sum() / long.sum())
    part = share < 0.5
    if part and (
        early[falling].mean() < max(8 * usual, 0.15 if usual < 0.01 else 0.3)
        or falling.sum() < 10 * rising.sum()
    ):
        return None
    begin = rows.scaled[(rows.index == 0) & falling[rows.owner]].mean()
    near = (rows.index > 2) & first & falling[rows.owner]
    if begin < AT_FIRST and not begin > max(STEEP[0], STEEP[1] * rows.scaled[near].mean()):
        return None  # weights that changed during the response differ at its start as they do elsewhere
    some = falling[rows.owner] & (rows.q < -0.02) & (rows.q > -8)
    if (some & later).sum() < 100 or not (
        rows.scaled[some & first].mean() > FADES * rows.scaled[some & later].mean()
    ):
        return None  # later tokens are more certain, and differ as much as that leaves room for
    if not part and late[falling].mean() > FADED:
        return None
    sequences = falling if part else np.ones(rows.sequences, bool)
    statistic = (
        f"in {int(falling.sum()):,} of {int(long.sum()):,} longer responses the first {EARLY} tokens differ "
        f"by {early[falling].mean():.2g} nats on average and those from {LATE} on by "
        f"{late[falling].mean():.2g}; the other way round in {int(rising.sum()):,}"
    )
    repaired = rows.only(~falling) if part else rows.keep(later)
    return Found.of_sequences(
        "wrong_context",
        statistic,
        rows,
        sequences,
        repaired=repaired if repaired.tokens > 200 else None,
        fields={"share": percent(share) if part else "all"},
        approximate=True,
    )

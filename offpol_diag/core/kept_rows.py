"""Rows that are kept as they are: the worst ones, the sample of the diagnosis, examples of what is dropped.

Which ones depends on the dump alone: not on their order, nor on how files, batches and threads cut it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np

from offpol_diag.core.evaluate import may_be_zero, rules_of
from offpol_diag.core.gap import Terms
from offpol_diag.core.intervals import AS_SEEN, Formula, Reader, mean, missing
from offpol_diag.core.segments import floats
from offpol_diag.core.state import Array, State, Table
from offpol_diag.dump.batch import Batch, mix
from offpol_diag.dump.schema import PROMPT_IDS
from offpol_diag.number import LARGEST
from offpol_diag.presets import Preset
from offpol_diag.result import Drops, LostSequence, Subset, WorstSequence

M = TypeVar("M", WorstSequence, LostSequence)
Row = dict[str, Any]


@dataclass(frozen=True)
class Records:
    """The rows of highest score, falling; equal scores are ordered by the fields, in their order, as text."""

    most: int
    rows: tuple[tuple[float, Row], ...] = ()

    def merge(self, other: Records) -> Records:
        """Keep the best of both."""

        def order(scored: tuple[float, Row]) -> tuple[float, list[str | bytes]]:
            score, row = scored
            return -score, [x.tobytes() if isinstance(x, np.ndarray) else repr(x) for x in row.values()]

        return Records(self.most, tuple(sorted(self.rows + other.rows, key=order)[: self.most]))

    @classmethod
    def of(cls, most: int, scored: Iterable[tuple[float, Row]]) -> Records:
        """Keep the best of some rows."""
        return cls(most).merge(cls(most, tuple(scored)))

    def read(self, kind: type[M]) -> list[M]:
        """Return the rows, best first; log-probs of a sequence's tokens to 5 digits."""

        def plain(x: Any) -> Any:
            if not isinstance(x, np.ndarray):
                return x
            return [float(f"{one:.5g}") for one in x.tolist()] if x.dtype == np.float64 else x.tolist()

        return [kind(**{name: plain(x) for name, x in row.items()}) for _, row in self.rows]


# ---------------------------------------------------------------- worst sequences

SEQUENCES, STRIP = 10, 256
"""Worst sequences, and most tokens of one that are kept."""
TIES = 1000
"""Most rows of equal score, beyond those kept, among which the order of `Records` decides."""


def observe(terms: Terms, groups: Array) -> State:
    """Keep rows of a batch on the host, given the hash of each sequence's group, [S]."""
    k3 = np.nan_to_num(terms.tokens.sequences.mean(terms.k3))
    sequences = [(float(k3[at]), _sequence(terms, at, k3)) for at in _largest(k3, SEQUENCES).tolist()]
    return State(records={"worst": Records.of(SEQUENCES, sequences), "sample": Sample.of(terms, groups)})


def _largest(scores: Array, many: int) -> Array:
    """Return the indices of the largest scores above 0, falling, with up to `TIES` ties."""
    last = np.partition(scores, -many)[-many] if len(scores) > many else 0.0
    candidates = np.flatnonzero((scores >= last) & (scores > 0))
    result: Array = candidates[np.argsort(-scores[candidates], kind="stable")[: many + TIES]]
    return result


def _named(batch: Batch, at: int) -> Row:
    """Return the id of a sequence as text (`?` without one), its step if it is a whole number, its length."""
    name, step = (batch.scalars[key][at] if key in batch.scalars else None for key in ("sequence_id", "step"))
    id_, whole = "?" if name is None else str(name), step if isinstance(step, int) else None
    return {"sequence_id": id_, "step": whole, "length": int(batch.lengths[at])}


def _sequence(terms: Terms, at: int, k3_mean: Array) -> Row:
    """Describe a sequence, with at most `STRIP` of its tokens: those of largest ΣK3."""
    batch, first = terms.tokens.batch, 0
    begin, end = batch.cu_seqlens[at : at + 2].tolist()
    whole = slice(begin, end)
    if end - begin > STRIP:
        total = np.cumsum(np.concatenate(([0.0], terms.k3[whole])))
        first = int(np.argmax(total[STRIP:] - total[:-STRIP]))
    here = slice(begin + first, min(begin + first + STRIP, end))
    lag = batch.scalars["policy_lag"][at] if "policy_lag" in batch.scalars else None
    most = min(float(terms.abs_log_ratio[whole].max()), LARGEST)
    return _named(batch, at) | {
        "log_ratio_sum": float(np.nan_to_num(terms.log_ratio[whole].sum())),
        "k3_mean": float(k3_mean[at]),
        "max_abs_log_ratio": float(np.nan_to_num(most)),
        "policy_lag": lag if isinstance(lag, int) else None,
        "reward": None if batch.rewards is None else float(batch.rewards[at]),
        "first": first,
        "positions": batch.position[here].copy(),
        "token_ids": np.zeros(0, np.int64) if batch.token_ids is None else batch.token_ids[here].copy(),
        "log_ratios": np.nan_to_num(terms.log_ratio[here]),
        "rollout_log_probs": terms.log_rollout[here].copy(),
        "train_log_probs": terms.log_train[here].copy(),
    }


# ---------------------------------------------------------------- the sample of the diagnosis

ROOM = 1 << 18
"""Most tokens of a sample: a dump of fewer is read whole. A sequence counts `EACH` more, for its scalars."""
EACH = 24
STEPS = 128
"""Steps that share a sample evenly. Of more, those that differ by a multiple of it have one share."""
PLACE = "place_in_group"
"""Index of a sequence among those of its group, in the order in which they were read."""


@dataclass(frozen=True)
class Sample:
    """Whole groups of sequences, some of every step, token by token.

    Logging faults (a shift, a constant, a break) show in adjacent tokens only, which sums cannot hold.

    Groups stand in the order of their hashes in each step, and the room is divided evenly among the steps: of
    each, those sequences are kept before which there is less than its share. A part of a dump has fewer
    before each, and larger shares, so that it keeps all that the whole dump does.

    Attributes:
        rows: step modulo `STEPS`, hash of the group, hash of the sequence, length, and width (the length with
            masked tokens) of each sequence, [5, S] int64.
        values: q and p (log π_rollout and log π_train, nats), position, turn (its index in the sequence), and
            of token_ids, entropy, reference and sign (of the advantage, plus 1) what the dump has;
            of all sequences, [T].
        scalars: per-sequence columns by name, rewards among them, S values each.
        costs: what all sequences of each step would take, kept or not, [STEPS] int64.
    """

    rows: Array
    values: dict[str, Array]
    scalars: dict[str, list[Any]]
    costs: Array

    @classmethod
    def of(cls, terms: Terms, groups: Array) -> Sample:
        """Draw from a batch, without its empty sequences; `groups`: the hash of each one's group, [S]."""
        batch, lengths = terms.tokens.batch, terms.tokens.batch.lengths
        given, there = batch.scalars.get("step", [None] * batch.sequences), np.flatnonzero(lengths)
        step = np.array([one % STEPS if isinstance(one, int) else 0 for one in given], np.int64)
        sign = None if batch.advantages is None else np.sign(batch.advantages) + 1
        values = {
            "q": terms.log_rollout,
            "p": terms.log_train,
            "position": batch.position,
            "turn": batch.turn,
            "token_ids": batch.token_ids,
            "entropy": batch.entropy,
            "reference": batch.reference,
            "sign": sign,
        }
        values = {name: x for name, x in values.items() if x is not None}
        scalars = batch.scalars | ({} if batch.rewards is None else {"rewards": batch.rewards.tolist()})
        order = _hashes(batch, terms.log_rollout, terms.log_train)
        rows = np.stack((step, groups.view(np.int64), order, lengths, lengths + batch.masked))
        costs = np.bincount(step[there], lengths[there] + EACH, STEPS).astype(np.int64)
        found = cls(rows, values, scalars, costs)._at(there)
        found = found._at(found._kept)
        if PROMPT_IDS in found.scalars:  # equal digests are equal prompts
            found.scalars[PROMPT_IDS] = [
                prompt if prompt is None else blake2b(prompt.astype(np.int64).tobytes()).hexdigest()[:16]
                for prompt in found.scalars[PROMPT_IDS]
            ]
        return found

    @property
    def lengths(self) -> Array:
        """Number of unmasked tokens of each sequence, [S]."""
        return np.asarray(self.rows[3])

    def merge(self, other: Sample) -> Sample:
        """Draw from both."""
        both = replace(self, rows=np.concatenate((self.rows, other.rows), 1), costs=self.costs + other.costs)
        kept, many = both._kept, self.rows.shape[1]
        one, two = self._at(kept[kept < many]), other._at(kept[kept >= many] - many)
        values = {name: np.concatenate((x, two.values[name])) for name, x in one.values.items()}
        scalars = {name: x + two.scalars[name] for name, x in one.scalars.items()}
        return Sample(both.rows[:, kept], values, scalars, both.costs)

    @property
    def _kept(self) -> Array:
        """Indices of the sequences that the shares of their steps have room for, rising.

        A share is the L with Σ min(L, cost) = `ROOM` over the steps; all is kept where that fits.
        """
        costs = np.sort(self.costs[self.costs > 0])
        left = ROOM - (np.cumsum(costs) - costs)  # what those cheaper than each leave
        shares = left // np.arange(len(costs), 0, -1)
        if not (short := np.flatnonzero(shares < costs)).size:
            return np.arange(len(self.lengths))
        at = np.lexsort(self.rows[2::-1])
        step, cost = self.rows[0, at], self.lengths[at] + EACH
        before = np.cumsum(cost) - cost
        before -= np.maximum.accumulate(np.where(np.diff(step, prepend=-1), before, 0))
        kept: Array = np.sort(at[before < max(shares[short[0]], 1)])
        return kept

    def _at(self, at: Array) -> Sample:
        """Return some sequences, in this order."""
        if np.array_equal(at, np.arange(len(self.lengths))):
            return self
        starts, many = np.cumsum(self.lengths) - self.lengths, self.lengths[at]
        tokens = np.repeat(starts[at] - (np.cumsum(many) - many), many) + np.arange(int(many.sum()))
        values = {name: x[tokens] for name, x in self.values.items()}
        scalars = {name: [x[i] for i in at.tolist()] for name, x in self.scalars.items()}
        return Sample(self.rows[:, at], values, scalars, self.costs)

    def read(self) -> Sample:
        """Return the sample, in the order of the sequences' hashes, with plain numbers and texts as scalars.

        The last group of a step that was cut may lack sequences: it is left out unless it is the only one.
        """
        step, group, order, lengths, _ = self.rows
        place, by_group, count = np.zeros_like(order), np.lexsort((group, step)), np.arange(len(order))
        new = np.diff(group[by_group], prepend=~group[by_group[:1]]) != 0
        place[by_group] = count - np.maximum.accumulate(np.where(new, count, 0))
        whole = np.ones(len(order), np.bool_)
        for one in np.flatnonzero(np.bincount(step, lengths + EACH, STEPS) < self.costs):
            groups = np.unique(group[step == one])
            whole &= (step != one) | (group != groups[-1]) | (len(groups) < 2)
        at = np.argsort(order, kind="stable")
        found = replace(self, scalars=self.scalars | {PLACE: place.tolist()})._at(at[whole[at]])
        return replace(found, scalars={name: [*map(_plain, x)] for name, x in found.scalars.items()})


def _hashes(batch: Batch, q: Array, p: Array) -> Array:
    """Hash each sequence's group, length, and first and last log-probs, [S] int64."""
    end = max(batch.tokens - 1, 0)
    first, last = (np.clip(x, 0, end) for x in (batch.cu_seqlens[:-1], batch.cu_seqlens[1:] - 1))
    result = mix((batch.key + batch.lengths).view(np.uint64))
    for x, at in ((q, first), (p, last), (q, last), (p, first)) if batch.tokens else ():
        result = mix(result ^ x[at].view(np.uint64))
    return result.view(np.int64)


def _plain(x: Any) -> Any:
    """Return a value of a column as a number or text, or a list of them."""
    if isinstance(x, np.generic | np.ndarray):
        return x.tolist()
    return x if x is None or isinstance(x, int | float | str | list) else str(x)


# ---------------------------------------------------------------- what one preset drops and another keeps

EXAMPLES = 5
EVERY = "every"
"""Prefix of the columns over all tokens and all sequences."""
MEANS = (
    Formula("length", "mean length of their sequences", mean("length", "count"), "tokens", within=AS_SEEN),
    Formula("log_ratio", "mean Δ; of sequences mean ΣΔ", mean("log_ratio", "count"), "nats"),
    Formula("reward", "mean reward of their sequences", mean("reward", "count"), within=AS_SEEN),
)
"""Means of a subset of tokens or sequences."""


def observe_drops(terms: Terms, buckets: Array, pairs: Sequence[tuple[Preset, Preset]]) -> State:
    """Count what the first preset of each pair drops and the second keeps, and keep examples.

    A token is dropped if it is rejected, vetoed or of weight 0, a sequence if all its tokens are.
    """
    tokens, batch, runs = terms.tokens, terms.tokens.batch, terms.tokens.sequences
    total, records = runs.sum(terms.log_ratio), dict[str, Any]()
    sizes = np.nan_to_num(total)

    def sums(name: str, count: Array, log_ratio: Array) -> dict[str, Array]:
        """Return columns of some tokens or sequences: how many there are in each sequence, and their ΣΔ."""
        found = {"count": count, "log_ratio": log_ratio, "length": count * runs.n}
        found |= {} if batch.rewards is None else {"reward": count * batch.rewards}
        return {f"{name}.{column}": x for column, x in found.items()}

    def kept(preset: Preset) -> Array:
        found: Array = tokens.kept(*rules_of(preset))
        if preset.weight is not None and may_be_zero(preset.weight):
            weighs: Array = tokens.weight(preset.policy, preset.weight) != 0
            found = found & (weighs if preset.weight.on_tokens else runs.spread(weighs))
        return found

    columns = tokens.counts | sums(f"{EVERY}|tokens", runs.n, total)
    columns |= sums(f"{EVERY}|sequences", tokens.filled, total)
    for ours, theirs in pairs:
        name, ours_kept = f"{ours.name}>{theirs.name}", kept(ours)
        lost = kept(theirs) & ~ours_kept
        many = runs.count(lost)
        whole = (many > 0) & (runs.count(ours_kept) == 0)
        columns |= sums(f"{name}|tokens", many, runs.sum(np.where(lost, terms.log_ratio, 0.0)))
        columns |= sums(f"{name}|sequences", floats(whole), np.where(whole, total, 0.0))
        examples = []
        for at in _largest(np.abs(sizes) * (many > 0), EXAMPLES).tolist():
            reward = None if batch.rewards is None else float(batch.rewards[at])
            row: Row = {"tokens": int(many[at]), "log_ratio_sum": float(sizes[at]), "reward": reward}
            examples.append((abs(row["log_ratio_sum"]), _named(batch, at) | row))
        records[f"drops.{name}"] = Records.of(EXAMPLES, examples)
    return State(tables={"drops": Table.of(columns, buckets)}, records=records)


def dropped(state: State, seed: int, pairs: Sequence[tuple[Preset, Preset]]) -> dict[str, Any]:
    """Read what presets drop that others keep, beside all there is: fields of a `Comparison`."""
    reader = Reader.of(state.tables["drops"], seed, state.many)

    def subsets(name: str) -> dict[str, Subset]:
        found = {}
        for unit in ("tokens", "sequences"):
            prefix, rewarded = f"{name}|{unit}.", "reward" in reader.drawn
            share = Formula("share", f"share of all {unit}", mean("count", unit), "fraction", unit)
            numbers = {row.name: reader.number(row, prefix) for row in (share, *MEANS[: 2 + rewarded])}
            numbers |= {} if rewarded else {"reward": missing(MEANS[2], ["rewards"])}
            found[unit] = Subset(count=round(reader.sum(f"{prefix}count")), numbers=numbers)
        return found

    drops = [
        Drops(
            dropped_by=ours.name,
            kept_by=theirs.name,
            examples=state.records[f"drops.{ours.name}>{theirs.name}"].read(LostSequence),
            **subsets(f"{ours.name}>{theirs.name}"),
        )
        for ours, theirs in pairs
    ]
    return {f"all_{unit}": one for unit, one in subsets(EVERY).items()} | {"drops": drops}

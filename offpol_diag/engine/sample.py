"""A sample of whole sequences, chosen by hash, kept token by token for the diagnosis.

Logging faults (a shift, a constant, a break) show only in adjacent tokens, which sums cannot hold. A sample
of sequences can: it is bounded, it merges, and it does not depend on how a dump is split.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offpol_diag.dump.batch import Batch
from offpol_diag.dump.schema import PROMPT_IDS
from offpol_diag.engine import bootstrap
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.segments import Array
from offpol_diag.engine.tally import Records
from offpol_diag.engine.terms import Drift

TOKENS, SEQUENCES = 1 << 17, 8192
"""The sample is the longest prefix, in hash order, of at most so many tokens and sequences."""
FIRST, LAST = 1536, 512
"""Number of first and last tokens kept of a longer sequence; those between are dropped."""
IN_PROMPT = "in_prompt"
"""Whether the id of a token occurs in its prompt."""
COLUMNS = (*("q", "p", "position", "token_ids", "entropy", "reference", IN_PROMPT),)


@dataclass(frozen=True)
class Sample:
    """A sample of sequences.

    Attributes:
        order: hash of each sequence, rising, [S] int64.
        lengths: number of kept tokens of each, [S] int64.
        values: column of `COLUMNS` → the tokens of all sequences, concatenated, [T] float64; columns that
            the dump lacks are absent.
        scalars: per-sequence columns by name, rewards among them, S values each.
        full: whether sequences were dropped from the sample.
    """

    order: NDArray[np.int64]
    lengths: NDArray[np.int64]
    values: dict[str, NDArray[np.float64]]
    scalars: dict[str, list[Any]]
    full: bool = False

    @classmethod
    def read(cls, kept: Records) -> Sample:
        """Read the records that `sample` made."""
        table = kept.table
        scalars = [json.loads(text) for text in table["scalars"].to_pylist()]
        return cls(
            ~table["score"].to_numpy(),
            table["size"].to_numpy(),
            {
                name: table[name].combine_chunks().flatten().to_numpy()
                for name in COLUMNS
                if name in table.column_names
            },
            {name: [row[name] for row in scalars] for name in (scalars[0] if scalars else ())},
            kept.seen > len(table),
        )


def sample(context: BatchContext, drift: Drift) -> Records:
    """Sample one batch, for the two policies of a drift; sequences without a token are left out."""
    batch = context.batch
    q, p = (batch.policy(policy) for policy in (drift.denominator, drift.numerator))
    assert q is not None
    assert p is not None
    order, begins, whole = hashes(batch, q, p), batch.cu_seqlens[:-1], batch.lengths
    rank = np.argsort(order, kind="stable")
    rank = rank[whole[rank] > 0]
    at = rank[: _prefix(np.minimum(whole[rank], FIRST + LAST))]
    many = whole[at]
    lengths = np.minimum(many, FIRST + LAST)
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    skip = np.repeat(many - lengths, lengths) * (within >= FIRST)
    tokens = np.repeat(begins[at], lengths) + within + skip
    columns = {
        "q": q,
        "p": p,
        "position": batch.position,
        "token_ids": batch.token_ids,
        "entropy": batch.entropy,
        "reference": batch.reference,
    }
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int64())
    more: dict[str, Any] = {} if batch.rewards is None else {"rewards": batch.rewards}
    if (prompts := batch.scalars.get(PROMPT_IDS)) is not None:
        more[PROMPT_IDS] = {i: _digest(prompts[i]) for i in at}
    scalars = [{name: column[i] for name, column in (batch.scalars | more).items()} for i in at]
    result = {
        "score": pa.array(~order[at]),  # the lower the hash, the higher the score
        "size": pa.array(lengths),
        "scalars": pa.array([json.dumps(row, default=_plain) for row in scalars], pa.string()),
    }
    for name, x in columns.items():
        if x is not None:
            values = pa.array(x[tokens].astype(np.float64))
            result[name] = pa.LargeListArray.from_arrays(offsets, values)
    if prompts is not None and batch.token_ids is not None:
        cut = zip(np.split(batch.token_ids[tokens], np.cumsum(lengths)[:-1]), at, strict=True)
        known = [np.isin(ids, () if prompts[i] is None else prompts[i]).astype(np.float64) for ids, i in cut]
        result[IN_PROMPT] = pa.LargeListArray.from_arrays(offsets, pa.array(np.concatenate(known)))
    return Records.of(SEQUENCES, pa.table(result), TOKENS, len(rank))


def _plain(value: object) -> object:
    """Return a value of a column that JSON lacks as a number or a text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def _digest(prompt: Any) -> str | None:
    """Return a text that is equal for equal prompts only."""
    return None if prompt is None else blake2b(prompt.astype(np.int64).tobytes(), digest_size=8).hexdigest()


def _prefix(lengths: NDArray[np.int64]) -> int:
    """Return how many of the sequences fit, in their order; at least one."""
    fit = int(np.searchsorted(np.cumsum(lengths), TOKENS, side="right"))
    return min(max(fit, 1), SEQUENCES, len(lengths))


def hashes(batch: Batch, q: Array, p: Array) -> Array:
    """Hash each sequence's group, length, and first and last log-probs, [S] int64."""
    end = max(batch.tokens - 1, 0)
    first, last = (np.clip(x, 0, end) for x in (batch.cu_seqlens[:-1], batch.cu_seqlens[1:] - 1))
    result = bootstrap.mix(batch.key + batch.lengths)
    for x, at in ((q, first), (p, last), (q, last), (p, first)) if batch.tokens else ():
        result = bootstrap.mix(result ^ x[at].view(np.int64))
    return result

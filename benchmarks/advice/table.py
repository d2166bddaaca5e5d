"""Measures one regime, and sums up what was measured of all. No number is computed anywhere else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.advice import draws, judge, methods
from benchmarks.advice.dumps import Seen, joined, seen
from benchmarks.advice.policies import CHOOSING, POLICIES, Policy
from benchmarks.advice.regimes import BATCHES, SIZES, TIMES, Regime

Row = dict[str, Any]
PIECE = SIZES[0]
JUDGED = 8192
"""Samples by which a method's variance is judged, at most."""
BLIND = {"without token ids": (False, True), "without advantages": (True, False)}
"""What a dump may lack: whether there are token ids, and advantages."""


@dataclass(frozen=True)
class Found:
    """What there is in a regime, before any policy chooses.

    Attributes:
        judgement: of every method.
        dumps: by number of sequences; smaller ones are parts of the largest.
        blind: dumps that lack a column, by what is lacking.
    """

    judgement: judge.Judgement
    dumps: Mapping[int, list[Seen]]
    blind: Mapping[str, Seen]


def measure(regime: Regime) -> Found:
    """Judge the methods and draw the dumps."""
    world, rollout = regime.made()
    judgement = judge.judge(world, rollout, min(regime.sequences, JUDGED), seed=regime.seed + 1)
    parts, blind = [], {}
    for drawn in draws.pieces(world, rollout, regime.sequences, seed=regime.seed + 2):
        blind = blind or {lacking: seen(drawn, *columns) for lacking, columns in BLIND.items()}
        parts += [seen(drawn.rows(first, first + PIECE)) for first in range(0, len(drawn.prompt), PIECE)]
    dumps = {size: _cut(parts, size // PIECE) for size in SIZES if size <= len(parts) * PIECE}
    return Found(judgement, dumps, blind)


def _cut(parts: Sequence[Seen], each: int) -> list[Seen]:
    starts = range(0, len(parts) - each + 1, each)
    return [joined(parts[first : first + each]) for first in starts][:TIMES]


def row(regime: Regime, found: Found) -> Row:
    """What is kept of a regime.

    Keys: the regime's own; `reached`: batch → method → fraction of the best alignment; `best`: batch →
    method and alignment; `chosen`: policy → sequences of the dump → batch → a method for each dump; `blind`:
    policy → what is lacking → batch → a method.
    """
    judged = found.judgement
    return {
        "name": regime.name,
        "kind": regime.kind.kind,
        "longest": regime.longest,
        "held_out": regime.held_out,
        "best": {str(batch): _rounded(judged.best(batch)) for batch in BATCHES},
        "reached": {
            str(batch): {name: round(judged.reached(name, batch), 4) for name in methods.NAMES}
            for batch in BATCHES
        },
        "chosen": {name: _chosen(policy, found.dumps) for name, policy in POLICIES.items()},
        "blind": {name: _chosen_blind(policy, found.blind) for name, policy in CHOOSING.items()},
    }


def _rounded(best: tuple[str, float]) -> list[Any]:
    return [best[0], round(best[1], 4)]


def _chosen(policy: Policy, dumps: Mapping[int, list[Seen]]) -> dict[str, dict[str, list[str]]]:
    return {
        str(size): {str(batch): [policy(dump, batch) for dump in some] for batch in BATCHES}
        for size, some in dumps.items()
    }


def _chosen_blind(policy: Policy, blind: Mapping[str, Seen]) -> dict[str, dict[str, str]]:
    return {lacking: {str(batch): policy(one, batch) for batch in BATCHES} for lacking, one in blind.items()}


# ---------------------------------------------------------------- summing up


def scores(
    rows: Iterable[Row], policy: str, size: int | None = None, batch: int | None = None
) -> Iterator[float]:
    """The fraction of the best alignment, of each dump and batch; of one size or batch where it is given."""
    for row in rows:
        for sequences, by_batch in row["chosen"][policy].items():
            if size is not None and int(sequences) != size:
                continue
            for update, names in by_batch.items():
                if batch is None or int(update) == batch:
                    yield from (row["reached"][update][name] for name in names)


def blind_scores(rows: Iterable[Row], policy: str, lacking: str) -> Iterator[float]:
    """The same where a column is lacking."""
    for row in rows:
        yield from (row["reached"][update][name] for update, name in row["blind"][policy][lacking].items())


def told(values: Iterable[float]) -> dict[str, float]:
    """Mean, 5th percentile, least."""
    found = np.array([*values])
    return {
        "mean": float(found.mean()),
        "p5": float(np.percentile(found, 5)),
        "least": float(found.min()),
        "count": len(found),
    }


def worst(rows: Iterable[Row], policy: str, size: int, many: int) -> list[dict[str, Any]]:
    """The regimes in which a policy loses most, with what it chose there and what was best."""
    found = []
    for row in rows:
        for update, names in row["chosen"][policy].get(str(size), {}).items():
            reached = row["reached"][update]
            found.append(
                {
                    "name": row["name"],
                    "batch": int(update),
                    "score": float(np.mean([reached[name] for name in names])),
                    "chosen": max(sorted(set(names)), key=names.count),
                    "best": row["best"][update][0],
                    "alignment": row["best"][update][1],
                }
            )
    return sorted(found, key=lambda one: float(one["score"]))[:many]

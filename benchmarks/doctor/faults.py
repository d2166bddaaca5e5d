"""Faults of logged log-probs, each made on real responses, so that the true cause is known.

A fault changes a copy of `Rows` in place, in the responses of `which` [S] only.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.doctor.models import Sampling
from benchmarks.doctor.rollouts import Array, Base, Rows, World

Generator = np.random.Generator


@dataclass
class Work:
    """Responses that a fault is made in.

    Attributes:
        rows: the responses, to be changed.
        which: responses that the fault is in, [S] bool.
        chance: random numbers.
        world: the models, for what needs a forward.
        concerned: tokens that the fault is about, where it moves others a little too, [S, L] bool.
    """

    rows: Rows
    which: Array
    chance: Generator
    world: World
    concerned: Array | None = None

    @property
    def tokens(self) -> Array:
        """[S, L] bool: tokens that count and that the fault may be in."""
        return self.rows.sampled & self.which[:, None]

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary."""
        return self.world.task.vocabulary

    def some(self, share: float) -> Array:
        """Draw random tokens, at least 3, [S, L] bool."""
        chosen = self.tokens & (self.chance.random(self.rows.q.shape) < share)
        at = np.argwhere(self.tokens)
        for s, t in at[self.chance.integers(0, len(at), max(0, 3 - int(chosen.sum())))]:
            chosen[s, t] = True
        return chosen

    def part(self, share: float) -> Array:
        """Draw some of the responses of `which`, at least 2, [S] bool."""
        at = np.flatnonzero(self.which)
        chosen = np.zeros_like(self.which)
        chosen[self.chance.permutation(at)[: max(2, round(share * len(at)))]] = True
        return chosen


Fault = Callable[..., None]


def sentinel(work: Work, value: float | str, share: float, column: str = "q") -> None:
    """Put a constant in place of some log-probs; "uniform" is log 1/V, "clamp" cuts at a floor."""
    values = getattr(work.rows, column)
    if value == "clamp":
        floor = np.quantile(values[work.tokens], share).round(1)
        values[work.tokens & (values < floor)] = floor
        return
    values[work.some(share)] = -np.log(work.vocabulary) if value == "uniform" else value


def wrong_mask(work: Work, where: str, logged: str = "zero", share: float = 1.0) -> None:
    """Count what a tool inserted, or `share` × 20 tokens of padding, as sampled."""
    rows, at = work.rows, np.arange(work.rows.q.shape[1])
    inside = at < rows.ends[:, None]
    if where == "tool":
        added = work.part(share)[:, None] & inside & ~rows.sampled
    else:
        added = work.which[:, None] & ~inside & (at < rows.ends[:, None] + max(1, round(20 * share)))
    rows.q[added] = 0.0 if logged == "zero" else work.chance.choice(rows.q[rows.sampled], int(added.sum()))
    rows.mask[added] = 1


def off_by_one(work: Work, lag: int, column: str = "q", fill: str = "edge", share: float = 1.0) -> None:
    """Shift a column by `lag` tokens; the gap holds the nearest value, or the 0.0 of padding."""
    values = getattr(work.rows, column)
    for s in np.flatnonzero(work.part(share)):
        end = work.rows.ends[s]
        at = np.arange(end) - lag
        shifted = values[s, np.clip(at, 0, end - 1)]
        values[s, :end] = np.where((at < 0) | (at >= end), 0.0, shifted) if fill == "zero" else shifted


def row_permutation(work: Work, within: str, share: float = 1.0) -> None:
    """Give responses the train log-probs of others, padded and cut as a padded tensor is."""
    rows = work.rows
    labels = {"group": rows.group, "step": rows.trainer, "all": np.zeros_like(rows.group)}[within]
    source = np.where(np.arange(rows.q.shape[1]) < rows.ends[:, None], rows.p, 0.0)
    chosen = work.part(share)
    for label in np.unique(labels):
        order = work.chance.permutation(np.flatnonzero(chosen & (labels == label)))
        rows.p[order] = source[np.roll(order, 1)]


def boundary(work: Work, place: str, share: float = 1.0) -> None:
    """Log one token of each response wrongly: last, first, its end, or after inserted text."""
    rows, chosen = work.rows, work.part(share)
    sampled = rows.sampled
    first = sampled.argmax(axis=1)
    last = sampled.shape[1] - 1 - sampled[:, ::-1].argmax(axis=1)
    before = rows.q.copy()
    for s in np.flatnonzero(chosen):
        beside = (s + (1 if place == "last" else -1)) % len(first)
        if place == "last":  # a roll over packed rows
            rows.q[s, last[s]] = before[beside, first[beside]]
        elif place == "first":
            rows.q[s, first[s]] = before[beside, last[beside]]
        elif place == "end":
            if rows.tokens[s, last[s]] == 0:
                rows.q[s, last[s]] = -np.log(work.vocabulary)
        else:
            starts = np.flatnonzero(sampled[s, 1:] & ~sampled[s, :-1]) + 1
            rows.q[s, starts] = work.chance.choice(before[sampled], len(starts))


def special_token(work: Work, kind: str, size: float, ids: int = 1) -> None:
    """Score one or two tokens apart: by an offset, or with an output row that the trainer has otherwise."""
    rows = work.rows
    found, counts = np.unique(rows.tokens[work.tokens], return_counts=True)
    usual = np.argsort(-counts)[3 : max(5, min(20, int((counts > 20).sum())))]
    chosen = found[work.chance.choice(usual, ids, replace=False)]
    work.concerned = np.isin(rows.tokens, chosen) & work.tokens
    if kind == "offset":
        rows.q[work.concerned] = np.minimum(rows.q[work.concerned] - size, -1e-4)  # no log-prob is above 0
        return
    model = work.world.version(int(rows.trainer[0]))
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.head.weight[torch.from_numpy(chosen)] *= 1 - size
    rows.p = work.world.scored(rows, work.which, rows.prompts, rows.tokens, changed)


def retokenization(work: Work, kind: str, share: float) -> None:
    """Let the trainer score another tokenisation of some responses: a token more, less or replaced."""
    rows, chosen = work.rows, work.part(share)
    tokens = rows.tokens.copy()
    for s in np.flatnonzero(chosen):
        end = max(int(rows.ends[s]), 2)
        at = work.chance.integers(0, max(1, int(0.8 * end)))
        new = work.chance.integers(1, work.vocabulary)
        old = tokens[s].copy()
        if kind == "replace":
            tokens[s, at] = new
        elif kind == "insert":
            tokens[s, at], tokens[s, at + 1 :] = new, old[at:-1]
        else:
            tokens[s, at:-1], tokens[s, -1] = old[at + 1 :], 0
    rows.p = work.world.scored(rows, chosen, rows.prompts, tokens)


def wrong_context(work: Work, kind: str, share: float = 1.0) -> None:
    """Let the trainer score responses after another prompt: another one's, none, or one written otherwise."""
    rows = work.rows
    blank = 1 if work.world.shape.task == "sums" else 32
    prompts = {
        "other": np.roll(rows.prompts, 8, axis=0),
        "empty": np.full_like(rows.prompts, blank),
        "format": np.pad(rows.prompts[:, 2:], ((0, 0), (0, 2)), constant_values=blank),
    }[kind]
    rows.p = work.world.scored(rows, work.part(share), prompts, rows.tokens)


def rollout_raw_logprobs(work: Work) -> None:
    """Log what the engine had before temperature and truncation."""
    work.rows.q = np.where(work.which[:, None], work.rows.q_raw, work.rows.q)


def trainer_temperature(work: Work) -> None:
    """Leave the temperature out in the trainer."""
    rows, which = work.rows, work.which[:, None]
    rows.p = np.where(which, rows.p_raw, rows.p)
    rows.entropy = np.where(which, rows.entropy_raw, rows.entropy)


def truncated_sampling(work: Work, both_raw: bool = False) -> None:
    """Let the trainer score with its whole vocabulary what was sampled with top-p or top-k."""
    rows = work.rows
    rows.p = np.where(work.which[:, None], rows.p_full, rows.p)
    if both_raw:
        rows.q = np.where(work.which[:, None], rows.q_raw, rows.q)


def low_precision_storage(work: Work, grid: str, column: str = "q") -> None:
    """Round a column: to bf16, fp16, or so many decimals."""
    values = getattr(work.rows, column)
    if grid in ("bf16", "fp16"):
        dtype = torch.bfloat16 if grid == "bf16" else torch.float16
        rounded = torch.from_numpy(values).to(dtype).float().numpy()
    else:
        rounded = values.round(int(grid)).astype(np.float32)
    values[work.which] = rounded[work.which]


def group_fault(work: Work, base: str) -> None:
    """Let the responses of `which` come from another engine; they stand last thereafter.

    It missed a sync, or holds other weights, at the steps and the lag that all are said to have.
    """
    many = int(work.which.sum())
    other = work.world.rows(BASES[base])
    other = other.take(work.chance.permutation(len(other.group))[:many])
    other.group += work.rows.group.max() + 1
    other.trainer, other.lag = (x[work.which][: len(other.group)] for x in (work.rows.trainer, work.rows.lag))
    work.rows = Rows.joined([work.rows.take(~work.which), other])
    work.which = np.arange(len(work.which)) >= len(work.which) - many


def none(work: Work) -> None:
    """Change nothing: the mismatch is that of the engine."""


@dataclass(frozen=True)
class Kind:
    """A cause: how its fault is made, and how severely.

    Attributes:
        cause: its id, as the diagnosis should name it.
        make: the fault.
        severities: its arguments; every other one is in the second dumps.
        final: those of the final dumps, or () for those of the second.
        bases: how the responses it is made on are sampled.
        also: causes that are as right.
        host: whether it may be on one host only.
        columns: optional columns that it needs, True, or must not have, False; "zero" has 0 in all rows.
        tasks: tasks or kinds of models that it can be made on; empty: all.
        experts: only on models with experts, or only on those without.
        times: dumps for each severity.
    """

    cause: str
    make: Fault = none
    severities: tuple[tuple[Any, ...], ...] = ((), ())
    final: tuple[tuple[Any, ...], ...] = ()
    bases: tuple[str, ...] = (
        "bf16",
        "bf16",
        "fp16",
        "fp32",
        "fp8",
        "int8",
        "stale1",
        "T0.8",
        "run",
        "many",
        "long",
    )
    also: tuple[str, ...] = ()
    host: bool = False
    columns: dict[str, bool | str] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    experts: bool | None = None
    times: int = 5

    @classmethod
    def read(cls, row: dict[str, Any]) -> Kind:
        """Read from a row of plan.toml."""
        given = {name: _tuples(value) for name, value in row.items()}
        return cls(**given | {"make": globals()[row.get("make", "none")]})

    def of(self, split: str) -> tuple[tuple[Any, ...], ...]:
        """Return the severities of a split."""
        if split == "final" and self.final:
            return self.final
        return self.severities[split != "development" :: 2]

    @property
    def verdicts(self) -> tuple[str, ...]:
        """Return the verdicts that are right."""
        return ("healthy", "honest_mismatch") if self.cause in HONEST else ("bug",)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _base(row: dict[str, Any]) -> Base:
    """Read from a row of plan.toml."""
    given = {name: _tuples(value) for name, value in row.items()}
    how = {name: given.pop(name) for name in ("temperature", "top_p", "top_k") if name in given}
    return Base(how=Sampling(**how), **given)


HONEST = ("numerics", "moe_outliers", "quantized_rollout", "stale")
_PLAN = tomllib.loads((Path(__file__).parent / "plan.toml").read_text(encoding="utf-8"))
BASES = {name: _base(row) for name, row in _PLAN["bases"].items()}
FINAL_BASES: dict[str, str] = _PLAN["final_bases"]
"""Base → the one in its place in final dumps."""
KINDS = tuple(map(Kind.read, _PLAN["kinds"]))
PAIRS = tuple((row["base"], _tuples(row["faults"])) for row in _PLAN["pairs"])

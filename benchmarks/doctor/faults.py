"""Faults of logged log-probs, each made on real responses: what is wrong is known because it was done here.

A fault changes a copy of `Rows` in place, in the responses of `which` [S] only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.doctor.models import Sampling
from benchmarks.doctor.rollouts import Array, Base, Rows, World

Generator = np.random.Generator


@dataclass
class Work:
    """What a fault works on.

    Attributes:
        rows: the responses, to be changed.
        which: responses that the fault is in, [S] bool.
        chance: random numbers.
        world: the models, for what needs a forward.
    """

    rows: Rows
    which: Array
    chance: Generator
    world: World

    @property
    def tokens(self) -> Array:
        """[S, L] bool: tokens that count and that the fault may be in."""
        return self.rows.sampled & self.which[:, None]

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return self.world.task.vocabulary

    def some(self, share: float) -> Array:
        """Random tokens, at least 3, [S, L] bool."""
        chosen = self.tokens & (self.chance.random(self.rows.q.shape) < share)
        at = np.argwhere(self.tokens)
        for s, t in at[self.chance.integers(0, len(at), max(0, 3 - int(chosen.sum())))]:
            chosen[s, t] = True
        return chosen

    def part(self, share: float) -> Array:
        """Some of the responses of `which`, at least 2, [S] bool."""
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
    labels = {"group": rows.group, "step": rows.step, "all": np.zeros_like(rows.group)}[within]
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
    if kind == "offset":
        rows.q[np.isin(rows.tokens, chosen) & work.tokens] -= size
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
    """Let the responses of `which` come from another engine; they stand last thereafter."""
    many = int(work.which.sum())
    other = work.world.rows(BASES[base])
    other = other.take(work.chance.permutation(len(other.group))[:many])
    other.group += work.rows.group.max() + 1
    work.rows = Rows.joined([work.rows.take(~work.which), other])
    work.which = np.arange(len(work.which)) >= len(work.which) - many


def none(work: Work) -> None:
    """Change nothing: the mismatch is that of the engine."""


@dataclass(frozen=True)
class Kind:
    """One row of the table: a cause, how it is made, and how strongly.

    Attributes:
        cause: its id, as the diagnosis should name it.
        verdict: what the diagnosis should say; the first of several that are right.
        make: the fault.
        severities: its arguments; every other one is kept for the published figures.
        bases: names in `BASES` that it is made on.
        also: causes that are as right.
        host: whether it may be on one host only.
        part: whether it may be in a part of the responses only.
        columns: optional columns that it needs, True, or must not have, False; "zero" has 0 in all rows.
        tasks: tasks that it can be made on; empty: all.
        experts: only on models with experts, or only on those without.
        times: dumps for each severity, in the larger plan.
    """

    cause: str
    verdict: tuple[str, ...]
    make: Fault
    severities: tuple[tuple[Any, ...], ...]
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
    part: bool = False
    columns: dict[str, bool | str] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    experts: bool | None = None
    times: int = 5


BASES: dict[str, Base] = {
    **{one: Base(one) for one in ("bf16", "fp16", "fp32", "fp8", "int8", "int4")},
    **{f"T{t}": Base(how=Sampling(t)) for t in (0.6, 0.8, 1.2, 1.3)},
    **{f"top-p {p}": Base(how=Sampling(1.0, p)) for p in (0.9, 0.95, 0.99)},
    "top-k 20": Base(how=Sampling(1.0, 1.0, 20)),
    "T0.8, top-p 0.95": Base(how=Sampling(0.8, 0.95)),
    **{f"stale{lag}": Base(pairs=((lag, 0),)) for lag in (1, 2, 4, 8)},
    "stale2, fp8": Base("fp8", pairs=((4, 2),)),
    "T0.8, stale2": Base(how=Sampling(0.8), pairs=((4, 2),)),
    "run": Base(pairs=tuple((s, s) for s in range(8))),
    "run, fp8": Base("fp8", pairs=tuple((s, s) for s in range(8))),
    "lags": Base(pairs=tuple((s, s - lag) for s in (4, 6, 8) for lag in (0, 1, 2, 4)), rows=768),
    "frozen": Base(pairs=tuple((s, 0) for s in range(9)), rows=576),
    "frozen, fp8": Base("fp8", pairs=tuple((s, 0) for s in range(9)), rows=576),
    "tool": Base(inserts=True),
    "tool, fp8": Base("fp8", inserts=True),
    "many": Base(rows=3000, lengths=(8, 32)),
    "long": Base(rows=48, lengths=(600, 1200)),
    "window": Base(rows=256, lengths=(100, 240), kernel=("window", 80, 16)),
    "window 64": Base(rows=256, lengths=(100, 240), kernel=("window", 80, 48)),
    "stretch": Base(rows=256, lengths=(100, 240), kernel=("stretch", 64, 3.0)),
    "stretch 1.2": Base(rows=256, lengths=(100, 240), kernel=("stretch", 64, 1.2)),
    "reset": Base(rows=256, lengths=(100, 240), kernel=("reset", 80, 0.0)),
    "decay": Base(rows=256, lengths=(100, 240), kernel=("decay", 80, 0.9)),
}
"""Name → how responses are sampled."""

HONEST = ("healthy", "honest_mismatch")
MISMATCH = ("honest_mismatch", "healthy")
BUG = ("bug",)
PLAIN = (
    "bf16",
    "fp16",
    "fp32",
    "run",
    "T0.6",
    "T0.8",
    "T1.2",
    "T1.3",
    "top-p 0.9",
    "top-p 0.99",
    "T0.8, top-p 0.95",
)
ONCE: tuple[tuple[Any, ...], ...] = ((), ())

KINDS: tuple[Kind, ...] = (
    Kind("numerics", HONEST, none, ONCE, PLAIN, experts=False, times=36),
    Kind("numerics", HONEST, none, ONCE, ("tool", "many", "long", "top-k 20"), experts=False, times=16),
    Kind(
        "moe_outliers",
        MISMATCH,
        none,
        ONCE,
        ("bf16", "T0.8", "run", "many"),
        ("numerics",),
        experts=True,
        times=16,
    ),
    Kind(
        "quantized_rollout",
        MISMATCH,
        none,
        ONCE,
        ("fp8", "int4", "run, fp8", "tool, fp8"),
        experts=False,
        times=16,
    ),
    Kind("quantized_rollout", MISMATCH, none, ONCE, ("int8",), ("numerics",), experts=False, times=4),
    Kind(
        "quantized_rollout",
        MISMATCH,
        none,
        ONCE,
        ("fp8", "int4"),
        ("moe_outliers", "numerics"),
        experts=True,
        times=6,
    ),
    Kind("stale", MISMATCH, none, ONCE, ("lags",), columns={"policy_lag": True}, times=14),
    Kind(
        "stale",
        MISMATCH,
        none,
        ONCE,
        ("stale1", "stale2", "stale4", "stale8", "stale2, fp8", "T0.8, stale2"),
        ("quantized_rollout", "numerics", "moe_outliers"),
        times=16,
    ),
    Kind(
        "frozen_sync",
        MISMATCH,
        none,
        ONCE,
        ("frozen", "frozen, fp8"),
        ("stale",),
        columns={"step": True, "policy_lag": False},
        times=6,
    ),
    Kind(
        "frozen_sync",
        MISMATCH,
        none,
        ONCE,
        ("frozen",),
        ("stale",),
        columns={"step": True, "policy_lag": "zero"},
        times=4,
    ),
    Kind(
        "sentinel",
        BUG,
        sentinel,
        (
            (0.0, 0.01),
            (0.0, 0.003),
            (-9999.0, 0.003),
            (-100.0, 0.01),
            ("uniform", 0.01),
            ("uniform", 0.03),
            ("clamp", 0.03),
            ("clamp", 0.05),
            (0.0, 0.05, "p"),
            (-100.0, 0.003, "p"),
            (0.0, 0.003),
            (0.0, 0.02),
        ),
        host=True,
        times=4,
    ),
    Kind(
        "wrong_mask",
        BUG,
        wrong_mask,
        (("tool", "zero"), ("tool", "zero", 0.3), ("tool", "garbage"), ("tool", "garbage", 0.5)),
        ("tool", "tool, fp8"),
    ),
    Kind(
        "wrong_mask",
        BUG,
        wrong_mask,
        (("end", "zero", 0.5), ("end", "zero", 0.2)),
        ("bf16", "fp8", "stale1"),
        ("boundary",),
    ),
    Kind(
        "off_by_one",
        BUG,
        off_by_one,
        (
            (1,),
            (-1,),
            (-1, "p"),
            (1, "p"),
            (2,),
            (-2,),
            (3, "q", "zero"),
            (-3, "q", "edge"),
            (1, "q", "zero", 0.2),
            (-1, "q", "edge", 0.2),
        ),
        host=True,
        times=4,
    ),
    Kind(
        "row_permutation",
        BUG,
        row_permutation,
        (
            ("all",),
            ("group",),
            ("group", 0.3),
            ("all", 0.3),
            ("step",),
            ("step", 0.5),
            ("all", 0.1),
            ("group", 0.5),
        ),
        ("bf16", "fp16", "fp8", "T0.8", "run", "stale1", "many"),
        columns={"step": True, "group_id": True},
        times=4,
    ),
    Kind(
        "boundary",
        BUG,
        boundary,
        (("last",), ("last", 0.5), ("first",), ("first", 0.5), ("end",), ("end", 0.7)),
        host=True,
        times=6,
    ),
    Kind("boundary", BUG, boundary, (("after",), ("after", 0.7)), ("tool", "tool, fp8"), times=6),
    Kind(
        "special_token",
        BUG,
        special_token,
        (
            ("offset", 2.0),
            ("offset", 1.0),
            ("offset", 0.5),
            ("offset", 0.3),
            ("offset", 1.0, 2),
            ("offset", -0.5, 2),
            ("row", 0.3),
            ("row", 0.6),
        ),
        ("bf16", "fp16", "fp8", "int8", "T0.8"),
        columns={"token_ids": True},
        times=4,
    ),
    Kind(
        "retokenization",
        BUG,
        retokenization,
        (
            ("insert", 0.5),
            ("insert", 0.2),
            ("drop", 0.5),
            ("drop", 0.2),
            ("replace", 0.5),
            ("replace", 0.3),
            ("insert", 0.05),
            ("drop", 0.1),
        ),
        ("bf16", "fp16", "fp8", "int8", "T0.8", "run"),
        times=4,
    ),
    Kind(
        "wrong_context",
        BUG,
        wrong_context,
        (("other",), ("other", 0.3), ("empty",), ("empty", 0.5), ("format",), ("format", 0.3)),
        ("bf16", "fp16", "fp8", "T0.8", "run"),
        host=True,
    ),
    Kind(
        "long_context",
        BUG,
        none,
        ONCE,
        ("window", "window 64", "stretch", "stretch 1.2"),
        tasks=("attention",),
        times=8,
    ),
    Kind("long_context", BUG, none, ONCE, ("reset", "decay"), tasks=("recurrent",), times=8),
    Kind("rollout_raw_logprobs", BUG, rollout_raw_logprobs, ONCE, ("T0.6", "T0.8", "T1.2", "T1.3"), times=10),
    Kind(
        "trainer_temperature",
        BUG,
        trainer_temperature,
        ONCE,
        ("T0.6", "T0.8", "T1.2", "T1.3"),
        host=True,
        times=10,
    ),
    Kind(
        "truncated_sampling",
        BUG,
        truncated_sampling,
        ONCE,
        ("top-p 0.9", "top-p 0.95", "top-p 0.99", "top-k 20", "T0.8, top-p 0.95"),
        times=10,
    ),
    Kind(
        "truncated_sampling",
        BUG,
        truncated_sampling,
        ((True,), (True,)),
        ("top-p 0.9", "top-p 0.95"),
        ("rollout_raw_logprobs",),
        columns={"entropy": True},
        times=8,
    ),
    Kind(
        "low_precision_storage",
        BUG,
        low_precision_storage,
        (("bf16",), ("bf16", "p"), ("fp16",), ("fp16", "p"), ("3",), ("4",), ("4", "p"), ("3", "p")),
        times=4,
    ),
    Kind(
        "group_fault",
        BUG,
        group_fault,
        (("int4",), ("int4",), ("stale4",), ("stale2",), ("stale8",), ("fp8",)),
        ("bf16", "fp16", "run"),
        columns={"host": True},
        experts=False,
    ),
)

PAIRS: tuple[tuple[str, tuple[tuple[str, tuple[Any, ...]], ...]], ...] = (
    ("lags", (("boundary", ("last",)),)),
    ("fp8", (("sentinel", (0.0, 0.01)),)),
    ("fp8", (("sentinel", (-100.0, 0.01)),)),
    ("bf16", (("off_by_one", (1,)), ("low_precision_storage", ("bf16",)))),
    ("T0.8, stale2", (("trainer_temperature", ()),)),
    ("T0.6", (("rollout_raw_logprobs", ()), ("low_precision_storage", ("3",)))),
    ("bf16", (("boundary", ("last",)), ("sentinel", (0.0, 0.01)))),
    ("tool", (("wrong_mask", ("tool",)), ("off_by_one", (1, "q", "edge", 0.3)))),
    ("lags", (("special_token", ("offset", 1.0)),)),
    ("top-p 0.95", (("truncated_sampling", ()), ("sentinel", (-100.0, 0.01)))),
    ("int4", (("retokenization", ("insert", 0.3)),)),
    ("run", (("row_permutation", ("group", 0.3)), ("boundary", ("first",)))),
    ("bf16", (("wrong_context", ("other", 0.3)), ("sentinel", (-100.0, 0.01)))),
    ("lags", (("off_by_one", (-1, "q", "edge", 0.2)),)),
)
"""Two causes at once: a base that may be one of them, and faults."""

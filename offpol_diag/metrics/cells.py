"""Near tokens by cells: what a preset does to one token of a cell it does to all.

So a preset multiplies the sums of cells where rules or weights are of turns, or rules ask for the sign of A.
Most sequences are one cell: they have one turn or no rule tells their turns apart, and A has one sign or no
rule asks for it. Only the near tokens of the other sequences are summed once more, finer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, reduce

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.batch import FEW, Batch, Some, places
from offpol_diag.correction import beyond, by_turn, fails, seen, weigh_turns
from offpol_diag.metrics.doubts import inside
from offpol_diag.metrics.scene import Scene
from offpol_diag.metrics.signs import every
from offpol_diag.near import on_cells
from offpol_diag.presets import Policy, Preset, Reject
from offpol_diag.ratios import Level, Ratios


@dataclass(frozen=True)
class Cells:
    """Near tokens; what holds a row per sequence elsewhere holds one per cell here.

    Attributes:
        ratios: of these tokens, C cells.
        sequence: which each cell is of, [C].
        turn: which each cell is of, or any where all turns of the sequence are treated alike, [C].
        advantages: A of a token of each, [C]; where the signs of a sequence are treated alike, of any sign
            that is there.
        first: where in the batch a token of each cell is, [C]; None where no sign of A·Δ matters.
        there: cells that are looked at here, [C] bool; None for all.
        starts: where the cells of each sequence start, [S+1]; None where a cell is a sequence.
    """

    ratios: Ratios
    sequence: Tensor
    turn: Tensor
    advantages: Tensor
    first: Tensor | None = None
    there: Tensor | None = None
    starts: Tensor | None = None

    def of(self, flags: Level) -> Tensor:
        """What each cell's turn or sequence has, [C]."""
        return _taken(flags.values, self.turn if flags.per == "turn" else self.sequence)

    def pull(self, rule: Reject, policy: Policy) -> Tensor:
        """A of a token of each cell, times Δ where the rule asks for that, [C]."""
        if rule.advantage != "away":
            return self.advantages
        if self.first is None:
            return torch.zeros_like(self.advantages)
        own, first = self.ratios.of(policy), self.first
        whole = own.whole
        assert whole is not None
        return self.advantages * own.once("first", lambda: whole.delta[first])


def cells(scene: Scene, preset: Preset) -> tuple[Cells, ...]:
    """The near tokens as sequences, and, where some sequence is more than one cell, as finer cells.

    Presets that tell tokens apart by the same share them.
    """
    by = told_by(preset)
    return scene.once(("cells", by), lambda: _cells(scene, by))


@cache
def told_by(preset: Preset) -> frozenset[str]:
    """By what a preset tells near tokens apart: by `turn`, `sign` of A, or a numerator's sign of A·Δ."""
    of_rules = (_of_rule(rule, rule.policy or preset.policy) for rule in preset.reject if on_cells(rule))
    return frozenset(("turn",) if by_turn(preset.weight) else ()).union(*of_rules)


def _of_rule(rule: Reject, policy: Policy) -> tuple[str, ...]:
    of_turns = ("turn",) if rule.over == "segment" else ()
    of_signs = {"any": (), "away": (policy,)}.get(rule.advantage, ("sign",))
    return (*of_turns, *of_signs)


def passes(scene: Scene, preset: Preset, at: Cells) -> Tensor:
    """Which cells the rules on cells let through, [C] bool."""
    passed = torch.ones_like(at.sequence, dtype=torch.bool)
    for ratios, rule in _rules(scene, preset):
        above, below = (at.of(flags) for flags in beyond(ratios, rule))
        passed &= ~fails(rule, above, below, at.pull(rule, ratios.policy))
    return passed


def weights(scene: Scene, preset: Preset, at: Cells) -> Tensor | None:
    """The weights of the cells' turns, [C]; None where turns have none."""
    if not by_turn(preset.weight):
        return None
    return at.of(weigh_turns(scene.ratios(preset.policy), preset).final)


def _rules(scene: Scene, preset: Preset) -> Iterator[tuple[Ratios, Reject]]:
    """The preset's rules on cells, each with what it judges by."""
    ratios = scene.ratios(preset.policy)
    for at, rule in enumerate(preset.reject):
        if on_cells(rule):
            yield seen(ratios, replace(preset, reject=preset.reject[:at]), rule), rule


# ---------------------------------------------------------------- which sequences are more than one cell

Causes = Mapping[str, Tensor]
"""By what tokens are told apart, and in which sequences it matters, [S] bool."""


def _cells(scene: Scene, by: frozenset[str]) -> tuple[Cells, ...]:
    causes, batch = _causes(scene, by), scene.batch
    finer = reduce(Tensor.logical_or, causes.values(), torch.zeros_like(batch.lengths, dtype=torch.bool))
    close = scene.apart[1]
    whole = Cells(
        close,
        torch.arange(batch.sequences, device=finer.device),
        _first_turns(batch),
        _sign(scene),
        there=~finer,
    )
    if not bool(finer.any()):
        return (whole,)
    some = _of_sequences(close.batch, finer)
    return (whole, _fine(scene, causes, some)) if some.tokens else (whole,)


def _of_sequences(close: Batch, which: Tensor) -> Some:
    """The near tokens of some sequences [S] bool, told by all others if they are few."""
    assert isinstance(close, Some)
    rest = inside(~which, close.whole.cu_seqlens)
    if close.without is None or FEW * len(rest) > close.tokens:
        return close.whole.some(close.index[places(segments.spread(which, close.cu_seqlens))])
    sequence = torch.searchsorted(close.whole.cu_seqlens, close.without, right=True) - 1
    return close.whole.some(None, torch.cat((close.without[which[sequence]], rest)).sort().values)


def _first_turns(batch: Batch) -> Tensor:
    """The first turn of each sequence, or another one's of a sequence without tokens, [S]."""
    return batch.turns[:-1].clamp(max=max(len(batch.cu_runs) - 2, 0))


def _causes(scene: Scene, by: frozenset[str]) -> Causes:
    assert scene.near is not None
    found: dict[str, Tensor] = {}
    for preset in (one for one in scene.near.celled if told_by(one) == by):
        for cause, where in _of_preset(scene, preset):
            found[cause] = found[cause] | where if cause in found else where
    return found


def _of_preset(scene: Scene, preset: Preset) -> Iterator[tuple[str, Tensor]]:
    for ratios, rule in _rules(scene, preset):
        differs = _differs(scene, ratios, rule)
        yield from ((cause, differs) for cause in _of_rule(rule, ratios.policy))
    if by_turn(preset.weight):
        weight, turns = weigh_turns(scene.ratios(preset.policy), preset).final.values, scene.batch.turns
        yield "turn", segments.largest(weight, turns) > segments.smallest(weight, turns)


def _differs(scene: Scene, ratios: Ratios, rule: Reject) -> Tensor:
    """Sequences where the rule drops some turn, or some sign that is there, and not another one, [S] bool."""
    above, below = beyond(ratios, rule)
    dropped, left = [], []
    for sign, there in _present(scene, rule).items():
        failed = fails(rule, above.values, below.values, there.new_full((), sign, dtype=torch.float64))
        dropped.append(_any(failed, above, scene.batch) & there)
        left.append(_any(~failed, above, scene.batch) & there)
    return reduce(Tensor.logical_or, dropped) & reduce(Tensor.logical_or, left)


def _any(flags: Tensor, like: Level, batch: Batch) -> Tensor:
    """Sequences with a flag, or with one in some turn, [S] bool."""
    return segments.count(flags, batch.turns) > 0 if like.per == "turn" else flags


def _present(scene: Scene, rule: Reject) -> dict[float, Tensor]:
    """Which sequences have tokens of each sign of what a rule asks; of A·Δ any."""
    n = scene.batch.lengths
    if rule.advantage in ("any", "away"):
        return dict.fromkeys((0.0,) if rule.advantage == "any" else (1.0, 0.0), n > 0)
    found = every(scene)
    positive, negative = found["positive"], found["negative"]
    return {1.0: positive > 0, -1.0: negative > 0, 0.0: positive + negative < n}


def _sign(scene: Scene) -> Tensor:
    """A sign of A that is there in each sequence, [S] float64."""
    if scene.batch.advantages is None:
        return torch.zeros_like(scene.batch.lengths, dtype=torch.float64)
    found = every(scene)
    return (found["positive"] > 0).to(torch.float64) - (found["negative"] > 0).to(torch.float64)


# ---------------------------------------------------------------- their cells


def _fine(scene: Scene, causes: Causes, some: Some) -> Cells:
    """Near tokens of some sequences, told apart where it matters."""
    batch = scene.batch
    by = _by_turn if {*causes} == {"turn"} else _by_key
    tokens, (some, starts, turn) = some.tokens, by(scene, causes, some)
    sequence, first = torch.searchsorted(batch.turns, turn, right=True) - 1, some.nth(starts)
    rows = _rows(some, segments.sized(torch.cat((starts, starts.new_tensor([tokens]))), tokens), sequence)
    ratios = Ratios(rows, "rollout", scene.settled, whole=scene.ratios("rollout"), rows=sequence)
    every = torch.arange(batch.sequences + 1, device=first.device)
    a = batch.advantages
    return Cells(
        scene.own(ratios),
        sequence,
        turn,
        torch.zeros_like(turn, dtype=torch.float64) if a is None else a[first],
        first=first,
        starts=torch.searchsorted(sequence, every),
    )


Told = tuple[Some, Tensor, Tensor]
"""Tokens, cell by cell; where in them each cell starts; of which turn it is."""


def _by_turn(scene: Scene, causes: Causes, some: Some) -> Told:
    """Where only turns are told apart no token need be looked at."""
    runs, turns = _runs(some), _turns(scene.batch, causes)
    there = runs > 0
    begins, turns = (torch.cumsum(runs, 0) - runs)[there], turns[there]
    new = torch.cat((turns.new_ones(1, dtype=torch.bool), turns[1:] != turns[:-1]))
    return some, begins[new], turns[new]


def _by_key(scene: Scene, causes: Causes, some: Some) -> Told:
    key, codes = _keys(scene, causes, some)
    if codes > 1 and bool((key[1:] < key[:-1]).any()):
        order = torch.argsort(key, stable=True)
        some, key = Some.of(scene.batch, some.index[order]), key[order]
    starts = torch.cat((key.new_zeros(1), places(key[1:] != key[:-1]) + 1))
    return some, starts, key[starts] // codes


def _runs(some: Some) -> Tensor:
    """How many tokens of each turn of the batch there are, [R]."""
    return some.before(some.whole.cu_runs).diff()


def _turns(batch: Batch, causes: Causes) -> Tensor:
    """The turn of each turn; the first one of its sequence where turns do not matter, [R]."""
    own, counts = torch.zeros_like(batch.lengths, dtype=torch.bool), segments.lengths(batch.turns)
    if "turn" in causes:
        own = causes["turn"]
    first = torch.repeat_interleave(_first_turns(batch), counts)
    every = torch.arange(len(first), device=first.device)
    return torch.where(torch.repeat_interleave(own, counts), every, first)


def _keys(scene: Scene, causes: Causes, some: Some) -> tuple[Tensor, int]:
    """A number for each token, equal within a cell and rising with the turn; and how many a turn has."""
    batch = scene.batch
    runs, counts = _runs(some), segments.lengths(batch.turns)
    key = torch.repeat_interleave(_turns(batch, causes), runs)
    codes = 1
    for cause, where in causes.items():
        if cause != "turn" and bool(where.any()):
            at = torch.repeat_interleave(torch.repeat_interleave(where, counts), runs)
            key, codes = key * 3 + torch.where(at, _code(scene, cause, some.index), 0), codes * 3
    return key, codes


def _code(scene: Scene, cause: str, index: Tensor) -> Tensor:
    """0, 1 or 2 by the sign of A, or of A·Δ, [K]."""
    assert scene.batch.advantages is not None
    pull = scene.batch.advantages[index]
    if cause != "sign":
        pull = pull * scene.ratios(cause).delta[index]  # type: ignore[arg-type]
    return torch.sign(pull).to(torch.int64) + 1


def _rows(some: Some, offsets: Tensor, sequence: Tensor) -> Batch:
    """Cells as the rows of a batch."""
    return some.by(
        cu_seqlens=offsets,
        cu_runs=offsets,
        key=some.whole.key[sequence],
        masked=some.whole.masked[sequence],
        rewards=None,
        scalars={},
    )


def _taken(x: Tensor, at: Tensor) -> Tensor:
    """x at some places; zeros where there is no x, and so no token."""
    return x[at] if len(x) else x.new_zeros(len(at))

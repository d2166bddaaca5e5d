"""Which sums over near tokens power sums make: found once, by asking for them with series for tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.metrics.lines import End, Row, compiled
from offpol_diag.metrics.outcome import Outcome
from offpol_diag.metrics.polynomials import Untraced
from offpol_diag.metrics.powersums import PowerSums
from offpol_diag.metrics.scene import Scene
from offpol_diag.metrics.series import Line, Series, Space
from offpol_diag.presets import Policy
from offpol_diag.ratios import Ratios

Step = tuple[Policy, Callable[[Scene, Any], object]]
"""A numerator, and what asks near tokens' ratios of it for something."""


class Mixed(ValueError):
    """What is not made of values of one kind."""


@dataclass(frozen=True)
class Traced:
    """What steps ask of near tokens.

    Attributes:
        sums: those that power sums make.
        places: by numerator and key, what is kept there, with lines for numbers.
        lines: the lines of all places, in the order of the sums.
        rest: the steps that ask for something else as well.
    """

    sums: PowerSums
    places: dict[tuple[Policy, object], Any]
    lines: dict[Line, int]
    rest: tuple[Step, ...]

    @classmethod
    def of(cls, scene: Scene, close: Ratios, steps: Sequence[Step]) -> Traced:
        """Take every step with series in place of the tokens of `close`."""
        assert scene.near is not None
        ratios = symbolic(close, Space(scene.near.radius))
        known: dict[Line, Row | End] = {}
        rest = tuple(step for step in steps if not _follows(step, scene, ratios, known))
        places: dict[tuple[Policy, object], Any] = {}
        rows: dict[Line, Row | End] = {}
        for policy in dict.fromkeys(policy for policy, _ in steps):
            for key, value in ratios.of(policy).kept().items():
                found = _rows(value, known)
                if found:
                    places[policy, key] = value
                    rows |= found
        return cls(PowerSums(tuple(rows.values())), places, {line: at for at, line in enumerate(rows)}, rest)

    def found(self, batch: Batch) -> dict[Policy, dict[object, Any]]:
        """The sums of a batch of near tokens, by numerator and key."""
        values = self.sums.values(batch) if self.lines else []
        made: dict[Policy, dict[object, Any]] = {}
        for (policy, key), value in self.places.items():
            made.setdefault(policy, {})[key] = mapped(lambda line: values[self.lines[line]], [value])
        return made


def _follows(step: Step, scene: Scene, ratios: Ratios, known: dict[Line, Row | End]) -> bool:
    """Whether all that a step asks for is made of power sums; takes down how."""
    policy, make = step
    try:
        return bool(_rows(make(scene, ratios.of(policy)), known))
    except Untraced:
        return False


def _rows(value: object, known: dict[Line, Row | End]) -> dict[Line, Row | End]:
    """How the lines that a value is made of are made, then known; none where it is made of something else."""
    found = {}

    def take(line: object) -> object:
        if not isinstance(line, Line):
            raise Mixed
        if line not in known:
            known[line] = compiled(line)
        found[line] = known[line]
        return line

    try:
        mapped(take, [value])
    except (Mixed, Untraced):
        return {}
    return found


def mapped(make: Callable[..., object], values: Sequence[Any]) -> Any:
    """Values of one shape → one of that shape, each of its tensors or lines made of theirs."""
    first = values[0]
    if isinstance(first, Tensor | Line):
        return make(*values)
    if isinstance(first, dict):
        return {name: mapped(make, [x[name] for x in values]) for name in first}
    if isinstance(first, tuple):
        return tuple(mapped(make, column) for column in zip(*values, strict=True))
    if is_dataclass(first) and not isinstance(first, Outcome | Ratios):
        names = [field.name for field in fields(first)]
        kind: Any = type(first)
        return kind(**{name: mapped(make, [getattr(x, name) for x in values]) for name in names})
    raise Mixed


# ---------------------------------------------------------------- series in place of tokens


class _Whole:
    """All tokens of which some are near: of those there are no series."""

    def of(self, policy: Policy) -> _Whole:
        """Of another numerator."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise Untraced(name)


def symbolic(close: Ratios, space: Space) -> Ratios:
    """Ratios of near tokens whose columns are series."""
    batch, nothing = close.batch, torch.zeros(0)
    log = space.symbol(("log", "", ""))
    a = space.symbol(("", "A+", "")) - space.symbol(("", "A-", ""))
    columns: dict[str, Series] = {
        "rollout": log,
        "old": log + space.symbol(constant=0.0, x=1.0),
        "current": log + space.symbol(constant=0.0, y=1.0),
        "advantages": a,
        "entropy": space.symbol(("entropy", "", "")),
    }
    there: Any = {name: x for name, x in columns.items() if batch.has(name)}
    some = Batch(
        **there,
        cu_seqlens=space.offsets,
        cu_runs=torch.zeros(1),
        position=nothing,
        key=nothing,
        masked=nothing,
    )
    whole: Any = _Whole()
    return Ratios(some, close.policy, close.settled, whole=whole)

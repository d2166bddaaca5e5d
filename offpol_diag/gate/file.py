"""A file of bounds (TOML): read, every slip told at once, and spread out into bounds.

An override of some steps splits its bound: each part has a verdict of its own. Of overrides that hold for the
same step the last decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from offpol_diag.errors import GateFileError, did_you_mean
from offpol_diag.gate.baseline import Against
from offpol_diag.gate.bounds import Bound, Judge, Kind, Level, Span, Steps
from offpol_diag.gate.schema import TABLES, BaselineTable, BoundTable, Defaults, GateFile, Override
from offpol_diag.gate.tolerance import USUAL
from offpol_diag.wholefiles import MOST_TOML, toml
from offpol_diag.wholefiles import read as read_whole

FORM = "its form is that of docs/ci.md: a bound is a table [[bound]] with a name and max or min"


@dataclass(frozen=True)
class Gates:
    """What a file asks for.

    Attributes:
        bounds: in the order of the file.
        against: what is asked of the baseline, or None.
        result: the baseline it names, or None.
    """

    bounds: tuple[Bound, ...]
    against: Against | None = None
    result: Path | None = None


def read(path: Path) -> Gates:
    """Read a gate file.

    Raises:
        GateFileError: it cannot be read, is not TOML, holds no bound, or has slips in it (all are told).
    """
    table = _toml(path)
    try:
        found = GateFile.model_validate(table)
    except ValidationError as error:
        slips = [_told(detail, table) for detail in error.errors()]
        raise _refused(path, list(dict.fromkeys(slips))) from error
    slips = [*_own_slips(found), *_twice(found)]
    if slips:
        raise _refused(path, slips)
    if not found.bound and found.baseline is None:
        raise GateFileError(f"{path}: holds no bound", FORM)
    bounds = [
        one for at, row in enumerate(found.bound) for one in _spread(row, found.defaults, _place(path, at))
    ]
    baseline = found.baseline
    return Gates(
        tuple(bounds),
        _against(baseline, found.defaults) if baseline else None,
        path.parent / baseline.result if baseline and baseline.result else None,
    )


def _toml(path: Path) -> dict[str, Any]:
    try:
        return toml(read_whole(path, MOST_TOML).decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise GateFileError(f"{path}: no such file", "give a gate file, see docs/ci.md") from error
    except OSError as error:
        raise GateFileError(f"{path}: cannot be read ({error.strerror})", "give a gate file") from error
    except UnicodeDecodeError as error:
        raise GateFileError(f"{path}: not UTF-8 (byte {error.start})", FORM) from error
    except ValueError as error:
        raise GateFileError(f"{path}: not TOML: {error}", FORM) from error


def _place(path: Path, at: int) -> str:
    return f"{path.name}: [[bound]] {at + 1}"


def _refused(path: Path, slips: Sequence[str]) -> GateFileError:
    if len(slips) == 1:
        return GateFileError(f"{path}: {slips[0]}", FORM)
    return GateFileError(f"{path}: {len(slips)} slips", FORM, [f"{path}: {slip}" for slip in slips])


# ---------------------------------------------------------------- slips


def _told(detail: ErrorDetails, table: Mapping[str, Any]) -> str:
    """`[[bound]] 2 (k3), maxx: no such key; did you mean max?`."""
    *inside, last = detail["loc"] or ("",)
    if isinstance(last, int) or last == "[key]":
        key = str(inside[-2] if last == "[key]" else inside[-1]) if inside else ""
        where = inside[:-2] if last == "[key]" else inside[:-1]
        return f"{_where((*where, key), table)}: {_rule(detail, key, where)}"
    return f"{_where((*inside, last), table)}: {_rule(detail, str(last), inside)}"


def _where(loc: Sequence[int | str], table: Mapping[str, Any]) -> str:
    """The table and the key, as one finds them in the file."""
    head, *rest = loc
    if not rest:
        return str(head)
    if head != "bound" or not isinstance(rest[0], int):
        return f"[{head}] {'.'.join(map(str, rest))}"
    row = table["bound"][rest[0]]
    named = f" ({row['name']})" if isinstance(row, dict) and isinstance(row.get("name"), str) else ""
    return ", ".join([f"[[bound]] {rest[0] + 1}{named}", *_inner(rest[1:])])


def _inner(rest: Sequence[int | str]) -> Iterator[str]:
    words = list(rest)
    if words[:1] == ["override"] and len(words) > 1 and isinstance(words[1], int):
        yield f"override {words[1] + 1}"
        words = words[2:]
    if words:
        yield ".".join(map(str, words))


def _rule(detail: ErrorDetails, key: str, inside: Sequence[int | str]) -> str:
    kind, given = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        known = list(_table(inside).model_fields)
        return "; ".join(
            part
            for part in (f"no such key; the keys are {', '.join(known)}", did_you_mean(key, known))
            if part
        )
    if kind == "literal_error":
        words = str(detail["ctx"]["expected"]).replace("'", "")
        near = did_you_mean(given, words.split(" or ")) if isinstance(given, str) else ""
        return "; ".join(part for part in (f"{given!r} is not {words}", near) if part)
    if kind == "list_type" and key in ARRAYS:
        return f"it must be a list of tables: write {ARRAYS[key]}"
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    return RULES.get(kind, detail["msg"][:1].lower() + detail["msg"][1:])


ARRAYS = {"bound": "[[bound]]", "override": "[[bound.override]]"}
RULES = {
    "missing": "it is missing",
    "float_type": "it must be a number",
    "finite_number": "it must be finite",
    "string_type": "it must be a string",
    "string_too_short": "it is empty",
    "list_type": "it must be a list",
    "dict_type": "it must be a table",
    "model_type": "it must be a table",
}
"""pydantic's word for a slip → ours."""


def _table(inside: Sequence[int | str]) -> type[BaseModel]:
    words = [word for word in inside if isinstance(word, str)]
    return TABLES[words[-1]] if words else GateFile


def _own_slips(found: GateFile) -> list[str]:
    """What only a whole table can say."""
    return [
        f"[[bound]] {at} ({row.name}){f', {key}' if key else ''}: {rule}"
        for at, row in enumerate(found.bound, 1)
        for key, rule in row.slips()
    ]


def _twice(found: GateFile) -> list[str]:
    """Two bounds on the same thing, of which nobody could say which is meant."""
    seen: dict[object, int] = {}
    slips = []
    for at, row in enumerate(found.bound, 1):
        for kind in ("max", "min"):
            key = (row.name, kind, row.level or found.defaults.level, tuple(row.presets), row.steps)
            if getattr(row, kind) is not None and (first := seen.setdefault(key, at)) != at:
                slips.append(f"[[bound]] {at} ({row.name}), {kind}: [[bound]] {first} has one already")
    return slips


# ---------------------------------------------------------------- bounds


@dataclass(frozen=True)
class Values:
    """What holds for one part of a bound."""

    max: float | None
    min: float | None
    level: Level
    judge: Judge

    def over(self, row: Override) -> Values:
        """With what an override says."""
        return Values(
            self.max if row.max is None else row.max,
            self.min if row.min is None else row.min,
            row.level or self.level,
            row.judge or self.judge,
        )


def _spread(row: BoundTable, defaults: Defaults, source: str) -> Iterator[Bound]:
    for preset in row.presets or [""]:
        values = Values(row.max, row.min, row.level or defaults.level, row.judge or defaults.judge)
        rows = [one for one in row.override if not one.presets or preset in one.presets]
        for one in rows:
            values = values.over(one) if one.steps is None else values
        parts = _parts(row.steps or Span(), values, [one for one in rows if one.steps is not None])
        for steps, held in parts:
            number = f"{preset}.{row.name.number}" if preset else row.name.number
            yield from _bounds(row, number, held, steps, source)


def _parts(whole: Span, values: Values, rows: Sequence[Override]) -> list[tuple[Steps, Values]]:
    """The steps that no override holds for, and those of each, less those of the ones after it."""
    spans = [row.steps or Span() for row in rows]
    parts = [(Steps(whole, tuple(spans)), values)]
    for at, row in enumerate(rows):
        within = Span(max(whole.first, spans[at].first), min(whole.last, spans[at].last))
        if within.first <= within.last:
            parts.append((Steps(within, tuple(spans[at + 1 :])), values.over(row)))
    return parts


def _bounds(row: BoundTable, number: str, held: Values, steps: Steps, source: str) -> Iterator[Bound]:
    limits: tuple[tuple[Kind, float | None], ...] = (("max", held.max), ("min", held.min))
    note = " ".join(row.note.split())
    for kind, limit in limits:
        if limit is not None:
            yield Bound(number, kind, limit, row.name.over, held.level, held.judge, steps, source, note)


def _against(row: BaselineTable, defaults: Defaults) -> Against:
    return Against(
        only=tuple(row.only),
        presets=tuple(row.presets),
        default=row.tolerance or USUAL,
        tolerances=row.tolerances,
        level=row.level or defaults.level,
        judge=row.judge or defaults.judge,
    )

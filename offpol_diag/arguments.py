"""Checks of the arguments of Python functions, as the command line checks its options.

To check a further argument, add a row to `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

from offpol_diag.errors import UsageError, did_you_mean

LONGEST = 80
"""Maximum characters of a value in a message."""


class Rule(NamedTuple):
    """What an argument may be: a test of the value, and what to give instead, for people."""

    fits: Callable[[Any], bool]
    give: str


def require(**given: Any) -> None:
    """Check arguments by their names; those without a rule pass.

    Raises:
        UsageError: a value that the argument cannot have.
    """
    for name, value in given.items():
        rule = RULES.get(name)
        if rule and not rule.fits(value):
            raise UsageError(f"{name} cannot be {_shown(value)}", f"give {rule.give}")


def require_known(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Check the names of keyword arguments.

    Raises:
        UsageError: the function has no argument of this name.
    """
    names = list(known)
    for name in given:
        if name not in names:
            hint = did_you_mean(name, names) or f"there are {', '.join(names)}"
            raise UsageError(f"{function} has no argument {name!r}", hint)


def require_writable(name: str, path: Path) -> None:
    """Check that a file can be written at a path, as far as its folder says so.

    Raises:
        UsageError: it is a directory, or its folder does not exist.
    """
    try:
        folder, there = path.is_dir(), path.parent.is_dir()
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from error
    if folder:
        raise UsageError(f"{name}: {path} is a directory", "name a file in it")
    if not there:
        raise UsageError(f"{path}: its folder does not exist", f"make it first: mkdir -p {path.parent}")


def unwritable(path: str | Path, error: Exception) -> UsageError:
    """Return the error for a file that cannot be written."""
    why = getattr(error, "strerror", None) or error
    return UsageError(f"{path}: cannot be written ({why})", "choose another place")


def _shown(value: object) -> str:
    """Return a value for a message; of what is no plain value, its type."""
    if isinstance(value, Integral | Real | str | bytes | complex | list | tuple | Mapping | Path | None):
        text = repr(value)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
    return f"a {type(value).__name__}"


def _whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda x: type(x) is not bool and isinstance(x, Integral) and least <= int(x) <= most


def _optional(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: x is None or fits(x)


def _text(x: Any) -> bool:
    return isinstance(x, str)


def _texts(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str | bytes) and all(map(_text, x))


def _anything(x: Any) -> bool:
    return True  # the parser of bounds looks at it


def _number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def _path(x: Any) -> bool:
    return isinstance(x, str | Path) and str(x) not in ("", ".") and "\0" not in str(x)


def _mapping(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, Mapping) and all(map(_text, x)) and all(map(fits, x.values()))


MOST_SEED = 2**63 - 1
MOST_WORKERS = 9999
_NAMES = 'a list of names, such as ["{}"]'
_WORD = "a name, or None"
_FILE = "the path of a file, or None"
_COUNT = "a whole number from 1 on, or None"
_BOUNDS = 'a dict from names to numbers, such as {"k3": 0.002}, or None'

RULES: Mapping[str, Rule] = {
    "seed": Rule(_whole(0, MOST_SEED), f"a whole number from 0 to {MOST_SEED}"),
    "workers": Rule(
        _optional(_whole(1, MOST_WORKERS)),
        f"a number of processes from 1 to {MOST_WORKERS}, or None for as many as pay",
    ),
    "on_bad_row": Rule(lambda x: _text(x) and x in ("error", "skip"), '"error" or "skip"'),
    "columns": Rule(
        _optional(_mapping(_text)), 'a dict from our names to the dump\'s, such as {"rollout": "my_logps"}'
    ),
    "group_by": Rule(_texts, _NAMES.format("host")),
    "by_step": Rule(_texts, _NAMES.format("k3")),
    "engine": Rule(_text, '"local" or "ray"'),
    "device": Rule(lambda x: x is not None, '"auto", "cpu", "cuda" or "cuda:N"'),
    "progress": Rule(
        lambda x: x is None or x is False or callable(x),
        "a function of rows done and rows in all, or None or False for none",
    ),
    "batch_tokens": Rule(_optional(_whole(1, MOST_SEED)), _COUNT),
    "sequences": Rule(_optional(_path), _FILE),
    "tally": Rule(_optional(_path), _FILE),
    "gates": Rule(_optional(_path), _FILE),
    "baseline": Rule(_optional(_path), _FILE),
    "trainer": Rule(_optional(_text), _WORD),
    "preset": Rule(_optional(_text), _WORD),
    "which": Rule(_optional(_text), 'the name of a bound, such as "weight.upper", or None'),
    "at": Rule(
        _optional(lambda x: isinstance(x, Iterable) and not isinstance(x, str | bytes | Mapping)),
        "a list of thresholds, such as [1.5, 2, 3], or None",
    ),
    "keep": Rule(_optional(_number), "a share, such as 0.95, or None"),
    "max": Rule(_optional(_mapping(_anything)), _BOUNDS),
    "min": Rule(_optional(_mapping(_anything)), _BOUNDS),
    "point": Rule(lambda x: isinstance(x, bool), "True or False"),
    "fail_on": Rule(lambda x: _text(x) or _texts(x), '"bug", "cannot_tell" or "honest_mismatch"'),
    "tolerance": Rule(lambda x: _text(x) or _texts(x), '"10%", "k3=5%", or a list of them'),
    "only": Rule(lambda x: _text(x) or _texts(x), _NAMES.format("k3")),
    "presets": Rule(lambda x: _text(x) or _texts(x), _NAMES.format("token_is")),
    "micro_batch": Rule(_optional(_whole(1, MOST_SEED)), _COUNT),
    "dp": Rule(_optional(_whole(1, MOST_SEED)), _COUNT),
    "logged": Rule(
        lambda x: _logs(x) or (isinstance(x, list | tuple) and bool(x) and all(map(_logs, x))),
        "the path of a file or folder of curves, or a list of them",
    ),
}
"""Argument → what it may be."""


def _logs(x: Any) -> bool:
    return isinstance(x, str | Path) and str(x) != ""

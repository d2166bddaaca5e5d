"""A trainer's settings, flat dotted keys, as text in its own languages."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Literal, NoReturn

from offpol_diag.errors import ConfigError

Settings = dict[str, Any]
"""Key, with dots between the parts of its path, → value. Keys of a file of its own begin with `FILE/`."""
Language = Literal["yaml", "toml", "python", "flags", "hydra"]
Writers = Mapping[Language, Callable[[Settings], str]]
"""The languages that a trainer's settings are written in, the first one first."""
PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
"""Words that a YAML reader takes for something else than a string."""
SMALL, LARGE = 1e-3, 1e6


def number(value: float) -> str:
    """Format a float as the shortest text that every language here reads back as the same float.

    An exponent has a dot before it and a sign: YAML reads 1e-4 as a string, 1.0e-4 as a number.
    """
    if value == 0 or SMALL <= abs(value) < LARGE:
        return repr(float(value))
    exact = Decimal(repr(float(value)))
    mantissa = exact.scaleb(-exact.adjusted()).normalize()
    return f"{mantissa if '.' in str(mantissa) else f'{mantissa}.0'}e{exact.adjusted():+d}"


def inverse(bound: float) -> float:
    """1/bound, as the shortest number whose own inverse is the bound again: 1.001001001001001 → 0.999."""
    for digits in range(1, 18):
        result = float(f"{1 / bound:.{digits}g}")
        if result and math.isclose(1 / result, bound, rel_tol=4e-16):
            return result
    return 1 / bound


# ---------------------------------------------------------------- YAML


def yaml(settings: Settings) -> str:
    """Nested block mappings; strings that a reader could take for something else are quoted."""
    return "\n".join(_yaml(_nested(settings), 0))


def _nested(settings: Settings) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *path, last = key.split(".")
        place = tree
        for word in path:
            place = place.setdefault(word, {})
        place[last] = value
    return tree


def _yaml(tree: Mapping[str, Any], depth: int) -> Iterator[str]:
    pad = "  " * depth
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield f"{pad}{key}:"
            yield from _yaml(value, depth + 1)
        elif isinstance(value, list) and value:
            yield f"{pad}{key}:"
            yield from _items(value, depth + 1)
        else:
            yield f"{pad}{key}: {_scalar(value)}"


def _items(values: list[Mapping[str, Any]], depth: int) -> Iterator[str]:
    for value in values:
        lines = list(_yaml(value, depth + 1))
        yield "  " * depth + "- " + lines[0].lstrip()
        yield from lines[1:]


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return value if PLAIN.fullmatch(value) and value not in RESERVED else json.dumps(value)
    return _literal(value, {math.inf: ".inf", -math.inf: "-.inf"})


# ---------------------------------------------------------------- the others


def hydra(settings: Settings, added: str = "") -> str:
    """Overrides for a command line, quoted once for the shell and once for Hydra.

    Keys below `added` may be absent from the trainer's own YAML, so they are written with `++`.
    """
    lines = []
    for key, value in settings.items():
        sign = "++" if added and key.startswith(added) else ""
        text = _scalar(value).replace(".inf", "inf")
        lines.append(f"{sign}{key}='{text}'" if text.startswith('"') else f"{sign}{key}={text}")
    return " \\\n".join(lines)


def toml(settings: Settings) -> str:
    """Format the TOML table that all keys are in."""
    table = next(iter(settings)).rpartition(".")[0]
    lines = (f"{key.removeprefix(f'{table}.')} = {_literal(x)}" for key, x in settings.items())
    return "\n".join([f"[{table}]", *lines])


def flags(settings: Settings) -> str:
    """Format command-line flags, one per line; True is a flag without a value, a tuple several values."""
    lines = []
    for key, value in settings.items():
        values = () if value is True else value if isinstance(value, tuple) else (value,)
        lines.append(" ".join([f"--{key}", *(x if isinstance(x, str) else _literal(x) for x in values)]))
    return " \\\n".join(lines)


def python(name: str, settings: Settings) -> str:
    """Format a call of a class, or a dict, one setting per line."""
    called = name[:1].isupper()
    pair, first, last = ("    {}={},", f"{name}(", ")") if called else ('    "{}": {},', f"{name} = {{", "}")
    values = ((key, _literal(x) if isinstance(x, str | float) else repr(x)) for key, x in settings.items())
    return "\n".join([first, *(pair.format(*one) for one in values), last])


def _literal(value: Any, infinite: Mapping[float, str] = {math.inf: "inf"}) -> str:
    """Format a value as JSON does, but floats by `number`."""
    if isinstance(value, float):
        return infinite.get(value) or number(value)
    return json.dumps(value)  # null, true, false, whole numbers and [] are spelt as in YAML


def cannot(part: str) -> NoReturn:
    """Raise ConfigError, naming the part that the trainer cannot express."""
    raise ConfigError(part)


# ---------------------------------------------------------------- blocks


@dataclass(frozen=True)
class Form:
    """Settings as some versions of a trainer spell them.

    Attributes:
        settings: key → value.
        since: the first version known to read them; empty if only the newest was looked at.
        before: the first version that does not any more; empty if the newest does.
    """

    settings: Settings
    since: str = ""
    before: str = ""


@dataclass(frozen=True)
class Snippet:
    """A block of configuration to paste.

    Attributes:
        language: yaml, toml, python, flags (of a command line) or hydra (overrides on a command line).
        text: the block; empty if there is nothing to set.
        title: distinguishes blocks for the same versions: `as overrides`.
        file: name of the file it belongs in, if the trainer reads a fixed one.
        versions: the trainer's versions that accept it: `verl from 0.7.1`; empty if only one was looked at.
        current: whether the newest version accepts it.
    """

    language: Language
    text: str
    title: str = ""
    file: str = ""
    versions: str = ""
    current: bool = True


def blocks(name: str, writers: Writers, forms: Sequence[Form]) -> tuple[Snippet, ...]:
    """Return the forms in every language; `name` is the trainer's in headings, empty for none."""
    result = list[Snippet]()
    for form in forms:
        end = f", before {form.before}" if form.before else ""
        versions = f"{name} from {form.since}{end}" if name and form.since and form.settings else ""
        written = _written(writers, form.settings)
        result += [replace(one, versions=versions, current=not form.before) for one in written]
    return tuple(result)


def _written(writers: Writers, settings: Settings) -> Iterator[Snippet]:
    apart = {key: value for key, value in settings.items() if "/" in key}
    if apart:
        file = next(iter(apart)).partition("/")[0]
        yield Snippet("yaml", yaml({key.removeprefix(f"{file}/"): x for key, x in apart.items()}), file=file)
    own = {key: value for key, value in settings.items() if key not in apart}
    for at, (language, write) in enumerate(writers.items()):
        title = TITLES[language] if at else language if apart else ""
        yield Snippet(language, write(own) if own else "", title)


TITLES = {"yaml": "as YAML", "hydra": "as overrides"}
"""Title of a block that has the settings in a second language."""

"""A trainer's settings, flat dotted keys, as text in its own languages."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

Settings = dict[str, Any]
"""Key, with dots between the parts of its path, → value. Keys of a file of its own begin with `FILE/`."""
Language = Literal["yaml", "toml", "python", "flags", "hydra"]
PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
"""Words that a YAML reader takes for something else than a string."""
SMALL, LARGE = 1e-3, 1e6
"""Sizes between which a number is written without an exponent."""


@dataclass(frozen=True)
class Snippet:
    """A block of configuration to paste."""

    language: Language
    text: str  # empty if there is nothing to set
    title: str = ""  # distinguishes blocks for the same versions: `as overrides`
    file: str = ""  # name of the file it belongs in, if the trainer reads a fixed one
    versions: str = ""  # of the trainer that accept it: `verl from 0.7.1`; its name if none is known
    read: str = ""  # date and commit at which its keys were read


def snippets(settings: Settings, trainer: Mapping[str, Any], **facts: Any) -> Iterator[Snippet]:
    """Yield the settings in each language of a trainer's table, those of a file of its own first."""
    apart = {key: value for key, value in settings.items() if "/" in key}
    if apart:
        file = next(iter(apart)).partition("/")[0]
        text = yaml({key.removeprefix(f"{file}/"): value for key, value in apart.items()})
        yield Snippet("yaml", text, file=file, **facts)
    own = {key: value for key, value in settings.items() if key not in apart}
    for at, language in enumerate(trainer["write"]):
        title = {"yaml": "as YAML", "hydra": "as overrides"}[language] if at else language if apart else ""
        yield Snippet(language, WRITERS[language](own, trainer) if own else "", title, **facts)


def number(value: float) -> str:
    """Format a float as the shortest text that every language here reads back as the same float.

    An exponent has a dot before it and a sign: YAML reads 1e-4 as a string, 1.0e-4 as a number.
    """
    if value == 0 or SMALL <= abs(value) < LARGE:
        return repr(float(value))
    exact = Decimal(repr(float(value)))
    mantissa = exact.scaleb(-exact.adjusted()).normalize()
    return f"{mantissa if '.' in str(mantissa) else f'{mantissa}.0'}e{exact.adjusted():+d}"


def inverse(bound: float | None) -> float | None:
    """1/bound, as the shortest number whose own inverse is the bound again: 1.001001001001001 → 0.999."""
    if not bound:
        return None
    some = (float(f"{1 / bound:.{digits}g}") for digits in range(1, 18))
    return next((x for x in some if x and math.isclose(1 / x, bound, rel_tol=4e-16)), 1 / bound)


def literal(value: Any, infinite: str = "inf") -> str:
    """Format a value as JSON does, which is how YAML and TOML spell it, but floats by `number`."""
    if isinstance(value, float):
        return f"{'-' if value < 0 else ''}{infinite}" if math.isinf(value) else number(value)
    return json.dumps(value)


def yaml(settings: Settings, pad: str = "") -> str:
    """Nested block mappings; strings that a reader could take for something else are quoted."""
    branches: dict[str, Settings] = {}
    for key, value in settings.items():
        word, _, rest = key.partition(".")
        branches.setdefault(word, {})[rest] = value
    return "\n".join(
        f"{pad}{word}: {scalar(branch[''])}" if "" in branch else f"{pad}{word}:\n{yaml(branch, f'{pad}  ')}"
        for word, branch in branches.items()
    )


def scalar(value: Any, infinite: str = ".inf") -> str:
    """Format a value for YAML: 0.5_2 and true as texts are quoted, plain words are not."""
    if isinstance(value, str) and PLAIN.fullmatch(value) and value not in RESERVED:
        return value
    return literal(value, infinite)


def hydra(settings: Settings, added: str = "") -> str:
    """Overrides for a command line, quoted once for the shell and once for Hydra.

    Keys below `added` may be absent from the trainer's own YAML, so they are written with `++`.
    """
    lines = []
    for key, value in settings.items():
        sign, text = "++" if added and key.startswith(added) else "", scalar(value, "inf")
        lines.append(f"{sign}{key}='{text}'" if text.startswith('"') else f"{sign}{key}={text}")
    return " \\\n".join(lines)


def toml(settings: Settings) -> str:
    """Format the TOML table that all keys are in."""
    table = next(iter(settings)).rpartition(".")[0]
    lines = (f"{key.removeprefix(f'{table}.')} = {literal(value)}" for key, value in settings.items())
    return "\n".join([f"[{table}]", *lines])


def flags(settings: Settings) -> str:
    """Format command-line flags, one per line; True is a flag without a value, a tuple several values."""
    lines = []
    for key, value in settings.items():
        values = () if value is True else value if isinstance(value, tuple) else (value,)
        lines.append(" ".join([f"--{key}", *(x if isinstance(x, str) else literal(x) for x in values)]))
    return " \\\n".join(lines)


def python(name: str, settings: Settings) -> str:
    """Format a call of a class, or a dict, one setting per line."""
    called = name[:1].isupper()
    pair, first, last = ("    {}={},", f"{name}(", ")") if called else ('    "{}": {},', f"{name} = {{", "}")
    values = ((key, literal(x) if isinstance(x, str | float) else repr(x)) for key, x in settings.items())
    return "\n".join([first, *(pair.format(*one) for one in values), last])


WRITERS: Mapping[Language, Callable[[Settings, Mapping[str, Any]], str]] = {
    "yaml": lambda settings, trainer: yaml(settings),
    "hydra": lambda settings, trainer: hydra(settings, trainer.get("added", "")),
    "toml": lambda settings, trainer: toml(settings),
    "flags": lambda settings, trainer: flags(settings),
    "python": lambda settings, trainer: python(trainer["call"], settings),
}
"""Language → the function that writes settings in it, by what the trainer's table says of it."""

"""Settings as text: flat, dotted keys → YAML, TOML, Hydra overrides, flags, a Python call."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
"""Words that a YAML reader takes for something else than a string."""
SMALL, LARGE = 1e-3, 1e6

Settings = Mapping[str, Any]


def number(value: float) -> str:
    """The shortest text that reads back as this float, in every syntax here.

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
        found = float(f"{1 / bound:.{digits}g}")
        if found and math.isclose(1 / found, bound, rel_tol=4e-16):
            return found
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
    if isinstance(value, float):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value) or number(value)
    return json.dumps(value)  # null, true, false, whole numbers and [] are spelt alike


# ---------------------------------------------------------------- the others


def hydra(settings: Settings, added: str = "") -> str:
    """Overrides for a command line, quoted once for the shell and once for Hydra.

    Args:
        settings: dotted keys.
        added: keys below this one may be absent from the trainer's own YAML, so they are written with `++`.
    """
    return " \\\n".join(_override(key, value, added) for key, value in settings.items())


def _override(key: str, value: Any, added: str) -> str:
    sign = "++" if added and key.startswith(added) else ""
    text = _scalar(value).replace(".inf", "inf")
    return f"{sign}{key}='{text}'" if text.startswith('"') else f"{sign}{key}={text}"


def toml(table: str, settings: Settings) -> str:
    """One table."""
    return "\n".join([f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in settings.items())])


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return "inf" if value == math.inf else number(value)
    return json.dumps(value)


def flags(settings: Settings) -> str:
    """A line per flag, to stand in a command; True is a flag without a value, a tuple several values."""
    return " \\\n".join(" ".join([f"--{key}", *_arguments(value)]) for key, value in settings.items())


def _arguments(value: Any) -> list[str]:
    if value is True:
        return []
    values = value if isinstance(value, tuple) else (value,)
    return [number(one) if isinstance(one, float) and one != math.inf else str(one) for one in values]


def call(function: str, settings: Settings) -> str:
    """A call in Python, an argument per line."""
    return "\n".join(
        [f"{function}(", *(f"    {key}={_literal(value)}," for key, value in settings.items()), ")"]
    )


def mapping(name: str, settings: Settings) -> str:
    """A dict in Python."""
    items = (f'    "{key}": {_literal(value)},' for key, value in settings.items())
    return "\n".join([f"{name} = {{", *items, "}"])


def _literal(value: Any) -> str:
    return (
        number(value)
        if isinstance(value, float)
        else json.dumps(value)
        if isinstance(value, str)
        else repr(value)
    )

"""A trainer's settings as text, checked against what its configuration takes.

Settings are flat, dotted keys. `keys/` has one TOML file per trainer: its keys and values, in which versions,
and when they are read, each row with the file it was read from. A printed block is checked against it, as the
trainer would: a key that no version has, a value that its classes refuse and a key that would not be read are
errors, and the versions that take the block are its heading.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib import resources
from typing import Any

from offpol_diag.errors import ConfigError
from offpol_diag.trainers.config import Language, Snippet, cannot

PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
"""Words that a YAML reader takes for something else than a string."""
SMALL, LARGE = 1e-3, 1e6

Settings = Mapping[str, Any]


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
    """Format one TOML table."""
    return "\n".join([f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in settings.items())])


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return "inf" if value == math.inf else number(value)
    return json.dumps(value)


def flags(settings: Settings) -> str:
    """Format command-line flags, one per line; True is a flag without a value, a tuple several values."""
    return " \\\n".join(" ".join([f"--{key}", *_arguments(value)]) for key, value in settings.items())


def _arguments(value: Any) -> list[str]:
    if value is True:
        return []
    values = value if isinstance(value, tuple) else (value,)
    return [number(one) if isinstance(one, float) and one != math.inf else str(one) for one in values]


def call(function: str, settings: Settings) -> str:
    """Format a Python call, one argument per line."""
    return "\n".join(
        [f"{function}(", *(f"    {key}={_literal(value)}," for key, value in settings.items()), ")"]
    )


def mapping(name: str, settings: Settings) -> str:
    """Format a Python dict."""
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


# ---------------------------------------------------------------- what a configuration takes

KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "flag": (bool,),
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "pair": (tuple, list),
    "list": (tuple, list),
    "options": (str,),
    "null": (type(None),),
}


@dataclass(frozen=True)
class Key:
    """One key of a trainer's configuration, in some of its versions.

    Attributes:
        name: dotted, as it is written; `[]` stands for each item of a list.
        types: what it may be, by the names of `KINDS`.
        file: where it was read.
        since: the first version with it in this form; until: the last one.
        values: the only ones; empty where any of its type will do.
        default: what it is where nothing is said.
        above, least, below: bounds on a number.
    """

    name: str
    types: tuple[str, ...]
    file: str
    since: str = ""
    until: str = ""
    values: tuple[Any, ...] = ()
    default: Any = None
    above: float | None = None
    least: float | None = None
    below: float | None = None

    def slip(self, value: Any) -> str:
        """Return the trainer's objection to a value; "" if it is valid."""
        kinds = [kind for kind in self.types if isinstance(value, KINDS[kind])]
        if not kinds or (isinstance(value, bool) and not {"bool", "flag"} & set(self.types)):
            return f"it takes {' or '.join(self.types)}"
        several = value.split(",") if "options" in kinds else [value]
        if self.values and value is not None and any(one not in self.values for one in several):
            return f"it takes {', '.join(map(str, self.values))}"
        if isinstance(value, int | float) and not isinstance(value, bool):
            return "".join(f"it must be {word}" for word, fine in self._bounds(value) if not fine)
        return "it takes two numbers" if "pair" in kinds and len(value) != 2 else ""

    def _bounds(self, value: float) -> Iterator[tuple[str, bool]]:
        yield f"above {self.above}", self.above is None or value > self.above
        yield f"at least {self.least}", self.least is None or value >= self.least
        yield f"below {self.below}", self.below is None or value < self.below


@dataclass(frozen=True)
class Rule:
    """A condition under which a setting is read, or accepted.

    Attributes:
        when: key → the value that asks for it; "set" is any but null.
        need: key → the values of which it must have one.
        why: what happens otherwise.
        file: where it was read.
        since: the first version with it; until: the last one.
    """

    when: Mapping[str, Any]
    need: Mapping[str, tuple[Any, ...]]
    why: str
    file: str
    since: str = ""
    until: str = ""


@dataclass(frozen=True)
class Schema:
    """A trainer's configuration over its versions.

    Attributes:
        name: the trainer, as it writes itself.
        source: its repository and the commit of the newest version read.
        versions: where it changed, the oldest first: releases, or dates of changes between two of them.
        keys: name → its rows.
        rules: all of them.
    """

    name: str
    source: str
    versions: tuple[str, ...]
    keys: Mapping[str, tuple[Key, ...]]
    rules: tuple[Rule, ...]

    def slips(self, settings: Settings, version: str) -> list[str]:
        """List the objections of one version to these settings."""
        found: dict[str, None] = {}
        for given in scopes(settings):
            slips = ((name, value, self._slip(name, value, version)) for name, value in given.items())
            found |= {f"{name} = {_said(value)}: {slip}": None for name, value, slip in slips if slip}
            found |= dict.fromkeys(self._unmet(given, version))
        return list(found)

    def span(self, settings: Settings) -> tuple[int, int]:
        """The places in `versions` of the first and the last that take these settings, without a gap.

        Raises:
            ConfigError: none does.
        """
        fine = [not self.slips(settings, version) for version in self.versions]
        if not any(fine):
            cannot("; ".join(self.slips(settings, self.versions[-1])))
        last = max(i for i, one in enumerate(fine) if one)
        first = next(i for i in range(last + 1) if all(fine[i : last + 1]))
        return first, last

    def spelt(self, first: int, last: int) -> str:
        """A span as a heading says it: `verl from 0.6.1, before 0.7.1`; "" where there is only one."""
        if len(self.versions) == 1:
            return ""
        end = f", before {self.versions[last + 1]}" if last + 1 < len(self.versions) else ""
        return f"{self.name} from {self.versions[first]}{end}"

    def _slip(self, name: str, value: Any, version: str) -> str:
        rows = [key for key in self.keys.get(name, ()) if self._holds(key, version)]
        if not rows:
            return f"there is no such key in {self.name} {version}"
        slips = [key.slip(value) for key in rows]
        return "" if "" in slips else slips[0]

    def _unmet(self, given: Settings, version: str) -> Iterator[str]:
        for rule in self.rules:
            if self._holds(rule, version) and all(
                _is(self._value(given, key, version), want) for key, want in rule.when.items()
            ):
                for key, wanted in rule.need.items():
                    if not any(_is(self._value(given, key, version), want) for want in wanted):
                        yield f"{', '.join(rule.when)}: {rule.why}"

    def _value(self, given: Settings, name: str, version: str) -> Any:
        if name in given:
            return given[name]
        return next((key.default for key in self.keys.get(name, ()) if self._holds(key, version)), None)

    def _holds(self, row: Key | Rule, version: str) -> bool:
        at = self.versions.index
        return (not row.since or at(row.since) <= at(version)) and (
            not row.until or at(version) <= at(row.until)
        )


def _is(value: Any, want: Any) -> bool:
    if want == "set":
        return value is not None
    if want == "null":
        return value is None
    return bool(value == want) and isinstance(value, bool) == isinstance(want, bool)


def _said(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def scopes(settings: Settings) -> Iterator[dict[str, Any]]:
    """Return the settings, and again per item of a list of tables, with keys like `filters[].agg_type`."""
    yield dict(settings)
    for name, value in settings.items():
        for item in value if isinstance(value, list) else ():
            yield {**settings, **{f"{name}[].{key}": one for key, one in item.items()}}


@cache
def schema(trainer: str) -> Schema:
    """Return the schema of one trainer."""
    text = resources.files("offpol_diag.trainers").joinpath("keys", f"{trainer}.toml").read_text("utf-8")
    table = tomllib.loads(text)
    keys: dict[str, tuple[Key, ...]] = {}
    for row in table.get("key", ()):
        for name in row.pop("names"):
            one = Key(name, tuple(row["type"].split(" or ")), **_row(row, "type"))
            keys[name] = (*keys.get(name, ()), one)
    rules = (
        Rule(row["when"], {k: tuple(v) for k, v in row["need"].items()}, **_row(row, "when", "need"))
        for row in table.get("rule", ())
    )
    return Schema(table["name"], table["source"], tuple(table["versions"]), keys, tuple(rules))


def _row(row: Mapping[str, Any], *but: str) -> dict[str, Any]:
    """Return the remaining fields of a row, with text that stands for null as None."""
    rest = {key: value for key, value in row.items() if key not in but}
    if "values" in rest:
        rest["values"] = tuple(rest["values"])
    if rest.get("default") in ("null",):
        rest["default"] = None
    return rest


# ---------------------------------------------------------------- blocks


def block(
    trainer: str, language: Language, text: str, settings: Settings, title: str = "", file: str = ""
) -> Snippet:
    """A piece of text, with the versions that take its settings.

    Args:
        trainer: whose.
        language: of the text.
        text: as it is pasted.
        settings: all that is set together with it, as the table names it.
        title: what it is, beside its versions.
        file: the file it belongs in.

    Raises:
        ConfigError: no version takes them.
    """
    table = schema(trainer)
    first, last = table.span(settings)
    newest = len(table.versions) - 1
    versions = table.spelt(first, last) if settings else ""
    return Snippet(language, text, title, file, versions, (newest - last, newest - first))


def older(
    trainer: str, language: Language, text: str, settings: Settings, title: str = ""
) -> tuple[Snippet, ...]:
    """Return the block of an older spelling; nothing if no version accepts it."""
    try:
        return (block(trainer, language, text, settings, title),)
    except ConfigError:
        return ()


def yaml_and_hydra(trainer: str, settings: Settings, added: str = "") -> tuple[Snippet, ...]:
    """Return the settings as a YAML block and as command-line overrides."""
    return (
        block(trainer, "yaml", yaml(settings), settings),
        block(trainer, "hydra", hydra(settings, added), settings, "as overrides"),
    )

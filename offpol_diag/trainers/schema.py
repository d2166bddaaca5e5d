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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from importlib import resources
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
        default: what it is where nothing is set.
        above, least, below: bounds on a number.
    """

    name: str
    types: tuple[str, ...]
    file: str
    since: str = ""
    until: str = ""
    values: tuple[Any, ...] = ()
    default: Any = None
    above: float = -math.inf
    least: float = -math.inf
    below: float = math.inf

    def error(self, value: Any) -> str:
        """Return the trainer's objection to a value; "" if it is valid."""
        kinds = [kind for kind in self.types if isinstance(value, KINDS[kind])]
        if not kinds or (isinstance(value, bool) and not {"bool", "flag"} & set(self.types)):
            return f"it takes {' or '.join(self.types)}"
        several = value.split(",") if "options" in kinds else [value]
        if self.values and value is not None and any(one not in self.values for one in several):
            return f"it takes {', '.join(map(str, self.values))}"
        if isinstance(value, int | float) and not isinstance(value, bool):
            bounds = {
                f"above {self.above}": self.above == -math.inf or value > self.above,
                f"at least {self.least}": value >= self.least,
                f"below {self.below}": self.below == math.inf or value < self.below,
            }
            return "".join(f"it must be {word}" for word, holds in bounds.items() if not holds)
        return "it takes two numbers" if "pair" in kinds and len(value) != 2 else ""


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
    need: Mapping[str, Sequence[Any]]
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
        beyond: losses that no preset can be, each with the reason and the file.
    """

    name: str
    source: str
    versions: tuple[str, ...]
    keys: Mapping[str, tuple[Key, ...]]
    rules: tuple[Rule, ...]
    beyond: tuple[tuple[str, str, str], ...] = ()

    def errors(self, settings: Settings, version: str) -> list[str]:
        """List the objections of one version to these settings."""
        result: dict[str, None] = {}
        for scope in _scopes(settings):
            for name, value in scope.items():
                if error := self._error(name, value, version):
                    shown = str(value).lower() if value is None or isinstance(value, bool) else value
                    result[f"{name} = {shown}: {error}"] = None
            result |= dict.fromkeys(self._unmet(scope, version))
        return list(result)

    def span(self, settings: Settings) -> tuple[int, int]:
        """Return the places in `versions` of the first and last that accept the settings, without a gap.

        Raises:
            ConfigError: none does.
        """
        wrong = [self.errors(settings, version) for version in self.versions]
        last = max((at for at, errors in enumerate(wrong) if not errors), default=None)
        if last is None:
            cannot("; ".join(wrong[-1]))
        refused = (at for at in range(last, -1, -1) if wrong[at])
        return next(refused, -1) + 1, last

    def heading(self, first: int, last: int) -> str:
        """Return a span as a heading, `verl from 0.6.1, before 0.7.1`; "" if there is only one version."""
        if len(self.versions) == 1:
            return ""
        end = f", before {self.versions[last + 1]}" if last + 1 < len(self.versions) else ""
        return f"{self.name} from {self.versions[first]}{end}"

    def _error(self, name: str, value: Any, version: str) -> str:
        rows = [key for key in self.keys.get(name, ()) if self._holds(key, version)]
        if not rows:
            return f"there is no such key in {self.name} {version}"
        errors = [key.error(value) for key in rows]
        return "" if "" in errors else errors[0]

    def _unmet(self, scope: Settings, version: str) -> Iterator[str]:
        def holds(name: str, *wanted: Any) -> bool:
            rows = (key.default for key in self.keys.get(name, ()) if self._holds(key, version))
            value = scope[name] if name in scope else next(rows, None)
            return any(_is(value, want) for want in wanted)

        for rule in self.rules:
            if all(holds(*condition) for condition in rule.when.items()) and self._holds(rule, version):
                for key, wanted in rule.need.items():
                    if not holds(key, *wanted):
                        yield f"{', '.join(rule.when)}: {rule.why}"

    def _holds(self, row: Key | Rule, version: str) -> bool:
        at = self.versions.index
        return at(row.since or self.versions[0]) <= at(version) <= at(row.until or self.versions[-1])


def _is(value: Any, want: Any) -> bool:
    if want in ("set", "null"):
        return bool((value is None) == (want == "null"))
    return bool(value == want) and isinstance(value, bool) == isinstance(want, bool)


def _scopes(settings: Settings) -> Iterator[Settings]:
    """Yield the settings, and again per item of a list of tables, with keys like `filters[].agg_type`."""
    yield settings
    for name, value in settings.items():
        for item in value if isinstance(value, list) else ():
            yield {**settings, **{f"{name}[].{key}": one for key, one in item.items()}}


def cannot(part: str) -> NoReturn:
    """Raise ConfigError, naming the part that the trainer cannot express."""
    raise ConfigError(part)


@cache
def schema(trainer: str) -> Schema:
    """Return the schema of one trainer."""
    text = resources.files("offpol_diag.trainers").joinpath("keys", f"{trainer}.toml").read_text("utf-8")
    table = tomllib.loads(text)
    keys: dict[str, tuple[Key, ...]] = {}
    for row in table.get("key", ()):
        names, types = row.pop("names"), tuple(row.pop("type").split(" or "))
        default = row.pop("default", None)
        for name in names:
            one = Key(name, types, **row, default=None if default == "null" else default)
            keys[name] = (*keys.get(name, ()), one)
    rules = tuple(Rule(**row) for row in table.get("rule", ()))
    beyond = tuple((row["set"], row["why"], row["file"]) for row in table.get("beyond", ()))
    return Schema(table["name"], table["source"], tuple(table["versions"]), keys, rules, beyond)


# ---------------------------------------------------------------- blocks


@dataclass(frozen=True)
class Snippet:
    """A block of configuration to paste.

    Attributes:
        language: yaml, toml, python, flags (of a command line) or hydra (overrides on a command line).
        text: the block; empty if there is nothing to set.
        title: distinguishes blocks for the same versions: `as overrides`.
        file: name of the file it belongs in, if the trainer reads a fixed one.
        versions: the trainer's versions that accept it: `verl from 0.7.1`; empty if its table has only one.
        age: of the newest and the oldest of them, in changes of the trainer's keys; 0 is the current one.
    """

    language: Language
    text: str
    title: str = ""
    file: str = ""
    versions: str = ""
    age: tuple[int, int] = (0, 0)


def blocks(trainer: str, writers: Writers, forms: Sequence[Settings]) -> tuple[Snippet, ...]:
    """Return the forms that some version accepts, in every language; `forms` has the newest first.

    None of a form whose versions all accept a newer one.

    Raises:
        ConfigError: no version accepts any form.
    """
    table, result, refused = schema(trainer), list[Snippet](), list[ConfigError]()
    newest = len(table.versions) - 1
    for settings in forms:
        try:
            first, last = table.span(settings)
        except ConfigError as error:
            refused.append(error)
            continue
        age = newest - last, newest - first
        if all(newer.age[1] < age[1] for newer in result):
            versions = table.heading(first, last) if settings else ""
            result += [replace(one, versions=versions, age=age) for one in _written(writers, settings)]
    if not result:
        raise refused[0]
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

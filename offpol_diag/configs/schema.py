"""What each trainer's configuration takes: its keys and values, in which versions, and when they are read.

One TOML file per trainer in `keys/`, each row with the file it was read from. A printed block is checked
against it, as the trainer would: a key that no version has, a value that its classes refuse and a key that
would not be read are errors, and the versions that take the block are its heading.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from offpol_diag.configs import syntax
from offpol_diag.configs.config import Language, Snippet
from offpol_diag.configs.parts import cannot
from offpol_diag.errors import ConfigError

Settings = Mapping[str, Any]
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
        """What its class has against a value; "" for nothing."""
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
        """All that one version has against these settings."""
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
    """The settings, and again with each item of a list of tables, its keys as `filters[].agg_type`."""
    yield dict(settings)
    for name, value in settings.items():
        for item in value if isinstance(value, list) else ():
            yield {**settings, **{f"{name}[].{key}": one for key, one in item.items()}}


@cache
def schema(trainer: str) -> Schema:
    """The table of one trainer."""
    text = resources.files("offpol_diag.configs").joinpath("keys", f"{trainer}.toml").read_text("utf-8")
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
    """The rest of a row; text that stands for null is None."""
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
    """The same of an older spelling; nothing where no version takes it."""
    try:
        return (block(trainer, language, text, settings, title),)
    except ConfigError:
        return ()


def yaml_and_hydra(trainer: str, settings: Settings, added: str = "") -> tuple[Snippet, ...]:
    """The same settings as YAML and as overrides."""
    return (
        block(trainer, "yaml", syntax.yaml(settings), settings),
        block(trainer, "hydra", syntax.hydra(settings, added), settings, "as overrides"),
    )

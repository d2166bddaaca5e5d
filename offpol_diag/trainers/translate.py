"""A preset in a trainer's own keys: rows of the trainer's table take its parts, and none may be left.

A trainer is a table, `TRAINER.toml` beside this file. Its forms are the spellings that its keys have had,
the newest first. The rows of a form are tried in turn, each as often as it matches:

    policy, loss        the preset's, or lists of those allowed. A row with `loss` says the loss: one must,
                        and once one has, no other is tried.
    weight, rule, veto  the part's own fields with the values allowed: the row takes such a part, if no row
                        before has. `true` or `false`: the preset has one, or none.
    limits              expressions that must hold
    set                 what is set; an undefined value sets nothing. `PLACE.key` is below `prefix.PLACE` of
                        the form, and a key alone below its prefix "".
    clip = true         sets the clip of the loss by the form's `clip`, if it is not the default
    since, note         the version that knows these keys, if later than the form's; a remark
    cannot              why a preset with what the row takes is refused
    join, mirror        values of a row that matches again follow a comma; all keys so far are set below here

A text that begins with `= ` is an expression in Jinja's syntax of the `preset`, the parts taken, the
`settings` so far, the form's `maps` and FUNCTIONS. A row must look at each field of a part it takes that does
something, else it does not match: so nothing is dropped in silence. What no key says is in `guards`:

    clamp               bound on |log-ratio| before exp, in nats; without it there is none
    clamp_at, rule_at   whether that bound acts on each `token` or on the `aggregate` (the default), of a
                        weight and of a rejection
    unclamped           statistics of rejections without it
    denominator         which tokens the loss's denominator counts: `kept` or `all` (the default); "" where
                        that differs
    overflow            a sentence on ratios that float32 does not hold
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from offpol_diag.errors import ConfigError
from offpol_diag.presets import AGGREGATES, Clip, Preset, Reject, Veto, Weight, catalogue
from offpol_diag.presets import words as in_words
from offpol_diag.trainers import TRAINERS, table, trainer_named
from offpol_diag.trainers.writers import Settings, Snippet, inverse, number, snippets

Part = Weight | Reject | Veto
Table = Mapping[str, Any]
Match = tuple[Settings, list[Part], str]
KINDS = {"weight": Weight, "rule": Reject, "veto": Veto}
UNSET = frozenset({"safety", "safety_at", "overflow"})
"""Fields that no trainer has a key for: where they differ, a remark says so."""
IDLE = (1e-9, 1e9)
"""Bounds that a ratio whose logarithm is clamped to ±20 never reaches: e^20 = 4.9e8."""
DUAL = Clip().dual
"""The dual clip of presets by default: a guard, which is not set if the trainer has none."""
AT = {"token": "each token", "aggregate": "the aggregate"}
DENOMINATORS = {
    "all": "rejected tokens stay in the loss's denominator here; the preset takes them out",
    "kept": "rejected tokens leave the loss's denominator here; the preset leaves them in",
}


@dataclass(frozen=True)
class Config:
    """A preset, by name, in the syntax of a trainer, by name.

    Remarks are differences from the preset as it is computed here; never in bounds or in what is rejected.
    """

    preset: str
    trainer: str
    snippets: tuple[Snippet, ...]  # for the newest version first
    remarks: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the full text to paste; remarks and headings are `#` comments, valid in every language."""
        lines = [f"# {self.preset} for {self.trainer}", *(f"# {remark}" for remark in self.remarks)]
        for one in self.snippets:
            words = (one.file, one.versions, one.title, f"keys read at {one.read}")
            lines.append(f"\n# {', '.join(filter(None, words))}\n{one.text or '# nothing to set'}")
        return "\n".join(lines) + "\n"


def config_for(preset: Preset, trainer: str) -> Config:
    """Return the preset in the trainer's own syntax.

    Raises:
        ConfigError: the trainer cannot express it; the message names the part, the hint the nearest preset
            that it can express, and other trainers.
        UsageError: no such trainer.
    """
    name = trainer_named(trainer)
    try:
        return configured(preset, name)
    except ConfigError as error:
        near, able = nearest(preset, name), ", ".join(trainers_for(preset))
        hint = f"its config can be printed for {able}" if able else "no trainer's config can say it"
        hint = f"nearest: {near}; {hint}" if near else hint
        raise ConfigError(f"{name} cannot say {preset.name}: {error.message}", hint) from error


def trainers_for(preset: Preset, trainers: Iterable[str] = TRAINERS) -> tuple[str, ...]:
    """List the trainers that can express the preset."""
    result = []
    for name in trainers:
        with contextlib.suppress(ConfigError):
            configured(preset, name)
            result.append(name)
    return tuple(result)


def nearest(preset: Preset, trainer: str) -> str:
    """Return the preset with most of this one's parts, and no others, that the trainer can say; else ""."""

    def kinds(one: Preset) -> set[object]:
        weights = {(one.weight.over, one.weight.action, one.weight.normalize)} if one.weight else set()
        return weights | {(r.statistic, r.over, r.advantage) for r in one.reject} | {bool(one.veto)} - {False}

    own, some = kinds(preset), (one for one in catalogue.load().values() if one.policy == preset.policy)
    fewer = sorted(
        (one for one in some if kinds(one) and kinds(one) <= own), key=lambda one: -len(kinds(one))
    )
    return next((one.name for one in fewer if trainers_for(one, (trainer,))), "")


def configured(preset: Preset, trainer: str) -> Config:
    """Return the preset in each spelling that is shown, the newest first.

    A form with `generations` or `otherwise` is shown for presets of these, or where no newer form can say the
    preset; any, only for versions older than those of the forms before it.

    Raises:
        ConfigError: no form can express it; the message is the part that the newest cannot express.
    """
    own, found, refused, notes = table(trainer), list[Snippet](), list[ConfigError](), list[str]()
    oldest, newest = "", dict[str, Any]()
    for form in (own | one for one in own["form"]):
        asked = preset.generation in form.get("generations", ()) or (not found and form.get("otherwise"))
        if {"generations", "otherwise"} & form.keys() and not asked:
            continue
        try:
            settings, since, said = block(preset, form)
        except ConfigError as error:
            refused.append(error)
            continue
        if found and not (settings and as_numbers(since) < as_numbers(oldest)):
            continue
        newest, oldest, until = newest or form, since, form.get("until", "")
        span = f" from {since}" + f", before {until}" * bool(until) if since and settings else ""
        read = ", ".join(form["read"].split(maxsplit=1))
        found += snippets(settings, own, versions=own["name"] + span, read=read)
        notes += said
    if not found:
        raise refused[0]
    if "until" in newest:
        notes.append(f"{own['name']} from {newest['until']} cannot say this: {refused[0].message}")
    guards = {key: evaluated(value, {"preset": preset}) for key, value in newest.get("guards", {}).items()}
    notes += differences(preset, guards)
    return Config(preset.name, trainer, tuple(found), tuple(dict.fromkeys(filter(None, notes))))


def as_numbers(since: str) -> tuple[int, ...]:
    """Return a version, or a date, as numbers: 0.9.1 is before 0.10.2, and that before 2026-09."""
    return tuple(map(int, re.findall(r"\d+", since)))


def block(preset: Preset, form: Table) -> tuple[Settings, str, list[str]]:
    """Return the settings in one form, the first version that knows them, and remarks.

    Raises:
        ConfigError: no row takes a part, or the loss; the message names it.
    """
    every = parts(preset, form.get("bands", "keep"))
    left, settings, of_parts, with_loss = every, Settings(), set[str](), False
    since, notes = form.get("since", ""), list[str]()
    known = {**FUNCTIONS, **form.get("maps", {}), "preset": preset, "settings": settings}
    for row in form["row"]:
        while not (with_loss and "loss" in row) and (found := match(row, every, left, known)) is not None:
            made, taken, from_version = found
            again = of_parts & made.keys() if taken else set()
            first = next(iter(made), "")
            if again and (not row.get("join") or made[first] in settings[first].split(",")):
                raise ConfigError(f"{worded(taken[-1])} beside another of its kind")
            for key, value in made.items():
                settings[key] = f"{settings[key]},{value}" if key in again else value
            settings |= clip(preset, form["clip"]) if row.get("clip") else {}
            if "mirror" in row:
                settings |= {row["mirror"] + key: value for key, value in settings.items() if "." not in key}
            since = max(since, from_version, key=as_numbers)
            notes.append(row.get("note", ""))
            with_loss = with_loss or "loss" in row
            if not taken:
                break
            left = [one for one in left if all(one is not part for part in taken)]
            of_parts |= made.keys()
    if left or not with_loss:
        raise ConfigError(worded(left[0]) if left else f"its loss, {in_words.loss(preset)}")
    known["idle"] = any(isinstance(value, float) and value in IDLE for value in settings.values())
    notes += [one["text"] for one in form.get("notes", ()) if evaluated(one.get("when", True), known)]
    notes.append(dual_clip(preset, form["clip"]) if "clip" in form else "")
    whole, prefixes = Settings(), form["prefix"]
    for key, value in settings.items():
        place, dot, rest = key.partition(".")
        below = prefixes[place] + rest if dot and place in prefixes else prefixes.get("", "") + key
        whole[below] = value
    return whole, since, notes


def parts(preset: Preset, bands: str) -> list[Part]:
    """Return the parts of a preset in the one spelling that a form has for a ratio inside a band.

    `split`: a weight that masks is the raw ratio beside a rule with its bounds. `mask`: a weight that is the
    raw ratio within the bounds of a rule over the same is a weight that masks. `keep`: as it stands.
    """
    weight, rules = preset.weight, list(preset.reject)
    if weight is not None and weight.action == "none":
        weight = replace(weight, lower=None, upper=None)
    if weight is not None and not weight.normalize:
        rule = next((one for one in rules if within(one, weight)), None)
        if bands == "split" and weight.action == "mask":
            rules.insert(0, Reject("ratio", weight.over, weight.lower, weight.upper))
            weight = replace(weight, action="none", lower=None, upper=None)
        elif bands == "mask" and rule is not None:
            rules.remove(rule)
            weight = replace(weight, action="mask", lower=rule.lower, upper=rule.upper)
    return [part for part in (weight, *rules, preset.veto) if part is not None]


def within(rule: Reject, weight: Weight) -> bool:
    """Return whether a rule on the weight's own ratio keeps only what the weight does not change."""
    if (rule.statistic, rule.over, rule.advantage) != ("ratio", weight.over, "any"):
        return False
    high = weight.upper is None or (rule.upper is not None and rule.upper <= weight.upper)
    low = weight.lower is None or (rule.lower is not None and rule.lower >= weight.lower)
    return weight.action == "none" or (weight.action == "truncate" and high and low)


def match(row: Table, every: Sequence[Part], left: Sequence[Part], known: Table) -> Match | None:
    """Return what a row sets, the parts of those `left` that it takes, and the first version of its keys.

    None where the row does not match.

    Raises:
        ConfigError: it matches what the trainer cannot say.
    """
    from jinja2 import Undefined  # here: a saved result is judged without it

    def fits(wanted: Table, one: object) -> bool:
        return all(getattr(one, key) in (x if isinstance(x, list) else [x]) for key, x in wanted.items())

    if not fits({key: row[key] for key in ("policy", "loss") if key in row}, known["preset"]):
        return None
    taken: dict[str, Read] = {}
    for kind, of in KINDS.items():
        wanted, some = row.get(kind), [part for part in every if isinstance(part, of)]
        if isinstance(wanted, bool) and wanted != bool(some):
            return None
        if isinstance(wanted, Mapping):
            part = next((one for one in left if isinstance(one, of) and fits(wanted, one)), None)
            if part is None:
                return None
            taken[kind] = Read(part, set(wanted))
    names = {**known, **taken}
    if not all(evaluated(limit, names) for limit in row.get("limits", ())):
        return None
    if "cannot" in row:
        raise ConfigError(row["cannot"])
    made = {key: evaluated(value, names) for key, value in row.get("set", {}).items()}
    if any(one.ignored() for one in taken.values()):
        return None
    made = {key: value for key, value in made.items() if not isinstance(value, Undefined)}
    since = evaluated(row.get("since", ""), names) or ""
    return made, [one.part for one in taken.values()], str(since)


class Read:
    """A part as expressions see it, which remembers the fields that they read."""

    def __init__(self, part: Part, read: set[str]) -> None:
        self.part, self._read = part, read

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        return getattr(self.part, name)

    def ignored(self) -> set[str]:
        """Return the fields that do something and that the row has not looked at."""
        values = {one.name: getattr(self.part, one.name) for one in fields(self.part)}
        doing = {name for name, value in values.items() if value not in (None, False, "any")}
        return doing - self._read - UNSET


def worded(part: Part) -> str:
    """Name a part of a preset by its formula."""
    if isinstance(part, Weight):
        return f"the weight {in_words.weight(part)}"
    if isinstance(part, Reject):
        return f"the rule that keeps {in_words.rejection((part,))}"
    return f"the veto on {in_words.veto(part)}"


def clip(preset: Preset, keys: Table) -> Settings:
    """Return the clip of the loss where it is not the trainer's default; no lower bound is 1, as r > 0.

    Raises:
        ConfigError: the ratio has no upper clip, which no trainer can express.
    """
    own, result = preset.clip, Settings()
    if preset.loss in ("reinforce", "surrogate"):
        return result
    if own.high is None:
        raise ConfigError("a ratio that the loss does not clip from above")
    bounds = (1.0 if own.low is None else own.low, own.high)
    if list(bounds) != keys["default"]:
        pair = zip((keys["low"], keys["high"]), bounds, strict=True) if "low" in keys else ()
        result = dict(pair) or {keys["pair"]: bounds}
    if "dual" in keys and preset.loss != "cispo" and own.dual not in (None, DUAL):
        result[keys["dual"]] = own.dual
    return result


def dual_clip(preset: Preset, keys: Table) -> str:
    """Return a remark on the dual clip if the trainer's differs from the preset's, else ""."""
    bound, own = preset.clip.dual, keys.get("dual_default")
    if preset.loss != "ppo_clip" or (bound is None) == (own is None):
        return ""
    if bound is None:
        return f"dual clip: at most -{own:g} A here where A < 0, which the preset has not"
    if "dual" in keys and bound != DUAL:  # then it is set
        return ""
    needed = keys.get("dual_set", f"{keys.get('dual')} is {{:g}}").format(bound)
    unless = f" unless {needed}" if "dual" in keys else ""
    return f"no dual clip here{unless}; the preset bounds the loss at -{bound:g} A where A < 0"


def differences(preset: Preset, guards: Table) -> Iterator[str]:
    """Yield a sentence for each difference between a form's guards and the preset's."""
    weights: list[Weight | Reject] = [preset.weight] if preset.weight else []
    for part in [*weights, *preset.reject]:
        what, key, statistic = "weight", "clamp_at", "ratio"
        if isinstance(part, Reject):
            what, key, statistic = "rejection", "rule_at", part.statistic
        bound = None if statistic in guards.get("unclamped", ()) else guards.get("clamp")
        here, there = ("not clamped" if x is None else f"clamped to ±{x:g}" for x in (bound, part.safety))
        place, own = (AT[at] for at in (guards.get(key, "aggregate"), part.safety_at))
        if here != there:
            yield f"the log-ratio of the {what} is {here} here before exp; in the preset {there}"
        elif bound is not None and statistic in AGGREGATES and part.over != "token" and place != own:
            yield f"the clamp of the {what} acts on {place} here, in the preset on {own}"
    if preset.weight is not None:
        yield guards.get("overflow", "")
    denominator = guards.get("denominator", "all")
    if (preset.reject or preset.veto) and denominator not in ("", preset.denominator):
        yield DENOMINATORS[denominator]


FUNCTIONS: Mapping[str, Any] = {
    "num": number,
    "inv": inverse,
    "exp": lambda bound: None if bound is None else math.exp(bound),
    "short": lambda value: float(f"{value:.15g}"),  # 1 − 0.2 is 0.8 there, and 1.2 − 1 is 0.2
    "inf": math.inf,
}
"""What expressions may use besides Jinja's own."""


@cache
def compiled(text: str) -> Any:
    """Compile an expression, which gives jinja2's `Undefined` where a name is not defined."""
    from jinja2 import Environment

    return Environment(autoescape=False).compile_expression(text, undefined_to_none=False)


def evaluated(value: Any, names: Mapping[str, Any]) -> Any:
    """Return a value of a table: an expression's, None for "null", and any other as it stands."""
    if isinstance(value, str) and value.startswith("= "):
        return compiled(value[2:])(**names)
    return None if value == "null" else value

"""Print a preset in a trainer's own keys.

A trainer is a table, `TRAINER.toml` beside this file. Each of its forms is a spelling that its keys have had,
the newest first. A preset has parts: a weight, rejection rules, a veto. The rows of a form are tried in turn,
each as often as it matches; a row that matches takes the parts it names and sets keys:

    policy, loss        the preset's, or lists of those allowed. A row with `loss` settles the loss: one must,
                        and once one has, no other is tried.
    weight, rule, veto  fields with the values allowed: the row takes a part of that kind which has them and
                        which no row before has taken. `true` or `false`: the preset has such a part, or none.
    limits              expressions that must hold
    set                 keys and their values; an undefined value sets nothing. `PLACE.key` is written below
                        `prefix.PLACE` of the form, and a key alone below its prefix "".
    clip = true         sets the clip of the loss by the form's `clip`, if it is not the trainer's default
    since, note         the version that knows these keys, if later than the form's; a remark
    cannot              why a preset with the parts that the row takes is refused
    join                values of a row that matches again are appended after a comma
    mirror              all keys so far but those with a dot are set below this prefix, too

A text that begins with `= ` is an expression in Jinja's syntax of the `preset`, the parts that the row takes,
the `settings` so far, the form's `maps` and FUNCTIONS. Nothing is dropped in silence: a part that no row
takes refuses the preset, and a row takes a part only if it names each of its fields that has an effect.
What the trainer does and has no key for is in `guards`; where the preset differs, a remark says so:

    clamp               bound on |log-ratio| before exp, in nats; without it there is none
    clamp_at, rule_at   whether that bound acts on each `token` or on the `aggregate` (the default), of a
                        weight and of a rejection
    unclamped           statistics of rejections that are not clamped
    denominator         which tokens the loss's denominator counts: `kept` or `all` (the default); "" where
                        that differs
    overflow            a sentence on ratios that float32 cannot hold
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple

from offpol_diag.errors import ConfigError
from offpol_diag.presets import AGGREGATES, Clip, Preset, Reject, Veto, Weight, catalogue
from offpol_diag.presets import words as in_words
from offpol_diag.trainers import TRAINERS, table, trainer_named
from offpol_diag.trainers.writers import Settings, Snippet, inverse, number, snippets

Part = Weight | Reject | Veto
Table = Mapping[str, Any]
KINDS = {"weight": Weight, "rule": Reject, "veto": Veto}
"""Key of a row → the kind of part that it takes."""
NO_KEY = frozenset({"safety", "safety_at", "overflow"})
"""Fields that no trainer has a key for; `guards` says what it does instead."""
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
        for snippet in self.snippets:
            heading = (snippet.file, snippet.versions, snippet.title, f"keys read at {snippet.read}")
            lines.append(f"\n# {', '.join(filter(None, heading))}\n{snippet.text or '# nothing to set'}")
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
        nearest, able = nearest_preset(preset, name), ", ".join(trainers_for(preset))
        hint = f"its config can be printed for {able}" if able else "no trainer's config can express it"
        hint = f"nearest: {nearest}; {hint}" if nearest else hint
        raise ConfigError(f"{name} cannot express {preset.name}: {error.message}", hint) from error


def trainers_for(preset: Preset, trainers: Iterable[str] = TRAINERS) -> tuple[str, ...]:
    """List the trainers that can express the preset."""
    able = []
    for name in trainers:
        with contextlib.suppress(ConfigError):
            configured(preset, name)
            able.append(name)
    return tuple(able)


def nearest_preset(preset: Preset, trainer: str) -> str:
    """Return the preset with most of this one's parts, and no others, that the trainer can say; else ""."""

    def kinds(one: Preset) -> set[object]:
        weights = {(one.weight.over, one.weight.action, one.weight.normalize)} if one.weight else set()
        rules = {(rule.statistic, rule.over, rule.advantage) for rule in one.reject}
        return {*weights, *rules, *(["veto"] if one.veto else [])}

    parts = {one: kinds(one) for one in catalogue.load().values() if one.policy == preset.policy}
    fewer = [one for one in parts if parts[one] and parts[one] <= kinds(preset)]
    fewer.sort(key=lambda one: -len(parts[one]))
    return next((one.name for one in fewer if trainers_for(one, (trainer,))), "")


def configured(preset: Preset, trainer: str) -> Config:
    """Return the preset in each spelling that is shown, the newest first.

    A form with `generations` is shown for presets of these alone, one with `otherwise` also where no newer
    form can express the preset. After the first, a form must set keys, and start at an older version.

    Raises:
        ConfigError: no form can express it; the message is the part that the newest cannot express.
    """
    trainer_table = table(trainer)
    blocks, refusals, remarks = list[Snippet](), list[ConfigError](), list[str]()
    newest, oldest = dict[str, Any](), ""  # the first form that is shown; the first version of the last one
    for form in (trainer_table | one for one in trainer_table["form"]):
        if {"generations", "otherwise"} & form.keys():
            needed = form.get("otherwise") and not blocks
            if not needed and preset.generation not in form.get("generations", ()):
                continue
        try:
            settings, since, notes = block(preset, form)
        except ConfigError as error:
            refusals.append(error)
            continue
        if blocks and not (settings and as_numbers(since) < as_numbers(oldest)):
            continue
        newest, oldest, until = newest or form, since, form.get("until", "")
        span = f" from {since}" + f", before {until}" * bool(until) if since and settings else ""
        read = ", ".join(form["read"].split(maxsplit=1))
        blocks += snippets(settings, form, versions=form["name"] + span, read=read)
        remarks += notes
    if not blocks:
        raise refusals[0]
    if "until" in newest:
        remarks.append(f"{newest['name']} from {newest['until']} cannot express this: {refusals[0].message}")
    guards = {key: evaluated(value, {"preset": preset}) for key, value in newest.get("guards", {}).items()}
    remarks += differences(preset, guards)
    return Config(preset.name, trainer, tuple(blocks), tuple(dict.fromkeys(filter(None, remarks))))


def as_numbers(version: str) -> tuple[int, ...]:
    """Return a version, or a date, as numbers: 0.9.1 is before 0.10.2, and that before 2026-09."""
    return tuple(map(int, re.findall(r"\d+", version)))


def block(preset: Preset, form: Table) -> tuple[Settings, str, list[str]]:
    """Return the settings in one form, the first version that knows them, and remarks.

    Raises:
        ConfigError: no row takes a part, or the loss; the message names it.
    """
    parts = spelled(preset, form.get("bands", "keep"))
    left, settings, by_parts, has_loss = parts, Settings(), set[str](), False
    since, notes = form.get("since", ""), list[str]()
    names = {**FUNCTIONS, **form.get("maps", {}), "preset": preset, "settings": settings}
    for row in form["row"]:
        while not (has_loss and "loss" in row) and (found := match(row, parts, left, names)) is not None:
            repeated = by_parts & found.settings.keys() if found.taken else set()
            first = next(iter(found.settings), "")
            if repeated and not ("join" in row and found.settings[first] not in settings[first].split(",")):
                raise ConfigError(f"{worded(found.taken[-1])} beside another of its kind")
            for key, value in found.settings.items():
                settings[key] = f"{settings[key]},{value}" if key in repeated else value
            if row.get("clip"):
                settings |= clip_settings(preset, form["clip"])
            if "mirror" in row:
                settings |= {row["mirror"] + key: value for key, value in settings.items() if "." not in key}
            since = max(since, found.since, key=as_numbers)
            notes.append(row.get("note", ""))
            has_loss = has_loss or "loss" in row
            if not found.taken:
                break  # nothing is used up, so it would match forever
            left = [part for part in left if all(part is not one for one in found.taken)]
            by_parts |= found.settings.keys()
    if left or not has_loss:
        raise ConfigError(worded(left[0]) if left else f"its loss, {in_words.loss(preset)}")
    names["idle"] = any(isinstance(value, float) and value in IDLE for value in settings.values())
    notes += [one["text"] for one in form.get("notes", ()) if evaluated(one.get("when", True), names)]
    notes.append(dual_clip(preset, form["clip"]) if "clip" in form else "")
    return {full_key(key, form["prefix"]): value for key, value in settings.items()}, since, notes


def full_key(key: str, prefixes: Mapping[str, str]) -> str:
    """Return a key of a row with its prefix: `ACTOR.clip` below that of ACTOR, any other below that of ""."""
    place, dot, rest = key.partition(".")
    return prefixes[place] + rest if dot and place in prefixes else prefixes.get("", "") + key


def spelled(preset: Preset, bands: str) -> list[Part]:
    """Return the parts of a preset in the one spelling that a form has for a ratio inside a band.

    `split`: a weight that masks is the raw ratio beside a rule with its bounds. `mask`: a weight that is the
    raw ratio within the bounds of a rule over the same is a weight that masks. `keep`: as it stands.
    """
    weight, rules = preset.weight, list(preset.reject)
    if weight is not None and weight.action == "none":
        weight = replace(weight, lower=None, upper=None)
    if weight is not None and not weight.normalize:
        band = next((rule for rule in rules if leaves_raw(rule, weight)), None)
        if bands == "split" and weight.action == "mask":
            rules.insert(0, Reject("ratio", weight.over, weight.lower, weight.upper))
            weight = replace(weight, action="none", lower=None, upper=None)
        elif bands == "mask" and band is not None:
            rules.remove(band)
            weight = replace(weight, action="mask", lower=band.lower, upper=band.upper)
    return [part for part in (weight, *rules, preset.veto) if part is not None]


def leaves_raw(rule: Reject, weight: Weight) -> bool:
    """Return whether a weight is the raw ratio wherever a rule on that ratio keeps what it judges."""
    if (rule.statistic, rule.over, rule.advantage) != ("ratio", weight.over, "any"):
        return False
    high = weight.upper is None or (rule.upper is not None and rule.upper <= weight.upper)
    low = weight.lower is None or (rule.lower is not None and rule.lower >= weight.lower)
    return weight.action == "none" or (weight.action == "truncate" and high and low)


class Match(NamedTuple):
    """What a row sets, the parts that it takes, and the first version of its keys."""

    settings: Settings
    taken: list[Part]
    since: str


def match(row: Table, parts: Sequence[Part], left: Sequence[Part], names: Table) -> Match | None:
    """Match a row with a preset's parts, of which some are `left` to take; None where it does not match.

    Raises:
        ConfigError: it matches what the trainer cannot express.
    """
    from jinja2 import Undefined  # here: a saved result is judged without it

    if not has(names["preset"], {key: row[key] for key in ("policy", "loss") if key in row}):
        return None
    taken: dict[str, Part] = {}
    for kind, part_type in KINDS.items():
        wanted, alike = row.get(kind), [part for part in parts if isinstance(part, part_type)]
        if isinstance(wanted, bool) and wanted != bool(alike):
            return None
        if isinstance(wanted, Mapping):
            free = [part for part in left if isinstance(part, part_type) and has(part, wanted)]
            if not free:
                return None
            taken[kind] = free[0]
    names = {**names, **taken}
    if not all(evaluated(limit, names) for limit in row.get("limits", ())):
        return None
    if "cannot" in row:
        raise ConfigError(row["cannot"])
    if any(overlooked(part, row, kind) for kind, part in taken.items()):
        return None
    values = {key: evaluated(value, names) for key, value in row.get("set", {}).items()}
    settings = {key: value for key, value in values.items() if not isinstance(value, Undefined)}
    return Match(settings, list(taken.values()), str(evaluated(row.get("since", ""), names) or ""))


def has(part: Preset | Part, wanted: Table) -> bool:
    """Return whether each field has its value, or one of its values."""
    allowed = {key: value if isinstance(value, list) else [value] for key, value in wanted.items()}
    return all(getattr(part, key) in values for key, values in allowed.items())


def overlooked(part: Part, row: Table, kind: str) -> bool:
    """Return whether a field that has an effect is neither matched by the row nor used by an expression."""
    expressions = " ".join(map(str, (*row.get("limits", ()), *row.get("set", {}).values())))
    seen = {*row[kind], *re.findall(rf"\b{kind}\.(\w+)", expressions), *NO_KEY}
    return any(
        getattr(part, one.name) not in (None, False, "any") for one in fields(part) if one.name not in seen
    )


def worded(part: Part) -> str:
    """Name a part of a preset by its formula."""
    if isinstance(part, Weight):
        return f"the weight {in_words.weight(part)}"
    if isinstance(part, Reject):
        return f"the rule that keeps {in_words.rejection((part,))}"
    return f"the veto on {in_words.veto(part)}"


def clip_settings(preset: Preset, keys: Table) -> Settings:
    """Return the clip of the loss where it is not the trainer's default; no lower bound is 1, as r > 0.

    Raises:
        ConfigError: the ratio has no upper clip; no trainer can express that.
    """
    clip, settings = preset.clip, Settings()
    if preset.loss in ("reinforce", "surrogate"):
        return settings
    if clip.high is None:
        raise ConfigError("a ratio that the loss does not clip from above")
    bounds = (1.0 if clip.low is None else clip.low, clip.high)
    if list(bounds) != keys["default"]:
        settings = {keys["pair"]: bounds} if "pair" in keys else {}
        if "low" in keys:
            settings |= {keys["low"]: bounds[0], keys["high"]: bounds[1]}
    if "dual" in keys and preset.loss != "cispo" and clip.dual not in (None, DUAL):
        settings[keys["dual"]] = clip.dual
    return settings


def dual_clip(preset: Preset, keys: Table) -> str:
    """Return a remark on the dual clip if the trainer's differs from the preset's, else ""."""
    bound, default = preset.clip.dual, keys.get("dual_default")
    if preset.loss != "ppo_clip" or (bound is None) == (default is None):
        return ""
    if bound is None:
        return f"dual clip: at most -{default:g} A here where A < 0, which the preset does not have"
    if "dual" in keys and bound != DUAL:  # then it is set
        return ""
    needed = keys.get("dual_set", f"{keys.get('dual')} is {{:g}}").format(bound)
    unless = f" unless {needed}" if "dual" in keys else ""
    return f"no dual clip here{unless}; the preset bounds the loss at -{bound:g} A where A < 0"


def differences(preset: Preset, guards: Table) -> Iterator[str]:
    """Yield a sentence for each difference between a form's guards and the preset's."""
    parts: list[Weight | Reject] = [part for part in (preset.weight, *preset.reject) if part is not None]
    for part in parts:
        what, key, statistic = "weight", "clamp_at", "ratio"
        if isinstance(part, Reject):
            what, key, statistic = "rejection", "rule_at", part.statistic
        bound = None if statistic in guards.get("unclamped", ()) else guards.get("clamp")
        here, there = ("not clamped" if x is None else f"clamped to ±{x:g}" for x in (bound, part.safety))
        at = guards.get(key, "aggregate")
        if here != there:
            yield f"the log-ratio of the {what} is {here} here before exp; in the preset {there}"
        elif bound and statistic in AGGREGATES and part.over != "token" and at != part.safety_at:
            yield f"the clamp of the {what} acts on {AT[at]} here, in the preset on {AT[part.safety_at]}"
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

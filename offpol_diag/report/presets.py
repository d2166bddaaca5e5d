"""The browser of presets: a row with what each keeps, and a card with its definition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offpol_diag.metrics import title
from offpol_diag.number import Number, Numbers
from offpol_diag.numerals import minus, written
from offpol_diag.presets import Preset, catalogue, formulas
from offpol_diag.report.remedy import trainer_of
from offpol_diag.result import PresetFacts, Result
from offpol_diag.table import Table
from offpol_diag.trainers import TRAINERS, sayable

Presets = Mapping[str, PresetFacts]
COLUMNS = ("tokens_weighted", "ess_tokens", "ess_sequences", "truncated_high", "k3")
MORE = (
    "tokens_rejected",
    "weight_mean",
    "weight_max",
    "sequences_dropped",
    "vetoed",
    "pg_loss",
    "pg_clipfrac",
    "chi2_token",
    "chi2_sequence",
    "ppl_ratio",
)
"""Numbers of a card, beside the columns."""
RAW = (
    ("old", "", "uncorrected, rollout → old"),
    ("current", "total.", "uncorrected, rollout → current"),
)
"""Numerator of presets, prefix of their uncorrected weights, and the title of that row."""


@dataclass(frozen=True)
class Card:
    """One preset, or the recommended method at its own threshold; `command` prints its configuration."""

    name: str
    mark: str
    rule: str
    numbers: tuple[tuple[float | None, str], ...]
    metrics: Numbers
    family: str = ""
    trainers: tuple[str, ...] = ()
    kind: str = ""
    first: bool = False
    distinct: bool = False
    lines: tuple[tuple[str, str], ...] = ()
    more: tuple[tuple[str, str], ...] = ()
    command: str = ""


@dataclass(frozen=True)
class Cards:
    """All presets that could be computed, those in `lacking` not; `own` is the trainer of the dump."""

    cards: tuple[Card, ...]
    lacking: tuple[tuple[str, str], ...]
    own: str
    bug: bool
    uncorrected: tuple[tuple[str, Numbers], ...] = ()
    columns: tuple[tuple[str, str], ...] = tuple((name, title(name)) for name in COLUMNS)

    @property
    def presets(self) -> tuple[Card, ...]:
        """The presets as shipped, without the method at its own threshold."""
        return tuple(one for one in self.cards if not one.mark)

    @property
    def trainers(self) -> tuple[str, ...]:
        """The trainers that some preset is from."""
        return tuple(sorted({name for one in self.presets for name in one.trainers}))

    @property
    def families(self) -> int:
        """The number of families."""
        return sum(one.first for one in self.presets)

    @property
    def distinct(self) -> int:
        """The number of presets with distinct results."""
        return sum(one.distinct for one in self.presets)


def cards(summary: Result) -> Cards | None:
    """Return the presets that could be computed, families together; None where there is none."""
    if not summary.presets:
        return None
    able, shipped, own = by_family(summary), catalogue.load(), trainer_of(summary)
    used = {one.policy for one in able.values()}
    raw = tuple((title, _raw(summary, prefix)) for policy, prefix, title in RAW if policy in used)
    lacking = tuple((name, ", ".join(one.needs)) for name, one in summary.presets.items() if one.needs)
    first = {one.family: name for name, one in reversed(able.items())}
    found = [
        _card(name, one, summary.preset(name), shipped.get(name), first[one.family] == name, own)
        for name, one in able.items()
    ]
    return Cards((*_pinned(summary), *found), lacking, own, summary.is_bug, raw)


def missing(summary: Result) -> Table:
    """Return the presets that need a column, and how a dump of two policies is read for most of them."""
    lacking = {name: one for name, one in summary.presets.items() if one.needs}
    rows = [(name, ", ".join(one.needs), one.summary) for name, one in lacking.items()]
    current = summary.dump.columns.get("current_log_probs")
    read = any("old_log_probs" in one.needs for one in lacking.values()) and current is not None
    hint = f"The trainer's one policy is read as the old one with --columns old={current}."
    caption, header = "Presets that need a column this dump lacks", ("preset", "needs", "what it is")
    return Table("needs", caption, header, rows, (hint,) if read else (), shown="page")


def by_family(summary: Result) -> dict[str, PresetFacts]:
    """Return the computed presets, families together and the recommended one first in its own."""
    chosen = (summary.recommendation and summary.recommendation.method) or ""
    able = {name: one for name, one in summary.presets.items() if not one.needs}
    order = list(dict.fromkeys(one.family for one in able.values()))
    ranked = sorted(able, key=lambda name: (order.index(able[name].family), name != chosen))
    return {name: able[name] for name in ranked}


def _raw(summary: Result, prefix: str) -> Numbers:
    found = {key: one for key in summary.whole if (one := summary.whole.get(prefix + key))}
    return {**found, **({"weight_mean": found["mean_ratio"]} if "mean_ratio" in found else {})}


# ---------------------------------------------------------------- cards


def _pinned(summary: Result) -> tuple[Card, ...]:
    """Return the recommended method and its runner-up, at their own thresholds."""
    given = summary.recommendation
    if given is None or summary.is_bug or not given.title:
        return ()
    known = given.method in summary.presets and not given.settings
    rule = summary.presets[given.method].method if known and given.method else ""
    marked = ((given.title, "recommended", rule), (given.runner_up or "", "runner-up", ""))
    return tuple(
        Card(title, mark, said, _numbers(given.numbers[title]), given.numbers[title])
        for title, mark, said in marked
        if title in given.numbers
    )


def _numbers(found: Numbers) -> tuple[tuple[float | None, str], ...]:
    """Return the columns of a row, each with its value to sort by."""
    return tuple(_cell(found.get(name, Number())) for name in COLUMNS)


def _cell(number: Number) -> tuple[float | None, str]:
    if not number.known:
        return None, "–"
    value = number.value if number.value is not None else 10.0 ** min(number.log10 or 0, 300)
    return value, minus(written(number).value)


def _kind(one: PresetFacts) -> str:
    over = one.aspects.get("over what", "")
    words = ("sum", "mean", "sequence", "max", "min")
    return "sequence" if any(word in over for word in words) else "token" if "token" in over else "other"


def _card(
    name: str, one: PresetFacts, numbers: Numbers, shipped: Preset | None, first: bool, own: str
) -> Card:
    lines = (
        ("what it is", one.summary),
        ("family", one.family),
        ("loss", one.loss),
        ("numerator", {"old": "π_old", "current": "π_θ"}.get(one.policy, one.policy)),
        ("rejected tokens", one.aspects.get("rejected tokens", "" if one.aspects else one.denominator)),
        ("guards", "; ".join(one.guards)),
        ("aliases", ", ".join(one.aliases)),
        ("trainers", ", ".join(one.trainers)),
        ("source", one.source),
        ("note", one.note),
        ("same numbers as", one.same_as),
        ("", "" if one.applied else "metrics only: the trainer does not apply it to the loss"),
    )
    more = [(key, written(cell)) for key in MORE if (cell := numbers.get(key, Number())).known]
    return Card(
        name,
        "",
        one.method,
        _numbers(numbers),
        numbers,
        one.family,
        tuple(one.trainers),
        _kind(one),
        first,
        distinct=not one.same_as,
        lines=tuple(line for line in lines if line[1] and line[1] != "none"),
        more=tuple((key, minus(" ".join(filter(None, parts)))) for key, parts in more),
        command=_command(name, one, shipped, own),
    )


def _command(name: str, one: PresetFacts, shipped: Preset | None, own: str) -> str:
    """Return the command that prints a preset's configuration, for the dump's trainer or one of its own.

    A preset that no trainer can be configured to has one that prints its definition; one of a file has none.
    """
    if shipped is None or formulas.method(shipped) != one.method:
        return ""
    named = (trainer for trainer in (own, *one.trainers) if trainer in TRAINERS)
    able = next((trainer for trainer in named if sayable(shipped, (trainer,))), "")
    return f"offpol-diag presets {name}{able and f' --for {able}'}"

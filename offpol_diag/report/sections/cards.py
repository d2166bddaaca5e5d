"""Every correction on this batch: a row with what it keeps, and a card with its definition."""

from __future__ import annotations

from dataclasses import dataclass

from offpol_diag.errors import ConfigError
from offpol_diag.numerals import written
from offpol_diag.presets import Preset, catalogue, formulas
from offpol_diag.report.sections.answer import trainer_of
from offpol_diag.report.sections.diagnosis import is_bug
from offpol_diag.report.sections.front import forms
from offpol_diag.report.sections.shortlist import by_family, judged
from offpol_diag.summary import Number, Numbers, PresetResult, Summary
from offpol_diag.trainers import config_for

COLUMNS = (
    ("kept", "Kept tokens"),
    ("ess_tokens", "ESS, tokens"),
    ("ess_sequences", "ESS, sequences"),
    ("truncated_high", "Truncated"),
    ("k3", "K3 of what is kept"),
)
MORE = (
    "weight_mean",
    "weight_max",
    "sequences_dropped",
    "vetoed",
    "loss_scale",
    "pg_loss",
    "pg_clipfrac",
    "chi2_token",
    "chi2_sequence",
    "update_removed",
)


@dataclass(frozen=True)
class Card:
    """One preset, or the recommended method at its own threshold."""

    name: str
    mark: str
    rule: str
    numbers: tuple[tuple[float | None, str], ...]
    trainers: tuple[str, ...]
    kind: str
    first: bool = False
    distinct: bool = False
    lines: tuple[tuple[str, str], ...] = ()
    more: tuple[tuple[str, str], ...] = ()
    keeps: tuple[tuple[str, str], ...] = ()
    config: str = ""
    trainer: str = ""


def cards(summary: Summary) -> tuple[Card, ...]:
    """Return the recommended method and its runner-up, then the presets family by family."""
    able = judged(summary)
    firsts = {next(iter(family)) for family in by_family(able).values()}
    own = trainer_of(summary)
    shipped = catalogue.load()
    rows = (_card(name, one, shipped.get(name), name in firsts, own) for name, one in able.items())
    return (*_pinned(summary), *rows)


def lacking(summary: Summary) -> tuple[tuple[str, str], ...]:
    """Return the presets that need a column this dump lacks."""
    return tuple((name, ", ".join(one.needs)) for name, one in summary.presets.items() if one.needs)


def _pinned(summary: Summary) -> tuple[Card, ...]:
    given = summary.recommendation
    if given is None or is_bug(summary) or not given.title:
        return ()
    marked = ((given.title, "recommended"), (given.runner_up or "", "runner-up"))
    return tuple(
        Card(
            title,
            mark,
            _rule(summary) if mark == "recommended" else "",
            _numbers(given.numbers[title]),
            (),
            "",
        )
        for title, mark in marked
        if title in given.numbers
    )


def _rule(summary: Summary) -> str:
    """Return the recommended method in words, where it is a preset as it stands."""
    given = summary.recommendation
    known = given is not None and given.method in summary.presets and not given.settings
    return summary.presets[given.method].method if known and given and given.method else ""


def _numbers(found: Numbers) -> tuple[tuple[float | None, str], ...]:
    rejected = found.get("tokens_rejected", Number())
    kept = Number(value=None if rejected.value is None else 1 - rejected.value, unit="fraction")
    cells = {"kept": kept, **found}
    return tuple(_cell(cells.get(name, Number())) for name, _ in COLUMNS)


def _cell(number: Number) -> tuple[float | None, str]:
    if number.value is None and number.log10 is None:
        return None, "–"
    value = number.value if number.value is not None else 10.0 ** min(number.log10 or 0, 300)
    return value, written(number.model_copy(update={"interval": None})).value


def _kind(one: PresetResult) -> str:
    over = one.aspects.get("over what", "")
    return (
        "sequence"
        if any(word in over for word in ("sum", "mean", "sequence", "max", "min"))
        else "token"
        if "token" in over
        else "other"
    )


def _card(name: str, one: PresetResult, shipped: Preset | None, first: bool, own: str) -> Card:
    lines = [
        ("what it is", one.summary),
        ("loss", one.loss),
        ("numerator", {"old": "π_old", "current": "π_θ"}.get(one.policy, one.policy)),
    ]
    lines += [
        ("rejected tokens", one.aspects.get("rejected tokens", one.denominator)),
        ("guards", "; ".join(one.guards)),
    ]
    lines += [
        ("aliases", ", ".join(one.aliases)),
        ("trainers", ", ".join(one.trainers)),
        ("source", one.source),
        ("note", one.note),
    ]
    lines += [
        ("same numbers as", one.same_as),
        ("", "" if one.applied else "metrics only: the trainer does not apply it to the loss"),
    ]
    keeps = [(f"length, quartile {q}", one.metrics.get(f"kept_length_q{q}")) for q in range(1, 5)]
    keeps += [("A > 0", one.metrics.get("kept_positive")), ("A < 0", one.metrics.get("kept_negative"))]
    trainer, config = _config(one, shipped, own)
    known = {
        key: one.metrics[key] for key in MORE if key in one.metrics and one.metrics[key].value is not None
    }
    plain = [
        (key, cell.model_copy(update={"interval": None}))
        for key, cell in keeps
        if cell and cell.value is not None
    ]
    return Card(
        name,
        "",
        one.method,
        _numbers(one.metrics),
        tuple(one.trainers),
        _kind(one),
        first,
        not one.same_as,
        tuple(line for line in lines if line[1] and line[1] != "none"),
        tuple((key, " ".join(part for part in written(cell) if part)) for key, cell in known.items()),
        tuple((key, written(cell).value) for key, cell in plain),
        config,
        trainer,
    )


def _config(one: PresetResult, shipped: Preset | None, own: str) -> tuple[str, str]:
    """Return a preset's configuration for the dump's trainer, else for the first of its own trainers."""
    if shipped is None or formulas.method(shipped) != one.method:
        return "", ""
    for trainer in dict.fromkeys([*([own] if own else []), *one.trainers]):
        try:
            return trainer, forms(config_for(shipped, trainer).text())[0]
        except (ConfigError, LookupError):
            continue
    return "", ""


def alike(found: tuple[Card, ...]) -> int:
    """Return how many presets have distinct results."""
    return sum(one.distinct for one in found)

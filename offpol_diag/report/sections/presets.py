"""Section on all corrections of this dump, side by side."""

from __future__ import annotations

from collections.abc import Container

from offpol_diag.blocks import Block, Cell, Section, Table, Text
from offpol_diag.numerals import say
from offpol_diag.presets.families import FAMILIES
from offpol_diag.report.sections.shortlist import FEW, Presets, by_family, chosen, judged, leading, shortlist
from offpol_diag.summary import Number, PresetResult, Recommendation, Summary

MAIN = (
    "ess_tokens",
    "ess_sequences",
    "tokens_rejected",
    "sequences_dropped",
    "vetoed",
    "weight_mean",
    "weight_max",
    "truncated_high",
    "k3",
    "chi2_token",
    "chi2_sequence",
    "ppl_ratio",
    "update_removed",
    "loss_scale",
    "loss_scale_removed",
    "loss_scale_kept",
)
"""Columns of the main table, most decisive first, since columns are omitted from the right."""

LOSSES = (
    "pg_loss",
    "pg_loss_kept",
    "pg_loss_own",
    "pg_loss_seq_sum",
    "pg_loss_seq_mean",
    "pg_loss_seq_norm",
    "pg_clipfrac",
    "pg_clipfrac_lower",
    "ppo_kl",
)
RAW = (("old", "", "uncorrected, rollout → old"), ("current", "total.", "uncorrected, rollout → current"))
"""Numerator of a preset, prefix of the metrics of its uncorrected weights, title of their row."""

RAW_NAMES = {"weight_mean": "mean_ratio"}
"""Preset metric → gap metric, where the uncorrected number has another name."""


def presets(summary: Summary) -> Section | None:
    """Return the recommended preset and one of each family, the families, losses, and the rest folded."""
    able = judged(summary)
    if not summary.presets:
        return None
    blocks = (
        Text(_finding(summary, able)),
        *_main(summary, able),
        *_families(summary, able),
        *_losses(able),
        *_needing(summary.presets),
        *_sources(summary.presets),
        *_everything(able),
    )
    return Section("presets", "Corrections compared", blocks)


def _finding(summary: Summary, able: Presets) -> str:
    said = (_counted(summary, able), _under(summary.recommendation))
    return " ".join(sentence for sentence in said if sentence)


def _counted(summary: Summary, able: Presets) -> str:
    many = f"{len(able)} of {len(summary.presets)} presets could be computed from this dump."
    lacking = dict.fromkeys(column for one in summary.presets.values() for column in one.needs)
    return f"{many} The others need {' or '.join(lacking)}.{_instead(summary, lacking)}" if lacking else many


def _instead(summary: Summary, lacking: Container[str]) -> str:
    """Return a hint on reading a dump of two policies for most presets."""
    current = summary.dump.columns.get("current_log_probs")
    read = "old_log_probs" in lacking and current is not None
    return f" The trainer's one policy is read as the old one with --columns old={current}." if read else ""


def _under(given: Recommendation | None) -> str:
    """Return a sentence on the recommended method at its own threshold, not the preset's."""
    best = given.numbers.get(given.title, {}) if given and given.title else {}
    kept = {
        "ess_sequences": "the effective sample size over sequences is",
        "tokens_rejected": "tokens rejected:",
    }
    facts = "; ".join(f"{words} {say(best[key])}" for key, words in kept.items() if key in best)
    return f"Under the recommended {given.title}, {facts}." if given and facts else ""


def _main(summary: Summary, able: Presets) -> tuple[Block, ...]:
    short, names = leading(chosen(summary), shortlist(able)), _present(MAIN, able)
    rows = (*_raw(summary, able, names), *_rows(summary, short, names))
    if not rows:
        return ()
    table = Table(
        "presets",
        _caption(able, short),
        ("preset", "family", *names),
        rows,
        (*_more(able, short), *_absent(MAIN, able), *NOTES),
        context=("family",),
    )
    return (table,)


def _caption(able: Presets, short: Presets) -> str:
    whole = "What each correction does to this batch"
    families = len(by_family(able))
    return whole if len(short) == len(able) else f"{whole}: one preset of each of {families} families"


def _more(able: Presets, short: Presets) -> tuple[str, ...]:
    """Return a note on where to find presets outside the shortlist."""
    if len(short) == len(able):
        return ()
    return (
        f"One row per family, the first that could be computed; an HTML report has all {len(able)}, and "
        "`offpol-diag compare --presets a,b` puts any side by side.",
    )


OPEN = 8
"""Number of presets that cannot be computed above which they are folded."""

NOTES = (
    "Uncorrected: before any correction; every other row is after its own.",
    "loss_scale_removed: rejected tokens leave the denominator; loss_scale_kept: they stay in it.",
)


def _rows(summary: Summary, some: Presets, names: tuple[str, ...]) -> tuple[tuple[Cell, ...], ...]:
    return tuple(
        (_title(name, one, summary), one.family or "–", *_cells(one, names)) for name, one in some.items()
    )


def _title(name: str, preset: PresetResult, summary: Summary) -> str:
    marks = (chosen(summary) == name and _recommended(summary), not preset.applied and "metrics only")
    said = ", ".join(mark for mark in marks if mark)
    return f"{name} ({said})" if said else name


def _recommended(summary: Summary) -> str:
    """Return the mark of the recommended preset; its row is at the preset's own threshold."""
    given = summary.recommendation
    return f"recommended, but at {given.threshold}" if given and given.settings else "recommended"


def _raw(summary: Summary, able: Presets, names: tuple[str, ...]) -> tuple[tuple[Cell, ...], ...]:
    """Return the uncorrected weights, one row per numerator that some preset uses."""
    used = {preset.policy for preset in able.values()}
    return tuple(
        (title, "–", *(summary.metrics.get(prefix + RAW_NAMES.get(name, name)) for name in names))
        for policy, prefix, title in RAW
        if policy in used
    )


def _families(summary: Summary, able: Presets) -> tuple[Block, ...]:
    """Return a folded table per family, if the shortlist omits any preset."""
    if len(able) <= FEW:
        return ()
    names = _present(MAIN, able)
    return tuple(
        Table(
            f"family-{place}",
            _family(family, rows),
            ("preset", *names),
            tuple((_title(name, one, summary), *_cells(one, names)) for name, one in rows.items()),
            wide=True,
            collapsed=True,
        )
        for place, (family, rows) in enumerate(by_family(able).items(), 1)
        if len(rows) > 1
    )


def _family(name: str, rows: Presets) -> str:
    meaning = f": {FAMILIES[name]}" if name in FAMILIES else ""
    return f"{name or 'Of no family'}, {len(rows)} presets{meaning}"


def _missing() -> Number:
    return Number(unknown="not computed for this preset")


def _present(names: tuple[str, ...], able: Presets) -> tuple[str, ...]:
    """Return the names that some preset has a value for."""
    return tuple(name for name in names if any(_known(preset, name) for preset in able.values()))


def _absent(names: tuple[str, ...], able: Presets) -> tuple[str, ...]:
    """Return notes on names without a value for any preset, one sentence per reason."""
    reasons: dict[str, list[str]] = {}
    for name in names:
        number = next((one.metrics[name] for one in able.values() if name in one.metrics), None)
        if number and number.unknown and name not in _present((name,), able):
            reasons.setdefault(number.unknown, []).append(name)
    return tuple(f"{', '.join(some)} cannot be known: {why}." for why, some in reasons.items())


def _cells(preset: PresetResult, names: tuple[str, ...]) -> tuple[Cell, ...]:
    return tuple(preset.metrics.get(name, _missing()) for name in names)


def _losses(able: Presets) -> tuple[Block, ...]:
    names = _present(LOSSES, able)
    rows = tuple((title, preset.loss, *_cells(preset, names)) for title, preset in able.items())
    caption, many = "The loss each correction would have produced", len(rows) > FEW
    header = ("preset", "loss", *names)
    return (Table("losses", caption, header, rows, wide=True, collapsed=many, lookup=True),) if names else ()


def _known(preset: PresetResult, name: str) -> bool:
    number = preset.metrics.get(name)
    return number is not None and (number.value is not None or number.log10 is not None)


def _needing(all_presets: Presets) -> tuple[Block, ...]:
    rows = tuple(
        (name, f"needs {', '.join(preset.needs)}", preset.summary)
        for name, preset in all_presets.items()
        if preset.needs
    )
    caption, header = "Presets that need a column this dump lacks", ("preset", "needs", "what it is")
    return (Table("needs", caption, header, rows, collapsed=len(rows) > OPEN),) if rows else ()


def _sources(all_presets: Presets) -> tuple[Block, ...]:
    rows = tuple(
        (
            name,
            one.summary,
            one.method,
            ", ".join(one.aliases) or "none",
            one.source,
        )
        for name, one in all_presets.items()
    )
    header = ("preset", "what it is", "method", "aliases", "source")
    caption = "What each preset is, its other names, and where it comes from"
    return (Table("methods", caption, header, rows, wide=True, collapsed=True, lookup=True),)


def _everything(able: Presets) -> tuple[Block, ...]:
    every = dict.fromkeys(name for preset in able.values() for name in preset.metrics)
    names = tuple(name for name in every if name not in (*MAIN, *LOSSES))
    rows = tuple((name, *_cells(preset, names)) for name, preset in able.items())
    caption, header = "All other numbers of every preset", ("preset", *names)
    return (Table("all", caption, header, rows, wide=True, collapsed=True, lookup=True),) if rows else ()

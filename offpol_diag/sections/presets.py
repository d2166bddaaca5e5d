"""Every correction on this dump, side by side."""

from __future__ import annotations

from offpol_diag.blocks import Block, Cell, Section, Table, Text
from offpol_diag.numerals import say
from offpol_diag.summary import Number, PresetResult, Summary

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
    "loss_scale_removed",
    "loss_scale_kept",
)
"""The main table, most decisive first: where there is no room, columns are left out from the right."""

LOSSES = (
    "pg_loss",
    "pg_loss_kept",
    "pg_loss_seq_sum",
    "pg_loss_seq_mean",
    "pg_loss_seq_norm",
    "pg_clipfrac",
    "pg_clipfrac_lower",
    "ppo_kl",
)
RAW = (("old", "", "raw weights, drift 1"), ("current", "total.", "raw weights, total drift"))
"""Numerator of a preset, prefix of the metrics its raw weights are found under, title of their row."""

RAW_NAMES = {"weight_mean": "mean_ratio"}
"""Raw numbers that bear another name than the processed ones."""


def presets(summary: Summary) -> Section | None:
    """The recommended preset first: main table, losses, what cannot be judged, and all else folded away."""
    chosen = summary.recommendation and summary.recommendation.method
    order = sorted(summary.presets, key=lambda name: name != chosen)
    judged = {name: summary.presets[name] for name in order if not summary.presets[name].needs}
    if not summary.presets:
        return None
    blocks = (
        Text(_finding(summary, judged)),
        *_main(summary, judged),
        *_losses(judged),
        *_needing(summary.presets),
        *_methods(summary.presets),
        *_everything(judged),
    )
    return Section("presets", "Corrections compared", blocks)


def _finding(summary: Summary, judged: dict[str, PresetResult]) -> str:
    many = f"{len(judged)} of {len(summary.presets)} presets could be computed from this dump."
    chosen = judged.get((summary.recommendation and summary.recommendation.method) or "")
    if chosen is None or summary.recommendation is None:
        return many
    kept = {
        "ess_sequences": "the effective sample size over sequences is",
        "tokens_rejected": "tokens rejected:",
    }
    facts = "; ".join(
        f"{words} {say(chosen.metrics[key])}" for key, words in kept.items() if key in chosen.metrics
    )
    return f"{many} Under the recommended {summary.recommendation.method}, {facts}." if facts else many


def _main(summary: Summary, judged: dict[str, PresetResult]) -> tuple[Block, ...]:
    names = _present(MAIN, judged)
    rows = (
        *_raw(summary, judged, names),
        *((_title(name, preset, summary), *_cells(preset, names)) for name, preset in judged.items()),
    )
    header = ("preset", *names)
    notes = (
        "Raw weights are those before any correction; every other row is after its own.",
        "loss_scale_removed: rejected tokens leave the denominator; loss_scale_kept: they stay in it.",
    )
    return (Table("presets", "What each correction does to this batch", header, rows, notes),) if rows else ()


def _title(name: str, preset: PresetResult, summary: Summary) -> str:
    chosen = summary.recommendation is not None and summary.recommendation.method == name
    marks = (chosen and "recommended", not preset.applied and "metrics only")
    said = ", ".join(mark for mark in marks if mark)
    return f"{name} ({said})" if said else name


def _raw(
    summary: Summary, judged: dict[str, PresetResult], names: tuple[str, ...]
) -> tuple[tuple[Cell, ...], ...]:
    """What the presets start from, one row per numerator that some preset uses."""
    used = {preset.policy for preset in judged.values()}
    return tuple(
        (title, *(summary.metrics.get(prefix + RAW_NAMES.get(name, name)) for name in names))
        for policy, prefix, title in RAW
        if policy in used
    )


def _missing() -> Number:
    return Number(unknown="not computed for this preset")


def _present(names: tuple[str, ...], judged: dict[str, PresetResult]) -> tuple[str, ...]:
    return tuple(name for name in names if any(name in preset.metrics for preset in judged.values()))


def _cells(preset: PresetResult, names: tuple[str, ...]) -> tuple[Cell, ...]:
    return tuple(preset.metrics.get(name, _missing()) for name in names)


def _losses(judged: dict[str, PresetResult]) -> tuple[Block, ...]:
    names = tuple(
        name for name in _present(LOSSES, judged) if any(_known(one, name) for one in judged.values())
    )
    rows = tuple((title, preset.loss, *_cells(preset, names)) for title, preset in judged.items())
    caption = "The loss each correction would have produced"
    return (Table("losses", caption, ("preset", "loss", *names), rows, wide=True),) if names else ()


def _known(preset: PresetResult, name: str) -> bool:
    return name in preset.metrics and preset.metrics[name].value is not None


def _needing(all_presets: dict[str, PresetResult]) -> tuple[Block, ...]:
    rows = tuple(
        (name, f"needs {', '.join(preset.needs)}", preset.summary)
        for name, preset in all_presets.items()
        if preset.needs
    )
    caption = "Presets that need a column this dump lacks"
    return (Table("needs", caption, ("preset", "needs", "what it is"), rows),) if rows else ()


def _methods(all_presets: dict[str, PresetResult]) -> tuple[Block, ...]:
    rows = tuple(
        (
            name,
            one.summary,
            one.method,
            one.policy,
            ", ".join(one.aliases) or "none",
            one.source,
            one.note or "–",
        )
        for name, one in all_presets.items()
    )
    header = ("preset", "what it is", "method", "numerator", "aliases", "source", "note")
    return (
        Table(
            "methods",
            "What each preset does, and where it comes from",
            header,
            rows,
            wide=True,
            collapsed=True,
        ),
    )


def _everything(judged: dict[str, PresetResult]) -> tuple[Block, ...]:
    every = dict.fromkeys(name for preset in judged.values() for name in preset.metrics)
    names = tuple(name for name in every if name not in (*MAIN, *LOSSES))
    rows = tuple((name, *_cells(preset, names)) for name, preset in judged.items())
    caption = "All other numbers of every preset"
    return (Table("all", caption, ("preset", *names), rows, wide=True, collapsed=True),) if rows else ()

"""Section on the provenance of the numbers and their definitions."""

from __future__ import annotations

from offpol_diag.blocks import Cell, Section, Table, Text
from offpol_diag.numerals import count, say_value, size
from offpol_diag.summary import Numbers, Run, Summary

CONVENTIONS = (
    "Log-ratio Δ = log π_train − log π_rollout, ratio r = e^Δ; every bound is on r. Intervals are 95% and "
    "come from a bootstrap that resamples groups of sequences, never tokens."
)


def made(summary: Summary) -> Section:
    """Return facts on the run, then every name with its formula and unit."""
    run = summary.run
    definitions = (*_defined("", summary.metrics), *_of_presets(summary))
    return Section(
        "made",
        "How the numbers were made",
        (
            Text(f"{CONVENTIONS} Seed {run.seed}, {count(run.replicates)} replicates."),
            Table("run", "The run", ("what", "value"), _run(run)),
            Table(
                "definitions",
                f"Definitions of all {count(len(definitions))} numbers",
                ("number", "formula", "over", "unit"),
                definitions,
                wide=True,
                collapsed=True,
                lookup=True,
            ),
        ),
    )


def _run(run: Run) -> tuple[tuple[Cell, ...], ...]:
    return (
        ("command", run.command),
        ("offpol-diag", run.version),
        ("device", run.device),
        ("engine", run.engine),
        ("seed", str(run.seed)),
        ("bootstrap replicates", count(run.replicates)),
        ("peak memory", size(run.peak_rss_bytes)),
        *((f"seconds, {name}", say_value(round(value, 3))) for name, value in run.seconds.items()),
    )


def _of_presets(summary: Summary) -> tuple[tuple[Cell, ...], ...]:
    """Return the definitions of per-preset numbers, each from the first preset that has the number."""
    first: Numbers = {}
    for preset in summary.presets.values():
        first = {**preset.metrics, **first}
    return _defined("PRESET.", first)


def _defined(prefix: str, numbers: Numbers) -> tuple[tuple[Cell, ...], ...]:
    return tuple(
        (prefix + name, one.formula or "as named", one.over or "–", one.unit or "1")
        for name, one in numbers.items()
    )

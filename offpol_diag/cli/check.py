"""`offpol-diag check`: the trainer's own curves against what its dump says that they are."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from offpol_diag.cli import defaults, options
from offpol_diag.cli.exits import FAILED
from offpol_diag.cli.output import STDOUT, check_names, write_all
from offpol_diag.cli.output import check as check_target
from offpol_diag.errors import UsageError

if TYPE_CHECKING:
    from offpol_diag.check import Checked, MetricCheck

CURVES = "The trainer's curves by step: exports of W&B or TensorBoard, JSONL, CSV; may be repeated."
Logged = Annotated[list[Path] | None, options.option(CURVES, "--logged", metavar="FILE", panel=options.INPUT)]
WHO = "Who logged them; found by provenance or by the names, where it is left out."
Trainer = Annotated[str | None, options.option(WHO, "--trainer", metavar="NAME", panel=options.INPUT)]
METHOD = "The correction that ran; left out, the trainer's that reproduces the most metrics."
Preset = Annotated[str | None, options.option(METHOD, "--preset", metavar="NAME", panel=options.INPUT)]
MICRO = "Sequences of a micro-batch, where the trainer averages the means of those."
Micro = Annotated[int | None, options.option(MICRO, "--micro-batch", min=1, panel=options.INPUT)]
RANKS = "Data-parallel ranks (rows in blocks), where the trainer averages the means of those."
Ranks = Annotated[int | None, options.option(RANKS, "--dp", min=1, panel=options.INPUT)]

STRICT = "Exit with 1 where a metric differs."
Strict = Annotated[bool, options.option(STRICT, "--strict")]


def check(
    dump: options.Dumps = None,
    logged: Logged = None,
    trainer: Trainer = None,
    preset: Preset = None,
    micro_batch: Micro = None,
    dp: Ranks = None,
    preset_file: options.PresetFile = None,
    columns: options.Columns = None,
    form: options.Form = None,
    align: options.Align = None,
    join: options.Join = None,
    on: options.On = None,
    on_bad_row: options.OnBadRow = "error",
    json: options.Json = None,
    md: options.Markdown = None,
    strict: Strict = False,
    quiet: options.Quiet = False,
) -> None:
    """Does the trainer log what its dump says? Its own curves beside the numbers they must be.

    Each training step of the dump is taken as one batch of the trainer, and every metric that the crosswalk
    knows is compared with the curve of that name. Where they differ by more than float32 rounds, variants are
    tried: masked tokens counted, means over micro-batches or ranks, the other direction of the ratio, other
    bounds, another pair of policies, sums, another step. The one that reproduces the curve is named.

    The exit code is 0 whatever is found, and with --strict 1 where a metric differs.
    """
    if not logged:
        raise UsageError("check needs the trainer's curves", "offpol-diag check DUMP --logged history.jsonl")
    dumps = defaults.dumps(dump, quiet)
    targets = [one for one in (json, md) if one is not None]
    check_names(*dumps, *logged)
    for target in targets:
        check_target(target, *dumps, *logged)
    if len(targets) == 2 and json == md:
        raise UsageError("two results cannot go to one file", "give each a file of its own")
    with defaults.judged("columns", columns):
        named = options.pairs(columns) or None
    with defaults.judged("preset_file", preset_file):
        from offpol_diag.presets.catalogue import load

        catalogue = load(preset_file)
    from offpol_diag.check import check as checked
    from offpol_diag.forms import Reading

    found = checked(
        dumps,
        logged,
        trainer=trainer,
        preset=preset,
        micro_batch=micro_batch,
        dp=dp,
        catalogue=catalogue,
        columns=named,
        reading=Reading(form, align, join, on),
        on_bad_row=on_bad_row,
    )
    texts = {json: found.to_json()} if json else {}
    texts |= {md: markdown(found)} if md else {}
    shown = f"{headline(found)}\n" if quiet else terminal(found)
    write_all(texts, shown="" if STDOUT in texts else shown)
    if strict and not found.equal:
        raise SystemExit(FAILED)


def headline(found: Checked) -> str:
    """Return the verdict in one line."""
    wrong = [one for one in found.metrics if one.verdict == "different"]
    many = f"{len(found.metrics)} metrics at {len(found.steps)} steps"
    if not wrong:
        return f"equal: {many} are what the dump says ({found.preset})"
    return f"different: {len(wrong)} of {many} are not what the dump says ({found.preset})"


def rows(found: Checked) -> list[tuple[str, str, str, str, str]]:
    """Return a row per metric: name, steps, logged and expected at the worst step, verdict."""
    return [
        (one.name, str(len(one.points)), f"{at.logged or math.nan:.7g}", f"{at.expected:.7g}", said(one))
        for one in found.metrics
        for at in (one.at(one.worst),)
    ]


def said(one: MetricCheck) -> str:
    """Return the verdict on one metric in words."""
    if one.verdict == "equal":
        return "equal"
    many = f"{len(one.different)} of {len(one.points)}"
    where = f"differs from step {one.first} on ({many}), most at {one.worst}"
    return f"{where}: {f'the trainer logs {one.text}' if one.text else 'no variant reproduces it'}"


TITLES = ("metric", "steps", "logged", "the dump says", "verdict")


def notes(found: Checked) -> list[str]:
    """Return what is to be said besides."""
    lines = []
    if found.chosen:
        lines.append(
            f"{found.preset} is the preset that reproduces the most metrics; --preset names another."
        )
    if found.unmatched:
        lines.append(f"No curve holds {', '.join(found.unmatched)}.")
    return lines


def terminal(found: Checked) -> str:
    """Return the verdict as a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for title in TITLES:
        right = title in TITLES[1:4]
        table.add_column(title, justify="right" if right else "left", overflow="fold", no_wrap=right)
    for row in rows(found):
        table.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=110, color_system=None)
    console.print(Text(headline(found)), table, *map(Text, notes(found)))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def markdown(found: Checked) -> str:
    """Return the verdict as Markdown."""
    lines = [f"**{headline(found)}**", "", _line(TITLES), "| --- | ---: | ---: | ---: | --- |"]
    lines += [_line(row) for row in rows(found)]
    return "\n".join([*lines, *(line for one in notes(found) for line in ("", one))]) + "\n"


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

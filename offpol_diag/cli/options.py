"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

MOST_SEED, MOST_SEQUENCES = 2**63 - 1, 10**9
INPUT, OUTPUT = "What is read", "What is written"

Dumps = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DUMP",
        show_default=False,
        help="Parquet files, directories of them, or globs, here or at a URL (s3://, gs://, hf://, …); - is "
        "stdin. "
        "Left out: the dump that pyproject.toml or offpol-diag.toml names, else the sample.",
    ),
]
Presets = Annotated[
    str,
    typer.Option(
        "--presets",
        envvar="OFFPOL_DIAG_PRESETS",
        metavar="all|NAME,NAME",
        rich_help_panel=INPUT,
        help="Corrections to evaluate; `offpol-diag presets` lists them.",
    ),
]
PresetFile = Annotated[
    Path | None,
    typer.Option(
        "--preset-file",
        envvar="OFFPOL_DIAG_PRESET_FILE",
        metavar="FILE",
        rich_help_panel=INPUT,
        help="Presets of your own (TOML, the grammar of the catalogue).",
    ),
]
Columns = Annotated[
    str | None,
    typer.Option(
        "--columns",
        envvar="OFFPOL_DIAG_COLUMNS",
        metavar="rollout=NAME,old=NAME",
        rich_help_panel=INPUT,
        help="Which column is which, where the names do not say it.",
    ),
]
GroupBy = Annotated[
    str | None,
    typer.Option(
        "--group-by",
        envvar="OFFPOL_DIAG_GROUP_BY",
        metavar="COLUMN,COLUMN",
        rich_help_panel=INPUT,
        help="Break the numbers down by these columns (host, engine, env).",
    ),
]
OnBadRow = Annotated[
    Literal["error", "skip"],
    typer.Option(
        "--on-bad-row",
        envvar="OFFPOL_DIAG_ON_BAD_ROW",
        rich_help_panel=INPUT,
        help="Stop at a row that cannot be read, or leave it out and say so at the top of every report.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        envvar="OFFPOL_DIAG_DEVICE",
        metavar="auto|cpu|cuda[:N]",
        help="Where to compute.",
    ),
]
Engine = Annotated[
    Literal["local", "ray"],
    typer.Option(
        "--engine",
        envvar="OFFPOL_DIAG_ENGINE",
        help="This machine, or the Ray cluster of RAY_ADDRESS (docs/ray.md); the numbers are the same.",
    ),
]
Workers = Annotated[
    str,
    typer.Option(
        "--workers",
        envvar="OFFPOL_DIAG_WORKERS",
        metavar="auto|N",
        help="Processes that compute on the CPU; auto is one for each core, where memory and dump are large "
        "enough. The numbers are the same.",
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed", envvar="OFFPOL_DIAG_SEED", min=0, max=MOST_SEED, help="Seed of the bootstrap intervals."
    ),
]
Trainer = Annotated[
    str | None,
    typer.Option(
        "--for",
        envvar="OFFPOL_DIAG_FOR",
        metavar="TRAINER",
        help="Print the recommended method in this trainer's own syntax (verl, trl, slime, …).",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", envvar="OFFPOL_DIAG_QUIET", help="One line; no progress and no remarks."),
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", envvar="OFFPOL_DIAG_VERBOSE", help="Every table, not the short answer."),
]
Html = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", "--html", metavar="FILE", rich_help_panel=OUTPUT, help="Where the HTML report goes."
    ),
]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE|-", rich_help_panel=OUTPUT, help="Write the result as JSON; - is stdout."
    ),
]
Markdown = Annotated[
    Path | None,
    typer.Option("--md", metavar="FILE|-", rich_help_panel=OUTPUT, help="Write Markdown; - is stdout."),
]
NoHtml = Annotated[bool, typer.Option("--no-html", rich_help_panel=OUTPUT, help="Write no HTML report.")]
Tally = Annotated[
    Path | None,
    typer.Option(
        "--tally",
        metavar="FILE.tally.json[.gz]",
        rich_help_panel=OUTPUT,
        help="Write the sums that all numbers are made of, for `offpol-diag merge`.",
    ),
]


def pairs(text: str | None) -> dict[str, str]:
    """Parse `a=b,c=d` into a mapping.

    Raises:
        UsageError: a part has no `=`, or nothing on one side of it.
    """
    from offpol_diag.errors import UsageError

    split = [part.partition("=") for part in names(text)]
    for ours, sign, theirs in split:
        if not ours.strip() or not theirs.strip():
            raise UsageError(
                f'"{ours}{sign}{theirs}" names no column', "write --columns rollout=NAME,old=NAME"
            )
    return {ours.strip(): theirs.strip() for ours, _, theirs in split}


def names(text: str | None) -> tuple[str, ...]:
    """Parse `a,b` into a tuple of words."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())

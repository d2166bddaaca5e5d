"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

MOST_SEED = 2**63 - 1
INPUT, OUTPUT = "What is read", "What is written"


def option(help: str, *flags: str, metavar: str = "", panel: str = "", env: bool = False, **more: Any) -> Any:
    """Return a typer option; with `env` it can also be set as OFFPOL_DIAG_NAME, after its first long flag."""
    name = next(flag for flag in flags if flag.startswith("--")).strip("-").upper().replace("-", "_")
    return typer.Option(
        *flags,
        help=help,
        metavar=metavar or None,
        rich_help_panel=panel or None,
        envvar=f"OFFPOL_DIAG_{name}" if env else None,
        **more,
    )


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
LIST = (
    "Corrections to evaluate; `offpol-diag presets` lists them. All by default; what a trainer logs is then "
    "computed only for its own presets and what can be recommended, with `all` for every preset."
)
Presets = Annotated[str | None, option(LIST, "--presets", metavar="all|NAME,NAME", panel=INPUT, env=True)]
OWN = "Presets of your own (TOML, the grammar of the catalogue)."
PresetFile = Annotated[Path | None, option(OWN, "--preset-file", metavar="FILE", panel=INPUT, env=True)]
WHICH = "Which column is which, where the names do not say it; mask=none: none is."
NAMES = "rollout=NAME,old=NAME"
Columns = Annotated[str | None, option(WHICH, "--columns", metavar=NAMES, panel=INPUT, env=True)]
SHAPE = "The form of the files, where it is not to be detected; `offpol-diag convert --list` has them."
Form = Annotated[str | None, option(SHAPE, "--form", metavar="NAME", panel=INPUT, env=True)]
FRAME = "How log-probs belong to tokens, where the form's way is wrong: full,shift=1."
WAYS = "response|full,shift=N"
Align = Annotated[str | None, option(FRAME, "--align", metavar=WAYS, panel=INPUT, env=True)]
SECOND = "Columns of a second file, found by sequence_id: other.parquet:old_log_probs."
Join = Annotated[str | None, option(SECOND, "--join", metavar="FILE:COLUMN,COLUMN", panel=INPUT)]
KEY = "The column that --join goes by instead; row is the order of the rows."
On = Annotated[str | None, option(KEY, "--on", metavar="COLUMN|row", panel=INPUT)]
BY = "Break the numbers down by these columns (host, engine, env)."
GroupBy = Annotated[str | None, option(BY, "--group-by", metavar="COLUMN,COLUMN", panel=INPUT, env=True)]
BAD = "Stop at a row that cannot be read, or leave it out and say so at the top of every report."
OnBadRow = Annotated[Literal["error", "skip"], option(BAD, "--on-bad-row", panel=INPUT, env=True)]
Device = Annotated[str, option("Where to compute.", "--device", metavar="auto|cpu|cuda[:N]", env=True)]
WHERE = "This machine, or the Ray cluster of RAY_ADDRESS (docs/ray.md); the numbers are the same."
Engine = Annotated[Literal["local", "ray"], option(WHERE, "--engine", env=True)]
MANY = (
    "Processes that compute on the CPU; auto is one for each core, where memory and dump are large enough. "
    "The numbers are the same."
)
Workers = Annotated[str, option(MANY, "--workers", metavar="auto|N", env=True)]
Seed = Annotated[int, option("Seed of the bootstrap intervals.", "--seed", env=True, min=0, max=MOST_SEED)]
PASTE = "Print the recommended method in this trainer's own syntax (verl, trl, slime, …)."
Trainer = Annotated[str | None, option(PASTE, "--for", metavar="TRAINER", env=True)]
Quiet = Annotated[bool, option("One line; no progress and no remarks.", "--quiet", "-q", env=True)]
Verbose = Annotated[bool, option("Every table, not the short answer.", "--verbose", "-v", env=True)]
Strict = Annotated[bool, option("Exit with 1 where the verdict is a bug.", "--strict")]
PAGE = "Where the HTML report goes."
Html = Annotated[Path | None, option(PAGE, "--out", "-o", "--html", metavar="FILE", panel=OUTPUT)]
RESULT = "Write the result as JSON; - is stdout."
Json = Annotated[Path | None, option(RESULT, "--json", metavar="FILE|-", panel=OUTPUT)]
Markdown = Annotated[
    Path | None, option("Write Markdown; - is stdout.", "--md", metavar="FILE|-", panel=OUTPUT)
]
TABLES = "Write every table of the page as CSV into this folder, which is made if it is missing."
Csv = Annotated[Path | None, option(TABLES, "--csv", metavar="FOLDER", panel=OUTPUT)]
VOCABULARY = "Show tokens as text: the tokenizer.json of the model (package tokenizers)."
Tokenizer = Annotated[Path | None, option(VOCABULARY, "--tokenizer", metavar="FILE", panel=OUTPUT)]
NoHtml = Annotated[bool, option("Write no HTML report.", "--no-html", panel=OUTPUT)]
LARGE = "Leave out of the HTML what draws its charts large (plotly, 2 MB)."
NoExplore = Annotated[bool, option(LARGE, "--no-explore", panel=OUTPUT, env=True)]
SUMS = "Write the sums that all numbers are made of, for `offpol-diag merge`."
Tally = Annotated[Path | None, option(SUMS, "--tally", metavar="FILE.tally", panel=OUTPUT)]


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
                f'"{ours}{sign}{theirs}" names no column',
                "write --columns rollout=NAME,old=NAME; mask=none says that no column is the mask",
            )
    return {ours.strip(): theirs.strip() for ours, _, theirs in split}


def names(text: str | None) -> tuple[str, ...]:
    """Parse `a,b` into a tuple of words."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())

"""Write the generated pages of this folder: `python docs/make.py`. A test fails when one is out of date."""

from __future__ import annotations

import io
import re
import runpy
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

import offpol_diag
from offpol_diag.cli import SAMPLE as DUMP
from offpol_diag.dump.forms import FORMS
from offpol_diag.dump.schema import POSITION, TABLE, TYPES
from offpol_diag.dump.writer import to_table, write_tables
from offpol_diag.number import Numbers
from offpol_diag.presets import Preset
from offpol_diag.presets.catalogue import load
from offpol_diag.presets.words import KINDS, method
from offpol_diag.report import answered
from offpol_diag.report.terminal import terminal
from offpol_diag.result import Result
from offpol_diag.trainers import TRAINERS, table

HERE = Path(__file__).parent
PRESET_HEADER = ("preset", "thresholds", "other names", "method", "denominator", "loss", "source")
DOCTOR_LINES = 20
MADE = "<!-- Made by `python docs/make.py`; do not edit. -->\n\n"


def presets() -> str:
    """The catalogue: every preset by kind, with its formulas and its source."""
    rows = load()
    kinds = ""
    for kind, text in KINDS.items():
        some = [_preset(one, one.name in rows.default) for one in rows.values() if one.kind == kind]
        kinds += f"\n## {kind}\n\nHere {text}.\n\n{_table(PRESET_HEADER, some)}"
    others: dict[str, list[str]] = {}
    for alias, target in rows.aliases.items():
        if target not in rows.rows:
            others.setdefault(target, []).append(f"`{alias}`")
    bounds = "; ".join(f"`{target}` ({', '.join(names)})" for target, names in others.items())
    return f"""{MADE}# Presets

{len(rows)} methods, grouped by what they do. The {len(rows.default)} in bold are evaluated by default, with
the defaults of the dump's trainer; `--presets all` evaluates all. r = π_train/π_rollout of a token,
Δ = log r, and ∏r is the product over a response of n tokens. The numerator is π_old (decoupled: the trainer
recomputes it); under *bypass* and in `ppo_is` it is π_θ. Thresholds follow the name, in the order given here:
`token_is@3`, `seq_mis@2..0.4..2.5`; so may [any other key](preset-files.md#changes-after-a-name).

`offpol-diag presets NAME` explains one, with its full source and the trainers that can express it, and
`--for TRAINER` prints its configuration. The presets are in
[`presets.toml`](../offpol_diag/presets/presets.toml); `--preset-file` reads a file of your own in the same
format ([grammar](preset-files.md)).

## What a dump of sampled tokens cannot evaluate

Score centering ([arXiv 2609.20807](https://arxiv.org/abs/2609.20807)) adds A·C to the loss, with
C = Σ_H sg(m − α p) log p over the sampler's top-k tokens H, whose log-probs such a dump does not hold.
It is on by default in SkyRL since 0.5.0 (`trainer.algorithm.score_centering.enabled`), and off in NeMo-RL
(`loss_fn.score_centering`, nightly) and prime-rl (`score_centering` of `ipo`). `--for` says so next to
their configurations.

## Newest version of each trainer that was read

{_table(("trainer", "version"), map(_read, TRAINERS))}{kinds}
## Names for a method at other bounds

{bounds}.
"""


def _read(trainer: str) -> Sequence[str]:
    own = table(trainer)
    date, commit = own["form"][0]["read"].split(maxsplit=1)
    return trainer, f"[{own['repository']}](https://github.com/{own['repository']}) {commit}, {date}"


def _preset(preset: Preset, usual: bool) -> Sequence[str]:
    name = f"**`{preset.name}`**" if usual else f"`{preset.name}`"
    names = (name, "..".join(preset.places), ", ".join(preset.aliases))
    takes_out = preset.reject or preset.veto
    denominator = preset.denominator if takes_out else ""
    return (*names, method(preset), denominator, preset.loss, linked(preset.source))


CITED = re.compile(
    r"([\w/-]+(?:\.\w+)?) ([0-9a-f]{8,9}) \((\d{4}-\d\d-\d\d)\)"
    r"(?: ([\w/.-]+\.(?:py|yaml|toml)):(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*))?"
)
"""Trainer or repository, commit, its date, file and lines, as sources cite them."""


def linked(source: str) -> str:
    """Link the first commit that a source cites to the lines it names, and leave out the rest."""
    found = CITED.search(source)
    if found is None:
        return source
    name, commit, date, file, lines = found.groups()
    repository = name if "/" in name else table(name.lower())["repository"]
    if file is None:
        return f"[{name}, {date}](https://github.com/{repository}/commit/{commit})"
    first, _, last = lines.split(",")[0].partition("-")
    place = f"#L{first}-L{last}" if last else f"#L{first}"
    short = f"{file.rpartition('/')[2]}:{lines}"
    return f"[{name} {short}](https://github.com/{repository}/blob/{commit}/{file}{place})"


def metrics() -> str:
    """Every metric with its formula, as in a result."""
    summary = _specimen()
    gap = {name: number for name, number in summary.whole.items() if "." not in name}
    per_preset = summary.preset("token_is")
    return f"""{MADE}# Metrics

JSON, the gate and every table use the same names. Δ = log π_train − log π_rollout of the sampled token,
r = e^Δ. Every value is computed in float64 from the values in the file.

## The gap between two policies

A bare name is drift 1 (rollout → old), `drift2.NAME` is old → current, and `total.NAME` is rollout → current.
The tokens of drift 2 were sampled from π_rollout and not from π_old: its `k3`, `chi2_token` and `tv` measure
the size of the update and are not divergences, and its `mean_ratio` need not be 1. K1 adds up: `k1` +
`drift2.k1` = `total.k1`.

{_numbers(gap)}
## One preset

Computed after the preset's weights, rejection and veto; a gate calls them `PRESET.NAME`. A token that is not
rejected may still have weight 0 (IcePop): `tokens_rejected` counts only rejection and veto, `tokens_weighted`
excludes tokens of weight 0 too.

{_numbers(per_preset)}"""


def _numbers(numbers: Numbers) -> str:
    rows = [(f"`{name}`", one.formula, one.over, one.unit) for name, one in numbers.items()]
    return _table(("name", "formula", "over", "unit"), rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def readme() -> str:
    """The README, with the output of its first command."""
    return _filled("../README.md")


def report() -> str:
    """The page on the report, with the output of commands."""
    return _filled("report.md")


def guide() -> str:
    """The guide to a run that collapsed, with the output of its commands."""
    return _filled("guides/my-run-collapsed.md")


def dumps() -> str:
    """The page on dumps, with the table of forms."""
    return _filled("dumps.md")


def _forms() -> str:
    """Every form with its trainer and its files."""
    rows = [(f"`{one.name}`", one.trainer or "any", f"`{one.files}`") for one in FORMS]
    return _table(("form", "trainer", "files"), rows)


def _columns() -> str:
    """Every column of a dump with its type and its use."""
    holds = {
        "tokens": "list of {}, one per token",
        "list": "list of {}",
        "row": "{}",
        "either": "{}, or list of {}",
    }
    rows = [
        (f"`{one.name}`", holds[one.holds].replace("{}", TYPES[one.stored][0]), one.meaning)
        for one in TABLE
        if one.name != POSITION
    ]
    return _table(
        ("column", "holds", "meaning and use"),
        [*rows, ("any other scalar", "", "for `--group-by` (host, engine, environment)")],
    )


def _filled(name: str) -> str:
    """A page with its excerpts renewed."""
    text = (HERE / name).read_text(encoding="utf-8")
    for name, make in EXCERPTS.items():
        before, start, rest = text.partition(f"<!-- {name}: made by `python docs/make.py` -->\n")
        if start:
            _, end, after = rest.partition(f"<!-- end of {name} -->\n")
            text = f"{before}{start}{make()}{end}{after}"
    return text


COLLAPSE = HERE.parent / "sample_data" / "collapse.parquet"
QUIET: dict[str, Any] = {"device": "cpu", "progress": False}


@cache
def _collapsed() -> list[str]:
    return _answered(offpol_diag.analyze(COLLAPSE, trainer="verl", **QUIET))


def _collapse() -> str:
    """The beginning of the answer on the run that collapsed."""
    lines = _collapsed()
    end = next(place for place, line in enumerate(lines) if line.startswith("How sure"))
    return _printed(*lines[2:end], "…")


def _collapse_in_full() -> str:
    """The whole answer on the run that collapsed, with a configuration for verl."""
    return _printed(*_collapsed())


def _gate() -> str:
    """The verdict on a bound at every step of the run that collapsed."""
    lines = _answered(offpol_diag.gate(COLLAPSE, max=["step:k3=0.015"], **QUIET))
    return _printed(*lines[2 : lines.index("", 3)], "…")


def _doctor() -> str:
    """The answer on the sample with its trainer's column shifted by one token."""
    lines = _answered(_diagnosed())[:DOCTOR_LINES]
    return _printed("$ offpol-diag doctor shifted.parquet", *lines, "…")


def _undecided() -> str:
    """The answer on the sample without its policy lag."""
    with tempfile.TemporaryDirectory() as folder:
        unknown = Path(folder) / "without_lag.parquet"
        pq.write_table(pq.read_table(DUMP).drop_columns(["policy_lag"]), unknown)
        lines = _answered(offpol_diag.doctor(unknown, **QUIET))
    return _printed("$ offpol-diag doctor without_lag.parquet", *lines[: lines.index("", 5)], "…")


@cache
def _diagnosed() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        broken = Path(folder) / "shifted.parquet"
        table = pq.read_table(DUMP)
        place = table.schema.get_field_index("old_log_probs")
        shifted = [row[1:] + row[-1:] for row in table.column(place).to_pylist()]
        column = pa.array(shifted, table.field(place).type)
        pq.write_table(table.set_column(place, table.field(place), column), broken)
        return offpol_diag.doctor(broken, **QUIET)


def _answered(summary: Result) -> list[str]:
    """The lines shown in a terminal of 100 columns."""
    console = Console(file=io.StringIO(), width=100, highlight=False, markup=False, emoji=False)
    return terminal(answered(summary), console=console).splitlines()


EXCERPTS: dict[str, Callable[[], str]] = {
    "doctor": _doctor,
    "undecided": _undecided,
    "collapse": _collapse,
    "collapse in full": _collapse_in_full,
    "gate": _gate,
    "forms": _forms,
    "columns": _columns,
}
"""Name in a page → what makes its text."""


def _printed(*lines: str) -> str:
    return "\n".join(("```text", *lines, "```")) + "\n"


def _specimen() -> Result:
    """A result with every metric in it; the values do not matter."""
    tokens = [[-1.0, -0.5], [-0.25]]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "specimen.parquet"
        columns = dict.fromkeys(("rollout_log_probs", "old_log_probs", "current_log_probs"), tokens)
        write_tables([to_table({**columns, "advantages": [1.0, -1.0]})], path)
        return offpol_diag.analyze(path, presets="token_is", **QUIET)


PAGES: dict[str, Callable[[], str]] = {
    "presets.md": presets,
    "metrics.md": metrics,
    "report.md": report,
    **runpy.run_path(str(HERE / "causes.py"))["PAGES"],
    "dumps.md": dumps,
    "../README.md": readme,
    "guides/my-run-collapsed.md": guide,
}
"""File → what makes its text."""


def main() -> None:
    """Write every page."""
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()

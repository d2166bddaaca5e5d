"""From options to a finished summary: what `analyze`, `compare` and `gate` share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offpol_diag.cli.defaults import judged
from offpol_diag.cli.options import names, pairs
from offpol_diag.cli.output import note
from offpol_diag.cli.progress import progress
from offpol_diag.errors import UsageError

if TYPE_CHECKING:
    from offpol_diag.analyze import Examined
    from offpol_diag.presets import Preset
    from offpol_diag.presets.catalogue import Catalogue
    from offpol_diag.summary import Summary
    from offpol_diag.sweep import SweepOptions

DEVICES = re.compile(r"auto|cpu|cuda(:\d+)?")
WORKERS = re.compile("0*[1-9][0-9]{0,3}")
LARGE = 16 << 20
"""Bytes of files for which workers are likely to pay."""
GPU = Path("/dev/nvidia0")


@dataclass(frozen=True)
class Request:
    """What to read and how, as the command line says it; the fields are the options of `options.py`."""

    preset_file: Path | None
    columns: str | None
    group_by: str | None
    device: str
    seed: int
    on_bad_row: Literal["error", "skip"]
    quiet: bool
    sequences: Path | None = None
    tally: Path | None = None
    engine: str = "local"
    workers: str = "auto"
    by_step: tuple[str, ...] = ()
    trainer: str | None = None

    def catalogue(self) -> Catalogue:
        """The presets that ship, and the user's; names that changed their meaning are told on stderr."""
        from offpol_diag.presets.catalogue import load

        with judged("preset_file", self.preset_file):
            found = load(self.preset_file)
        if found.replaced:
            note(f"{self.preset_file} gives its own meaning to {', '.join(found.replaced)}", self.quiet)
        return found

    def presets(self, named: str) -> tuple[Preset, ...]:
        """The presets named."""
        catalogue = self.catalogue()
        with judged("presets", named):
            return catalogue.resolve(named)

    def which_columns(self) -> dict[str, str] | None:
        """Our name of a column → the dump's, where the user says it."""
        with judged("columns", self.columns):
            return pairs(self.columns) or None

    def run(self, command: str, dumps: Sequence[str], presets: Sequence[Preset]) -> Summary:
        """Analyse, diagnose, recommend.

        Raises:
            OffpolError: the options, the dump or a preset file cannot be used.
        """
        with judged("for", self.trainer):
            trainer = trainer_name(self.trainer)
        return decided(ran(command, self.examined(dumps, presets).summary()), trainer)

    def examined(
        self, dumps: Sequence[str], presets: Sequence[Preset], against: str | None = None
    ) -> Examined:
        """Analyse, and keep what the intervals were made of.

        Raises:
            OffpolError: the options, the dump or a preset file cannot be used.
        """
        where = self.where(dumps)
        from offpol_diag.analyze import examine

        self.prepare(dumps)
        with progress(self.quiet) as report:
            return examine(
                dumps,
                presets=presets,
                group_by=names(self.group_by),
                sequences=self.sequences,
                tally=self.tally,
                progress=report,
                by_step=self.by_step,
                against=against,
                **where,
            )

    def sweep(self, dumps: Sequence[str], options: SweepOptions) -> Summary:
        """One preset at many thresholds.

        Raises:
            OffpolError: the options or the dump cannot be used.
        """
        where = self.where(dumps)
        from offpol_diag.sweep import sweep

        self.prepare(dumps)
        with progress(self.quiet) as report:
            return sweep(dumps, options, progress=report, **where)

    def where(self, dumps: Sequence[str]) -> dict[str, Any]:
        """How a dump is read, and where the work is done: what every loop over one takes.

        Raises:
            OffpolError: one of the options cannot be used.
        """
        columns = self.which_columns()
        with judged("device", self.device):
            _check_device(self.device)
        with judged("workers", self.workers):
            workers = _workers(self.workers)
        return {
            "columns": columns,
            "on_bad_row": self.on_bad_row,
            "device": self.device,
            "seed": self.seed,
            "engine": self.engine,
            "workers": workers,
        }

    def prepare(self, dumps: Sequence[str]) -> None:
        """Fork workers where they are likely needed: all is imported by now, and no thread is begun."""
        if self.workers != "1" and self.engine == "local" and _computes_here(self.device) and _large(dumps):
            from offpol_diag.run import pool

            pool.fork(_workers(self.workers))


def ran(command: str, summary: Summary) -> Summary:
    """The summary, made by a command."""
    return summary.model_copy(update={"run": summary.run.model_copy(update={"command": command})})


def decided(summary: Summary, trainer: str | None = None) -> Summary:
    """The summary with its recommendation, said to a trainer where one is named."""
    from offpol_diag.advice.recommend import advised

    return advised(summary, trainer)


def trainer_name(said: str | None) -> str | None:
    """The trainer's own name.

    Raises:
        UsageError: there is no such trainer.
    """
    from offpol_diag.trainers import trainer_named

    return None if said is None else trainer_named(said)


def _workers(said: str) -> int | None:
    """How many processes; None for as many as pay."""
    if said == "auto":
        return None
    if not WORKERS.fullmatch(said):
        raise UsageError(f'--workers "{said}" is no number of processes', "say auto, or 1 to 9999")
    return int(said)


def _computes_here(device: str) -> bool:
    """Whether that is likely the CPU, as far as can be told without asking a library."""
    return device == "cpu" or (device == "auto" and not GPU.exists())


def _large(dumps: Sequence[str]) -> bool:
    """Whether files are large, as far as can be told by a glance: of URLs and globs nothing is known."""
    return sum(size for dump in map(Path, dumps) for size in _sizes(dump)) >= LARGE


def _sizes(path: Path) -> Iterator[int]:
    try:
        found = path.rglob("*.parquet") if path.is_dir() else [path]
        yield from (one.stat().st_size for one in found)
    except OSError:
        return


def _check_device(device: str) -> None:
    if not DEVICES.fullmatch(device):
        raise UsageError(f'unknown device "{device}"', "say auto, cpu, cuda or cuda:N")

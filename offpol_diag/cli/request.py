"""Turn options into a finished summary, for every command that reads a dump."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from offpol_diag.cli import options
from offpol_diag.cli.defaults import judged
from offpol_diag.cli.options import names, pairs
from offpol_diag.cli.output import note
from offpol_diag.errors import OffpolError, UsageError

if TYPE_CHECKING:
    from offpol_diag.analyze import Examined
    from offpol_diag.forms import Reading
    from offpol_diag.presets import Preset
    from offpol_diag.presets.catalogue import Catalogue
    from offpol_diag.summary import Summary
    from offpol_diag.sweep import SweepOptions

DEVICES = re.compile(r"auto|cpu|cuda(:\d+)?")
WORKERS = re.compile("0*[1-9][0-9]{0,3}")
LARGE = 16 << 20
"""File bytes above which workers are probably faster."""
ADDRESSES = 1 << 30
"""Bytes of address space below which libraries end the process, or raise any error, as they are loaded."""


@dataclass(frozen=True)
class Request:
    """The dump and how to read it; the fields are options of commands, in the order of their help.

    Attributes:
        by_step: numbers to compute for each training step; no option.
    """

    preset_file: options.PresetFile = None
    columns: options.Columns = None
    form: options.Form = None
    align: options.Align = None
    join: options.Join = None
    on: options.On = None
    group_by: options.GroupBy = None
    on_bad_row: options.OnBadRow = "error"
    device: options.Device = "auto"
    engine: options.Engine = "local"
    workers: options.Workers = "auto"
    seed: options.Seed = 0
    trainer: options.Trainer = None
    quiet: options.Quiet = False
    by_step: tuple[str, ...] = ()

    def catalogue(self) -> Catalogue:
        """The built-in and the user's presets; names with a changed meaning are noted on stderr."""
        from offpol_diag.presets.catalogue import load

        with judged("preset_file", self.preset_file):
            found = load(self.preset_file)
        if found.replaced:
            note(f"{self.preset_file} gives its own meaning to {', '.join(found.replaced)}", self.quiet)
        return found

    def presets(self, named: str) -> tuple[Preset, ...]:
        """Return the named presets."""
        catalogue = self.catalogue()
        with judged("presets", named):
            return catalogue.resolve(named)

    def which_columns(self) -> dict[str, str] | None:
        """Return the user's overrides: canonical column name → the dump's."""
        with judged("columns", self.columns):
            return pairs(self.columns) or None

    def reading(self) -> Reading:
        """Return how files are read that are no canonical dump."""
        from offpol_diag.forms import Reading

        return Reading(self.form, self.align, self.join, self.on)

    def run(self, command: str, dumps: Sequence[str], presets: Sequence[Preset], **more: Any) -> Summary:
        """Analyse and diagnose dumps, and recommend a correction; `more` is passed to `analyze.examine`.

        Raises:
            OffpolError: the options, the dump or a preset file cannot be used.
        """
        trainer = trainer_name(self.trainer)
        found = self.examined(dumps, presets, trainer=trainer or "", **more)
        from offpol_diag.advice.recommend import advised

        return advised(ran(command, found.summary()), trainer)

    def examined(self, dumps: Sequence[str], presets: Sequence[Preset], **more: Any) -> Examined:
        """Analyse dumps, and keep the data behind the intervals; `more` is passed to `analyze.examine`.

        Raises:
            OffpolError: the options, the dump or a preset file cannot be used.
        """
        where = self._where()
        from offpol_diag.analyze import examine, largest_groups

        self.prepare(dumps)
        by = names(self.group_by)
        with self._quietly(), progress(self.quiet) as report:
            found = examine(
                dumps, presets=presets, group_by=by, progress=report, by_step=self.by_step, **more, **where
            )
        for one in found.study.kept:
            note(largest_groups(one), self.quiet)
        return found

    def sweep(self, dumps: Sequence[str], options: SweepOptions) -> Summary:
        """Evaluate one preset at many thresholds.

        Raises:
            OffpolError: the options or the dump cannot be used.
        """
        where = self._where()
        from offpol_diag.sweep import sweep

        self.prepare(dumps)
        with self._quietly(), progress(self.quiet) as report:
            return sweep(dumps, options, progress=report, **where)

    def _quietly(self) -> AbstractContextManager[None]:
        """Return a context in which, with --quiet, neither Ray nor the compiler says anything."""
        if not self.quiet:
            return nullcontext()
        if self.engine != "ray":
            return _without_warnings()
        from offpol_diag.run.ray import silent

        return silent()

    def _where(self) -> dict[str, Any]:
        """Return the arguments on reading and engine for every pass over a dump.

        Raises:
            OffpolError: one of the options cannot be used.
        """
        columns = self.which_columns()
        with judged("device", self.device):
            if not DEVICES.fullmatch(self.device):
                raise UsageError(f'unknown device "{self.device}"', "say auto, cpu, cuda or cuda:N")
        with judged("workers", self.workers):
            workers = _workers(self.workers)
        return {
            "columns": columns,
            "reading": self.reading(),
            "on_bad_row": self.on_bad_row,
            "device": self.device,
            "seed": self.seed,
            "engine": self.engine,
            "workers": workers,
        }

    def prepare(self, dumps: Sequence[str]) -> None:
        """Fork workers if they are probably needed, after all imports and before any thread is started."""
        if self.workers != "1" and self.engine == "local" and _bytes(dumps) >= LARGE:
            from offpol_diag.run import devices, pool

            if self.device == devices.CPU or (self.device == "auto" and not devices.present()):
                pool.fork(_workers(self.workers))


def with_request(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `request` by the options of `Request`, but for those named."""
    types = get_type_hints(Request, include_extras=True)
    shared = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name])
        for field in fields(Request)
        if field.name not in (*without, "by_step")
    ]

    def replaced(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            require_addresses()
            command(request=Request(**{one.name: given.pop(one.name) for one in shared}), **given)

        own = signature(command, eval_str=True).parameters.values()
        every = [two for one in own for two in (shared if one.name == "request" else [one])]
        run.__signature__ = Signature(every)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in every}
        return run

    return replaced


def require_addresses() -> None:
    """Refuse an address space in which a library would end the process while it is loaded.

    Raises:
        OffpolError: it is limited to less than `ADDRESSES`.
    """
    try:
        import resource
    except ImportError:  # not on Windows
        return
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if 0 <= most < ADDRESSES:
        raise OffpolError(
            f"there is not enough memory: the address space is limited to {most >> 20:,} MiB, and the "
            f"libraries take up to {ADDRESSES >> 20:,}",
            "raise the limit (ulimit -v), or lift it",
        )


def ran(command: str, summary: Summary) -> Summary:
    """Return the summary with the name of its command."""
    return summary.model_copy(update={"run": summary.run.model_copy(update={"command": command})})


def trainer_name(said: str | None) -> str | None:
    """Return a trainer's canonical name.

    Raises:
        UsageError: the trainer is unknown.
    """
    from offpol_diag.trainers import trainer_named

    with judged("for", said):
        return None if said is None else trainer_named(said)


def _workers(said: str) -> int | None:
    """Return the number of processes; None to choose automatically."""
    if said == "auto":
        return None
    if not WORKERS.fullmatch(said):
        raise UsageError(f'--workers "{said}" is no number of processes', "say auto, or 1 to 9999")
    return int(said)


def _bytes(dumps: Sequence[str]) -> int:
    """Return the size of local files and directories; URLs, globs and what cannot be read count nothing."""
    size = 0
    for path in map(Path, dumps):
        try:
            size += sum(one.stat().st_size for one in (path.rglob("*.parquet") if path.is_dir() else [path]))
        except OSError:
            continue
    return size


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Let the package log errors alone within the block."""
    logger = logging.getLogger("offpol_diag")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function that shows (rows done, rows in all) as a bar on stderr; None if it is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not (console.is_terminal and console.file.isatty()):  # FORCE_COLOR makes a log no terminal
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    rate = TextColumn("rows, {task.fields[rate]} rows/s,")
    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=None, rate="–")

        def report(done: int, total: int) -> None:
            speed = bar.tasks[0].speed
            bar.update(task, completed=done, total=total, rate="–" if speed is None else f"{speed:,.0f}")

        yield report

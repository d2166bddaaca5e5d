"""Surroundings of a long computation on the command line: memory, silence, progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import TypeVar

from offpol_diag.errors import OffpolError
from offpol_diag.requests import Computed, Sweep

Asked = TypeVar("Asked", bound=Computed)
ADDRESSES = 1 << 30
"""Bytes of address space below which libraries end the process, or raise any error, as they are loaded."""


@contextmanager
def running(request: Asked) -> Iterator[Asked]:
    """Yield the request with a progress bar and, with --quiet, without warnings."""
    import_module("offpol_diag.sweep" if isinstance(request, Sweep) else "offpol_diag.core.observe")
    with quietly(request), progress(request.quiet) as report:
        yield request.model_copy(update={"progress": report})


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


def quietly(request: Computed) -> AbstractContextManager[None]:
    """Return a context in which, with --quiet, there are no warnings."""
    return _without_warnings() if request.quiet else nullcontext()


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
def progress(
    quiet: bool, doing: str = "reading", unit: str = "rows"
) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function that shows (done, in all) as a bar on stderr; None if it is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not (console.is_terminal and console.file.isatty()):  # FORCE_COLOR makes a log no terminal
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    rate = TextColumn(f"{unit}, {{task.fields[rate]}} {unit}/s,")
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(doing, total=None, rate="–")

        def report(done: int, total: int) -> None:
            speed = bar.tasks[0].speed
            bar.update(task, completed=done, total=total, rate="–" if speed is None else f"{speed:,.0f}")

        yield report

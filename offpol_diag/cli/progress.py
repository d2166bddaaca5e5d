"""Show progress on stderr, if it is a terminal: a bar with the rate and the remaining time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""


@contextmanager
def progress(quiet: bool) -> Iterator[Report | None]:
    """Yield a function that reports progress, or None if progress is not shown."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
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

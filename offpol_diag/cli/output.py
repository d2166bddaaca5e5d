"""Where results go: files that are whole or absent, stdout for what was asked for, stderr for the rest."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offpol_diag.errors import UsageError

if TYPE_CHECKING:
    from offpol_diag.summary import Summary

STDOUT = Path("-")
URL = re.compile(r"[A-Za-z][\w+.-]+:/")
"""How a path looks that was given as a URL."""


def note(text: str, quiet: bool = False) -> None:
    """A remark to the person at the terminal, on stderr."""
    if not quiet:
        sys.stderr.write(f"{text}\n")


def print_line(text: str) -> None:
    """One line on stdout."""
    sys.stdout.write(f"{text}\n")


def check(target: Path | None, *sources: object) -> None:
    """Refuse, before any work is done, a place that cannot be written or that is one of the sources.

    Raises:
        UsageError: a directory, a file in a directory that does not exist, a file that is read, a URL.
    """
    if target is None or target == STDOUT:
        return
    if URL.match(str(target)):
        raise UsageError("results are written on this disk, and a URL is named", "name a file, and copy it")
    if target.is_dir():
        raise UsageError(f"{target}: is a directory", f"name a file in it: {target / 'report.html'}")
    if not target.parent.is_dir():
        raise UsageError(
            f"{target}: its directory does not exist", f"make it first: mkdir -p {target.parent}"
        )
    if target.resolve() in {Path(str(source)).resolve() for source in sources}:
        raise UsageError(f"{target}: is what is read", "write to another file")


def _check_whole(option: str, target: Path | None, form: str, example: str) -> None:
    """What is put in place as a whole cannot be piped, and a device is nothing to be replaced."""
    if target is not None and (target == STDOUT or (target.exists() and not target.is_file())):
        raise UsageError(f"{option} {target}: {form} needs a file", f"name one: {option} {example}")


def write(target: Path, text: str) -> None:
    """Write a text to a file, whole or not at all; `-` is stdout.

    Raises:
        UsageError: the place cannot be written.
    """
    if target == STDOUT:
        _write_stdout(text)
        return
    check(target)
    try:
        _replace(target.resolve(), text.encode())
    except OSError as error:
        raise UsageError(f"{target}: cannot be written ({error.strerror})", "choose another place") from error


def _write_stdout(text: str) -> None:
    """UTF-8 whatever the locale: what is piped is data."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def _replace(target: Path, data: bytes) -> None:
    if target.exists() and not target.is_file():  # a device or a pipe: there is nothing to put in its place
        target.write_bytes(data)
        return
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        beside.write_bytes(data)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def default_html(sources: Sequence[str]) -> Path:
    """`offpol-diag-<stem>.html` in the working directory, after the last part of the first source."""
    from offpol_diag.readers.urls import clean

    parts = re.split(r"[/\\]", clean(sources[0]))
    stems = [re.sub(r"[^A-Za-z0-9_.=+-]+", "-", part.rsplit(".", 1)[0]).strip(".-") for part in parts]
    return Path(f"offpol-diag-{next((stem for stem in reversed(stems) if stem), 'stdin')}.html")


# ---------------------------------------------------------------- results


def _html(summary: Summary) -> str:
    from offpol_diag.render.html import render_html

    return render_html(summary)


def _json(summary: Summary) -> str:
    return summary.to_json()


def _markdown(summary: Summary) -> str:
    from offpol_diag.render.markdown import render_markdown

    return render_markdown(summary)


def _junit(summary: Summary) -> str:
    from offpol_diag.render.junit import render_junit

    return render_junit(summary)


FORMATS: dict[str, Callable[[Summary], str]] = {
    "html": _html,
    "json": _json,
    "markdown": _markdown,
    "junit": _junit,
}


@dataclass(frozen=True)
class Outputs:
    """The forms in which a result was asked for.

    Args:
        html: a file, or None.
        json: a file, `-` for stdout, or None.
        markdown: a file, `-` for stdout, or None.
        quiet: whether remarks are left out.
        sequences: a Parquet file that the analysis itself writes, row by row, or None.
        tally: a file for the tally, or None.
        junit: a file for the gate's verdicts, or None.
    """

    html: Path | None = None
    json: Path | None = None
    markdown: Path | None = None
    quiet: bool = False
    sequences: Path | None = None
    tally: Path | None = None
    junit: Path | None = None

    def check(self, *sources: object) -> None:
        """Refuse places that cannot be written, two results in one place, and writing over what is read."""
        _check_whole("--sequences", self.sequences, "Parquet", "rows.parquet")
        _check_whole("--tally", self.tally, "a tally", "piece.tally.json.gz")
        targets = [*self._targets(), *(one for one in (self.sequences, self.tally) if one)]
        for target in targets:
            check(target, *sources)
        if len({target.resolve() for target in targets}) < len(targets):
            place = "stdout" if targets.count(STDOUT) > 1 else "one file"
            raise UsageError(f"two results cannot both go to {place}", "give each a file of its own")

    def begin(self) -> None:
        """Begin with what does not wait for a result, beside what does."""
        if self.html is not None:
            from offpol_diag.render import library

            library.begin()

    def write(self, summary: Summary) -> None:
        """Write every form that was asked for."""
        for form, render in FORMATS.items():
            target = getattr(self, form)
            if target is not None:
                write(target, render(summary))

    def say_where(self) -> None:
        """Print the path of every file, on stdout unless that holds a result."""
        say = note if self.takes_stdout() else print_line
        for form in (*FORMATS, "sequences", "tally"):
            target = getattr(self, form)
            if target not in (None, STDOUT) and not self.quiet:
                say(f"{form} written to {target}")

    def takes_stdout(self) -> bool:
        """Whether stdout holds a result, so that nothing else may go there."""
        return STDOUT in self._targets()

    def _targets(self) -> list[Path]:
        return [target for form in FORMATS if (target := getattr(self, form)) is not None]

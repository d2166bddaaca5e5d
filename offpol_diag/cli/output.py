"""Write results: files atomically, requested output to stdout, everything else to stderr.

All printed text passes through `put` or the terminal renderer.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from offpol_diag.errors import UsageError
from offpol_diag.printable import printable, printable_lines
from offpol_diag.wholefiles import beside

if TYPE_CHECKING:
    from offpol_diag.blocks import Section
    from offpol_diag.summary import Summary

STDOUT = Path("-")
URL = re.compile(r"[A-Za-z][\w+.-]+:/")
"""Pattern of a path that was given as a URL."""
LONGEST_NAME = 255
"""Maximum bytes of a file name."""
STEM = 100
"""Maximum characters of a dump's name used in a report's name."""


def put(stream: TextIO, *lines: str) -> None:
    """Print lines with invisible characters escaped, line ends within a line included."""
    stream.write("".join(f"{printable(line)}\n" for line in lines))


def note(text: str, quiet: bool = False) -> None:
    """Print a remark on stderr."""
    if not quiet:
        put(sys.stderr, text)


def print_line(text: str) -> None:
    """Print one line on stdout."""
    put(sys.stdout, text)


def check(target: Path | None, *sources: object) -> None:
    """Refuse, before any work is done, a target that cannot be written or that is one of the sources.

    Raises:
        UsageError: a directory, a file in a directory that does not exist, a file that is read, a URL, a name
            that no file can have.
    """
    if target is None or target == STDOUT:
        return
    _check_names(target)
    if URL.match(str(target)):
        raise UsageError("results are written on this disk, and a URL is named", "name a file, and copy it")
    with _told(target):
        _check_place(target, *sources)


def _check_place(target: Path, *sources: object) -> None:
    if target.is_dir():
        raise UsageError(f"{target}: is a directory", f"name a file in it: {target / 'report.html'}")
    if not target.parent.is_dir():
        raise UsageError(
            f"{target}: its directory does not exist", f"make it first: mkdir -p {target.parent}"
        )
    if target.resolve() in {Path(str(source)).resolve() for source in sources}:
        raise UsageError(f"{target}: is what is read", "write to another file")


def _check_names(*names: object) -> None:
    """Refuse invalid file names, for which system calls raise various errors."""
    for name in map(str, names):
        parts = [] if URL.match(name) else re.split(r"[/\\]", name)
        if "\0" in name or any(len(os.fsencode(part)) > LONGEST_NAME for part in parts):
            rule = f"it holds a NUL, or more than {LONGEST_NAME} bytes between slashes"
            raise UsageError(f"{name}: no file has such a name", rule)


def _check_whole(option: str, target: Path | None, form: str, example: str) -> None:
    """Refuse stdout, pipes and devices for files that are renamed into place."""
    if target is None:
        return
    _check_names(target)
    with _told(target):
        whole = target != STDOUT and (target.is_file() or not target.exists())
    if not whole:
        raise UsageError(f"{option} {target}: {form} needs a file", f"name one: {option} {example}")


def write_all(texts: Mapping[Path, str], ready: Mapping[Path, Path] | None = None, shown: str = "") -> None:
    """Write texts to their files atomically, and none before all can be written; `-` is stdout.

    Stdout, devices and pipes are written first, as they cannot be staged. If stdout is closed early, which is
    no failure, the files are still put in place.

    Args:
        texts: target → text.
        ready: target → complete temporary file to be renamed to it.
        shown: text for stdout, if stdout is no target.

    Raises:
        UsageError: a target cannot be written.
        BrokenPipeError: stdout was closed.
    """
    staged: dict[Path, Path] = {}
    try:
        for target, text in texts.items():
            if _replaceable(target):
                staged[target.resolve()] = _stage(target, text)
        left = None
        try:
            _write_streams(texts, shown)
        except BrokenPipeError as error:
            left = error
        for target, file in {**staged, **(ready or {})}.items():
            with _told(target):
                file.replace(target)
        if left:
            raise left
    finally:
        for file in staged.values():
            file.unlink(missing_ok=True)


def _write_streams(texts: Mapping[Path, str], shown: str) -> None:
    """Write to devices, pipes and stdout."""
    for target, text in texts.items():
        if target != STDOUT and not _replaceable(target):
            with _told(target):
                target.write_bytes(_encoded(text))
    sys.stdout.write(shown)
    sys.stdout.flush()
    if STDOUT in texts:
        _write_stdout(texts[STDOUT])


def _stage(target: Path, text: str) -> Path:
    check(target)
    file = beside(target.resolve())
    try:
        with _told(target):
            file.write_bytes(_encoded(text))
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    return file


def _replaceable(target: Path) -> bool:
    return target != STDOUT and (target.is_file() or not target.exists())


def _encoded(text: str) -> bytes:
    """Encode as UTF-8, whatever the locale."""
    return text.encode("utf-8", "backslashreplace")


@contextmanager
def _told(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{target}: cannot be written ({error.strerror})", "choose another place") from error


def _write_stdout(text: str) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(_encoded(text))
    sys.stdout.buffer.flush()


def default_html(sources: Sequence[str]) -> Path:
    """Return `offpol-diag-<stem>.html` in the working directory, named after the first source."""
    from offpol_diag.readers.urls import clean

    parts = re.split(r"[/\\]", clean(sources[0]))
    stems = [re.sub(r"[^A-Za-z0-9_.=+-]+", "-", part.rsplit(".", 1)[0]).strip(".-") for part in parts]
    stem = next((stem for stem in reversed(stems) if stem), "stdin")
    return Path(f"offpol-diag-{stem[:STEM].strip('.-')}.html")


# ---------------------------------------------------------------- results


def _html(summary: Summary) -> str:
    from offpol_diag.report.render.html import render_html

    return render_html(summary)


def _json(summary: Summary) -> str:
    return summary.to_json()


def _markdown(summary: Summary) -> str:
    from offpol_diag.report.render.markdown import render_markdown

    return printable_lines(render_markdown(summary))


def _junit(summary: Summary) -> str:
    from offpol_diag.report.render.junit import render_junit

    return render_junit(summary)


FORMATS: dict[str, Callable[[Summary], str]] = {
    "html": _html,
    "json": _json,
    "markdown": _markdown,
    "junit": _junit,
}


LABELS = {"html": "report", "markdown": "md"}


def shown(
    summary: Summary, verbose: bool, quiet: bool, sections: Sequence[Section] = (), whole: bool = False
) -> str:
    """Return a result as text for stdout, as `report.render.terminal.terminal` draws it."""
    from offpol_diag.report.render.terminal import terminal

    return terminal(summary, verbose, quiet, sections, whole)


def _suffixed(target: Path) -> Path:
    """Return a temporary path beside the target with its suffix, by which formats are recognised."""
    file = beside(target)
    return file.with_name(f"{file.name}{target.suffix}")


@dataclass(frozen=True)
class Staged:
    """Temporary files that the analysis itself writes, renamed when all other output is written."""

    sequences: Path | None = None
    tally: Path | None = None


@dataclass(frozen=True)
class Outputs:
    """The requested output forms of a result.

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
        """Refuse targets that cannot be written, two results with one target, and overwriting a source."""
        _check_names(*sources)
        _check_whole("--sequences", self.sequences, "Parquet", "rows.parquet")
        _check_whole("--tally", self.tally, "a tally", "piece.tally.json.gz")
        targets = [*self._targets(), *(one for one in (self.sequences, self.tally) if one)]
        for target in targets:
            check(target, *sources)
        if len({target.resolve() for target in targets}) < len(targets):
            place = "stdout" if targets.count(STDOUT) > 1 else "one file"
            raise UsageError(f"two results cannot both go to {place}", "give each a file of its own")

    @contextmanager
    def begin(self) -> Iterator[Staged]:
        """Start work that needs no result, in parallel with the analysis.

        Yields:
            The temporary files for the analysis to write, removed at the end of the block if still present.
        """
        if self.html is not None:
            from offpol_diag.report.render import library

            library.begin()
        staged = Staged(*(one and _suffixed(one.resolve()) for one in (self.sequences, self.tally)))
        try:
            yield staged
        finally:
            for file in (staged.sequences, staged.tally):
                if file:
                    with suppress(OSError):
                        file.unlink(missing_ok=True)

    def write(self, summary: Summary, drawn: Callable[[], str]) -> None:
        """Write every requested form, and print the drawn text unless stdout holds a result.

        Everything is rendered before anything is written, and written and printed before files are renamed.
        """
        texts = {
            target: render(summary)
            for form, render in FORMATS.items()
            if (target := getattr(self, form)) is not None
        }
        shown = "" if self.takes_stdout() else drawn()
        own = [one for one in (self.sequences, self.tally) if one]
        ready = {one.resolve(): _suffixed(one.resolve()) for one in own}
        write_all(texts, ready, shown)
        self._say_where()

    def _say_where(self) -> None:
        """Print the path of every file, on stdout unless that holds a result."""
        say = note if self.takes_stdout() else print_line
        for form in (*FORMATS, "sequences", "tally"):
            target = getattr(self, form)
            if target not in (None, STDOUT) and not self.quiet:
                say(f"{LABELS.get(form, form):<8}{target}")

    def takes_stdout(self) -> bool:
        """Return whether stdout holds a result, so that nothing else may be printed there."""
        return STDOUT in self._targets()

    def _targets(self) -> list[Path]:
        return [target for form in FORMATS if (target := getattr(self, form)) is not None]

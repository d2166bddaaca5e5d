"""Write results: files atomically, requested output to stdout, everything else to stderr.

All printed text passes through `put`, `note`, `emit` or the terminal renderer.
"""

from __future__ import annotations

import glob
import io
import os
import re
import select
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from offpol_diag.errors import UsageError
from offpol_diag.printable import printable

if TYPE_CHECKING:
    from offpol_diag.check import Checked
    from offpol_diag.options import Request
    from offpol_diag.result import Result

STDOUT = Path("-")
URL = re.compile(r"[A-Za-z][\w+.-]+:/")
"""Pattern of a path that was given as a URL."""
WILDCARD = re.compile(r"\[[^\]]*\]|[*?]+")
"""Pattern of what stands for other characters in a glob."""
FILE_URL = "file://"
LONGEST_NAME, STEM = 255, 100
"""Maximum bytes of a file name, and characters of a dump's name used in a report's name."""
FORMS = {"out": "report", "json_file": "json", "md": "md", "junit": "junit"}
"""Field of a request that names the file of a form of the result → its label."""


# ---------------------------------------------------------------- streams


def put(stream: TextIO, *lines: str) -> None:
    """Print lines with invisible characters escaped, line ends within a line included."""
    stream.write("".join(f"{printable(line)}\n" for line in lines))


def note(text: str, quiet: bool = False) -> None:
    """Print a remark on stderr."""
    if not quiet:
        put(sys.stderr, text)


def emit(text: str, encoding: str = "utf-8") -> None:
    """Write all of a text to stdout, whether or not it is buffered or blocks.

    Raises:
        OSError: stdout is closed, its disk is full, or nobody reads it (BrokenPipeError).
    """
    data = memoryview(text.encode(encoding, "backslashreplace" if encoding == "utf-8" else "replace"))
    sys.stdout.flush()
    try:
        descriptor = sys.stdout.fileno()
    except io.UnsupportedOperation:  # a stream in memory
        sys.stdout.buffer.write(data)
        return
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


# ---------------------------------------------------------------- files


def check(target: Path, *sources: object) -> None:
    """Refuse, before any work is done, a target that cannot be written or that is one of the sources.

    Raises:
        UsageError: a directory, a file in a directory that does not exist, a file that is read, a URL, a name
            that no file can have.
    """
    if target == STDOUT:
        return
    check_names(target)
    if str(target).startswith("-"):
        hint = f"name a file, or - for stdout; write ./{target} for a file of that name"
        raise UsageError(f"{target} stands where a file is to be named", hint)
    if URL.match(str(target)):
        raise UsageError("results are written on this disk, and a URL is named", "name a file, and copy it")
    with _writing(target):
        target.resolve()
        if target.is_dir():
            raise UsageError(f"{target}: is a directory", f"name a file in it: {target / 'report.html'}")
        if not target.parent.is_dir():
            raise UsageError(
                f"{target}: its directory does not exist", f"make it first: mkdir -p {target.parent}"
            )
        if _replaceable(target) and not os.access(target.resolve().parent, os.W_OK):
            raise UsageError(
                f"{target}: cannot be written (its directory is read-only)", "choose another place"
            )
        if target.exists() and any(target.samefile(one) for one in _files(sources) if one.exists()):
            raise UsageError(f"{target}: is what is read", "write to another file")


def _files(sources: Iterable[object]) -> Iterator[Path]:
    """Yield the local files that sources stand for: files, those in directories, matches of globs."""
    for source in map(str, sources):
        local = source.removeprefix(FILE_URL)
        if source != str(STDOUT) and not URL.match(local):
            for path in map(Path, [local, *glob.iglob(local, recursive=True)]):  # noqa: PTH207
                yield from path.rglob("*.parquet") if path.is_dir() else [path]


def check_names(*names: object) -> None:
    """Refuse invalid file names, for which system calls raise various errors."""
    for name in map(str, names):
        parts = [] if URL.match(name) else re.split(r"[/\\]", name)
        if "\0" in name or any(len(os.fsencode(part)) > LONGEST_NAME for part in parts):
            rule = f"it holds a NUL, or more than {LONGEST_NAME} bytes between slashes"
            raise UsageError(f"{name}: no file has such a name", rule)


def write_all(texts: Mapping[Path, str], staged: Mapping[Path, Path] | None = None, shown: str = "") -> None:
    """Write texts to their files atomically, and none before all can be written; `-` is stdout.

    Stdout, devices and pipes are written first, as they cannot be staged. If stdout is closed early, which is
    no failure, the files are still put in place.

    Args:
        texts: target → text.
        staged: target → complete temporary file to be renamed to it.
        shown: text for stdout, if stdout is no target.

    Raises:
        UsageError: a target cannot be written.
        BrokenPipeError: stdout was closed.
    """
    from offpol_diag.files import beside, placed

    ready = dict(staged or {})
    try:
        for target, text in texts.items():
            if _replaceable(target):
                check(target)
                ready[target] = beside(target.resolve())
                with _writing(target):
                    if target.exists():
                        ready[target].touch(stat.S_IMODE(target.stat().st_mode))
                    ready[target].write_bytes(text.encode("utf-8", "backslashreplace"))
        left = None
        try:
            for target, text in texts.items():
                if target != STDOUT and not _replaceable(target):
                    with _writing(target):
                        target.write_bytes(text.encode("utf-8", "backslashreplace"))
            if STDOUT in texts:
                emit(texts[STDOUT])
            elif shown:
                emit(shown, sys.stdout.encoding or "utf-8")
        except BrokenPipeError as error:
            left = error
        for target, file in ready.items():
            with _writing(target):
                placed(file, target)
        if left:
            raise left
    finally:
        for file in ready.values():
            with suppress(OSError):
                file.unlink(missing_ok=True)


def _replaceable(target: Path) -> bool:
    return target != STDOUT and (target.is_file() or not target.exists())


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Explain errors of writing a file within the block."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{target}: cannot be written ({error.strerror})", "choose another place") from error
    except RuntimeError as error:  # what pathlib raises for it
        what = "cannot be written (a symbolic link to itself)"
        raise UsageError(f"{target}: {what}", "remove the link, or choose another place") from error


def default_html(sources: Sequence[str]) -> Path:
    """Return `offpol-diag-<stem>.html` in the working directory, named after the first source.

    Of a glob the stem is what is not a wildcard: `train_*.parquet` gives `train`.
    """
    from offpol_diag.printable import clean

    parts = re.split(r"[/\\]", clean(sources[0]))
    stems = [_stem(part.rsplit(".", 1)[0]) for part in parts]
    stem = next((stem for stem in reversed(stems) if stem), "stdin")
    return Path(f"offpol-diag-{stem[:STEM].strip('.-')}.html")


def _stem(name: str) -> str:
    """Return the name of a file or a glob as it may stand in another file's name."""
    fixed = WILDCARD.sub("-", name)
    if fixed != name:
        fixed = re.sub(r"[_.-]*-[_.-]*", "-", fixed).strip("_")
    return re.sub(r"[^A-Za-z0-9_.=+-]+", "-", fixed).strip(".-")


# ---------------------------------------------------------------- results


def render(form: str, result: Result | Checked) -> str:
    """Return a result in one of the `FORMS`."""
    if form == "out":
        from offpol_diag.report.page import page

        return page(result)
    if form == "json_file":
        return result.to_json()
    if form == "junit":
        from offpol_diag.report.gate import junit

        return junit(result)  # type: ignore[arg-type]
    from offpol_diag.report import answered
    from offpol_diag.report.markdown import markdown

    return markdown(answered(result))


SOURCES = ("preset_file", "tokenizer", "gates")
"""Fields of requests that name files that are read."""


@dataclass(frozen=True)
class Outputs:
    """What is written of a result.

    Args:
        targets: one of `FORMS`, or `sequences` → its file, or `-` for stdout.
        quiet: whether remarks are left out.
        sources: files that are read, which no file may replace.
        staged: `sequences`, where asked for, → the file that the analysis is to write.
    """

    targets: Mapping[str, Path]
    quiet: bool
    sources: Sequence[object]
    staged: Mapping[str, Path]

    @classmethod
    def of(cls, request: Request, *sources: object, html: Path | None = None) -> Outputs:
        """Return what a request writes, checked before any work is done; `html` is where a page goes anyway.

        Raises:
            UsageError: a target cannot be written, is that of another one, or is one of the sources.
        """
        given: dict[str, Any] = {"out": html} | {name: one for name, one in request if one is not None}
        if given.get("no_html"):
            del given["out"]
        named = {name: given[name] for name in (*FORMS, "sequences") if given.get(name)}
        sources = (*sources, *(given[name] for name in SOURCES if name in given))
        made = cls(named, request.quiet, sources, {})
        return replace(made, staged=made._checked())

    def _checked(self) -> dict[str, Path]:
        """Check the targets, and return the temporary files."""
        from offpol_diag.files import beside

        check_names(*self.sources)
        staged = {}
        if target := self.targets.get("sequences"):
            check_names(target)
            with _writing(target):
                if not _replaceable(target):
                    hint = "name one: --sequences rows.parquet"
                    raise UsageError(f"--sequences {target}: Parquet needs a file", hint)
                file = beside(target.resolve())
            staged["sequences"] = file.with_name(f"{file.name}{target.suffix}")
        targets = list(self.targets.values())
        for target in targets:
            check(target, *self.sources)
        if len({target.resolve() for target in targets}) < len(targets):
            place = "stdout" if targets.count(STDOUT) > 1 else "one file"
            raise UsageError(f"two results cannot both go to {place}", "give each a file of its own")
        return staged

    @contextmanager
    def begin(self) -> Iterator[Mapping[str, Path]]:
        """Yield `staged` for work that needs no result, and remove those files at the end of the block."""
        try:
            yield self.staged
        finally:
            for file in self.staged.values():
                with suppress(OSError):
                    file.unlink(missing_ok=True)

    def write(self, result: Result | Checked, verbose: bool = False) -> None:
        """Write every requested form, and draw the result on stdout unless that holds a form.

        Everything is rendered before anything is written, and written and printed before files are renamed.
        """
        from offpol_diag.report import answered
        from offpol_diag.report.terminal import terminal

        forms = [form for form in FORMS if form in self.targets]
        texts = {self.targets[form]: render(form, result) for form in forms}
        drawn = "" if self.takes_stdout() else terminal(answered(result), verbose, self.quiet)
        staged = {self.targets[name]: file for name, file in self.staged.items()}
        write_all(texts, staged, drawn)
        if self.quiet:
            return
        for form in (*FORMS, "sequences"):
            if self.targets.get(form, STDOUT) != STDOUT:
                say_where(FORMS.get(form, form), self.targets[form], self.takes_stdout())

    def takes_stdout(self) -> bool:
        """Return whether stdout holds a result, so that nothing else may be printed there."""
        return STDOUT in self.targets.values()


def say_where(label: str, target: Path | str, aside: bool = False) -> None:
    """Print where a file is: on stdout, or `aside` on stderr."""
    line = f"{label:<8}{target}"
    note(line) if aside else emit(f"{printable(line)}\n", sys.stdout.encoding or "utf-8")

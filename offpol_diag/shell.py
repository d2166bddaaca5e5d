"""A command's process: streams, files that appear whole or not at all, errors, signals, exit codes."""

from __future__ import annotations

import atexit
import errno
import gc
import glob
import io
import os
import re
import select
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TextIO

import typer

from offpol_diag.errors import OffpolError, UsageError
from offpol_diag.printable import is_url, printable

PROGRAM, STDOUT = "offpol-diag", Path("-")
FAILED, COULD_NOT_SAY, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
SIGNALS = {signal.SIGTERM: 143, signal.SIGHUP: 129}
"""Signals at which incomplete files are removed → exit code."""
GRACE = 5.0
"""Seconds during which a second signal (`timeout` sends two) is ignored, so that clean-up completes."""
LONGEST_LINE, LONGEST_NAME = 1600, 255
"""Most characters in a line of an error, and bytes in the name of a file."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF, errno.EROFS)
"""Errors of writing that are no bugs: no room, a closed stdout, or a disk that is read-only by now."""
NO_MEMORY = ("t allocate memory", "annot allocate memory", "failed to map segment", "can't start new thread")
"""In messages of torch, the system and its loader where memory is short, besides MemoryError."""
ADDRESSES = 1 << 30
"""Bytes of address space below which libraries end the process, or raise any error, as they are loaded."""
SELDOM = 1_000_000
"""Net number of new objects that triggers a collection; a small analysis makes about half as many."""
SIZES, SIZE = ("COLUMNS", "LINES", "TERMINAL_WIDTH"), re.compile("[1-9][0-9]{1,3}")
"""Environment variables of the terminal's size, and what they may be: rich raises on other values."""
THREADS = "OPENBLAS_NUM_THREADS"
NEAR = re.compile(r" (?:Did you mean (?P<words>.+)\?|\(Possible options: (?P<options>.+)\))$")
"""The suggestion at the end of typer's messages."""


# ---------------------------------------------------------------- the process


def tune() -> None:
    """Configure the process before a command's imports, which saves a third of its time.

    The garbage collector would scan all imported modules again and again; memory of batches is freed without
    it. BLAS threads would keep other cores busy while idle, unless the user sets their number. Arrow uses the
    heap that numpy uses, so that either can use what the other has freed.
    """
    for name in SIZES:
        if not SIZE.fullmatch(os.environ.get(name, "")):
            os.environ.pop(name, None)
    os.environ.setdefault(THREADS, "1")
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    gc.set_threshold(SELDOM)
    atexit.register(gc.freeze)


def run(app: Callable[..., object]) -> None:
    """Run the command line: open streams, signals, exit code."""
    while (number := os.open(os.devnull, os.O_RDONLY)) <= 2:  # what was closed may not become another file
        pass
    os.close(number)
    if sys.stdout is None:  # it was closed, and refuses text
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:  # it was closed, and swallows text
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, terminator())
            # else a second signal would end the interpreter while it exits with the code of the first
            atexit.register(signal.signal, number, signal.SIG_IGN)
    with exit_codes():
        code = app(prog_name=PROGRAM, standalone_mode=False)
        if isinstance(code, int):  # what typer makes of `typer.Exit`
            raise SystemExit(code)


def terminator() -> Callable[[int, object], None]:
    """Return a signal handler that exits like Ctrl-C, so that incomplete files are removed."""
    last = float("-inf")

    def leave(signum: int, frame: object) -> None:
        nonlocal last
        if time.monotonic() - last > GRACE:
            last = time.monotonic()
            raise SystemExit(SIGNALS[signal.Signals(signum)])

    return leave


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
        limit = f"the address space is limited to {most >> 20:,} MiB, and the libraries take up to 1,024"
        raise OffpolError(f"there is not enough memory: {limit}", "raise the limit (ulimit -v), or lift it")


# ---------------------------------------------------------------- errors


@contextmanager
def exit_codes(context: Any = None) -> Iterator[None]:
    """Turn what is raised within the block into a message on stderr and an exit code.

    A failed gate, and what `--strict` finds, are the only ways to 1: a crash is 2, or CI would read it as a
    verdict. `context` is typer's, of the command that runs: it knows where an argument was given.
    """
    try:
        yield
        sys.stdout.flush()
    except OffpolError as error:
        complain(error, place(context, error.argument))
        raise SystemExit(COULD_NOT_SAY) from error
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # typer's own answer to it is 1
            raise SystemExit(BROKEN_PIPE) from stop
        raise
    except typer.Exit as stop:
        raise SystemExit(stop.exit_code) from stop
    except (KeyboardInterrupt, typer.Abort) as error:
        with _stderr_may_fail():
            put(sys.stderr, "interrupted")
        raise SystemExit(INTERRUPTED) from error
    except BrokenPipeError as error:
        _silence(sys.stdout)
        raise SystemExit(BROKEN_PIPE) from error
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "ctx"):  # a usage error of typer
            complain(usage_error(error))
        elif isinstance(error, OSError) and error.errno in NO_ROOM:
            what = f"{error.filename or 'output'}: cannot be written ({error.strerror})"
            complain(OffpolError(what, "make room, or open stdout"))
            _silence(sys.stdout)
        elif isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
            what = f"there is not enough memory ({str(error).partition(chr(10))[0] or 'none is left'})"
            hint = "leave more memory free, say --threads 1, or choose fewer presets"
            complain(OffpolError(what, hint))
        else:
            with _stderr_may_fail():
                put(sys.stderr, *"".join(traceback.format_exception(error)).splitlines())
            hint = "please report it with the traceback above and what was run"
            complain(OffpolError("this is a bug in offpol-diag", hint))
        raise SystemExit(COULD_NOT_SAY) from error


def complain(error: OffpolError, where: str = "") -> None:
    """Print `error: …`, a blank line and `hint: …` on stderr, if anything can be printed there."""
    message, *details = map(_short, error.lines)
    with _stderr_may_fail():
        put(sys.stderr, f"error: {where}{': ' * bool(where)}{message}")
        sys.stderr.writelines(f"  {printable(one)}\n" for one in details)
        if error.hint:
            sys.stderr.write("\n")
            put(sys.stderr, f"hint: {_short(error.hint)}")


def place(context: Any, name: str) -> str:
    """Return where an argument was given: its flag, its environment variable, or its key in the file."""
    params = {one.name: one for one in context.command.params} if context else {}
    if name not in params:
        return name
    source, flag = getattr(context.get_parameter_source(name), "name", ""), params[name].opts[0]
    if source == "ENVIRONMENT":
        return str(params[name].envvar or f"{context.auto_envvar_prefix}_{name.upper()}")
    return f"{context.meta['settings']}: {key(params[name])}" if source == "DEFAULT_MAP" else str(flag)


def key(param: Any) -> str:
    """Return the name of an option of typer in the settings file: that of its flag."""
    return str(param.opts[0]).strip("-").replace("-", "_")


def usage_error(error: Any) -> UsageError:
    """Return a usage error of typer in the form of ours; without arguments there is the help, and 2."""
    if type(error).__name__ == "NoArgsIsHelpError":  # with rich, typer has printed the help already
        sys.stderr.write(error.format_message())
        raise SystemExit(COULD_NOT_SAY) from error
    param, reason = getattr(error, "param", None), str(getattr(error, "message", ""))
    message = reason if param is not None and reason else error.format_message()
    message = message[:1].lower() + message[1:].removesuffix(".")
    if param is not None and reason:
        message = f"{place(error.ctx, param.name)}: {message}"
    # typer knows the command unless an option lacks its value
    command = error.ctx.command_path if error.ctx else " ".join([PROGRAM, *sys.argv[1:2]]).split(" -")[0]
    hint, near = f"see `{command} --help`", NEAR.search(message)
    if near:
        message = message[: near.start()].removesuffix(".")
        hint = f"did you mean {(near['words'] or near['options']).replace(chr(39), '')}?"
    return UsageError(message, hint)


def _short(text: str) -> str:
    """Shorten a long text in the middle."""
    half = LONGEST_LINE // 2
    return text if len(text) <= LONGEST_LINE else f"{text[:half]} … {text[-half:]}"


@contextmanager
def _stderr_may_fail() -> Iterator[None]:
    """Let the block write to stderr, if that can be written at all."""
    try:
        yield
        sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)


def _silence(stream: TextIO) -> None:
    """Redirect a stream that cannot be written: the interpreter's final flush would end in exit code 120."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# ---------------------------------------------------------------- streams: all that is printed passes here


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


class Outputs:
    """The files that a command writes: checked before any work is done, and renamed when all are written.

    Args:
        targets: what is written (`report`, `json`, …) → its file, `-` for stdout, or None.
        sources: files, directories, globs and URLs that are read, and may not be written over.
        rows: Parquet that the work itself writes, to `staged`.

    Raises:
        UsageError: a target cannot be written, is that of another one, or is one of the sources.
    """

    def __init__(
        self, targets: Mapping[str, Path | None], *sources: object, rows: Path | None = None
    ) -> None:
        self.targets = {name: path for name, path in targets.items() if path is not None}
        self.takes_stdout = STDOUT in self.targets.values()
        self.rows, self.staged = rows, None if rows is None else _staged(rows)
        check_names(*sources)
        every = [*self.targets.values(), *([rows] if rows else [])]
        for target in every:
            check(target, *sources)
        if len({target.resolve() for target in every}) < len(every):
            where = "stdout" if every.count(STDOUT) > 1 else "one file"
            raise UsageError(f"two results cannot both go to {where}", "give each a file of its own")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.staged is not None:
            self.staged.unlink(missing_ok=True)

    def write(self, texts: Mapping[str, str], shown: str = "", quiet: bool = True) -> None:
        """Write the text of every target, print what is shown unless stdout is one, and say where files are.

        Nothing is written before all can be. Stdout, devices and pipes come first, as they cannot be staged.
        If stdout is closed early, which is no failure, the files are still put in place.

        Raises:
            UsageError: a target cannot be written.
            BrokenPipeError: stdout was closed.
        """
        from offpol_diag.files import beside, placed

        ready = {} if self.rows is None or self.staged is None else {self.rows: self.staged}
        given = {self.targets[name]: text.encode("utf-8", "backslashreplace") for name, text in texts.items()}
        try:
            for target, data in given.items():
                if _replaceable(target):
                    check(target)
                    ready[target] = beside(target.resolve())
                    with _writing(target):
                        if target.exists():
                            ready[target].touch(stat.S_IMODE(target.stat().st_mode))
                        ready[target].write_bytes(data)
            left = None
            try:
                for target, data in given.items():
                    if target == STDOUT:
                        emit(data.decode())
                    elif target not in ready:
                        with _writing(target):
                            target.write_bytes(data)
                if shown and not self.takes_stdout:
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
        named = self.targets | ({"sequences": self.rows} if self.rows else {})
        for name, target in named.items() if not quiet else ():
            if target != STDOUT:
                say_where(name, target, self.takes_stdout)


def say_where(label: str, target: Path | str, aside: bool = False) -> None:
    """Print where a file is: on stdout, or `aside` on stderr."""
    line = f"{label:<8}{target}"
    note(line) if aside else emit(f"{printable(line)}\n", sys.stdout.encoding or "utf-8")


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
    if is_url(str(target).replace(":/", "://", 1)):  # a path has one slash of it
        raise UsageError("results are written on this disk, and a URL is named", "name a file, and copy it")
    with _writing(target):
        target.resolve()
        if target.is_dir():
            raise UsageError(f"{target}: is a directory", f"name a file in it: {target / 'report.html'}")
        if not target.parent.is_dir():
            hint = f"make it first: mkdir -p {target.parent}"
            raise UsageError(f"{target}: its directory does not exist", hint)
        if _replaceable(target) and not os.access(target.resolve().parent, os.W_OK):
            why = "cannot be written (its directory is read-only)"
            raise UsageError(f"{target}: {why}", "choose another place")
        if target.exists() and any(target.samefile(one) for one in _local(sources) if one.exists()):
            raise UsageError(f"{target}: is what is read", "write to another file")


def check_names(*names: object) -> None:
    """Refuse invalid file names, for which system calls raise various errors."""
    for name in map(str, names):
        parts = [] if is_url(name) else re.split(r"[/\\]", name)
        if "\0" in name or any(len(os.fsencode(part)) > LONGEST_NAME for part in parts):
            rule = f"it holds a NUL, or more than {LONGEST_NAME} bytes between slashes"
            raise UsageError(f"{name}: no file has such a name", rule)


def _local(sources: tuple[object, ...]) -> Iterator[Path]:
    """Yield the local files that sources stand for: files, those in directories, matches of globs."""
    for source in map(str, sources):
        local = source.removeprefix("file://")
        if source != str(STDOUT) and not is_url(local):
            for path in map(Path, [local, *glob.iglob(local, recursive=True)]):  # noqa: PTH207
                yield from path.rglob("*.parquet") if path.is_dir() else [path]


def _staged(rows: Path) -> Path:
    """Return the temporary file of Parquet that is written to `rows` in the end."""
    from offpol_diag.files import beside

    check_names(rows)
    with _writing(rows):
        if not _replaceable(rows):
            hint = "name one: --sequences rows.parquet"
            raise UsageError(f"--sequences {rows}: Parquet needs a file", hint)
        file = beside(rows.resolve())
    return file.with_name(f"{file.name}{rows.suffix}")


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

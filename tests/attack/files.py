"""Attacks by inputs that grow, full disks, closed streams, odd targets and names that command."""

from __future__ import annotations

import ctypes
import io
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from attack.base import COMMANDS, DUMPS, FULL, OUTPUTS, READ, Attack, lines

# ---------------------------------------------------------------- inputs that grow


def dump(path: Path, lengths: Sequence[int], **columns: object) -> None:
    """Write a dump of rows of such lengths."""
    rng, ends = np.random.default_rng(0), np.concatenate(([0], np.cumsum(lengths)))
    rollout = -rng.exponential(1, int(ends[-1]))
    logs = (rollout, np.minimum(rollout + rng.normal(0, 0.01, len(rollout)), 0))
    names = ("rollout_log_probs", "old_log_probs")
    lists = {
        n: pa.ListArray.from_arrays(pa.array(ends, pa.int32()), x) for n, x in zip(names, logs, strict=True)
    }
    columns = {"step": pa.repeat(pa.scalar(1), len(lengths))} | columns
    table = pa.table(lists | {name: pa.array(x) for name, x in columns.items()})
    pq.write_table(
        table, path / "a.parquet", compression="zstd", store_schema=False, dictionary_pagesize_limit=1 << 27
    )


def of_values(path: Path, rows: int) -> None:
    """Write a column that has another value in every row."""
    dump(path, [3] * rows, host=[f"h{i}" for i in range(rows)])


def of_steps(path: Path, rows: int) -> None:
    """Write a step of its own in every row."""
    dump(path, [3] * rows, step=range(rows))


def masked(path: Path, rows: int) -> None:
    """Write rows of one token, of which all but one are masked."""
    mask = pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32), np.eye(1, rows, dtype=np.int8)[0])
    dump(path, [1] * rows, response_mask=mask)


def constant(path: Path, tokens: int, rows: int = 0) -> None:
    """Write a row of equal tokens after empty ones."""
    ends = pa.array(np.append(np.zeros(rows + 1, np.int64), tokens))
    logs = pa.LargeListArray.from_arrays(ends, pa.repeat(pa.scalar(0.0, pa.float32()), tokens))
    table = pa.table({"rollout_log_probs": logs, "old_log_probs": logs})
    pq.write_table(table, path / "a.parquet", compression="zstd", write_batch_size=1 << 22)


def deep(path: Path) -> None:
    """Write curves and a result of lists in lists."""
    lists = "[" * 200_000 + "]" * 200_000
    (path / "curves.jsonl").write_text(f'{{"_step": 1, "a": {lists}}}')
    (path / "r.json").write_text(f'{{"format": 1, "dump": {lists}}}')


def flipped(path: Path) -> None:
    """Flip a bit in the middle of a tally."""
    file = path / "a.tally"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def hostile(path: Path) -> None:
    """Write a column whose name and values begin a line that commands a CI system."""
    dump(path, [30] * 8, **{"host\n::error::x": ["a\n::error::y\x1b[1m"] * 8})


# ---------------------------------------------------------------- disks and streams


def full_disk() -> None:
    """Let no file grow beyond 400 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))


def into(number: int, path: str) -> Callable[[], None]:
    """Return a function that opens stdout (1) or stderr (2) on a file, or closes it."""

    def change() -> None:
        if path:
            os.dup2(os.open(path, os.O_WRONLY), number)
        else:
            os.close(number)
        if number == 2:
            raw = open(2, "wb", 0, closefd=False) if path else io.BytesIO()  # noqa: SIM115
            sys.stderr = sys.__stderr__ = io.TextIOWrapper(raw, write_through=True)

    return change


def unbuffered(change: Callable[[], None]) -> Callable[[], None]:
    """Make stdout as PYTHONUNBUFFERED does."""

    def both() -> None:
        change()
        sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), write_through=True)  # noqa: SIM115

    return both


def to_a_slow_pipe() -> None:
    """Make stdout a full pipe that does not block, whose reader begins half a second later."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b" " * 4096)
    if os.fork() == 0:
        os.close(writer)
        time.sleep(0.5)
        while os.read(reader, 1 << 16):
            pass
        os._exit(0)
    os.close(reader)
    os.dup2(writer, 1)
    os.close(writer)


def read_only(writable: bool = False) -> Callable[[], None]:
    """Return a function that mounts a read-only file system, or one of 16 kB, at `disk`."""
    new_mounts, private, ro = 0x20000, 1 << 18 | 1 << 14, 1

    def mount() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(new_mounts) == 0
        assert libc.mount(b"none", b"/", None, private, None) == 0
        Path("disk").mkdir(exist_ok=True)
        size = b"size=16k" if writable else b""
        assert libc.mount(b"tmpfs", b"disk", b"tmpfs", 0 if writable else ro, size) == 0

    return mount


def mounts() -> bool:
    """Return whether file systems can be mounted here."""
    with tempfile.TemporaryDirectory() as place:
        if (child := os.fork()) == 0:
            with suppress(AssertionError, OSError):
                os.chdir(place)
                read_only()()
                os._exit(0)
            os._exit(1)
        return os.waitpid(child, 0)[1] == 0


# ---------------------------------------------------------------- targets


def each_target(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a function that does something to every possible target."""

    def make(path: Path) -> None:
        for end in ("html", "json", "md", "tally", "parquet", "xml"):
            change(path / f"out.{end}")

    return make


def linked(path: Path) -> None:
    """Make a target a symbolic link to a file that is not there."""
    path.symlink_to(f"real-{path.name}")


def private(path: Path) -> None:
    """Make a file that only its owner may read."""
    path.write_text("old")
    path.chmod(0o600)


# ---------------------------------------------------------------- the table


JSON_OUT = tuple(f"{COMMANDS[one]} --json out.json" for one in ("merge", *DUMPS))
ON_DUMPS = tuple(f"{COMMANDS[one]} --json out.json" for one in DUMPS)
GROUPED = tuple(
    f"{COMMANDS[one]} --json out.json --group-by host" for one in ("analyze", "compare", "doctor")
)
PRINTED = tuple(
    COMMANDS[one] + (" --html b.html" if one == "report" else "")
    for one in COMMANDS
    if one not in ("convert", "recover")
)
STREAMED = tuple(
    f"{COMMANDS[one]} {option} -" + (" --html b.html" if one == "report" else "")
    for one in COMMANDS
    for option in ("--json", "--md", "--junit")
    if option in OUTPUTS[one]
)
TARGET = ("{out}",)

ON_FILES: tuple[Attack, ...] = (
    # ---------------------------------------------------------------- inputs that grow
    Attack(
        "`--group-by` on a column with another value in each of 30,000 rows",
        GROUPED,
        "the 1,000 largest groups are kept; all others are one row, with their number; with `--tally` 4,096 "
        "chosen by hash",
        lambda path: of_values(path, 30_000),
        left=TARGET,
    ),
    Attack(
        "a step of its own in each of 30,000 rows",
        ON_DUMPS,
        "an error with the limit",
        lambda path: of_steps(path, 30_000),
        code=2,
        says="training steps",
    ),
    Attack(
        "70,000 rows of one token, all but one masked",
        ON_DUMPS[:5],
        "batches have at most 32,768 rows",
        lambda path: masked(path, 70_000),
        left=TARGET,
    ),
    Attack(
        "70,000 empty rows",
        ON_DUMPS[:5],
        "batches have at most 32,768 rows",
        lambda path: dump(path, [0] * 70_000 + [30]),
        left=TARGET,
    ),
    Attack(
        "curves and a result of 200,000 lists in each other",
        (COMMANDS["check"], f"{COMMANDS['report']} --html out.html"),
        "an error",
        deep,
        code=2,
        says="holds no curves|is not a result",
    ),
    Attack(
        "a row of 5 million equal tokens (1 kB)",
        ON_DUMPS,
        "a sequence has at most 4,194,304 tokens",
        lambda path: constant(path, 5_000_000),
        code=2,
        says="holds 5000000 tokens",
    ),
    Attack(
        "a tally of which one bit is flipped",
        ("merge a.tally --quiet",),
        "refused by its digest",
        flipped,
        code=2,
        says="damaged",
    ),
    # ---------------------------------------------------------------- disks
    Attack(
        "no room on the disk for a file",
        lines(),
        "an error, and no file is left",
        limit=full_disk,
        code=2,
        says=FULL,
    ),
    Attack(
        "a file on a file system of 16 kB",
        tuple(line for line in lines(target="disk/out") if "--html disk" in line),
        "an error, and no file is left",
        limit=read_only(writable=True),
        code=2,
        says=FULL,
        left=("disk",),
        mounts=True,
    ),
    Attack(
        "a file on a read-only file system",
        lines(target="disk/out"),
        "an error, and no file is left",
        limit=read_only(),
        code=2,
        says=FULL,
        left=("disk",),
        mounts=True,
    ),
    # ---------------------------------------------------------------- streams
    *(
        Attack(
            f"a result for stdout, {how}{more}",
            STREAMED,
            "an error",
            limit=wrap(into(1, path)),
            code=2,
            says=FULL,
        )
        for how, path in {"onto a full disk": "/dev/full", "which is closed": ""}.items()
        for more, wrap in {"": lambda change: change, ", unbuffered": unbuffered}.items()
        if path or not more
    ),
    *(
        Attack(
            f"what is printed, {how}",
            PRINTED,
            "an error",
            limit=into(1, path),
            code=2,
            says=FULL,
        )
        for how, path in {"onto a full disk": "/dev/full", "with stdout closed": ""}.items()
    ),
    Attack(
        "a result for stdout, a full pipe that does not block",
        STREAMED,
        "it waits for its reader",
        limit=to_a_slow_pipe,
        left=None,
    ),
    *(
        Attack(
            f"stderr {how}",
            JSON_OUT,
            "the files are written",
            limit=into(2, path),
            left=TARGET,
        )
        for how, path in {"on a full disk": "/dev/full", "closed": ""}.items()
    ),
    *(
        Attack(
            f"stderr {how}, and the input is not there",
            (
                "gate MISSING --max k3=1",
                "merge MISSING",
                "report MISSING",
                "convert MISSING --to x",
                "recover MISSING",
            ),
            "exit code 2 all the same",
            limit=into(2, path),
            code=2,
        )
        for how, path in {"on a full disk": "/dev/full", "closed": ""}.items()
    ),
    Attack(
        "stdin closed", lines(), "the files are written", limit=partial(os.close, 0), own={}, left=("{out}",)
    ),
    Attack(
        "stdin closed, and it is the input",
        (
            *(
                "analyze - --html out.html",
                "doctor - --html out.html",
                "gate - --fail-on bug --html out.html",
            ),
            *(
                "check - --logged curves.jsonl",
                "compare - a.parquet --html out.html",
                "convert - --to out.parquet",
            ),
            *("sweep - --preset token_is --html out.html", "report - --html out.html"),
        ),
        "an error",
        limit=partial(os.close, 0),
        own={},
        code=2,
        says="error: .*\n\nhint: ",
    ),
    # ---------------------------------------------------------------- targets
    Attack(
        "a target that is a symbolic link",
        lines(),
        "the link is followed and stays",
        each_target(linked),
        left=("real-{out}",),
    ),
    Attack(
        "a target that is a link to itself",
        lines(),
        "an error",
        each_target(lambda path: path.symlink_to(path.name)),
        code=2,
        says=FULL,
    ),
    Attack(
        "a target that is a directory",
        lines(),
        "an error",
        each_target(Path.mkdir),
        code=2,
        says="directory|needs a file",
    ),
    Attack(
        "a name of 255 bytes",
        tuple(
            re.sub(r"out(\S+)", lambda found: f"out{'o' * (252 - len(found[1]))}{found[1]}", line)
            for line in lines()
        ),
        "it is written",
        left=TARGET,
    ),
    Attack(
        "a target that only its owner may read",
        tuple(line for line in lines() if not line.startswith("recover")),
        "the mode stays",
        each_target(private),
        left=TARGET,
    ),
    *(
        Attack(
            f"a target that is {how} {READ.get(command, 'a.parquet')}",
            lines(command),
            "an error",
            lambda path, link=link, command=command: [  # type: ignore[misc]
                link(path / f"out.{end}", path / READ.get(command, "a.parquet"))
                for end in ("html", "json", "md", "tally", "parquet", "xml")
            ],
            code=2,
            says="is what is read",
        )
        for how, link in {"a link to": Path.symlink_to, "a second name of": Path.hardlink_to}.items()
        for command in ("analyze", "merge", "gate", "check", "convert", "report")
    ),
    Attack(
        "a column name and values that begin a line with `::error::`",
        ("analyze {dump} -v --group-by host\\n::error::x",),
        "line ends and control characters are escaped",
        hostile,
        left=("offpol-diag-a.html",),
    ),
)

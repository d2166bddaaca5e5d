"""Attacks on a run, and how it answers: inputs that grow, full disks, closed streams, names that command.

`python tests/attacks.py` runs each row of `ATTACKS` in a fork of its own, and writes docs/attacks.md;
`tests/test_attacks.py` runs it with `--check`.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fuzz import runner

PAGE = Path(__file__).parents[1] / "docs/attacks.md"
MOST_BYTES = 2 << 30
"""Most memory of a run."""
TRACES = ("Traceback", "\n::error", "\x1b")
"""What no run prints."""


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        name: what is done.
        make: writes the input into a directory.
        command: arguments; `{dump}` is the dump.
        code: exit code.
        says: pattern of what is printed on stderr.
        answer: what the run does, in words.
        stdout: file that stdout goes to, None: it is captured; "" closes it.
        most: largest file that may be written, in bytes; None: any.
        left: names of files that are in the directory afterwards, besides the input.
    """

    name: str
    make: Callable[[Path], None]
    command: str
    code: int
    says: str
    answer: str
    stdout: str | None = None
    most: int | None = None
    left: tuple[str, ...] = ()


def dump(path: Path, lengths: Sequence[int], **columns: object) -> None:
    """Write a dump of rows of such lengths."""
    rng, ends = np.random.default_rng(0), np.concatenate(([0], np.cumsum(lengths)))
    rollout = -rng.exponential(1, int(ends[-1]))
    logs = (rollout, np.minimum(rollout + rng.normal(0, 0.01, len(rollout)), 0))
    names = ("rollout_log_probs", "old_log_probs")
    lists = {
        n: pa.ListArray.from_arrays(pa.array(ends, pa.int32()), x) for n, x in zip(names, logs, strict=True)
    }
    table = pa.table(lists | {name: pa.array(x) for name, x in columns.items()})
    pq.write_table(
        table, path / "a.parquet", compression="zstd", store_schema=False, dictionary_pagesize_limit=1 << 27
    )


def plain(path: Path) -> None:
    """Write a dump with nothing wrong."""
    dump(path, [30] * 8)


def of_values(path: Path) -> None:
    """Write a column that has another value in every row."""
    dump(path, [3] * 30_000, host=[f"h{i}" for i in range(30_000)])


def of_steps(path: Path) -> None:
    """Write a step of its own in every row."""
    dump(path, [3] * 30_000, step=range(30_000))


def of_text(path: Path) -> None:
    """Write two texts of 10 MB that 2,000 rows share."""
    texts = pa.array(["x" * 10_000_000, "x" * 10_000_000 + "y"])
    dump(path, [3] * 2000, group_id=pa.DictionaryArray.from_arrays(pa.array([0, 1] * 1000), texts))


def masked(path: Path) -> None:
    """Write rows of one token, of which all but one are masked."""
    rows = 40_000
    mask = pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32), np.eye(1, rows, dtype=np.int8)[0])
    dump(path, [1] * rows, response_mask=mask)


def empty(path: Path) -> None:
    """Write rows without tokens, and one with some."""
    dump(path, [0] * 40_000 + [30])


def constant(path: Path, tokens: int, rows: int = 0) -> None:
    """Write a row of equal tokens after empty ones."""
    ends = pa.array(np.append(np.zeros(rows + 1, np.int64), tokens))
    logs = pa.LargeListArray.from_arrays(ends, pa.repeat(pa.scalar(0.0, pa.float32()), tokens))
    table = pa.table({"rollout_log_probs": logs, "old_log_probs": logs})
    pq.write_table(table, path / "a.parquet", compression="zstd", write_batch_size=1 << 22)


def tally(path: Path) -> None:
    """Write a tally that declares 4,096 presets and as many replicates, and holds the sums of one."""
    plain(path)
    file = path / "a.tally.json"
    made = (
        "analyze",
        str(path / "a.parquet"),
        "--quiet",
        "--no-html",
        "--presets",
        "tis",
        "--tally",
        str(file),
    )
    with tempfile.TemporaryDirectory() as folder:
        runner.answer(runner.Input(made), Path(folder))
    contents = json.loads(file.read_text())
    (one,) = contents["settings"]["presets"].values()
    contents["settings"] |= {"presets": {f"p{i}": one for i in range(4096)}, "replicates": 4096}
    file.write_text(json.dumps(contents))


def hostile(path: Path) -> None:
    """Write a column whose name and values begin a line that commands a CI system."""
    dump(path, [30] * 8, **{"host\n::error::x": ["a\n::error::y\x1b[1m"] * 8})


def linked(path: Path) -> None:
    """Make the target a symbolic link."""
    plain(path)
    (path / "real.json").touch()
    (path / "out.json").symlink_to("real.json")


def looped(path: Path) -> None:
    """Make the target a symbolic link to itself."""
    plain(path)
    (path / "out.json").symlink_to("out.json")


WRITTEN = ("out.json",)
MANY = "analyze {dump} --quiet --no-html --json out.json"
FULL = "cannot be written"
DISKS = {"--html": "html", "--json": "json", "--md": "md", "--tally": "tally.json", "--sequences": "parquet"}
ATTACKS = (
    Attack(
        "`--group-by` on a column with another value in each of 30,000 rows",
        of_values,
        f"{MANY} --group-by host",
        0,
        "",
        "4,096 values are kept, chosen by hash; all others are one row, with their estimated number",
        left=WRITTEN,
    ),
    Attack(
        "a step of its own in each of 30,000 rows",
        of_steps,
        MANY,
        2,
        "training steps",
        "an error with the limit",
    ),
    Attack(
        "two texts of 10 MB that 2,000 rows share (64 kB)",
        of_text,
        MANY,
        0,
        "",
        "labels are shortened to 2 KiB and a digest",
        left=WRITTEN,
    ),
    Attack(
        "40,000 rows of one token, all but one masked",
        masked,
        MANY,
        0,
        "",
        "batches have at most 32,768 rows",
        left=WRITTEN,
    ),
    Attack("40,000 empty rows", empty, MANY, 0, "", "batches have at most 32,768 rows", left=WRITTEN),
    Attack(
        "a row of 5 million equal tokens (1 kB)",
        lambda path: constant(path, 5_000_000),
        MANY,
        2,
        "holds 5000000 tokens",
        "a sequence has at most 4,194,304 tokens",
    ),
    Attack(
        "a row of 17 million equal tokens among empty ones (1 kB)",
        lambda path: constant(path, 17_000_000, 60),
        MANY,
        2,
        "17000060 values",
        "refused by what its footer declares",
    ),
    Attack(
        "a tally that declares 4,096 presets and replicates",
        tally,
        "merge a.tally.json",
        2,
        "states",
        "sizes are compared with those of one replicate",
    ),
    *(
        Attack(
            f"no room on the disk for `{option}`",
            plain,
            f"analyze {{dump}} --quiet {option} out.{end}",
            2,
            FULL,
            "an error, and no file is left",
            most=2000,
        )
        for option, end in DISKS.items()
    ),
    Attack(
        "`--json -` onto a full disk",
        plain,
        "analyze {dump} --json -",
        2,
        FULL,
        "an error",
        stdout="/dev/full",
    ),
    Attack("the report onto a full disk", plain, "analyze {dump}", 2, FULL, "an error", stdout="/dev/full"),
    Attack("`--json -` with stdout closed", plain, "analyze {dump} --json -", 2, FULL, "an error", stdout=""),
    Attack(
        "a target that is a symbolic link",
        linked,
        MANY,
        0,
        "",
        "the link is followed and stays",
        left=("real.json",),
    ),
    Attack("a target that is a link to itself", looped, MANY, 2, FULL, "an error"),
    Attack(
        "a column name and values that begin a line with `::error::`",
        hostile,
        "analyze {dump} -v --group-by host\\n::error::x",
        0,
        "",
        "line ends and control characters are escaped",
        left=("offpol-diag-a.html",),
    ),
)


def run(attack: Attack, place: Path) -> tuple[list[str], float]:
    """Run an attack in a directory; return what is wrong with its answer, and its memory in bytes."""
    (place / "work").mkdir()
    if (maker := os.fork()) == 0:  # what making takes is not in what the run holds
        attack.make(place / "work")
        os._exit(0)
    if os.waitpid(maker, 0)[1]:
        return ["its input cannot be made"], 0
    words = [one.replace("{dump}", "a.parquet").replace("\\n", "\n") for one in attack.command.split()]

    def limit() -> None:
        if attack.most is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (attack.most, attack.most))
        if attack.stdout == "":
            os.close(1)
        elif attack.stdout:
            os.dup2(os.open(attack.stdout, os.O_WRONLY), 1)

    found = runner.answer(runner.Input(tuple(words), environment={"COLUMNS": "100"}), place, limit)
    wrong = []
    if found.code != attack.code:
        wrong.append(f"exit code {found.code}, not {attack.code}: {found.errors[-2000:]}")
    if not re.search(attack.says, found.errors):
        wrong.append(f"stderr does not say {attack.says!r}: {found.errors[-2000:]}")
    both = f"\n{found.errors}\n{found.out.decode(errors='replace')}"
    wrong += [f"{trace!r} is printed" for trace in TRACES if trace in both]
    if found.memory > MOST_BYTES:
        wrong.append(f"{found.memory / 2**30:.1f} GiB of memory")
    if sorted(found.changed) != sorted(attack.left):
        wrong.append(f"left behind: {sorted(found.changed)}, not {sorted(attack.left)}")
    return wrong, found.memory


def main() -> int:
    """Run every attack; write the table, or with `--check` compare it."""
    runner.warm()
    runner.MEMORY = 16 << 30  # what is held is measured, not what is reserved
    rows, failed = [], 0
    for attack in ATTACKS:
        with tempfile.TemporaryDirectory() as place:
            wrong, memory = run(attack, Path(place))
        failed += bool(wrong)
        answer = "; ".join(wrong) or "ok"
        sys.stdout.write(f"{attack.name} | {answer} | {memory / 2**30:.2f} GiB\n")
        sys.stdout.flush()
        command = attack.command.replace("{dump}", "a.parquet")
        rows.append(f"| {attack.name} | `{command}` | {attack.code} | {attack.answer} |")
    head = (
        "# Attacks\n\nWhat a run answers to inputs that grow, to disks and streams that are full or "
        "closed, and to names that\ncommand. Each needs less than 2 GiB, prints no traceback, and leaves no "
        "file but its results.\nWritten by `python tests/attacks.py`; `tests/test_attacks.py` runs them.\n\n"
        "| attack | command | exit code | answer |\n| --- | --- | --- | --- |\n"
    )
    page = head + "\n".join(rows) + "\n"
    if "--check" in sys.argv and page != PAGE.read_text(encoding="utf-8"):
        sys.stdout.write(f"{PAGE} says something else\n")
        failed += 1
    if not failed and "--check" not in sys.argv:
        PAGE.write_text(page, encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

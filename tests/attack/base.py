"""The form of an attack: a command, the damage done to its run, and the expected answer."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from fuzz import runner

MOST_BYTES = 2 << 30
"""Most memory of a run."""
TRACES = ("Traceback", "\n::error", "\x1b", "this is a bug")
"""Texts that no run prints."""
FULL = "cannot be (written|converted)|not written"

# ---------------------------------------------------------------- commands

COMMANDS = {
    "analyze": "analyze a.parquet --presets token_is --quiet --no-html",
    "merge": "merge a.tally --quiet --no-html",
    "compare": "compare a.parquet --presets token_is,seq_is --quiet",
    "sweep": "sweep a.parquet --preset token_is --quiet",
    "gate": "gate a.parquet --max k3=1 --quiet",
    "doctor": "doctor a.parquet --quiet",
    "check": "check a.parquet --logged curves.jsonl --trainer trl --quiet",
    "convert": "convert rows.jsonl --quiet",
    "recover": "recover lost.parquet --quiet",
    "report": "report r.json --quiet",
}
"""Command → its arguments on the files of `template`."""
DRAWN = {"--html": "html", "--json": "json", "--md": "md"}
OUTPUTS: dict[str, dict[str, str]] = {
    "analyze": DRAWN | {"--tally": "tally", "--sequences": "parquet"},
    "merge": DRAWN | {"--tally": "tally"},
    "compare": DRAWN,
    "sweep": DRAWN,
    "gate": DRAWN | {"--junit": "xml"},
    "doctor": DRAWN,
    "check": {"--json": "json", "--md": "md"},
    "convert": {"--to": "parquet"},
    "recover": {"--to": "parquet"},
    "report": {"--html": "html", "--md": "md"},
}
"""Command → option of each file that it writes, and how the file's name ends."""
READ = {"merge": "a.tally", "convert": "rows.jsonl", "check": "curves.jsonl", "report": "r.json"}
"""Command → what it reads, a.parquet of all others."""
DUMPS = ("analyze", "compare", "sweep", "gate", "doctor", "check")
"""Commands that read a dump."""


def template(folder: Path) -> None:
    """Write the files that `COMMANDS` read."""
    from offpol_diag.writer import DumpWriter

    (folder / "a.parquet").write_bytes(runner.dump(24))
    rows = pq.read_table(folder / "a.parquet", columns=["rollout_log_probs", "old_log_probs", "step"])
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows.to_pylist()))
    (folder / "curves.jsonl").write_text('{"_step": 1, "sampling/sampling_logp_difference/mean": 0.1}')
    writer = DumpWriter(folder / "lost.parquet").__enter__()
    writer.write(rollout_log_probs=[[-1.0, -2.0]] * 400, old_log_probs=[[-1.0, -2.0]] * 400)
    os.chdir(folder)
    ran = call(f"{COMMANDS['analyze']} --json r.json --tally a.tally", folder)
    assert ran.returncode == 0, ran.stderr
    os.kill(os.getpid(), signal.SIGKILL)  # which leaves the journal of the writer


def call(command: str, folder: Path, **more: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    words = [sys.executable, "-m", "offpol_diag", *command.split()]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, **more)  # type: ignore[call-overload, no-any-return]


def environment(changed: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process of its own; an empty value takes a variable away."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME", "TMPDIR") if name in os.environ}
    return {name: value for name, value in (kept | {"OMP_NUM_THREADS": "1"} | dict(changed)).items() if value}


def lines(*commands: str, target: str = "out") -> tuple[str, ...]:
    """Return a line for every file that commands (all of them, if none are named) write."""
    return tuple(
        f"{COMMANDS[command]} {option} {target}.{end}".replace("--no-html --html", "--html")
        + (" --html b.html" if needs(command, option) else "")
        for command in commands or COMMANDS
        for option, end in OUTPUTS[command].items()
    )


def needs(command: str, option: str) -> bool:
    """Return whether another file is written unless it is named."""
    return command == "report" and option != "--html"


# ---------------------------------------------------------------- attacks


@dataclass(frozen=True)
class Attack:
    """An attack on a command, and its expected answer.

    Attributes:
        name: what is done.
        lines: command lines; `{dump}` is the dump.
        make: changes the folder, which holds the files of `template`.
        code: exit code; None: several, which the answer names.
        says: pattern of what is printed on stderr.
        answer: what the run does, in words.
        limit: called in the process before the command.
        left: names of files that are new or changed afterwards; `{out}` is the target, None: any.
        mounts: whether a file system is mounted for it.
        own: environment of a process of its own; None: a fork of one that has imported everything.
        instead: done in place of one run; returns what is wrong with the answers.
    """

    name: str
    lines: Sequence[str]
    answer: str
    make: Callable[[Path], None] = lambda _: None
    code: int | None = 0
    says: str = ""
    limit: Callable[[], None] = lambda: None
    left: Sequence[str] | None = ()
    mounts: bool = False
    own: Mapping[str, str] | None = None
    instead: Callable[[str, Path], list[str]] | None = None


# ---------------------------------------------------------------- running


def target(line: str) -> str:
    """Return the file that a line names as its output."""
    return next((word for word in line.split() if word.startswith(("out", "disk"))), "")


def tried(attack: Attack, line: str, given: Path, place: Path) -> list[str]:
    """Run an attack on a line in a directory; return what is wrong with its answer."""
    work = place / "work"
    shutil.copytree(given, work, symlinks=True)
    if (maker := os.fork()) == 0:  # what making takes is not in what the run holds
        attack.make(work)
        os._exit(0)
    if os.waitpid(maker, 0)[1]:
        return ["its input cannot be made"]
    before = state(work)
    line = line.replace("{dump}", "a.parquet")
    words = tuple(one.replace("\\n", "\n") for one in line.split())
    wrong, code, errors, out = [], attack.code, "", ""
    if attack.instead:
        wrong = attack.instead(line, work)
    elif attack.own is not None:
        ran = call(line, work, env=environment(attack.own), preexec_fn=attack.limit)
        code, errors, out = ran.returncode, ran.stderr, ran.stdout
    else:
        found = runner.answer(runner.Input(words, environment={"COLUMNS": "100"}), place, attack.limit)
        code, errors, out = found.code, found.errors, found.out.decode(errors="replace")
        if found.memory > MOST_BYTES:
            wrong.append(f"{found.memory / 2**30:.1f} GiB of memory")
    if code != attack.code:
        wrong.append(f"exit code {code}, not {attack.code}: {errors[-1500:]}")
    if attack.says and not attack.instead and not re.search(attack.says, errors):
        wrong.append(f"stderr does not say {attack.says!r}: {errors[-1500:]}")
    wrong += [f"{trace!r} is printed" for trace in TRACES if trace in f"\n{errors}\n{out}"]
    after = state(work)
    changed = sorted(name for name in after.keys() | before if after.get(name) != before.get(name))
    changed = [name for name in changed if "lost.parquet" not in name and name != "b.html"]
    kept = [name for name in before if name in after and before[name][0] != after[name][0]]
    wrong += [f"{name} has another type or mode" for name in kept]
    expected = sorted(name.replace("{out}", target(line)) for name in attack.left or ())
    if attack.left is not None and changed != expected:
        wrong.append(f"left behind: {changed}, not {expected}")
    return wrong


def state(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the type and mode, and of files size and time, of all that is in a folder."""
    found = {path: path.lstat() for path in sorted(folder.rglob("*"))}
    return {
        str(path.relative_to(folder)): (s.st_mode, *(() if path.is_dir() else (s.st_size, s.st_mtime_ns)))
        for path, s in found.items()
    }

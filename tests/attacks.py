"""Attacks on a run, and how it answers: the table.

`python tests/attacks.py` tries each row of `ATTACKS` on every command that it concerns, each in a fork or a
process of its own, and writes docs/attacks.md. `tests/test_attacks.py` runs `--short`: one line of each row.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from attack.base import COMMANDS, template, tried
from attack.files import ON_FILES, mounts
from attack.processes import ON_PROCESSES
from fuzz import runner

PAGE = Path(__file__).parents[1] / "docs/attacks.md"
ATTACKS = (*ON_FILES, *ON_PROCESSES)


def main() -> int:
    """Run every attack; write the table, or with `--short` compare it."""
    runner.warm()
    runner.MEMORY = 16 << 30  # what is held is measured, not what is reserved
    short, only = "--short" in sys.argv, [word for word in sys.argv[1:] if word[0] != "-"]
    failed, rows, mounted = 0, [], mounts()
    with tempfile.TemporaryDirectory() as scratch:
        given = Path(scratch, "given")
        given.mkdir()
        if (maker := os.fork()) == 0:
            template(given)
        assert os.waitpid(maker, 0)[1] == signal.SIGKILL
        for at, attack in enumerate(ATTACKS):
            commands = dict.fromkeys(line.split()[0] for line in attack.lines)
            names = "all" if len(commands) == len(COMMANDS) else ", ".join(commands)
            code = "" if attack.code is None else attack.code
            rows.append(f"| {attack.name} | {names} | {code} | {attack.answer} |")
            if (only and not any(word in attack.name for word in only)) or (attack.mounts and not mounted):
                sys.stdout.write(f"{attack.name}: not tried\n")
                continue
            chosen = [attack.lines[at % len(attack.lines)]] if short else attack.lines
            for number, line in enumerate(chosen):
                place = Path(scratch, f"{at}-{number}")
                place.mkdir()
                wrong = tried(attack, line, given, place)
                shutil.rmtree(place)
                failed += bool(wrong)
                sys.stdout.write(f"{attack.name} | {line} | {'; '.join(wrong) or 'ok'}\n")
                sys.stdout.flush()
    head = (
        "# Attacks\n\nWhat a run answers to inputs that grow, to disks and streams that are full or closed, "
        "to odd targets, to\nnames that command, to scarce resources, to signals and to killed processes. "
        "Each needs less than 2 GiB, prints\nno traceback, and leaves no file but its results. Written by "
        "`python tests/attacks.py`, which tries every output\nof the commands named; `tests/test_attacks.py` "
        "tries one of each row.\n\n| attack | commands | exit code | answer |\n| --- | --- | --- | --- |\n"
    )
    page = head + "\n".join(rows) + "\n"
    if short and page != PAGE.read_text(encoding="utf-8"):
        sys.stdout.write(f"{PAGE} says something else\n")
        failed += 1
    if not (failed or short or only):
        PAGE.write_text(page, encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

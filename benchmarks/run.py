"""Run all benchmarks, or some.

    python benchmarks/run.py [--only NAME,NAME] [--sequences N] [--rounds N] [--write]

Each part is a script of its own and runs in a process of its own, one after the other. `--write` keeps the
results in benchmarks/results.json and writes docs/benchmarks.md and docs/scale.md from them. `--sequences` is
the largest dump; left out, each part takes the size that its claim is about.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import part
import report


def main() -> None:
    """Run the parts and print their sections; exit code 1 if one failed."""
    parser = part.options(__doc__)
    parser.add_argument("--only", type=_names, default=[*report.SECTIONS], help=", ".join(report.SECTIONS))
    given = parser.parse_args()
    failed = [name for name in given.only if not show(name, _passed_on(given))]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in report.SECTIONS:
            raise argparse.ArgumentTypeError(f"no part {name!r}; there are {', '.join(report.SECTIONS)}")
    return names


def _passed_on(given: argparse.Namespace) -> list[str]:
    sequences = [] if given.sequences is None else [f"--sequences={given.sequences}"]
    return [*sequences, f"--rounds={given.rounds}", f"--results={given.results}", *["--write"] * given.write]


def show(name: str, options: list[str]) -> bool:
    """Run one part and print its section as the page has it; return whether it succeeded."""
    command = [sys.executable, str(part.HERE / f"{name}.py"), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return False
    result = json.loads(done.stdout)
    said = result.get(part.NOTHING) or report.body(name, result)
    print(f"## {report.SECTIONS[name]}\n\n{said}\n", flush=True)
    return True


if __name__ == "__main__":
    main()

"""`python -m offpol_diag`, and the `offpol-diag` script."""

from __future__ import annotations

import gc
import sys
from importlib.util import find_spec

from offpol_diag.errors import install

NEEDED = (
    "typer",
    "rich",
    "pydantic",
    "threadpoolctl",
    "polars",
    "jinja2",
    "junitparser",
)
"""Modules of the extra `cli`."""


HELP = """Usage: offpol-diag [OPTIONS] COMMAND [ARGS]...

Off-policy mismatch in LLM reinforcement learning, from a dump of per-token log-probs.

Options:
  -V, --version  Print the version and exit.
  -h, --help     Show this message and exit.

No command runs in this installation, which has the writer only (offpol_diag.DumpWriter).
Not installed: {missing}.
The extra `cli` brings them: {install}
"""
"""Help where what the commands need is not installed."""


def _without(missing: list[str], arguments: list[str]) -> str:
    """Return what `--version` and `--help` print where modules of the commands are missing, else nothing."""
    if arguments and arguments[0] in ("-V", "--version"):
        from importlib.metadata import version  # slow

        return f"offpol-diag {version('offpol-diag')}\n"
    asked = not {"-h", "--help"}.isdisjoint(arguments)
    return HELP.format(missing=", ".join(missing), install=install("cli")) if asked else ""


def main() -> None:
    """Run the command line; the exit code says how it went."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing and (said := _without(missing, sys.argv[1:])):
        sys.stdout.write(said)
        return
    if missing:
        sys.stderr.write(
            f"error: what the command line needs is not installed: {', '.join(missing)}\n\n"
            f"hint: {install('cli')}; without it offpol_diag.DumpWriter works\n"
        )
        raise SystemExit(2)
    gc.disable()  # the imports make much that stays
    from offpol_diag.cli import app
    from offpol_diag.shell import run

    gc.enable()
    run(app)


if __name__ == "__main__":
    main()

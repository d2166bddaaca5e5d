"""`python -m offpol_diag`, and the `offpol-diag` script."""

from __future__ import annotations

import gc
import sys
from importlib.util import find_spec

from offpol_diag.errors import install

NEEDED = ("typer", "rich", "pydantic", "polars", "jinja2", "junitparser")
"""Modules of the extra `cli`."""


def main() -> None:
    """Run the command line; the exit code says how it went."""
    if missing := ", ".join(name for name in NEEDED if find_spec(name) is None):
        if {"-V", "--version"} & {*sys.argv[1:2]}:
            from importlib.metadata import version  # slow

            sys.stdout.write(f"offpol-diag {version('offpol-diag')}\n")
            return
        sys.stderr.write(
            f"error: what the command line needs is not installed: {missing}\n\n"
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

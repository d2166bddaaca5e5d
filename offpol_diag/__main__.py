"""`python -m offpol_diag`, and the `offpol-diag` script."""

from __future__ import annotations

import gc
import sys
from importlib.util import find_spec

NEEDED = (
    "typer",
    "rich",
    "pydantic",
    "torch",
    "threadpoolctl",
    "tenacity",
    "polars",
    "jinja2",
    "junitparser",
    "pyro",
)
"""Modules of the extra `cli`."""


def main() -> None:
    """Run the command line; the exit code says how it went."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"error: what the command line needs is not installed: {', '.join(missing)}\n\n"
            "hint: pip install 'offpol-diag[cli]'; without it offpol_diag.DumpWriter and recover work\n"
        )
        raise SystemExit(2)
    gc.disable()  # the imports make much that stays
    from offpol_diag.cli import app
    from offpol_diag.cli.exits import run, tune

    tune()
    gc.enable()
    run(app)


if __name__ == "__main__":
    main()

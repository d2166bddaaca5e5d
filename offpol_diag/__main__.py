"""`python -m offpol_diag`, and the `offpol-diag` script."""

from __future__ import annotations

from offpol_diag.cli import app
from offpol_diag.cli.exits import run, tune


def main() -> None:
    """Run the command line; the exit code says how it went."""
    tune()
    run(app)


if __name__ == "__main__":
    main()

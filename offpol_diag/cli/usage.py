"""Convert typer's usage errors to our own form: one sentence with its location, and a hint.

Typer's exceptions have no public names; they are recognised by their attributes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from offpol_diag.cli import defaults
from offpol_diag.errors import UsageError

PROGRAM = "offpol-diag"
NEAR = re.compile(r" (?:Did you mean (?P<words>.+)\?|\(Possible options: (?P<options>.+)\))$")
"""Pattern of the suggestion at the end of typer's messages."""


@contextmanager
def spoken() -> Iterator[None]:
    """Convert typer's errors within the block to UsageError; without arguments the exit code is 2."""
    try:
        yield
    except Exception as error:
        if not (hasattr(error, "format_message") and hasattr(error, "ctx")):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # with rich, typer has printed the help already
            sys.stderr.write(error.format_message())
            raise SystemExit(2) from error
        raise _refusal(error) from error


def _refusal(error: Any) -> UsageError:
    message = _message(error)
    near = NEAR.search(message)
    if near is None:
        return UsageError(message, f"see `{_command(error)} --help`")
    proposed = (near["words"] or near["options"]).replace("'", "")
    return UsageError(message[: near.start()].removesuffix("."), f"did you mean {proposed}?")


def _message(error: Any) -> str:
    """Return typer's message; values from elsewhere than a flag are named after their source."""
    reason = str(getattr(error, "message", "")).removeprefix("Value error, ")
    param = getattr(error, "param", None)
    if param is None or not reason:
        return _plain(error.format_message())
    source = getattr(error.ctx.get_parameter_source(param.name), "name", "")
    place = param.envvar if source == "ENVIRONMENT" else param.opts[0]
    if source == "DEFAULT_MAP":
        place = f"{defaults.settings().file}: {param.name}"
    return f"{place}: {_plain(reason)}"


def _plain(message: str) -> str:
    """Return a message in the style of our own: lower case, without a final full stop."""
    return message[:1].lower() + message[1:].removesuffix(".")


def _command(error: Any) -> str:
    """Return the command whose help to suggest; typer knows it unless an option lacks its value."""
    if error.ctx is not None:
        return str(error.ctx.command_path)
    said = [word for word in sys.argv[1:2] if not word.startswith("-")]
    return " ".join([PROGRAM, *said])

"""What typer refuses, said the way everything else is: one sentence with its place, and a hint.

Typer's own exceptions have no public names; they are told by what they carry.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from offpol_diag.cli import defaults
from offpol_diag.errors import UsageError

PROGRAM = "offpol-diag"
NEAR = re.compile(r" (?:Did you mean (?P<words>.+)\?|\(Possible options: (?P<options>.+)\))$")
"""How typer ends a message that has something to propose."""


@runtime_checkable
class Refusal(Protocol):
    """What typer raises at arguments that it cannot take; `param` is there where one of them is bad."""

    ctx: Any

    def format_message(self) -> str:
        """What is wrong."""


@contextmanager
def spoken() -> Iterator[None]:
    """What typer refuses within the block becomes a UsageError."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, Refusal):
            raise
        raise _bare(error) if type(error).__name__ == "NoArgsIsHelpError" else _refusal(error) from error


def _bare(error: Refusal) -> SystemExit:
    """No argument at all: typer has drawn the help already, where it draws with rich."""
    sys.stderr.write(error.format_message())
    return SystemExit(2)


def _refusal(error: Refusal) -> UsageError:
    message = _message(error)
    near = NEAR.search(message)
    if near is None:
        return UsageError(message, f"see `{_command(error)} --help`")
    proposed = (near["words"] or near["options"]).replace("'", "")
    return UsageError(message[: near.start()].removesuffix("."), f"did you mean {proposed}?")


def _message(error: Refusal) -> str:
    """Typer's words; a value that came from elsewhere than a flag is named after its place."""
    reason = str(getattr(error, "message", "")).removeprefix("Value error, ")
    param = getattr(error, "param", None)
    if param is None or not reason:
        return _plain(error.format_message())
    return f"{_place(error.ctx, param)}: {_plain(reason)}"


def _place(context: Any, param: Any) -> str:
    source = getattr(context.get_parameter_source(param.name), "name", "")
    if source == "DEFAULT_MAP":
        return f"{defaults.settings().file}: {param.name}"
    return str(param.envvar) if source == "ENVIRONMENT" else str(param.opts[0])


def _plain(message: str) -> str:
    """As our own messages begin and end."""
    return message[:1].lower() + message[1:].removesuffix(".")


def _command(error: Refusal) -> str:
    """The command whose help tells more; typer knows it but where an option lacks its value."""
    if error.ctx is not None:
        return str(error.ctx.command_path)
    said = [word for word in sys.argv[1:2] if not word.startswith("-")]
    return " ".join([PROGRAM, *said])

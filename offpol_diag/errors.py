"""Exceptions of the package; anything else that is raised is a bug of ours and keeps its traceback."""

from __future__ import annotations

from collections.abc import Sequence


class OffpolError(Exception):
    """An error the user can act on; the command line prints it with its hint, and exits with 2.

    Args:
        message: what is wrong and where (file, row group, row, column), one sentence on one line.
        hint: what to do about it.
        details: further lines, one per mistake.

    Attributes:
        lines: the message and its details; line ends within them belong to quoted names.
    """

    def __init__(self, message: str, hint: str = "", details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.lines: tuple[str, ...] = (message, *details)
        self.hint = hint

    @property
    def message(self) -> str:
        """The message and its details, one per line."""
        return "\n  ".join(self.lines)

    def __str__(self) -> str:
        return self.message


class UsageError(OffpolError):
    """The arguments are invalid: an unknown preset, a bound that is no number."""


class DumpError(OffpolError):
    """The dump cannot be read, or its values cannot be log-probs."""


class PresetError(OffpolError):
    """A preset file has a mistake."""


class ConfigError(OffpolError):
    """A trainer's configuration cannot express the preset."""


class ResultError(OffpolError):
    """A result file cannot be read back: it is of another program or format."""


class MemoryShortage(OffpolError):
    """The device has too little memory for a single sequence."""


class ClusterError(OffpolError):
    """The cluster cannot be reached, or loses its workers."""


def install(extra: str) -> str:
    """Return the command that installs the package with an extra."""
    return f"pip install '.[{extra}]' in a clone of offpol-diag"


def did_you_mean(word: str, known: list[str], quote: str = "") -> str:
    """Suggest known words similar to `word` as a hint, each in quotes; empty if none is similar."""
    import difflib

    lower = {one.lower(): one for one in known}
    similar = difflib.get_close_matches(str(word).lower(), list(lower), n=3, cutoff=0.6)
    return f"did you mean {', '.join(f'{quote}{lower[one]}{quote}' for one in similar)}?" if similar else ""

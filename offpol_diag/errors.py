"""Exceptions of the package, as a tree.

    OffpolError            one clear sentence, and a hint; the CLI prints both and exits with 2
    ├── UsageError         invalid arguments (an unknown preset, a bound that is no number)
    ├── DumpError          a dump that cannot be read, or whose values cannot be log-probs
    ├── PresetError        a preset file with a mistake
    ├── ConfigError        a preset that a trainer's configuration cannot express
    ├── ResultError        a result file of another program or format
    ├── MemoryShortage     a sequence that exceeds the device's memory
    └── ClusterError       a cluster that cannot be reached, or that loses its workers

Anything else that is raised is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

PUBLISHED = False
"""Whether a package registry has offpol-diag: a release sets it."""


def install(extra: str) -> str:
    """Return the command that installs the package with an extra."""
    if PUBLISHED:
        return f"pip install 'offpol-diag[{extra}]'"
    return f"pip install '.[{extra}]' in a clone of offpol-diag"


class OffpolError(Exception):
    """An error the user can act on.

    Args:
        message: what is wrong and where (file, row group, row, column), one sentence on one line.
        hint: what to do about it.
        details: further lines, one per mistake.

    Attributes:
        lines: the message and its details; line ends within them belong to quoted names.
        argument: the argument in Python, or option, that is wrong; empty where it is none of them.
    """

    def __init__(self, message: str, hint: str = "", details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.lines: tuple[str, ...] = (message, *details)
        self.hint, self.argument = hint, ""

    @property
    def message(self) -> str:
        """The message and its details, one per line; the argument first."""
        return f"{self.argument}: " * bool(self.argument) + "\n  ".join(self.lines)

    def __str__(self) -> str:
        return self.message


class UsageError(OffpolError):
    """The arguments are invalid."""


class DumpError(OffpolError):
    """The dump cannot be read, or its values cannot be log-probs."""


class PresetError(OffpolError):
    """A preset file has a mistake."""


class ConfigError(OffpolError):
    """A trainer's configuration cannot express the preset."""


class ResultError(OffpolError):
    """A result file cannot be read back."""


class MemoryShortage(OffpolError):
    """The device has too little memory for a single sequence."""


class ClusterError(OffpolError):
    """The cluster cannot be reached, or fails."""


def did_you_mean(word: str, known: list[str], key: Callable[[str], str] = str.lower, quote: str = "") -> str:
    """Suggest known words similar to `word` as a hint; empty if none is similar.

    Args:
        word: what was given.
        known: what there is.
        key: what of a word is compared: all of it, ignoring case.
        quote: what stands around each word.
    """
    import difflib

    keys = {key(one): one for one in known}
    near = difflib.get_close_matches(key(str(word)), list(keys), n=3, cutoff=0.6)
    return f"did you mean {', '.join(f'{quote}{keys[one]}{quote}' for one in near)}?" if near else ""

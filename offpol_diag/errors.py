"""What can go wrong, as a tree.

    OffpolError            one clear sentence, and a hint; the CLI prints both and exits with 2
    ├── UsageError         arguments that cannot be meant (an unknown preset, a bound that is no number)
    ├── DumpError          a dump that cannot be read, or whose values cannot be log-probs
    ├── PresetError        a preset file with a slip in it
    ├── GateFileError      a file of bounds with slips in it
    ├── ConfigError        a preset that a trainer's configuration cannot say
    ├── ResultError        a result file that is not ours, or of another format
    ├── MemoryShortage     a sequence that the device has no room for
    ├── WorkerError        worker processes that cannot be started, or are killed
    └── ClusterError       a cluster that cannot be reached, or that loses its workers

Anything else that is raised is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence


class OffpolError(Exception):
    """An error the user can act on.

    Args:
        message: what is wrong and where (file, row group, row, column), one sentence on one line.
        hint: what to do about it.
        details: further lines, one for each thing that is wrong.

    Attributes:
        lines: the message and its details: a line end within one of them is of a name, not ours.
    """

    def __init__(self, message: str, hint: str = "", details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.lines = (message, *details)
        self.hint = hint

    @property
    def message(self) -> str:
        """What is wrong, in as many lines as it takes."""
        return "\n  ".join(self.lines)


class UsageError(OffpolError):
    """The arguments cannot be meant."""


class DumpError(OffpolError):
    """The dump cannot be read, or its values cannot be what they claim to be."""


class PresetError(OffpolError):
    """A preset file has a slip in it."""


class GateFileError(OffpolError):
    """A file of bounds cannot be read, or has slips in it."""


class ConfigError(OffpolError):
    """A trainer's configuration cannot say the preset."""


class ResultError(OffpolError):
    """A result file cannot be read back."""


class MemoryShortage(OffpolError):
    """The device has no room for a single sequence."""


class WorkerError(OffpolError):
    """A worker process of this machine cannot be started, or was killed."""


class ClusterError(OffpolError):
    """The cluster cannot be reached, or does not do its work."""


def did_you_mean(word: str, known: list[str]) -> str:
    """The known words nearest to `word`, in any case, as the end of a hint; empty when none is near."""
    import difflib

    lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(word.lower(), list(lower), n=3, cutoff=0.6)
    return f"did you mean {', '.join(lower[one] for one in near)}?" if near else ""

"""Off-policy mismatch in LLM reinforcement learning: from per-token log-probs to numbers and a verdict.

    import offpol_diag

    result = offpol_diag.analyze("step_100.parquet", presets="token_is,seq_mis")
    result.number("k3").value

Importing the package imports nothing heavy; what it exports is imported when it is first asked for (PEP 562).
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offpol_diag.api import analyze, check, compare, convert, doctor, gate, report, rescore, sweep
    from offpol_diag.dump.writer import DumpWriter
    from offpol_diag.result import Result

    __version__: str

__all__ = [
    "DumpWriter",
    "Result",
    "__version__",
    "analyze",
    "check",
    "compare",
    "convert",
    "doctor",
    "gate",
    "report",
    "rescore",
    "sweep",
]
_HOMES = {name: "offpol_diag.api" for name in __all__ if name != "__version__"}
_HOMES |= {"DumpWriter": "offpol_diag.dump.writer", "Result": "offpol_diag.result"}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib import metadata  # slow

        try:
            return metadata.version("offpol-diag")
        except metadata.PackageNotFoundError:  # a source tree on the path, not installed
            return "0+source"
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found: object = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as missing:
        if not missing.name or missing.name.startswith("offpol_diag"):
            raise
        from offpol_diag.errors import install

        raise ImportError(f"offpol_diag.{name} needs {missing.name}: {install('cli')}") from missing
    globals()[name] = found
    return found


class _Package(ModuleType):
    """This package: importing `offpol_diag.sweep` must not replace the function by the submodule."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

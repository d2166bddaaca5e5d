"""Dumps as an analysis opens and reads them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offpol_diag.core.observe import examine
from offpol_diag.diagnosis.decide import diagnosed
from offpol_diag.dump.convert import open_dump
from offpol_diag.dump.read import Dump
from offpol_diag.printable import clean
from offpol_diag.result import Result

OPENING = ("columns", "on_bad_row", "batch_tokens")


def opened(sources: str | Path | Sequence[str | Path], **how: Any) -> Dump:
    """Open files as one dump, as an analysis does."""
    named = [str(one) for one in ([sources] if isinstance(sources, str | Path) else sources)]
    dump = open_dump(named, **how)
    dump.given = tuple(map(clean, named))
    return dump


def analyze(sources: Any, *, group_by: Sequence[str] = (), **how: Any) -> Result:
    """Return the numbers of a dump and the verdict; other arguments are those of `examine`."""
    dump = opened(sources, group_by=group_by, **{name: how.pop(name) for name in OPENING if name in how})
    return diagnosed(examine(dump, group_by=group_by, **how))

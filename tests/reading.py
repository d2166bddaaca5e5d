"""Dumps as an analysis opens and reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from offpol_diag.core.observe import examine
from offpol_diag.diagnosis.decide import diagnosed
from offpol_diag.dump.convert import open_dump
from offpol_diag.dump.read import Dump
from offpol_diag.printable import clean
from offpol_diag.result import Result
from offpol_diag.run.threads import TOKENS


def opened(
    sources: str | Path | Sequence[str | Path],
    columns: Mapping[str, str] | None = None,
    group_by: Sequence[str] = (),
    batch_tokens: int | None = None,
    **how: Any,
) -> Dump:
    """Open files as one dump."""
    named = [str(one) for one in ([sources] if isinstance(sources, str | Path) else sources)]
    dump = open_dump(named, columns=columns, group_by=group_by, batch_tokens=batch_tokens or TOKENS, **how)
    dump.info = replace(dump.info, given=tuple(map(clean, named)))
    return dump


def analyze(
    sources: str | Path | Sequence[str | Path],
    *,
    columns: Mapping[str, str] | None = None,
    group_by: Sequence[str] = (),
    on_bad_row: str = "error",
    batch_tokens: int | None = None,
    **how: Any,
) -> Result:
    """Return the numbers of a dump and the verdict; other arguments are those of `examine`."""
    dump = opened(sources, columns, group_by, batch_tokens, on_bad_row=on_bad_row)
    return diagnosed(examine(dump, group_by=group_by, **how))

"""What was read, and what it took."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from typing import Any

from offpol_diag.accumulators import Extremes, GroupSample, Sums
from offpol_diag.readers import Dump
from offpol_diag.readout.reading import typed
from offpol_diag.summary import DumpFacts, Skipped
from offpol_diag.tally import Tally


def facts(dump: Dump, tally: Tally, made: Sequence[str] = ()) -> DumpFacts:
    """What was read, what was left out, and what was `made` of it."""
    skipped = dump.skipped
    return DumpFacts(
        **counts(tally),
        files=list(dump.info.files),
        rows=dump.info.rows,
        columns=dict(dump.info.columns),
        provenance=dict(dump.info.provenance),
        skipped=Skipped(count=skipped.count, examples=[str(example) for example in skipped.examples]),
        notes=[*dump.notes, *made],
    )


def counts(tally: Tally) -> dict[str, Any]:
    """Those facts that a tally knows, by their names in `DumpFacts`."""
    sums = typed(tally.states["sums"], Sums).read()
    groups = typed(tally.states["group"], GroupSample)
    tokens, sequences = (round(float(sums[name][0])) for name in ("tokens", "sequences"))
    return {
        "sequences": sequences,
        "tokens": tokens,
        "masked_tokens": round(float(typed(tally.states["logged"], Sums).read()["masked"][0])),
        "groups": groups.groups,
        "groups_exact": not groups.full,
        "mean_length": tokens / sequences,
        "max_length": int(typed(tally.states["ranges"], Extremes).read()["length"][1]),
    }


def peak_rss() -> int:
    """The most memory this process has held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""The product's estimates, and a choice among them that is not the product's.

The best of the methods that judge single tokens, and the default where that is not better by `MARGIN`:
what the default costs is noise and known, what no correction costs is a bias that may be larger than the
gradient. Methods that judge whole sequences are left out: here they are picked by chance only.
"""

from __future__ import annotations

from benchmarks.advice.dumps import TRAIN, Seen
from offpol_diag import evidence
from offpol_diag.candidates import DEFAULT

MARGIN = 0.003
"""In logs of the alignment."""


def proposed(seen: Seen, batch: int) -> str:
    """A candidate."""
    rows = evidence.alignment(seen.folds, TRAIN, seen.columns, batch).rows
    scores = {
        name: row.score for name, row in rows.items() if row.judges != "sequence" and row.score is not None
    }
    best = max(scores, key=scores.__getitem__, default=DEFAULT.name)
    return best if scores.get(best, 0.0) - scores.get(DEFAULT.name, 0.0) > MARGIN else DEFAULT.name

"""Policies that choose a method by a dump: fixed ones, rules of thumb, and the product's recommendation."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.advice.dumps import TRAIN, Seen
from offpol_diag import evidence, ladder

Policy = Callable[[Seen, int], str]
"""A dump, and the sequences in one update of the trainer → the name of a candidate."""

SHORT = 512
"""Tokens up to which a response is called short here; the guide gives no number."""


def recommended(seen: Seen, batch: int) -> str:
    """What the product chooses, by its own estimates."""
    found = ladder.choose(evidence.alignment(seen.folds, TRAIN, seen.columns, batch))
    return "none" if found is None else found.best


def by_severity(seen: Seen, batch: int) -> str:
    """verl's guide: nothing where the mismatch is negligible, then token TIS, sequence TIS where severe.

    Its FAQ calls a mean difference of probabilities below 0.005 normal; it alerts at |KL| 0.1 and χ² 1.
    """
    if seen.apart / seen.tokens < 0.005:
        return "none"
    severe = abs(seen.log_ratio / seen.tokens) > 0.1 or seen.squared / seen.tokens - 1 > 1
    return "seq_tis_2.0" if severe else "token_tis_2.0"


def by_length(seen: Seen, batch: int) -> str:
    """verl's guide: sequence TIS for short responses, geometric rejection for long ones."""
    if seen.apart / seen.tokens < 0.005:
        return "none"
    return "seq_tis_2.0" if seen.tokens / seen.sequences <= SHORT else "geo_rs_0.1%"


def always(name: str) -> Policy:
    """The same whatever the dump says."""
    return lambda seen, batch: name


CHOOSING: dict[str, Policy] = {"recommend": recommended}
"""Those that look at more than a few numbers of a dump."""
POLICIES: dict[str, Policy] = {
    **CHOOSING,
    "always token TIS 2": always("token_tis_2.0"),
    "always IcePop 0.5–5": always("token_icepop_0.5_5.0"),
    "always none": always("none"),
    "verl's guide, by severity": by_severity,
    "verl's guide, by length": by_length,
    "always sequence TIS 2": always("seq_tis_2.0"),
    "always sequence MIS 0.5–2": always("seq_mis_0.5_2.0"),
    "always geometric ±0.1%": always("geo_rs_0.1%"),
}

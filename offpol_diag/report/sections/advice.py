"""The recommended method beside its alternatives, and the configuration to paste."""

from __future__ import annotations

from offpol_diag.blocks import Block, Cell, Code, Table
from offpol_diag.summary import Recommendation

WEIGHTS = (
    "ess_tokens",
    "ess_sequences",
    "tokens_rejected",
    "truncated_high",
    "weight_mean",
    "weight_max",
    "truncated_low",
    "sequences_dropped",
)
"""Columns of the table of weights."""


def config(given: Recommendation) -> tuple[Block, ...]:
    """Return the configuration to paste, if a trainer is named."""
    return (Code("The configuration, ready to paste", given.config),) if given.config else ()


def weights(given: Recommendation) -> tuple[Block, ...]:
    """Return a table of the weights under the method, the runner-up and no correction."""
    rows: list[tuple[Cell, ...]] = [
        (title, *map(metrics.get, WEIGHTS)) for title, metrics in given.numbers.items() if metrics
    ]
    caption = "The method and those beside it, each at its own threshold"
    return (Table("numbers", caption, ("method", *WEIGHTS), tuple(rows)),) if rows else ()


def ranking(given: Recommendation) -> tuple[Block, ...]:
    """Return a table of the corrections by the estimated error of an update, the best first."""
    if not given.ranking:
        return ()
    rows: list[tuple[Cell, ...]] = [
        (one.title, f"{one.score:.3g}", one.behind or "recommended", "toss-up" if one.tie else "")
        for one in given.ranking
    ]
    notes = (UNSEEN,) if given.title and given.ranking[0].behind else ()
    caption = "Corrections by the estimated error of an update, best = 100"
    header = ("correction", "of 100", "error above the recommended one", "")
    return (Table("ranking", caption, header, tuple(rows), notes),)


UNSEEN = (
    "The recommended one is not first: beyond rounding, a dump of this size shows the noise that weights add "
    "better than the bias that they remove, which can turn a gradient around."
)

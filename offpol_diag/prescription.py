"""A recommendation in a trainer's own syntax."""

from __future__ import annotations

from offpol_diag import catalogue
from offpol_diag.configs import config_for
from offpol_diag.errors import ConfigError
from offpol_diag.summary import Alignment, AlignmentRow, Recommendation
from offpol_diag.tuning import tuned

NOTHING = "recompute"
"""The preset of no correction."""


def sayable(alignment: Alignment, trainer: str) -> Alignment:
    """The candidates, those refused that the trainer has no words for; to do nothing is always possible."""
    rows = {
        name: row if row.judges == "nothing" or _says(row, trainer) else row.model_copy(update=_mute(trainer))
        for name, row in alignment.rows.items()
    }
    return alignment.model_copy(update={"rows": rows})


def _mute(trainer: str) -> dict[str, str]:
    return {"refused": f"{trainer} has no words for it"}


def _says(row: AlignmentRow, trainer: str) -> bool:
    if row.method is None or row.refused is not None:
        return row.refused is not None
    try:
        config_for(tuned(catalogue.load()[row.method], row.settings), trainer)
    except ConfigError:
        return False
    return True


def prescribed(given: Recommendation, trainer: str) -> str | None:
    """Ready to paste; a comment that says why where the trainer has no words for it; None without an advice.

    Args:
        given: a recommendation.
        trainer: the trainer's own name (`configs.trainer_named`).
    """
    name = NOTHING if given.decision == "no correction needed" else given.method
    if name is None:
        return None
    try:
        return config_for(tuned(catalogue.load()[name], given.settings), trainer).text()
    except ConfigError as error:
        return f"# {error}\n"

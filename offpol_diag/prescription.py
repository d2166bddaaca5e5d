"""A recommendation in a trainer's own syntax."""

from __future__ import annotations

from offpol_diag import catalogue
from offpol_diag.configs import config_for
from offpol_diag.errors import ConfigError
from offpol_diag.summary import Recommendation
from offpol_diag.tuning import tuned

NOTHING = "recompute"
"""The preset of no correction."""


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
        return f"# {trainer} cannot say {name}: {error}\n"

"""Configuration of a recommendation in a trainer's own syntax."""

from __future__ import annotations

from collections.abc import Mapping

from offpol_diag.errors import ConfigError
from offpol_diag.presets import Policy, catalogue
from offpol_diag.presets.candidates import NOTHING
from offpol_diag.presets.tuning import tuned
from offpol_diag.summary import Recommendation
from offpol_diag.trainers import config_for


def expressible(name: str, settings: Mapping[str, str], trainer: str) -> bool:
    """Return whether a trainer can be configured for a preset with these settings."""
    try:
        config_for(tuned(catalogue.load()[name], settings), trainer)
    except ConfigError:
        return False
    return True


def prescribed(given: Recommendation, trainer: str, policy: Policy = "old") -> str | None:
    """Return the configuration to paste, or a comment if the trainer cannot express it, or None.

    Args:
        given: a recommendation; the result is None if it names no method.
        trainer: the trainer's own name (`trainers.trainer_named`).
        policy: the train policy of the dump.
    """
    name = NOTHING.preset_name(policy) if given.decision == "no correction needed" else given.method
    if name is None:
        return None
    try:
        return config_for(tuned(catalogue.load()[name], given.settings), trainer).text()
    except ConfigError as error:
        return f"# {error}\n"

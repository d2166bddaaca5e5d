"""Configuration of a recommendation in a trainer's own syntax."""

from __future__ import annotations

from collections.abc import Mapping

from offpol_diag.errors import ConfigError
from offpol_diag.presets import Policy, catalogue
from offpol_diag.presets.candidates import NOTHING
from offpol_diag.presets.tuning import tuned
from offpol_diag.result import Recommendation
from offpol_diag.trainers import config_for, sayable


def expressible(name: str, settings: Mapping[str, str], trainer: str) -> bool:
    """Return whether a trainer can be configured for a preset with these settings."""
    presets = catalogue.load()
    return name in presets and bool(sayable(tuned(presets[name], settings), (trainer,)))


def prescribed(given: Recommendation, trainer: str, policy: Policy = "old") -> str | None:
    """Return the configuration to paste, or a comment if the trainer cannot express it, or None.

    Args:
        given: a recommendation; the result is None if it names no method of this version.
        trainer: the trainer's own name (`trainers.trainer_named`).
        policy: the train policy of the dump.
    """
    name = NOTHING.preset_name(policy) if given.decision == "no correction needed" else given.method
    presets = catalogue.load()
    if name is None or name not in presets:
        return None
    try:
        return config_for(tuned(presets[name], given.settings), trainer).text()
    except ConfigError as error:
        return f"# {error}\n"

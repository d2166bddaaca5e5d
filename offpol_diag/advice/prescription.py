"""Configuration of a recommendation in a trainer's own syntax."""

from __future__ import annotations

from collections.abc import Mapping

from offpol_diag.errors import ConfigError
from offpol_diag.presets import Policy, catalogue
from offpol_diag.result import Recommendation
from offpol_diag.trainers.translate import config_for

NOTHING: Mapping[Policy, str] = {"old": "recompute", "current": "ppo_is"}
"""Numerator of the main drift → the preset without a correction."""


def prescribed(given: Recommendation, trainer: str, policy: Policy) -> str | None:
    """Return the configuration to paste, or a comment if the trainer cannot express it, or None.

    Args:
        given: a recommendation; the result is None if it names no method of this version.
        trainer: the trainer's own name (`trainers.trainer_named`).
        policy: the train policy of the dump.
    """
    name = NOTHING[policy] if given.decision == "no correction needed" else given.method
    presets = catalogue.load()
    if name is None or name not in presets:
        return None
    try:
        return config_for(presets[name], trainer).text()
    except ConfigError as error:
        return f"# {error}\n"

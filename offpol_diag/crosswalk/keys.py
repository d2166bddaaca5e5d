"""What of a preset, and of what it did to a batch, a number depends on; and the tokens that it keeps."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache

from offpol_diag.crosswalk.measures import Mask
from offpol_diag.crosswalk.view import View
from offpol_diag.metrics.outcome import applied
from offpol_diag.presets import Preset


@cache
def _on_tokens(preset: Preset) -> object:
    """The rules on tokens, and what else they depend on where they look at what others leave."""
    rules = applied(preset)
    found = tuple(rule for rule in rules.reject if rule.on_tokens)
    return (rules.reject, rules.veto) if any(rule.among == "left" for rule in found) else found


def kept(view: View) -> Hashable:
    """What is left of the tokens."""
    return view.did("tokens", "sequences")


def weighed(view: View) -> Hashable:
    """The same, and the weights."""
    return view.did("tokens", "sequences", "weights")


def acted(view: View) -> Hashable:
    """What the bounds of the weights did."""
    return view.did("weights")


KEPT = Mask(lambda view: view.done.kept.tokens, lambda view: _on_tokens(view.preset))
"""The tokens that pass the rules on tokens."""

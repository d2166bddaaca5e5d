"""The method that is recommended by default, and one of each other family, to be seen beside it."""

from __future__ import annotations

from collections.abc import Mapping

from offpol_diag.presets import Policy

FAMILIES: Mapping[Policy, tuple[str, ...]] = {
    "old": ("token_is", "token_icepop", "seq_is", "seq_mis", "geo_rs"),
    "current": (
        "bypass_pg_token_is",
        "bypass_pg_token_icepop",
        "pure_is",
        "bypass_ppo_clip_geo_rs",
        "bypass_ppo_clip_k3_rs",
    ),
}
"""Numerator of the main drift → built-in presets, the default first."""
DEFAULT, THRESHOLD = "token TIS at 2.0", "2.0"
"""The first of each family in words, and its threshold."""
NOTHING: Mapping[Policy, str] = {"old": "recompute", "current": "ppo_is"}
"""Numerator of the main drift → the preset without a correction."""

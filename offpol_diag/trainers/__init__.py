"""Trainers: a table for each, which `translate` applies, and what each logs of a step (`logged`)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from offpol_diag.errors import UsageError, did_you_mean

HERE = Path(__file__).parent
COMMON = (
    *("verl", "trl", "ms-swift", "openrlhf", "nemo-rl", "slime", "miles", "areal", "prime-rl", "skyrl"),
    *("flash-rl", "colossalai"),
)
"""The order in which trainers are listed; any other follows."""
TRAINERS = (*COMMON, *sorted({path.stem for path in HERE.glob("*.toml")} - {*COMMON}))


@cache
def table(trainer: str) -> dict[str, Any]:
    """Return a trainer's table."""
    return tomllib.loads((HERE / f"{trainer}.toml").read_text("utf-8"))


@cache
def logged_names(of: Literal["gap", "preset"]) -> dict[str, str]:
    """Return the names that trainers log for numbers of a gap or a preset: `rollout_corr/kl` → `k1`."""
    return {
        f"{prefix}{name}": ours
        for trainer in TRAINERS
        for logs in table(trainer).get("logs", ())
        for prefix in logs["prefixes"]
        for name, ours in logs.get(of, {}).items()
    }


def defaults(trainer: str) -> tuple[str, ...]:
    """Return a trainer's own methods at its default thresholds, where the usual presets lack them."""
    return tuple(table(trainer).get("defaults", ())) if trainer in TRAINERS else ()


def trainer_named(name: str) -> str:
    """Return a trainer's canonical name, ignoring case and `_` for `-`; refuse one that there is not."""
    result = name.strip().lower().replace("_", "-")
    if result not in TRAINERS:
        known = f'unknown trainer "{name}"; there are {", ".join(TRAINERS)}'
        raise UsageError(known, did_you_mean(result, list(TRAINERS)) or "name one of these")
    return result


def named_in(provenance: Mapping[str, object]) -> str:
    """Return the trainer that a dump's metadata names; empty if it names none that is known."""
    words = re.split(r"[^a-z0-9-]+", str(provenance.get("trainer", "")).lower().replace("_", "-"))
    return next((name for name in TRAINERS if name in words), "")

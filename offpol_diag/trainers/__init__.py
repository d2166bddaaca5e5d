"""Trainers: the configuration of a preset in the syntax of each, and what each logs of a step (`logged`).

There is one file per trainer, and a row of `TRAINERS` for each.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping

from offpol_diag.errors import ConfigError, UsageError, did_you_mean
from offpol_diag.presets import Preset
from offpol_diag.trainers import (
    areal,
    colossalai,
    miles,
    ms_swift,
    nemo_rl,
    openrlhf,
    prime_rl,
    skyrl,
    slime,
    trl,
    verl,
)
from offpol_diag.trainers.config import Config, Trainer
from offpol_diag.trainers.schema import Snippet

__all__ = [
    "DEFAULTS",
    "TRAINERS",
    "Config",
    "Snippet",
    "Trainer",
    "config_for",
    "sayable",
    "trainer_named",
]

TRAINERS: dict[str, Trainer] = {
    trainer.name: trainer
    for trainer in (
        verl.TRAINER,
        trl.TRAINER,
        ms_swift.TRAINER,
        openrlhf.TRAINER,
        nemo_rl.TRAINER,
        slime.TRAINER,
        miles.TRAINER,
        areal.TRAINER,
        prime_rl.TRAINER,
        skyrl.TRAINER,
        verl.FLASH_RL,
        colossalai.TRAINER,
    )
}
"""All trainers, the most common ones of the catalogue first."""

DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "verl": ("decoupled_geo_rs", "decoupled_geo_rs_seq_tis", "decoupled_k3_rs_seq_tis"),
    "trl": ("seq_icepop@inf..3", "token_is@3", "token_icepop@inf..3", "seq_is@3"),
    "ms-swift": ("token_icepop@inf..2", "geo_is", "seq_mask_tis@inf..2"),
    "nemo-rl": ("seq_error_mask", "seq_mask_tis@0.999..1.002"),
    "slime": ("slime_mis", "opsm@0.0001", "token_clip@0.5..2"),
    "miles": ("slime_mis", "opsm@0.0001"),
    "areal": ("token_mis@0.5..5", "geo_mask@0.999..1.002", "token_k3_mask"),
    "prime-rl": ("ipo", "dppo_tv", "bypass_pg_token_icepop@0.2..5"),
    "skyrl": ("seq_is@5", "decoupled_geo_rs@0.99..1.01", "seq_rs"),
}
"""Trainer → its own methods at the thresholds that it has by default, where the usual presets lack them."""


def config_for(preset: Preset, trainer: str) -> Config:
    """Return the preset in the trainer's own syntax.

    Raises:
        ConfigError: the trainer cannot express it; the message names the part, the hint other trainers.
        UsageError: no such trainer.
    """
    name = trainer_named(trainer)
    try:
        return TRAINERS[name].config(preset)
    except ConfigError as error:
        able = ", ".join(sayable(preset))
        hint = f"its config can be printed for {able}" if able else "no trainer's config can say it"
        raise ConfigError(f"{name} cannot say {preset.name}: {error.message}", hint) from error


def sayable(preset: Preset, trainers: Iterable[str] = TRAINERS) -> tuple[str, ...]:
    """List the trainers that can express the preset."""
    result = []
    for name in trainers:
        with contextlib.suppress(ConfigError):
            TRAINERS[name].config(preset)
            result.append(name)
    return tuple(result)


def trainer_named(name: str) -> str:
    """Return a trainer's canonical name; ignores case, and takes `_` for `-`.

    Raises:
        UsageError: there is no trainer of this name.
    """
    result = name.strip().lower().replace("_", "-")
    if result not in TRAINERS:
        known = list(TRAINERS)
        raise UsageError(
            f'unknown trainer "{name}"; there are {", ".join(known)}',
            did_you_mean(result, known) or "name one of these",
        )
    return result


def named_in(provenance: Mapping[str, object]) -> str:
    """Return the trainer that a dump's metadata names; empty if it names none that is known."""
    said = re.split(r"[^a-z0-9-]+", str(provenance.get("trainer", "")).lower().replace("_", "-"))
    return next((name for name in TRAINERS if name in said), "")

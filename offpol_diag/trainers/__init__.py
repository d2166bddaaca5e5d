"""Trainers: the configuration of a preset in the syntax of each, and what each logs of a step (`logged`).

There is a table per trainer, `TRAINER.toml`, which `translate` reads.
"""

from offpol_diag.trainers.translate import (
    TRAINERS,
    Config,
    config_for,
    defaults,
    named_in,
    sayable,
    table,
    trainer_named,
)
from offpol_diag.trainers.writers import Snippet

__all__ = [
    "TRAINERS",
    "Config",
    "Snippet",
    "config_for",
    "defaults",
    "named_in",
    "sayable",
    "table",
    "trainer_named",
]

"""Hypotheses, a row of a table each.

rounding   weights, activations, keys and values of fewer bits
changes    attention, positions, routers, adapters, other checkpoints: what is changed in a model, and undone
inputs     other prompts, other positions
table      the table: name, family, meaning, and the change; and why a hypothesis cannot be tested here
"""

from offpol_diag.rescore.variants.table import AS_GIVEN, HONEST, Given, Variant, numerics, table

__all__ = ["AS_GIVEN", "HONEST", "Given", "Variant", "numerics", "table"]

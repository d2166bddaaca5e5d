"""The columns that a preset reads."""

from __future__ import annotations

from offpol_diag.presets import Preset


def needs(preset: Preset, columns: set[str]) -> list[str]:
    """The columns this preset reads and the dump lacks, e.g. ['current_log_probs']."""
    policies = dict.fromkeys((preset.policy, *(rule.policy for rule in preset.reject if rule.policy)))
    wanted = [f"{policy}_log_probs" for policy in policies if policy != "rollout"]
    if any(rule.advantage != "any" for rule in preset.reject):
        wanted.append("advantages")
    return [column for column in wanted if column not in columns]

"""What verl logs, of four generations: 2025-10 (`mismatch/`), 2025-11, 2026-01 and 2026-03 (`rollout_corr/`).

Read off verl 4424616d, 418f964a, b178a3cd and 1dda039b. The whole dump is one trainer batch. Two things to
know before laying these beside our own numbers: verl clamps log-ratios to ±20, and its std and ESS are of
weights clamped to [1/C, C] ([0, C] since 2026-03).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offpol_diag.crosswalk.ends import Columns, Ranges
from offpol_diag.crosswalk.read import Read
from offpol_diag.crosswalk.verl import logged, names, observed
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset


@dataclass(frozen=True)
class Verl:
    """One generation's book; a preset's `logs` says which."""

    logs: str

    @property
    def shelf(self) -> str:
        """All generations are one trainer."""
        return "verl"

    def columns(self, scene: Scene, presets: tuple[Preset, ...]) -> Columns:
        """What is summed of presets of any generation, [S] each."""
        return observed.columns(scene, presets)

    def ranges(self, scene: Scene, presets: tuple[Preset, ...]) -> Ranges:
        """Whose smallest and largest value is kept."""
        return observed.ranges(scene, presets)

    def logged(self, preset: Preset, read: Read) -> dict[str, float]:
        """What this generation would have logged for the dump as one batch."""
        return logged.logged(preset, read)

    def names(self) -> Mapping[str, str]:
        """Each name → what it means there."""
        return names.names(self.logs)


BOOKS = tuple(Verl(logs) for logs in ("verl-2025-10", "verl-2025-11", "verl-2026-01", "verl-2026-03"))

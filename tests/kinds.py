"""One preset of each kind, which stand for all of them where their number is not tested."""

import re

from offpol_diag.presets import Preset, catalogue


def kinds(preset: Preset) -> set[str]:
    """Return each part of a preset with its options; of thresholds, whether they are there."""
    parts = {
        "weight": preset.weight,
        "veto": preset.veto,
        "loss": (preset.loss, preset.clip),
        "applied": (preset.policy, preset.denominator),
        **{f"reject {rule}": rule for rule in preset.reject},
    }
    return {re.sub(r"(?<==)-?\d[\d.e-]*", "x", f"{name.split()[0]}: {part}") for name, part in parts.items()}


def of_each_kind(presets: tuple[Preset, ...]) -> tuple[Preset, ...]:
    """Return the presets that have a part of a kind that none before them has, in their order."""
    seen, found = set[str](), list[Preset]()
    for preset in presets:
        if not kinds(preset) <= seen:
            found.append(preset)
            seen |= kinds(preset)
    return tuple(found)


EACH = of_each_kind(catalogue.load().resolve("all"))

"""One preset of each kind, which stand for all where their number is not tested; and some not shipped."""

import re

from offpol_diag.presets import Preset, Reject, Veto, Weight, catalogue


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


_OTHERS = {  # policy, weight, veto, rules
    "turns": ("old", Weight("segment", upper=1.1), Veto(lower=1e-3), Reject(over="segment", lower=0.9)),
    "rules": (
        "old",
        Weight("sum", upper=2.0, safety=5.0, safety_at="token"),
        Veto(0.4, 3.0),
        *(Reject(lower=0.5, upper=1.3), Reject("k2", "mean", upper=0.02)),
    ),
    "band": (
        "old",
        Weight("mean", "mask", 1.1, 0.9),
        Veto(upper=50.0),
        *(Reject(over="max", upper=3.0, advantage="against"), Reject("k1", "segment", upper=0.01)),
        Reject(over="min", lower=0.1),
    ),
    "raw": (
        "old",
        Weight("mean", "none"),
        None,
        *(Reject(over="sum", upper=3.0, advantage="against_or_zero"), Reject(upper=1.1, advantage="away")),
    ),
    "normed": (
        "old",
        Weight("segment", upper=1.5, normalize=True),
        None,
        Reject("binary_kl_max", "max", upper=0.02, advantage="negative"),
    ),
    "unbounded": (
        "old",
        Weight("sum", "none", safety=None, overflow="zero", normalize=True),
        Veto(upper=50.0),
        Reject(over="max", upper=3.0, safety=1.0),
    ),
    "safe": ("old", Weight(lower=0.99, safety=0.005), None, Reject("k1", "min", None, 0.0, "positive")),
    "bypass": ("current", None, None, Reject("ratio", "mean", 0.9, 1.2), Reject("tv", upper=0.3)),
    "batch": ("current", None, None, Reject("k3_reverse", "batch", upper=0.02)),
}
MADE = tuple(
    Preset(f"made_{name}", "", policy, weight, tuple(rules), veto)  # type: ignore[arg-type]
    for name, (policy, weight, veto, *rules) in _OTHERS.items()
)
"""What no preset that ships combines."""

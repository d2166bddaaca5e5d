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


def made(name: str, weight: Weight | None, *reject: Reject, veto: Veto | None = None, **more: str) -> Preset:
    return Preset(f"made_{name}", "", weight=weight, reject=reject, veto=veto, **more)  # type: ignore[arg-type]


MADE = (
    made("turns", Weight("segment", upper=1.1), Reject(over="segment", lower=0.9), veto=Veto(lower=1e-3)),
    made(
        "rules",
        Weight("sum", upper=2.0, safety=5.0, safety_at="token"),
        Reject(lower=0.5, upper=1.3),
        Reject("k2", "mean", upper=0.02),
        veto=Veto(0.4, 3.0),
    ),
    made(
        "band",
        Weight("mean", "mask", 1.1, 0.9),
        Reject(over="max", upper=3.0, advantage="against"),
        Reject("k1", "segment", upper=0.01),
        Reject(over="min", lower=0.1),
        veto=Veto(upper=50.0),
    ),
    made(
        "raw",
        Weight("mean", "none"),
        Reject(over="sum", upper=3.0, advantage="against_or_zero"),
        Reject(upper=1.1, advantage="away"),
        loss="reinforce",
    ),
    made(
        "normed",
        Weight("segment", upper=1.5, normalize=True),
        Reject("binary_kl_max", "max", upper=0.02, advantage="negative"),
    ),
    made(
        "unbounded",
        Weight("sum", "none", safety=None, overflow="zero", normalize=True),
        Reject(over="max", upper=3.0, safety=1.0),
        veto=Veto(upper=50.0),
    ),
    made("safe", Weight(lower=0.99, safety=0.005), Reject("k1", "min", upper=0.0, advantage="positive")),
    made("bypass", None, Reject("ratio", "mean", 0.9, 1.2), Reject("tv", upper=0.3), policy="current"),
    made("batch", None, Reject("k3_reverse", "batch", upper=0.02), policy="current"),
)
"""What no preset that ships combines."""

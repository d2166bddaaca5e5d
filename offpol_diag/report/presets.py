"""The catalogue of presets, and one explained, as `offpol-diag presets` prints them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from offpol_diag.presets import Preset, words
from offpol_diag.presets.grammar import MARK, ways
from offpol_diag.table import Table


def catalogue(presets: Mapping[str, Preset], default: Collection[str]) -> Iterator[str | Table]:
    """Yield presets in a table for each kind; `default`, those that are evaluated by themselves, get a *."""
    yield f"{len(presets)} presets (* where none are named); r = π_train/π_rollout, ∏r over the response."
    width = max(map(len, presets), default=0) + 2
    for kind, text in words.KINDS.items():
        rows = []
        for name, one in presets.items():
            if one.kind == kind:
                corrects = bool(one.weight or one.reject or one.veto)
                usual = corrects and (one.policy, one.loss) == ("old", "ppo_clip")
                does = [words.method(one)] * corrects + [words.loss(one)] * (not usual)
                rows.append((f"{name} {'*' * (name in default)}".ljust(width), "; ".join(does)))
        if rows:
            yield Table(kind, "", (kind, text), rows)
    yield "`offpol-diag presets NAME` explains one; --for TRAINER prints its configuration, ready to paste."


def explained(preset: Preset, aliases: Mapping[str, str], trainers: Sequence[str]) -> Iterator[str | Table]:
    """Yield one preset's summary, formulas and note; `aliases` of it at other bounds, and its trainers."""
    others = [f"{one} = {meant}" for one, meant in aliases.items() if meant.startswith(preset.name + MARK)]
    lines = {
        "kind": f"{preset.kind}: {words.KINDS[preset.kind]}",
        "ratio": words.NUMERATORS[preset.policy],
        "weight": words.weight(preset.weight),
        "keeps": words.rejection(preset.reject),
        "drops a sequence with": words.veto(preset.veto),
        "loss": f"{words.loss(preset)} {words.clipped(preset)}",
        "denominator": words.DENOMINATORS[preset.denominator] if preset.reject or preset.veto else "",
        "thresholds": ways(preset),
        "also called": ", ".join(preset.aliases),
        "at other bounds": ", ".join(others),
        "trainers": ", ".join(trainers) or "none has a configuration that says it",
        "source": preset.source,
    }
    rows = [(word, text.strip()) for word, text in lines.items() if text not in ("", words.NOTHING)]
    yield f"{preset.name}: {preset.summary}"
    yield Table(preset.name, "Formulas", ("what", "how"), rows)
    if preset.note:
        yield f"! Note: {preset.note}"

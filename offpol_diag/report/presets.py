"""The catalogue of presets, and one explained, as `offpol-diag presets` prints them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from offpol_diag.presets import Preset, words
from offpol_diag.presets.grammar import MARK, ways
from offpol_diag.table import Table


def catalogue(presets: Mapping[str, Preset], default: Collection[str]) -> Iterator[str | Table]:
    """Yield presets by what they do: a table for each kind, of two columns, which 80 characters hold.

    Args:
        presets: name → preset.
        default: names of those that are evaluated where none are named; they get a mark.
    """
    usual = sum(name in default for name in presets)
    marked = f" {usual} with * are evaluated where none are named." if usual else ""
    yield f"{len(presets)} presets; r = π_train/π_rollout, ∏r over the response of n tokens.{marked}"
    width = max(map(len, presets), default=0) + 2
    for kind, text in words.KINDS.items():
        some = {name: one for name, one in presets.items() if one.kind == kind}
        rows = [(f"{name} {'*' * (name in default)}".ljust(width), _does(one)) for name, one in some.items()]
        if rows:
            yield Table(kind, "", (kind, text), rows)
    yield "`offpol-diag presets NAME` explains one: formulas, thresholds, other names, trainers, source."
    yield "`offpol-diag presets NAME --for TRAINER` prints its configuration, ready to paste."
    yield "Score centering is none of them: no dump of sampled tokens holds the sampler's top-k."


def _does(preset: Preset) -> str:
    """Say what a preset does: its correction, and its loss where that is not PPO's on π_old."""
    corrects = bool(preset.weight or preset.reject or preset.veto)
    usual = corrects and (preset.policy, preset.loss) == ("old", "ppo_clip")
    return "; ".join([words.method(preset)] * corrects + [words.loss(preset)] * (not usual))


def explained(preset: Preset, aliases: Mapping[str, str], trainers: Sequence[str]) -> Iterator[str | Table]:
    """Yield one preset's summary, its formulas, and a note.

    Args:
        preset: what is explained.
        aliases: alias → the name that it means; those of this preset at other bounds are told.
        trainers: those whose configuration can say it.
    """
    elsewhere = (
        f"{alias} = {meant}" for alias, meant in aliases.items() if meant.startswith(preset.name + MARK)
    )
    lines = {
        "kind": f"{preset.kind}: {words.KINDS[preset.kind]}",
        "ratio": words.NUMERATORS[preset.policy],
        "weight": words.weight(preset.weight),
        "keeps": words.rejection(preset.reject),
        "drops a sequence with": words.veto(preset.veto),
        "loss": f"{words.loss(preset)} {words.clipped(preset)}",
        "denominator": words.denominator(preset),
        "thresholds": ways(preset),
        "also called": ", ".join(preset.aliases),
        "at other bounds": ", ".join(elsewhere),
        "trainers": ", ".join(trainers) or "none has a configuration that says it",
        "source": preset.source,
    }
    rows = [(word, text.strip()) for word, text in lines.items() if text not in ("", words.NOTHING)]
    yield f"{preset.name}: {preset.summary}"
    yield Table(preset.name, "Formulas", ("what", "how"), rows)
    if preset.note:
        yield f"! Note: {preset.note}"

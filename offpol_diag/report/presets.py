"""The catalogue of presets, and one explained, as `offpol-diag presets` prints them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from offpol_diag.numerals import minus
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
    """Yield one preset's summary, its formulas, a note, and the numbers that the formulas get.

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
        "loss": words.loss(preset),
        "denominator": words.denominator(preset),
        "guards": "; ".join(words.guards(preset)),
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
    numbers = [(part, of, *map(_bound, ends)) for part, of, *ends in bounds(preset)]
    if numbers:
        yield Table("numbers", "Numbers", ("part", "of", "lower", "upper"), numbers)


def _bound(x: float) -> str:
    """Write a bound with six digits; – for none."""
    return minus(f"{x:.6g}") if math.isfinite(x) else words.NOTHING


PER = {
    "token": " of a token",
    "segment": ", mean of a turn",
    "mean": ", mean of a sequence",
    "sum": ", sum over a sequence",
    "max": ", largest of a sequence",
    "min": ", smallest of a sequence",
    "batch": ", mean of the trainer batch",
}
"""What a weight or rule is over → in words."""


def bounds(preset: Preset) -> list[tuple[str, str, float, float]]:
    """List the parts of a preset with a bound: what each bounds, from below and above; ±inf for none."""
    from offpol_diag.core.steps import WITHOUT_RATIO, rule, steps

    made, found = steps(preset), list[tuple[str, str, float, float]]()
    if (weight := made.weight) is not None:
        of = f"r{PER[weight.over]}"
        found.append(("weight is held to", of, weight.lower, weight.upper))
        found.append(("weight is 0 outside", f"log {of}", weight.zero_below, weight.zero_above))
    for place, reject in enumerate(preset.reject, 1):
        of = f"{'log r' if reject.statistic == 'ratio' else reject.statistic}{PER[reject.over]}"
        own = rule(preset.policy, reject)
        found.append((f"rule {place} keeps", of, own.lower, own.upper))
    if (veto := made.sequences.veto) is not None:
        found.append(("veto keeps", "log r of every token", veto.lower, veto.upper))
    if preset.loss not in WITHOUT_RATIO:
        of = "π_θ/π_anchor"
        found.append(("loss is clipped to", of, made.loss.low, made.loss.high))
        if preset.loss in ("ppo_clip", "gspo"):
            found.append(("dual clip, where A < 0", of, -math.inf, made.loss.dual))
    return [one for one in found if one[2] not in (0.0, -math.inf) or one[3] < math.inf]

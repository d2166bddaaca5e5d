"""What the rules and the veto of a preset leave, and the ratios of what earlier ones left."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from offpol_diag import segments
from offpol_diag.correction.rules import passes, veto_hits
from offpol_diag.memo import Memo
from offpol_diag.presets import Preset, Reject, Veto, Weight
from offpol_diag.ratios import Apart, Ratios


@dataclass(frozen=True)
class Kept:
    """What rejection and veto leave.

    Attributes:
        tokens: [T] bool, or None when no rule acts on tokens.
        sequences: [S] bool: passed every rule on sequences and the veto.
        vetoed: [S] bool.
        catastrophic: tokens beyond the veto's bounds, [S] float64.
    """

    tokens: Tensor | None
    sequences: Tensor
    vetoed: Tensor
    catastrophic: Tensor


def keep(ratios: Ratios, preset: Preset) -> Kept:
    """What a preset's rejection rules and veto leave of the batch."""
    return ratios.once((preset.reject, preset.veto), lambda: _keep(ratios, preset))


def _keep(ratios: Ratios, preset: Preset) -> Kept:
    tokens: Tensor | None = None
    vetoed, sequences = ratios.once(("vetoed", preset.veto), lambda: _vetoed(ratios, preset.veto))
    for at, rule in enumerate(preset.reject):
        before = preset if rule.among == "all" else replace(preset, reject=preset.reject[:at])
        judge = ratios if rule.on_tokens else ratios.whole or ratios
        passed = passes(seen(judge, before, rule), rule)
        if passed.per == "sequence":
            sequences = sequences & passed.values
        else:
            tokens = passed.values if tokens is None else tokens & passed.values
    return Kept(tokens, sequences, vetoed, veto_hits(ratios, preset.veto))


def _vetoed(ratios: Ratios, veto: Veto | None) -> tuple[Tensor, Tensor]:
    """Sequences that a veto drops, and all others, [S] bool."""
    vetoed = veto_hits(ratios, veto) > 0
    return vetoed, ~vetoed


def on_tokens(rules: tuple[Reject, ...]) -> tuple[Reject, ...]:
    """Those of the rules under which tokens fail one by one."""
    return tuple(rule for rule in rules if rule.on_tokens)


def seen(ratios: Ratios, preset: Preset, part: Weight | Reject) -> Ratios:
    """The ratios as one part of a preset sees them: its numerator, over the tokens left to it.

    Of `preset` that is what drops tokens before.
    """
    own = ratios.of(part.policy) if isinstance(part, Reject) else ratios
    if part.among == "all" or part.over == "token":
        return own
    before = replace(preset, reject=on_tokens(preset.reject))
    if ratios.whole is None:
        return among(ratios, own, before)
    key = before.veto, before.reject
    whole = seen(ratios.whole, preset, part)
    return own.once(("among", key), lambda: replace(own, whole=whole, _memo=Memo()))


def among(ratios: Ratios, own: Ratios, before: Preset) -> Ratios:
    """Ratios aggregated over what a veto and rules on tokens leave, which judge other ones of the batch."""
    key = "among", before.policy, before.veto, before.reject
    return own.once(key, lambda: own.among(lambda: _left(ratios, before), _left_apart(ratios, own, before)))


def _left_apart(ratios: Ratios, own: Ratios, before: Preset) -> Apart | None:
    """What is left of far tokens, where near ones all are."""
    if ratios.apart is None or own.apart is None or not ratios.apart.leaves(before):
        return None
    kept = keep(ratios.apart.far, before)
    return replace(own.apart, left=kept.tokens, rows=kept.sequences)


def _left(ratios: Ratios, preset: Preset) -> Tensor:
    """Tokens that the veto and rules on tokens leave, [T]."""
    kept = keep(ratios, preset)
    sequences = segments.spread(kept.sequences, ratios.batch.cu_seqlens)
    return sequences if kept.tokens is None else sequences & kept.tokens

"""Tokens that rejection (not the veto) removes under verl, rule by rule and together; the veto's counts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache

import torch
from torch import Tensor

from offpol_diag import correction
from offpol_diag.crosswalk.counts import failing
from offpol_diag.crosswalk.ends import Columns, named
from offpol_diag.crosswalk.verl.wanted import generation
from offpol_diag.crosswalk.view import View
from offpol_diag.presets import Policy, Preset, Reject

Passed = tuple[Tensor | None, Tensor | None]
"""Which tokens pass, of those that are looked at, and which sequences; None for all."""
Rules = tuple[Reject, ...]
Key = tuple[int, Hashable]
"""Ratios by their id, and what judges them."""


def columns(views: Sequence[View]) -> Columns:
    """Of presets of one numerator, [S] each, under their names."""
    rules, vetoes = _by_rules(views), _by_veto(views)
    found: Columns = {}
    for view in views:
        preset, part = view.preset, id(view.far)
        mine = {**_lost(preset, part, rules), **vetoes[part, preset.veto], **_masked_weights(view)}
        found |= {f"{preset.name}!{name}": values for name, values in mine.items()}
    return found


def _lost(preset: Preset, part: int, rules: dict[Key, Columns]) -> Columns:
    """What all rules remove together; since 2026 each by itself too.

    In 2025 a row without a token has a ratio of 1, and is rejected where the band leaves that out.
    """
    together, divergences = rules[part, preset.reject], generation(preset).divergences
    found = {"lost": together["tokens"], "lost_rows": together["with_one" if divergences else "rejected"]}
    for i, rule in enumerate(preset.reject if divergences else ()):
        alone = rules[part, rule]
        found |= {f"rule{i}": alone["tokens"], f"rule{i}_rows": alone["with_one"]}
    return found


def _by_rules(views: Sequence[View]) -> dict[Key, Columns]:
    """Tokens that rules remove, whether there are any, and whether the row is rejected even so; [S] each."""
    asked: dict[Key, tuple[View, Passed]] = {}
    for view in views:
        for judge in _judges(view.preset):
            key = id(view.far), judge
            if key not in asked:
                asked[key] = view, _passed(view, judge)
    return dict(zip(asked, _removed(tuple(asked.values())), strict=True))


@cache
def _judges(preset: Preset) -> tuple[Rules | Reject, ...]:
    return preset.reject, *(preset.reject if generation(preset).divergences else ())


def _passed(view: View, judge: Rules | Reject) -> Passed:
    some = view.far
    if isinstance(judge, tuple):
        kept = correction.keep(some, _only(view.preset.policy, judge))
        return kept.tokens, kept.sequences
    passed = correction.passes(some, judge)
    return (None, passed.values) if passed.per == "sequence" else (passed.values, None)


@cache
def _only(policy: Policy, rules: Rules) -> Preset:
    return Preset("", "", policy, reject=rules)


def _removed(of: Sequence[tuple[View, Passed]]) -> list[Columns]:
    """In one pass for all."""
    view = of[0][0]
    alone = failing([(tokens, one.far.batch.cu_seqlens) for one, (tokens, _) in of], view.zeros)
    every = torch.ones_like(view.there)
    passed = torch.stack([every if sequences is None else sequences for _, (_, sequences) in of])
    lost = torch.where(passed, alone, view.n)
    some = lost > 0
    with_one, rejected = some.to(torch.float64), (some | ~passed).to(torch.float64)
    return named({"tokens": lost, "with_one": with_one, "rejected": rejected})


def _by_veto(views: Sequence[View]) -> dict[Key, Columns]:
    """Tokens beyond the veto's bounds, and rows with one."""
    asked = {(id(view.far), view.preset.veto): view for view in views}
    hits = [correction.veto_hits(view.far, view.preset.veto) for view in asked.values()]
    many = torch.stack(hits)
    return dict(zip(asked, named({"hits": many, "vetoed": (many > 0).to(torch.float64)}), strict=True))


def _masked_weights(view: View) -> Columns:
    """Tokens whose weight IcePop sets to 0."""
    preset = view.preset
    if preset.weight is None or preset.weight.action != "mask":
        return {}
    weighed = correction.weigh(view.far, preset)
    outside = weighed.high + weighed.low
    return {"oob": outside * view.n if weighed.final.per == "sequence" else outside}

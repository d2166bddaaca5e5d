"""A preset's weights and mask for a padded batch of a trainer, on its device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from offpol_diag.core.evaluate import Evaluator
from offpol_diag.core.formulas import batch_cut
from offpol_diag.core.segments import Segments
from offpol_diag.core.steps import Rule, steps
from offpol_diag.presets import SMALLEST_NORM, Policy, Preset


@dataclass(frozen=True)
class Packed:
    """The tokens that count of S padded responses of L tokens, end to end.

    Attributes:
        counted: which tokens count, [S, L] bool.
        log_probs: policy → log-probs, [T] float64, nats.
        advantages: [T] float64, or None.
        sequences: the responses, S of them.
        turns: runs of tokens that count, between holes of the mask.
    """

    counted: Tensor
    log_probs: Mapping[Policy, Tensor]
    advantages: Tensor | None
    sequences: Segments
    turns: Segments

    @classmethod
    def of(cls, log_probs: Mapping[Policy, Tensor], counted: Tensor, advantages: Tensor | None) -> Packed:
        """Pack log-probs [S, L] and advantages [S] or [S, L]; what does not count may be anything."""
        if advantages is not None:
            advantages = advantages.reshape(len(counted), -1).expand(counted.shape)[counted].double()
        offsets = pad(counted.sum(1).cumsum(0), (1, 0))
        begins = (counted & ~pad(counted[:, :-1], (1, 0)))[counted].nonzero().flatten()
        tokens = int(offsets[-1])
        turns = torch.cat((begins, offsets[-1:]))
        packed = {policy: x[counted].double() for policy, x in log_probs.items()}
        return cls(counted, packed, advantages, Segments(offsets, tokens), Segments(turns, tokens))

    def correct(self, preset: Preset) -> tuple[Tensor, Tensor]:
        """Apply a preset, as to one trainer batch.

        Returns: the weights [S, L] float64, normalised where the preset says so and 0 where a token is not
        kept; and the tokens that are kept, [S, L] bool.
        """
        own = steps(preset)
        evaluator = Evaluator(self.log_probs, self.sequences, self.turns, self.advantages, _cut)
        kept = evaluator.kept(own.tokens, own.sequences)
        w = torch.ones_like(self.log_probs["rollout"])
        if own.weight is not None:
            w = evaluator.weight(own.weight)
            w = w if own.weight.on_tokens else self.sequences.spread(w)
        if preset.weight is not None and preset.weight.normalize:
            by_sequence = preset.weight.over != "token"
            mean = (self.sequences.mean(w)[self.sequences.filled] if by_sequence else w).mean()
            w = w / torch.where(mean > SMALLEST_NORM, mean, 1.0)
        weights, left = torch.zeros_like(self.counted, dtype=torch.float64), self.counted.clone()
        weights[self.counted], left[self.counted] = w * kept, kept
        return weights, left


def _cut(rule: Rule, statistic: Tensor) -> Tensor:
    assert rule.reject.upper is not None
    cut: Tensor = batch_cut(statistic, rule.reject.upper)
    return cut

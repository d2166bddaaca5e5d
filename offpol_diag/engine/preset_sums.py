"""Presets applied to a batch: the sums of each sequence, block by block, on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from offpol_diag.core import devices
from offpol_diag.core.segments import Array as AnyArray
from offpol_diag.core.steps import Steps, steps
from offpol_diag.core.sums import Sums
from offpol_diag.dump.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.engine.context import BatchContext, evaluator
from offpol_diag.engine.rows import Columns, Rows, distinct, joined
from offpol_diag.engine.segments import Array
from offpol_diag.presets import SMALLEST_NORM, Preset

BLOCK = {"cpu": 1 << 17, "gpu": 1 << 18}
"""About the number of tokens at a time: fewer cost more calls, more do not stay in a core's cache."""
NORMS = ("norm", "norm_units")
"""Names of the sums that the mean weight is computed from: Σ of weights, and their number."""


def normalised(preset: Preset) -> bool:
    """Return whether weights are divided by a batch mean."""
    return preset.weight is not None and preset.weight.normalize


def norm_factor(total: Array, units: Array) -> Array:
    """Compute the divisor of batch normalisation; 1 where the mean weight is at most 1e-8, as in verl."""
    mean_weight = total / units
    return np.where(mean_weight > SMALLEST_NORM, mean_weight, 1.0)


@dataclass(frozen=True, eq=False)
class PresetSums:
    """Many presets applied to one batch of S sequences; numbers are float64, a row per distinct result.

    Attributes:
        context: the batch and its log-ratios.
        presets: the P presets.
        done: what to call for the rows of all numbers by the names of `core.sums`, [R, S] each: a GPU
            computes while the host does something else.
    """

    context: BatchContext
    presets: tuple[Preset, ...]
    done: Callable[[], Mapping[str, Rows]]

    @classmethod
    def of(
        cls, context: BatchContext, presets: Sequence[Preset], *, losses: bool = True, over_all: bool = False
    ) -> PresetSums:
        """Apply presets to a batch.

        Args:
            context: the batch.
            presets: the presets, all of whose log-probs it has.
            losses: whether the sums of losses are wanted, where it has what they are made of.
            over_all: whether Σ w over all tokens is wanted of presets that do not normalise by it.
        """
        batch = context.batch
        losses = losses and batch.current is not None and batch.advantages is not None
        return cls(context, tuple(presets), _started(context, presets, losses, over_all))

    def __getitem__(self, name: str) -> Rows:
        """Return a number of each sequence by its name in `OfPreset` or `OfWeights`, for every preset."""
        return self.done()[name]

    def only(self, which: Callable[[Preset], bool]) -> PresetSums:
        """Select the presets for which `which` is true."""
        some = [at for at, preset in enumerate(self.presets) if which(preset)]
        if len(some) == len(self.presets):
            return self

        def done() -> dict[str, Rows]:
            every = self.done()
            return {
                name: Rows(rows.values, tuple(rows.at[at] for at in some)) for name, rows in every.items()
            }

        return PresetSums(self.context, tuple(self.presets[at] for at in some), done)

    def named(self, columns: Mapping[str, Rows | Array]) -> Columns:
        """Name columns by preset: one column [S] per preset; a plain array [S] is shared by all presets."""
        if not columns:
            return Columns((), ())
        many = len(self.presets)
        rows = [x if isinstance(x, Rows) else Rows(x[None], (0,) * many) for x in columns.values()]
        names = _names(tuple(columns), tuple(preset.name for preset in self.presets))
        begins = np.cumsum([0, *(len(x.values) for x in rows[:-1])])
        at = np.array([x.at for x in rows], dtype=np.int64) + begins[:, None]
        return Columns(names, tuple(x.values for x in rows), at.flatten())

    @property
    def batch(self) -> Batch:
        """The packed batch."""
        return self.context.batch

    @cached_property
    def n(self) -> Array:
        """Tokens of each sequence, [S]."""
        return self.context.counts["tokens"]

    @property
    def vetoed(self) -> Rows:
        """1 where the veto drops a sequence, else 0."""
        return self["hits"].map(lambda x: segments.numbers(x > 0))

    def norms(self) -> Columns:
        """Return the sums of the normalising mean, of presets that divide by it.

        The mean of weights before rejection, over tokens, or over sequences of each one's mean.
        """
        some = self.only(normalised)
        if not some.presets:
            return Columns((), ())
        n, over = self.n, some["over_all"]
        by_token = [preset.weight is not None and preset.weight.over == "token" for preset in some.presets]
        divisors = Rows(np.stack((np.ones_like(n), np.maximum(n, 1))), tuple(int(not x) for x in by_token))
        units = Rows(np.stack((n, segments.numbers(n > 0))), divisors.at)
        return some.named(dict(zip(NORMS, (joined(np.divide, over, divisors), units), strict=True)))


# ---------------------------------------------------------------- block by block


def _started(
    context: BatchContext, presets: Sequence[Preset], losses: bool, over_all: bool
) -> Callable[[], dict[str, Rows]]:
    """Start the sums of a batch; return what to call for them."""
    if not presets:
        return dict
    made = [(steps(preset), over_all or normalised(preset)) for preset in presets]
    on_gpu, found = context.device != devices.CPU, dict[str, tuple[list[AnyArray], tuple[int, ...]]]()
    with devices.memory_of(context.device):
        for block in _blocks(context, BLOCK["gpu" if on_gpu else "cpu"]):
            each = [_named(block, one, losses, over) for one, over in made]
            for name in each[0]:
                columns = [one[name] for one in each]
                first, at = distinct(list(map(id, columns)))
                parts, _ = found.setdefault(name, ([], at))
                parts.append(block.xp.stack([columns[preset] for preset in first]))

    @cache
    def done() -> dict[str, Rows]:
        return {name: Rows(devices.fetched(parts), at) for name, (parts, at) in found.items()}

    return done


def _blocks(context: BatchContext, tokens: int) -> Iterator[Sums]:
    """Yield whole sequences, about so many tokens at a time, on the context's device."""
    batch = context.batch
    for first, last in segments.spans(batch.cu_seqlens, tokens):
        part = batch if last - first == batch.sequences else batch.rows(first, last)
        yield evaluator(part, context.cut, context.device)


def _named(block: Sums, one: Steps, losses: bool, over_all: bool) -> dict[str, AnyArray]:
    """Return the numbers of a preset by name."""
    found = block.of_preset(one, losses)
    found |= {
        "deviation": found["w1"],
        "about_one": found["w11"],
        "delta": block.delta(one.policy, one.tokens),
    }
    return found | {"over_all": block.over_all(one.weight) if over_all else block.none}


@cache
def _names(columns: tuple[str, ...], presets: tuple[str, ...]) -> tuple[str, ...]:
    """Name columns for every preset, column by column; cached, since every batch has the same."""
    return tuple(f"{preset}|{column}" for column in columns for preset in presets)

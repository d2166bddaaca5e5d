"""Selection effects of a preset: what it drops of short and long responses, and keeps at lag 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from offpol_diag.core import breakdowns
from offpol_diag.core.intervals import Formula, Groups, Reader, mean
from offpol_diag.engine import bootstrap, method, segments
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.preset_sums import PresetSums
from offpol_diag.engine.rows import Columns
from offpol_diag.engine.segments import Array
from offpol_diag.engine.tally import SAMPLE, Arrays, ByKey, Names
from offpol_diag.number import Number
from offpol_diag.presets import Preset


@dataclass(frozen=True)
class SampledGroups:
    """A sample of groups (prompts), those whose hashed keys are smallest; exact while there are few.

    Attributes:
        keys: of the groups, rising, [G] int64.
        full: whether there are more groups than these.
    """

    keys: Array
    full: bool

    @classmethod
    def read(cls, by_key: ByKey) -> SampledGroups:
        """Read what `groups_of` kept."""
        return cls(by_key.keys[:SAMPLE], len(by_key.keys) > SAMPLE)

    @property
    def many(self) -> int:
        """Number of groups: exact unless `full`, else estimated from the density of the keys."""
        if not self.full:
            return len(self.keys)
        share = (float(self.keys[-1]) + 2.0**63) / 2.0**64
        return round((len(self.keys) - 1) / share)


def groups_of(keys: Array) -> ByKey:
    """Sample the groups of sequences with these keys, [S]."""
    return ByKey(np.unique(bootstrap.mix(keys))[: SAMPLE + 1], Arrays(), "sample")


# ---------------------------------------------------------------- what is dropped of short and long responses

DROPPED = next(row for row in method.ROWS if row.name == "sequences_dropped")


def by_octave(sums: PresetSums) -> ByKey:
    """Sum sequences by octave of length, and those of them that each preset drops, if it can drop any."""
    batch, some = sums.batch, sums.only(lambda preset: DROPPED.name not in method.idle(preset))
    keys = breakdowns.LENGTH.places(batch).tolist()
    assert keys is not None
    members = {str(key): segments.index(at) for key, at in segments.by_key(keys).items()}
    columns = Columns.of({name: sums.context.counts[name] for name in ("tokens", "sequences")})
    if some.presets:
        dropped = some["kept"].map(lambda kept: np.where((kept == 0) & (sums.n > 0), 1.0, 0.0))
        columns = Columns.joined(columns, some.named({"dropped": dropped}))
    result = bootstrap.resampled_by(members, columns.rows, sums.context.draws, batch.key)
    return ByKey.of(
        members, Arrays(sums={"columns": result}, names={"columns": Names(columns.names, columns.which)})
    )


def read_by_octave(
    by_key: ByKey, presets: Sequence[Preset], groups: int
) -> Iterator[tuple[str, str, Number]]:
    """Yield lengths, preset, and the share of the sequences of these lengths that it drops."""
    names = [preset.name for preset in presets if DROPPED.name not in method.idle(preset)]
    for key, arrays in by_key.items():
        read = arrays.read("columns")
        reader = Reader(read, Groups.drawn(read["tokens"], groups))
        found = reader.numbers(DROPPED, [f"{name}|" for name in names])
        yield from ((breakdowns.of_octave(key), name, one) for name, one in zip(names, found, strict=True))


# ---------------------------------------------------------------- what was sampled at policy lag 0

AT_LAG_0 = Formula(
    "kept_at_lag_0",
    "fraction",
    "tokens of policy lag 0",
    "share with a weight above 0 of what was sampled at policy lag 0, where only numerics make the policies "
    "differ",
    mean("kept_at_lag_0"),
    counts=True,
)


def lag_0(context: BatchContext) -> dict[str, Array]:
    """Count the tokens, and the sequences with one, of policy lag 0, [S] each; nothing without the lags."""
    lags = context.batch.scalars.get("policy_lag", [])
    flags = np.array([lag == 0 for lag in lags], np.float64)
    counts = context.counts
    return {f"{name}_at_lag_0": flags * counts[name] for name in ("tokens", "sequences") if lags}


def at_lag_0(sums: PresetSums) -> Columns:
    """Count each preset's tokens of policy lag 0 that have a weight above 0."""
    tokens = lag_0(sums.context).get("tokens_at_lag_0")
    if tokens is None:
        return Columns((), ())
    return sums.named({"kept_at_lag_0": sums["weighted"].map(lambda x: np.where(tokens > 0, x, 0.0))})


def read_at_lag_0(reader: Reader, presets: Sequence[str]) -> dict[str, Number]:
    """Return preset → the share that it keeps of policy lag 0; empty where the dump has none of that lag."""
    if "tokens_at_lag_0" not in reader.drawn or not reader.drawn["tokens_at_lag_0"][0] or not presets:
        return {}
    own = {name: reader.drawn[f"{name}_at_lag_0"] for name in ("tokens", "sequences")}
    fresh = Reader({**reader.drawn, **own}, Groups.drawn(own["tokens"], reader.groups.many))
    found = fresh.numbers(AT_LAG_0, [f"{name}|" for name in presets])
    return dict(zip(presets, found, strict=True))

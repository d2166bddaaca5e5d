"""Batch normalisation: weights divided by their mean over each trainer batch.

The mean is known only when a trainer batch (the rows of one `step`) has been seen whole, so the sums of
presets that normalise are kept per trainer batch and rescaled when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

import numpy as np

from offpol_diag.core.steps import weighted
from offpol_diag.engine import preset_sums, rows, segments
from offpol_diag.engine.bootstrap import resampled_by
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.preset_sums import NORMS, PresetSums, norm_factor
from offpol_diag.engine.segments import Array
from offpol_diag.engine.tally import Arrays, ByKey, Names
from offpol_diag.presets import Preset

Columns = dict[str, Array]


def normalised(presets: Sequence[Preset]) -> tuple[Preset, ...]:
    """Return the presets whose weights are divided by a batch mean."""
    return tuple(one for one in presets if preset_sums.normalised(one))


def by_batch(context: BatchContext, columns: rows.Columns, ranges: Arrays | None = None) -> ByKey:
    """Sum columns [S] per trainer batch, beside `ranges` of each, as `ranges_of` makes them."""
    members = _members(context)
    sums = resampled_by(members, columns.rows, context.draws)
    arrays = Arrays(sums={"columns": sums}, names={"columns": Names(columns.names, columns.which)})
    return ByKey.of(members, arrays if ranges is None else arrays.merge(ranges))


def _members(context: BatchContext) -> dict[str, slice | Array]:
    """Return trainer batch → its sequences in this batch."""

    def made() -> dict[str, slice | Array]:
        rows = segments.by_key(context.batch.steps)
        return {label: segments.index(at) for label, at in rows.items()}

    return context.cached("trainer batches", made)


def ranges(sums: PresetSums, names: Container[str]) -> Arrays:
    """Return the extremes of the final weights of kept tokens per trainer batch, before normalisation.

    They are the largest values of −w and w, [N, presets, 2].
    """
    users = [at for at, one in enumerate(sums.presets) if one.name in names]
    members = _members(sums.context)
    result = np.empty((len(members), len(users), 2))
    if users:
        lows, highs = sums["smallest"], sums["largest"]
        for place, at in enumerate(members.values()):
            low, high = lows.values[:, at].min(axis=1), highs.values[:, at].max(axis=1)
            result[place] = [(-low[lows.at[row]], high[highs.at[row]]) for row in users]
    each = Names(tuple(sums.presets[at].name for at in users))
    return Arrays(maxima={"weights": result}, names={"weights": each})


# ---------------------------------------------------------------- reading

Get = Callable[[str], Array]

_LINEAR = ("w", "v")
_SQUARES = ("ww", "vv")
_LOSS = ("loss", "loss_mean")


def _about_one(get: Get, f: Array) -> Array:
    """Compute Σ(w/f − 1)²: from Σ(w − 1)², precise when weights are near 1; from Σw² where f is not."""
    deviation, kept = get("w") - get("kept"), get("kept")
    near = (get("w11") + 2 * (1 - f) * deviation + kept * (1 - f) ** 2) / f**2
    result: Array = np.where(_near_one(f), near, get("ww") / f**2 - 2 * get("w") / f + kept)
    return result


def _over_one(squares: str, count: str, whole: str) -> Callable[[Get, Array], Array]:
    """Compute Σ(w²/f² − 1) from Σ(w² − 1), or from Σw² where f is not near 1."""

    def made(get: Get, f: Array) -> Array:
        near = (get(squares) + get(count) * (1 - f) * (1 + f)) / f**2
        result: Array = np.where(_near_one(f), near, get(whole) / f**2 - get(count))
        return result

    return made


def _near_one(f: Array) -> Array:
    """Return where the divisor is within ½ of 1, so that sums about 1 are the more precise."""
    near: Array = np.abs(f - 1) < 0.5
    return near


_CENTRED: dict[str, Callable[[Get, Array], Array]] = {
    "w11": _about_one,
    "residual_ww": _over_one("residual_ww", "kept", "ww"),
    "residual_vv": _over_one("residual_vv", "residual_left", "vv"),
}


def rescaled(read: Mapping[str, Array], preset: Preset) -> Columns:
    """Divide one trainer batch's sums [1+B] by the preset's mean weight; the norms are dropped."""
    prefix = f"{preset.name}|"

    def get(name: str) -> Array:
        return read[prefix + name]

    f = norm_factor(get("norm"), get("norm_units"))
    own = [name.removeprefix(prefix) for name in read if name.startswith(prefix)]
    loss = f if weighted(preset) else np.ones_like(f)
    done = {name: get(name) for name in own if name not in NORMS}
    done |= {name: get(name) / f for name in _LINEAR if name in done}
    done |= {name: get(name) / f**2 for name in _SQUARES if name in done}
    done |= {name: get(name) / loss for name in _LOSS if name in done}
    done |= {name: make(get, f) for name, make in _CENTRED.items()}
    return {prefix + name: values for name, values in done.items()}


def read(by_key: ByKey, presets: Sequence[Preset]) -> Columns:
    """Add up the rescaled sums of all trainer batches."""
    total: Columns = {}
    for _, arrays in by_key.items():
        sums = arrays.read("columns")
        for preset in presets:
            for name, values in rescaled(sums, preset).items():
                total[name] = total[name] + values if name in total else values
    return total


@np.errstate(all="ignore")
def factors(by_key: ByKey, presets: Sequence[Preset]) -> dict[str, dict[str, float]]:
    """Return preset → trainer batch → the factor that its weights are divided by."""
    read = {label: arrays.read("columns") for label, arrays in by_key.items()}
    return {
        preset.name: {
            label: float(norm_factor(*(sums[f"{preset.name}|{name}"][0] for name in NORMS)))
            for label, sums in read.items()
        }
        for preset in presets
    }


def span(by_key: ByKey, divisors: Mapping[str, float], name: str) -> tuple[float, float]:
    """Return a preset's smallest and largest weight of all trainer batches, each divided by its own mean."""
    each = {label: arrays.read("weights")[name] for label, arrays in by_key.items()}
    low = min(-minus / divisors[label] for label, (minus, _) in each.items())
    return float(low), float(max(high / divisors[label] for label, (_, high) in each.items()))

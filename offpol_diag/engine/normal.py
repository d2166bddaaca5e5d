"""Batch normalisation: weights divided by their mean over each trainer batch.

The mean is known only when a trainer batch (the rows of one `step`) has been seen whole, so the sums of
presets that normalise are kept per trainer batch and rescaled when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import numpy as np

from offpol_diag.engine import preset_sums, rows, scope, segments
from offpol_diag.engine.accumulators import Extremes, Places, Sums
from offpol_diag.engine.preset_sums import NORMS, PresetSums, norm_factor
from offpol_diag.engine.scene import Scene
from offpol_diag.engine.scope import Label
from offpol_diag.engine.segments import Array
from offpol_diag.pipeline.plan import weighted
from offpol_diag.presets import Preset

Columns = dict[str, Array]


def normalised(presets: Sequence[Preset]) -> tuple[Preset, ...]:
    """Return the presets whose weights are divided by a batch mean."""
    return tuple(one for one in presets if preset_sums.normalised(one))


def sums(scene: Scene, columns: rows.Columns) -> Places[Sums]:
    """Sum columns [S] per trainer batch."""
    each, members = columns.rows, _members(scene).items()
    return Places(
        {
            label: Sums.of_stacked(columns.names, each[:, at], scene.draws[at], which=columns.which)
            for label, at in members
        }
    )


def _members(scene: Scene) -> dict[Label, slice | Array]:
    """Return trainer batch → its sequences in this batch."""

    def made() -> dict[Label, slice | Array]:
        rows = segments.by_key(scope.labels(scene.batch))
        return {label: segments.index(at) for label, at in rows.items()}

    return scene.once("trainer batches", made)


def ranges(sums_: PresetSums, names: Container[str]) -> Places[Extremes]:
    """Return the extremes of the final weights of kept tokens per trainer batch, before normalisation."""
    users = [(f"{one.name}|weight", at) for at, one in enumerate(sums_.presets) if one.name in names]
    return Places({label: _extremes(sums_, users, at) for label, at in _members(sums_.scene).items()})


def _extremes(sums_: PresetSums, users: Sequence[tuple[str, int]], at: slice | Array) -> Extremes:
    if not users:
        return Extremes.of({})
    lows, highs = sums_.spans
    low, high = lows.values[:, at].min(axis=1), highs.values[:, at].max(axis=1)
    return Extremes.of({name: (low[lows.at[row]], high[highs.at[row]]) for name, row in users})


# ---------------------------------------------------------------- reading

Get = Callable[[str], Array]

_LINEAR = ("w", "v")
_SQUARES = ("ww", "vv")
_LOSS = ("loss", "loss_mean", "update")


def _about_one(get: Get, f: Array) -> Array:
    """Compute Σ(w/f − 1)²: from Σ(w − 1)², precise when weights are near 1; from Σw² where f is not."""
    excess, kept = get("w") - get("kept"), get("kept")
    near = (get("w11") + 2 * (1 - f) * excess + kept * (1 - f) ** 2) / f**2
    found: Array = np.where(_near_one(f), near, get("ww") / f**2 - 2 * get("w") / f + kept)
    return found


def _over_one(squares: str, count: str, whole: str) -> Callable[[Get, Array], Array]:
    """Compute Σ(w²/f² − 1) from Σ(w² − 1), or from Σw² where f is not near 1."""

    def made(get: Get, f: Array) -> Array:
        near = (get(squares) + get(count) * (1 - f) * (1 + f)) / f**2
        found: Array = np.where(_near_one(f), near, get(whole) / f**2 - get(count))
        return found

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


def read(places: Places[Sums], presets: Sequence[Preset]) -> Columns:
    """Add up the rescaled sums of all trainer batches."""
    return _added(rescaled(one.read(), preset) for one in places.sums.values() for preset in presets)


def norms(places: Places[Sums], presets: Sequence[Preset]) -> Columns:
    """Add up the normalisation sums of all trainer batches."""
    names = [f"{preset.name}|{norm}" for preset in presets for norm in NORMS]
    each = (one.read() for one in places.sums.values())
    return _added({name: sums[name] for name in names} for sums in each)


def _added(parts: Iterable[Columns]) -> Columns:
    total: Columns = {}
    for one in parts:
        for name, values in one.items():
            total[name] = total[name] + values if name in total else values
    return total


@np.errstate(all="ignore")
def factors(places: Places[Sums], presets: Sequence[Preset]) -> dict[str, dict[Label, float]]:
    """Return preset → trainer batch → the factor that its weights are divided by."""
    read = {label: sums.read() for label, sums in places.sums.items()}
    return {
        preset.name: {
            label: float(norm_factor(*(sums[f"{preset.name}|{name}"][0] for name in NORMS)))
            for label, sums in read.items()
        }
        for preset in presets
    }


def span(places: Places[Extremes], divisors: Mapping[Label, float], name: str) -> tuple[float, float]:
    """Return the smallest and largest weight of all trainer batches, each divided by its own mean."""
    pairs = {label: one.read()[name] for label, one in places.sums.items()}
    low = min(pair[0] / divisors[label] for label, pair in pairs.items())
    return low, max(pair[1] / divisors[label] for label, pair in pairs.items())

"""What a preset does to a dump: its weights, what it rejects, the gap that is left, its policy loss.

Each number is a row with its formula over columns of `core.sums`, [S] each, which are named PRESET|COLUMN
when they are added up. Numerator and denominator of r are the preset's own: π_old or π_θ over π_rollout.

Weights that are divided by their mean over a trainer batch (the rows of one `step`) are known only when it
has been seen whole. Sums of such presets are kept by step, and divided when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from offpol_diag.core.evaluate import may_be_zero, multiplies_loss
from offpol_diag.core.intervals import ABOVE_MINUS_ONE, POSITIVE, Formula, Lookup, Reader, mean
from offpol_diag.core.segments import extremes
from offpol_diag.core.state import Array, State, Table
from offpol_diag.core.sums import Columns, Sums
from offpol_diag.number import Numbers
from offpol_diag.presets import SMALLEST_NORM, Preset

ENDS = ("smallest", "largest")
"""Columns that do not add up."""
NEEDED = ("current_log_probs", "advantages")
"""Columns of a dump that a policy loss is made of."""

# ---------------------------------------------------------------- one batch


def columns(tokens: Sums, presets: Sequence[Preset]) -> Columns:
    """Compute the columns of presets, [S] each, on the device of the tokens; presets share arrays.

    Losses are among them where the batch has what they are made of. `own` counts the tokens that the preset's
    trainer divides its loss by.
    """
    losses, found = tokens.advantages is not None and "current" in tokens.log_probs, Columns()
    for preset in presets:
        sums = tokens.of_preset(preset, losses)
        sums["own"] = sums["kept"] if preset.denominator == "kept" else tokens.sequences.n
        if preset.weight is not None and preset.weight.normalize:
            sums |= tokens.of_norm(preset.policy, preset.weight)
        found |= {f"{preset.name}|{name}": x for name, x in sums.items()}
    return found


def one_column(columns: Columns, name: str, presets: Sequence[Preset]) -> Columns:
    """Select a column of some presets."""
    return {key: columns[key] for key in (f"{preset.name}|{name}" for preset in presets)}


def added(columns: Columns, presets: Sequence[Preset]) -> Columns:
    """Select the columns of some presets that add up."""
    names, found = {preset.name for preset in presets}, Columns()
    for name, x in columns.items():
        preset, _, column = name.partition("|")
        if preset in names and column not in ENDS:
            found[name] = x
    return found


def observe(columns: Columns, presets: Sequence[Preset], buckets: Array, batches: Sequence[str]) -> State:
    """Keep the ranges of weights, and by trainer batch the sums of presets that divide weights there.

    Args:
        columns: of the presets, as numpy's.
        presets: all of them.
        buckets: what sums are kept apart for, [S].
        batches: the label of each sequence's trainer batch, [S].
    """
    labels, which = np.unique(np.array(batches, object), return_inverse=True)
    ranges: dict[str, tuple[float, float]] = {}
    for preset in presets:
        name, (smallest, largest) = f"{preset.name}|weight", (columns[f"{preset.name}|{end}"] for end in ENDS)
        rows: dict[str, Any] = {name: slice(None)}
        if normalised(preset):
            rows = {f"{name}|{label}": which == at for at, label in enumerate(labels.tolist())}
        for key, here in rows.items():
            ranges[key] = extremes(smallest[here])[0], extremes(largest[here])[1]
    apart = added(columns, [preset for preset in presets if normalised(preset)])
    return State(tables={"batches": Table.of(apart, buckets, batches)} if apart else {}, ranges=ranges)


# ---------------------------------------------------------------- weights divided by their mean


def normalised(preset: Preset) -> bool:
    """Return whether weights are divided by a batch mean."""
    return preset.weight is not None and preset.weight.normalize


def norm_factor(total: Array | float, units: Array | float) -> Array:
    """Compute the divisor of batch normalisation; 1 where the mean weight is at most 1e-8, as in verl."""
    mean_weight = np.divide(total, units)
    return np.where(mean_weight > SMALLEST_NORM, mean_weight, 1.0)


def factors(state: State, presets: Sequence[Preset]) -> dict[str, dict[str, float]]:
    """Return normalised preset → trainer batch → the factor that its weights are divided by."""
    found: dict[str, dict[str, float]] = {one.name: {} for one in presets if normalised(one)}
    for label, table in state.tables["batches"].by_place().items() if found else ():
        sums = table.sums()
        for name, of_batches in found.items():
            of_batches[label] = float(norm_factor(sums[f"{name}|norm"], sums[f"{name}|norm_units"]))
    return found


def weight_range(state: State, preset: Preset) -> tuple[float, float]:
    """Return a preset's smallest and largest final weight, each divided by that of its trainer batch."""
    name = f"{preset.name}|weight"
    if not normalised(preset):
        return state.ranges[name]
    by_batch = factors(state, [preset])[preset.name]
    ends = np.array([[x / factor for x in state.ranges[f"{name}|{at}"]] for at, factor in by_batch.items()])
    return float(ends[:, 0].min()), float(ends[:, 1].max())


def drawn(state: State, presets: Sequence[Preset], seed: int) -> dict[str, Array]:
    """Add up the sums [1+B] of normalised presets over trainer batches, each divided by its mean weight."""
    apart, total = [preset for preset in presets if normalised(preset)], dict[str, Array]()
    for table in state.tables["batches"].by_place().values() if apart else ():
        sums = table.drawn(seed)
        for preset in apart:
            for name, x in divided(sums, preset).items():
                total[name] = total[name] + x if name in total else x
    return total


def divided(sums: Mapping[str, Array], preset: Preset) -> dict[str, Array]:
    """Divide one trainer batch's sums [1+B] by the preset's mean weight f.

    Sums about 1 follow from sums about 1 where f is within ½ of it, else from sums about 0: either would lose
    its digits where the other is precise.
    """
    prefix = f"{preset.name}|"
    raw = {name.removeprefix(prefix): x for name, x in sums.items() if name.startswith(prefix)}
    f = norm_factor(raw.pop("norm"), raw.pop("norm_units"))
    near, kept, left, rest = np.abs(f - 1) < 0.5, raw["kept"], raw["left"], 1 - f
    found = raw | {name: raw[name] / f for name in ("w", "v")}
    found |= {name: raw[name] / f**2 for name in ("ww", "vv")}
    found["w1"] = np.where(near, (raw["w1"] + kept * rest) / f, found["w"] - kept)
    about_1 = (raw["w11"] + 2 * rest * raw["w1"] + kept * rest**2) / f**2
    found["w11"] = np.where(near, about_1, found["ww"] - 2 * found["w"] + kept)
    found["v11"] = np.where(near, (raw["v11"] + left * rest * (1 + f)) / f**2, found["vv"] - left)
    if multiplies_loss(preset):
        found |= {name: raw[name] / f for name in ("loss", "loss_mean") if name in raw}
    return {prefix + name: x for name, x in found.items()}


# ---------------------------------------------------------------- metrics

ROUNDING = 16 * np.finfo(np.float64).eps


def _std(get: Lookup) -> Array:
    """Compute the standard deviation of the weights from sums about 1, or about 0 where the mean is below ½.

    A variance below the rounding error of those sums (equal weights) counts as 0.
    """
    mean_weight, n = get("w") / get("kept"), get("kept")
    small = mean_weight < 0.5
    about = np.where(small, mean_weight, mean_weight - 1)
    variance = np.where(small, get("ww"), get("w11")) / n - about**2
    floor = ROUNDING * np.where(small, about**2, np.abs(about))
    deviation: Array = np.sqrt(np.where(variance > floor, variance, np.abs(0.0 * variance)))
    return deviation


OVER = {"kept": "tokens not rejected", "left": "sequences left", "units": "weights"}
"""Denominator → what a number is averaged over, where these are not one word."""


def _mean(name: str, text: str, column: str, per: str = "kept", **more: Any) -> Formula:
    """Return the mean of a column per token not rejected, or per what another column counts."""
    return Formula(name, text, mean(column, per), over=OVER.get(per, per), **more)


def _ess(x: str, n: str) -> Callable[[Lookup], Array]:
    """Return the formula (Σx)² / (n Σx²), whose squares are the column xx."""
    return lambda get: get(x) ** 2 / (get(n) * get(x + x))


def _share(name: str, text: str, column: str, per: str) -> Formula:
    """Return the share of events in `per`."""
    return Formula(name, f"share of {text}", mean(column, per), "fraction", OVER.get(per, per), counts=True)


def _less(name: str, text: str, column: str, per: str) -> Formula:
    """Return the share that is not among a column's."""
    of = lambda get: 1 - get(column) / get(per)  # noqa: E731
    return Formula(name, f"share of {text}", of, "fraction", per, counts=True)


DROPPED = _less("sequences_dropped", "sequences with no token left", "left", "sequences")
ROWS = (
    _mean("weight_mean", "mean of the final weights", "w", within=POSITIVE),
    Formula("weight_std", "standard deviation of the final weights", _std, "", OVER["kept"], POSITIVE),
    Formula("ess_tokens", "(Σw)² / (n Σw²), a rejected token weighs 0", _ess("w", "tokens"), "fraction"),
    Formula(
        "ess_sequences",
        "(Σv)² / (n Σv²), v = mean over the sequence's tokens of the final weight, 0 where rejected",
        _ess("v", "sequences"),
        "fraction",
        "sequences",
    ),
    _share("truncated_high", "weights above the upper bound", "high", "units"),
    _share("truncated_low", "weights below the lower bound", "low", "units"),
    _less("tokens_rejected", "tokens that rejection and veto remove", "kept", "tokens"),
    _share("tokens_weighted", "tokens neither rejected nor of weight 0", "weighted", "tokens"),
    DROPPED,
    _share("sequences_touched", "sequences with at least one token rejected", "touched", "sequences"),
    _share("vetoed", "sequences dropped by the veto", "vetoed", "sequences"),
    _share("catastrophic_tokens", "tokens beyond the veto's bound", "hits", "tokens"),
    _mean("k3", "mean(e^Δ − 1 − Δ) of the tokens not rejected", "k3", unit="nats", within=POSITIVE),
    Formula(
        "ppl_ratio",
        "mean over sequences left of exp(−mean Δ of their tokens not rejected)",
        mean("ppl", "left", plus=1.0),
        over=OVER["left"],
        within=POSITIVE,
    ),
    Formula(
        "chi2_token",
        "mean(w²) − 1 of the final weights",
        lambda get: (get("w11") + 2 * get("w1")) / get("kept"),
        over=OVER["kept"],
        within=ABOVE_MINUS_ONE,
    ),
    _mean(
        "chi2_sequence",
        "mean(v²) − 1, v = mean final weight over the sequence's tokens, 0 where rejected",
        *("v11", "left"),
        within=ABOVE_MINUS_ONE,
    ),
)
"""Numbers of weights and of what is kept."""

_OWN = "Σ w L / tokens not rejected, or all where rejected ones stay (token-mean)"
LOSSES = (
    _mean("pg_loss", "Σ w L / tokens not rejected (token-mean)", "loss"),
    _mean("pg_loss_kept", "Σ w L / all tokens (token-mean, rejected tokens stay)", "loss", "tokens"),
    Formula("pg_loss_own", _OWN, mean("loss", "own"), over="the preset's own denominator"),
    _mean("pg_loss_seq_sum", "Σ w L / sequences left (seq-mean-token-sum)", "loss", "left"),
    _mean("pg_loss_seq_mean", "mean of the mean w L of each (seq-mean-token-mean)", "loss_mean", "left"),
    Formula(
        "pg_loss_seq_norm",
        "Σ w L / sequences left / longest response (seq-mean-token-sum-norm)",
        lambda get: get("loss") / get("left") / get("longest"),
        over=OVER["left"],
    ),
    _mean("pg_clipfrac", "share where the clip decides, or changes the weight", "clipped", unit="fraction"),
    _mean("pg_clipfrac_lower", "share where the dual clip decides", "dual_clipped", unit="fraction"),
    _mean("ppo_kl", "mean(log π_anchor − log π_θ), each bounded as the loss bounds it", "kl", unit="nats"),
)
"""Numbers of the policy loss, of dumps that have what it is made of."""

EXTREMES = (
    Formula("weight_min", "smallest final weight", lambda ends: ends("weight")[0], over=OVER["kept"]),
    Formula("weight_max", "largest final weight", lambda ends: ends("weight")[1], over=OVER["kept"]),
)
"""Formulas over the range of the final weights, [2], without an interval."""


def idle(preset: Preset) -> frozenset[str]:
    """Return the events that this preset cannot cause, whatever the data: their 0, or 1, is exact."""
    weight, rejects = preset.weight, bool(preset.reject or preset.veto)
    possible = {
        **dict.fromkeys(("tokens_rejected", "sequences_dropped", "sequences_touched"), rejects),
        "tokens_weighted": rejects or (weight is not None and may_be_zero(weight)),
        **dict.fromkeys(("vetoed", "catastrophic_tokens"), preset.veto is not None),
        "truncated_high": weight is not None and weight.upper is not None,
        "truncated_low": weight is not None and weight.lower is not None,
    }
    return frozenset(name for name, can_be in possible.items() if not can_be)


def numbers(reader: Reader, preset: Preset) -> Numbers:
    """Read the numbers of a preset that are made of sums; those of its loss where it has one."""
    rows = [*ROWS, *(LOSSES if f"{preset.name}|loss" in reader.drawn else ())]
    prefixed = [(row_of(row, preset), f"{preset.name}|") for row in rows]
    return {row.name: number for row, number in zip(rows, reader.all(prefixed), strict=True)}


def row_of(row: Formula, preset: Preset) -> Formula:
    """Return the row of a preset, which does not count events that the preset cannot cause."""
    return replace(row, counts=row.counts and row.name not in idle(preset))


AT_LAG_0 = Formula(
    "kept_at_lag_0",
    "share with a weight above 0 of what was sampled at policy lag 0, where only numerics make the policies "
    "differ",
    mean("weighted"),
    "fraction",
    "tokens of policy lag 0",
    counts=True,
)

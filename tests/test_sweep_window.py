"""`--keep`: bounds that keep exactly what was asked for, and what they would keep of other lengths."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from offpol_diag import DumpWriter
from offpol_diag.cli.defaults import sample
from offpol_diag.errors import UsageError
from offpol_diag.presets import Preset, Reject, Veto
from offpol_diag.presets.catalogue import load
from offpol_diag.sweep import SweepOptions, pick, sweep
from offpol_diag.sweep.lengths import LENGTHS, Model, Scale, Spreads
from offpol_diag.sweep.window import check, shortest
from tests import oracles

CATALOGUE = load()
GEO = Preset("geo", "", reject=(Reject(over="mean", lower=0.999, upper=1.001),))
SUM = Preset("sum", "", reject=(Reject(over="sum", lower=0.5, upper=2.0),))
K3 = Preset("k3", "", reject=(Reject("k3", "mean", upper=0.01),))
BAND = Preset("band", "", reject=(Reject(lower=0.8, upper=5.0),))
VETO = Preset("veto", "", veto=Veto(lower=1e-4))


def solved(one: Preset, keep: float, path=None, **more):
    which = more.pop("which", None)
    ask = SweepOptions(one, pick(one, which), (1.5, 2.0), keep=keep, chosen=which is not None, **more)
    return sweep([str(path or sample())], ask, workers=1).sweep


@cache
def statistics(one: Preset) -> list[float]:
    """Of every unit of the sample, in a loop; ratios as logarithms."""
    found: list[float] = []
    for row in oracles.sequences(pq.read_table(sample()).to_pylist()):
        delta = row.delta("old")
        if not delta:
            continue
        found += {
            "geo": lambda d: [math.fsum(d) / len(d)],
            "sum": lambda d: [math.fsum(d)],
            "k3": lambda d: [math.fsum(math.expm1(x) - x for x in d) / len(d)],
            "band": lambda d: d,
            "veto": lambda d: [min(d)],
        }[one.name](delta)
    return found


def inside(one: Preset, bounds: dict[str, float]) -> int:
    """How many units lie within bounds, in a loop."""
    low, high = (bounds.get(f"{place}.{side}") for place, side in pairs(one))
    logs = one.name != "k3"
    low = -math.inf if low is None else math.log(low) if logs else low
    high = math.inf if high is None else math.log(high) if logs else high
    return sum(low <= x <= high for x in statistics(one))


def pairs(one: Preset):
    place = "veto" if one.veto else "reject[0]"
    return ((place, "lower"), (place, "upper"))


@pytest.mark.parametrize(
    ("one", "keep"),
    [
        *((GEO, keep) for keep in (0.05, 0.5, 0.95, 0.999, 1.0)),
        *((BAND, keep) for keep in (0.05, 0.999, 1.0)),
        *((one, keep) for one in (SUM, K3, VETO) for keep in (0.5, 0.95)),
    ],
    ids=lambda given: str(getattr(given, "name", given)),
)
def test_the_bounds_keep_exactly_the_share_promised(one, keep) -> None:
    window = solved(one, keep).window
    many = len(statistics(one))

    assert window.of == many
    assert window.kept - window.ties == math.ceil(keep * many - 1e-9)
    assert inside(one, window.point.bounds) == window.kept
    unit = "tokens_kept" if one is BAND else "sequences_kept"
    assert math.isclose(window.point.metrics[unit].value, window.kept / many, rel_tol=1e-12)


def test_both_sides_lose_the_same_around_the_data_and_one_side_asked_for_is_solved_alone() -> None:
    window = solved(GEO, 0.9).window
    low, high = (math.log(window.point.bounds[f"reject[0].{side}"]) for side in ("lower", "upper"))
    values = statistics(GEO)

    below, above = sum(x < low for x in values), sum(x > high for x in values)
    assert abs(below - above) <= 1
    assert low < math.fsum(values) / len(values) < high
    assert math.isclose(window.centre.value, math.fsum(values) / len(values), rel_tol=1e-9)
    assert window.centre_k1.value < 0
    one = solved(GEO, 0.9, which="reject.upper").window
    assert list(one.point.bounds) == ["reject[0].upper"]
    high = math.log(one.point.bounds["reject[0].upper"])
    assert sum(x <= high for x in values) == one.kept == math.ceil(0.9 * 512)


def write(path, deltas, groups=None) -> str:
    with DumpWriter(path) as dump:
        dump.write(
            rollout_log_probs=[[-1.0] * len(row) for row in deltas],
            old_log_probs=[[-1.0 + x for x in row] for row in deltas],
            group_id=list(groups or range(len(deltas))),
        )
    return str(path)


def test_ties_are_kept_and_said(tmp_path) -> None:
    """Three values only: no bound keeps half of a hundred equal ones."""
    path = write(tmp_path / "ties.parquet", [[0.0]] * 100 + [[0.25]] * 20 + [[-0.25]] * 20)

    found = solved(GEO, 0.5, path)

    assert (found.window.kept, found.window.of, found.window.ties) == (100, 140, 30)
    assert any("30 more than asked" in remark for remark in found.remarks)
    low, high = (found.window.point.bounds[f"reject[0].{side}"] for side in ("lower", "upper"))
    assert math.exp(-0.25) < low < 1 < high < math.exp(0.25)


def test_a_dump_without_any_mismatch_has_a_window(tmp_path) -> None:
    found = solved(GEO, 0.95, write(tmp_path / "equal.parquet", [[0.0, 0.0]] * 40))

    assert (found.window.kept, found.window.of) == (40, 40)
    assert found.window.point.metrics["sequences_kept"].value == 1


@pytest.mark.parametrize(
    ("keep", "rule", "said"),
    [
        *((keep, GEO.reject[0], "above 0 and at most 1") for keep in (0.0, -0.1, 1.5, math.nan, math.inf)),
        (0.9, Reject(over="mean", upper=1.01, among="left"), "--keep"),
        (0.9, Reject(upper=1.01, advantage="against"), "--keep"),
        (0.9, Reject("k2", "batch", upper=0.1), "--keep"),
    ],
)
def test_no_share_and_what_one_bound_alone_does_not_decide_is_refused(keep, rule, said) -> None:
    one = Preset("one", "", reject=(rule,))
    with pytest.raises(UsageError, match=said):
        check(keep, one, pick(one, None))


def test_a_bound_is_the_shortest_number_that_does_it() -> None:
    assert shortest(math.log(1.0091), math.log(1.0118), True, 0.01) == 1.01
    assert shortest(0.0091, 0.0118, False, 0.0) == 0.01
    at = math.log(1.5)
    assert shortest(at, math.nextafter(at, 2), True, at) == math.exp(at)


def test_a_bound_beyond_all_floats_is_refused(tmp_path) -> None:
    path = write(tmp_path / "huge.parquet", [[-800.0], [0.1], [0.2]])

    assert solved(GEO, 0.3, path).window.kept == 1
    with pytest.raises(UsageError, match="800 nats"):
        solved(GEO, 1.0, path)


def test_the_config_of_the_window_is_printed_in_a_trainers_syntax() -> None:
    found = solved(CATALOGUE["geo_rs"], 0.95, trainer="verl")
    bounds = found.window.point.bounds

    assert f"rollout_rs_threshold: {bounds['reject[0].upper']}" in found.window.config
    assert f"rollout_rs_threshold_lower: {bounds['reject[0].lower']}" in found.window.config


# ---------------------------------------------------------------- other lengths


def drawn(falling: float, staying: float, many: int = 12_000, heavy: bool = False, seed: int = 0):
    """log r per token of sequences of 32 to 4096 tokens: (values, lengths, keys)."""
    random = np.random.default_rng(seed)
    lengths = np.round(2 ** random.uniform(5, 12, many))
    shape = random.standard_t(4, many) / math.sqrt(2) if heavy else random.standard_normal(many)
    values = -0.002 + shape * np.sqrt(falling**2 / lengths + staying**2)
    keys = torch.arange(many) // 4
    return torch.from_numpy(values), torch.from_numpy(lengths).to(torch.int64), keys


def fitted(values, lengths, keys) -> Model:
    scale = Scale(float(values.median()), float(values.std()) * 2)
    found = Model.of(Spreads.of(values, lengths, keys, scale), scale, product=False)
    assert found is not None
    return found


def test_both_parts_of_the_spread_are_found() -> None:
    model = fitted(*drawn(0.1, 0.003))

    assert math.isclose(math.sqrt(model.whole.falling), 0.1, rel_tol=0.05)
    assert math.isclose(math.sqrt(model.whole.staying), 0.003, rel_tol=0.1)


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("quarter", [0, 3])
def test_a_quartile_of_length_that_was_held_out_is_predicted(heavy, quarter) -> None:
    """Within the uncertainty that is printed, which is small."""
    window = (-0.012, 0.008)
    values, lengths, keys = drawn(0.1, 0.003, heavy=heavy)
    borders = np.quantile(lengths, (0, 0.25, 0.5, 0.75, 1))
    held = (lengths >= borders[quarter]) & (lengths <= borders[quarter + 1])
    model = fitted(values[~held], lengths[~held], keys[~held])

    mean = float(np.median(lengths[held]))
    near = held & (lengths > mean / 1.1) & (lengths < mean * 1.1)
    seen = float(((values[near] >= window[0]) & (values[near] <= window[1])).double().mean())
    (one,) = model.forecast([mean], window)

    assert one.observed is None
    chance = math.sqrt(seen * (1 - seen) / int(near.sum()))
    assert abs(one.kept - seen) < 3 * math.hypot(one.error, chance)
    assert one.error < 0.05


def test_the_longest_quartile_of_the_sample_is_predicted_from_the_others(tmp_path) -> None:
    """Real sequences, a fit that never saw a long one: within its own uncertainty and chance."""
    rows = oracles.sequences(pq.read_table(sample()).to_pylist())
    values = torch.tensor([math.fsum(row.delta("old")) / row.n for row in rows], dtype=torch.float64)
    lengths = torch.tensor([row.n for row in rows])
    keys = torch.tensor([row.group for row in rows])
    border = float(lengths.double().quantile(0.75))
    short = lengths < border
    window = tuple(values.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist())
    (one,) = fitted(values[short], lengths[short], keys[short]).forecast(
        [float(lengths[~short].double().mean())], window
    )

    seen = float(((values[~short] >= window[0]) & (values[~short] <= window[1])).double().mean())
    chance = math.sqrt(seen * (1 - seen) / int((~short).sum()))
    assert abs(one.kept - seen) < 3 * math.hypot(one.error, chance)


def test_predictions_agree_with_what_is_seen_and_on_the_product_fall_with_length() -> None:
    kept = [one.kept.value for one in solved(SUM, 0.9).window.predicted]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 0.9 > kept[-1]

    seen = [one for one in solved(GEO, 0.9).window.predicted if one.observed is not None]
    assert len(seen) >= 2
    for one in seen:
        low, high = one.kept.interval
        assert low - 0.1 <= one.observed.value <= high + 0.1


def test_too_few_sequences_make_no_forecast(tmp_path) -> None:
    found = solved(GEO, 0.9, write(tmp_path / "few.parquet", [[0.1 * k, 0.0] for k in range(-5, 6)]))

    assert found.window.predicted == []


def test_lengths_are_told_apart_to_a_quarter_octave() -> None:
    spreads = Spreads.of(
        torch.zeros(2, dtype=torch.float64),
        torch.tensor([100, 200]),
        torch.zeros(2, dtype=torch.int64),
        Scale(0.0, 1.0),
    )
    at = torch.nonzero(spreads.counts.sum(dim=(0, 2))).flatten().tolist()

    assert at == [26, 30]
    assert at[-1] < LENGTHS


def test_a_window_may_be_asked_of_a_preset_with_other_rules() -> None:
    """The share is that of the window alone; what the preset then keeps stands beside it."""
    one = replace(GEO, veto=Veto(lower=0.5))
    window = solved(one, 0.9).window

    assert window.kept == math.ceil(0.9 * 512)
    assert window.point.metrics["sequences_kept"].value < 0.9

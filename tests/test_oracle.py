"""Every number of a Result against the textbook in `oracles.py`, through real Parquet files.

Tolerances. Means are held to 1e-9 relative (DESIGN §5). Where the terms of a mean have both signs (k1, χ²,
the losses) 1e-12 of the mean *size* of the terms is allowed besides: that much is lost by rounding alone. A
standard deviation is the root of a difference of squares, so its square is held to 2e-9 of itself plus
1e-13 of the squared distance between the mean and what the package takes off first (1 for weights, 0 for Δ
and |p − q|).
"""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offpol_diag.core.preset_numbers import idle
from offpol_diag.presets import (
    UNSIGNED,
    Action,
    Clip,
    Denominator,
    Loss,
    Numerator,
    Over,
    Overflow,
    Preset,
    Reject,
    Sign,
    Statistic,
    Veto,
    Weight,
    WeightOver,
    catalogue,
)
from tests import oracles
from tests.devices import gpu
from tests.reading import analyze

SIGMAS = ("1e-4", "1", "outliers", "float32")
ON_GPU = ("1e-3", "1e-2", "outliers")
BUILT_IN = tuple(
    {
        replace(one, name="", summary="", note="", aliases=(), source="", at=(), generation=None): one
        for one in (catalogue.load().resolve("all"))
    }.values()
)
"""One preset of each rule."""
BINNED = {"k3_top1_share": 1 / 32}
"""Read off a histogram whose bins are 1/32 wide: at worst the share within the cut's bin is off by that."""
ELSEWHERE = ("khat_tokens", "khat_sequences", "mean_reward")
"""Compared elsewhere: k̂ in test_tails, the mean reward at the end."""


def rows_of(case: str) -> list[dict[str, Any]]:
    if case == "outliers":
        return oracles.make_rows(0.05, seed=7, outliers=0.04)
    rows = oracles.make_rows(0.02 if case == "float32" else float(case), seed=len(case))
    if case == "float32":
        for row in rows:
            for name in ("rollout_log_probs", "old_log_probs", "current_log_probs", "advantages"):
                row[name] = np.array(row[name], np.float32).astype(np.float64).tolist()
    return rows


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param((sigma, "cpu"), id=f"{sigma}-cpu") for sigma in SIGMAS),
        *(gpu((sigma, "cuda:0"), name=f"{sigma}-cuda:0") for sigma in ON_GPU),
    ],
)
def case(request, tmp_path_factory):
    """Return rows, the Result of their file under every built-in preset, and its table of sequences."""
    sigma, device = request.param
    rows = rows_of(sigma)
    folder = tmp_path_factory.mktemp("oracle")
    floats = pa.float32() if sigma == "float32" else None
    path = oracles.write(rows, folder / "dump.parquet", row_group=13, floats=floats)
    table = folder / "sequences.parquet"
    summary = analyze([path], presets=BUILT_IN, sequences=table, batch_tokens=500, device=device)
    return oracles.sequences(rows), summary, pq.read_table(folder / "sequences.parquet").to_pydict()


def differs(got: float | None, want: float, scale: float = 0.0) -> bool:
    """Return whether values differ: beyond 1e-9 of the value and 1e-12 of the scale, or one is undefined."""
    if got is None or math.isnan(want):
        return not (got is None and math.isnan(want))
    return abs(got - want) > 1e-9 * abs(want) + 1e-12 * scale


def std_differs(got: float | None, want: float, about: float) -> bool:
    """Return whether deviations differ; `about` is the mean less what was subtracted before squaring."""
    if got is None or math.isnan(want):
        return not (got is None and math.isnan(want))
    return abs(got**2 - want**2) > 2e-9 * want**2 + 1e-13 * about**2 + 1e-30


def slips(preset: Preset, name: str, got: float | None, wanted: dict[str, float], loss: float) -> bool:
    """Return whether a number is not the textbook's; `loss` is the mean size of the loss's terms."""
    want, normalised = wanted[name], preset.weight is not None and preset.weight.normalize
    if name == "weight_std":
        return std_differs(got, want, wanted["weight_mean"] - (not normalised))
    scale = loss if name.startswith("pg_loss") else 0.0
    if name.startswith("chi2_") and normalised:
        # The batch mean is near 1 and is divided out: w² − 1 is known to the rounding of 1, not of itself.
        scale = 1e-2
    # Σ(1/r − 1) is summed: a mean 1/r of 1e-10 is known to the rounding of 1.
    return differs(
        got, want, {"pg_loss_seq_sum": 60 * loss, "ppo_kl": 1e-3, "ppl_ratio": 1e-2}.get(name, scale)
    )


def check(preset: Preset, data: list[oracles.Sequence], summary: Any, table: dict[str, list[Any]]) -> None:
    """Hold all numbers of a preset, and its columns of the table of sequences, against the textbook."""
    wanted, rows, loss = oracles.preset_metrics(data, preset)
    found = {name: number.value for name, number in summary.preset(preset.name).items()}
    assert set(found) == set(wanted), preset
    off = {
        name: (found[name], wanted[name]) for name in wanted if slips(preset, name, found[name], wanted, loss)
    }
    assert off == {}, preset
    at = {ident: i for i, ident in enumerate(table["sequence_id"])}
    for s, want in zip(data, rows, strict=True):
        got = {column: table[f"{preset.name}.{column}"][at[s.ident]] for column in want}
        total = want["weight_sum"] and pytest.approx(want["weight_sum"], rel=1e-9)
        assert got == want | {"weight_sum": total}, (preset, s.ident)


# ---------------------------------------------------------------- the gap and the raw weights


@pytest.mark.parametrize("prefix", oracles.DRIFTS)
def test_every_policy_gap_metric_is_the_textbooks(case, prefix):
    data, summary, _ = case
    wanted = oracles.policy_gap(data, prefix) | oracles.raw_weights(data, prefix)
    wanted["chi2_sequence"] = float(oracles.chi2_sequence(data, prefix))
    scales, found = oracles.scales(data, prefix), {}
    for name, want in wanted.items():
        got = summary.whole[prefix + name].value
        if name in ("log_ratio_std", "prob_diff_std"):
            bad = std_differs(got, want, wanted["k1" if name == "log_ratio_std" else "prob_diff_mean"])
        elif name in BINNED:
            bad = got != pytest.approx(want, rel=BINNED[name])
        else:
            bad = differs(got, want, scales.get(name, 0.0))
        if bad:
            found[name] = (got, want)
    assert found == {}
    names = {name.removeprefix(prefix) for name in summary.whole if name.startswith(prefix)}
    exact = {name for name in names if "." not in name and not name.startswith("log_ratio_p")}
    assert exact - set(ELSEWHERE) == set(wanted), "no exact metric is left without its textbook"


def test_quantiles_of_the_log_ratio_are_within_a_bin(case):
    data, summary, _ = case
    deltas = np.sort([d for s in data for d in s.delta("old")])
    for q in (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999):
        got = summary.whole[f"log_ratio_p{q * 100:g}".replace(".", "_")].value
        ends = np.quantile(deltas, q, method="lower"), np.quantile(deltas, q, method="higher")
        slack = max(map(abs, ends)) / 32 + 2.0**-40
        assert min(ends) - slack <= got <= max(ends) + slack


# ---------------------------------------------------------------- presets


def test_every_number_of_every_built_in_preset_is_the_textbooks(case):
    for preset in BUILT_IN:
        check(preset, *case)


def test_what_a_preset_drops_by_length_is_the_textbooks(case):
    data, summary, _ = case
    able = [one for one in BUILT_IN if "sequences_dropped" not in idle(one)]
    for preset in BUILT_IN:
        found = {place.key: place.numbers for place in summary.at("length", f"preset/{preset.name}")}
        got = {key: numbers["sequences_dropped"].value for key, numbers in found.items() if numbers}
        want = oracles.dropped_by_length(data, preset) if preset in able else {}
        got = {key: x for key, x in got.items() if x is not None}  # where all sequences are empty
        assert got == pytest.approx(want, rel=1e-12), preset.name


# ---------------------------------------------------------------- the whole grammar

RATIOS, SAFETIES = (0.5, 0.9, 0.99, 1.003, 1.05, 1.7, 4.0), (None, 20.0, 3.0, 0.02)
SIZES, SIGNED = (1e-5, 1e-3, 0.0104, 0.11, 0.9), (-0.3, -0.021, -1e-3, 1e-3, 0.015, 0.25)
BOUNDS = {"ratio": RATIOS, "mult_prob_error": (1.0001, 1.003, 1.05, 1.7, 4.0)}
BOUNDS |= {"k1": SIGNED, "prob_diff": SIGNED}
LOWS, HIGHS = (None, 0.0, 3e-4, 0.02, 0.2, 1.0), (None, 0.0, 4e-4, 0.03, 0.272, 4.0)


def any_preset(chance: Random, name: str) -> Preset:
    """Draw a preset of the grammar."""
    pick = chance.choice

    def word(words: Any) -> Any:
        return pick([one for one in get_args(words) if one != "batch"])

    def band(values: Any) -> dict[str, float]:
        low, high = sorted((pick(values), pick(values)))
        return pick(({"lower": low}, {"upper": high}, {"lower": low, "upper": high}))

    def safety() -> dict[str, Any]:
        return {"safety": pick(SAFETIES), "safety_at": pick(("aggregate", "token"))}

    def weight() -> Weight:
        action = word(Action)
        more = safety() | (band(RATIOS) if action in ("truncate", "mask") else {})
        return Weight(
            word(WeightOver), action, normalize=pick((True, False)), overflow=word(Overflow), **more
        )

    def rule() -> Reject:
        if pick((True, False, False)):
            return Reject(pick(sorted(UNSIGNED)), "batch", upper=pick(SIZES), safety=pick(SAFETIES))
        statistic = word(Statistic)
        more = safety() | band(BOUNDS.get(statistic, SIZES))
        return Reject(statistic, word(Over), advantage=word(Sign), **more)

    return Preset(
        name,
        "",
        policy=word(Numerator),
        weight=pick((None, weight(), weight())),
        reject=tuple(rule() for _ in range(pick((0, 1, 2, 3)))),
        veto=pick((None, Veto(**band((1e-4, 0.2, 0.8, 1.4, 30.0))))),
        loss=word(Loss),
        clip=Clip(pick(LOWS), pick(HIGHS), pick((None, 1.01, 3.0)), pick((None, None, 0.05, 0.4))),
        denominator=word(Denominator),
    )


@pytest.mark.parametrize("seed", range(4))
def test_any_preset_of_the_grammar_does_what_the_textbook_does(tmp_path, seed):
    """On log-ratios that reach from 1e-3 to 40."""
    rows = oracles.make_rows(0.02, seed=3, many=14) + oracles.make_rows(0.5, seed=4, many=14, outliers=0.03)
    rows = [row | {"sequence_id": f"s{i:03d}"} for i, row in enumerate(rows)]
    path, out = oracles.write(rows, tmp_path / "dump.parquet", row_group=10), tmp_path / "sequences.parquet"
    chance = Random(seed)
    named = [any_preset(chance, f"p{i}") for i in range(24)]
    summary = analyze([path], presets=named, sequences=out, batch_tokens=400)
    table = pq.read_table(out).to_pydict()
    for preset in named:
        check(preset, oracles.sequences(rows), summary, table)


# ---------------------------------------------------------------- by hand


class ByHand(NamedTuple):
    """Sequences of given log-ratios, and what a preset does to them."""

    rows: list[list[float]]
    preset: Preset
    table: dict[str, list[Any]] = {}  # noqa: RUF012 - of sequences, by column
    numbers: dict[str, float | None] = {}  # noqa: RUF012


def logs(deltas: list[float]) -> dict[str, list[float]]:
    """Return log-probs of exactly these log-ratios: one of the two policies is certain of each token."""
    return {
        "rollout_log_probs": [min(-d, 0.0) for d in deltas],
        "old_log_probs": [min(d, 0.0) for d in deltas],
    }


def numbers(rows: list[dict[str, Any]], preset: Preset, folder: Any) -> dict[str, float | None]:
    """Compute a preset's numbers of a dump of these rows, and write its table of sequences."""
    path = oracles.write(rows, folder / "dump.parquet")
    summary = analyze([path], presets=[preset], sequences=folder / "sequences.parquet")
    return {name: number.value for name, number in summary.preset(preset.name).items()}


def rule(*args: Any, veto: Veto | None = None, weight: Weight | None = None, **how: Any) -> Preset:
    return Preset("rule", "", reject=(Reject(*args, **how),), veto=veto, weight=weight)


def weight(*args: Any, **how: Any) -> Preset:
    return Preset("weight", "", weight=Weight(*args, **how))


def around(bound: float) -> list[list[float]]:
    """Return a Δ at a bound of r, and those a step above and below it."""
    at = math.log(bound)
    return [[at], [math.nextafter(at, math.inf)], [math.nextafter(at, -math.inf)]]


def kept(*tokens: int) -> dict[str, list[Any]]:
    return {"kept_tokens": [*tokens]}


def sums(*weights: float) -> dict[str, list[Any]]:
    return {"weight_sum": [pytest.approx(x) for x in weights]}


E, SIGNED_ROWS = math.exp, [[-0.5], [0.25], [-0.25], [0.5]]
EDGES = [("token", bound) for bound in (0.5, 2.0, 1e-4, 1.001)] + [(over, 5.0) for over in get_args(Over)[:6]]
BY_HAND = {
    **{f"at an upper {x} of {over}": ByHand(around(x), rule("ratio", over, upper=x), kept(1, 0, 1))
       for over, x in EDGES},
    **{f"at a lower {x} of {over}": ByHand(around(x), rule("ratio", over, lower=x), kept(1, 1, 0))
       for over, x in EDGES},
    "masked at an upper 2": ByHand(around(2.0), weight("token", "mask", upper=2.0), sums(2, 0, 2)),
    "masked at a lower 0.5": ByHand(around(0.5), weight("token", "mask", lower=0.5), sums(0.5, 0.5, 0)),
    "k1, bounds inclusive": ByHand(SIGNED_ROWS, rule("k1", lower=-0.25, upper=0.25), kept(0, 1, 1, 0)),
    "k2": ByHand(SIGNED_ROWS, rule("k2", upper=0.03125), kept(0, 1, 1, 0)),
    # k3(−1/2) = 0.107 is above k3(1/4) = 0.034, tv(−1/4) = 0.111 below tv(1/4) = 0.142
    "k3": ByHand(SIGNED_ROWS, rule("k3", upper=math.expm1(0.25) - 0.25), kept(0, 1, 1, 0)),
    "tv": ByHand(SIGNED_ROWS, rule("tv", lower=math.expm1(0.25) / 2), kept(1, 1, 0, 1)),
    "π_train − π_rollout": ByHand(SIGNED_ROWS, rule("prob_diff", upper=0.0), kept(1, 0, 1, 0)),
    # k3 of 1e-7 nats is 5.00000017e-15; e^Δ − 1 − Δ is off by 1e-16 of 1, which is 2% of that
    "k3 where exp would have lost it": ByHand(
        [[1e-7] * 3, [-1e-7] * 3, [1.01e-7]], rule("k3", lower=4.99999e-15, upper=5.00001e-15), kept(3, 3, 0)
    ),
    "a safety bounds the ratio of a probability difference": ByHand(  # e^-1 · (e^0.01 − 1) = 0.004, not 0.63
        [[1.0]], rule("prob_diff", upper=0.02, safety=0.01), kept(1)
    ),
    "an upper bound below a safety drops everything": ByHand(
        [[-5.0], [0.0], [5.0]], rule("ratio", upper=0.5, safety=0.1), kept(0, 0, 0)
    ),
    "a lower bound beyond a safety drops nothing": ByHand(
        [[-30.0]], rule("ratio", lower=1e-9, safety=5.0), kept(1)
    ),
    "a token at the veto's bound is no catastrophe": ByHand(
        [[0.0, at] for (at,) in around(1e-4)],
        Preset("veto", "", veto=Veto(lower=1e-4)),
        {"vetoed": [False, False, True], **kept(2, 2, 0)},
        {"vetoed": 1 / 3, "catastrophic_tokens": 1 / 6},
    ),
    "the veto reads the unclamped ratio": ByHand(
        [[-30.0], [-10.0]],
        rule("ratio", "sum", lower=1e-9, upper=1e9, safety=20.0, veto=Veto(lower=1e-12)),
        {"vetoed": [True, False], **kept(0, 1)},
    ),
    # An off-by-one puts every product at e^-20, and 1 − 1 + 4e-18 is no way to reach Σw² of those.
    "weights that are all tiny": ByHand(
        [[-50.0, -7.0], [-80.0], [-70.0]] * 3,
        weight("sum", upper=2.0),
        numbers={"weight_mean": E(-20), "ess_tokens": 1.0, "ess_sequences": 1.0},
    ),
    "tiny weights are normalised to all digits": ByHand(  # 2 / (1 + 1/e) and 2/e / (1 + 1/e)
        [[-16.0], [-17.0]],
        weight("sum", upper=2.0, normalize=True),
        numbers={"weight_std": math.tanh(0.5), "chi2_token": math.tanh(0.5) ** 2, "weight_mean": 1.0},
    ),
    "a mean weight of at most 1e-8 divides nothing": ByHand(
        [[-19.0]], weight("sum", upper=2.0, normalize=True), numbers={"weight_mean": E(-19)}
    ),
    "equal weights do not vary": ByHand(
        [[1.0] * 11], weight("token", upper=4.0), numbers={"weight_std": 0.0}
    ),
    "normalising weights that are all zero divides by nothing": ByHand(
        [[3.0, -3.0]],
        weight("token", "mask", lower=0.5, upper=2.0, normalize=True),
        sums(0.0),
        {"weight_mean": 0.0, "weight_max": 0.0, "ess_tokens": None},
    ),
    # Trainers that compute in float32 drop a weight that it cannot hold, or limit it.
    **{f"{action} of weights beyond float32, {how}": ByHand(
        [[88.0, 89.0, 0.1]],
        weight("token", action, safety=None, overflow=how, **bounds),
        sums(sum(ends[: 1 if how == "zero" else 2]) + E(0.1)) | kept(3))
       for action, bounds, ends in (
           ("truncate", {"lower": 0.5, "upper": 2.0}, (2.0, 2.0)),
           ("mask", {"lower": 0.5, "upper": 2.0}, (0.0, 0.0)),
           ("none", {}, (E(88), E(89))))
       for how in ("zero", "limit")},
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_a_preset_does_by_hand_what_it_does(tmp_path, name):
    case = BY_HAND[name]
    found = numbers([logs(deltas) for deltas in case.rows], case.preset, tmp_path)
    table = pq.read_table(tmp_path / "sequences.parquet").to_pydict()
    assert {column: table[f"{case.preset.name}.{column}"] for column in case.table} == case.table
    for metric, want in case.numbers.items():
        assert found[metric] == (want and pytest.approx(want, rel=1e-12, abs=0)), metric


def test_a_probability_difference_from_a_sentinel_is_the_other_probability(tmp_path):
    """e^-1: log π_rollout + Δ is 0 there, not log π_train."""
    rows = [{"rollout_log_probs": [-1e30], "old_log_probs": [-1.0]}]
    assert numbers(rows, rule("prob_diff", upper=0.5), tmp_path)["tokens_rejected"] == 0


def with_losses(*rows: list[tuple[float, ...]]) -> list[dict[str, Any]]:
    """Return the rows of sequences of (log π_rollout, log π_old, log π_θ, A) tokens."""
    names = ("rollout_log_probs", "old_log_probs", "current_log_probs", "advantages")
    return [{name: [token[i] for token in row] for i, name in enumerate(names)} for row in rows]


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo"])
def test_a_ratio_on_a_bound_of_the_clip_is_not_clipped(tmp_path, loss):
    """e^u of 2 and of 1/2, as it is in float64, without the clip and with one that ends there."""
    on = math.log(2)
    tokens = (-2 * on, -2 * on, -on, 1.0), (-on, -on, -2 * on, -1.0), (-1.0, -1.0, -1.0, 1.0)
    clips = Clip(None, None, None), Clip(0.5, 1.0, None), Clip(0.5 - 1e-15, 1 - 1e-15, None)
    made = [Preset("clip", "", loss=loss, clip=clip) for clip in clips]
    free, bounded, inside = (numbers(with_losses(*([x] for x in tokens)), one, tmp_path) for one in made)
    assert (bounded["pg_clipfrac"], bounded["pg_loss"]) == (0, free["pg_loss"])
    assert inside["pg_clipfrac"] == pytest.approx(2 / 3)


def test_rejecting_everything_leaves_no_loss(tmp_path):
    rows = with_losses([(-1.0, -2.0, -2.0, 1.0)], [(-1.0, -3.0, -3.0, -1.0)])
    some = (
        rule("ratio", lower=0.6),
        rule("ratio", "mean", lower=0.6),
        Preset("veto", "", veto=Veto(lower=0.9)),
    )
    for preset in some:
        got = numbers(rows, replace(preset, loss="ppo_clip", weight=Weight(upper=1.4)), tmp_path)
        assert (got["pg_loss"], got["pg_loss_own"], got["pg_loss_kept"]) == (None, None, 0)


@pytest.mark.parametrize("loss", get_args(Loss))
def test_log_ratios_beyond_the_safety_bound_stay_finite(tmp_path, loss):
    far = [(-200.0, -200.0, -0.1, -1.0), (-0.1, -0.1, -200.0, 1.0)], [(-200.0, -200.0, -0.1, 1.0)]
    for clip in (Clip(), Clip(None, None, None)):
        got = numbers(with_losses(*far), Preset("far", "", loss=loss, clip=clip), tmp_path)
        assert math.isfinite(got["pg_loss"])


def test_a_drift_of_a_billionth_is_measured_to_nine_digits(tmp_path):
    rows = [{"rollout_log_probs": [0.0] * 5, "old_log_probs": [-1e-9] * 5} for _ in range(3)]
    found = analyze([oracles.write(rows, tmp_path / "dump.parquet")]).whole

    assert found["k1"].value == pytest.approx(1e-9, rel=1e-9, abs=0)
    assert found["chi2_token"].value == pytest.approx(math.expm1(-2e-9), rel=1e-9, abs=0)
    assert found["chi2_sequence"].value == pytest.approx(math.expm1(-1e-8), rel=1e-9, abs=0)
    assert found["tv"].value == pytest.approx(-math.expm1(-1e-9) / 2, rel=1e-9, abs=0)
    assert found["prob_diff_mean"].value == pytest.approx(-math.expm1(-1e-9), rel=1e-9, abs=0)


def test_one_token_is_the_worst_hundredth_of_ten_and_masked_rows_have_no_length(tmp_path):
    q, p = [-1.0] * 10, [-1.0] * 9 + [-2.0]
    one = {"rollout_log_probs": q, "old_log_probs": p, "current_log_probs": p, "response_mask": [1] * 10}
    found = analyze([oracles.write([one, one | {"response_mask": [0] * 10}], tmp_path / "a.parquet")])
    facts = found.dump

    assert found.whole["k3_top1_share"].value == pytest.approx(1.0)
    assert (facts.rows, facts.sequences) == (2, 1)
    assert (facts.tokens, facts.masked_tokens) == (10, 10)
    assert "not a KL" in found.whole["drift2.k3"].formula
    assert "KL(π_rollout‖π_train)" in found.whole["k3"].formula


def test_chi2_of_sequences_that_overflows_is_told_by_its_log10(tmp_path):
    made = [logs([300.0, 250.0]), logs([1.0])]
    summary = analyze([oracles.write(made, tmp_path / "dump.parquet")])
    number = summary.whole["chi2_sequence"]

    assert number.value is None
    assert number.log10 == pytest.approx((2 * 550 - math.log(2)) / math.log(10), rel=1e-12)


def test_the_mean_reward_is_that_of_the_sequences_with_a_token(tmp_path):
    rows = oracles.make_rows(0.1, many=60)
    rewards = np.random.default_rng(1).normal(size=len(rows)).tolist()
    given = [row | {"rewards": reward} for row, reward in zip(rows, rewards, strict=True)]
    found = analyze([oracles.write(given, tmp_path / "d.parquet")], presets=()).whole["mean_reward"]
    there = [x for one, x in zip(oracles.sequences(rows), rewards, strict=True) if one.n]

    assert found.value == pytest.approx(math.fsum(there) / len(there), rel=1e-12)
    assert found.interval[0] < found.value < found.interval[1]
    assert found.interval == pytest.approx((2 * found.value - found.interval[1], found.interval[1]))
    bare = analyze([oracles.write(rows, tmp_path / "e.parquet")], presets=()).whole["mean_reward"]
    assert bare.unknown == "missing column rewards"
    few = [row | {"rewards": float(i in (3, 4))} for i, row in enumerate(rows)]
    low, high = (
        analyze([oracles.write(few, tmp_path / "f.parquet")], presets=()).whole["mean_reward"].interval
    )
    assert 0 <= low < high <= 1  # within the rewards seen

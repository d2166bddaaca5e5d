"""Trainers' logs as they are added up: of blocks, shared by presets, read back."""

from dataclasses import replace

import numpy as np
import pytest

from offpol_diag.engine.context import BatchContext
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight
from offpol_diag.trainers import LOGS, logs
from offpol_diag.trainers.logs import Collected, Merged
from offpol_diag.trainers.tokens import Tokens
from tests import oracles
from tests.trainers.ours import BUILT_IN
from tests.whole import effect, opened

BY_LOG = {log: [preset for preset in BUILT_IN.values() if preset.logs == log] for log in LOGS}
BY_LOG["verl-2026-03"] = [replace(one, logs="verl-2026-03") for one in BY_LOG["verl-2026-01"]]


# ---------------------------------------------------------------- sums


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    rows = oracles.make_rows(0.03, seed=5, many=24, outliers=0.05)
    return opened(rows, tmp_path_factory.mktemp("sums"))


def tightened(of):
    """Tighten a rule or a weight: bounds nearer to 1, or to 0 where they are no ratios; a cut stays."""
    if of.over == "batch":
        return of
    ratio = getattr(of, "statistic", "ratio") in ("ratio", "mult_prob_error")
    upper, lower = (None if x is None else (x**0.02 if ratio else x * 0.02) for x in (of.upper, of.lower))
    return replace(of, upper=upper, lower=lower)


def variants(preset):
    """Yield the preset, and others that differ from it in one thing."""
    yield preset
    if preset.weight:
        yield replace(preset, weight=tightened(preset.weight))
        yield replace(preset, weight=replace(preset.weight, normalize=not preset.weight.normalize))
    if preset.reject:
        yield replace(preset, reject=tuple(map(tightened, preset.reject)))
    if preset.veto:
        yield replace(preset, veto=Veto(lower=0.97, upper=1.1))
    yield replace(preset, clip=Clip(0.01, 0.02, None))


def varied(log):
    """Return the presets of a log and their variants, each under a name of its own."""
    every = [one for preset in BY_LOG[log] for one in variants(preset)]
    return [replace(one, name=f"{at}") for at, one in enumerate(every)]


def made(dump, presets):
    """Return sums, and extremes, by preset and place."""
    _, found, batch = dump
    context = BatchContext.of(batch, 0, 4, found.fits)
    sums, ends = logs.sums(context, presets)
    context.forget()
    return {name: float(x) for name, x in sums.read("logged").items()}, ends


def assert_alike(got, want):
    for found, wanted in zip(got, want, strict=True):
        assert found.keys() == wanted.keys()
        for name, x in wanted.items():
            assert found[name] == pytest.approx(x, rel=1e-11, abs=1e-11, nan_ok=True), name


@pytest.mark.parametrize("log", LOGS)
def test_blocks_have_together_what_all_tokens_have(dump, log, monkeypatch):
    """Also of presets that differ from those that ship."""
    presets = varied(log)
    want = made(dump, presets)
    monkeypatch.setattr(logs, "BLOCK", 40)
    assert_alike(made(dump, presets), want)


@pytest.mark.parametrize("log", LOGS)
def test_presets_share_what_each_alone_has(dump, log):
    """What a part reads of a preset is what presets are told apart by that share it."""
    presets = varied(log)
    alone = [made(dump, [preset]) for preset in presets]
    want = tuple({name: x for each in alone for name, x in each[at].items()} for at in (0, 1))
    assert_alike(made(dump, presets), want)


@pytest.mark.parametrize("log", LOGS)
def test_a_log_reads_back_what_it_has_collected(dump, log):
    """Sum for sum: no branch depends on data."""
    _, found, batch = dump
    for preset in varied(log):
        context = BatchContext.of(batch, 0, 2, found.fits)
        had = logs.collected(Tokens(context, preset))
        totals = Merged(lambda at: np.float64(at), lambda at: (np.float64(-at), np.float64(at)))
        logs.read(Tokens(BatchContext.of(batch.rows(0, 0), 0, 2, found.fits), preset), totals)
        assert (totals.at, totals.end) == (len(had.sums), len(had.ends)), preset


def logged(dump, preset):
    """Return what is logged of the whole dump."""
    return logs.of_context(BatchContext.of(dump[2], 0, 4, dump[1].fits), preset)


def test_tokens_that_m2po_drops_are_no_valid_ones_of_which_a_weight_is_changed(dump):
    """Whatever else drops them too."""
    m2po = next(rules for one in BY_LOG["areal"] if (rules := [r for r in one.reject if r.over == "batch"]))
    tight, weight = Reject("ratio", upper=1.0001, lower=0.9999), Weight("token", upper=1.2)
    with_it, without = (
        Preset("x", "", "old", weight=weight, reject=(*rules, tight), logs="areal") for rules in (m2po, ())
    )
    context = BatchContext.of(dump[2], 0, 4, dump[1].fits)
    n = context.counts["tokens"].sum()
    valid = n - Tokens(context, with_it).dropped_by(*m2po).sum()
    name = "ppo_actor/update/rs_filtered_fraction"

    lost = n * logged(dump, without)[name] - valid * logged(dump, with_it)[name]
    assert 0 < n - valid == pytest.approx(lost)


@pytest.mark.parametrize(
    "rule",
    [
        Reject("ratio", "segment", upper=1.01),
        Reject("ratio", "segment", lower=0.97, advantage="negative"),
        Reject("ratio", "segment", lower=0.94, upper=1.01, safety=0.05),
        Reject("ratio", upper=1.05),
        Reject("ratio", "mean", upper=1.01),
    ],
    ids=str,
)
def test_the_drops_of_a_rule_are_counted_whatever_else_drops(dump, rule):
    preset = Preset("p", "", "current", reject=(rule,))
    context = BatchContext.of(dump[2], 0, 4)
    dropped = [
        Tokens(context, replace(preset, veto=veto)).dropped_by(rule) for veto in (None, Veto(lower=0.95))
    ]
    assert np.array_equal(dropped[0], context.counts["tokens"] - effect(context, preset).n_kept)
    assert np.array_equal(dropped[1], dropped[0])


# ---------------------------------------------------------------- adding up


def test_only_numbers_of_sequences_are_added_up(dump):
    """Of a number of each token nothing can be added up over batches."""
    t, s = Tokens(BatchContext.of(dump[2], 0, 4), BUILT_IN["token_is"]), Collected(dump[2].sequences)
    for add in (s.sum, s.max, s.min):
        with pytest.raises(ValueError, match="of each sequence"):
            add(t.log_ratio)
    s.sum(t.row_sum(t.log_ratio))


def test_ends_are_infinite_where_nothing_is():
    whole = np.zeros(2, np.int64)
    batch = replace(logs.nothing(frozenset(("old_log_probs",))).batch, cu_seqlens=np.zeros(3, np.int64))
    context = BatchContext.of(replace(batch, key=whole, masked=whole), 0, 4)
    ends = logs.sums(context, [BUILT_IN["trl_token_truncate"]])[1]
    assert [abs(end) for pair in ends.values() for end in pair] == [float("inf")] * 6


@pytest.mark.parametrize("log", LOGS)
def test_names_are_those_of_a_dump_with_every_column(dump, log):
    for preset in BY_LOG[log]:
        names = logs.names(preset)
        assert {*logged(dump, preset)} <= {*names}


def test_the_largest_of_flags_of_no_sequence_is_no_flag():
    """As a maximum of booleans −∞, which stands for none, would be true."""
    none, some = Collected(0), Collected(2)
    none.max(np.zeros(0, bool))
    some.max(np.array([False, False]))

    assert [one.ends[0].max(initial=-np.inf) for one in (none, some)] == [-np.inf, 0.0]

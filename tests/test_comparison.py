"""Presets side by side: paired differences from their definition, and what each drops that one keeps."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from scipy.stats import t as student

from offpol_diag import api
from offpol_diag.compare import of_preset, of_presets, reference
from offpol_diag.core.observe import examine
from offpol_diag.core.readout import Readout
from offpol_diag.core.state import draws, groups_of
from offpol_diag.dump.read import open_dump
from offpol_diag.errors import UsageError
from offpol_diag.presets import Preset, Reject, Veto, Weight
from offpol_diag.presets.catalogue import load
from offpol_diag.report import answered
from offpol_diag.result import Comparison, loads
from tests import oracles
from tests.drawn import html, markdown
from tests.factory import make_summary
from tests.reading import opened
from tests.test_terminal import SAMPLES

ROWS = oracles.make_rows(0.3, seed=3, many=60, outliers=0.01)
SOME = (
    Preset("all", ""),
    Preset("band", "", reject=(Reject("ratio", "token", 0.7, 1.4),)),
    Preset("whole", "", weight=Weight("sum", upper=2.0), reject=(Reject("ratio", "sum", 0.5, 2.0),)),
    Preset("cautious", "", reject=(Reject("ratio", "mean", 0.9, 1.1),), veto=Veto(lower=0.4)),
    Preset("pop", "", weight=Weight("token", "mask", lower=0.8, upper=1.25)),
    Preset("signed", "", reject=(Reject("k3", "token", upper=0.02, advantage="negative"),)),
)
METRICS = ("ess_tokens", "ess_sequences", "tokens_rejected", "weight_std", "k3", "pg_loss")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return oracles.write(ROWS, tmp_path_factory.mktemp("compare") / "dump.parquet")


def compare(path, presets, against, **options):
    """Examine a dump, opened with options, and compare its presets with the one named `against`."""
    found = examine(opened(path, **options), presets=presets, device="cpu", against=against)
    return found, of_presets(found, found.summary(), against)


@pytest.fixture(scope="module")
def both(path):
    return compare(path, SOME, "all")


def test_a_difference_is_taken_within_each_replicate_and_its_interval_is_that_of_t(both, path):
    """Replicates are those of the rows that each draws; the standard error has the effective groups."""
    found, compared = both
    (batch,) = open_dump([path]).batches()
    times = draws(groups_of(batch.key, batch.steps), found.study.seed).astype(int).tolist()
    out, data = Readout(found.study, found.state), oracles.sequences(ROWS)
    one, other, whole = (of_preset(out, found.summary(), found.study.presets[at]).drawn for at in (1, 0, 2))
    for replicate in (0, 7, 511):
        drawn = [s for s, many in zip(data, times, strict=True) for _ in range(many[replicate])]
        a, b = (oracles.preset_metrics(drawn, SOME[at])[0] for at in (2, 1))
        for name in METRICS:
            difference = float(whole[name][1 + replicate] - one[name][1 + replicate])
            assert difference == pytest.approx(a[name] - b[name], rel=1e-9, abs=1e-10), name

    sizes = Counter[object]()
    for s in data:
        sizes[s.group, s.step] += s.n
    g = sum(sizes.values()) ** 2 / sum(n * n for n in sizes.values())
    for name in METRICS:
        value, *drawn = (whole[name] - other[name]).tolist()
        error = math.sqrt(float(np.var(drawn, ddof=1)) * g / (g - 1))
        half = float(student.ppf(0.975, 1 / (1 / (g - 1) + 1 / (len(drawn) - 1)))) * error
        number = compared.differences["whole"][name]
        assert number.value == value
        assert number.interval == pytest.approx((value - half, value + half), rel=1e-3, abs=1e-12)


def test_presets_that_do_the_same_differ_by_exactly_nothing(path):
    same = Preset("same", "", reject=(Reject("ratio", "token", 0.7, 1.4),))
    _, compared = compare(path, (SOME[1], same), "band")
    known = [number for number in compared.differences["same"].values() if number.unknown is None]
    assert len(known) > 20
    assert {number.value for number in known} == {0.0}
    assert {number.interval for number in known} == {(0.0, 0.0), None}
    assert all(one.tokens.count == one.sequences.count == 0 for one in compared.drops)


def test_what_presets_share_cancels_so_the_interval_is_narrower(path):
    """Two caps that hardly differ: the numbers move with the dump, the difference hardly."""
    caps = tuple(Preset(f"cap{c}", "", weight=Weight("token", upper=c)) for c in (2.0, 2.2))
    found, compared = compare(path, caps, "cap2.0")
    low, high = compared.differences["cap2.2"]["weight_mean"].interval
    alone = [found.summary().preset(cap.name)["weight_mean"].interval for cap in caps]
    assert 0 < high - low < 0.2 * min(one[1] - one[0] for one in alone)
    assert low > 0  # the two overlap, and yet there is no doubt
    assert max(one[0] for one in alone) < min(one[1] for one in alone)


def test_the_reference_is_the_first_that_can_be_computed():
    known, columns = load(), {"rollout_log_probs": "r", "old_log_probs": "o"}
    assert reference(columns, known.resolve("pure_is,token_is,seq_mis")) == "token_is"
    with pytest.raises(UsageError, match="no current_log_probs, which pure_is cannot do without"):
        reference(columns, known.resolve("pure_is"))


# ---------------------------------------------------------------- what each drops


def left(s, preset):
    """Return which tokens keep a gradient: kept, and of a weight that is not 0."""
    done = oracles.apply(s, preset, {})
    return [kept and weight != 0 for kept, weight in zip(done.kept, done.weights, strict=True)]


def brute(ours, theirs, rows):
    """Compute what is dropped by its definition, of tokens and of sequences; rewards are the row's number."""
    tokens, whole = [], []
    for at, s in enumerate(oracles.sequences(rows)):
        mine, other = left(s, ours), left(s, theirs)
        tokens += [(s.n, at) for kept, theirs_ in zip(mine, other, strict=True) if theirs_ and not kept]
        if any(other) and not any(mine):
            whole.append((s.n, at))
    for some in (tokens, whole):
        yield len(some), dict(zip(("length", "reward"), np.mean(some, axis=0), strict=True)) if some else {}


@pytest.mark.parametrize(("first", "batch_tokens"), [(SOME[0], 1 << 18), (SOME[1], 200)])
def test_what_presets_drop_is_what_counting_by_hand_says(tmp_path, first, batch_tokens):
    rows = [row | {"rewards": float(at)} for at, row in enumerate(ROWS)]
    others = [one for one in SOME if one is not first]
    path = oracles.write(rows, tmp_path / "dump.parquet")
    _, compared = compare(path, (first, *others), first.name, batch_tokens=batch_tokens)

    ways = [way for one in others for way in ((one, first), (first, one))]
    for one, (by, kept) in zip(compared.drops, ways, strict=True):
        assert (one.dropped_by, one.kept_by) == (by.name, kept.name)
        for some, (count, wanted) in zip((one.tokens, one.sequences), brute(by, kept, ROWS), strict=True):
            assert some.count == count, (by.name, kept.name)
            for name, value in wanted.items():
                assert some.numbers[name].value == pytest.approx(value, rel=1e-9), name


def test_examples_are_the_five_of_the_largest_mismatch_and_shares_have_intervals_of_groups(both):
    found, compared = both
    data = {s.ident: s for s in oracles.sequences(ROWS)}
    for one, preset in zip(compared.drops[::2], SOME[1:], strict=True):
        lost = {s.ident: sum(not kept for kept in left(s, preset)) for s in data.values()}
        total = {name: abs(math.fsum(data[name].delta("old"))) for name, many in lost.items() if many}
        worst = sorted(total, key=lambda name: -total[name])[:5]
        rows = [(row.sequence_id, row.tokens, row.length) for row in one.examples]
        assert rows == [(name, lost[name], data[name].n) for name in worst]
    rejected = found.summary().preset("band")["tokens_rejected"]
    share = compared.drops[0].tokens.numbers["share"]
    assert [share.value, *share.interval] == pytest.approx([rejected.value, *rejected.interval], rel=1e-9)
    assert compared.all_tokens.count == sum(s.n for s in data.values())


def test_nothing_is_looked_at_that_was_not_asked_for(path, both):
    many = tuple(Preset(f"p{i}", "", weight=Weight("token", upper=2.0 + i)) for i in range(9))
    crowd, compared = compare(path, many, "p0")
    assert not [name for name in (*crowd.state.tables, *crowd.state.records) if "drops" in name]
    assert (len(compared.differences), compared.drops) == (8, [])
    plain = examine(opened(path), presets=SOME, device="cpu").summary()  # and comparing changes no number
    assert (plain.presets, plain.whole) == (both[0].summary().presets, both[0].summary().whole)


# ---------------------------------------------------------------- what is shown


def tables(summary):
    return {one.id: one for one in answered(summary).tables}


def test_one_table_has_each_preset_and_its_difference_and_every_report_what_each_drops(both):
    summary = both[0].summary().model_copy(update={"comparison": both[1]})
    assert loads(summary.to_json(), "x") == summary
    first, *rows = tables(summary)["presets"].rows
    assert first[:2] == ("all", summary.preset("all")["ess_tokens"])
    for one, gap in zip(rows[::2], rows[1::2], strict=True):
        assert one[1] == summary.preset(one[0])["ess_tokens"]
        assert gap[:2] == ("− all", both[1].differences[one[0]]["ess_tokens"])
    for report in (html(summary), markdown(summary)):
        assert "What one drops and the other keeps" in report
    assert "Sequences that lose tokens to one preset only" in html(summary)


def test_of_two_presets_what_each_drops_has_counts_and_five_examples_in_at_most_60_lines():
    found = api.compare(SAMPLES / "stale.parquet", presets="token_is,seq_mis@2..3", progress=False)
    (drops,) = (one for one in found.comparison.drops if one.tokens.count)
    assert (drops.dropped_by, drops.kept_by, len(drops.examples)) == ("seq_mis@2..3", "token_is", 5)
    assert len(tables(found)["dropped"].rows) == 5
    (row, every) = tables(found)["drops"].rows
    assert row[:3] == ["seq_mis@2..3", "token_is", drops.tokens.count]
    assert every[2] == found.dump.tokens
    assert markdown(found).count("\n") <= 60
    assert answered(found).sentence.startswith("ESS of tokens: token_is 99.2% [98.9%, 99.4%], seq_mis@2..3 ")


def test_what_cannot_be_computed_is_named():
    compared = make_summary(gates=[], comparison=Comparison(against="disabled", differences={}))
    assert "ppo_is_bypass needs current_log_probs" in answered(compared).cautions[-1]

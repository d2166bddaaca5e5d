"""Presets side by side: paired differences from their definition, who is better, what each drops."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from drawn import html, markdown
from scipy.stats import t as student

from offpol_diag import api
from offpol_diag.compare import leader, of_preset, of_presets, reference
from offpol_diag.core.intervals import Groups
from offpol_diag.core.observe import examine
from offpol_diag.core.readout import Readout
from offpol_diag.core.state import draws as draws_of
from offpol_diag.core.state import groups_of
from offpol_diag.dump.read import open_dump
from offpol_diag.errors import UsageError
from offpol_diag.number import Number
from offpol_diag.presets import Preset, Reject, Veto, Weight
from offpol_diag.presets.catalogue import load
from offpol_diag.report import answered
from offpol_diag.result import Comparison, idle, loads
from tests import oracles
from tests.factory import Row, make_summary
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
MANY = Groups(64, 64.0)
METRICS = ("ess_tokens", "ess_sequences", "tokens_rejected", "weight_std", "k3", "pg_loss")


def written(folder, rows=ROWS, **more):
    return oracles.write(rows, folder / "dump.parquet", **more)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return written(tmp_path_factory.mktemp("compare"))


def compare(path, presets, against, **options):
    """Examine a dump, opened with options, and compare its presets with the one named `against`."""
    found = examine(opened(path, **options), presets=presets, device="cpu", against=against)
    return found, of_presets(found, found.summary(), against)


@pytest.fixture(scope="module")
def found_and_compared(path):
    return compare(path, SOME, "all")


@pytest.fixture(scope="module")
def found(found_and_compared):
    return found_and_compared[0]


@pytest.fixture(scope="module")
def compared(found_and_compared):
    return found_and_compared[1]


@pytest.fixture(scope="module")
def dropped(compared):
    """Return, by preset, the tokens that it drops and the reference keeps."""
    return {one.dropped_by: one for one in compared.drops[::2]}


def draws(found, path):
    """Return how often each row is drawn in each replicate of the bootstrap."""
    (batch,) = open_dump([path]).batches()
    return draws_of(groups_of(batch.key, batch.steps), found.study.seed).astype(int).tolist()


def half_width(drawn):
    """Compute Student's t times the standard error, with the effective number of groups."""
    sizes = Counter[object]()
    for one in oracles.sequences(ROWS):
        sizes[one.group, one.step] += one.n
    g = sum(sizes.values()) ** 2 / sum(n * n for n in sizes.values())
    mean = math.fsum(drawn) / len(drawn)
    variance = math.fsum((x - mean) ** 2 for x in drawn) / (len(drawn) - 1)
    freedom = 1 / (1 / (g - 1) + 1 / (len(drawn) - 1))
    return float(student.ppf(0.975, freedom)) * math.sqrt(variance * g / (g - 1))


def test_a_difference_in_a_replicate_is_that_of_the_rows_it_draws(found, path):
    times, data = draws(found, path), oracles.sequences(ROWS)
    out = Readout(found.study, found.state)
    mine, theirs = (of_preset(out, found.study.presets[at]) for at in (2, 1))
    for replicate in (0, 7, 511):
        drawn = [s for s, many in zip(data, times, strict=True) for _ in range(many[replicate])]
        one, other = (oracles.preset_metrics(drawn, SOME[at])[0] for at in (2, 1))
        for name in METRICS:
            difference = float(mine[name][1 + replicate] - theirs[name][1 + replicate])
            assert difference == pytest.approx(one[name] - other[name], rel=1e-9, abs=1e-10), name


def test_the_interval_of_a_difference_is_that_of_a_t_statistic_of_its_replicates(found, compared):
    out = Readout(found.study, found.state)
    mine, theirs = (of_preset(out, found.study.presets[at]) for at in (2, 0))
    for name in METRICS:
        number = compared.differences["whole"][name]
        values = (mine[name] - theirs[name]).tolist()
        half = half_width(values[1:])
        assert number.value == values[0]
        assert number.interval == pytest.approx((values[0] - half, values[0] + half), rel=1e-3, abs=1e-12)
    one, other = (found.summary().preset(name) for name in ("whole", "all"))
    for name, number in compared.differences["whole"].items():
        unknown = None in (one[name].value, other[name].value)
        assert (number.value is None) is bool(number.unknown) is unknown
        assert number.interval or not (one[name].interval and other[name].interval), name


def test_presets_that_do_the_same_differ_by_exactly_nothing(path):
    same = Preset("same", "", reject=(Reject("ratio", "token", 0.7, 1.4),))
    _, compared = compare(path, (SOME[1], same), "band")

    known = [number for number in compared.differences["same"].values() if number.unknown is None]
    assert len(known) > 20
    assert {number.value for number in known} == {0.0}
    assert {number.interval for number in known} == {(0.0, 0.0), None}
    assert {compared.better[name] for name in ("ess_tokens", "tokens_rejected")} == {"–"}
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
    assert compared.better["weight_std"] == "cap2.0"


def replicates(*values, spread=0.0, common=0.0):
    """Draw a value and 256 replicates of it: noise that all share, and noise of their own."""
    shared = np.linspace(-1, 1, 256)
    own = np.sin(np.arange(256) * (1 + values[0]))
    return np.concatenate((values, values[0] + common * shared + spread * own))


@pytest.mark.parametrize(
    ("one", "other", "direction", "said"),
    [
        (replicates(0.9, spread=0.01), replicates(0.5, spread=0.01), "higher", "one"),
        (replicates(0.9, spread=0.01), replicates(0.5, spread=0.01), "lower", "other"),
        (replicates(0.9, spread=0.5), replicates(0.5, spread=0.5), "higher", "–"),
        (replicates(0.52, common=0.4), replicates(0.5, common=0.4), "higher", "one"),
        (replicates(0.5, spread=0.1), replicates(0.5, spread=0.3), "higher", "–"),
        (replicates(0.9), replicates(0.5), "neither", "–"),
    ],
)
def test_a_preset_is_better_only_where_the_difference_leaves_no_doubt(one, other, direction, said):
    drawn = {"one": one, "other": other}
    numbers = {name: Number(value=float(values[0])) for name, values in drawn.items()}
    assert leader(numbers, drawn, direction, MANY) == said


def test_a_preset_is_better_by_the_values_only_where_there_are_no_replicates():
    drawn = {"one": replicates(0.9), "other": replicates(0.5)}
    numbers = {"one": Number(value=0.9), "other": Number(value=0.5)}
    assert leader(numbers, drawn, "higher", MANY) == "one"
    assert leader(numbers, drawn, "higher", Groups(4, 4.0)) == "–"  # too few groups
    assert leader(numbers, {}, "higher", MANY) == "one"
    assert leader(numbers | {"c": Number(unknown="none")}, {}, "higher", MANY) == "–"
    assert leader({"one": Number(value=1.0)}, {}, "higher", MANY) == "–"


def test_the_reference_is_the_first_that_can_be_computed_unless_one_is_named():
    known, columns = load(), {"rollout_log_probs": "r", "old_log_probs": "o"}
    three = known.resolve("pure_is,token_is,seq_mis")
    assert reference(columns, three, None) == "token_is"
    assert reference(columns, three, known["seq_mis"]) == "seq_mis"
    for presets, against in ((three, known["pure_is"]), (three[:1], None)):
        with pytest.raises(UsageError, match="no current_log_probs, which pure_is cannot do without"):
            reference(columns, presets, against)


def left(s, preset):
    """Return which tokens keep a gradient: kept, and of a weight that is not 0."""
    done = oracles.apply(s, preset, {})
    return [kept and weight != 0 for kept, weight in zip(done.kept, done.weights, strict=True)]


def brute(ours, theirs, rows):
    """Compute the table by its definition, rewards being the row's number."""
    data = oracles.sequences(rows)
    tokens: list[tuple[int, int, float, float]] = []
    whole: list[tuple[int, int, float, float]] = []
    for at, s in enumerate(data):
        mine, other = left(s, ours), left(s, theirs)
        lost = [b and not a for a, b in zip(mine, other, strict=True)]
        delta = s.delta("old")
        tokens += [(s.n, at, a, d) for a, d, gone in zip(s.advantages, delta, lost, strict=True) if gone]
        if any(other) and not any(mine):
            whole.append((s.n, at, math.fsum(s.advantages) / s.n, math.fsum(delta)))
    return kinds(tokens), kinds(whole)


def kinds(some):
    n = len(some)
    if not n:
        return {"count": 0}
    return {
        "count": n,
        "length": math.fsum(one[0] for one in some) / n,
        "reward": math.fsum(one[1] for one in some) / n,
        "positive": sum(one[2] > 0 for one in some) / n,
        "negative": sum(one[2] < 0 for one in some) / n,
        "log_ratio": math.fsum(one[3] for one in some) / n,
    }


@pytest.mark.parametrize(("first", "batch_tokens"), [(SOME[0], 1 << 18), (SOME[1], 200)])
def test_what_presets_drop_is_what_counting_by_hand_says(tmp_path, first, batch_tokens):
    path = written(tmp_path, [row | {"rewards": float(at)} for at, row in enumerate(ROWS)])
    others = [one for one in SOME if one is not first]
    _, compared = compare(path, (first, *others), first.name, batch_tokens=batch_tokens)

    ways = [way for one in others for way in ((one, first), (first, one))]
    for one, (by, kept) in zip(compared.drops, ways, strict=True):
        assert (one.dropped_by, one.kept_by) == (by.name, kept.name)
        for some, wanted in zip((one.tokens, one.sequences), brute(by, kept, ROWS), strict=True):
            assert some.count == wanted.pop("count"), (by.name, kept.name)
            for name, value in wanted.items():
                assert some.numbers[name].value == pytest.approx(value, rel=1e-9), name


def test_examples_are_those_of_the_largest_mismatch(compared):
    counts = {(one.dropped_by, one.kept_by): one.tokens.count for one in compared.drops}
    assert all(counts[one, "all"] > 10 for one in ("band", "pop", "signed"))
    assert counts["all", "band"] == 0
    data = {s.ident: s for s in oracles.sequences(ROWS)}
    for one, preset in zip(compared.drops[::2], SOME[1:], strict=True):
        lost = {s.ident: sum(not kept for kept in left(s, preset)) for s in data.values()}
        total = {name: abs(math.fsum(data[name].delta("old"))) for name, many in lost.items() if many}
        worst = sorted(total, key=lambda name: -total[name])[:5]
        assert [row.sequence_id for row in one.examples] == worst
        assert [row.tokens for row in one.examples] == [lost[name] for name in worst]
        assert [row.length for row in one.examples] == [data[name].n for name in worst]


def test_the_share_of_what_is_dropped_has_an_interval_of_groups(found, compared, dropped):
    rejected = found.summary().preset("band")["tokens_rejected"]
    share = dropped["band"].tokens.numbers["share"]
    assert share.value == pytest.approx(rejected.value, rel=1e-12)
    assert share.interval == pytest.approx(rejected.interval, rel=1e-9)
    assert compared.all_tokens is not None
    assert compared.all_tokens.numbers["share"].value == 1.0
    assert compared.all_tokens.count == sum(s.n for s in oracles.sequences(ROWS))


def test_nothing_is_looked_at_that_was_not_asked_for(path, found):
    many = tuple(Preset(f"p{i}", "", weight=Weight("token", upper=2.0 + i)) for i in range(9))
    without, crowd = (
        examine(opened(path), presets=presets, device="cpu", against=against)
        for presets, against in ((SOME, None), (many, "p0"))
    )

    assert not [
        name
        for one in (without, crowd)
        for name in (*one.state.tables, *one.state.records)
        if "drops" in name
    ]
    compared = of_presets(crowd, crowd.summary(), "p0")
    assert (len(compared.differences), compared.drops) == (8, [])
    plain, asked = without.summary(), found.summary()  # and comparing changes no number
    assert (plain.presets, plain.whole) == (asked.presets, asked.whole)


@pytest.fixture(scope="module")
def summary(found, compared):
    return found.summary().model_copy(update={"comparison": compared})


def tables(summary):
    return {one.id: one for one in answered(summary).tables}


def test_one_table_has_each_preset_and_its_difference_and_every_report_what_each_drops(summary):
    assert loads(summary.to_json(), "x") == summary
    summary = summary.model_copy(update={"diagnosis": None})  # beside a bug nothing is called better
    found, compared = tables(summary), summary.comparison
    rows = found["presets"].rows
    assert rows[0][:2] == ("all", summary.preset("all")["ess_tokens"])
    assert {row[0] for row in rows[2::2]} == {"− all"}
    for one, gap in zip(rows[1::2], rows[2::2], strict=True):
        assert one[1] == summary.preset(one[0])["ess_tokens"]
        assert gap[1] == compared.differences[one[0]]["ess_tokens"]
    line = next(row for row in found["comparison"].rows if row[0] == "ess_tokens")
    assert line[-1] == compared.better["ess_tokens"]
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


def test_many_presets_stand_in_rows_and_what_cannot_be_computed_is_named():
    some = make_summary(gates=[])
    able = {name: Row(one, some.preset(name)) for name, one in some.presets.items() if not one.needs}
    many = {f"{name}_{i}": one for i in range(4) for name, one in able.items()}
    compared = Comparison(against=next(iter(many)), differences={}, better={})
    found = tables(make_summary(presets=many, comparison=compared))
    assert {row[0] for row in found["presets"].rows} == {*many} <= {*found["comparison"].header}
    compared = Comparison(against="disabled", differences={}, better={})
    (*_, said) = answered(some.model_copy(update={"comparison": compared})).cautions
    assert "ppo_is_bypass needs current_log_probs" in said


def test_presets_of_every_kind_can_be_compared(tmp_path):
    first, *others = load().resolve("all")[::2]
    path = written(tmp_path, ROWS[:12])
    for at in range(0, len(others), 7):
        found, compared = compare(path, (first, *others[at : at + 7]), first.name)
        names = [one.name for one in found.study.presets[1:]]
        assert [one.dropped_by for one in compared.drops[::2]] == names


# ---------------------------------------------------------------- presets that change nothing

WEIGHT_OF_1 = ("recompute", "ppo_is")


@pytest.mark.parametrize(
    ("presets", "headline", "more"),
    [
        (("recompute", "token_is"), "token_is keeps an ESS of tokens of", "recompute changes nothing here."),
        (WEIGHT_OF_1, "None of these presets changes anything", "recompute and ppo_is change nothing here."),
        ((*WEIGHT_OF_1, "token_is", "geo_rs"), "token_is keeps the largest ESS", "change nothing here."),
    ],
)
def test_a_preset_that_changes_nothing_leads_in_no_number(presets, headline, more):
    summary = api.compare(SAMPLES / "collapse.parquet", presets=presets, progress=False)
    found = answered(summary)

    assert not set(summary.comparison.better.values()) & set(WEIGHT_OF_1)
    assert found.sentence.startswith(headline)
    assert more in found.more
    assert all(idle(summary.preset(name)) for name in WEIGHT_OF_1 if name in presets)
    assert not idle(summary.preset(presets[-1])) or presets == WEIGHT_OF_1

"""One table, one set of laws: presets of every kind, and some that do not ship, obey them all.

What a preset does is read off the table of sequences (tokens kept, sum of weights, vetoed) and off the
numbers that no policy loss enters. How a dump is cut, packed, ordered and masked is in `test_laws.py`.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from offpol_diag.presets import UNSIGNED, Preset, Reject, Veto, Weight
from tests import oracles
from tests.kinds import of_each_kind
from tests.reading import analyze
from tests.trainers import BUILT_IN

SHIPPED = tuple(BUILT_IN.values())
MADE = (
    Preset("made_band", "", weight=Weight("mean", "mask", 1.1, 0.9)),
    Preset(
        "made_rules",
        "",
        weight=Weight("sum", upper=2.0),
        reject=(Reject(upper=1.3), Reject("k2", "mean", upper=0.02)),
        veto=Veto(0.4, 3.0),
    ),
    Preset("made_bypass", "", policy="current", reject=(Reject("ratio", "mean", 0.9, 1.2), Reject("tv"))),
    Preset("made_batch", "", policy="current", reject=(Reject("k3_reverse", "batch", upper=0.02),)),
    Preset(
        "made_turns", "", weight=Weight("segment", upper=1.1), reject=(Reject(over="segment", lower=0.9),)
    ),
    Preset("made_signed", "", reject=(Reject("k1", "min", upper=0.0, advantage="positive"),)),
    Preset("made_against", "", reject=(Reject("k3", "max", upper=0.1, advantage="against"),)),
)
EVERY = (*SHIPPED, *MADE)
TABLE = (*of_each_kind(SHIPPED), *MADE)
COLUMNS = ("old_log_probs", "current_log_probs", "advantages")
LOSSES = ("pg_", "ppo_kl", "loss_", "grad")
"""Beginnings of the numbers that the policy loss or the advantage's sign enters in any preset."""


@pytest.fixture(scope="module")
def rows():
    made = oracles.make_rows(0.3, seed=6, many=40)
    for row in made:  # an advantage of 0 is no sign, and some rules ask for one
        row["advantages"] = [a if a else 0.5 for a in row["advantages"]]
    return made


@pytest.fixture(scope="module")
def usual(rows, tmp_path_factory):
    """Return the effect of every preset of the table on the rows."""
    return tried(rows, TABLE, tmp_path_factory.mktemp("usual"))


def tried(rows, presets, folder):
    """Return by preset: per sequence tokens kept, sum of weights, vetoed; its numbers; its needs."""
    path = oracles.write(rows, folder / "dump.parquet")
    summary = analyze([path], presets=presets, sequences=folder / "sequences.parquet")
    table = pq.read_table(folder / "sequences.parquet").to_pydict()
    return {
        name: {
            "needs": result.needs,
            "numbers": {key: number.value for key, number in summary.preset(name).items()},
            **{key: table.get(f"{name}.{key}") for key in ("kept_tokens", "weight_sum", "vetoed")},
        }
        for name, result in summary.presets.items()
    }


IDENTITY = dict.fromkeys(("weight_mean", "weight_min", "weight_max", "ess_tokens", "ess_sequences"), 1)
IDENTITY |= dict.fromkeys(("weight_std", "ppo_kl", "truncated_high", "truncated_low", "tokens_rejected"), 0)
IDENTITY |= dict.fromkeys(("sequences_dropped", "sequences_touched", "catastrophic_tokens", "vetoed"), 0)


class Sum(float):
    """A sum that equals another one added up in another order."""

    __hash__ = None

    def __eq__(self, other):
        return isinstance(other, Sum) and math.isclose(self, other, rel_tol=1e-11, abs_tol=1e-14)

    def __ne__(self, other):
        return not self == other


def did(one):
    """Return the effect of a preset on each sequence."""
    weights = [None if weight is None else Sum(weight) for weight in one["weight_sum"]]
    return one["kept_tokens"], weights, one["vetoed"]


def test_every_preset_leaves_everything_alone_where_the_policies_agree(rows, tmp_path):
    same = copy.deepcopy(rows)
    for row in same:
        row["old_log_probs"] = row["current_log_probs"] = row["rollout_log_probs"]
    lengths = [s.n for s in oracles.sequences(same)]

    for name, found in tried(same, EVERY, tmp_path).items():
        assert found["kept_tokens"] == lengths, name
        assert not any(found["vetoed"]), name
        assert found["weight_sum"] in (lengths, [None] * len(lengths)), name
        assert {key: found["numbers"][key] for key in IDENTITY} == IDENTITY, name


def without(rows, column):
    return [{name: value for name, value in row.items() if name != column} for row in rows]


@pytest.mark.parametrize("column", COLUMNS)
def test_a_preset_reads_no_column_that_its_needs_do_not_name(rows, usual, tmp_path, column):
    found = tried(without(rows, column), TABLE, tmp_path)
    for preset in TABLE:
        named = column in preset.lacking(())
        assert found[preset.name]["needs"] == ([column] if named else []), preset.name
        if not named:
            assert did(found[preset.name]) == did(usual[preset.name]), preset.name


@pytest.fixture(scope="module")
def bases(rows, tmp_path_factory):
    """Make a dump that every rule passes, and one that few do: a changed value shows in one of the two."""
    same = [{**row, **dict.fromkeys(COLUMNS[:2], row["rollout_log_probs"])} for row in rows]
    wild = oracles.make_rows(1.5, seed=8, many=40)
    folder = tmp_path_factory.mktemp("bases")
    return [(made, tried(made, TABLE, folder)) for made in (same, wild)]


@pytest.mark.parametrize("column", COLUMNS)
def test_a_preset_reads_every_column_that_its_needs_name(bases, tmp_path, column):
    """Other values there change one of its numbers, those of the loss left aside."""
    changed = set()
    for made, before in bases:
        after = tried(other(made, column), TABLE, tmp_path)
        pairs = ((name, one, after[name]) for name, one in before.items())
        changed |= {
            name for name, one, two in pairs if did(one) != did(two) or corrected(one) != corrected(two)
        }
    assert changed == {preset.name for preset in TABLE if column in preset.lacking(())}


def other(rows, column):
    """Change the values of one column of the rows."""
    made = copy.deepcopy(rows)
    for i, row in enumerate(made):
        row[column] = [-x if column == "advantages" else x - (t + i) % 5 for t, x in enumerate(row[column])]
    return made


def corrected(one):
    found = {key: value for key, value in one["numbers"].items() if not key.startswith(LOSSES)}
    return {key: Sum(value) if isinstance(value, float) else value for key, value in found.items()}


def test_columns_that_say_where_a_row_comes_from_and_the_size_of_advantages_change_nothing(
    rows, usual, tmp_path
):
    for column in ("group_id", "policy_lag", "host", "token_ids"):
        rows = without(rows, column)
    scaled = [{**row, "advantages": [a * 1024 for a in row["advantages"]]} for row in rows]
    found = tried(scaled, TABLE, tmp_path)
    assert {name: did(one) for name, one in found.items()} == {name: did(one) for name, one in usual.items()}


def flipped(rows):
    return [{**row, "advantages": [-a for a in row["advantages"]]} for row in rows]


def test_the_sign_of_the_advantages_swaps_what_is_said_of_positive_and_negative(rows, usual, tmp_path):
    swap = {"positive": "negative", "negative": "positive"}
    either = [one for one in TABLE if all(rule.advantage in ("any", *swap) for rule in one.reject)]
    turned = [
        replace(
            one, reject=tuple(replace(r, advantage=swap.get(r.advantage, r.advantage)) for r in one.reject)
        )
        for one in either
    ]
    found = tried(flipped(rows), turned, tmp_path)
    assert len(either) > 50
    for one in either:
        assert did(usual[one.name]) == did(found[one.name]), one.name


def signed():
    """List every rule of the table that depends on a sign, alone."""
    rules = {(one.policy, rule): None for one in TABLE for rule in one.reject if rule.advantage != "any"}
    return [Preset(f"r{i}", "", policy=policy, reject=(rule,)) for i, (policy, rule) in enumerate(rules)]


def test_rejections_under_both_signs_are_those_under_any(rows, tmp_path):
    """The two are disjoint: no advantage and no log-ratio is 0 here."""
    some = signed()
    plain = [replace(one, reject=(replace(one.reject[0], advantage="any"),)) for one in some]
    lengths = [s.n for s in oracles.sequences(rows)]
    there, back, any_sign = (
        tried(dump, presets, tmp_path)
        for dump, presets in ((rows, some), (flipped(rows), some), (rows, plain))
    )
    assert len(some) >= 6
    for one in some:
        gone = [
            [n - k for n, k in zip(lengths, found[one.name]["kept_tokens"], strict=True)]
            for found in (there, back, any_sign)
        ]
        assert [a + b for a, b in zip(gone[0], gone[1], strict=True)] == gone[2], one.reject


def wider(preset):
    """Move one bound of a preset outwards."""
    if preset.weight and preset.weight.action == "mask":
        for part in _moved(preset.weight, *_RATIO):
            yield replace(preset, weight=part)
    for at, rule in enumerate(preset.reject):
        for part in _moved(rule, *_outwards(rule)):
            yield replace(preset, reject=(*preset.reject[:at], part, *preset.reject[at + 1 :]))
    if preset.veto:
        for veto in _moved(preset.veto, *_RATIO):
            yield replace(preset, veto=veto)


_RATIO = (lambda x: x / 1.3, lambda x: x * 1.3)


def _outwards(rule):
    if rule.statistic in ("ratio", "mult_prob_error") or rule.statistic in UNSIGNED:
        return _RATIO
    return lambda x: x - abs(x) / 3 - 0.01, lambda x: x + abs(x) / 3 + 0.01


def _moved(part, down, up):
    if part.lower is not None:
        yield replace(part, lower=down(part.lower))
    if part.upper is not None:
        yield replace(part, upper=up(part.upper))


def numbered(made):
    """Return the presets to try, each once, and which two are compared."""
    return (
        [replace(new, name=f"n{i}") for i, (_, new) in enumerate(made)],
        [(old.name, f"n{i}") for i, (old, _) in enumerate(made)],
    )


def raw(preset):
    """Remove the normalisation, which mixes all weights of a trainer batch."""
    if preset.weight is None or not preset.weight.normalize:
        return preset
    return replace(preset, weight=replace(preset.weight, normalize=False))


def higher(preset):
    """Move one bound of a preset's truncation up."""
    weight = preset.weight
    if weight is None or weight.action != "truncate":
        return
    if weight.upper is not None:
        yield replace(preset, weight=replace(weight, upper=weight.upper * 1.2))
    if weight.lower:
        top = math.inf if weight.upper is None else weight.upper
        yield replace(preset, weight=replace(weight, lower=min(weight.lower * 1.2, top)))


@pytest.mark.parametrize(("looser", "many", "changed"), [(wider, 60, 40), (higher, 20, 10)])
def test_a_looser_bound_never_keeps_or_weighs_less(rows, tmp_path, looser, many, changed):
    """A higher bound of a truncation moves no mask."""
    table = [raw(one) for one in TABLE]
    some, pairs = numbered([(one, new) for one in table for new in looser(one)])
    found = tried(rows, [*table, *some], tmp_path)
    assert len(pairs) > many
    for old, new in pairs:
        first, second = found[old], found[new]
        kept = list(zip(first["kept_tokens"], second["kept_tokens"], strict=True))
        assert all(a <= b if looser is wider else a == b for a, b in kept), (old, new)
        assert all(a >= b for a, b in zip(first["vetoed"], second["vetoed"], strict=True)), (old, new)
        if first["weight_sum"][0] is not None:  # else it is only logged
            sums = zip(first["weight_sum"], second["weight_sum"], strict=True)
            assert all(a <= b * (1 + 1e-12) for a, b in sums), (old, new)
    assert sum(did(found[old]) != did(found[new]) for old, new in pairs) > changed


def beyond(preset):
    """Return whether a preset looks beyond one sequence."""
    weight = preset.weight
    return any(rule.over == "batch" for rule in preset.reject) or (weight is not None and weight.normalize)


def test_only_presets_that_look_beyond_a_sequence_ask_for_the_step(rows, usual, tmp_path):
    found = tried(without(rows, "step"), TABLE, tmp_path)
    for preset in TABLE:
        same = did(found[preset.name]) == did(usual[preset.name])
        assert same or beyond(preset), preset.name
    assert sum(did(found[one.name]) != did(usual[one.name]) for one in TABLE if beyond(one)) >= 4


def test_a_step_alone_is_what_it_is_among_others(rows, usual, tmp_path):
    at = {row["sequence_id"]: i for i, row in enumerate(rows)}
    part = [row for row in rows if row["step"] == 1]
    found = tried(part, TABLE, tmp_path)
    where = [at[row["sequence_id"]] for row in part]
    for name, one in found.items():
        for key in ("kept_tokens", "vetoed"):
            assert one[key] == [usual[name][key][i] for i in where], name
        if one["weight_sum"][0] is not None:
            whole = [usual[name]["weight_sum"][i] for i in where]
            assert one["weight_sum"] == pytest.approx(whole, rel=1e-12), name

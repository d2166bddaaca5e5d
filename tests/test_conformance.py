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

from tests import oracles
from tests.kinds import MADE, of_each_kind
from tests.reading import analyze
from tests.trainers import BUILT_IN

SHIPPED = tuple(BUILT_IN.values())
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


def without(rows, column):
    return [{name: value for name, value in row.items() if name != column} for row in rows]


# ---------------------------------------------------------------- on policy

IDENTITY = dict.fromkeys(("weight_mean", "weight_min", "weight_max", "ess_tokens", "ess_sequences"), 1)
IDENTITY |= dict.fromkeys(("weight_std", "ppo_kl", "truncated_high", "truncated_low", "tokens_rejected"), 0)
IDENTITY |= dict.fromkeys(("sequences_dropped", "sequences_touched", "catastrophic_tokens", "vetoed"), 0)


def test_every_preset_leaves_everything_alone_where_the_policies_agree(rows, tmp_path):
    same = [{**row, **dict.fromkeys(COLUMNS[:2], row["rollout_log_probs"])} for row in rows]
    lengths = [s.n for s in oracles.sequences(same)]

    for name, found in tried(same, (*SHIPPED, *MADE), tmp_path).items():
        assert found["kept_tokens"] == lengths, name
        assert not any(found["vetoed"]), name
        assert found["weight_sum"] in (lengths, [None] * len(lengths)), name
        assert {key: found["numbers"][key] for key in IDENTITY} == IDENTITY, name


# ---------------------------------------------------------------- what a preset reads


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
        rows = copy.deepcopy(made)
        for i, row in enumerate(rows):
            other = [-x if column == "advantages" else x - (t + i) % 5 for t, x in enumerate(row[column])]
            row[column] = other
        after = tried(rows, TABLE, tmp_path)
        changed |= {name for name, one in before.items() if corrected(one) != corrected(after[name])}
    assert changed == {preset.name for preset in TABLE if column in preset.lacking(())}


def corrected(one):
    found = {key: value for key, value in one["numbers"].items() if not key.startswith(LOSSES)}
    return did(one), {key: Sum(value) if isinstance(value, float) else value for key, value in found.items()}


def test_columns_that_say_where_a_row_comes_from_and_the_size_of_advantages_change_nothing(
    rows, usual, tmp_path
):
    for column in ("group_id", "policy_lag", "host", "token_ids"):
        rows = without(rows, column)
    scaled = [{**row, "advantages": [a * 1024 for a in row["advantages"]]} for row in rows]
    found = tried(scaled, TABLE, tmp_path)
    assert {name: did(one) for name, one in found.items()} == {name: did(one) for name, one in usual.items()}


# ---------------------------------------------------------------- looser bounds


def looser(preset):
    """Yield the preset with one bound of what it rejects moved outwards by a third."""
    weight, rules = preset.weight, preset.reject
    if weight and weight.action == "mask":
        yield from (replace(preset, weight=part) for part in wider(weight))
    for at, rule in enumerate(rules):
        yield from (replace(preset, reject=(*rules[:at], part, *rules[at + 1 :])) for part in wider(rule))
    if preset.veto:
        yield from (replace(preset, veto=part) for part in wider(preset.veto))


def wider(part):
    if part.lower is not None:
        yield replace(part, lower=part.lower - abs(part.lower) / 3)
    if part.upper is not None:
        yield replace(part, upper=part.upper + abs(part.upper) / 3)


def test_a_looser_bound_never_keeps_or_weighs_less(rows, tmp_path):
    """Without normalisation, which mixes all weights of a trainer batch."""
    raw = [replace(one, weight=replace(one.weight, normalize=False)) if one.weight else one for one in TABLE]
    pairs = [(old.name, new) for old in raw for new in looser(old)]
    pairs = [(old, replace(new, name=f"n{i}")) for i, (old, new) in enumerate(pairs)]
    found, changed = tried(rows, [*raw, *(new for _, new in pairs)], tmp_path), 0
    assert len(pairs) > 60
    for old, new in pairs:
        first, second = found[old], found[new.name]
        changed += did(first) != did(second)
        assert all(a <= b for a, b in zip(first["kept_tokens"], second["kept_tokens"], strict=True)), new
        assert all(a >= b for a, b in zip(first["vetoed"], second["vetoed"], strict=True)), new
        if first["weight_sum"][0] is not None:  # else it is only logged
            sums = zip(first["weight_sum"], second["weight_sum"], strict=True)
            assert all(a <= b * (1 + 1e-12) for a, b in sums), new
    assert changed > 40


# ---------------------------------------------------------------- steps


def beyond(preset):
    """Return whether a preset looks beyond one sequence."""
    return any(rule.over == "batch" for rule in preset.reject) or bool(
        preset.weight and preset.weight.normalize
    )


def test_only_presets_that_look_beyond_a_sequence_ask_for_the_step(rows, usual, tmp_path):
    found = tried(without(rows, "step"), TABLE, tmp_path)
    asked = {one.name for one in TABLE if did(found[one.name]) != did(usual[one.name])}
    assert len(asked) >= 4
    assert asked <= {one.name for one in TABLE if beyond(one)}


def test_a_step_alone_is_what_it_is_among_others(rows, usual, tmp_path):
    at = [i for i, row in enumerate(rows) if row["step"] == 1]
    for name, one in tried([rows[i] for i in at], TABLE, tmp_path).items():
        assert [*did(one)] == [[of_row[i] for i in at] for of_row in did(usual[name])], name

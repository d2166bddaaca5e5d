"""The diagnosis names the planted cause, beside its look-alikes, on real rollouts of the sample dumps."""

from __future__ import annotations

import math
import re
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import Policy, anew, capped, colder, dump, joined
from faults import responses as sampled
from scipy import stats

from offpol_diag.diagnosis.causes.boundary import Boundary
from offpol_diag.diagnosis.causes.context import WrongContext
from offpol_diag.diagnosis.causes.special_token import SpecialToken
from offpol_diag.diagnosis.rows import SURE, Rows, bound
from offpol_diag.diagnosis.seen import systematic
from tests import oracles
from tests.reading import analyze

ROOT = Path(__file__).parent.parent
SAMPLES = ("healthy", "quantized", "stale", "collapse")


@cache
def columns(name):
    """Read a sample dump without masked tokens: column → one array or value per sequence."""
    table = pq.read_table(ROOT / "sample_data" / f"{name}.parquet").to_pydict()
    masks = [np.array(mask, bool) for mask in table["response_mask"]]
    found = {
        key: [np.array(row)[mask] for row, mask in zip(table[key], masks, strict=True)]
        for key in ("rollout_log_probs", "old_log_probs", "token_ids")
    }
    return found | {key: table[key] for key in ("step", "group_id", "policy_lag", "sequence_id")}


def write(path, given, drop=()):
    pq.write_table(pa.table({key: value for key, value in given.items() if key not in drop}), path)
    return str(path)


def diagnosed(path, given, drop=(), **options):
    return analyze([write(path, given, drop)], presets=(), **options).diagnosis


def rng():
    return np.random.default_rng(7)


def seeded(i):
    return np.random.default_rng(i)


def changed(name, other, change):
    """Make a fault: the named column becomes `change` of (row, its values, the other column's, token ids)."""

    def fault(given):
        rows = zip(given[name], given[other], given["token_ids"], strict=True)
        return given | {name: [change(i, *row) for i, row in enumerate(rows)]}

    return fault


old = partial(changed, "old_log_probs", "rollout_log_probs")
rollout = partial(changed, "rollout_log_probs", "old_log_probs")


def permuted(given):
    """Give row i the train log-probs of row i + 1, padded with what a forward pass makes of padding."""
    p, chance = given["old_log_probs"], rng()
    rows = []
    for i, mine in enumerate(p):
        other = p[(i + 1) % len(p)][: len(mine)]
        rows.append(np.concatenate((other, -chance.exponential(3, len(mine) - len(other)))))
    return given | {"old_log_probs": rows}


def broken(i, p, q, ids):
    """Let one row in ten score other text from its middle on."""
    half = len(p) // 2
    return np.concatenate((p[:half], np.roll(p[half:], 1))) if i % 10 == 0 else p


def beyond(given):
    """Let the train column of every row score other text beyond token 60."""
    p = given["old_log_probs"]
    return given | {"old_log_probs": [np.concatenate((x[:60], np.roll(x[60:], 3))) for x in p]}


def rare(i, x, value):
    """Put this value at one token in fifty."""
    return np.where(seeded(i).random(len(x)) < 0.02, value, x)


FAULTS = {
    "off_by_one": old(lambda i, p, q, ids: np.roll(p, 1)),
    "off_by_one, the other way": old(lambda i, p, q, ids: np.roll(p, -1)),
    "off_by_one, by three": rollout(lambda i, q, p, ids: np.roll(q, 3)),
    "off_by_one, one row in ten": old(lambda i, p, q, ids: np.roll(p, 1) if i % 10 == 0 else p),
    "row_permutation": permuted,
    "sentinel, -9999": rollout(lambda i, q, p, ids: rare(7, q, -9999.0)),
    "sentinel, 0.0": rollout(lambda i, q, p, ids: rare(i, q, 0.0)),
    "sentinel, log 1/V": old(lambda i, p, q, ids: rare(i, p, np.log(1 / 48))),
    "boundary, last": old(lambda i, p, q, ids: np.append(p[:-1], -1 - 3 * seeded(i).random())),
    "boundary, first": rollout(lambda i, q, p, ids: np.append(-1 - 3 * seeded(i).random(), q[1:])),
    "special_token": old(lambda i, p, q, ids: np.where(ids == 4, p - 1.0, p)),
    "retokenization": old(broken),
    "long_context": beyond,
    "low_precision_storage": rollout(
        lambda i, q, p, ids: (q.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    ),
    "low_precision_storage, decimals": rollout(lambda i, q, p, ids: np.round(q, 3)),
}


HIDDEN = ("retokenization", "long_context")
"""In `collapse` stale weights differ as much as unrelated columns do: breaks are not looked for there."""
PLANTED = [
    (fault, name)
    for i, fault in enumerate(FAULTS)
    for name in (SAMPLES[i % 3], SAMPLES[(i + 1) % 3] if fault in HIDDEN else "collapse")
]
"""Every fault in the dump where most is hidden, and in one of the others in turn."""


@pytest.mark.parametrize(("fault", "name"), PLANTED)
def test_the_planted_cause_is_named_first(tmp_path, name, fault):
    summary = analyze([write(tmp_path / "d.parquet", FAULTS[fault](columns(name)))], presets=())
    found = summary.diagnosis
    first = found.causes[0]

    assert (found.verdict, first.id) == ("bug", fault.split(",")[0])
    assert all((first.statistic, first.fix, first.examples))
    assert {one.id for one in found.causes if one.kind == "bug"} == {first.id}
    if first.after:
        assert first.after.k3 < 1.05 * summary.whole["k3"].value


@pytest.mark.parametrize("name", SAMPLES)
def test_an_honest_mismatch_is_no_bug(tmp_path, name):
    for many in (512, 24):
        given = {key: value[:: 512 // many] for key, value in columns(name).items()}
        found = diagnosed(tmp_path / f"{many}.parquet", given)
        assert found.verdict in ("healthy", "honest_mismatch")


def test_unmasked_tool_output_is_a_wrong_mask_and_no_sentinel(tmp_path):
    for name in ("healthy", "collapse"):
        table = pq.read_table(ROOT / "sample_data" / f"{name}.parquet").drop_columns(["response_mask"])
        pq.write_table(table, tmp_path / "d.parquet")
        found = analyze([str(tmp_path / "d.parquet")], presets=()).diagnosis
        assert (found.verdict, found.causes[0].id) == ("bug", "wrong_mask")


def test_the_repair_brings_back_the_numbers(tmp_path):
    right = analyze([write(tmp_path / "a.parquet", columns("stale"))], presets=()).whole
    after = diagnosed(tmp_path / "b.parquet", FAULTS["off_by_one"](columns("stale"))).causes[0].after
    assert after.k3 == pytest.approx(right["k3"].value, rel=0.05)
    assert after.mean_ratio == pytest.approx(right["mean_ratio"].value, rel=0.01)
    assert after.ess_tokens == pytest.approx(right["ess_tokens"].value, rel=0.05)


HOSTS = ["abcd"[i % 4] for i in range(512)]


def test_a_fault_of_one_host_names_the_host(tmp_path):
    """Even one that few of its sequences have."""
    fault = old(lambda i, p, q, ids: np.roll(p, 1) if i % 4 == 2 else p)
    first = diagnosed(tmp_path / "d.parquet", fault(columns("quantized")) | {"host": HOSTS}).causes[0]
    assert (first.id, first.where) == ("off_by_one", "host = c")
    assert first.after.what == "with the shift undone"
    assert "host = c" in first.statement

    some = rollout(lambda i, q, p, ids: np.where((np.arange(len(q)) == 7) & (i % 32 == 2), -9999.0, q))
    first = diagnosed(tmp_path / "d.parquet", some(columns("healthy")) | {"host": HOSTS}).causes[0]
    assert (first.id, first.where) == ("sentinel", "host = c")


def test_a_temperature_of_one_host_is_named_and_its_rows_left_out(tmp_path):
    """The number after the fix is that of the fix named: the host's sequences are left out, not repaired."""
    fine, broken = (
        pq.read_table(dump(tmp_path / f"{fault}.parquet", fault=fault, noise=0.02)).to_pylist()
        for fault in ("none", "trainer")
    )
    rows = [{**(broken if i % 4 == 2 else fine)[i], "host": "abcd"[i % 4]} for i in range(len(fine))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    first = analyze([str(tmp_path / "d.parquet")], presets=()).diagnosis.causes[0]

    assert (first.id, first.where) == ("trainer_temperature", "host = c")
    assert first.after.what == "without these sequences"
    assert first.after.tokens == 225 * 60


def test_permuted_rows_are_told_by_their_ids_and_seen_without_their_partners(tmp_path):
    first = diagnosed(tmp_path / "d.parquet", permuted(columns("healthy"))).causes[0]
    one, two = first.confirm.rsplit(": ", 1)[1].split(", ")[0].split(" → ")
    names = columns("healthy")["sequence_id"]

    assert names[(names.index(one) + 1) % len(names)] == two

    tables = [pq.read_table(dump(tmp_path / f"{seed}.parquet", seed=seed)) for seed in (0, 1)]
    given = {"rollout_log_probs": tables[0][0].to_pylist(), "old_log_probs": tables[1][1].to_pylist()}
    first = diagnosed(tmp_path / "d.parquet", given).causes[0]
    assert (first.id, "not in the sample" in first.statistic) == ("row_permutation", True)


def block(values):
    """Give six tokens of one response in five, from token 40 on, train log-probs of their own."""

    def change(i, p, q, ids):
        short = i % 5 or len(p) < 60
        return p if short else np.concatenate((p[:40], values(seeded(i), p[40:46]), p[46:]))

    return old(change)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (block(lambda chance, p: p - np.array([9, 6, 3, 1.5, 0.8, 0.4])), "retokenization"),
        (block(lambda chance, p: -1 - chance.exponential(2.5, 6)), "wrong_mask"),
        # from token 5 on one token early, in one response of six: no shift
        (old(lambda i, p, q, ids: p if i % 6 else np.concatenate((p[:5], p[6:], p[-1:]))), "retokenization"),
    ],
)
def test_a_block_that_fades_is_another_token_and_one_that_does_not_is_text_of_others(tmp_path, fault, cause):
    assert diagnosed(tmp_path / "d.parquet", fault(columns("healthy"))).causes[0].id == cause


def test_the_first_token_after_another_prompt_is_no_boundary(tmp_path):
    """It differs most; the tokens after it differ less and less."""

    def change(i, p, q, ids):
        size = np.append(1.5, 0.4 * np.exp(-np.arange(1, len(p)) / 30))
        return p - np.abs(seeded(i).normal(0, size)) if i % 10 < 6 else p

    named = [one.id for one in diagnosed(tmp_path / "d.parquet", old(change)(columns("healthy"))).causes]
    assert (named[0], "boundary" in named) == ("wrong_context", False)


def test_a_few_tokens_that_are_far_off_are_no_temperature_and_a_value_repeated_is_no_sentinel(tmp_path):
    """One in 200 is logged 3 to 7 nats too low, at any place: E[r] is 2, and 1 without them."""

    def change(i, q, p, ids):
        chance = seeded(i)
        return q - (chance.random(len(q)) < 0.005) * chance.uniform(3, 7, len(q))

    found = diagnosed(tmp_path / "d.parquet", rollout(change)(columns("healthy")))
    assert (found.verdict, found.causes) == ("cannot_tell", [])

    # a loop in a few responses repeats one log-prob to the last bit; nobody wrote −0.1157038
    chance, given = rng(), columns("healthy")
    q = [x.astype(np.float32) for x in given["rollout_log_probs"]]
    for x in q[:40]:
        x[chance.permutation(len(x))[:4]] = -0.1157038
    found = diagnosed(tmp_path / "d.parquet", given | {"rollout_log_probs": q})
    assert not {"sentinel", "wrong_mask"} & {one.id for one in found.causes}


def test_a_fault_of_the_rows_that_a_flag_marks_is_found_as_of_those_that_a_word_marks(tmp_path):
    fault = old(lambda i, p, q, ids: np.where(q + 9 * (p - q) < 0, q + (9 if i % 4 == 2 else 1) * (p - q), p))
    flags = [i % 4 == 2 for i in range(len(HOSTS))]
    for column in (flags, ["tool" if one else "plain" for one in flags]):
        found = diagnosed(tmp_path / "d.parquet", fault(columns("healthy")) | {"used": column})
        assert [one.id for one in found.causes if one.kind == "bug"] == ["group_fault"]


@pytest.mark.parametrize(("column", "cause"), [("host", "group_fault"), ("dataset", None)])
def test_a_machine_that_differs_threefold_is_a_fault_and_a_kind_of_prompt_is_not(tmp_path, column, cause):
    fault = old(lambda i, p, q, ids: q + (3.5 if i % 4 == 2 else 1) * (p - q))
    found = diagnosed(tmp_path / "d.parquet", fault(columns("healthy")) | {column: HOSTS})
    assert [one.id for one in found.causes if one.kind == "bug"] == ([cause] if cause else [])


@pytest.mark.parametrize(
    ("name", "fault", "causes"),
    [
        ("quantized", "sentinel, -9999", [("sentinel", "bug"), ("quantized_rollout", "honest")]),
        ("stale", "boundary, last", [("boundary", "bug"), ("stale", "honest")]),
    ],
)
def test_an_honest_cause_that_the_dump_records_is_named_beside_an_exact_fault(tmp_path, name, fault, causes):
    path = write(tmp_path / "d.parquet", FAULTS[fault](columns(name)))
    recorded = pq.read_schema(ROOT / "sample_data" / f"{name}.parquet").metadata
    pq.write_table(pq.read_table(path).replace_schema_metadata(recorded), path)
    found = analyze([path], presets=()).diagnosis
    assert [(one.id, one.kind) for one in found.causes] == causes


def test_the_diagnosis_does_not_depend_on_how_the_dump_is_cut(tmp_path):
    given = FAULTS["retokenization"](columns("stale"))
    whole = diagnosed(tmp_path / "d.parquet", given)
    assert diagnosed(tmp_path / "d.parquet", given, batch_tokens=12_000) == whole


@pytest.mark.parametrize("noise", [0.02, 0.15])
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("raw", "rollout_raw_logprobs"),
        ("trainer", "trainer_temperature"),
        ("nucleus", "truncated_sampling"),
        ("shift", "off_by_one"),
        ("first", "boundary"),
        ("none", None),
    ],
)
def test_a_temperature_which_is_fitted_a_nucleus_and_noise_are_told_apart(tmp_path, fault, cause, noise):
    summary = analyze([dump(tmp_path / "d.parquet", fault=fault, noise=noise)], presets=())
    found = summary.diagnosis

    assert (found.verdict == "bug") is (cause is not None)
    assert cause is None or [one.id for one in found.causes if one.kind == "bug"] == [cause]
    if noise < 0.1 and fault in ("raw", "trainer"):
        first = found.causes[0]
        assert float(first.statement.split("T ≈ ")[1].split(")")[0]) == pytest.approx(0.7, abs=0.12)
        assert first.after is None  # the other tokens' probabilities are not in the dump


def test_identical_columns_and_a_handful_of_tokens_cannot_tell_and_positive_log_probs_are_a_bug(tmp_path):
    given = columns("healthy")
    same = diagnosed(tmp_path / "d.parquet", given | {"old_log_probs": given["rollout_log_probs"]})
    assert (same.verdict, "same numbers" in same.headline) == ("cannot_tell", True)
    for many in (1, 63):
        few = {"rollout_log_probs": [[-1.0]] * many, "old_log_probs": [[-1.1]] * many}
        assert diagnosed(tmp_path / "d.parquet", few).verdict == "cannot_tell"
    found = analyze([str(ROOT / "tests" / "golden" / "stale.parquet")], presets=()).diagnosis
    assert (found.verdict, found.causes[0].id, "positive" in found.headline) == ("bug", "sentinel", True)


# ---------------------------------------------------------------- two policies, logged rightly and wrongly

OLD = Policy()
FEW = np.repeat(np.arange(10), 8)


def first_sync(size=2.5):
    """Return four steps; from the second on the engine's weights are others."""
    engines = [OLD, *(OLD.moved(size, seed) for seed in (1, 2, 3))]
    parts = [sampled(lambda t, one=one: one, OLD, group=FEW) for one in engines]
    return joined(parts, step=range(4), host=list("abab"))


def prefix(size):
    """Return a policy that sees the prompt with the keys of other weights."""
    other = OLD.moved(0.0)
    other.begin = OLD.moved(size).begin
    return other


HONEST = {
    "updated after the first token, a little": lambda: sampled(lambda t: (OLD, NEW)[t > 0], NEW),
    "updated after the first token": lambda: sampled(lambda t: (OLD, OLD.moved(1.0))[t > 0], OLD.moved(1.0)),
    "updated after eight tokens": lambda: sampled(lambda t: (OLD, NEW)[t > 7], NEW),
    "updated after eight tokens, by much": lambda: sampled(
        lambda t: (OLD, OLD.moved(1.0))[t > 7], OLD.moved(1.0)
    ),
    "a prefix cache a little older than the weights": lambda: sampled(lambda t: prefix(0.3), OLD),
    "a prefix cache older than the weights": lambda: sampled(lambda t: prefix(0.6), OLD),
    "a soft cap that the trainer lacks": lambda: sampled(lambda t: capped(OLD), OLD),
    "a soft cap that the engine lacks": lambda: sampled(lambda t: OLD, capped(OLD)),
    "another model": lambda: sampled(lambda t: OLD.moved(1.5), OLD),
    "another model altogether": lambda: sampled(lambda t: Policy(9), OLD),
    "another model, both certain to the last bit": lambda: sampled(
        lambda t: colder(0.05, OLD.moved(1.0)), colder(0.05, OLD)
    ),
    "another model, more certain still": lambda: sampled(
        lambda t: colder(0.05, OLD.moved(2.0)), colder(0.05, OLD)
    ),
    "a first sync that breaks the weights": first_sync,
}
NEW = OLD.moved(0.3)


@pytest.mark.parametrize(("noise", "named"), [(0.3, True), (1.2, False)])
def test_other_text_is_far_worse_than_what_is_around_it(tmp_path, noise, named):
    """Outliers of few bits come in runs, too, in a policy that is nearly certain of its tokens."""
    given, chance = FAULTS["retokenization"](columns("healthy")), np.random.default_rng(0)
    old = [np.asarray(p, np.float64) for p in given["old_log_probs"]]
    old = [np.minimum(p + noise * np.expm1(p) * chance.normal(size=len(p)), 0.0) for p in old]
    found = diagnosed(tmp_path / "d.parquet", given | {"old_log_probs": old})
    assert ("retokenization" in [one.id for one in found.causes]) is named


@pytest.mark.parametrize("known", ["with ids", "without ids"])
@pytest.mark.parametrize("name", HONEST)
def test_right_values_of_two_policies_are_no_bug(tmp_path, name, known):
    drop = ("entropy", "sampled", *(() if known == "with ids" else ("group_id", "token_ids")))
    found = diagnosed(tmp_path / "d.parquet", HONEST[name](), drop)
    assert [one.id for one in found.causes if one.kind == "bug"] == []


RIGHT = cache(lambda: sampled(lambda t: OLD, OLD))
TOKENS_OF = ("rollout_log_probs", "old_log_probs", "token_ids")


@pytest.mark.parametrize("column", ["rollout_log_probs", "old_log_probs"])
@pytest.mark.parametrize("model", [OLD, OLD.moved(1.5)], ids=["same weights", "another model"])
@pytest.mark.parametrize(("place", "shift"), [("first", -1), ("last", 1)])
def test_a_value_copied_from_the_next_packed_row_is_a_boundary(tmp_path, column, model, place, shift):
    """Also beside a broad mismatch: only a shift across packed rows leaves exact copies."""
    given = sampled(lambda t: model, OLD)
    rows = given[column]
    at, beside = (0, -1) if place == "first" else (-1, 0)
    packed = [x.copy() for x in rows]
    for i, x in enumerate(packed):
        x[at] = rows[(i + shift) % len(rows)][beside]
    packed = given | {column: packed}
    first = diagnosed(tmp_path / "d.parquet", packed, ("entropy", "sampled")).causes[0]
    assert (first.id, first.exact) == ("boundary", True)
    assert first.statement == f"The {place} token is logged wrongly."
    assert first.statistic.startswith(f"100% of 320 rows hold at the {place} token")


@pytest.mark.parametrize("known", ["with ids", "without ids"])
def test_a_first_value_of_no_policy_is_a_boundary(tmp_path, known):
    """Responses to one prompt that begin with one token have it in common, but for the wrong column."""
    wrong = [np.append(-1 - 3 * seeded(i).random(), p[1:]) for i, p in enumerate(RIGHT()["old_log_probs"])]
    drop = ("entropy", "sampled", *(() if known == "with ids" else ("group_id", "token_ids")))
    found = diagnosed(tmp_path / "d.parquet", RIGHT() | {"old_log_probs": wrong}, drop)
    assert [one.id for one in found.causes if one.kind == "bug"] == ["boundary"]


@pytest.mark.parametrize(("times", "found"), [(1.4, False), (3.5, True)])
def test_a_first_token_is_a_boundary_only_if_it_is_far_from_a_mismatch_of_all_tokens(times, found):
    """An adapter at twice its scale moves the first token by more than others, and no position is wrong."""
    chance = rng()
    lengths = np.full(200, 40)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    index = np.arange(starts[-1]) % 40
    q = -chance.exponential(1.5, starts[-1]) - 0.1
    off = np.where(index == 0, 0.8 * times, 0.8) * chance.normal(1, 0.3, starts[-1])
    q[index == 0] = chance.choice([-0.5, -1.0, -2.0], 200)  # few first tokens, with values that do not fit
    rows = Rows(q, q - off, starts, index, scalars={"group_id": np.repeat(np.arange(25), 8).tolist()})
    assert (Boundary().look(rows) is not None) == found


@pytest.mark.parametrize(("lag", "size", "found"), [(1, 0.18, False), (0, 0.18, True), (1, 1.0, True)])
def test_an_id_that_an_update_moves_a_little_is_no_special_token(lag, size, found):
    """One step of GRPO moved every space of a run by 0.18 nats, and other tokens by 0.04."""
    chance = rng()
    starts = np.arange(0, 8001, 40)
    ids = chance.integers(0, 50, 8000)
    q = -chance.exponential(1.5, 8000) - 0.3
    p = np.minimum(q + np.where(ids == 32, size, 0.0) + chance.normal(0, 0.03, 8000), 0.0)
    rows = Rows(q, p, starts, np.arange(8000) % 40, ids, scalars={"policy_lag": [lag] * 200})
    assert (SpecialToken().look(rows) is not None) == found


def certain(fades):
    """Return rows whose later tokens are almost certain, and differ 10-fold less in logits if `fades`."""
    chance = rng()
    starts, index = np.arange(0, 100 * 80 + 1, 80), np.arange(100 * 80) % 80
    unsure = (index < 16) | (chance.random(len(index)) < 0.15)
    q = np.where(unsure, -chance.exponential(1.5, len(index)) - 0.3, -1e-4)
    size = np.where((index < 16) | (not fades), 2.5, 0.25) * chance.normal(1, 0.1, len(index))
    ids = np.where(unsure, chance.integers(0, 20, len(index)), 50)
    return Rows(q, q + size * np.expm1(q), starts, index, ids, scalars={"policy_lag": [0] * 100})


@pytest.mark.parametrize("fades", [True, False])
def test_text_that_grows_certain_is_no_other_prompt(fades):
    """Another model is off by as much at every uncertain token; later ones are few."""
    assert (WrongContext().look(certain(fades)) is not None) == fades


@pytest.mark.parametrize(("late", "found"), [(0.12, True), (0.45, False)])
def test_an_adapter_that_moves_the_first_tokens_most_is_no_other_prompt(late, found):
    """With one of Gemma 3 at twice its scale they were off by 1.2 nats, and those from 32 on by 0.29."""
    chance = rng()
    starts, index = np.arange(0, 100 * 80 + 1, 80), np.arange(100 * 80) % 80
    q = -chance.exponential(1.5, len(index)) - 0.3
    size = np.select([index < 1, index < 16], [2.6, 2.0], late) * chance.normal(1, 0.1, len(index))
    rows = Rows(q, q + size * np.expm1(q), starts, index, scalars={"policy_lag": [0] * 100})
    assert (WrongContext().look(rows) is not None) == found


@pytest.mark.parametrize(("others", "found"), [(1.8, False), (0.1, True)])
def test_ids_that_are_uncertain_in_text_that_is_certain_are_no_special_tokens(others, found):
    """The other ids are off by as much wherever they are uncertain, which is seldom."""
    chance = rng()
    kind = chance.random(8000)
    q = np.where(kind < 0.035, -2.0 - chance.exponential(1.0, 8000), -1e-4)
    ids = np.where(kind < 0.02, 3, chance.integers(10, 30, 8000))
    p = q - np.where(kind < 0.02, 3.0, others) * -np.expm1(q) * chance.normal(1, 0.05, 8000)
    starts, index = np.arange(0, 8001, 80), np.arange(8000) % 80
    rows = Rows(q, p, starts, index, ids, scalars={"policy_lag": [0] * 100})
    assert (SpecialToken().look(rows) is not None) == found


def test_responses_after_another_prompt_are_told_from_an_update_of_the_weights(tmp_path):
    other = OLD.moved(0.0)
    other.begin = OLD.begin[::-1]
    found = diagnosed(tmp_path / "d.parquet", sampled(lambda t: OLD, other), ("entropy", "sampled"))
    assert [one.id for one in found.causes if one.kind == "bug"] == ["wrong_context"]


def test_a_few_short_sequences_that_fit_at_a_shift_are_none(tmp_path):
    """Three of 128, with six tokens in common: the true cause is the temperature."""
    given = sampled(lambda t: colder(0.7, OLD), OLD, (3, 7), np.repeat(np.arange(16), 8))
    q = given["rollout_log_probs"]
    moved = [i for i, x in enumerate(q) if len(x) == 7][:3]
    shifted = [np.append(given["old_log_probs"][i][1:], x[-1]) if i in moved else x for i, x in enumerate(q)]
    found = diagnosed(tmp_path / "d.parquet", given | {"rollout_log_probs": shifted}, ("entropy", "sampled"))
    assert [one.id for one in found.causes if one.kind == "bug"] == ["trainer_temperature"]


def test_short_sequences_are_mended_where_longer_ones_show_the_shift(tmp_path):
    given = sampled(lambda t: OLD, OLD, (4, 24))
    shifted = given | {"old_log_probs": [np.roll(x, 1) for x in given["old_log_probs"]]}
    first = diagnosed(tmp_path / "d.parquet", shifted, ("entropy", "sampled")).causes[0]
    assert (first.id, first.sequences) == ("off_by_one", 320)
    assert "nan" not in first.statistic


@pytest.mark.parametrize(
    ("sampling", "trainer", "said"),
    [
        (0.7, 1.0, "does not divide its logits by the sampling temperature (T ≈ 0.7)"),
        (0.7, 0.49, "divides its logits by the sampling temperature twice (T ≈ 0.7)"),
        (1.4, 1.0, "or never by one above 1 (T ≈ 1.4)"),
    ],
)
def test_a_trainer_that_divides_twice_is_not_said_to_divide_never(tmp_path, sampling, trainer, said):
    given = sampled(lambda t: colder(sampling, OLD), colder(trainer, OLD))
    first = diagnosed(tmp_path / "d.parquet", given, ("entropy", "sampled")).causes[0]
    words = re.sub(r"(\d\.\d)\d", r"\1", first.statement)
    assert (first.id, said in words, first.after) == ("trainer_temperature", True, None)


@pytest.mark.parametrize("token", [19, 4, 34])
def test_a_token_with_weights_of_its_own_is_named_though_what_follows_suffers_too(tmp_path, token):
    """Up to 9% of all tokens."""
    given = sampled(lambda t: OLD, anew(OLD, token))
    first = diagnosed(tmp_path / "d.parquet", given, ("entropy", "sampled")).causes[0]
    assert (first.id, f"with id {token} differ" in first.statistic) == ("special_token", True)


@pytest.mark.parametrize("column", ["entropy", "sampled"])
@pytest.mark.parametrize(("temperature", "way"), [(0.7, "below"), (1.4, "above")])
def test_raw_log_probs_in_both_columns_show_beside_an_entropy(tmp_path, temperature, way, column):
    """The entropy is the trainer's, of the raw distribution; or that of the one tokens were sampled from.

    Beside the latter the surprisal is above it, whatever the temperature is.
    """
    given = sampled(lambda t: colder(temperature, OLD), OLD, logged=OLD)
    first = diagnosed(tmp_path / "d.parquet", given | {"entropy": given[column]}).causes[0]
    assert first.id == "rollout_raw_logprobs"
    assert f"nats, {way if column == 'entropy' else 'above'} 0" in first.statistic


@pytest.mark.parametrize("column", ["entropy", "sampled"])
@pytest.mark.parametrize("size", [0.0, 0.3, 1.0])
def test_an_entropy_of_either_policy_fits_an_honest_mismatch(tmp_path, size, column):
    given = sampled(lambda t: OLD.moved(size), OLD)
    found = diagnosed(tmp_path / "d.parquet", given | {"entropy": given[column]})
    assert [one.id for one in found.causes if one.kind == "bug"] == []


@pytest.mark.parametrize("column", ["rollout", "old"])
@pytest.mark.parametrize(
    ("value", "cause", "said"),
    [
        (lambda x: np.zeros_like(x), "sentinel", "holds nothing but the constant 0.0,"),
        (lambda x: np.full_like(x, -3.7), "sentinel", "holds nothing but the constant -3.7"),
        (lambda x: np.full_like(x, x.mean()), "copied_mean", "holds one value for each sequence"),
    ],
)
def test_a_column_without_a_log_prob_is_named_and_nothing_else(tmp_path, value, cause, said, column):
    key = f"{column}_log_probs"
    found = diagnosed(tmp_path / "d.parquet", RIGHT() | {key: [value(x) for x in RIGHT()[key]]})
    assert ([one.id for one in found.causes], said in found.headline) == ([cause], True)
    assert found.causes[0].after is None


def test_a_column_of_one_value_is_none_where_the_other_agrees(tmp_path):
    """An engine that is certain of every token has log-probs of 0, and the trainer next to 0."""
    given = RIGHT()
    certain = {name: [np.full_like(x, value) for x in given[name]] for name, value in CERTAIN.items()}
    found = diagnosed(tmp_path / "d.parquet", given | certain, ("entropy",))
    assert [one.id for one in found.causes if one.kind == "bug"] == []


CERTAIN = {"rollout_log_probs": 0.0, "old_log_probs": -1e-9}


@pytest.mark.parametrize("ids", [True, False])
def test_padding_that_the_mask_includes_is_a_wrong_mask_also_where_both_columns_hold_it(tmp_path, ids):
    """Both columns agree there, so that it only thins out the mismatch."""
    padded = {name: [np.pad(x, (0, 61 - len(x))) for x in RIGHT()[name]] for name in TOKENS_OF}
    given = padded | {"response_mask": [np.ones(61, int)] * 320}
    first = diagnosed(tmp_path / "d.parquet", given, () if ids else ("token_ids",)).causes[0]
    assert (first.id, "padding at the end" in first.statement) == ("wrong_mask", True)
    assert first.tokens == 320 * 61 - sum(map(len, RIGHT()["token_ids"]))


@pytest.mark.parametrize("ids", [True, False])
def test_responses_that_repeat_a_token_until_the_longest_length_are_no_padding(tmp_path, ids):
    given = {name: [x.copy() for x in RIGHT()[name]] for name in TOKENS_OF}
    for i, (q, p, tokens) in enumerate(zip(*given.values(), strict=True)):
        tail = np.minimum(-np.exp(-np.arange(20.0) - 2), 0.0)
        q[-20:], p[-20:], tokens[-20:] = tail, tail, i % 40
        q[-8 - i % 5 :] = p[-8 - i % 5 :] = 0.0
    cut = {name: [x[-40:] for x in rows] for name, rows in given.items()}
    found = diagnosed(tmp_path / "d.parquet", cut, () if ids else ("token_ids",))
    assert [one.id for one in found.causes if one.kind == "bug"] == []


@pytest.mark.parametrize(
    ("columns", "cause"),
    [
        ({"host": list("abc"), "policy_lag": range(3)}, None),
        ({"host": list("abc"), "step": range(3)}, None),
        ({"prompt_length": [100, 200, 300]}, None),
        ({"host": list("abc"), "step": [5, 5, 5], "policy_lag": [1, 1, 1]}, "group_fault"),
        ({"rank": range(3)}, "group_fault"),
    ],
)
def test_a_group_stands_out_among_others_with_the_same_weights(tmp_path, columns, cause):
    """Hosts that are at other steps or lags differ honestly, and a length is no group."""
    given = joined(
        [sampled(lambda t, k=k: OLD.moved(0.3 * k), OLD, group=FEW) for k in (0, 0.2, 3)], **columns
    )
    found = diagnosed(tmp_path / "d.parquet", given, ("entropy", "sampled"))
    assert [one.id for one in found.causes if one.kind == "bug"] == ([cause] if cause else [])


@pytest.mark.parametrize("groups", [8, 20, 128, 100_000])
@pytest.mark.parametrize("looks", [1, 8])
def test_few_groups_and_many_looks_need_more_standard_errors(groups, looks):
    """Beyond it a t of that many groups is as rare as a normal number beyond 5, over all looks together."""
    rare = stats.norm.sf(SURE) / looks
    assert bound(groups, looks) == pytest.approx(stats.t.isf(rare, groups - 1), rel=0.05)


@pytest.mark.parametrize(("shift", "found"), [(0.1, True), (0.0015, False), (-0.1, True)])
def test_the_identity_is_held_against_every_position(shift, found):
    """E[r] is 1 at every position under any honest mismatch; 0.15% is what kernels round."""
    chance = rng()
    delta = chance.normal(0, 0.02, (400, 60)) - 0.02**2 / 2
    delta[:, 0] += shift
    q = -chance.exponential(1, (400, 60))
    starts, position = np.arange(0, 400 * 60 + 1, 60), np.tile(np.arange(60), 400)
    one = Boundary().look_alone(Rows(q.ravel(), (q + delta).ravel(), starts, position))

    assert (one is not None) is found
    assert not found or one.words["place"] == "the first token"


# ---------------------------------------------------------------- whether r depends on the token


def responses(chance, many=30, prompts=10, words=4, longest=14, shift=0.3, noise=0.2):
    """Make ragged responses with gaps where tokens are masked: (prompt, positions, ids, Δ) of each."""
    shifts = shift * chance.normal(size=(words + 1, words))
    found = []
    for i in range(many):
        position = np.flatnonzero(chance.random(int(chance.integers(2, longest))) < 0.85)
        ids = chance.integers(0, words, len(position))
        follows = np.diff(position, prepend=-2) == 1
        before = np.where(follows, np.concatenate(([words], ids))[: len(ids)], words)
        delta = shifts[before, ids] + noise * chance.normal(size=len(ids))
        found.append((f"p{i % prompts}", position.tolist(), ids.tolist(), delta.tolist()))
    return [row for row in found if row[1]]


def rows_of(given, named=True, ids=True):
    """Return the responses as `Rows`, with the prompts' names or without."""
    delta = np.array([d for *_, some in given for d in some])
    return Rows(
        np.full(len(delta), -1.0),
        delta - 1.0,
        np.concatenate(([0], np.cumsum([len(row[1]) for row in given]))),
        np.array([t for _, position, _, _ in given for t in position]),
        np.array([one for _, _, some, _ in given for one in some]) if ids else None,
        scalars={"group_id": [name for name, *_ in given]} if named else {},
    )


def share_by_pairs(given, named):
    """Compute the systematic share, its ends and the number of clusters, by a loop over pairs of tokens."""
    tokens = []
    for owner, (prompt, position, ids, delta) in enumerate(given):
        for t, (at, word, d) in enumerate(zip(position, ids, delta, strict=True)):
            follows = t > 0 and position[t - 1] == at - 1
            kind = (prompt if named else "", ids[t - 1] if follows else None, word)
            tokens.append((kind, owner, min(math.exp(d), 2.0)))
    middle = math.fsum(r for *_, r in tokens) / len(tokens)
    above, below = {}, {}
    for kind in {kind for kind, *_ in tokens}:
        mine = [(owner, r - middle) for other, owner, r in tokens if other == kind]
        pairs = [x * y for (i, x), (j, y) in product(mine, mine) if i != j]
        if pairs:
            cluster = kind[0] if named else kind
            above.setdefault(cluster, []).append(len(mine) * math.fsum(pairs) / len(pairs))
            below.setdefault(cluster, []).append(math.fsum(x * x for _, x in mine))
    top, bottom = ({key: math.fsum(some) for key, some in sums.items()} for sums in (above, below))
    whole = math.fsum(bottom.values())
    value, parts = math.fsum(top.values()) / whole, len(top)
    spread = math.fsum((top[key] - value * bottom[key]) ** 2 for key in top)
    half = stats.t.ppf(0.975, parts - 1) * math.sqrt(spread * parts / (parts - 1)) / whole
    return value, value - half, value + half, parts


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_the_systematic_share_is_that_of_all_pairs_of_different_responses(seed, named):
    given = responses(np.random.default_rng(seed))
    found = systematic(rows_of(given, named))
    value, low, high, parts = share_by_pairs(given, named)
    assert found.value == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-3)
    assert found.groups == parts


@pytest.mark.parametrize(("column", "least"), [(None, 0.15), ("group_id", 0.0), ("token_ids", None)])
def test_a_diagnosis_has_the_systematic_share_where_there_are_token_ids(tmp_path, column, least):
    """Without prompts, kinds of all prompts are one, and share less: r depends on the context too."""
    found = diagnosed(tmp_path / "d.parquet", columns("stale"), drop=[column]).systematic
    assert (found is None) is (least is None)
    if found is not None:
        low, high = found.interval
        assert least < low < found.value < high < 0.5
        assert found.unit == "fraction"


# ---------------------------------------------------------------- whether the trainer has moved


def gain(tmp_path, rollout, old, advantages, **more):
    """The surrogate gain of a dump of these columns, [S, T] each."""
    given = {"rollout_log_probs": [*rollout], "old_log_probs": [*old], "advantages": [*advantages]}
    return analyze([write(tmp_path / "d.parquet", given | more)], presets=()).whole["surrogate_gain"]


@pytest.mark.parametrize("along", [0.0, 0.05, -0.05])
def test_the_surrogate_gain_shows_which_way_the_trainer_has_moved(tmp_path, along):
    """To first order it is the move times the variance of the advantages, here 1."""
    chance, shape = rng(), (160, 40)
    rollout, advantages = -chance.exponential(1, shape) - 1, chance.normal(size=shape)
    old = rollout + along * advantages + 0.02 * chance.normal(size=shape)
    found = gain(tmp_path, rollout, old, advantages, group_id=np.arange(160) // 4)
    low, high = found.interval

    assert found.value == pytest.approx(along, abs=5e-3)
    assert (low > 0, high < 0) == (along > 0, along < 0)


def test_no_single_token_decides_the_surrogate_gain(tmp_path):
    """A ratio counts as 2 at most."""
    rollout, old = np.full((2, 64, 20), -1.0)
    rollout[0, 0] = -40.0
    found = gain(tmp_path, rollout, old, np.repeat([1.0, -1.0], 32 * 20).reshape(64, 20))
    assert found.value == pytest.approx(1 / (64 * 20), rel=1e-9)


def test_the_surrogate_gain_needs_advantages(tmp_path):
    rows = oracles.make_rows(0.1)
    for row in rows:
        del row["advantages"]
    found = analyze([oracles.write(rows, tmp_path / "d.parquet")], presets=()).whole
    for prefix in ("", "drift2.", "total."):
        number = found[f"{prefix}surrogate_gain"]
        assert (number.value, "advantages" in number.unknown) == (None, True)

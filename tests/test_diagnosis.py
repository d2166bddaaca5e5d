"""The diagnosis names the planted cause, beside its look-alikes, on real rollouts of the sample dumps."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import dump
from scipy import stats

from offpol_diag import tallies
from offpol_diag.analyze import analyze
from offpol_diag.diagnosis import laws
from offpol_diag.diagnosis.rows import SURE, Rows, bound
from offpol_diag.metrics.sample import FIRST, LAST, SEQUENCES, TOKENS, Sample

ROOT = Path(__file__).parent.parent
SAMPLES = ("healthy", "quantized", "stale", "collapse")


@cache
def columns(name):
    """A sample dump with masked tokens dropped: column → one array or value per sequence."""
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


def old(change):
    return lambda given: (
        given | {"old_log_probs": [change(i, p, q, ids) for i, (p, q, ids) in enumerate(_three(given))]}
    )


def rollout(change):
    return lambda given: (
        given | {"rollout_log_probs": [change(i, q, p, ids) for i, (p, q, ids) in enumerate(_three(given))]}
    )


def _three(given):
    return zip(given["old_log_probs"], given["rollout_log_probs"], given["token_ids"], strict=True)


def permuted(given):
    """Row i gets the train log-probs of row i + 1, padded with what a forward pass makes of padding."""
    p, chance = given["old_log_probs"], rng()
    rows = []
    for i, mine in enumerate(p):
        other = p[(i + 1) % len(p)][: len(mine)]
        rows.append(np.concatenate((other, -chance.exponential(3, len(mine) - len(other)))))
    return given | {"old_log_probs": rows}


def broken(i, p, q, ids):
    """One row in ten scores other text from its middle on."""
    half = len(p) // 2
    return np.concatenate((p[:half], np.roll(p[half:], 1))) if i % 10 == 0 else p


def beyond(given):
    """Beyond token 60 the train column scores other text, in every row."""
    p = given["old_log_probs"]
    return given | {
        "old_log_probs": [np.concatenate((x[:60], np.roll(x[60:], 3))) for x in p],
    }


FAULTS = {
    "off_by_one": old(lambda i, p, q, ids: np.roll(p, 1)),
    "off_by_one, the other way": old(lambda i, p, q, ids: np.roll(p, -1)),
    "off_by_one, by three": rollout(lambda i, q, p, ids: np.roll(q, 3)),
    "off_by_one, one row in ten": old(lambda i, p, q, ids: np.roll(p, 1) if i % 10 == 0 else p),
    "row_permutation": permuted,
    "sentinel, -9999": rollout(lambda i, q, p, ids: np.where(rng().random(len(q)) < 0.02, -9999.0, q)),
    "sentinel, 0.0": rollout(
        lambda i, q, p, ids: np.where(np.random.default_rng(i).random(len(q)) < 0.02, 0.0, q)
    ),
    "sentinel, log 1/V": old(
        lambda i, p, q, ids: np.where(np.random.default_rng(i).random(len(p)) < 0.02, np.log(1 / 48), p)
    ),
    "boundary, last": old(lambda i, p, q, ids: np.append(p[:-1], -1 - 3 * np.random.default_rng(i).random())),
    "boundary, first": rollout(
        lambda i, q, p, ids: np.concatenate(([-1 - 3 * np.random.default_rng(i).random()], q[1:]))
    ),
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
PLANTED = [(fault, name) for fault in FAULTS for name in SAMPLES if name != "collapse" or fault not in HIDDEN]


@pytest.mark.parametrize(("fault", "name"), PLANTED)
def test_the_planted_cause_is_named_first(tmp_path, name, fault):
    found = diagnosed(tmp_path / "d.parquet", FAULTS[fault](columns(name)))
    first = found.causes[0]

    assert (found.verdict, first.id) == ("bug", fault.split(",")[0])
    assert first.statistic
    assert first.fix
    assert first.examples
    assert {one.id for one in found.causes if one.kind == "bug"} == {first.id}
    if first.after:
        assert first.after.k3 < 1.05 * analyze([str(tmp_path / "d.parquet")], presets=()).metrics["k3"].value


@pytest.mark.parametrize("name", SAMPLES)
def test_an_honest_mismatch_is_no_bug(tmp_path, name):
    for many in (512, 64, 24):
        given = {key: value[:: 512 // many] for key, value in columns(name).items()}
        found = diagnosed(tmp_path / f"{many}.parquet", given)
        assert found.verdict in ("healthy", "honest_mismatch")


def test_unmasked_tool_output_is_a_wrong_mask_and_no_sentinel(tmp_path):
    for name in SAMPLES:
        table = pq.read_table(ROOT / "sample_data" / f"{name}.parquet").drop_columns(["response_mask"])
        pq.write_table(table, tmp_path / "d.parquet")
        found = analyze([str(tmp_path / "d.parquet")], presets=()).diagnosis
        assert (found.verdict, found.causes[0].id) == ("bug", "wrong_mask")


def test_the_repair_brings_back_the_numbers(tmp_path):
    right = analyze([write(tmp_path / "a.parquet", columns("stale"))], presets=()).metrics
    after = diagnosed(tmp_path / "b.parquet", FAULTS["off_by_one"](columns("stale"))).causes[0].after

    assert after.k3 == pytest.approx(right["k3"].value, rel=0.05)
    assert after.mean_ratio == pytest.approx(right["mean_ratio"].value, rel=0.01)
    assert after.ess_tokens == pytest.approx(right["ess_tokens"].value, rel=0.05)


def test_a_fault_of_one_host_names_the_host(tmp_path):
    given = columns("quantized")
    hosts = ["abcd"[i % 4] for i in range(len(given["step"]))]
    old_log_probs = [
        np.roll(p, 1) if host == "c" else p for p, host in zip(given["old_log_probs"], hosts, strict=True)
    ]
    first = diagnosed(tmp_path / "d.parquet", given | {"old_log_probs": old_log_probs, "host": hosts}).causes[
        0
    ]

    assert (first.id, first.where) == ("off_by_one", "host = c")
    assert first.after.what == "with the shift undone"
    assert "host = c" in first.statement


def test_a_temperature_of_one_host_is_named_and_its_rows_left_out(tmp_path):
    """What is undone is said as it was done: the host's sequences are left out, not repaired."""
    table = pq.read_table(dump(tmp_path / "a.parquet", fault="none", noise=0.02)).to_pydict()
    broken = pq.read_table(dump(tmp_path / "b.parquet", fault="trainer", noise=0.02)).to_pydict()
    hosts = ["abcd"[i % 4] for i in range(len(table["group_id"]))]
    given = {
        name: [
            (theirs if host == "c" else ours)
            for ours, theirs, host in zip(mine, broken[name], hosts, strict=True)
        ]
        for name, mine in table.items()
    }
    first = diagnosed(tmp_path / "d.parquet", given | {"host": hosts}).causes[0]

    assert (first.id, first.where) == ("trainer_temperature", "host = c")
    assert first.after.what == "without these sequences"
    assert first.after.tokens == 225 * 60


def test_permuted_rows_are_told_by_their_ids(tmp_path):
    first = diagnosed(tmp_path / "d.parquet", permuted(columns("healthy"))).causes[0]
    one, two = first.confirm.rsplit(": ", 1)[1].split(", ")[0].split(" → ")
    names = columns("healthy")["sequence_id"]

    assert names[(names.index(one) + 1) % len(names)] == two


def test_rare_constants_of_one_host_name_the_host(tmp_path):
    """Few of its sequences have one, and no sequence of another host."""
    given = columns("healthy")
    hosts = ["abcd"[i % 4] for i in range(len(given["step"]))]
    q = [
        np.where(np.arange(len(x)) == 7, -9999.0, x) if host == "c" and i % 32 == 2 else x
        for i, (x, host) in enumerate(zip(given["rollout_log_probs"], hosts, strict=True))
    ]
    first = diagnosed(tmp_path / "d.parquet", given | {"rollout_log_probs": q, "host": hosts}).causes[0]

    assert (first.id, first.where) == ("sentinel", "host = c")


def test_permuted_rows_are_seen_where_their_partners_are_not_in_the_sample(tmp_path):
    tables = [pq.read_table(dump(tmp_path / f"{seed}.parquet", seed=seed)) for seed in (0, 1)]
    given = {"rollout_log_probs": tables[0][0].to_pylist(), "old_log_probs": tables[1][1].to_pylist()}
    found = diagnosed(tmp_path / "d.parquet", given)

    assert found.causes[0].id == "row_permutation"
    assert "not in the sample" in found.causes[0].statistic


def test_a_token_left_out_early_is_no_shift(tmp_path):
    """From token 5 on the train column is one token early, in one response of six."""
    change = old(lambda i, p, q, ids: np.concatenate((p[:5], p[6:], p[-1:])) if i % 6 == 0 else p)
    found = diagnosed(tmp_path / "d.parquet", change(columns("healthy")))

    assert found.causes[0].id == "retokenization"


def test_a_value_that_a_policy_repeats_is_no_sentinel(tmp_path):
    """A loop in a few responses repeats one log-prob to the last bit; nobody wrote −0.1157038."""
    chance = rng()
    given = columns("healthy")
    q = [x.astype(np.float32) for x in given["rollout_log_probs"]]
    for x in q[:40]:
        x[chance.permutation(len(x))[:4]] = -0.1157038
    found = diagnosed(tmp_path / "d.parquet", given | {"rollout_log_probs": q})

    assert "sentinel" not in {one.id for one in found.causes}
    assert "wrong_mask" not in {one.id for one in found.causes}


@pytest.mark.parametrize(("column", "cause"), [("host", "group_fault"), ("dataset", None)])
def test_a_machine_that_differs_threefold_is_a_fault_and_a_kind_of_prompt_is_not(tmp_path, column, cause):
    given = columns("healthy")
    groups = ["abcd"[i % 4] for i in range(len(given["step"]))]
    p = [
        q + (3.5 if one == "c" else 1) * (p - q)
        for p, q, one in zip(given["old_log_probs"], given["rollout_log_probs"], groups, strict=True)
    ]
    found = diagnosed(tmp_path / "d.parquet", given | {"old_log_probs": p, column: groups})
    bugs = [one.id for one in found.causes if one.kind == "bug"]

    assert bugs == ([cause] if cause else [])


def test_quantised_weights_are_named_beside_an_exact_fault(tmp_path):
    found = diagnosed(tmp_path / "d.parquet", FAULTS["sentinel, -9999"](columns("quantized")))

    assert [one.id for one in found.causes] == ["sentinel", "quantized_rollout"]


def test_two_causes_are_both_named(tmp_path):
    found = diagnosed(tmp_path / "d.parquet", FAULTS["boundary, last"](columns("stale")))

    assert [one.id for one in found.causes] == ["boundary", "stale"]
    assert [one.kind for one in found.causes] == ["bug", "honest"]


def test_the_diagnosis_does_not_depend_on_how_the_dump_is_cut(tmp_path):
    given = FAULTS["retokenization"](columns("stale"))
    path = write(tmp_path / "d.parquet", given)
    whole = analyze([path], presets=()).diagnosis
    assert analyze([path], presets=(), workers=2, batch_tokens=4000).diagnosis == whole

    pieces = []
    for i in range(3):
        piece = {key: value[i * 171 : (i + 1) * 171] for key, value in given.items()}
        pieces.append(tmp_path / f"{i}.tally.json")
        analyze([write(tmp_path / f"{i}.parquet", piece)], presets=(), tally=pieces[-1])
    assert tallies.summary(tallies.merge(pieces)).diagnosis == whole


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
def test_a_temperature_a_nucleus_and_noise_are_told_apart(tmp_path, fault, cause, noise):
    found = analyze([dump(tmp_path / "d.parquet", fault=fault, noise=noise)], presets=()).diagnosis

    assert (found.verdict == "bug") is (cause is not None)
    assert cause is None or [one.id for one in found.causes if one.kind == "bug"] == [cause]


@pytest.mark.parametrize(("fault", "temperature"), [("raw", 0.7), ("trainer", 0.7)])
def test_the_temperature_is_fitted(tmp_path, fault, temperature):
    first = analyze([dump(tmp_path / "d.parquet", fault=fault, noise=0.02)], presets=()).diagnosis.causes[0]

    said = float(first.statement.split("T ≈ ")[1].split(")")[0])
    assert said == pytest.approx(temperature, abs=0.12)
    assert first.after.approximate
    assert first.after.k3 < analyze([str(tmp_path / "d.parquet")], presets=()).metrics["k3"].value / 2


def test_identical_columns_are_not_called_healthy(tmp_path):
    given = columns("healthy")
    found = diagnosed(tmp_path / "d.parquet", given | {"old_log_probs": given["rollout_log_probs"]})

    assert found.verdict == "cannot_tell"
    assert "same numbers" in found.headline


def test_positive_log_probs_are_a_bug():
    found = analyze([str(ROOT / "tests" / "golden" / "stale.parquet")], presets=()).diagnosis

    assert (found.verdict, found.causes[0].id) == ("bug", "sentinel")
    assert "positive" in found.headline


@pytest.mark.parametrize("many", [1, 63])
def test_a_handful_of_tokens_cannot_tell(tmp_path, many):
    given = {"rollout_log_probs": [[-1.0]] * many, "old_log_probs": [[-1.1]] * many}

    assert diagnosed(tmp_path / "d.parquet", given).verdict == "cannot_tell"


@pytest.mark.parametrize("groups", [8, 20, 128, 100_000])
@pytest.mark.parametrize("looks", [1, 8])
def test_few_groups_and_many_looks_need_more_standard_errors(groups, looks):
    """Beyond it a t of that many groups is as rare as a normal number beyond 5, over all looks together."""
    assert bound(groups, looks) == pytest.approx(
        stats.t.isf(stats.norm.sf(SURE) / looks, groups - 1), rel=0.05
    )


@pytest.mark.parametrize(("shift", "found"), [(0.1, True), (0.0015, False), (-0.1, True)])
def test_the_identity_is_held_against_every_position(shift, found):
    """E[r] is 1 at every position under any honest mismatch; 0.15% is what kernels round."""
    chance = rng()
    delta = chance.normal(0, 0.02, (400, 60)) - 0.02**2 / 2
    delta[:, 0] += shift
    q = -chance.exponential(1, (400, 60))
    starts, position = np.arange(0, 400 * 60 + 1, 60), np.tile(np.arange(60), 400)
    one = laws.positions(Rows(q.ravel(), (q + delta).ravel(), starts, position))

    assert (one is not None) is found
    assert not found or one.said["place"] == "the first token"


def made(chance, many, longest):
    """A sample as one batch leaves it, of random sequences."""
    lengths = chance.integers(1, longest, many)
    values = {"q": chance.normal(size=int(lengths.sum()))}
    values["p"] = values["q"] + 1
    order = np.sort(chance.integers(-(2**62), 2**62, many))
    return Sample(order, lengths, values, {"step": list(range(many))})


@pytest.mark.parametrize(("many", "longest"), [(50, 40), (400, FIRST + LAST), (SEQUENCES, 12)])
def test_merging_samples_is_associative_and_bounded(many, longest):
    chance = rng()
    a, b, c = (made(chance, many, longest) for _ in range(3))
    one, two = a.merge(b).merge(c), a.merge(b.merge(c))

    assert (one.order == two.order).all()
    assert (one.values["q"] == two.values["q"]).all()
    assert one.scalars == two.scalars
    assert one.lengths.sum() == len(one.values["p"]) <= max(TOKENS, one.lengths[0])
    assert len(one.order) <= SEQUENCES
    assert one.full == (len(one.order) < 3 * many)

"""Lists of the likeliest ids of both sides: what is read of them, and what they tell."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from faults import WORDS, Policy, capped, changed, colder
from faults import responses as sampled
from typer.testing import CliRunner

from offpol_diag import DumpWriter
from offpol_diag.analyze import analyze
from offpol_diag.cli import app
from offpol_diag.engine import toplists
from offpol_diag.readers.dump import open_dump

OLD = Policy()
NEW = OLD.moved(0.1)
NAMES = ("rollout_top_ids", "rollout_top_log_probs", "train_top_ids", "train_top_log_probs")


def of(policy, given):
    """Return the log-probs of all ids at each token, [length, WORDS] of each sequence."""
    rows = []
    for ids, group in zip(given["token_ids"], given["group_id"], strict=True):
        groups, seen = np.full(len(ids), group), np.zeros((len(ids), WORDS), bool)
        first = policy.log_probs(groups[:1], 0, None, seen[:1])
        later = policy.log_probs(groups[1:], np.arange(1, len(ids))[:, None], ids[:-1], seen[1:])
        rows.append(np.concatenate([first, later]))
    return rows


def top(log_probs, k):
    """Return the k likeliest ids of each token, and their log-probs."""
    ids = [np.argsort(-one, 1, kind="stable")[:, :k] for one in log_probs]
    return ids, [np.take_along_axis(one, at, 1) for one, at in zip(log_probs, ids, strict=True)]


def listed(given, q, p, k=(8, 12)):
    """Return a dump with the lists of both sides, of whose ids all log-probs are given."""
    lists = dict(zip(NAMES, (*top(q, k[0]), *top(p, k[1])), strict=True))
    return given | {name: [row.ravel() for row in x] for name, x in lists.items()}


@cache
def dump(engine=1.0, trainer=1.0, logged=None, new=False, cap=0.0):
    """Return a dump of an engine and a trainer, each at its temperature, and all log-probs of both sides.

    The engine logs those at the temperature `logged`.
    """
    base = NEW if new else OLD
    scored = colder(trainer, capped(base, cap) if cap else base)
    writes = colder(engine if logged is None else logged, OLD)
    given = sampled(lambda t: colder(engine, OLD), scored, logged=writes)
    return given, of(writes, given), of(scored, given)


def written(path, given):
    names = [name for name in given if name not in ("entropy", "sampled")]
    pq.write_table(pa.table({name: given[name] for name in names}), path)
    return str(path)


def analysed(tmp_path, given):
    return analyze([written(tmp_path / "a.parquet", given)], presets=(), device="cpu", threads=1)


def diagnosed(tmp_path, given):
    return analysed(tmp_path, given).diagnosis


def bugs(found):
    return [one.id for one in found.causes if one.kind == "bug"]


def part(share=4):
    """Return a dump of which one sequence in four is sampled at 0.6, which the trainer does not know of."""
    (cold, q, p), (right, other, score) = dump(0.6), dump()
    some = [i % share == 0 for i in range(len(q))]
    names = ("rollout_log_probs", "old_log_probs", "token_ids")
    given = right | {n: [(cold if at else right)[n][i] for i, at in enumerate(some)] for n in names}
    mixed = [[(x if at else y)[i] for i, at in enumerate(some)] for x, y in ((q, other), (p, score))]
    return listed(given, *mixed)


def likeliest():
    """Return a dump whose rollout column holds the likeliest id's log-prob."""
    given, q, p = dump(new=True)
    return listed(given, q, p) | {"rollout_log_probs": [np.float32(row.max(1)) for row in q]}


def sharded(ids):
    """Return a dump whose trainer has the logits of some ids neither in its softmax nor in its lists."""
    given, q, p = dump()
    lost = [row.copy() for row in p]
    logs = []
    for i, row in enumerate(lost):
        row[:, list(ids)] = -np.inf
        mass = np.log(np.exp(row).sum(1))
        row -= mass[:, None]
        logs.append(np.float32(given["old_log_probs"][i] - mass))
    return listed(given | {"old_log_probs": logs}, q, lost)


def suppressed(ids):
    """Return a dump whose engine never samples some ids."""
    engine = changed(OLD, lambda logits, seen: np.where(np.isin(np.arange(WORDS), ids), -1e9, logits))
    given = sampled(lambda t: engine, OLD)
    lists = of(engine, given)
    return listed(given, [np.where(row < -1e6, -np.inf, row) for row in lists], of(OLD, given))


FAULTS = {
    "a trainer that does not divide": ("trainer_temperature", lambda: listed(*dump(0.7)), 0.7),
    "a trainer that divides twice": ("trainer_temperature", lambda: listed(*dump(0.7, 0.49)), 0.7),
    "an engine that logs raw numbers": ("rollout_raw_logprobs", lambda: listed(*dump(0.7, 0.7, 1.0)), 0.7),
    "a small one": ("trainer_temperature", lambda: listed(*dump(0.96)), 0.96),
    "a part of the responses": ("mixed_temperature", part, 0.6),
    "the likeliest token": ("top1_logged", likeliest, None),
    "a shard of the trainer": ("vocabulary_shard", lambda: sharded(range(30, 40)), None),
    "a shard of the engine": ("vocabulary_shard", lambda: suppressed(range(20)), None),
    "the last ids of the trainer": ("vocabulary_shard", lambda: sharded(range(32, 40)), None),
    "special tokens that the engine suppresses": ("truncated_sampling", lambda: suppressed([38, 39]), None),
    "an id that the engine suppresses": ("truncated_sampling", lambda: suppressed([7]), None),
}
HONEST = {
    "the same weights": lambda: listed(*dump()),
    "other weights": lambda: listed(*dump(new=True)),
    "a temperature on both sides": lambda: listed(*dump(0.6, 0.6)),
    "a soft cap": lambda: listed(*dump(cap=5.0)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_named_and_nothing_else(tmp_path, name):
    cause, make, temperature = FAULTS[name]
    found = diagnosed(tmp_path, make())
    assert bugs(found) == [cause]
    if temperature:
        said = found.causes[0].statement.partition("T ≈ ")[2]
        assert float(said.split()[0].strip("),.")) == pytest.approx(temperature, rel=0.01)
    if cause in ("top1_logged", "trainer_temperature", "rollout_raw_logprobs"):
        assert found.causes[0].after.k3 < (0.02 if cause == "top1_logged" else 1e-4)


@pytest.mark.parametrize("name", HONEST)
def test_a_look_alike_is_no_bug(tmp_path, name):
    assert bugs(diagnosed(tmp_path, HONEST[name]())) == []


def test_lists_of_another_distribution_than_the_column_tell_no_temperature(tmp_path):
    """vLLM lists raw log-probs by default; here the columns are of one temperature, and the lists of two."""
    given, _, p = dump(0.7, 0.7)
    raw = of(OLD, given)
    assert bugs(diagnosed(tmp_path, listed(given, raw, p))) == []


def test_the_likeliest_token_is_right_where_it_is_the_sampled_one(tmp_path):
    given, q, p = dump(0.2, 0.2)
    found = diagnosed(tmp_path, listed(given, q, p))
    assert "top1_logged" not in bugs(found)


# ---------------------------------------------------------------- what is computed


def test_the_partial_kl_is_a_lower_bound_of_the_kl_and_close_to_it(tmp_path):
    given, q, p = dump(new=True)
    found = analysed(tmp_path, listed(given, q, p))
    for one, (a, b) in ((found.diagnosis.kl_listed, (q, p)), (found.diagnosis.kl_listed_reverse, (p, q))):
        whole = np.concatenate([(np.exp(x) * (x - y)).sum(1) for x, y in zip(a, b, strict=True)]).mean()
        assert 0.7 * whole < one.value <= whole
        assert one.interval[0] < one.value < one.interval[1]


def test_lists_as_long_as_the_vocabulary_give_the_kl_itself(tmp_path):
    given, q, p = dump(new=True)
    found = diagnosed(tmp_path, listed(given, q, p, (WORDS, WORDS)))
    whole = np.concatenate([(np.exp(x) * (x - y)).sum(1) for x, y in zip(q, p, strict=True)]).mean()
    assert found.kl_listed.value == pytest.approx(whole, rel=1e-4)


def test_what_is_kept_of_lists_is_what_single_tokens_give():
    rng = np.random.default_rng(0)
    lists = [np.array([rng.choice(12, k, replace=False) for _ in range(50)]) for k in (5, 7)]
    q, p = (toplists.Lists(ids, np.float32(-rng.exponential(3, ids.shape))) for ids in lists)
    q.log_probs[3, 2] = -np.inf
    q.ids[4, 0], q.log_probs[4, 0] = q.ids[4, 1], q.log_probs[4, 1]  # the sampled one comes twice
    sampled_ids = rng.integers(0, 12, 50)
    found = dict(zip(toplists.COLUMNS, toplists.reduced(q, p, sampled_ids).T, strict=True))
    for t in range(50):
        one, two = (dict(zip(x.ids[t].tolist(), x.log_probs[t].tolist(), strict=True)) for x in (q, p))
        shared = [i for i in one.keys() & two.keys() if np.isfinite(one[i])]
        x, y = (np.array([side[i] for i in shared]) for side in (one, two))
        assert found["shared"][t] == len(shared)
        assert found["top_q"][t] == max(one.values())
        assert found["last_p"][t] == max(two)
        assert one[int(found["top_id_q"][t])] == max(one.values())
        assert found["listed_p"][t] == pytest.approx(two.get(int(sampled_ids[t]), np.nan), nan_ok=True)
        if shared:
            assert found["square_q"][t] == pytest.approx(np.square(x - x.mean()).sum(), abs=1e-9)
            assert found["product"][t] == pytest.approx(((x - x.mean()) * (y - y.mean())).sum(), abs=1e-9)
            assert found["mean_p"][t] == pytest.approx(y.mean())
            head = x >= x.mean()
            assert found["head_p"][t] == pytest.approx(np.square(y[head] - y[head].mean()).sum(), abs=1e-9)
        end = sorted(z for z in one.values() if np.isfinite(z))[1]
        lacks = [i for i in two.keys() - one.keys() if two[i] > end + toplists.CLEARLY]
        best = max(lacks, key=two.__getitem__, default=None)
        assert found["lacks_q"][t] == pytest.approx(np.nan if best is None else best, nan_ok=True)


def test_one_side_alone_has_no_comparison():
    ids = np.array([[1, 2]])
    found = toplists.reduced(toplists.Lists(ids, np.array([[-1.0, -2.0]])), None, None)[0]
    kept = dict(zip(toplists.COLUMNS, found, strict=True))
    assert {name for name, value in kept.items() if np.isfinite(value)} == {"top_q", "top_id_q", "last_q"}


# ---------------------------------------------------------------- reading and writing

LENGTHS, LOGS = (3, 1, 0), [[-1.0, -2.0, -0.5], [-0.25], []]
GIVEN = {
    "rollout_top_ids": [np.arange(6).reshape(3, 2), np.array([[4, 5]]), np.zeros((0, 2), int)],
    "rollout_top_log_probs": [
        -np.arange(1.0, 7).reshape(3, 2),
        np.array([[-1.0, -np.inf]]),
        np.zeros((0, 2)),
    ],
}


def padded(x):
    return np.pad(x, ((0, 3 - len(x)), (0, 0)))


def tops(path):
    return next(open_dump([str(path)]).batches()).tops


@pytest.mark.parametrize("form", ["arrays", "lists", "padded", "torch"])
def test_the_writer_takes_lists_in_any_form(tmp_path, form):
    more = {}
    given = {name: [*map(np.ndarray.tolist, x)] if form == "lists" else x for name, x in GIVEN.items()}
    logs = LOGS
    if form in ("padded", "torch"):
        logs = np.array([np.pad(x, (0, 3 - len(x))) for x in LOGS])
        given = {
            n: np.array([np.pad(x, ((0, 3 - len(x)), (0, 0))) for x in rows]) for n, rows in GIVEN.items()
        }
        more = {"response_mask": np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]])}
    if form == "torch":
        given = {name: torch.tensor(x) for name, x in given.items()}
    with DumpWriter(tmp_path / "a.parquet") as out:
        out.write(rollout_log_probs=logs, old_log_probs=logs, **given, **more)
    table = pq.read_table(tmp_path / "a.parquet")
    assert table["rollout_top_ids"].to_pylist() == [[0, 1, 2, 3, 4, 5], [4, 5], []]
    assert table["rollout_top_log_probs"].to_pylist()[1] == [-1.0, -np.inf]
    column = toplists.COLUMNS.index("top_q")
    assert tops(tmp_path / "a.parquet")[:, column].tolist() == [-1.0, -3.0, -5.0, -1.0]


def test_masked_tokens_and_rows_with_another_k_are_read(tmp_path):
    given = {"rollout_log_probs": LOGS[:2], "old_log_probs": LOGS[:2], "response_mask": [[1, 0, 1], [1]]}
    given |= {"rollout_top_ids": [[1, 2, -1, -1, 3, 4], [5, 6, 7]]}
    given |= {"rollout_top_log_probs": [[-1.0, -2.0, 9.0, np.nan, -3.0, -4.0], [-9.0, -8.0, -7.0]]}
    found = tops(written(tmp_path / "a.parquet", given))
    at = [toplists.COLUMNS.index(name) for name in ("top_q", "top_id_q")]
    assert found[:, at].tolist() == [[-1, 1], [-3, 3], [-7, 7]]


def test_a_dump_without_lists_has_none(tmp_path):
    given = {"rollout_log_probs": LOGS, "old_log_probs": LOGS}
    assert tops(written(tmp_path / "a.parquet", given)) is None


ROW = {"rollout_top_ids": [1, 2, 3, 4, 5, 6], "rollout_top_log_probs": [-1.0, -2.0] * 3}
BAD = {
    "no multiple": ({"rollout_top_ids": [1, 2, 3, 4]}, "holds 4 values for 3 tokens"),
    "none": ({name: [] for name in ROW}, "holds 0 values for 3 tokens"),
    "too many": ({name: [x[0]] * 195 for name, x in ROW.items()}, "holds 195 values for 3 tokens"),
    "more ids": ({"rollout_top_log_probs": [-1.0] * 3}, "more or fewer values than rollout_top_ids"),
    "no number": ({"rollout_top_log_probs": [-1.0, np.nan] * 3}, "value 1 is nan"),
    "positive": ({"rollout_top_log_probs": [-1.0, 0.5] * 3}, "value 1 is 0.5, and a log-probability"),
    "an id below 0": ({"rollout_top_ids": [1, 2, 3, 4, -5, 6]}, "value 4 is -5, and an id"),
    "null": ({"rollout_top_ids": None}, "there is null where a list belongs"),
    "ids alone": ({"rollout_top_log_probs": ...}, "without 'rollout_top_log_probs'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_lists_are_an_error_with_a_hint(tmp_path, name):
    change, said = BAD[name]
    row = {n: x for n, x in (ROW | change).items() if x is not ...}
    given = {"rollout_log_probs": LOGS[:1], "old_log_probs": LOGS[:1]} | {n: [x] for n, x in row.items()}
    if row["rollout_top_ids"] is None:
        given["rollout_top_ids"] = pa.array([None], pa.list_(pa.int32()))
    ran = CliRunner().invoke(app, ["doctor", written(tmp_path / "a.parquet", given)])
    text = " ".join(ran.output.split())
    assert ran.exit_code == 2
    assert "error: " in text
    assert "hint: " in text
    assert said in text


@pytest.mark.parametrize(
    "change",
    [
        {"rollout_top_log_probs": None},
        {"rollout_top_ids": [np.arange(4).reshape(2, 2), *GIVEN["rollout_top_ids"][1:]]},
        {"rollout_top_ids": [np.arange(9).reshape(3, 3), *GIVEN["rollout_top_ids"][1:]]},
        {"rollout_top_ids": [np.zeros((3, 65), int), *GIVEN["rollout_top_ids"][1:]]},
        {"rollout_top_ids": GIVEN["rollout_top_ids"][:2]},
        {"rollout_top_ids": [x * 0.5 for x in GIVEN["rollout_top_ids"]]},
        {"rollout_top_ids": np.zeros((3, 3, 2), int)},
    ],
    ids=["one alone", "tokens", "k", "too many", "sequences", "no ids", "no mask"],
)
def test_the_writer_refuses_lists_that_do_not_fit(tmp_path, change):
    out = DumpWriter(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="rollout_top_"):
        out.write(rollout_log_probs=LOGS, old_log_probs=LOGS, **(GIVEN | change))
    out.discard()


@pytest.mark.parametrize(("log_prob", "lacks"), [(-1.0, 2.0), (-2.0, math.nan)])
def test_an_id_is_lacking_where_it_is_two_nats_likelier_than_what_the_list_ends_with(log_prob, lacks):
    """The likelihoods near a list's end differ between two engines, and so do the ids that are cut."""
    q = toplists.Lists(np.array([[1, 2, 3]]), np.array([[-0.5, log_prob, -3.0]]))
    p = toplists.Lists(np.array([[1, 3, 4]]), np.array([[-0.6, -3.2, -4.0]]))
    found = toplists.reduced(q, p, None)[0, toplists.COLUMNS.index("lacks_p")]
    assert found == lacks or (math.isnan(found) and math.isnan(lacks))

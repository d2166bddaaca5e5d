"""What trainers write by themselves, and JSON lines: the rows that come back, and one error for a mistake."""

import gzip
import json
import os
import pickle
from functools import partial

import pytest
import torch

from tests.factory import converted, unconvertible
from tests.forms import MADE, nemo_rl, prime_rl, ranks, saved, skyrl, slime, slime_rollout
from tests.reading import opened

# ---------------------------------------------------------------- what comes back


def edited(make, change, file=""):
    """Return a maker of a file (or one of a folder's) whose bytes, records or object are changed."""

    def made(folder):
        path = make(folder) / file if file else make(folder)
        if change in (cut, misspelt):
            path.write_bytes(change(path.read_bytes()))
            return path
        jsonl = path.suffix == ".jsonl"
        value = [*map(json.loads, path.read_text().splitlines())] if jsonl else torch.load(path)
        change(value)
        return saved(path, value)

    return made


def cut(data):
    return data[:-50]


def misspelt(data):
    return data.replace(b"loss_mask", b"loss_musk")


def count_first(rows):
    for one in rows:
        one["token_loss_mask"][0][0] = 1


def beside(make):
    """Return a maker of a file with slime's rollouts beside it."""
    return lambda folder: [slime_rollout(folder), make(folder)][1]


TOKENS = "rollout_log_probs old_log_probs response_mask token_ids advantages "
NEMO = TOKENS + "prompt_ids group_id rewards"
PRIME = NEMO + " entropy current_log_probs env_name"
SLIME = TOKENS + "prompt_ids entropy"
BESIDE = SLIME + " rewards group_id rollout_version finish_reason"
LEFT_OUT = "1 sequences without a token that counts are left out"
RANKS = "read as miles, slime up to 0.3.1 (ranks)"
TRIPS = {  # maker, columns that come back, what names a sequence, what is noted
    "nemo-rl": (nemo_rl, NEMO, "7/{i}", LEFT_OUT),
    "nemo-rl, placeholder in the mask": (edited(nemo_rl, count_first), NEMO, "7/{i}", "NeMo-RL (nemo-rl)"),
    "prime-rl": (prime_rl, PRIME, "12/{rank}/{at}", "prime-rl (prime-rl)"),
    "slime": (slime, SLIME + " rewards", "13/4{i}", "read as slime (slime)"),
    "slime beside rollouts": (beside(slime), BESIDE, "13/4{i}", "read as slime (slime)"),
    "slime, ranks": (partial(ranks, miles=False), SLIME, "13/4{i}", RANKS),
    "miles": (beside(ranks), BESIDE, "13/4{i}", RANKS),
    "miles, context 2": (beside(partial(ranks, context=2)), BESIDE, "13/4{i}", RANKS),
    "miles, context 2, padded": (beside(partial(ranks, context=2, padded=True)), BESIDE, "13/4{i}", RANKS),
    "miles, context 4": (beside(partial(ranks, context=4)), BESIDE, "13/4{i}", RANKS),
    "miles, context 4, padded": (beside(partial(ranks, context=4, padded=True)), BESIDE, "13/4{i}", RANKS),
    "skyrl": (skyrl, TOKENS + "group_id", "6/{i}", "SkyRL (skyrl)"),
}


@pytest.mark.parametrize("name", TRIPS)
def test_what_a_trainer_wrote_comes_back(name, tmp_path):
    make, columns, called, note = TRIPS[name]
    rows, notes = converted(make(tmp_path))
    groups = dict[object, int]()
    for i, one in enumerate(MADE):
        wanted = {"token_ids": one.ids.tolist(), "prompt_ids": one.prompt.tolist(), "rewards": one.reward}
        wanted |= {"rollout_log_probs": one.rollout.tolist(), "response_mask": one.mask.tolist()}
        wanted |= dict.fromkeys(("old_log_probs", "current_log_probs"), one.old.tolist())
        wanted |= {"advantages": [one.advantage] * len(one.ids), "entropy": [0.5] * len(one.ids)}
        wanted |= {
            "env_name": "math" if i < 4 else "code",
            "rollout_version": 11,
            "finish_reason": "completed",
        }
        found = [row for row in rows if row["sequence_id"] == called.format(i=i, rank=i % 2, at=i // 2)]
        if name.startswith("nemo") and i == 5:
            assert found == [], "it has no loss"
            continue
        assert found[0]["step"] == int(called.partition("/")[0])
        shared = wanted.keys() & {*columns.split()}
        assert {x: found[0][x] for x in shared} == {x: wanted[x] for x in shared}
        if "group_id" in columns:
            assert groups.setdefault(found[0]["group_id"], i // 2) == i // 2
    assert len(groups) == 4 * ("group_id" in columns)
    assert any(note in one for one in notes), notes


def test_a_token_that_skyrl_appended_and_nobody_sampled_is_masked(tmp_path):
    rows, _ = converted(skyrl(tmp_path, appended=True))
    assert [row["response_mask"] for row in rows] == [[*one.mask[:-1].tolist(), 0] for one in MADE]


def test_steps_of_prime_rl_that_are_not_stable_are_left_out(tmp_path):
    prime_rl(tmp_path, step=2)
    prime_rl(tmp_path, step=10, stable=False)
    assert {row["step"] for row in converted(tmp_path)[0]} == {2}


LOGS = {"logprobs": [-1.0], "old_logprobs": [-1.0]}


def test_json_lines_are_read_in_the_order_of_the_numbers_in_their_names(tmp_path):
    """A number may be written 1 or 1.0."""
    for at, more in ((10, {"step": 4.0}), (9, {"step": None, "host": "a", "prompt": "p" * 99})):
        saved(tmp_path / f"step_{at}.jsonl", [LOGS | more])
    found, _ = converted(tmp_path)
    assert [(one["step"], one["host"]) for one in found] == [(None, "a"), (4, None)]
    assert "prompt" not in found[0], "long texts are no labels"
    info = opened(tmp_path).info
    assert (info.columns["rollout_log_probs"], len(info.files)) == ("logprobs", 2)


def test_a_row_group_of_what_is_converted_has_half_a_million_tokens(tmp_path):
    saved(tmp_path / "a.jsonl", [{"logprobs": [-1.0] * 9000, "old_logprobs": [-1.0] * 9000}] * 100)
    dump = opened(tmp_path / "a.jsonl")
    assert [group.rows for _, group in dump.groups] == [59, 41]


# ---------------------------------------------------------------- mistakes


class Calls:
    """An object whose pickle calls a function."""

    def __reduce__(self):
        return os.system, ("touch called",)


def raw(name, data):
    """Return a maker of a file of some bytes."""

    def made(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
        return folder / name

    return made


def jsonl(*rows):
    return lambda folder: saved(folder / "a.jsonl", rows)


def some_ranks(folder):
    """Leave out one part of the context of one group, in each stage."""
    path = ranks(folder, 2)
    for rank in (0, 1, 8, 9):
        (path / f"13_{rank}.pt").unlink()
    return path


def skip_prev(rows):
    """Make log-probs of a pass that was skipped."""
    for one in rows:
        one["prev_logprobs"] = [[0.0] * len(one["prev_logprobs"][0])]


def sample(at, **change):
    return edited(slime, lambda dump: dump["samples"][at].update(change))


def line(at, **change):
    return edited(nemo_rl, lambda rows: rows[at].update(change))


BLANKS = 400 * gzip.compress(b" " * ((1 << 20) - 1) + b"\n")
HOOK = "docs/trainers/{}.md has a hook"
MISTAKES = [
    # JSON lines
    (jsonl(LOGS, [1]), "line 2: not as a writer of JSON lines writes it (list, no JSON object"),
    (raw("a.jsonl", b"hello"), "line 1: not as a writer of JSON lines writes it"),
    (raw("a.jsonl", b"{" + b'"a":{' * 100_000), "line 1: not as a writer of JSON lines"),
    (raw("a.jsonl.gz", BLANKS), "unfolds to more than 100 times"),
    (jsonl({"logprobs": [], "old_logps": []}), "no sequence that counts is in it"),
    (jsonl({"a": 1}), "line 1: no column holds rollout_log_probs, and none old_log_probs or current_log"),
    (jsonl(LOGS | {"logprobs": ["a"]}), "(logprobs is no list of num"),
    (jsonl(LOGS | {"old_logprobs": [-1.0, -2.0]}), "old_log_probs, sequence 0: 2 tokens"),
    (jsonl(LOGS | {"rollout_logps": [-1.0]}), "can each be the rollout"),
    (jsonl(LOGS | {"step": float("inf")}), "step is not one plain value per sequence"),
    # log-probs of one policy
    (jsonl({"input": "a", "output": "b", "score": 1.0}), HOOK.format("verl")),
    (jsonl({"prompt": ["a"], "completion": ["b"]}), HOOK.format("trl")),
    (edited(nemo_rl, skip_prev), HOOK.format("nemo-rl")),
    (edited(slime, lambda dump: dump["samples"][0].pop("log_probs")), HOOK.format("slime")),
    (raw("rollout_data/13.pt", b""), "docs/trainers.md a hook for each trainer"),
    # what trainers write, damaged
    (edited(nemo_rl, cut), "line 8: not as NeMo-RL writes it"),
    (edited(nemo_rl, misspelt), "line 1: not as NeMo-RL writes it (no field 'token_loss_mask')"),
    (line(2, prev_logprobs=[["a"]]), "line 3: not as NeMo-RL writes it (prev_logprobs is no list"),
    (line(2, token_ids=[[None] * 20]), "token_ids does not fit int32"),
    (edited(prime_rl, cut, "rank_0.jsonl"), "line 4: not as prime-rl writes it"),
    (partial(prime_rl, stable=False), "no file STABLE, so its ranks may still be writing"),
    (edited(slime, cut), "13.pt: not as slime writes it ("),
    (sample(3, response_lengths=10**6), "sample 43: not as slime writes it"),
    (sample(1, log_probs=torch.zeros(3)), "(3 log_probs, and rank 0 of 1 has 24"),
    (sample(1, log_probs=torch.zeros(1).expand(1 << 40)), "(1099511627776 log_probs, and rank 0 of 1"),
    (edited(slime, lambda dump: dump.update(samples=Calls())), "13.pt: not as slime writes it (Weights only"),
    (some_ranks, "context-parallel ranks are missing"),
    (partial(ranks, context=2, miles=False), "and rank 0 of 1 has"),
    (edited(skyrl, cut), "not as SkyRL writes it (pickle data was truncated"),
    (edited(skyrl, misspelt), "no field 'loss_mask'"),
    (raw("x_training_input.pkl", pickle.dumps({"batch_dict": Calls()})), "not as SkyRL writes it"),
]


@pytest.mark.parametrize(("make", "says"), MISTAKES, ids=[says for _, says in MISTAKES])
def test_a_mistake_is_one_error_with_a_hint_and_no_code_of_a_pickle_runs(make, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unconvertible(make(tmp_path), says)
    assert not (tmp_path / "called").exists()

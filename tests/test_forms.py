"""What trainers write by themselves, and JSON lines: the rows that come back, and one error for a mistake."""

import gzip
import json
import os
import pickle
import re
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.dump.convert import open_dump
from tests.factory import converted, read, refusal, unconvertible, write
from tests.forms import MADE, lines, nemo_rl, prime_rl, ranks, saved, skyrl, slime, slime_rollout

LOGS = {"logprobs": [-1.0], "old_logprobs": [-1.0]}

# ---------------------------------------------------------------- what comes back


def edited(make, change, file=""):
    """Return a maker of a file (or one of a folder's) whose records, or whose object, are changed."""

    def made(folder):
        path = make(folder) / file if file else make(folder)
        torchs = path.suffix == ".pt"
        value = torch.load(path) if torchs else [*map(json.loads, path.read_text().splitlines())]
        change(value)
        return saved(path, value) if torchs else lines(path, value)

    return made


def beside(make):
    """Return a maker of a file with slime's rollouts beside it."""
    return lambda folder: [slime_rollout(folder), make(folder)][1]


def count_first(rows):
    for one in rows:
        one["token_loss_mask"][0][0] = 1


TOKENS = "rollout_log_probs old_log_probs response_mask token_ids advantages "
NEMO = TOKENS + "prompt_ids group_id rewards"
PRIME = NEMO + " entropy current_log_probs env_name"
SLIME = TOKENS + "prompt_ids rewards entropy"
BESIDE = SLIME + " group_id rollout_version finish_reason"
LEFT_OUT = "1 sequences without a token that counts are left out"
TRIPS = {  # maker, columns that come back, what names a sequence, what is noted
    "nemo-rl": (nemo_rl, NEMO, "7/{i}", LEFT_OUT),
    "nemo-rl, placeholder in the mask": (edited(nemo_rl, count_first), NEMO, "7/{i}", "NeMo-RL (nemo-rl)"),
    "prime-rl": (prime_rl, PRIME, "12/{rank}/{at}", "prime-rl (prime-rl)"),
    "slime": (slime, SLIME, "13/4{i}", "read as slime (slime)"),
    "slime beside rollouts": (beside(slime), BESIDE, "13/4{i}", "read as slime (slime)"),
    "slime, ranks": (
        partial(ranks, miles=False),
        SLIME.replace("rewards ", ""),  # they are normalised
        *("13/4{i}", "read as miles, slime up to 0.3.1 (ranks)"),
    ),
    **{
        f"miles, context {context}, {padded=}": (
            beside(partial(ranks, context=context, padded=padded)),
            *(BESIDE, "13/4{i}", "read as miles, slime up to 0.3.1 (ranks)"),
        )
        for context in (1, 2, 4)
        for padded in (False, True)
    },
    "skyrl": (skyrl, TOKENS + "group_id", "6/{i}", "SkyRL (skyrl)"),
}


@pytest.mark.parametrize("name", TRIPS)
def test_what_a_trainer_wrote_comes_back(name, tmp_path):
    make, columns, called, note = TRIPS[name]
    rows, notes = converted(make(tmp_path))
    groups = dict[object, int]()
    for i, one in enumerate(MADE):
        n = len(one.ids)
        wanted = {
            "rollout_log_probs": one.rollout.tolist(),
            "old_log_probs": one.old.tolist(),
            "current_log_probs": one.old.tolist(),
            "response_mask": one.mask.tolist(),
            "token_ids": one.ids.tolist(),
            "prompt_ids": one.prompt.tolist(),
            "advantages": [one.advantage] * n,
            "entropy": [0.5] * n,
            "rewards": one.reward,
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


def test_json_lines_are_read_in_the_order_of_numbers_and_labels_of_several_kinds_are_text(tmp_path):
    """A number may be written 1 or 1.0; what a later table has is stored as the first one is."""
    for at, more in ((10, {"step": 4.0, "host": 7}), (9, {"step": None, "host": "a", "prompt": "p" * 99})):
        lines(tmp_path / f"step_{at}.jsonl", [LOGS | {"finish_reason": {"type": "stop"}} | more])
    found, notes = converted(tmp_path)
    assert [(one["step"], one["host"]) for one in found] == [(None, "a"), (4, "7")]
    assert {one["finish_reason"] for one in found} == {"stop"}, "as SGLang says it"
    assert "prompt" not in found[0], "long texts are no labels"
    assert "read as jsonl" in notes[0]


def test_a_folder_is_read_as_the_best_form_that_is_in_it(tmp_path):
    lines(tmp_path / "b.jsonl", [LOGS])
    path = write(tmp_path / "a.parquet")
    assert read(str(tmp_path)).sequences == 4
    said = f"the files are of several forms: {path} is parquet; {tmp_path / 'b.jsonl'} is jsonl"
    assert refusal(str(tmp_path / "*")).message == said


def test_a_dump_of_many_rows_has_row_groups(tmp_path):
    lines(tmp_path / "a.jsonl", [{"logprobs": [-1.0] * 9000, "old_logprobs": [-1.0] * 9000}] * 100)
    to = tmp_path / "a.parquet"
    assert CliRunner().invoke(app, ["convert", str(tmp_path / "a.jsonl"), "--to", str(to)]).exit_code == 0
    assert (pq.read_metadata(to).num_rows, pq.read_metadata(to).num_row_groups) == (100, 2)


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
    return lambda folder: lines(folder / "a.jsonl", rows)


def bytes_of(make, change):
    """Return a maker of a file whose bytes are changed."""

    def made(folder):
        path = make(folder)
        path.write_bytes(change(path.read_bytes()))
        return path

    return made


def some_ranks(folder):
    """Leave out one part of the context of one group, in each stage."""
    path = ranks(folder, 2)
    for rank in (0, 1, 8, 9):
        (path / f"13_{rank}.pt").unlink()
    return path


def zero_old(rows):
    for one in rows:
        one["prev_logprobs"] = [[0.0] * len(one["prev_logprobs"][0])]


def prime_rank(folder):
    return prime_rl(folder) / "rank_0.jsonl"


def sample(at, **change):
    return edited(slime, lambda dump: dump["samples"][at].update(change))


def cut(data):
    return data[:-50]


BLANKS = 400 * gzip.compress(b" " * ((1 << 20) - 1) + b"\n")
HOOK = "docs/trainers/{}.md has a hook"
MISTAKES = [
    # JSON lines
    (jsonl(LOGS, [1]), "line 2: not as a writer of JSON lines writes it (list, no JSON object"),
    (raw("a.jsonl", b"hello"), "line 1: not as a writer of JSON lines writes it"),
    (raw("a.jsonl", b"{" + b'"a":{' * 100_000), "line 1: not as a writer of JSON lines"),
    (raw("a.jsonl.gz", BLANKS), "unfolds to more than 100 times"),
    (jsonl(), "no sequence that counts is in it"),
    (jsonl({"logprobs": [], "old_logps": []}), "no sequence that counts is in it"),
    (jsonl({"a": 1}), "line 1: no column holds rollout_log_probs, and none old_log_probs or current_log"),
    (jsonl({"logprobs": [-1.0]}), "line 1: no column holds old_log_probs or current_log_probs"),
    (jsonl(LOGS | {"logprobs": ["a"]}), "(logprobs is no list of num"),
    (jsonl(LOGS | {"old_logprobs": [-1.0, -2.0]}), "old_log_probs, sequence 0: 2 tokens"),
    (jsonl(LOGS | {"rollout_logps": [-1.0]}), "can each be the rollout"),
    (jsonl(LOGS | {"step": float("inf")}), "step is not one plain value per sequence"),
    # log-probs of one policy
    (jsonl({"input": "a", "output": "b", "score": 1.0}), HOOK.format("verl")),
    (jsonl({"prompt": ["a"], "completion": ["b"]}), HOOK.format("trl")),
    (edited(nemo_rl, zero_old), HOOK.format("nemo-rl")),
    (edited(slime, lambda dump: dump["samples"][0].pop("log_probs")), HOOK.format("slime")),
    (raw("rollout_data/13.pt", b""), "docs/trainers.md has a hook for each trainer"),
    # what trainers write, damaged
    (bytes_of(nemo_rl, cut), "line 8: not as NeMo-RL writes it"),
    (
        edited(nemo_rl, lambda rows: rows[2].pop("input_lengths")),
        "line 3: not as NeMo-RL writes it (no field",
    ),
    (edited(nemo_rl, lambda rows: rows[2].update(prev_logprobs=[["a"]])), "(prev_logprobs is no list"),
    (edited(nemo_rl, lambda rows: rows[2].update(token_ids=[[None] * 20])), "token_ids does not fit int32"),
    (bytes_of(prime_rank, cut), "line 4: not as prime-rl writes it"),
    (partial(prime_rl, stable=False), "no file STABLE, so its ranks may still be writing"),
    (
        edited(slime, lambda dump: dump["samples"][3].pop("loss_masks")),
        "sample 43: not as slime writes it (no",
    ),
    (sample(2, response_lengths=10**6), "sample 42: not as slime writes it"),
    (sample(1, log_probs=torch.zeros(3)), "(3 log_probs, and rank 0 of 1 has 27"),
    (sample(1, log_probs=torch.zeros(1).expand(1 << 40)), "log_probs repeats the numbers of a smaller"),
    (edited(slime, lambda dump: dump.update(samples=Calls())), "13.pt: not as slime writes it (Weights only"),
    (bytes_of(slime, cut), "13.pt: not as slime writes it ("),
    (some_ranks, "context-parallel ranks are missing"),
    (partial(ranks, context=2, miles=False), "and rank 0 of 1 has"),
    (bytes_of(skyrl, cut), "not as SkyRL writes it (pickle data was truncated"),
    (bytes_of(skyrl, lambda data: data.replace(b"loss_mask", b"loss_musk")), "no field 'loss_mask'"),
    (raw("x_training_input.pkl", pickle.dumps({"batch_dict": Calls()})), "not as SkyRL writes it"),
]


@pytest.mark.parametrize(("make", "says"), MISTAKES, ids=[says for _, says in MISTAKES])
def test_a_mistake_is_one_error_with_a_hint_and_no_code_of_a_pickle_runs(make, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unconvertible(make(tmp_path), says)
    assert not (tmp_path / "called").exists()


def test_an_error_about_a_converted_dump_names_the_file(tmp_path):
    source = str(lines(tmp_path / "a.jsonl", [LOGS]))
    columns = {"rollout_log_probs": "logprobs", "old_log_probs": "old_logprobs"}
    assert open_dump([source]).info.columns == columns
    assert refusal(source, group_by=["no"]).message == f"{source}: --group-by: there is no column 'no'"
    assert re.match(f"{source}, line 1: --columns: there is", refusal(source, columns={"old": "no"}).message)


def test_a_dump_replaces_no_directory_no_device_and_nothing_that_is_read(tmp_path):
    """A pipe stands for /dev/null, which a rename by root would make a file."""
    source, folder, pipe = lines(tmp_path / "a.jsonl", [LOGS]), tmp_path / "there", tmp_path / "pipe"
    folder.mkdir()
    os.mkfifo(pipe)
    for to, says in (folder, "directory"), (pipe, "device"), (source, "is what is read"):
        ran = CliRunner().invoke(app, ["convert", str(source), "--to", str(to)])
        assert (ran.exit_code, says in ran.stderr) == (2, True), ran.stderr
    assert [folder.is_dir(), pipe.is_fifo(), Path(source).is_file()] == [True] * 3
    assert len([*tmp_path.iterdir()]) == 3

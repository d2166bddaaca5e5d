"""DumpWriter: whole files of each step and rank, and what it refuses."""

import signal
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from offpol_diag import DumpWriter
from offpol_diag.dump import writer as module
from tests.factory import read
from tests.reading import opened

MASK = np.array([[1, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 1, 1, 0]])
ONE = {"rollout_log_probs": [[-1.0, -2.0]], "old_log_probs": [[-1.0, -2.0]]}


def padded(seed):
    return -np.random.default_rng(seed).random((3, 5)).astype(np.float32)


def ragged(values):
    return [row[:n] for row, n in zip(values, (3, 1, 4), strict=True)]


def written(folder, *batches, **how):
    with DumpWriter(folder, **how) as writer:
        for batch in batches:
            writer.write(**batch)
    return pq.read_table(folder)


TOKENS = {"rollout_log_probs": padded(0), "old_log_probs": padded(1), "current_log_probs": padded(2)}
TOKENS |= {"token_ids": np.arange(15).reshape(3, 5), "entropy": -padded(3)}
SCALARS = {"advantages": [0.5, -1.0, 2.0], "rewards": [1.0, 0.0, 1.0], "prompt_ids": [[1, 2], [3], []]}
SCALARS |= {"sequence_id": ["a", "b", "c"], "group_id": [7, 7, 8], "step": [4, 4, 4], "policy_lag": [0, 1, 2]}
SCALARS |= {"engine": ["vllm"] * 3}
GIVEN = {**TOKENS, **SCALARS, "response_mask": MASK.astype(bool), "step": 4, "engine": "vllm"}
GIVEN |= {"policy_lag": torch.tensor([0, 1, 2]), "group_id": np.array([7, 7, 8]), "rewards": [1, 0, 1]}


def test_every_column_comes_back_and_padding_is_trimmed(tmp_path):
    found = written(tmp_path / "d", GIVEN).to_pydict()
    wanted = {name: [row.tolist() for row in ragged(values)] for name, values in TOKENS.items()}
    assert found == wanted | SCALARS | {"response_mask": [[1, 0, 1], [1], [0, 0, 1, 1]]}
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["step_000004-rank00000-0.parquet"]
    assert read(str(tmp_path / "d")).rollout.tolist() == padded(0)[MASK == 1].tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_padded_and_ragged_tensors_of_every_float_type_make_the_same_table(dtype, tmp_path):
    values, mask = torch.tensor(padded(0)).to(dtype).requires_grad_(), torch.tensor(MASK)
    one = written(tmp_path / "a", dict.fromkeys(ONE, values) | {"response_mask": mask})
    assert one == written(
        tmp_path / "b", dict.fromkeys(ONE, ragged(values)) | {"response_mask": ragged(mask)}
    )


REFUSED = [
    ({"rollout_log_probs": None}, "pass rollout_log_probs, and old_log_probs or current_log_probs"),
    ({"response_mask": None}, "is padded, .*: pass a response_mask"),
    ({"old_log_probs": padded(0)[:, :4]}, r"old_log_probs is padded, \(3, 4\)"),
    ({"old_log_probs": [[-1.0]] * 3}, "old_log_probs, sequence 0: 1 tokens but rollout_log_probs has 3"),
    ({"current_log_probs": -padded(0)}, "row 0, column 'current_log_probs': token 0 is 0"),
    ({"old_log_probs": padded(0).astype(str)}, "old_log_probs holds str"),
    ({"response_mask": MASK / 2}, "response_mask does not fit int8"),
    ({"token_ids": padded(0)}, "token_ids does not fit int32; pass whole numbers"),
    ({"step": 7.5}, "step is not one plain value per sequence: .* 7.5"),
    ({"rewards": ["a", "b", "c"]}, "rewards is not one plain value per sequence: .*'c'"),
]


@pytest.mark.parametrize(("change", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_a_bad_batch_is_refused_and_the_good_ones_stay(tmp_path, change, says):
    with DumpWriter(tmp_path) as writer:
        writer.write(**GIVEN)
        with pytest.raises(ValueError, match=says):
            writer.write(**GIVEN | change)
        writer.write(**GIVEN)
    assert opened(str(tmp_path)).rows == 6


def test_a_file_holds_a_step_of_a_rank_and_provenance(tmp_path):
    for rank in (0, 3):
        steps = [ONE | {"step": step} for step in (1, 1, 1, 2)]
        written(tmp_path, *steps, rank=rank, file_tokens=3, trainer="verl", temperature=0.8)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[:3] == [f"step_000001-rank0000{x}.parquet" for x in ("0-0", "0-1", "3-0")]
    dump = opened(str(tmp_path))
    assert (len(names), dump.rows, dump.provenance["trainer"]) == (6, 8, "verl")
    assert "torch" in dump.provenance["versions"]


def test_a_run_that_is_resumed_replaces_the_steps_that_it_repeats(tmp_path, monkeypatch):
    for _ in range(2):  # in one process parts of a step are added
        assert len(written(tmp_path, ONE | {"step": 1}, file_tokens=2))
    assert opened(str(tmp_path)).rows == 2
    monkeypatch.setattr(module, "_PARTS", {})  # as in another process
    assert len(written(tmp_path, ONE | {"step": 1})) == 1


KILLED = """
import os, signal, sys
from offpol_diag import DumpWriter
writer = DumpWriter(sys.argv[1])
for step in range(4):
    writer.write(rollout_log_probs=[[-1.0] * 9] * 9, old_log_probs=[[-1.0] * 9] * 9, step=step)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_loses_the_step_under_way_and_nothing_else(tmp_path):
    ran = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert ran.returncode == -signal.SIGKILL
    names = [f"step_00000{i}-rank00000-0.parquet" for i in range(3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert opened(str(tmp_path)).rows == 27


def test_what_a_full_disk_did_not_take_is_written_by_the_next_flush(tmp_path, monkeypatch):
    writer = DumpWriter(tmp_path)
    writer.write(**ONE, step=1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(pq.ParquetWriter, "write_table", full)
        with pytest.raises(OSError, match="No space"):
            writer.flush()
    assert list(tmp_path.iterdir()) == []
    assert writer.flush() == tmp_path / "step_000001-rank00000-0.parquet"
    assert writer.flush() is None


def test_an_exception_keeps_what_was_written_and_a_column_is_in_every_batch_of_a_step(tmp_path):
    with pytest.raises(KeyError), DumpWriter(tmp_path) as writer:  # noqa: PT012
        writer.write(**ONE, host="a")
        writer.write(**ONE)
        with pytest.raises(ValueError, match="entropy: one batch of this step has it, another does not"):
            writer.write(**ONE, entropy=[[1.0, 1.0]])
        raise KeyError("a bug of the trainer")
    assert pq.read_table(tmp_path)["host"].to_pylist() == ["a", None]

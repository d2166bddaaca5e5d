"""DumpWriter: whole files of each step and rank, and what it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from offpol_diag import DumpWriter
from offpol_diag.dump import writer as module
from offpol_diag.dump.read import open_dump
from offpol_diag.dump.writer import to_table

LENGTHS = (3, 1, 4)
MASK = np.array([[1, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 1, 1, 0]])


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PARTS", {})


def padded(seed: int) -> np.ndarray[Any, Any]:
    return -np.random.default_rng(seed).random((3, 5)).astype(np.float32)


def ragged(values: Any) -> list[Any]:
    return [row[:n] for row, n in zip(values, LENGTHS, strict=True)]


def spoilt(row: int, token: int, value: float) -> Any:
    """Return a padded column with another value at one token."""
    found = padded(0)
    found[row, token] = value
    return found


def every_column() -> dict[str, Any]:
    return {
        "rollout_log_probs": padded(0),
        "old_log_probs": padded(1),
        "current_log_probs": padded(2),
        "response_mask": MASK.astype(bool),
        "token_ids": np.arange(15).reshape(3, 5),
        "entropy": -padded(3),
        "advantages": [0.5, -1.0, 2.0],
        "rewards": [1, 0, 1],
        "sequence_id": ["a", "b", "c"],
        "group_id": np.array([7, 7, 8]),
        "step": 4,
        "policy_lag": torch.tensor([0, 1, 2]),
        "prompt_ids": [[1, 2], [3], []],
        "engine": "vllm",
    }


def written(folder: Path, *batches: dict[str, Any], **how: Any) -> Any:
    with DumpWriter(folder, **how) as writer:
        for batch in batches:
            writer.write(**batch)
    return pq.read_table(folder)


def test_every_column_comes_back_and_padding_is_trimmed(tmp_path: Path) -> None:
    given = every_column()
    found = written(tmp_path / "d", given).to_pydict()
    assert found.pop("response_mask") == [[1, 0, 1], [1], [0, 0, 1, 1]]
    for name in ("rollout_log_probs", "old_log_probs", "current_log_probs", "token_ids", "entropy"):
        assert found.pop(name) == [row.tolist() for row in ragged(given[name])]
    assert found == {
        "advantages": [0.5, -1.0, 2.0],
        "rewards": [1.0, 0.0, 1.0],
        "sequence_id": ["a", "b", "c"],
        "group_id": [7, 7, 8],
        "step": [4, 4, 4],
        "policy_lag": [0, 1, 2],
        "prompt_ids": [[1, 2], [3], []],
        "engine": ["vllm"] * 3,
    }
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["step_000004-rank00000-0.parquet"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_padded_and_ragged_tensors_of_every_float_type_make_the_same_table(dtype: torch.dtype) -> None:
    values = torch.tensor(padded(0)).to(dtype)
    one = to_table(
        {"rollout_log_probs": values, "old_log_probs": values, "response_mask": torch.tensor(MASK)}
    )
    logs = [row[:n] for row, n in zip(values, LENGTHS, strict=True)]
    masks = [torch.tensor(row) for row in ragged(MASK)]
    assert one == to_table({"rollout_log_probs": logs, "old_log_probs": logs, "response_mask": masks})


REFUSED = [
    ({"rollout_log_probs": None}, "pass rollout_log_probs, and old_log_probs or current_log_probs"),
    ({"response_mask": None}, "is padded, .*: pass a response_mask"),
    ({"old_log_probs": padded(0)[:, :4]}, r"old_log_probs is padded, \(3, 4\)"),
    ({"old_log_probs": ragged(padded(0))[:2]}, "old_log_probs expected length 3 but got length 2"),
    ({"old_log_probs": [[-1.0]] * 3}, "old_log_probs, sequence 0: 1 tokens but rollout_log_probs has 3"),
    ({"old_log_probs": spoilt(2, 3, np.nan)}, "row 2, column 'old_log_probs': token 3 is nan"),
    ({"rollout_log_probs": np.exp(padded(0))}, "row 0, column 'rollout_log_probs': .* is at most 0"),
    ({"current_log_probs": spoilt(1, 0, 0.5)}, "row 1, column 'current_log_probs': token 0 is 0.5"),
    ({"old_log_probs": padded(0).astype(str)}, "old_log_probs holds str"),
    ({"response_mask": MASK * 2}, "row 0, column 'response_mask': token 0 is 2, and a mask is 0 or 1"),
    ({"response_mask": MASK / 2}, "response_mask does not fit int8"),
    ({"token_ids": padded(0)}, "token_ids does not fit int32; pass whole numbers"),
    ({"group_id": {"a": 1}}, "group_id is not one plain value per sequence"),
    ({"step": 7.5}, "step is not one plain value per sequence: .* 7.5"),
    ({"rewards": ["a", "b", "c"]}, "rewards is not one plain value per sequence: .*'c'"),
    ({"rewards": [1.0, np.nan, 0.0]}, "row 1, column 'rewards': it is nan, and a finite number is needed"),
    ({"values": padded(0)}, "values is not one plain value per sequence"),
    ({"prompt_ids": np.zeros((3, 2), int)}, "prompt_ids is padded"),
]


@pytest.mark.parametrize(("change", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_a_bad_batch_is_refused_and_the_good_ones_stay(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    writer = DumpWriter(tmp_path / "d")
    writer.write(**every_column())
    with pytest.raises(ValueError, match=says):
        writer.write(**every_column() | change)
    writer.write(**every_column())
    writer.flush()
    assert open_dump([str(tmp_path / "d")]).rows == 6


def test_a_file_holds_a_step_of_a_rank_and_provenance(tmp_path: Path) -> None:
    columns = {"rollout_log_probs": [[-1.0, -2.0]], "old_log_probs": [[-1.0, -2.0]]}
    for rank in (0, 3):
        with DumpWriter(tmp_path, rank=rank, file_tokens=3, trainer="verl", temperature=0.8) as writer:
            for step in (1, 1, 1, 2):
                writer.write(**columns, step=step)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[:3] == [f"step_000001-rank0000{x}.parquet" for x in ("0-0", "0-1", "3-0")]
    assert len(names) == 6
    dump = open_dump([str(tmp_path)])
    assert dump.rows == 8
    assert dump.info.provenance["trainer"] == "verl"
    assert "torch" in dump.info.provenance["versions"]


def test_a_run_that_is_resumed_replaces_the_steps_that_it_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {"rollout_log_probs": [[-1.0, -2.0]], "old_log_probs": [[-1.0, -2.0]], "step": 1}
    for _ in range(2):
        with DumpWriter(tmp_path, file_tokens=2) as writer:  # in one process parts of a step are added
            writer.write(**columns)
    assert open_dump([str(tmp_path)]).rows == 2
    monkeypatch.setattr(module, "_PARTS", {})  # as in another process
    with DumpWriter(tmp_path) as writer:
        writer.write(**columns)
    assert open_dump([str(tmp_path)]).rows == 1


KILLED = """
import os, signal, sys
from offpol_diag import DumpWriter
writer = DumpWriter(sys.argv[1])
for step in range(4):
    writer.write(rollout_log_probs=[[-1.0] * 9] * 9, old_log_probs=[[-1.0] * 9] * 9, step=step)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_loses_the_step_under_way_and_nothing_else(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert ran.returncode == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step_00000{i}-rank00000-0.parquet" for i in range(3)
    ]
    assert open_dump([str(tmp_path)]).rows == 27


def test_what_a_full_disk_did_not_take_is_written_by_the_next_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = DumpWriter(tmp_path)
    writer.write(rollout_log_probs=[[-1.0]], old_log_probs=[[-1.0]], step=1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(pq.ParquetWriter, "write_table", full)
        with pytest.raises(OSError, match="No space"):
            writer.flush()
    assert list(tmp_path.iterdir()) == []
    assert writer.flush() == tmp_path / "step_000001-rank00000-0.parquet"
    assert writer.flush() is None


def test_an_exception_keeps_what_was_written_and_a_column_is_in_every_batch_of_a_step(tmp_path: Path) -> None:
    with pytest.raises(KeyError), DumpWriter(tmp_path) as writer:  # noqa: PT012
        writer.write(rollout_log_probs=[[-1.0]], old_log_probs=[[-1.0]], host="a")
        writer.write(rollout_log_probs=[[-1.0]], old_log_probs=[[-1.0]])
        with pytest.raises(ValueError, match="entropy: a batch has it, and another one of this step has not"):
            writer.write(rollout_log_probs=[[-1.0]], old_log_probs=[[-1.0]], entropy=[[1.0]])
        raise KeyError("a bug of the trainer")
    assert pq.read_table(tmp_path)["host"].to_pylist() == ["a", None]


def test_bad_settings_are_errors_before_anything_is_sampled(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, how, says in (
        ("file", {}, "File exists"),
        ("d", {"logprobs": "odd"}, "choose raw or processed"),
        ("d", {"model": object()}, "not JSON serializable"),
    ):
        with pytest.raises((OSError, ValueError, TypeError), match=says):
            DumpWriter(tmp_path / folder, **how)  # type: ignore[arg-type]


def test_the_writer_imports_numpy_and_pyarrow_only() -> None:
    heavy = "{'torch', 'polars', 'pydantic'}"
    code = f"import sys, offpol_diag; offpol_diag.DumpWriter; print({heavy} & {{*sys.modules}})"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, check=True
    )
    assert said.stdout == "set()\n"

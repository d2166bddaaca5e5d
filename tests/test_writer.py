"""DumpWriter: what is given comes back, whatever becomes of the process, and bad input is said."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from offpol_diag import writer as module
from offpol_diag.errors import DumpError
from offpol_diag.journal import recover
from offpol_diag.readers import open_dump
from offpol_diag.writer import DumpWriter
from tests.factory import refusal

LENGTHS = (3, 1, 4)
MASK = np.array([[1, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 1, 1, 0]])


def padded(seed: int) -> np.ndarray[Any, Any]:
    return -np.random.default_rng(seed).random((3, 5)).astype(np.float32)


def ragged(values: Any) -> list[Any]:
    return [row[:n] for row, n in zip(values, LENGTHS, strict=True)]


def dump(path: Path, *batches: dict[str, Any], **options: Any) -> pa.Table:
    with DumpWriter(path, **options) as writer:
        for batch in batches:
            writer.write(**batch)
    return pq.read_table(path)


def both(rows: Any, **more: Any) -> dict[str, Any]:
    """Make the same log-probs of both policies, and further columns."""
    return {"rollout_log_probs": rows, "old_log_probs": rows, **more}


def spoilt(row: int, token: int, value: float) -> Any:
    """Return a padded column with another value at one token."""
    found = padded(0).copy()
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
        "engine": "vllm",
        "turns": (1, 2, 3),
    }


def test_every_column_comes_back_and_padding_is_trimmed(tmp_path: Path) -> None:
    given = every_column()
    found = dump(tmp_path / "d", given).to_pydict()
    lists = [name for name in list(given)[:6] if name != "response_mask"]
    assert found.pop("response_mask") == [[1, 0, 1], [1], [0, 0, 1, 1]]
    for name in lists:
        assert found.pop(name) == [row.tolist() for row in ragged(given[name])]
    assert found == {
        "advantages": [0.5, -1.0, 2.0],
        "rewards": [1.0, 0.0, 1.0],
        "sequence_id": ["a", "b", "c"],
        "group_id": [7, 7, 8],
        "step": [4, 4, 4],
        "policy_lag": [0, 1, 2],
        "engine": ["vllm"] * 3,
        "turns": [1, 2, 3],
    }
    mask = MASK * np.array([[1], [0], [1]])
    assert dump(tmp_path / "e", given | {"response_mask": mask})["old_log_probs"].to_pylist()[1] == []


def test_padded_and_ragged_make_the_same_file(tmp_path: Path) -> None:
    columns = both(padded(0), entropy=-padded(2), response_mask=MASK, advantages=padded(3))
    dump(tmp_path / "padded", columns)
    dump(tmp_path / "ragged", {name: ragged(values) for name, values in columns.items()})
    assert (tmp_path / "padded").read_bytes() == (tmp_path / "ragged").read_bytes()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", None])
def test_floats_are_stored_as_asked_or_in_32_bits(tmp_path: Path, dtype: Any) -> None:
    values = padded(0).astype(np.float64) / 3
    table = dump(tmp_path / "d", both(ragged(values)), **({"dtype": dtype} if dtype else {}))
    dtype = np.dtype(dtype or "float32")
    assert table.schema.field("rollout_log_probs").type.value_type == pa.from_numpy_dtype(dtype)
    assert table["old_log_probs"].to_pylist() == [row.astype(dtype).tolist() for row in ragged(values)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_tensors_of_every_float_type_are_taken(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.tensor(padded(0)).to(dtype).requires_grad_()
    table = dump(tmp_path / "d", both(values, response_mask=torch.tensor(MASK)), dtype="float64")
    assert table["old_log_probs"].to_pylist() == [row.tolist() for row in ragged(values.detach().double())]


def test_large_token_ids_are_exact(tmp_path: Path) -> None:
    ids = [torch.tensor([2**24 + 1, 151_643])]
    assert dump(tmp_path / "d", both([[-1, -2]], token_ids=ids))["token_ids"].to_pylist() == [ids[0].tolist()]


def test_float_lists_are_byte_split_without_a_dictionary(tmp_path: Path) -> None:
    dump(tmp_path / "d", every_column())
    group = pq.ParquetFile(tmp_path / "d").metadata.row_group(0)
    encodings = {group.column(i).path_in_schema: group.column(i).encodings for i in range(group.num_columns)}
    assert "BYTE_STREAM_SPLIT" in encodings["old_log_probs.list.element"]
    assert "RLE_DICTIONARY" not in encodings["old_log_probs.list.element"]
    assert "RLE_DICTIONARY" in encodings["token_ids.list.element"]


def test_row_groups_hold_the_tokens_asked_for_however_batches_are_cut(tmp_path: Path) -> None:
    rows = [np.full(n, -float(n)) for n in (5, 5, 1, 1, 1, 20, 2)]
    whole, single = [both(rows)], [both([row]) for row in rows]
    for name, batches in (("whole", whole), ("single", single)):
        dump(tmp_path / name, *batches, row_group_tokens=10)
    read = [pq.ParquetFile(tmp_path / name) for name in ("whole", "single")]
    sizes = [[f.metadata.row_group(i).num_rows for i in range(f.num_row_groups)] for f in read]
    assert sizes == [[2, 4, 1]] * 2
    assert read[0].read().equals(read[1].read())


def stated(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(pq.read_schema(path).metadata[b"offpol_diag"])
    return found


def test_provenance_comes_back_with_versions_and_the_format(tmp_path: Path) -> None:
    given = {"temperature": 0.7, "trainer": "verl", "engine": "vLLM", "top_p": 0.9, "logprobs": "processed"}
    dump(tmp_path / "d", every_column(), provenance={"stop": ["\n"]}, **given)
    found = stated(tmp_path / "d")
    assert found.pop("versions")["torch"] == metadata.version("torch")
    assert found == {**given, "stop": ["\n"], "format": 1}


def test_a_label_that_is_nan_is_null_and_a_number_stays(tmp_path: Path) -> None:
    nan = float("nan")
    more = {"rewards": [nan, 1.0, 0.5], "step": [1.0, nan, 2.0], "host": np.array([nan, 3.0, nan])}
    dump(tmp_path / "d", every_column() | more)
    found = pq.read_table(tmp_path / "d").select(list(more)).to_pydict()
    assert (found["step"], found["host"]) == ([1, None, 2], [None, 3.0, None])
    assert math.isnan(found["rewards"][0])


def test_versions_can_be_given_or_left_out(tmp_path: Path) -> None:
    for versions in ({"vllm": "0.11"}, {}):
        dump(tmp_path / "a", every_column(), provenance={"versions": versions})
        assert stated(tmp_path / "a") == {"format": 1} | ({"versions": versions} if versions else {})


def test_each_rank_has_a_file_and_all_are_read_together(tmp_path: Path) -> None:
    for rank in (0, 1, 11):
        writer = DumpWriter(tmp_path / "step_1.parquet", rank=rank, trainer="verl")
        writer.write(**{**every_column(), "sequence_id": [f"{rank}-{i}" for i in range(3)]})
        writer.close()
        assert writer.path == tmp_path / f"step_1-rank{rank:05}.parquet"
    for source in (str(tmp_path), str(tmp_path / "step_1-rank*.parquet")):
        opened = open_dump([source])
        assert sum(batch.sequences for batch in opened.batches()) == 9
        assert opened.info.provenance["rank"] == [0, 1, 11]


def test_threads_share_a_writer(tmp_path: Path) -> None:
    with DumpWriter(tmp_path / "d", row_group_tokens=50) as writer:

        def write(thread: int) -> None:
            for i in range(40):
                rows = [np.full(i % 7 + 1, -float(thread))]
                writer.write(**both(rows, sequence_id=[f"{thread}-{i}"]))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(4)))
    found = pq.read_table(tmp_path / "d").to_pydict()
    rows = dict(zip(found["sequence_id"], found["old_log_probs"], strict=True))
    assert rows == {f"{t}-{i}": [-float(t)] * (i % 7 + 1) for t in range(4) for i in range(40)}


KILLED = """
import os, signal, sys
from offpol_diag import DumpWriter

writer = DumpWriter("d.parquet", row_group_tokens=10, trainer="verl")
for i in range(7):
    rows = [[-1.0 - i] * 4, [-2.0] * 3]
    writer.write(rollout_log_probs=rows, old_log_probs=rows, sequence_id=[f"{i}a", f"{i}b"])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the journal of a writer that was killed."""
    folder = tmp_path_factory.mktemp("killed")
    run = subprocess.run([sys.executable, "-c", KILLED], cwd=folder, check=False)
    assert run.returncode == -9
    assert not (folder / "d.parquet").exists()
    (journal,) = folder.glob(".*.journal")
    return journal


def copied(journal: Path, to: Path) -> Path:
    return Path(shutil.copy(journal, to))


def names(path: Path) -> list[str]:
    found: list[str] = pq.read_table(path)["sequence_id"].to_pylist()
    return found


def test_rows_of_a_killed_writer_are_recovered_once(journal: Path, tmp_path: Path) -> None:
    copied(journal, tmp_path)
    with pytest.raises(DumpError):  # hidden files are no dump
        open_dump([str(tmp_path)])
    recover(tmp_path / "d.parquet")
    assert [p.name for p in tmp_path.iterdir()] == ["d.parquet"]
    assert names(tmp_path / "d.parquet") == [f"{i}{half}" for i in range(7) for half in "ab"]
    assert stated(tmp_path / "d.parquet")["trainer"] == "verl"
    assert pq.read_table(tmp_path / "d.parquet")["old_log_probs"].to_pylist()[-2] == [-7.0] * 4


def test_a_journal_of_another_name_is_recovered_and_what_lies_beside_it_stays(
    journal: Path, tmp_path: Path
) -> None:
    shutil.copy(journal, tmp_path / "run.journal")
    (tmp_path / "run.tmp").write_text("mine")
    recover(tmp_path / "run.journal", tmp_path / "d.parquet")
    assert (tmp_path / "run.tmp").read_text() == "mine"


def test_row_groups_have_their_size_also_where_a_column_comes_late(tmp_path: Path) -> None:
    """The file is then made anew, of the journal."""
    rows = both([[-1.0] * 10] * 300)
    with DumpWriter(tmp_path / "d.parquet", row_group_tokens=1000) as dump:
        dump.write(**rows)
        dump.write(**rows, host="a")
    meta = pq.ParquetFile(tmp_path / "d.parquet").metadata
    assert [meta.row_group(i).num_rows for i in range(meta.num_row_groups)] == [100] * 6


def test_a_journal_torn_anywhere_gives_its_whole_batches(journal: Path, tmp_path: Path) -> None:
    whole, counts = journal.read_bytes(), []
    torn, target = tmp_path / ".torn.journal", tmp_path / "torn.parquet"
    for end in range(0, len(whole), 61):
        torn.write_bytes(whole[:end])
        with suppress(ValueError):
            recover(torn, target)
        found = names(target) if target.exists() else []
        assert found == [f"{i}{half}" for i in range(len(found) // 2) for half in "ab"]
        counts.append(len(found))
        target.unlink(missing_ok=True)
    assert counts == sorted(counts)
    assert set(counts) >= {0, 2, 4, 6, 8, 10, 12}


def test_recovery_refuses_what_would_lose_or_double(journal: Path, tmp_path: Path) -> None:
    target = tmp_path / "d.parquet"
    with pytest.raises(ValueError, match="nothing to recover"):
        recover(target)
    first = copied(journal, tmp_path)
    with pytest.raises(ValueError, match="how its dump is called"):
        recover(first)
    target.write_text("another")
    with pytest.raises(ValueError, match="exists"):
        recover(target)
    target.unlink()
    (tmp_path / first.name.replace(first.name[-16:-8], "0123abcd")).write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match="2 journals"):
        recover(target)
    assert recover(first, target) == target


def test_a_journal_whose_writer_lives_is_left_alone(tmp_path: Path) -> None:
    with DumpWriter(tmp_path / "d") as writer:
        writer.write(**every_column())
        with pytest.raises(ValueError, match="still at work"):
            recover(tmp_path / "d")


def test_without_a_journal_nothing_else_is_written(tmp_path: Path) -> None:
    with DumpWriter(tmp_path / "d", journal=False) as writer:
        writer.write(**every_column())
        assert not list(tmp_path.iterdir())


def interrupted(path: Path) -> None:
    with DumpWriter(path, row_group_tokens=1) as writer:
        writer.write(**every_column())
        assert list(path.parent.iterdir())
        raise KeyboardInterrupt


def test_the_name_appears_with_the_whole_file_and_an_exception_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "d"
    with pytest.raises(KeyboardInterrupt):
        interrupted(path)
    assert not list(tmp_path.iterdir())
    with DumpWriter(path, row_group_tokens=1) as writer:
        writer.write(**every_column())
        assert not path.exists()
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt):
        interrupted(path)
    assert path.read_text() == "before"


def test_a_bad_batch_is_refused_and_the_good_ones_stay(tmp_path: Path) -> None:
    with DumpWriter(tmp_path / "d") as writer:
        writer.write(**every_column())
        with pytest.raises(ValueError, match="batch 1"):
            writer.write(**{**every_column(), "rewards": [1.0]})
        writer.write(**every_column())
    assert pq.read_table(tmp_path / "d").num_rows == 6


def test_an_empty_batch_is_passed_over(tmp_path: Path) -> None:
    assert dump(tmp_path / "d", both([]), both([[-1.0]]), both([])).num_rows == 1


def test_closing_twice_does_nothing(tmp_path: Path) -> None:
    writer = DumpWriter(tmp_path / "d")
    writer.write(**every_column())
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.write(**every_column())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout_log_probs": None}, "rollout_log_probs is missing"),
        ({"old_log_probs": None, "current_log_probs": None}, "both missing"),
        ({"response_mask": None}, "pass response_mask"),
        ({"old_log_probs": padded(0)[:, :4]}, r"old_log_probs is \(3, 4\) but response_mask is \(3, 5\)"),
        ({"old_log_probs": [[-1.0] * 3, [-1.0] * 2, [-1.0] * 4]}, "old_log_probs, sequence 1: 2 tokens"),
        ({"old_log_probs": [[-1.0] * 3]}, "old_log_probs has 1 sequences"),
        ({"old_log_probs": padded(0)[0]}, "pass .S, L. or S arrays"),
        ({"old_log_probs": -1.0}, "not iterable"),
        ({"old_log_probs": np.full((3, 5), "x")}, "old_log_probs cannot be stored as float32"),
        ({"response_mask": MASK * 2}, "besides 0 and 1"),
        ({"token_ids": np.full((3, 5), 2**40)}, "token_ids does not fit int32"),
        ({"token_ids": np.full((3, 5), 0.5)}, "token_ids does not fit int32"),
        ({"weight_versions": [[1], [1], [1]]}, "weight_versions, sequence 0: 1 tokens but rollout_log_probs"),
        ({"weight_versions": MASK * -2}, "sequence 0: token 0 is of version -2, and a version is at least 0"),
        (
            {"weight_versions": np.where(MASK == 1, [9, 0, 8, 0, 0], 10)},
            "weight_versions, sequence 0: token 2 is of version 8, and the tokens before it are of a later",
        ),
        ({"weight_versions": [[[1, 5]], [[0, 5]], [[0, 5]]]}, "sequence 0: its first run begins at token 1"),
        ({"weight_versions": [[[0, 5], [3, 6]], [[0, 5]], [[0, 5]]]}, "a run covers tokens 3 to 3 of 3"),
        ({"weight_versions": [[[0, 5], [0, 6]], [[0, 5]], [[0, 5]]]}, "each after the one before it"),
        ({"weight_versions": [[[0, 5, 1]], [[0, 5]], [[0, 5]]]}, r"a pair \[start, version\] is needed"),
        ({"weight_versions": [[[0, "x"]], [[0, 5]], [[0, 5]]]}, "'x', and integers are needed"),
        ({"weight_versions": [[{"begin": 0}], [[0, 5]], [[0, 5]]]}, "start and version are needed"),
        ({"weight_versions": MASK + 0.5}, "weight_versions does not fit int64"),
        ({"prompt_length": [3, -1, 2]}, "prompt_length is not one plain value per sequence: -1 is no length"),
        ({"prompt_length": [3, 1.5, 2]}, "1.5 is no whole number"),
        ({"finish_reason": 7}, "finish_reason is not one plain value per sequence: it holds int; pass text"),
        ({"weight_digest_rollout": "a"}, "weight_digest_rollout is there without weight_digest_train"),
        (
            {"weight_digest_rollout": ["a", None, "a"], "weight_digest_train": "a"},
            "weight_digest_rollout, sequence 1: it is None, and the other is not",
        ),
        ({"group_id": [1, 2]}, "group_id: 2 values for 3 sequences"),
        ({"engine": [1, "a", 2]}, "engine is not one plain value per sequence"),
        ({"policy_lag": ["a", "b", "c"]}, "policy_lag is not one plain value"),
        ({"step": 10**30}, "step is not one plain value per sequence: Python int too large"),
        ({"step": [1, 7.5, 2]}, "step is not one plain value per sequence: 7.5 is no whole number"),
        ({"step": True}, "True is no whole number"),
        ({"step": float("inf")}, "inf is no whole number"),
        ({"step": "7"}, "step is not one plain value per sequence"),
        ({"policy_lag": torch.tensor([0.5, 1.0, 2.0])}, "0.5 is no whole number"),
        ({"group_id": [[1], [2], [3]]}, "group_id is not one plain value per sequence: list"),
        ({"group_id": [{"a": 1}] * 3}, "group_id is not one plain value per sequence: struct"),
        ({"group_id": {"a": 1}}, "group_id is not one plain value per sequence: struct"),
        ({"group_id": {1, 2, 3}}, "group_id is not one plain value per sequence"),
        ({"group_id": [torch.tensor([1, 2])] * 3}, "group_id is not one plain value per sequence"),
        ({"group_id": 2**64}, "group_id is not one plain value per sequence: Python int too large"),
        ({"group_id": [1.0, True, 2.0]}, "it mixes bool, float"),
        ({"engine": ["a", b"b", "c"]}, "it mixes bytes, str"),
        ({"rewards": ["1", "2", "3"]}, "rewards is not one plain value per sequence"),
        ({"advantages": ["1", "2", "3"]}, "advantages is not one plain value per sequence"),
        ({"values": padded(0)}, "values has 2 dimensions; only these are per token: rollout_log_probs"),
        ({"values": torch.zeros(3, 1)}, "values has 2 dimensions"),
        ({"values": ragged(padded(0))}, "values is not one plain value per sequence"),
        ({"values": [[1.0], [2.0], [3.0]]}, "values is not one plain value per sequence: list"),
        ({"old_log_probs": padded(0) > -0.5}, "old_log_probs cannot be stored as float32: it holds bool"),
        ({"old_log_probs": padded(0) * 1j}, "old_log_probs cannot be stored as float32: it holds complex64"),
        ({"old_log_probs": np.ma.array(padded(0), mask=MASK == 0)}, "masked or null values"),
        ({"response_mask": np.ma.array(MASK, mask=MASK == 0)}, "response_mask .* masked or null values"),
        ({"response_mask": MASK.astype(str)}, "response_mask cannot be stored as int8: it holds text"),
        ({"response_mask": MASK / 2}, "response_mask does not fit int8"),
        ({"response_mask": np.where(MASK, np.nan, 0)}, "response_mask does not fit int8"),
        ({"token_ids": MASK > 0}, "token_ids cannot be stored as int32: it holds bool"),
        ({"token_ids": np.full((3, 5), None)}, "token_ids cannot be stored as int32: it holds None"),
        ({"old_log_probs": spoilt(2, 3, np.nan)}, "old_log_probs, sequence 2, token 3: nan is not finite"),
        ({"entropy": spoilt(0, 0, np.inf)}, "entropy, sequence 0, token 0: inf is not finite"),
        ({"advantages": spoilt(0, 2, -np.inf)}, "advantages, sequence 0, token 2: -inf is not finite"),
        (
            {"rollout_log_probs": np.exp(padded(0))},
            "sequence 0, token 0: .* is above 0, which no log-prob is",
        ),
        ({"current_log_probs": spoilt(1, 0, 0.5)}, "current_log_probs, sequence 1, token 0: 0.5 is above 0"),
    ],
)
def test_bad_input_says_what_is_wrong(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dump(tmp_path / "d", {**every_column(), **change})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("row", "odd"),
    [
        (["-1.0", -2.0], "text"),
        ([-1.0, None], "None"),
        (np.array([-1.0, None]), "None"),
        ([-1.0, True], "bool"),
        ([np.True_, np.False_], "bool"),
        ([-1.0, 1j], "complex128"),
        ([-1.0, np.ma.masked], "None"),
        (np.ma.array([-1.0, -2.0], mask=[False, True]), None),
        (pa.array([-1.0, None]), None),
        (polars.Series([-1.0, None]), None),
        ([10**400, -1.0], "integers beyond 64 bits"),
        (np.array([1, 2], "datetime64[s]"), r"datetime64\[s\]"),
    ],
)
@pytest.mark.parametrize("name", ["rollout_log_probs", "old_log_probs", "entropy", "advantages"])
def test_what_is_no_number_is_refused_among_numbers(tmp_path: Path, name: str, row: Any, odd: Any) -> None:
    """NumPy and Arrow would make it one, or leave the mask behind."""
    rows = [[-1.0], [-1.0, -2.0]]
    message = f"it holds {odd}; pass a number" if odd else "masked or null values"
    with pytest.raises(ValueError, match=f"{name}, sequence 1, cannot be stored as float32: {message}"):
        dump(tmp_path / "d", both(rows) | {name: [[-1.0], row]})
    assert not list(tmp_path.iterdir())


def test_masked_arrays_without_a_masked_value_and_masked_labels_are_kept(tmp_path: Path) -> None:
    rows = [np.ma.array([-1.0, -2.0]), np.ma.array([-3.0])]
    more = {name: np.ma.array([1, 2], mask=[False, True]) for name in ("step", "rewards", "turns")}
    found = dump(tmp_path / "d", both(rows, **more)).to_pydict()
    assert found["old_log_probs"] == [[-1.0, -2.0], [-3.0]]
    assert [found[name] for name in more] == [[1, None]] * 3


def test_tensors_without_dimensions_are_taken_with_their_gradients(tmp_path: Path) -> None:
    def scalars(values: Any, dtype: torch.dtype) -> list[Any]:
        return [torch.tensor(v, dtype=dtype).requires_grad_() for v in values]

    rows = [scalars([-1.0, -2.0], torch.float32), [torch.tensor(-0.5, dtype=torch.bfloat16), -0.25]]
    more = {"rewards": scalars([1, 0], torch.float64), "turns": scalars([1.5, 2], torch.float32)}
    found = dump(tmp_path / "d", both(rows, advantages=[r[::-1] for r in rows], **more)).to_pydict()
    assert found["old_log_probs"] == [[-1.0, -2.0], [-0.5, -0.25]]
    assert found["advantages"] == [[-2.0, -1.0], [-0.25, -0.5]]
    assert (found["rewards"], found["turns"]) == ([1.0, 0.0], [1.5, 2.0])


LARGE = 2**63 + 5


@pytest.mark.parametrize(
    "make", [list, lambda v: np.array(v, np.uint64), lambda v: [np.uint64(x) for x in v]]
)
@pytest.mark.parametrize("first", [0, 1])
def test_unsigned_ids_of_64_bits_come_back_and_are_read(tmp_path: Path, make: Any, first: int) -> None:
    """Whichever batch the large ones are in, and however small the row groups are."""
    pair = [[[LARGE, 3], [1, 2]], [[1, 2], [LARGE, 3]]][first]
    batches = [both([[-1.0], [-2.0]], sequence_id=make(ids), group_id=make(ids)) for ids in pair]
    found = dump(tmp_path / "d", *batches, row_group_tokens=1)
    for name in ("sequence_id", "group_id"):
        assert (str(found[name].type), found[name].to_pylist()) == ("uint64", pair[0] + pair[1])
    assert sum(batch.sequences for batch in open_dump([str(tmp_path / "d")]).batches()) == 4


def test_unsigned_tensors_are_taken(tmp_path: Path) -> None:
    ids = torch.tensor([2**64 - 1, 0], dtype=torch.uint64)
    assert dump(tmp_path / "d", both([[-1.0], [-2.0]], group_id=ids))["group_id"].to_pylist() == [
        2**64 - 1,
        0,
    ]


@pytest.mark.parametrize("ids", [(-1, LARGE), (LARGE, -1)])
def test_ids_that_no_integer_type_holds_together_are_refused(tmp_path: Path, ids: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="batch 1: its types differ"):
        dump(tmp_path / "d", *(both([[-1.0]], group_id=one) for one in ids))


@pytest.mark.parametrize("tokens", [1, 1_000_000])
@pytest.mark.parametrize("absent", [{}, {"host": None}, {"host": [None]}, {"host": float("nan")}])
@pytest.mark.parametrize("order", ["without, with", "with, without", "without, with, without, with"])
def test_a_batch_may_lack_a_label(tmp_path: Path, order: str, absent: dict[str, Any], tokens: int) -> None:
    for name in ("host", "sequence_id", "group_id"):
        more = dict.fromkeys([name] if absent else [], absent.get("host"))
        kinds = [part == "with" for part in order.split(", ")]
        batches = [both([[-1.0]], **({name: "a"} if has else more)) for has in kinds]
        found = dump(tmp_path / "d", *batches, row_group_tokens=tokens)[name].to_pylist()
        assert found == ["a" if has else None for has in kinds]


def test_labels_that_come_late_are_in_what_is_recovered(tmp_path: Path) -> None:
    writer = DumpWriter(tmp_path / "d")
    for more in ({}, {"host": "a"}, {"group_id": 1}, {"group_id": LARGE}):
        writer.write(**both([[-1.0]], **more))
    (journal,) = tmp_path.glob(".*.journal")
    found = pq.read_table(recover(copied(journal, tmp_path / ".j.journal"), tmp_path / "e")).to_pydict()
    assert (found["host"], found["group_id"]) == ([None, "a", None, None], [None, None, 1, LARGE])
    writer.discard()


def test_without_a_journal_a_label_may_come_until_a_row_group_is_written(tmp_path: Path) -> None:
    batches = both([[-1.0]]), both([[-1.0]], host="a")
    assert dump(tmp_path / "d", *batches, journal=False)["host"].to_pylist() == [None, "a"]
    with DumpWriter(tmp_path / "d", journal=False, row_group_tokens=1) as writer:
        writer.write(**batches[0])
        with pytest.raises(ValueError, match="batch 1: host: row groups that are in the file already"):
            writer.write(**batches[1])
    assert pq.read_table(tmp_path / "d").num_rows == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [("a", 7), (7, "8"), (7, True), (True, 7), (7, 7.5), (2**53 + 1, 0.5), (0.5, 2**53 + 1)],
)
def test_no_value_is_changed_to_suit_the_first_batch(tmp_path: Path, first: Any, second: Any) -> None:
    """Arrow casts text to numbers and back."""
    with pytest.raises(ValueError, match="batch 1: its types differ"):
        dump(tmp_path / "d", *(both([[-1.0]], label=one) for one in (first, second)))


def test_whole_numbers_suit_a_column_of_either_type(tmp_path: Path) -> None:
    first, *rest = ([1, 2.0, 3], [0.5, 2, 3])
    for values in (first, *rest):
        found = dump(tmp_path / "d", *(both([[-1.0]], turns=v, advantages=v) for v in values)).to_pydict()
        assert (found["turns"], found["advantages"]) == (values, values)


def test_bytes_are_one_value(tmp_path: Path) -> None:
    assert dump(tmp_path / "d", both([[-1.0], [-2.0]], host=b"ab"))["host"].to_pylist() == [b"ab"] * 2


def test_times_stay_times(tmp_path: Path) -> None:
    times = np.array(["2026-01-02", "2026-01-03"], "datetime64[ns]")
    found = dump(tmp_path / "d", both([[-1.0], [-2.0]], at=times, day=times[0].astype("datetime64[D]")))
    assert [str(found[name].type) for name in ("at", "day")] == ["timestamp[ns]", "date32[day]"]
    assert found["at"].to_numpy().tolist() == times.tolist()


def test_more_tokens_than_a_list_can_number_are_refused() -> None:
    tokens = {"rollout_log_probs": module.Ragged(np.empty(0), np.full(8, 2**28))}
    with pytest.raises(ValueError, match="2147483648 tokens in a batch; write at most 2147483647 at once"):
        module._agree(tokens)


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    batch = {"rollout_log_probs": [[-1.0]], "old_log_probs": [[-1e6]]}
    with pytest.raises(ValueError, match="old_log_probs cannot be stored as float16"):
        dump(tmp_path / "d", batch, dtype="float16")


def test_a_later_batch_has_the_columns_and_types_of_the_first(tmp_path: Path) -> None:
    batch = both([[-1.0]], turns=1)
    for change, message in (({"step": 1}, "step: not in every batch"), ({"turns": 1.5}, "types differ")):
        with pytest.raises(ValueError, match=message):
            dump(tmp_path / "d", batch, {**batch, **change})


def test_writing_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no sequence was written"), DumpWriter(tmp_path / "d"):
        pass


def test_a_bad_setting_is_an_error_before_anything_is_sampled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose one of float16, float32, float64"):
        DumpWriter(tmp_path / "d", dtype="bfloat16")
    with pytest.raises(ValueError, match="choose raw or processed"):
        DumpWriter(tmp_path / "d", logprobs="scaled")


def test_the_writer_imports_numpy_and_pyarrow_only() -> None:
    heavy = {"torch", "polars", "pydantic", "typer", "jinja2", "rich", "tenacity", "pandas", "fsspec"}
    code = f"""
import sys
from offpol_diag import DumpWriter, recover
DumpWriter("no.parquet", trainer="verl")
print(", ".join({heavy!r} & sys.modules.keys()))
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout == "\n"


def test_a_flipped_bit_in_the_values_is_found_when_the_dump_is_read(tmp_path: Path) -> None:
    path = tmp_path / "dump.parquet"
    dump(path, both([np.linspace(-3.0, -0.01, 500)] * 8))
    whole = bytearray(path.read_bytes())
    whole[200] ^= 0x10
    path.write_bytes(whole)
    assert "cannot be read" in refusal(str(path)).message

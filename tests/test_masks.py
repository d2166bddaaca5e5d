"""A dump whose mask nobody names is refused, and honest data that look a little alike are not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from offpol_diag.errors import DumpError
from offpol_diag.forms import open_dump
from offpol_diag.readers import masks
from offpol_diag.readers.dump import Seen
from offpol_diag.readers.masks import Padding, ends, padding
from tests.factory import read, refusal, write

MASK = [[1, 0, 1], [1], [], [0, 1]]
LENGTHS = [len(row) for row in MASK]
NUMBERS = (pa.bool_(), pa.int8(), pa.uint8(), pa.int64(), pa.float16(), pa.float64())
LISTS = (pa.list_, pa.large_list, pa.list_view)


def batch(rows: int = 64, length: int = 48) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """Make log-probs [rows, length] that are padded with zeros, and their mask."""
    chance = np.random.default_rng(rows)
    mask = np.arange(length) < chance.integers(2, length + 1, (rows, 1))
    rollout = np.where(mask, -chance.exponential(1, mask.shape) - 0.01, 0.0)
    old = np.where(mask, rollout * chance.uniform(0.9, 1.1, mask.shape), 0.0)
    return {"rollout_log_probs": rollout, "old_log_probs": old}, mask


def listed(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: list(values) for name, values in columns.items()}


def exploded(columns: dict[str, Any]) -> dict[str, Any]:
    """Make a row of each token."""
    rows, length = columns["rollout_log_probs"].shape
    flat = {name: values.reshape(-1) for name, values in columns.items()}
    return flat | {"sequence_id": np.repeat(np.arange(rows), length)}


# ---------------------------------------------------------------- a column that looks like a mask


@pytest.mark.parametrize("kind", LISTS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_a_list_of_0_and_1_per_token_that_nobody_reads_is_an_error_that_names_it(tmp_path, kind, dtype):
    values = [[bool(one) if dtype == pa.bool_() else one for one in row] for row in MASK]
    path = write(
        tmp_path / "a.parquet",
        is_tool=pa.array(values, kind(dtype)),
    )
    error = refusal(path)
    assert "column 'is_tool' holds only 0 and 1, one for each token as a mask does" in error.message
    assert "--columns mask=is_tool if 1 is a token that counts" in error.hint
    assert "--columns mask=none if every token counts" in error.hint


def test_either_way_of_the_hint_reads_the_dump(tmp_path):
    path = write(tmp_path / "a.parquet", m=MASK)
    assert read(path, columns={"mask": "m"}).tokens == sum(map(sum, MASK))
    assert read(path, columns={"mask": "none"}).tokens == sum(LENGTHS)
    assert read(path, columns={"response_mask": "none"}).tokens == sum(LENGTHS)


def test_no_column_has_a_part_that_is_given_to_none(tmp_path):
    path = write(tmp_path / "a.parquet", mask=MASK, loss_mask=MASK, group_id=[0] * 4)
    dump = open_dump([path], columns={"mask": "none", "group_id": "none"})
    assert dump.info.columns.keys() == {"rollout_log_probs", "old_log_probs"}
    assert set(dump.info.ignored) == {"mask", "loss_mask"}
    assert (
        "no column holds rollout_log_probs"
        in refusal(path, columns={"rollout": "none", "mask": "none"}).message
    )


def test_of_many_such_columns_some_are_named(tmp_path):
    error = refusal(write(tmp_path / "a.parquet", **{f"flag{i}": MASK for i in range(5)}))
    assert "columns 'flag0', 'flag1', 'flag2' and 2 more hold only 0 and 1" in error.message
    assert "--columns mask=flag0 or --columns mask=flag1 or --columns mask=flag2 if 1" in error.hint


NO_MASKS = {
    "all 1": [[1] * n for n in LENGTHS],
    "all 0": [[0] * n for n in LENGTHS],
    "other numbers": [[1, 0, 2], [1], [], [0, 1]],
    "fractions": [[1.0, 0.5, 0.0], [1.0], [], [0.0, 1.0]],
    "null": [[1, 0, None], [1], [], [0, 1]],
    "other lengths": [[1, 0], [1, 0], [1], [0, 1]],
    "text": [["1", "0", "1"], ["1"], [], ["0", "1"]],
    "one per row": [1, 0, 1, 0],
}


@pytest.mark.parametrize("values", NO_MASKS.values(), ids=list(NO_MASKS))
def test_what_is_no_mask_is_ignored(tmp_path, values):
    path = write(tmp_path / "a.parquet", other=values)
    assert open_dump([path]).info.columns.keys() == {"rollout_log_probs", "old_log_probs"}


@pytest.mark.parametrize(
    "name", ["token_level_rewards", "rm_scores", "Returns", "logprobs", "completion_ids"]
)
def test_a_name_may_say_that_it_is_no_mask(tmp_path, name):
    path = write(tmp_path / "a.parquet", **{name: MASK})
    columns = {"rollout": "rollout_log_probs", "token_ids": "none"}
    assert open_dump([path], columns=columns).info.ignored == (name,)
    assert refusal(write(tmp_path / "b.parquet", reward_mask=MASK)), "but this one says that it is one"


def test_a_column_called_mask_beside_a_mask_of_another_name_is_ignored(tmp_path):
    columns, mask = batch()
    table = pa.table(listed(columns | {"response_mask": mask.astype(int), "mask": mask.astype(int)}))
    assert int(read(write(tmp_path / "a.parquet", table)).lengths.sum()) == mask.sum()
    other = table.set_column(3, "mask", pa.array(range(len(mask))))  # a number of each row
    assert int(read(write(tmp_path / "b.parquet", other)).lengths.sum()) == mask.sum()


def test_beside_a_mask_nothing_is_doubted(tmp_path):
    for name in ("response_mask", "mask"):
        path = write(tmp_path / "a.parquet", is_tool=MASK, **{name: MASK})
        assert open_dump([path]).info.ignored == ("is_tool",)


def test_a_bad_row_does_not_hide_a_mask(tmp_path):
    rows = [[-1.0, -2.0]] * 40
    columns = {"rollout_log_probs": rows, "old_log_probs": rows, "m": [[1, 0]] * 39 + [[1]]}
    assert "'m'" in refusal(write(tmp_path / "a.parquet", **columns)).message


def cuts(folder: Path, **columns: Any) -> list[list[str]]:
    """Write a dump in one piece, in small row groups, and in files."""
    table = pa.table(columns)
    half = table.num_rows // 2
    parts = [table.slice(0, half), table.slice(half)]
    files = [write(folder / f"{i}.parquet", part, 3) for i, part in enumerate(parts)]
    return [[write(folder / "a.parquet", table)], [write(folder / "b.parquet", table, 2)], files]


def test_the_first_0_may_lie_anywhere_however_the_dump_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(masks, "ROWS", 4)
    rows = [[-1.0, -2.0]] * 40
    columns = {"rollout_log_probs": rows, "old_log_probs": rows, "m": [[1, 1]] * 39 + [[1, 0]]}
    for paths in cuts(tmp_path, **columns):
        assert "'m'" in refusal(*paths).message


def test_a_2_anywhere_says_that_it_is_no_mask(tmp_path, monkeypatch):
    monkeypatch.setattr(masks, "ROWS", 4)
    rows = [[-1.0, -2.0]] * 40
    columns = {"rollout_log_probs": rows, "old_log_probs": rows, "turn": [[0, 1]] * 39 + [[1, 2]]}
    for paths in cuts(tmp_path, **columns):
        assert open_dump(paths).info.ignored == ("turn",)


@pytest.mark.parametrize("pages", [{"write_statistics": False}, {"use_compliant_nested_type": False}])
def test_a_mask_is_found_without_statistics_and_whatever_its_leaf_is_called(tmp_path, pages):
    assert "'m'" in refusal(write(tmp_path / "a.parquet", pages=pages, m=MASK)).message
    for case in ("all 0", "all 1"):
        path = write(tmp_path / "b.parquet", pages=pages, other=NO_MASKS[case])
        assert open_dump([path]).info.ignored == ("other",)


def test_thousands_of_columns_are_opened_in_no_time(tmp_path):
    path = write(tmp_path / "a.parquet", m=MASK, **{f"c{i}": [[i]] * 4 for i in range(3000)})
    begun = time.process_time()
    assert "'m'" in refusal(path).message
    assert time.process_time() - begun < 10, "it was a minute when a schema was made for each column"


@pytest.mark.parametrize("name", ["healthy", "quantized", "stale", "collapse"])
def test_the_samples_have_a_mask_and_nothing_is_ignored(name):
    info = open_dump([str(Path(__file__).parents[1] / "sample_data" / f"{name}.parquet")]).info
    assert info.columns["response_mask"] == "response_mask"
    assert info.ignored == ()


# ---------------------------------------------------------------- one row per token


def test_in_the_long_form_a_flag_per_token_is_named_and_one_per_sequence_is_not(tmp_path):
    columns, mask = batch()
    rows = exploded(columns)
    error = refusal(write(tmp_path / "a.parquet", **rows, sampled=mask.reshape(-1)))
    assert "column 'sampled' holds only 0 and 1" in error.message
    assert (
        open_dump([write(tmp_path / "b.parquet", **rows, mask=mask.reshape(-1))]).info.columns[
            "response_mask"
        ]
        == "mask"
    )
    ragged = {name: values[mask.reshape(-1)] for name, values in rows.items()}
    correct = (ragged["sequence_id"] % 2).astype(np.int8)
    assert open_dump([write(tmp_path / "c.parquet", **ragged, correct=correct)]).info.ignored == ("correct",)


def test_in_the_long_form_padding_is_found_whatever_the_order_of_the_rows(tmp_path):
    rows = exploded(batch()[0])
    rows |= {"position": np.tile(np.arange(48), 64)}
    mixed = np.random.default_rng(0).permutation(48 * 64)
    for order in (np.arange(48 * 64), mixed):
        path = write(tmp_path / "a.parquet", **{name: values[order] for name, values in rows.items()})
        assert "both exactly 0 from some token to the end" in refusal(path).message
        assert read(path, columns={"mask": "none"}).tokens == 48 * 64


# ---------------------------------------------------------------- padding


def test_padding_without_a_mask_is_an_error_that_says_so(tmp_path):
    columns, mask = batch()
    columns = {"vllm_logps": columns["rollout_log_probs"], "train_logps": columns["old_log_probs"]}
    nothing = {"rollout_log_probs": None, "old_log_probs": None}
    names = {"rollout": "vllm_logps", "old": "train_logps"}
    path = write(tmp_path / "a.parquet", **nothing, **listed(columns))
    error = refusal(path, columns=names)
    padded = int((~mask).any(1).sum())
    assert "columns 'vllm_logps' and 'train_logps' are both exactly 0 from some token" in error.message
    assert f"in {padded} of 64 sequences, in {(~mask).mean():.0%} of the tokens: padding" in error.message
    assert "--columns mask=NAME" in error.hint
    assert read(path, columns=names | {"mask": "none"}).tokens == mask.size
    path = write(tmp_path / "b.parquet", **nothing, **listed(columns), mask=list(mask))
    assert read(path, columns=names).tokens == mask.sum(), "a column called mask is the mask"


def test_padding_of_each_batch_to_its_own_length_is_found_however_the_dump_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(masks, "TOKENS", 1000)
    made = [listed(batch(8, length)[0]) for length in (40, 64, 52, 30)]
    columns = {name: [row for one in made for row in one[name]] for name in made[0]}
    said = {refusal(*paths).message.partition(": ")[2] for paths in cuts(tmp_path, **columns)}
    whole = open_dump([str(tmp_path / "b.parquet")], batch_tokens=100)
    parts = whole.shards(1)
    assert len(parts) > 4
    assert not any(list(part.batches()) == [] for part in parts), "no part refuses it alone"
    whole.seen = Seen()
    for part in parts:
        whole.seen.add(part.seen)
    with pytest.raises(DumpError) as caught:
        whole.judge()
    said.add(caught.value.message.partition(": ")[2])
    assert len(said) == 1
    assert "of the first 20 sequences" in said.pop()


def test_the_same_rows_without_padding_are_read(tmp_path):
    columns, mask = batch()
    ragged = {
        name: [row[kept] for row, kept in zip(values, mask, strict=True)] for name, values in columns.items()
    }
    assert read(write(tmp_path / "a.parquet", **ragged)).tokens == mask.sum()


def honest(case: str) -> tuple[np.ndarray[Any, Any], list[np.ndarray[Any, Any]]]:
    """Return lengths, and where both log-probs are exactly 0, of policies that are certain of some tokens."""
    chance = np.random.default_rng(7)
    lengths, rows = np.full(200, 64), 200
    if case == "ragged, certain of its end":
        lengths = chance.integers(20, 400, rows)
    zero = [chance.random(n) < (0.0 if "no other" in case else 0.3) for n in lengths]
    for row in zero:
        if case == "certain of half":
            row[:] = chance.random(len(row)) < 0.5
        elif case == "certain of whole stretches":
            row[:] = np.repeat(chance.random(len(row) // 8) < 0.4, 8)
            row[-8:] = chance.random() < 0.7
        elif case == "certain of the last token, no other":
            row[-1] = True
        elif case == "certain of a closing tag, no other":
            row[-int(chance.integers(4, 7)) :] = True
        elif case == "ragged, certain of its end":
            row[-int(chance.integers(5, 30)) :] = True
        elif case == "certain of everything":
            row[:] = True
    return lengths, zero


HONEST = (
    "certain of half",
    "certain of whole stretches",
    "certain of the last token, no other",
    "certain of a closing tag, no other",
    "ragged, certain of its end",
    "certain of everything",
)


@pytest.mark.parametrize("case", HONEST)
def test_tokens_of_which_both_policies_are_certain_are_no_padding(tmp_path, case):
    lengths, zero = honest(case)
    assert padding(ends(lengths, np.concatenate(zero))) is None
    rows = [np.where(row, 0.0, -1.0) for row in zero]
    assert read(write(tmp_path / "a.parquet", rollout_log_probs=rows, old_log_probs=rows)).tokens == sum(
        lengths
    )


@pytest.mark.parametrize("column", ["rollout_log_probs", "old_log_probs"])
def test_zeros_in_one_column_alone_are_for_the_diagnosis(tmp_path, column):
    columns, mask = batch()
    columns[column] = np.where(mask, columns[column], -0.7)
    assert read(write(tmp_path / "a.parquet", **listed(columns))).tokens == mask.size


def test_padding_is_counted_as_by_hand():
    lengths = np.array([6, 6, 0, 6, 6, 6])
    rows = ("111000", "101100", "110000", "100000", "111111")
    zero = np.array([number == "0" for row in rows for number in row])
    assert ends(lengths, zero).tolist() == [
        [6, 3, 0],
        [6, 2, 1],
        [0, 0, 0],
        [6, 4, 0],
        [6, 5, 0],
        [6, 0, 0],
    ]
    assert padding(ends(lengths, zero)) == Padding(4, 5, 14 / 30)


def test_few_rows_prove_nothing():
    zero = np.array([number == "0" for row in ("110000", "111000", "100000") for number in row])
    assert padding(ends(np.array([6, 6, 6]), zero)) is None


# ---------------------------------------------------------------- what is ignored


def test_what_nobody_reads_is_listed_for_all_files(tmp_path):
    same = {"host": ["a", "b"] * 2, "prompt": [f"{i}" * 5000 for i in range(4)], "step": [1] * 4}
    write(tmp_path / "d" / "run=1" / "a.parquet", **same, ref_log_probs=[[-1.0] * n for n in LENGTHS])
    write(tmp_path / "d" / "run=2" / "b.parquet", **same, extra=[0.5] * 4)
    info = open_dump([str(tmp_path / "d")], group_by=["run"]).info
    assert info.columns["step"] == "step"
    assert set(info.others) == {"host", "run"}
    assert info.ignored == ("prompt", "ref_log_probs", "extra")

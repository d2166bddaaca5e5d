"""Bad rows: refused by their place, or left out and counted; the writer refuses them too."""

import math

import pyarrow as pa
import pytest

from offpol_diag.dump.convert import open_dump
from tests import factory
from tests.factory import refusal

NAN, INF = math.nan, math.inf
FLOATS = pa.list_(pa.float64())
GOOD = [[-0.5, -1.0], [-2.0], [-0.25], [-0.125, -4.0]]
ROLLOUT, OLD, MASK = "rollout_log_probs", "old_log_probs", "response_mask"


def write(path, **columns):
    """Write a dump of `columns` on top of good rollout and old log-probs, two rows in a row group."""
    return factory.write(path, None, 2, **{ROLLOUT: GOOD, OLD: GOOD} | columns)


BAD_ROWS = [  # what row 2 (row group 1) has in place of a good value, and what is said of it
    ({OLD: [-1.0, -1.0]}, "column 'old_log_probs': it holds 2 values and rollout_log_probs holds 1"),
    ({MASK: []}, "column 'response_mask': it holds 0 values"),
    ({ROLLOUT: None}, "'rollout_log_probs': there is null where a list"),
    ({OLD: [None]}, "'old_log_probs': token 0 is nan, and a token that counts needs a finite value"),
    ({ROLLOUT: [-INF]}, "column 'rollout_log_probs': token 0 is -inf"),
    ({ROLLOUT: [0.5]}, "token 0 is 0.5, and a log-probability is at most 0"),
    ({MASK: [None]}, "'response_mask': token 0 is null, and a mask is 0 or 1"),
    ({MASK: [2]}, "column 'response_mask': token 0 is 2, and a mask is 0 or 1"),
    ({"token_ids": [None]}, "'token_ids': token 0 is null"),
    ({"advantages": [NAN]}, "column 'advantages': token 0 is nan"),
    ({"entropy": [NAN]}, "column 'entropy': token 0 is nan"),
    ({"weight_versions": [-2]}, "token 0 is -2, and a version is at least 0"),
    ({"prompt_ids": [1, None]}, "column 'prompt_ids': token 1 is null, and a prompt is token ids"),
    ({"prompt_length": -1}, "column 'prompt_length': it is -1, and a length is needed"),
    ({"rewards": None}, "column 'rewards': it is nan, and a finite number is needed"),
    ({"step": INF}, "column 'step': it is inf, and a number within 64 bits is needed"),
    ({"policy_lag": 2.0**63}, "column 'policy_lag': it is 9.22337e+18, and a number within 64 bits"),
]
FILLED = {ROLLOUT: GOOD, OLD: GOOD, "current_log_probs": GOOD, "advantages": GOOD, "entropy": GOOD}
FILLED |= {name: [[1] * len(row) for row in GOOD] for name in (MASK, "token_ids", "weight_versions")}
FILLED |= {"prompt_ids": [[1]] * 4, "rewards": [1.0] * 4, "prompt_length": [7.0] * 4}
FILLED |= {"step": [1.0, NAN, 1.0, None], "policy_lag": [1.0] * 4}
TYPES = {
    MASK: pa.list_(pa.int8()),
    **dict.fromkeys(("step", "policy_lag", "prompt_length", "rewards"), pa.float64()),
}
TYPES |= dict.fromkeys(("token_ids", "weight_versions", "prompt_ids"), pa.list_(pa.int64()))


def spoilt(change):
    """Return good columns with some values of row 2 changed."""
    columns = FILLED | {name: [*FILLED[name][:2], value, FILLED[name][3]] for name, value in change.items()}
    return {name: pa.array(values, TYPES.get(name, FLOATS)) for name, values in columns.items()}


@pytest.mark.parametrize(("change", "says"), BAD_ROWS, ids=str)
def test_a_bad_row_is_named_by_its_place_or_left_out_and_counted(tmp_path, change, says):
    path = write(tmp_path / "dump.parquet", **spoilt(change))
    for tokens in (1, 1_000_000):
        error = refusal(path, batch_tokens=tokens)
        assert error.message.startswith(f"{path}, row group 1, row 2, column ")
        assert says in error.message
        dump = open_dump([path], on_bad_row="skip", batch_tokens=tokens)
        batches = list(dump.batches())
        assert [name for batch in batches for name in batch.scalars["sequence_id"]] == [0, 1, 3]
        assert [x for batch in batches for x in batch.rollout.tolist()] == [-0.5, -1.0, -2.0, -0.125, -4.0]
        assert (dump.seen.skipped, dump.seen.examples) == (1, [error.message])


def test_five_skipped_rows_are_described_and_where_all_are_it_is_an_error(tmp_path):
    two_faults = spoilt({ROLLOUT: [0.5], OLD: [NAN], "rewards": NAN})
    nineteen = {ROLLOUT: [[-1.0]] * 20, OLD: [[NAN]] * 19 + [[-1.0]]}
    for columns, count, rows in ((two_faults, 1, [2]), (nineteen, 19, [0, 1, 2, 3, 4])):
        dump = open_dump([write(tmp_path / "a.parquet", **columns)], on_bad_row="skip", batch_tokens=1)
        list(dump.batches())
        assert dump.seen.skipped == count
        assert [f"row {i}," in said for i, said in zip(rows, dump.seen.examples, strict=True)]
    path = write(tmp_path / "a.parquet", old_log_probs=[[NAN] * len(row) for row in GOOD])
    said = "every row was skipped, all 4; the first: "
    assert f"{said}{path}, row group 0, row 0, column" in refusal(path, on_bad_row="skip").message

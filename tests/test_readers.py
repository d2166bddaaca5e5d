"""From Parquet to packed batches."""

import json
import math
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offpol_diag.batch import Batch
from offpol_diag.errors import DumpError
from offpol_diag.readers import decode, open_dump
from offpol_diag.readers.dump import join
from offpol_diag.readers.sources import find

FLOATS = pa.list_(pa.float64())
ROLLOUT = [[-0.5, -1.0, -0.25], [-2.0], [], [-0.125, -4.0]]
OLD = [[-0.75, -1.5, -0.5], [-1.0], [], [-0.25, -3.0]]
MASK = [[1, 0, 1], [1], [], [0, 1]]
ALL = 1_000_000


def write(path, row_group_size=None, metadata=None, **columns):
    """A dump of `columns`; rollout and old log-probs are there unless given."""
    columns = {"rollout_log_probs": ROLLOUT, "old_log_probs": OLD} | columns
    table = pa.table({name: column for name, column in columns.items() if column is not None})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(metadata), path, row_group_size=row_group_size)
    return str(path)


def read(*sources, **options):
    """The whole dump as one batch."""
    batches = list(open_dump(sources, **options).batches())
    (batch,) = join(batches, ALL * ALL)
    return batch


def plain(batch: Batch):
    """A batch as plain Python, for comparing."""
    values = {name: value.tolist() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    return values | {"scalars": batch.scalars}


def oracle(rollout, mask):
    """Packing, told slowly."""
    kept = [
        [(p, x) for p, (x, m) in enumerate(zip(xs, ms, strict=True)) if m]
        for xs, ms in zip(rollout, mask, strict=True)
    ]
    flat = [pair for row in kept for pair in row]
    cu_seqlens, cu_runs = [0], []
    for row in kept:
        begin = cu_seqlens[-1]
        cu_runs += [begin + i for i, (p, _) in enumerate(row) if i == 0 or row[i - 1][0] != p - 1]
        cu_seqlens.append(begin + len(row))
    return {
        "rollout": [x for _, x in flat],
        "position": [p for p, _ in flat],
        "cu_seqlens": cu_seqlens,
        "cu_runs": [*cu_runs, len(flat)],
        "masked": [len(ms) - len(row) for ms, row in zip(mask, kept, strict=True)],
    }


def test_without_a_mask_every_token_counts_and_a_response_is_one_run(tmp_path):
    batch = read(write(tmp_path / "a.parquet"))
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 4, 6]
    assert batch.cu_runs.tolist() == [0, 3, 4, 6]
    assert batch.masked.tolist() == [0, 0, 0, 0]
    assert batch.current is None
    assert batch.advantages is None


LIST_TYPES = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]
WIDTHS = [pa.float16(), pa.float32(), pa.float64()]


@pytest.mark.parametrize("width", WIDTHS, ids=str)
@pytest.mark.parametrize("kind", LIST_TYPES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("tokens", [1, ALL])
def test_every_list_type_and_width_gives_the_same_batch(tmp_path, kind, width, tokens):
    columns = {"rollout_log_probs": ROLLOUT, "old_log_probs": OLD, "response_mask": MASK}
    types = {"rollout_log_probs": width, "old_log_probs": width, "response_mask": pa.int8()}
    arrays = {name: pa.array(column, kind(types[name])) for name, column in columns.items()}
    batch = read(write(tmp_path / "a.parquet", **arrays), batch_tokens=tokens)
    assert batch.rollout.dtype == torch.float64
    assert plain(batch) == plain(read(write(tmp_path / "b.parquet", response_mask=MASK)))


@pytest.mark.parametrize("tokens", [1, ALL])
def test_padded_columns_give_the_same_batch_as_ragged_ones(tmp_path, tokens):
    def padded(rows, filler, dtype):
        return pa.array([row + [filler] * (3 - len(row)) for row in rows], pa.list_(dtype, 3))

    path = write(
        tmp_path / "a.parquet",
        rollout_log_probs=padded(ROLLOUT, math.nan, pa.float32()),
        old_log_probs=padded(OLD, None, pa.float32()),
        response_mask=padded(MASK, 0, pa.int32()),
    )
    found = plain(read(path, batch_tokens=tokens))
    expected = plain(read(write(tmp_path / "b.parquet", response_mask=MASK)))
    assert found.pop("masked") == [1, 2, 3, 2]
    expected.pop("masked")
    assert found == expected


def test_a_padded_dump_without_a_mask_is_warned_of(tmp_path):
    padded = pa.array([[-1.0, 0.0]], pa.list_(pa.float32(), 2))
    path = write(tmp_path / "a.parquet", rollout_log_probs=padded, old_log_probs=padded)
    assert "no response_mask" in open_dump([path]).notes[0]
    masked = write(
        tmp_path / "b.parquet", rollout_log_probs=padded, old_log_probs=padded, response_mask=[[1, 0]]
    )
    assert open_dump([masked]).notes == ()


MASK_TYPES = [
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.uint8(),
    pa.uint64(),
    pa.float32(),
]


@pytest.mark.parametrize("dtype", MASK_TYPES, ids=str)
def test_a_mask_of_any_number_type_is_read(tmp_path, dtype):
    mask = pa.array([[None if m is None else bool(m) for m in row] for row in MASK], pa.list_(pa.bool_()))
    path = write(tmp_path / "a.parquet", response_mask=mask.cast(pa.list_(dtype)))
    assert plain(read(path)) == plain(read(write(tmp_path / "b.parquet", response_mask=MASK)))


def test_values_reach_float64_exactly(tmp_path):
    single = np.float32(-0.1)
    path = write(
        tmp_path / "a.parquet",
        rollout_log_probs=pa.array([[single]], pa.list_(pa.float32())),
        old_log_probs=pa.array([[-0.1]], FLOATS),
    )
    batch = read(path)
    assert batch.rollout.item() == float(single)
    assert batch.old.item() == -0.1


def test_junk_under_a_zero_of_the_mask_does_no_harm(tmp_path):
    path = write(
        tmp_path / "a.parquet",
        rollout_log_probs=[[-1.0, math.nan, None, math.inf, 7.0, -9999.0]],
        old_log_probs=[[-2.0, None, -math.inf, math.nan, 9.0, 0.0]],
        token_ids=[[5, None, 0, 0, 0, 0]],
        response_mask=[[1, 0, 0, 0, 0, 0]],
    )
    dump = open_dump([path])
    (batch,) = dump.batches()
    assert (batch.rollout.tolist(), batch.old.tolist(), batch.token_ids.tolist()) == ([-1.0], [-2.0], [5])
    assert dump.notes == ()


def test_optional_token_columns_follow_the_mask(tmp_path):
    ids = [[11, 12, 13], [21], [], [31, 32]]
    path = write(
        tmp_path / "a.parquet",
        current_log_probs=OLD,
        response_mask=MASK,
        token_ids=ids,
        entropy=[[0.5, 1.0, 1.5], [2.0], [], [2.5, 3.0]],
        advantages=[[1.0, 2.0, 3.0], [4.0], [], [5.0, 6.0]],
    )
    batch = read(path)
    assert batch.current.tolist() == batch.old.tolist()
    assert batch.token_ids.tolist() == [11, 13, 21, 32]
    assert batch.token_ids.dtype == torch.int64
    assert batch.entropy.tolist() == [0.5, 1.5, 2.0, 3.0]
    assert batch.advantages.tolist() == [1.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize("values", [[1.0, -2.0, 3.0, -4.0], [1, -2, 3, -4]], ids=["floats", "integers"])
def test_one_advantage_per_sequence_reaches_all_its_tokens(tmp_path, values):
    batch = read(write(tmp_path / "a.parquet", response_mask=MASK, advantages=values, rewards=values))
    assert batch.advantages.tolist() == [1.0, 1.0, -2.0, -4.0]
    assert batch.rewards.tolist() == [1.0, -2.0, 3.0, -4.0]
    assert batch.advantages.dtype == batch.rewards.dtype == torch.float64


def test_a_dump_of_two_policies_may_hold_current_instead_of_old(tmp_path):
    batch = read(write(tmp_path / "a.parquet", old_log_probs=None, current_log_probs=OLD))
    assert batch.old is None
    assert batch.policy("current").tolist() == [x for row in OLD for x in row]


# --- scalars and groups


def test_scalars_reach_the_batch_as_host_lists(tmp_path):
    path = write(
        tmp_path / "a.parquet",
        sequence_id=["a", "b", "c", None],
        step=[1, 1, 2, 2],
        host=pa.array(["x", "y", "x", None]).dictionary_encode(),
        unused=[1, 2, 3, 4],
    )
    scalars = read(path, group_by=["host", "step"]).scalars
    assert scalars == {
        "sequence_id": ["a", "b", "c", None],
        "step": [1, 1, 2, 2],
        "host": ["x", "y", "x", None],
        "unused": [1, 2, 3, 4],  # small: the diagnosis looks for groups that stand out
    }


def test_a_sequence_without_a_name_is_named_by_its_row_in_the_dump(tmp_path):
    paths = [write(tmp_path / name) for name in ("a.parquet", "b.parquet")]
    assert read(*paths).scalars["sequence_id"] == list(range(8))


def test_policy_lag_is_the_difference_of_versions_where_it_is_missing(tmp_path):
    versions = {"train_version": [5, 5, 5, None], "rollout_version": [5, 3, None, 1]}
    path = write(tmp_path / "a.parquet", **versions)
    assert read(path, group_by=["policy_lag"]).scalars["policy_lag"] == [0, 2, None, None]
    stated = write(tmp_path / "b.parquet", policy_lag=[9, 9, 9, 9], **versions)
    assert read(stated).scalars["policy_lag"] == [9, 9, 9, 9]


def test_text_stored_as_bytes_is_text(tmp_path):
    path = write(tmp_path / "a.parquet", group_id=pa.array([b"p", b"q", b"p", b"\xc3\xa9"]))
    assert read(path).scalars["group_id"] == ["p", "q", "p", "é"]


@pytest.mark.parametrize(
    "ids",
    [
        pa.array([7, 8, 7, 9]),
        pa.array([7, 8, 7, 9], pa.uint64()),
        pa.array([7.0, 8.0, 7.0, 9.5]),
        pa.array(["p", "q", "p", "r"]),
        pa.array(["p", "q", "p", "r"]).dictionary_encode(),
        pa.array(["p", "q", "p", "r"], pa.large_string()),
        pa.array([-7, 2**40, -7, None]),
    ],
    ids=lambda ids: str(ids.type),
)
def test_sequences_of_a_group_share_a_key_and_others_do_not(tmp_path, ids):
    key = read(write(tmp_path / "a.parquet", group_id=ids)).key.tolist()
    assert key[0] == key[2]
    assert len(set(key)) == 3


def test_without_groups_every_sequence_has_a_key_of_its_own(tmp_path):
    rollout = [[-1.0, -2.0], [-2.0, -1.0], [-1.0], [-1.0, -2.0]]
    key = read(write(tmp_path / "a.parquet", rollout_log_probs=rollout, old_log_probs=rollout)).key.tolist()
    assert key[0] == key[3]
    assert len(set(key)) == 3


def test_the_two_zeros_are_one_number_to_a_key(tmp_path):
    rollout = [[-0.0], [0.0], [-1.0], [-2.0]]
    key = read(write(tmp_path / "a.parquet", rollout_log_probs=rollout, old_log_probs=rollout)).key.tolist()
    assert key[0] == key[1]


def test_mix_is_splitmix64():
    # First outputs of the reference generator seeded with 0 and with 1234567 (Vigna's splitmix64.c).
    found = decode.mix(np.array([0, 1234567], dtype=np.uint64)).tolist()
    assert found == [0xE220A8397B1DCDAF, 6457827717110365317]


# --- how the dump is cut


def many(seed=0, rows=60):
    """Columns of a dump of `rows` sequences of 0 to 40 tokens."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 41, rows)
    ragged = [-generator.exponential(1.0, n) for n in lengths]
    return {
        "rollout_log_probs": ragged,
        "old_log_probs": [row * 1.01 for row in ragged],
        "response_mask": [generator.integers(0, 2, n) for n in lengths],
        "advantages": [generator.normal(size=n) for n in lengths],
        "rewards": generator.normal(size=rows),
        "step": np.arange(rows) // 10,
    }


@pytest.mark.parametrize("tokens", [1, 50, 333, ALL])
@pytest.mark.parametrize("row_group_size", [1, 7, 60])
@pytest.mark.parametrize("files", [1, 4])
def test_how_the_dump_is_cut_changes_nothing(tmp_path, files, row_group_size, tokens):
    columns = many()
    bounds = np.linspace(0, 60, files + 1).astype(int)
    for i, (begin, end) in enumerate(pairwise(bounds)):
        piece = {name: column[begin:end] for name, column in columns.items()}
        write(tmp_path / "cut" / f"{i}.parquet", row_group_size, **piece)
    whole = read(write(tmp_path / "whole.parquet", **columns))
    assert plain(read(str(tmp_path / "cut"), batch_tokens=tokens)) == plain(whole)


def test_small_row_groups_make_one_batch(tmp_path):
    path = write(tmp_path / "a.parquet", row_group_size=1, **many())
    assert len(list(open_dump([path]).batches())) == 1


def test_reordering_rows_changes_no_key(tmp_path):
    columns = many()
    order = np.random.default_rng(1).permutation(60)
    shuffled = {name: [column[i] for i in order] for name, column in columns.items()}
    one = read(write(tmp_path / "a.parquet", **columns)).key
    two = read(write(tmp_path / "b.parquet", **shuffled)).key
    assert two.tolist() == one[torch.from_numpy(order)].tolist()


rows = st.lists(
    st.lists(st.tuples(st.floats(-1e4, 0.0), st.booleans()), max_size=8), min_size=1, max_size=8
).filter(lambda rows: any(keep for row in rows for _, keep in row))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=rows, tokens=st.integers(1, 40), group=st.integers(1, 8), kind=st.sampled_from(LIST_TYPES))
def test_packing_is_what_the_oracle_says(tmp_path, rows, tokens, group, kind):
    rollout = [[x for x, _ in row] for row in rows]
    mask = [[keep for _, keep in row] for row in rows]
    columns = {
        "rollout_log_probs": pa.array(rollout, kind(pa.float64())),
        "old_log_probs": pa.array(rollout, FLOATS),
    }
    path = write(tmp_path / "a.parquet", group, response_mask=pa.array(mask, kind(pa.bool_())), **columns)
    found = plain(read(path, batch_tokens=tokens))
    expected = oracle(rollout, mask)
    assert {name: found[name] for name in expected} == expected
    assert found["old"] == expected["rollout"]


# --- sources


def names(*sources):
    return [str(file.path) for file in find(sources)]


def test_directories_and_globs_are_searched_and_hidden_files_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        "d/b.parquet",
        "d/a.parquet",
        "d/sub/c.parquet",
        "d/_tmp/x.parquet",
        "d/.x.parquet",
        "d/_y.parquet",
    ):
        write(tmp_path / name)
    (tmp_path / "d" / "notes.txt").write_text("no dump")
    found = ["d/a.parquet", "d/b.parquet", "d/sub/c.parquet"]
    assert names("d") == found
    assert names("d/*.parquet") == found[:2]
    assert names("d/**/*.parquet") == found
    assert names(f"{tmp_path}/d/s*") == [f"{tmp_path}/d/sub/c.parquet"]
    assert names("d/b.parquet", "d") == ["d/b.parquet", "d/a.parquet", "d/sub/c.parquet"]


def test_a_glob_may_climb(tmp_path, monkeypatch):
    write(tmp_path / "d" / "a.parquet")
    (tmp_path / "e").mkdir()
    monkeypatch.chdir(tmp_path / "e")
    assert names("../d/*.parquet") == ["../d/a.parquet"]


def test_a_file_may_be_named_like_a_glob(tmp_path):
    path = write(tmp_path / "a[1].parquet")
    assert names(path) == [path]


def test_hive_partitions_are_columns(tmp_path):
    for step in (3, 10):
        write(tmp_path / f"step={step}" / "engine=v%201" / "part-0.parquet")
    batch = read(str(tmp_path), group_by=["engine"])
    assert sorted(batch.scalars["step"]) == [3] * 4 + [10] * 4
    assert batch.scalars["engine"] == ["v 1"] * 8
    globbed = read(f"{tmp_path}/step=3/*/*.parquet")
    assert globbed.scalars["step"] == [3] * 4


def test_hive_values_are_integers_only_if_all_are(tmp_path):
    for env in ("7", "maths", "__HIVE_DEFAULT_PARTITION__"):
        write(tmp_path / f"env={env}" / "a.parquet")
    assert set(read(str(tmp_path), group_by=["env"]).scalars["env"]) == {"7", "maths", None}


def test_a_column_in_the_file_goes_before_its_partition(tmp_path):
    write(tmp_path / "step=3" / "a.parquet", step=[1, 1, 1, 1])
    assert read(str(tmp_path)).scalars["step"] == [1] * 4


def test_files_may_differ_in_widths_and_list_types_and_in_columns_nobody_reads(tmp_path):
    write(tmp_path / "a.parquet", junk=["x"] * 4)
    narrow = {"rollout_log_probs": ROLLOUT, "old_log_probs": OLD}
    write(tmp_path / "b.parquet", **{k: pa.array(v, pa.large_list(pa.float32())) for k, v in narrow.items()})
    batch = read(str(tmp_path))
    assert batch.rollout[:6].tolist() == batch.rollout[6:].tolist()


def test_a_file_whose_column_is_null_or_empty_throughout_goes_with_the_others(tmp_path):
    write(tmp_path / "a.parquet", step=[1, 2, 3, 4], group_id=["p"] * 4)
    nulls = pa.nulls(2)
    nothing = pa.array([[], []], pa.list_(pa.null()))
    both = {"rollout_log_probs": nothing, "old_log_probs": nothing}
    write(tmp_path / "b.parquet", step=nulls, group_id=nulls, **both)
    scalars = read(str(tmp_path)).scalars
    assert scalars["step"] == [1, 2, 3, 4, None, None]
    assert scalars["group_id"] == ["p"] * 4 + [None] * 2


def test_an_empty_file_among_others_is_no_harm(tmp_path):
    write(tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", rollout_log_probs=[], old_log_probs=[])
    assert open_dump([str(tmp_path)]).rows == 4


# --- columns


@pytest.mark.parametrize(
    "rollout", ["rollout_logprobs", "inference_logprobs", "generation_logprobs", "logprobs"]
)
@pytest.mark.parametrize("old", ["prev_logprobs", "trainer_logprobs", "log_probs", "old_per_token_logps"])
@pytest.mark.parametrize("mask", ["loss_mask", "completion_mask"])
def test_a_trainers_names_are_known(tmp_path, rollout, old, mask):
    path = write(
        tmp_path / "a.parquet",
        rollout_log_probs=None,
        old_log_probs=None,
        **{rollout: ROLLOUT, old: OLD, mask: MASK},
    )
    dump = open_dump([path])
    assert dump.info.columns == {"rollout_log_probs": rollout, "old_log_probs": old, "response_mask": mask}


@pytest.mark.parametrize("word", ["rollout", "rollout_log_probs"])
def test_an_override_goes_before_the_canonical_name(tmp_path, word):
    path = write(tmp_path / "a.parquet", mine=OLD)
    batch = read(path, columns={word: "mine"})
    assert batch.rollout.tolist() == batch.old.tolist()


def test_a_column_that_an_override_claims_plays_no_other_part(tmp_path):
    path = write(tmp_path / "a.parquet", old_log_probs=None, current_log_probs=OLD)
    assert read(path, columns={"old": "current_log_probs"}).current is None


def test_a_column_name_may_hold_a_dot(tmp_path):
    path = write(
        tmp_path / "a.parquet", **{"rollout_log_probs": None, "pi.rollout": ROLLOUT, "pi": [1, 2, 3, 4]}
    )
    batch = read(path, columns={"rollout": "pi.rollout"}, group_by=["pi"])
    assert batch.rollout[0] == -0.5
    assert batch.scalars["pi"] == [1, 2, 3, 4]


def test_a_group_by_column_may_be_one_that_plays_a_part(tmp_path):
    path = write(tmp_path / "a.parquet", global_step=[1, 1, 2, 2], rewards=[0.0, 1.0, 0.0, 1.0])
    scalars = read(path, group_by=["global_step", "step", "rewards"]).scalars
    assert scalars["global_step"] == scalars["step"] == [1, 1, 2, 2]
    assert scalars["rewards"] == [0.0, 1.0, 0.0, 1.0]


# --- what is said of the dump


def test_the_info_counts_files_rows_row_groups_and_bytes(tmp_path):
    paths = tuple(write(tmp_path / name, row_group_size=2) for name in ("a.parquet", "b.parquet"))
    info = open_dump(paths).info
    assert (info.files, info.rows, info.row_groups) == (paths, 8, 4)
    assert info.bytes == sum((tmp_path / name).stat().st_size for name in ("a.parquet", "b.parquet"))


def test_provenance_is_merged_over_files(tmp_path):
    write(tmp_path / "a.parquet", metadata={"offpol_diag": '{"engine": "vllm", "top_p": 1.0}'})
    write(tmp_path / "b.parquet", metadata={"offpol_diag": '{"engine": "sglang", "top_p": 1.0}'})
    write(tmp_path / "c.parquet", metadata={"offpol_diag": "not JSON"})
    write(tmp_path / "d.parquet", metadata={"offpol_diag": "[1]"})
    info = open_dump([str(tmp_path)]).info
    assert info.provenance == {"engine": ["vllm", "sglang"], "top_p": 1.0}


@pytest.mark.parametrize(
    ("text", "provenance"),
    [
        (b"[" * 100_000, {}),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, {}),
        (b'{"n": ' + b"9" * 5000 + b"}", {}),
        (b"\xff", {}),
        (b'{"n": NaN, "m": [-Infinity, 1e999, 1e9]}', {"n": None, "m": [None, None, 1e9]}),
        (b'{"model": "a\\ud800", "\\udfff": ["\\ud83d\\ude00"]}', {"model": "a?", "?": ["😀"]}),
    ],
    ids=["deep list", "deep object", "long number", "no text", "not finite", "surrogates"],
)
def test_provenance_is_of_no_harm(tmp_path, text, provenance):
    table = pa.table({"rollout_log_probs": ROLLOUT, "old_log_probs": OLD})
    pq.write_table(table.replace_schema_metadata({b"offpol_diag": text}), tmp_path / "a.parquet")
    found = open_dump([str(tmp_path)]).info.provenance
    assert found == provenance
    json.dumps(found, ensure_ascii=False).encode()


def test_progress_counts_every_row(tmp_path):
    seen = []
    dump = open_dump([write(tmp_path / "a.parquet", row_group_size=7, **many())], batch_tokens=50)
    list(dump.batches(seen.append))
    assert sum(seen) == dump.rows == 60


def test_a_dump_can_be_read_again(tmp_path):
    dump = open_dump([write(tmp_path / "a.parquet", rewards=[1.0, None, 0.0, 0.0])], on_bad_row="skip")
    one, two = ([plain(batch) for batch in dump.batches()] for _ in range(2))
    assert one == two
    assert dump.skipped.count == 1


# --- positive log-probs on the train side


def test_positive_train_log_probs_are_told_and_read(tmp_path):
    old = [[-1.0, 0.5, -1.0], [-1.0], [], [-1.0, 0.25]]
    dump = open_dump([write(tmp_path / "a.parquet", old_log_probs=old)], batch_tokens=1)
    batches = list(dump.batches())
    assert sum(batch.tokens for batch in batches) == 6
    (note,) = dump.notes
    assert "2 of 6 tokens (33.33%) of 'old_log_probs'" in note
    assert "row group 0, row 0, column 'old_log_probs': token 1 is 0.5" in note
    assert "no log-probabilities" in note


def test_a_train_log_prob_above_zero_by_rounding_is_not_worth_a_word(tmp_path):
    near = [[9e-4 for _ in row] for row in ROLLOUT]
    dump = open_dump([write(tmp_path / "a.parquet", rollout_log_probs=near, old_log_probs=near)])
    (batch,) = dump.batches()
    assert batch.rollout.tolist() == [9e-4] * 6
    assert dump.notes == ()


def test_a_few_tokens_are_no_proof_of_a_wrong_sign(tmp_path):
    old = [[1.0] * len(row) for row in ROLLOUT]
    dump = open_dump([write(tmp_path / "a.parquet", old_log_probs=old)])
    list(dump.batches())
    assert "6 of 6 tokens" in dump.notes[0]


@pytest.mark.parametrize("tokens", [1, ALL])
def test_a_train_column_of_the_wrong_sign_is_an_error(tmp_path, tokens):
    rollout = [[-0.5, 0.0] * 10] * 4
    path = write(tmp_path / "a.parquet", rollout_log_probs=rollout, old_log_probs=[[0.5, 0.0] * 10] * 4)
    with pytest.raises(DumpError, match="wrong sign") as caught:
        list(open_dump([path], batch_tokens=tokens, on_bad_row="skip").batches())
    assert "a.parquet, row group 0, row 0, column 'old_log_probs': token 0 is 0.5" in caught.value.message
    assert "negate" in caught.value.hint

"""What is read: the same sequences written in many ways, names of columns and files, labels of every type."""

import gzip
import json
import os
import pickle
import weakref
from decimal import Decimal
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from offpol_diag.dump.batch import joined
from offpol_diag.dump.convert import convert, open_dump
from offpol_diag.dump.schema import TABLE
from tests.factory import ALL, plain, read, refusal, write
from tests.reading import analyze

NAN = float("nan")
LOGS = ("rollout_log_probs", "old_log_probs", "current_log_probs")
WIDE, BOOL = pa.float64(), pa.bool_()
LISTS = dict.fromkeys((*LOGS, "entropy", "advantages"), WIDE) | {"response_mask": BOOL}
LISTS |= {"token_ids": pa.int32(), "weight_versions": pa.int64()}
SCALARS = ("sequence_id", "group_id", "step", "policy_lag", "prompt_length", "finish_reason", "host")


def both(rows):
    """Make the same log-probs of both policies."""
    return dict.fromkeys(LOGS[:2], rows)


# ---------------------------------------------------------------- one set of sequences


def sequences(shortest=0):
    """Make 40 rows of at most 30 tokens, in numbers that float16 holds, with junk where the mask is 0."""
    rng, made = np.random.default_rng(0), []
    for i in range(40):
        n = int(rng.integers(1, 31)) if i % 9 else shortest
        mask = rng.integers(0, 4, n) > 0
        row = {"response_mask": mask.tolist(), "token_ids": rng.integers(0, 99, n).tolist()}
        for name, junk in zip(LOGS, (7.0, NAN, None), strict=True):
            row[name] = np.where(mask, -rng.integers(0, 64, n) / 8, junk).tolist()
        row |= {"entropy": [0.5] * n, "weight_versions": [5 + at // 4 for at in range(n)]}
        row |= {"advantages": [rng.normal()] * n, "rewards": rng.normal(), "policy_lag": i % 3}
        row |= {"sequence_id": f"s{(i * 7) % 40}", "group_id": i // 4, "step": i // 10, "prompt_length": i}
        made.append(row | {"finish_reason": "stop" if i % 3 else None, "host": "a" if i < 8 else "é"})
    return made


def oracle(rows):
    """Pack rows in plain Python."""
    kept = [[at for at, keep in enumerate(row["response_mask"]) if keep] for row in rows]
    begins = [0, *accumulate(map(len, kept))]
    pairs = zip(begins, kept, strict=False)
    turns = [begin + i for begin, at in pairs for i, p in enumerate(at) if i == 0 or at[i - 1] != p - 1]
    flat = {name: [row[name][p] for row, at in zip(rows, kept, strict=True) for p in at] for name in LISTS}
    return {
        **{name.removesuffix("_log_probs"): x for name, x in flat.items() if name != "response_mask"},
        "position": [p for at in kept for p in at],
        "cu_seqlens": begins,
        "cu_runs": [*turns, begins[-1]],
        "masked": [len(row["response_mask"]) - len(at) for row, at in zip(rows, kept, strict=True)],
        "rewards": [row["rewards"] for row in rows],
        "scalars": {name: [row[name] for row in rows] for name in SCALARS},
    }


def table(rows, lists=pa.list_, floats=WIDE, mask=BOOL):
    """Return rows as a table with lists, whose log-probs and mask have some types."""
    kinds = LISTS | dict.fromkeys(LOGS, floats) | {"response_mask": mask}
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    if mask != BOOL:
        columns["response_mask"] = [[int(x) for x in row] for row in columns["response_mask"]]
    kinds = {name: lists(kinds[name]) if name in kinds else None for name in columns}
    return pa.table({name: pa.array(x, kinds[name]) for name, x in columns.items()})


def parquet(group=None, names=(), **how):
    """Return a writer of lists, in row groups or under other names."""

    def written(folder, rows):
        made = table(rows, **how)
        made = made.rename_columns([dict(names).get(name, name) for name in made.column_names])
        return write(folder / "a.parquet", made, group)

    return written


def padded(width=30):
    """Return rows whose lists all have one length."""
    fill = dict.fromkeys(LISTS, 0) | {"response_mask": False, "old_log_probs": None, "rollout_log_probs": NAN}
    return [
        row | {name: [*row[name], *[one] * (width - len(row[name]))] for name, one in fill.items()}
        for row in sequences()
    ]


def by_token(folder, rows):
    """Write a row per token, in which names are singular and positions begin anywhere."""
    flat = [
        {name.removesuffix("s") if name in LOGS else name: x[at] if name in LISTS else x for name, x in one}
        | {"position": at + 3}
        for row in rows
        for one in [row.items()]
        for at in range(len(row["token_ids"]))
    ]
    return write(folder / "a.parquet", pa.Table.from_pylist(flat), 37)


def by_step(folder, rows):
    """Write files of each step, whose types differ or that are empty, in a folder of its own: `step=3/`."""
    for step, group in groupby(rows, lambda row: row["step"]):
        made = table([*group], pa.large_list if step % 2 else pa.list_).drop_columns("step")
        write(folder / f"step={step}" / "part-0.parquet", made, 4)
        write(folder / f"step={step}" / "part-1.parquet", made.slice(0, 0))
    return str(folder)


def json_lines(name, change=bytes, names=()):
    """Return a writer of an object per sequence."""

    def written(folder, rows):
        rows = [{dict(names).get(key, key): x for key, x in row.items()} for row in rows]
        (folder / name).write_bytes(change("".join(json.dumps(row) + "\n" for row in rows).encode()))
        return str(folder / name)

    return written


TRL = {"rollout_log_probs": "rollout_logps", "old_log_probs": "old_per_token_logps", "response_mask": "mask"}
MINE = {"rollout_log_probs": "mine", "old_log_probs": "theirs"}
GIVEN = {"rollout": "mine", "old_log_probs": "theirs"}
FULL = partial(sequences, 2)
WAYS = {  # rows, how they are written, --columns
    "lists": (sequences, parquet(), {}),
    "lists of float16": (sequences, parquet(floats=pa.float16(), mask=pa.int64()), {}),
    "large lists of float32": (sequences, parquet(7, (), lists=pa.large_list, floats=pa.float32()), {}),
    "fixed-size lists": (padded, parquet(lists=partial(pa.list_, list_size=30), mask=pa.uint64()), {}),
    "hive partitions": (sequences, by_step, {}),
    "names of TRL": (sequences, parquet(1, TRL), {}),
    "a row per token": (FULL, by_token, {}),
    "JSON lines": (FULL, json_lines("a.jsonl", names=MINE), GIVEN),
    "JSON lines, compressed": (FULL, json_lines("a.jsonl.gz", gzip.compress, TRL), {}),
}


def without_key(batches):
    return {name: x for name, x in plain(joined([*batches])).items() if name != "key"}


@pytest.mark.parametrize("way", WAYS)
def test_sequences_written_in_any_way_are_the_same_batch_however_it_is_cut(way, tmp_path):
    rows, written, columns = WAYS[way]
    rows, how = rows(), {"columns": columns, "group_by": ["host"]}
    source, expected = written(tmp_path, rows), oracle(rows)
    for tokens in (1, 50, ALL):
        batches = [*open_dump([source], batch_tokens=tokens, **how).batches()]
        assert without_key(batches) == expected
        assert all(one.tokens <= tokens or one.sequences == 1 for one in batches)
    dump = open_dump([source], **how)
    for size in (1, 1500, 1 << 30):  # ranges of row groups, each read as in another process
        parts = [pickle.loads(pickle.dumps(part)) for part in dump.shards(size)]
        assert without_key(batch for part in parts for batch in part.batches()) == expected
    convert([source], tmp_path / "to.parquet", columns)
    again = without_key(open_dump([str(tmp_path / "to.parquet")]).batches())
    assert again | {"scalars": expected["scalars"] | again["scalars"]} == expected


def test_a_dump_is_read_again_and_a_batch_is_freed_before_the_next(tmp_path):
    dump = open_dump([write(tmp_path / "a.parquet", **both([[-0.5] * 10] * 80))], batch_tokens=80)
    for _ in range(2):
        made, alive = [], []
        for batch in dump.batches():
            made.append(weakref.ref(batch))
            alive.append(sum(one() is not None for one in made))
            del batch
        assert (len(made), max(alive)) == (10, 1)


def test_one_advantage_reaches_all_tokens_and_the_lag_is_the_difference_of_versions(tmp_path):
    versions = {"train_version": [5, 5, 5, None], "rollout_version": [5, 3, None, 1]}
    batch = read(
        write(tmp_path / "a.parquet", advantages=[1, -2, 3, -4], **versions), group_by=["policy_lag"]
    )
    assert batch.advantages.tolist() == [1, 1, 1, -2, -4, -4]
    assert batch.scalars["policy_lag"] == [0, 2, None, None]
    own = read(write(tmp_path / "b.parquet", policy_lag=[9] * 4, **versions))
    assert own.scalars["policy_lag"] == [9] * 4


def test_log_probs_of_the_trainer_above_zero_are_told_and_read_and_rounding_is_neither(tmp_path):
    old = [[-1.0, 0.5, -1.0], [1e-3], [], [-1.0, 0.25]]
    dump = open_dump([write(tmp_path / "a.parquet", old_log_probs=old)])
    assert sum(batch.tokens for batch in dump.batches()) == 6
    assert dump.seen.above == {"old_log_probs": 2}
    assert read(write(tmp_path / "a.parquet", **both([[1e-3, -1.0]]))).rollout.tolist() == [1e-3, -1.0]
    assert "token 0 is 0.00101" in refusal(write(tmp_path / "a.parquet", **both([[1.01e-3]]))).message


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("column", [one for one in TABLE if one.name in (*LISTS, *SCALARS)], ids=str)
def test_a_column_is_found_by_every_name_of_the_table_and_by_its_words(column, tmp_path):
    rows = sequences(2)
    for name in column.every_name(long=False):
        path = parquet(None, {column.name: name})(tmp_path, rows)
        assert open_dump([path]).columns[column.name] == name
    path = parquet(None, {column.name: "mine"})(tmp_path, rows)
    for word in {column.name, column.short} - {""}:
        assert open_dump([path], columns={word: "mine"}).columns[column.name] == "mine"


TREE = [f"d/{name}.parquet" for name in ("b", "step_10", "step_9", "sub/c", "_tmp/x", ".x", "_y", "a[1]")]
TREE += ["d/notes.txt", *(f"e/step={step}/env=v%201/p.parquet" for step in (3, 10))]
IN_D = [f"d/{name}.parquet" for name in ("a[1]", "b", "step_9", "step_10", "sub/c")]
FOUND = {  # path or glob → the files that it stands for, in the order of their numbers
    **dict.fromkeys(("d", "d/", "d/**", "d/**/*.parquet"), IN_D),
    "d/*.parquet": IN_D[:4],
    "d/[!ab]*.parquet": IN_D[2:4],
    "d/a[1].parquet": IN_D[:1],
    "d/_tmp/*.parquet": ["d/_tmp/x.parquet"],
    "e/step=*/*/*.parquet": TREE[-2:],
}


def test_folders_and_globs_stand_for_visible_files_each_of_which_is_read_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in TREE:
        write(tmp_path / name)
    for root in ("", f"{tmp_path}/"):
        for pattern, files in FOUND.items():
            assert [*open_dump([root + pattern]).files] == [root + name for name in files]
    Path("link.parquet").symlink_to("d/b.parquet")
    files = open_dump(["d/b.parquet", "./d", str(tmp_path / "d"), "link.parquet"]).files
    assert [*files] == ["d/b.parquet", "d/a[1].parquet", *IN_D[2:]]


@pytest.mark.parametrize("name", ["step:1.parquet", "s3:a.parquet", b"a\xff.parquet", "run:1/a.parquet"])
def test_a_file_of_any_name_is_read(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(os.fsdecode(name)).parent.mkdir(exist_ok=True)
    Path(write(tmp_path / "x.bin")).rename(os.fsdecode(name))
    for source in (os.fsdecode(name), str(tmp_path)):
        assert read(source).sequences == 4


def test_hive_partitions_are_columns_unless_the_file_has_its_own(tmp_path):
    for env in ("7", "v%201", "__HIVE_DEFAULT_PARTITION__"):
        write(tmp_path / "e" / f"env={env}" / "step=10" / "a.parquet", rewards=[1] * 4)
    batch = read(str(tmp_path / "e"), group_by=["env"])
    assert ({*batch.scalars["env"]}, {*batch.scalars["step"]}) == ({"7", "v 1", None}, {10})
    assert {*read(write(tmp_path / "step=3" / "a.parquet", step=[1] * 4)).scalars["step"]} == {1}


# ---------------------------------------------------------------- labels and groups

TEXT = pa.array([b"a", b"", b"\xc3\xa9", None], pa.binary())
LABELS = {
    **{name: pa.array([1, 2, 3, None], name) for name in ("int8", "uint16", "int64", "uint64", "float64")},
    **{f"float{bits}": pa.array(np.array([1.0, 2.5, NAN, NAN], f"float{bits}")) for bits in (16, 32)},
    **{name: TEXT.cast(getattr(pa, name)()) for name in ("string", "large_string", "string_view", "binary")},
    "decimal": pa.array([Decimal("1.50"), Decimal(-2), Decimal(3), None], pa.decimal128(5, 2)),
    "timestamp": pa.array([1, 2, -3, None], pa.timestamp("us")),
    "dictionary": pa.array(["a", "b", "a", None]).dictionary_encode(),
}
SHOWN = {"timestamp": "1970-01-01 00:00:00.000001", "decimal": "1.50", "binary": "a"}


def test_every_type_of_scalar_is_a_label_of_which_null_and_nan_are_none(tmp_path):
    parts = ("other", "group_id", "sequence_id")
    for name, values in LABELS.items():
        batch = read(write(tmp_path / "a.parquet", **dict.fromkeys(parts, values)), group_by=["other"])
        for labels in (batch.scalars[part] for part in parts):
            assert (labels[0], labels[3]) == (SHOWN.get(name, labels[0]), None), name
            assert all(isinstance(x, bool | int | float | str | None) and x == x for x in labels)
        assert batch.key[0] != batch.key[1]
    columns = LABELS | {"odd": ["nan", "inf", "1e999", "7"]}
    report = analyze(write(tmp_path / "a.parquet", **columns), presets=["token_is"], group_by=[*columns])
    assert all(report.at(name) for name in columns)
    assert [place.key for place in report.at("odd")] == ["7", "1e999", "inf", "nan"], "which are text"
    path = write(tmp_path / "a.parquet", unused=[1, 2, 3, 4], prompt=["long " * 99] * 4)
    assert read(path).scalars == {"sequence_id": [0, 1, 2, 3], "unused": [1, 2, 3, 4]}, "small ones are read"


def test_a_group_has_one_key_in_whatever_numbers_it_is_written(tmp_path):
    """It is splitmix64 of the id modulo 2⁶⁴; for 0 and 1234567 as Vigna's splitmix64.c has it."""
    known = [0xE220A8397B1DCDAF, 6457827717110365317, 6457827717110365317]
    for kind in (pa.int32(), pa.uint64(), pa.float64()):
        key = read(write(tmp_path / "a.parquet", group_id=pa.array([0, 1234567, 1234567, None], kind))).key
        assert key.view(np.uint64).tolist()[:3] == known
    for ids in (["p", "q", "p", "r"], [7.0, 8.0, 7.0, 9.5], [-7, 2**40, -7, None]):
        key = read(write(tmp_path / "a.parquet", group_id=pa.array(ids).dictionary_encode())).key.tolist()
        assert (key[0] == key[2], len({*key})) == (True, 3)
    for rollout in ([[-1.0, -2.0], [-2.0, -1.0], [-1.0], [-1.0, -2.0]], [[-0.0], [-1.0], [-2.0], [0.0]]):
        key = read(write(tmp_path / "a.parquet", **both(rollout))).key.tolist()
        assert (key[0] == key[3], len({*key})) == (True, 3), "without groups equal responses have one"

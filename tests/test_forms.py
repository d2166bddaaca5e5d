"""Files that are no canonical dump: trainers' own and JSON lines; what comes back, and what is refused."""

from __future__ import annotations

import gc
import gzip
import json
import os
import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.dump import convert as conversion
from offpol_diag.dump import forms
from offpol_diag.dump.convert import convert, open_dump
from offpol_diag.dump.forms import FORMS, Row
from offpol_diag.errors import DumpError
from tests.factory import Table, converted, unconvertible, write
from tests.forms import pickled, written
from tests.forms.written import Written, batch
from tests.reading import analyze

Change = Callable[[Any], Any]
MADE = batch()
nemo_rl, prime_rl = written.nemo_rl, written.prime_rl
slime, ranks, skyrl = pickled.slime, pickled.ranks, pickled.skyrl


# ---------------------------------------------------------------- what trainers write


class Trip(NamedTuple):
    """How a trainer writes `MADE`, and what must come back.

    Attributes:
        write: writes it to a folder, and returns what is read.
        row: sequence i → further columns of its row; None is a column that is not there.
        sequences: those that must come back, in any order.
        groups: whether sequences of one prompt, and no others, must have one group.
        note: what must be noted.
    """

    write: Callable[[Path, Written], Path]
    row: Callable[[int], Mapping[str, Any]]
    sequences: Sequence[int] = range(8)
    groups: bool = True
    note: str = "read as "


def advantages(i: int) -> list[float]:
    return [MADE.advantages[i]] * len(MADE.responses[i])


def of_nemo(i: int) -> dict[str, Any]:
    return {"advantages": advantages(i), "step": 7, "sequence_id": f"7/{i}", "rewards": MADE.rewards[i]}


def of_prime(i: int) -> dict[str, Any]:
    row = {"current_log_probs": MADE.old[i].tolist(), "env_name": "math" if i < 4 else "code"}
    return row | {"advantages": [0.0] * len(MADE.responses[i]) if i == 7 else advantages(i)}


def of_skyrl(i: int) -> dict[str, Any]:
    rounded = torch.tensor(advantages(i)).to(torch.bfloat16).tolist()
    return {"sequence_id": f"6/{i}", "advantages": rounded, "step": 6}


def of_slime(i: int, beside: bool, rewards: Sequence[float] = MADE.rewards) -> dict[str, Any]:
    entropy = {"entropy": [0.5] * len(MADE.responses[i]), "rewards": rewards[i]}
    ids = {"sequence_id": f"13/{40 + i}", "step": 13, "advantages": advantages(i)}
    return entropy | ids | {"rollout_version": 11 if beside else None}


def folder_of(make: Callable[..., Path], rollouts: bool = False, **how: Any) -> Callable[..., Path]:
    """Return a writer of a folder, with slime's rollouts beside what is written."""

    def write(folder: Path, made: Written) -> Path:
        make(folder, made, **how)
        if rollouts:
            pickled.slime_rollout(folder, made)
        return folder

    return write


def first_counts(folder: Path, made: Written) -> Path:
    """Make a batch whose first token counts by its mask; its log-prob is a placeholder without loss."""
    return changed(lambda one: one["token_loss_mask"][0].__setitem__(0, 1))(nemo_rl(folder, made))


def appended(i: int) -> dict[str, Any]:
    return {"response_mask": [*MADE.mask[i][:-1].tolist(), 0]}


WITH_LOSS = [0, 1, 2, 3, 4, 6, 7]
LEFT_OUT = "1 sequences without a token that counts are left out"
TRIPS: dict[str, Trip] = {
    "nemo-rl": Trip(nemo_rl, of_nemo, WITH_LOSS, note=LEFT_OUT),
    "nemo-rl, index 0": Trip(first_counts, of_nemo, WITH_LOSS, note="NeMo-RL (nemo-rl)"),
    "prime-rl": Trip(folder_of(prime_rl), of_prime),
    "prime-rl, old": Trip(folder_of(prime_rl, old=True), of_prime),
    "slime": Trip(slime, partial(of_slime, beside=False), groups=False, note="read as slime (slime)"),
    "slime beside rollouts": Trip(folder_of(slime, True), partial(of_slime, beside=True)),
    **{
        f"ranks, {context} {miles=} {padded=} {beside=}": Trip(
            folder_of(ranks, beside, context=context, miles=miles, padded=padded),
            partial(of_slime, beside=beside, rewards=MADE.rewards if beside else MADE.advantages),
            groups=beside,
            note="read as miles, slime up to 0.3.1 (ranks)",
        )
        for context, miles, beside in ((1, False, False), (1, True, True), (2, True, True), (4, True, False))
        for padded in (False, True)
    },
    "skyrl": Trip(skyrl, of_skyrl),
    "skyrl, a token that was appended and not sampled": Trip(partial(skyrl, appended=True), appended),
}


@pytest.mark.parametrize("name", TRIPS)
def test_batches_written_by_trainers_come_back(name: str, tmp_path: Path) -> None:
    trip = TRIPS[name]
    rows, notes = converted(trip.write(tmp_path, MADE))
    contents = [values.tolist() for values in MADE.responses]
    order = [contents.index(row["token_ids"]) for row in rows]
    assert sorted(order) == list(trip.sequences)
    for i, row in zip(order, rows, strict=True):
        wanted = {"response_mask": MADE.mask[i].tolist()} | trip.row(i)
        if trip.row is not appended:
            wanted |= {"rollout_log_probs": MADE.rollout[i].tolist(), "old_log_probs": MADE.old[i].tolist()}
        assert {name: row.get(name) for name in wanted} == wanted
    if trip.groups:
        groups = [row["group_id"] for row in rows]
        assert [groups.index(one) for one in groups] == [[j // 2 for j in order].index(i // 2) for i in order]
    assert len({row["sequence_id"] for row in rows}) == len(rows)
    assert any(trip.note in note for note in notes), notes


def test_prime_rl_steps_that_are_not_stable_are_left_out(tmp_path: Path) -> None:
    prime_rl(tmp_path, MADE, step=2)
    last = prime_rl(tmp_path, batch(4), step=10, stable=False)
    rows, _ = converted(tmp_path)
    assert {row["step"] for row in rows} == {2}
    with pytest.raises(DumpError, match="no file STABLE, so its ranks may still be writing"):
        converted(last)


@pytest.mark.parametrize(
    ("miles", "says"), [(True, "context-parallel ranks are missing"), (False, "of 1 has")]
)
def test_a_missing_rank_and_slices_of_unknown_ranks_are_an_error(
    miles: bool, says: str, tmp_path: Path
) -> None:
    path = ranks(tmp_path, MADE, 2, miles)
    for rank in (0, 1, 8, 9):  # one part of the context, of one data-parallel group, in each stage
        (path / f"13_{rank}.pt").unlink()
    unconvertible(path, says)


# ---------------------------------------------------------------- JSON lines


def row(i: int) -> dict[str, Any]:
    """Make a sequence of 8 to 20 tokens whose numbers float32 holds."""
    random = np.random.default_rng(i)
    n = int(random.integers(8, 21))
    rollout = -random.exponential(1, n).astype(np.float32)
    return {
        "sequence_id": f"s{i}",
        "group_id": i // 4,
        "rollout_log_probs": rollout.tolist(),
        "old_log_probs": (rollout * np.float32(0.5)).tolist(),
        "response_mask": [int(at != 3) for at in range(n)],
        "token_ids": random.integers(0, 1000, n).tolist(),
        "rewards": float(i % 2),
        "host": "a" if i < 8 else "b",
        "weight_versions": [5 + at // 4 for at in range(n)],
        "prompt_length": i if i % 3 else None,
        "finish_reason": "stop" if i % 3 else None,
        "weight_digest_rollout": "a" if i % 4 else None,
    }


ROWS: Table = [row(i) for i in range(16)]


def lines(rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


WRITERS: Mapping[str, Callable[[Path, Table], Any]] = {
    "a.jsonl": lambda path, rows: path.write_bytes(lines(rows)),
    "windows.jsonl": lambda path, rows: path.write_bytes(
        b"\xef\xbb\xbf" + lines(rows).replace(b"\n", b"\r\n\r\n")
    ),
    "a.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows))),
    "a.parquet": lambda path, rows: write(path, pa.Table.from_pylist(rows)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_values_come_back_under_any_names(name: str, tmp_path: Path) -> None:
    names = {"rollout_log_probs": "mine", "old_log_probs": "theirs"}
    given = {"rollout": "mine", "old": "theirs"}
    for words, columns in ({}, {}), ({"response_mask": "mask"}, {}), (names, given):
        more = {"prompt": "p" * 100, "unread_log_probs": [-1.5]}
        WRITERS[name](tmp_path / name, [{words.get(x, x): y for x, y in one.items()} | more for one in ROWS])
        found, _ = converted(tmp_path / name, columns=columns)
        assert [{key: one[key] for key in ROWS[0]} for one in found] == ROWS


def test_an_analysis_of_another_form_is_that_of_the_dump_whose_temporary_file_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = analyze(write(tmp_path / "a.parquet", pa.Table.from_pylist(ROWS)), device="cpu")
    names, source, here = (
        {"rollout_log_probs": "logprobs", "response_mask": "mask"},
        tmp_path / "a.jsonl",
        tmp_path / "x",
    )
    renamed = [{names.get(x, x): y for x, y in one.items()} for one in ROWS]
    renamed[9]["note"] = [9]
    source.write_bytes(lines(renamed))
    here.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(here))
    other = analyze(source, device="cpu")
    assert {name: one.value for name, one in other.whole.items()} == pytest.approx(
        {name: one.value for name, one in plain.whole.items()}, nan_ok=True
    )
    assert other.dump.files == [str(source)]
    assert [other.dump.columns[x] for x in names] == [*names.values()]
    assert "read as jsonl" in other.dump.notes[0]
    dump = open_dump([str(source)])
    assert [path.stat().st_mode & 0o777 for path in here.iterdir()] == [0o700]
    del dump
    gc.collect()
    assert not list(here.iterdir())


def test_files_are_read_in_the_order_of_their_numbers_and_labels_of_several_kinds_are_text(
    tmp_path: Path,
) -> None:
    """A number may be written 1 or 1.0; what a later table has is stored as the first one is."""
    change: Table = [{"step": None, "attempt": 1}, {"step": 3, "attempt": "b"}, {"step": 4.0, "host": 7}]
    change += [{"step": float("nan"), "host": None}]
    for i, (a, b) in enumerate(zip(ROWS, change, strict=False)):
        (tmp_path / f"step_{i * 5}.jsonl").write_bytes(lines([a | b]))
    found, _ = converted(tmp_path)
    assert found == converted(tmp_path / "step_*.jsonl")[0]
    assert [one["step"] for one in found] == [None, 3, 4, None]
    assert [one["host"] for one in found] == ["a", "a", "7", None]
    assert [one["attempt"] for one in found] == ["1", "b", None, None]


def test_no_more_than_a_group_of_rows_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = most = 0

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def rows(*_: Any) -> Iterator[Row]:
        nonlocal alive, most
        for _ in range(500):
            column = np.full(5000, -0.5, np.float32)
            weakref.finalize(column, gone)
            alive += 1
            most = max(most, alive)
            yield {"rollout_log_probs": column, "old_log_probs": column}

    one = FORMS[0]._replace(path=".*", fields="logprobs", rows=rows)
    for module in (forms, conversion):
        monkeypatch.setattr(module, "FORMS", (one,))
    (tmp_path / "a.jsonl").write_bytes(lines([LOGS]))
    convert([str(tmp_path / "a.jsonl")], tmp_path / "out.parquet")
    assert most * 5000 < 2 * conversion.GROUP
    groups = pq.ParquetFile(tmp_path / "out.parquet").metadata
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [105] * 4 + [80]


# ---------------------------------------------------------------- mistakes


def changed(change: Change, *places: int) -> Callable[[Path], Path]:
    """Change the records of a file, or some of them."""

    def damage(path: Path) -> Path:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for place in places or range(len(records)):
            change(records[place])
        return written.lines(path, records)

    return damage


def cut_off(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-50])
    return path


def of_torch(change: Change, file: str = "") -> Callable[[Path], Path]:
    """Change a file of torch, or the only one that is left of a folder."""

    def damage(path: Path) -> Path:
        target = path / file
        value = torch.load(target)
        change(value)
        for one in target.parent.iterdir():
            one.unlink()
        torch.save(value, target)
        return target

    return damage


def of_sample(at: int, change: Change) -> Callable[[Path], Path]:
    return of_torch(lambda value: change(value["samples"][at]))


def replaced(this: bytes, other: bytes) -> Callable[[Path], Path]:
    """Replace some bytes of a file."""

    def damage(path: Path) -> Path:
        assert this in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(this, other))
        return path

    return damage


def put(**values: Any) -> Change:
    return lambda found: found.update(values)


def drop(name: str) -> Change:
    return lambda found: found.pop(name)


class Calls:
    """An object whose pickle calls a function."""

    def __reduce__(self) -> Any:
        return os.system, ("touch called",)


def with_call(path: Path) -> Path:
    """Make a pickle of what calls a function of the system."""
    path.write_bytes(pickle.dumps({"batch_dict": Calls()}))
    return path


def file_of(name: str, data: bytes) -> Callable[..., Path]:
    """Return a writer of a file."""

    def make(folder: Path, made: Written) -> Path:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
        return folder / name

    return make


def of_lines(*rows: Any) -> Callable[..., Path]:
    return file_of("a.jsonl", lines(rows))


def prime_rank(folder: Path, made: Written) -> Path:
    return prime_rl(folder, made) / "rank_0.jsonl"


def as_it_is(path: Path) -> Path:
    return path


LOGS = {"logprobs": [-1.0], "old_logprobs": [-1.0]}
ZEROS = changed(lambda one: one.update(prev_logprobs=[[0.0] * len(one["prev_logprobs"][0])]))
GZIPPED = {
    size: gzip.compress(line * (size // len(line))) for size, line in ((9 << 20, b" \n"), (8 << 20, b" "))
}
HOOK = "docs/trainers/{}.md has a hook"
MISTAKES: Sequence[tuple[Callable[..., Path], Callable[[Path], Path], str]] = [
    (of_lines(LOGS, [1]), as_it_is, "line 2: not as a writer of JSON lines writes it (list, no JSON obj"),
    (of_lines(), as_it_is, "no sequence that counts is in it"),
    (
        of_lines({"prompt": "a", "text": "b"}),
        as_it_is,
        "line 1: no column holds rollout_log_probs, and none old_",
    ),
    (
        of_lines(LOGS | {"step": float("inf")}),
        as_it_is,
        "step is not one plain value per sequence: Float value inf",
    ),
    (of_lines(LOGS | {"logprobs": [[-1.0]]}), as_it_is, "(logprobs is no list of num"),
    (of_lines(LOGS | {"logprobs": ["a"]}), as_it_is, "(logprobs is no list of num"),
    (of_lines({"logprobs": [-1.0]}), as_it_is, "line 1: no column holds old_log_probs or current_log_probs"),
    (of_lines(LOGS | {"old_logprobs": [-1.0, -2.0]}), as_it_is, "old_log_probs, sequence 0: 2 tokens"),
    (of_lines(LOGS, {"logprobs": [-1.0], "log_prob": [-1.0]}), as_it_is, "old_log_probs, sequence 1"),
    (of_lines(LOGS | {"rollout_logps": [-1.0]}), as_it_is, "can each be"),
    (of_lines(LOGS | {"loss_mask": [0.5]}), as_it_is, "response_mask"),
    (of_lines({"logprobs": [], "old_logps": []}), as_it_is, "no sequence that counts"),
    (file_of("a.jsonl", b"hello"), as_it_is, "line 1: not as a writer of JSON lines writes it"),
    (file_of("a.jsonl", b"{" + b'"a":{' * 100_000), as_it_is, "line 1: not as a writer of JSON"),
    *((file_of("a.jsonl.gz", data), as_it_is, "unfolds to more than 100 times") for data in GZIPPED.values()),
    (of_lines({"input": "a", "output": "b", "score": 1.0}), as_it_is, HOOK.format("verl")),
    (of_lines({"prompt": ["a"], "completion": ["b"]}), as_it_is, HOOK.format("trl")),
    (file_of("rollout_data/13.pt", b""), as_it_is, "docs/trainers.md has a hook for each trainer"),
    (file_of("r.json", b"{}"), as_it_is, "r.json` draws a result"),
    (nemo_rl, cut_off, "line 8: not as NeMo-RL writes it"),
    (
        nemo_rl,
        changed(drop("input_lengths"), 2),
        "line 3: not as NeMo-RL writes it (no field 'input_lengths')",
    ),
    (nemo_rl, changed(drop("token_loss_mask"), 0), "(no field 'token_loss_mask')"),
    (
        nemo_rl,
        changed(put(prev_logprobs=[["a"]]), 2),
        "line 3: not as NeMo-RL writes it (prev_logprobs is no list",
    ),
    (nemo_rl, changed(put(token_ids=[[None] * 20]), 2), "token_ids does not fit int32"),
    (nemo_rl, changed(put(sample_loss_mask=["a"]), 2), "line 3: not as NeMo-RL writes it"),
    (nemo_rl, ZEROS, HOOK.format("nemo-rl")),  # that pass was skipped
    (prime_rank, cut_off, "line 4: not as prime-rl writes it"),
    (prime_rank, changed(put(trainer_logprobs=3), 2), "(trainer_logprobs is no list"),
    (slime, of_torch(put(samples=["a"])), "13.pt: not as slime writes it"),
    (slime, of_sample(3, drop("loss_masks")), "sample 43: not as slime writes it (no field 'loss_masks')"),
    (slime, of_sample(0, drop("log_probs")), "no column holds old_log_probs or current_log_probs"),
    (
        slime,
        of_sample(2, put(response_lengths=10**6)),
        "sample 42: not as slime writes it (rank 0 of 1 has no",
    ),
    (slime, of_sample(1, put(log_probs=torch.zeros(3))), "(3 log_probs, and rank 0 of 1 has 27"),
    (slime, of_sample(1, put(log_probs=torch.zeros(1).expand(1 << 40))), "log_probs repeats the numbers of"),
    (slime, of_torch(put(samples=Calls())), "13.pt: not as slime writes it (Weights only load failed"),
    (slime, cut_off, "13.pt: not as slime writes it ("),
    (
        ranks,
        of_torch(lambda x: x["rollout_data"].pop("response_lengths"), "13_4.pt"),
        "no field 'response_len",
    ),
    (ranks, of_torch(put(cp_size=2), "13_4.pt"), "and rank 0 of 2 has 3"),
    (skyrl, replaced(b"loss_mask", b"loss_musk"), "no field 'loss_mask'"),
    (skyrl, with_call, "not as SkyRL writes it"),
    (skyrl, cut_off, "not as SkyRL writes it (pickle data was truncated"),
    (skyrl, replaced(b"float32", b"float16"), "not as SkyRL writes it"),
]


@pytest.mark.parametrize(("make", "damage", "says"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_one_error_with_a_hint_and_no_code_of_a_pickle_runs(
    make: Callable[..., Path],
    damage: Callable[[Path], Path],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forms, "FREE", 1 << 20)
    unconvertible(damage(make(tmp_path, MADE)), says)
    assert not (tmp_path / "called").exists()


def test_an_error_about_the_temporary_dump_names_the_file(tmp_path: Path) -> None:
    source = str(tmp_path / "a.jsonl")
    Path(source).write_bytes(lines(ROWS))
    for how, says in (
        ({"group_by": ["nosuch"]}, f"{source}: --group-by: there is no column 'nosuch'"),
        ({"columns": {"rollout": "nothing"}}, f"{source}, line 1: --columns: there is no column 'nothing'"),
    ):
        with pytest.raises(DumpError) as caught:
            open_dump([source], **how)
        assert caught.value.message == says


def test_files_of_several_forms_are_one_error_that_names_each(tmp_path: Path) -> None:
    path, other = tmp_path / "a.parquet", tmp_path / "b.jsonl"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    other.write_bytes(lines(ROWS))
    for sources in ([str(tmp_path / "*")], [str(path), str(other)]):
        with pytest.raises(DumpError) as caught:
            open_dump(sources)
        assert caught.value.message == f"the files are of several forms: {path} is parquet; {other} is jsonl"
    assert open_dump([str(tmp_path)]).info.files == (str(path),), "of a folder Parquet alone is read"
    written.prime_rl(tmp_path / "d", written.batch())
    pickled.slime(tmp_path / "d", written.batch())
    with pytest.raises(DumpError, match="of several forms"):
        open_dump([str(tmp_path / "d")])


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_a_dump_replaces_no_directory_no_device_and_nothing_that_is_read(kind: str, tmp_path: Path) -> None:
    """A pipe stands for /dev/null, which a rename by root would make a file."""
    source, target = tmp_path / "a.jsonl", tmp_path / "there"
    source.write_bytes(lines(ROWS))
    os.mkfifo(target) if kind == "pipe" else target.mkdir()
    for to, says in (target, "directory"), (source, "is what is read"):
        result = CliRunner().invoke(app, ["convert", str(source), "--to", str(to)])
        assert (result.exit_code, says in result.stderr) == (2, True), result.stderr
    assert (target.is_fifo(), target.is_dir()) == (kind == "pipe", kind != "pipe")
    assert len([*tmp_path.iterdir()]) == 2

"""Trainers' own files: what was put in comes back, and what is wrong is one error."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from offpol_diag.dump.convert import open_dump
from offpol_diag.errors import DumpError
from tests.factory import converted, unconvertible
from tests.forms import pickled, written
from tests.forms.written import Written, batch

Change = Callable[[Any], Any]
MADE = batch()
WITH_LOSS = [0, 1, 2, 3, 4, 6, 7]
nemo_rl, prime_rl = written.nemo_rl, written.prime_rl
slime, ranks, skyrl = pickled.slime, pickled.ranks, pickled.skyrl


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


TEXTS = {"input": "a", "output": "b", "score": 1.0}
ALONE: dict[str, tuple[Mapping[str, Any], str]] = {
    "5.jsonl": (TEXTS, "verl"),
    "5/gen_batch.dp": ({}, "verl"),
    "5/0/tq_batch.pt": ({}, "verl"),
    "completions/completions_00010.parquet": ({"step": 10, "prompt": "a", "completion": "b"}, "trl"),
    "completions.jsonl": ({"prompt": ["a"], "completion": ["b"], "advantages": [1.0]}, "trl"),
    "rollout_data/13.pt": ({}, "slime"),
    "dashboard_columns/rollout_13.parquet": (
        {"sample_index": 1, "response_length": 1, "tokens": [3], "rollout_log_probs": [-1.0]},
        "slime",
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_has_the_log_probs_of_one_policy_is_refused_with_the_page_of_the_hook(
    name: str, tmp_path: Path
) -> None:
    (record, page), path = ALONE[name], tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([record]), path)
    else:
        path.write_text(json.dumps(record))
    for given in (path, tmp_path):
        with pytest.raises(DumpError, match="writes no file with the log-probs of both policies") as caught:
            open_dump([str(given)])
        assert caught.value.hint == f"docs/trainers/{page}.md has a hook that writes them"
    assert (Path(__file__).parents[1] / "docs" / "trainers" / f"{page}.md").exists()


def test_columns_that_a_hook_adds_to_a_trainers_own_file_are_read(tmp_path: Path) -> None:
    logs = {"sampling_per_token_logps": [-1.0], "old_per_token_logps": [-1.0]}
    table = pa.Table.from_pylist([{"step": 1, "prompt": "a", "completion": "b"} | logs])
    pq.write_table(table, tmp_path / "completions_00001.parquet")
    assert open_dump([str(tmp_path)]).info.columns["old_log_probs"] == "old_per_token_logps"


def test_prime_rl_steps_that_are_not_stable_are_left_out(tmp_path: Path) -> None:
    prime_rl(tmp_path, MADE, step=2)
    last = prime_rl(tmp_path, batch(4), step=10, stable=False)
    rows, notes = converted(tmp_path)
    assert {row["step"] for row in rows} == {2}
    assert f"{last} has no file STABLE and is left out" in notes
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
    with pytest.raises(DumpError, match=says) as caught:
        converted(path)
    assert caught.value.hint.startswith("convert the files of all ranks of a rollout together")


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


def of_data(change: Change) -> Callable[[Path], Path]:
    return of_torch(lambda value: change(value["rollout_data"]), "13_4.pt")


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


def prime_rank(folder: Path, made: Written) -> Path:
    return prime_rl(folder, made) / "rank_0.jsonl"


class Calls:
    """An object whose pickle calls a function."""

    def __reduce__(self) -> Any:
        return os.system, ("touch called",)


def with_call(path: Path) -> Path:
    """Make a pickle of what calls a function of the system."""
    path.write_bytes(pickle.dumps({"batch_dict": Calls()}))
    return path


ZEROS = changed(lambda one: one.update(prev_logprobs=[[0.0] * len(one["prev_logprobs"][0])]))
WORDS = {"prev_logprobs": [["a"]]}
MISTAKES: Sequence[tuple[Callable[..., Path], Callable[[Path], Path], str]] = [
    (nemo_rl, cut_off, "line 8: no JSON"),
    (nemo_rl, changed(drop("input_lengths"), 2), "line 3: no field 'input_lengths'"),
    (nemo_rl, changed(drop("token_loss_mask"), 0), "line 1: no 'token_loss_mask'"),
    (nemo_rl, changed(drop("token_ids"), 2), "line 3: no field 'token_ids'"),
    (nemo_rl, changed(put(**WORDS), 2), "line 3: not as NeMo-RL writes it (prev_logprobs is no list"),
    (nemo_rl, changed(put(token_ids=[[None] * 20]), 2), "token_ids does not fit int32"),
    (nemo_rl, changed(put(sample_loss_mask=["a"]), 2), "line 3: not as NeMo-RL writes it"),
    (nemo_rl, ZEROS, "line 1: no column holds old_log_probs or current"),  # that pass was skipped
    (prime_rank, cut_off, "line 4: no JSON"),
    (prime_rank, changed(put(trainer_logprobs=3), 2), "(trainer_logprobs is no list"),
    (slime, of_torch(put(samples=["a"])), "13.pt: not as slime writes it"),
    (slime, of_sample(3, drop("loss_masks")), "sample 43: no field 'loss_masks'"),
    (slime, of_sample(0, drop("log_probs")), "no column holds old_log_probs or current_log_probs"),
    (
        slime,
        of_sample(2, put(response_lengths=10**6)),
        "sample 42: not as slime writes it (the response has no",
    ),
    (slime, of_sample(1, put(log_probs=torch.zeros(3))), "sample 41: 3 log_probs, and rank 0 of 1 has 27"),
    (slime, of_sample(1, put(log_probs=torch.zeros(1).expand(1 << 40))), "log_probs repeats the numbers of"),
    (slime, of_torch(put(samples=Calls())), "refuses it (Trying to load unsupported GLOBAL posix.system"),
    (slime, cut_off, "torch.load refuses it ("),
    (ranks, of_data(drop("response_lengths")), "no field 'response_lengths'"),
    (ranks, of_data(put(log_probs=[["a"]] * 4)), "(log_probs is no list"),
    (ranks, of_torch(put(cp_size=2), "13_4.pt"), "and rank 0 of 2 has 3"),
    (skyrl, replaced(b"loss_mask", b"loss_musk"), "no field 'loss_mask'"),
    (skyrl, with_call, "not as SkyRL writes it"),
    (skyrl, cut_off, "not as SkyRL writes it (pickle data was truncated"),
    (skyrl, replaced(b"float32", b"float16"), "not as SkyRL writes it"),
    (skyrl, replaced(b"float32", b"floatxx"), "not as SkyRL writes it"),
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
    unconvertible(damage(make(tmp_path, MADE)), says)
    assert not (tmp_path / "called").exists()

"""Check the conversion of trainers' own files: equal to what was put in, and clear errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offpol_diag.core.observe import analyze
from offpol_diag.dump import forms as reader
from offpol_diag.dump.convert import open_dump
from offpol_diag.errors import DumpError
from tests.factory import converted, unconvertible
from tests.forms import pickled, written
from tests.forms.written import Written, batch

TOKENS = ("rollout_log_probs", "old_log_probs", "response_mask", "token_ids")
LOGS = TOKENS[:3]
EVERY = (*TOKENS, "rewards")
Make = Callable[[Path, Written], Path]


def expected(made: Written, i: int) -> dict[str, Any]:
    """Return a sequence from the first token that counts to the last one."""
    lists = dict(zip(TOKENS, (made.rollout, made.old, made.mask, made.responses), strict=True))
    return {name: rows[i].tolist() for name, rows in lists.items()} | {"rewards": made.rewards[i]}


# ---------------------------------------------------------------- round trips


@dataclass(frozen=True)
class Trip:
    """A batch as a trainer writes it, and what must come back.

    Attributes:
        names: columns that must be those of the batch.
        also: sequence i of a batch → further columns of its row; None is a column that is not there.
        order: sequences that must come back, in order; in any order without.
        groups: whether sequences of one prompt, and no others, must have one group.
        notes: what must be noted.
    """

    write: Make
    names: Sequence[str] = EVERY
    also: Callable[[Written, int], Mapping[str, Any]] = lambda made, i: {}
    order: Sequence[int] | None = range(8)
    groups: bool = False
    notes: Sequence[str] = ()
    made: Callable[[], Written] = batch


def advantages(made: Written, i: int) -> list[float]:
    return [made.advantages[i]] * len(made.responses[i])


def every_mask(path: Path) -> Path:
    """Make a batch whose first token counts by its mask; its log-prob is a placeholder without loss."""
    return changed(lambda record: record["token_loss_mask"][0].__setitem__(0, 1))(path)


def folder_of(make: Callable[..., Path], **how: Any) -> Make:
    def write(folder: Path, made: Written) -> Path:
        make(folder, made, **how)
        return folder

    return write


def beside(make: Make) -> Make:
    """Put the rollouts of slime in the folder."""

    def write(folder: Path, made: Written) -> Path:
        pickled.slime_rollout(folder, made)
        return make(folder, made)

    return write


def ids(made: Written, i: int) -> dict[str, Any]:
    return {"sequence_id": f"13/{40 + i}", "step": 13, "advantages": advantages(made, i)}


def of_ranks(context: int, miles: bool, padded: bool, there: bool) -> Trip:
    """Make ranks of data, tensor, pipeline and context parallelism; files up to 0.3.1 do not say which."""
    make = partial(pickled.ranks, context=context, miles=miles, padded=padded)
    return Trip(
        beside(make) if there else make,
        TOKENS,
        lambda made, i: ids(made, i) | {"rewards": (made.rewards if there else made.advantages)[i]},
        order=None,
        groups=there,
        notes=("read as miles, slime up to 0.3.1 (ranks)",),
    )


def of_prime(made: Written, i: int) -> dict[str, Any]:
    row = {"current_log_probs": made.old[i].tolist(), "env_name": "math" if i < 4 else "code"}
    return row | {"advantages": [0.0] * len(made.responses[i]) if i == 7 else advantages(made, i)}


def of_skyrl(made: Written, i: int) -> dict[str, Any]:
    rounded = torch.tensor(advantages(made, i)).to(torch.bfloat16).tolist()
    return {"sequence_id": f"6/{i}", "group_id": i // 2, "advantages": rounded}


def of_nemo(made: Written, i: int) -> dict[str, Any]:
    return {"advantages": advantages(made, i), "step": 7, "sequence_id": f"7/{i}"}


def of_loss(made: Written, i: int) -> dict[str, Any]:
    return {"current_log_probs": (made.old[i] - np.float32(0.25)).tolist()}


def of_slime(made: Written, i: int) -> dict[str, Any]:
    return ids(made, i) | {
        "entropy": [0.5] * len(made.responses[i]),
        "group_id": None,
        "rollout_version": None,
    }


def of_both(made: Written, i: int) -> dict[str, Any]:
    return ids(made, i) | {"group_id": i // 2, "rollout_version": 11}


BY_RANK, STABLE = (0, 2, 4, 6, 1, 3, 5, 7), [0, 1, 2, 3, 4, 6, 7]
NO_IDS = (*LOGS, "rewards")
LEFT_OUT = "1 sequences without a token that counts are left out"
NEMO = "NeMo-RL (nemo-rl)"
SLIME = "read as slime (slime)"
TRIPS: dict[str, Trip] = {
    "nemo-rl": Trip(written.nemo_rl, EVERY, of_nemo, order=STABLE, groups=True, notes=(LEFT_OUT, NEMO)),
    "nemo-rl, index 0": Trip(lambda *args: every_mask(written.nemo_rl(*args)), order=STABLE),
    "prime-rl": Trip(folder_of(written.prime_rl), EVERY, of_prime, order=BY_RANK, groups=True),
    "prime-rl, old": Trip(
        folder_of(written.prime_rl, old=True), TOKENS, of_prime, order=BY_RANK, groups=True
    ),
    "slime": Trip(pickled.slime, EVERY, of_slime, notes=(SLIME,)),
    "slime beside rollouts": Trip(beside(pickled.slime), EVERY, of_both, notes=(SLIME,)),
    **{
        f"ranks, {context} {miles=} {padded=}": of_ranks(context, miles, padded, context == 2 or padded)
        for context, miles in ((1, False), (1, True), (2, True), (4, True))
        for padded in (False, True)
    },
    "skyrl": Trip(pickled.skyrl, TOKENS, of_skyrl),
    "skyrl, appended": Trip(  # a token that was appended, not sampled, is masked
        partial(pickled.skyrl, appended=True),
        (),
        lambda made, i: {"response_mask": [*made.mask[i][:-1].tolist(), 0]},
    ),
}

ALONE = {
    "verl": (written.verl, "verl"),
    "verl's batch": (pickled.verl, "verl"),
    "verl's queue": (pickled.verl_queue, "verl"),
    "TRL": (partial(written.trl, hooked=False), "trl"),
    "ms-swift": (written.ms_swift, "trl"),
    "rollouts of slime": (pickled.slime_rollout, "slime"),
    "miles' columns": (pickled.miles_columns, "slime"),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_has_the_log_probs_of_one_policy_is_refused_with_the_page_of_the_hook(
    name: str, tmp_path: Path
) -> None:
    write, page = ALONE[name]
    source = write(tmp_path, batch())
    for given in (source, tmp_path):
        with pytest.raises(DumpError, match="writes no file with the log-probs of both policies") as caught:
            open_dump([str(given)])
        assert caught.value.hint == f"docs/trainers/{page}.md has a hook that writes them"
    assert (Path(__file__).parents[1] / "docs" / "trainers" / f"{page}.md").exists()


def test_columns_that_a_hook_adds_to_a_trainers_own_file_are_read(tmp_path: Path) -> None:
    columns = open_dump([str(written.trl(tmp_path, batch()))]).info.columns
    assert columns["old_log_probs"] == "old_per_token_logps"


@pytest.mark.parametrize("name", TRIPS)
def test_batches_written_by_trainers_come_back(name: str, tmp_path: Path) -> None:
    trip = TRIPS[name]
    made = trip.made()
    source = trip.write(tmp_path, made)
    rows, notes = converted(source)
    if trip.order is None:
        contents = [values.tolist() for values in made.rollout]
        order = [contents.index(row["rollout_log_probs"]) for row in rows]
        assert sorted(order) == list(range(8))
    else:
        order = list(trip.order)
    for i, row in zip(order, rows, strict=True):
        wanted = {name: expected(made, i)[name] for name in trip.names} | trip.also(made, i)
        assert {name: row.get(name) for name in wanted} == wanted
    if trip.groups:
        groups = [row["group_id"] for row in rows]
        assert [groups.index(one) for one in groups] == [[j // 2 for j in order].index(i // 2) for i in order]
    assert len({row["sequence_id"] for row in rows if "sequence_id" in row}) in (0, len(rows))
    assert all(any(said in note for note in notes) for said in trip.notes), notes


def test_prime_rl_steps_that_are_not_stable_are_left_out(tmp_path: Path) -> None:
    written.prime_rl(tmp_path, batch(), step=2)
    last = written.prime_rl(tmp_path, batch(4), step=10, stable=False)
    rows, notes = converted(tmp_path)
    assert {row["step"] for row in rows} == {2}
    assert f"{last} has no file STABLE and is left out" in notes
    with pytest.raises(DumpError, match="no file STABLE, so its ranks may still be writing"):
        converted(last)


def test_slices_lie_where_the_trainer_cuts_them() -> None:
    for total in range(2, 40):
        for response in range(1, total):
            for count in (2, 4):
                for rank in range(count):
                    found = np.flatnonzero(reader._places(total, response, total, rank, count)).tolist()
                    spans = pickled.spans(total, response, rank, count)
                    assert found == [at for begin, end in spans for at in range(begin, end)]


@pytest.mark.parametrize("miles", [False, True])
def test_a_missing_rank_and_slices_of_unknown_ranks_are_an_error(miles: bool, tmp_path: Path) -> None:
    path = pickled.ranks(tmp_path, batch(), 2, miles)
    for rank in (0, 1, 8, 9):  # one part of the context, of one data-parallel group, in each stage
        (path / f"13_{rank}.pt").unlink()
    with pytest.raises(DumpError, match="context-parallel ranks") as caught:
        converted(path)
    says = "convert the files of all ranks of a rollout together, and none of another run"
    assert caught.value.hint.startswith(says)


def test_the_numbers_are_those_computed_by_hand(tmp_path: Path) -> None:
    made = batch()
    summary = analyze(written.nemo_rl(tmp_path, made), device="cpu")
    gaps = np.concatenate(
        [(made.old[i].astype(np.float64) - made.rollout[i])[made.mask[i] == 1] for i in STABLE]
    )
    assert summary.whole["k1"].value == pytest.approx(-gaps.mean(), rel=1e-12)
    assert summary.whole["k3"].value == pytest.approx((np.expm1(gaps) - gaps).mean(), rel=1e-9)


# ---------------------------------------------------------------- mistakes

Change = Callable[[Any], Any]


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


def of_rank(change: Change) -> Callable[[Path], Path]:
    return of_torch(change, "13_4.pt")


def of_data(change: Change) -> Callable[[Path], Path]:
    return of_rank(lambda value: change(value["rollout_data"]))


def of_call(change: Change) -> Callable[[Path], Path]:
    return of_torch(lambda value: change(value["samples"][0]), "rank_0_call_1.pt")


def of_sample(at: int, change: Change) -> Callable[[Path], Path]:
    return of_torch(lambda value: change(value["samples"][at]))


def replaced(this: bytes, other: bytes) -> Callable[[Path], Path]:
    """Replace some bytes of a file."""

    def damage(path: Path) -> Path:
        data = path.read_bytes()
        assert this in data
        path.write_bytes(data.replace(this, other))
        for one in path.parent.glob("*.json"):
            one.unlink()
        return path

    return damage


def put(**values: Any) -> Change:
    return lambda found: found.update(values)


def drop(name: str) -> Change:
    return lambda found: found.pop(name)


ZEROS = changed(lambda r: r.update(prev_logprobs=[[0.0] * len(r["prev_logprobs"][0])]))
SPLIT = partial(pickled.policy_loss, context=2)
LONG = of_rank(
    lambda value: (value["rollout_data"].update(response_lengths=[1 << 30] * 4), value.pop("cp_rank"))
)
nemo_rl, prime_rank = written.nemo_rl, written.prime_rank
slime, ranks, skyrl = pickled.slime, pickled.ranks, pickled.skyrl
MISTAKES: Mapping[str, tuple[Callable[..., Path], Callable[[Path], Path], str]] = {
    "nemo: cut off": (nemo_rl, cut_off, "line 8: no JSON"),
    "nemo: no length": (nemo_rl, changed(drop("input_lengths"), 2), "no field 'input_lengths'"),
    "nemo: no column": (nemo_rl, changed(drop("token_ids"), 2), "line 3: no field 'token_ids'"),
    "nemo: words": (
        nemo_rl,
        changed(put(prev_logprobs=[["a"]]), 2),
        "line 3: not as NeMo-RL writes it (prev_logprobs is no list",
    ),
    "nemo: a word": (nemo_rl, changed(put(sample_loss_mask=["a"]), 2), "line 3: not as NeMo-RL writes it"),
    "nemo: the pass was skipped": (nemo_rl, ZEROS, "line 1: no log-probs of the trainer"),
    "prime: cut off": (prime_rank, cut_off, "line 4: no JSON"),
    "prime: lists": (prime_rank, changed(put(trainer_logprobs=3), 2), "(trainer_logprobs is no list"),
    "slime: no samples": (slime, of_torch(put(samples=3)), "13.pt: not as slime writes it"),
    "slime: words": (slime, of_torch(put(samples=["a"])), "sample 0: not as slime writes it"),
    "slime: no mask": (slime, of_sample(3, drop("loss_masks")), "sample 3: no field 'response_mask'"),
    "slime: no log-probs": (slime, of_sample(0, drop("log_probs")), "no log-probs of the trainer"),
    "slime: length": (
        slime,
        of_sample(2, put(response_lengths=10**6)),
        "sample 2: not as slime writes it (the response has no length",
    ),
    "slime: short": (
        slime,
        of_sample(1, put(log_probs=torch.zeros(3))),
        "old_log_probs, sequence 1: 3 tokens but",
    ),
    "rank: no lengths": (ranks, of_data(drop("response_lengths")), "no field 'response_lengths'"),
    "rank: words": (ranks, of_data(put(response_lengths=["a"])), "not as slime writes it"),
    "rank: log-probs": (ranks, of_data(put(log_probs=[["a"]] * 4)), "(log_probs is no list"),
    "rank: long": (ranks, LONG, "the response has no length, or one that exceeds"),
    "rank: another size": (ranks, of_rank(put(cp_size=2)), "for 2 context-parallel ranks"),
    "skyrl: no mask": (skyrl, replaced(b"loss_mask", b"loss_musk"), "no field 'loss_mask'"),
    "skyrl: size": (skyrl, replaced(b"float32", b"float16"), "not as SkyRL writes it"),
    "skyrl: type": (skyrl, replaced(b"float32", b"floatxx"), "not as SkyRL writes it"),
    "skyrl: class": (skyrl, replaced(b"InputBatch", b"InputBotch"), "TrainingInputBotch, which"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_error_with_a_hint(name: str, tmp_path: Path) -> None:
    make, damage, says = MISTAKES[name]
    unconvertible(damage(make(tmp_path, batch())), says)

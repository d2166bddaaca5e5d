"""Check the conversion of trainers' own files: equal to what was put in, and clear errors."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from offpol_diag.analyze import analyze
from offpol_diag.errors import DumpError
from offpol_diag.forms import open_dump, pickles
from offpol_diag.forms import slime as reader
from offpol_diag.forms.detect import find
from offpol_diag.forms.form import Row
from offpol_diag.forms.trainers import _prompt
from tests.factory import converted, unconvertible, write
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


def joinable(folder: Path, made: Written, *names: str) -> Path:
    """Write a second file with log-probs, in the order of the batch."""
    columns = {name: [expected(made, i)[name] for i in range(len(made))] for name in names}
    return Path(write(folder / "other.parquet", pa.table(columns)))


# ---------------------------------------------------------------- round trips


@dataclass(frozen=True)
class Trip:
    """A batch as a trainer writes it, and what must come back.

    Attributes:
        names: columns that must be those of the batch.
        also: sequence i of a batch → further columns of its row; None is a column that is not there.
        join: columns that another file has, in the order of the batch; or a writer of a file with old
            log-probs, which are joined by their ids.
        order: sequences that must come back, in order; in any order without.
        groups: whether sequences of one prompt, and no others, must have one group.
        notes: what must be noted.
    """

    write: Make
    names: Sequence[str] = EVERY
    also: Callable[[Written, int], Mapping[str, Any]] = lambda made, i: {}
    join: Sequence[str] | Make = ()
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


def holed(folder: Path, made: Written) -> Path:
    """Mask a tool's tokens by zeros, and one of them by NaN."""
    path = written.open_instruct(folder, made)
    made.mask[1] = (made.rollout[1] != 0).astype(np.int64)
    return path


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
        notes=("read as slime up to 0.3.1, miles (ranks)",),
    )


def swift(kind: str) -> Trip:
    make = partial(written.ms_swift, kind=kind)
    return Trip(make, LOGS, lambda made, i: {"step": 2, "advantages": made.advantages[i]})


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


def halves(made: Written, i: int) -> dict[str, Any]:
    return {"entropy": [0.5] * len(made.responses[i])}


def of_slime(made: Written, i: int) -> dict[str, Any]:
    return ids(made, i) | halves(made, i) | {"group_id": None, "rollout_version": None}


def of_both(made: Written, i: int) -> dict[str, Any]:
    return ids(made, i) | {"group_id": i // 2, "rollout_version": 11}


def group(prefix: str, **more: Any) -> Callable[[Written, int], dict[str, Any]]:
    return lambda made, i: {"group_id": f"{prefix}{i // 2}", **more}


OLD = ("old_log_probs",)
BY_RANK, STABLE = (0, 2, 4, 6, 1, 3, 5, 7), [0, 1, 2, 3, 4, 6, 7]
NO_IDS = (*LOGS, "rewards")
LEFT_OUT = "1 sequences without a token that counts are left out"
NEMO = "NeMo-RL (nemo-rl); log-probs: whole sequence, shift 0, padded on the right"
SLIME = "read as slime (slime); log-probs: response only, shift 0"
TRIPS: dict[str, Trip] = {
    "nemo-rl": Trip(written.nemo_rl, EVERY, of_nemo, order=STABLE, groups=True, notes=(LEFT_OUT, NEMO)),
    "nemo-rl, index 0": Trip(lambda *args: every_mask(written.nemo_rl(*args)), order=STABLE),
    "nemo-rl 0.5": Trip(partial(written.nemo_rl, version="0.5"), NO_IDS, made=partial(batch, tool=False)),
    "nemo-rl 0.5, tool": Trip(partial(written.nemo_rl, version="0.5"), NO_IDS),
    "prime-rl": Trip(folder_of(written.prime_rl), EVERY, of_prime, order=BY_RANK, groups=True),
    "prime-rl, old": Trip(
        folder_of(written.prime_rl, old=True), TOKENS, of_prime, order=BY_RANK, groups=True
    ),
    "roll": Trip(written.roll, EVERY, halves, join=("rollout_log_probs", "token_ids"), groups=True),
    "open-instruct": Trip(holed, EVERY, group("40/"), join=OLD),
    "verl": Trip(written.verl, EVERY, group("0a-1b"), join=TOKENS),
    "verl without uid": Trip(partial(written.verl, uid=False), join=TOKENS, groups=True),
    "trl": Trip(written.trl, LOGS, lambda made, i: {"advantages": made.advantages[i]}, groups=True),
    **{f"ms-swift, {kind}": swift(kind) for kind in ("hf", "megatron", "ray")},
    "slime": Trip(pickled.slime, EVERY, of_slime, notes=(SLIME,)),
    "slime beside rollouts": Trip(beside(pickled.slime), EVERY, of_both, notes=(SLIME,)),
    "rollouts of slime": Trip(pickled.slime_rollout, join=pickled.slime),
    "rollouts of slime, by row": Trip(pickled.slime_rollout, join=OLD),
    "rollouts of miles": Trip(partial(pickled.slime_rollout, miles=True), join=pickled.slime),
    "miles' columns": Trip(pickled.miles_columns, TOKENS, join=partial(pickled.ranks, context=2)),
    **{
        f"ranks, {context} {miles=} {padded=}": of_ranks(context, miles, padded, context == 2 or padded)
        for context, miles in ((1, False), (1, True), (2, True), (4, True))
        for padded in (False, True)
    },
    "policy loss": Trip(pickled.policy_loss, LOGS, of_loss, order=None),
    "skyrl": Trip(pickled.skyrl, TOKENS, of_skyrl, notes=("response only, shift 0, padded on the left",)),
    "skyrl, appended": Trip(  # a token that was appended, not sampled, is masked
        partial(pickled.skyrl, appended=True),
        (),
        lambda made, i: {"response_mask": [*made.mask[i][:-1].tolist(), 0]},
    ),
    **{
        f"verl's batch, {numpy=}": Trip(
            partial(pickled.verl, numpy=numpy),
            EVERY,
            lambda made, i: {"group_id": f"u{i // 2}", "step": 5, "rollout_version": i},
        )
        for numpy in (False, True)
    },
    "verl's batch without a mask": Trip(partial(pickled.verl, mask=False), made=partial(batch, tool=False)),
    "verl's skip cache": Trip(partial(pickled.verl, old=False), EVERY, group("u", step=5), join=OLD),
    "verl's queue": Trip(pickled.verl_queue, EVERY, group("0a-1b", step=5), join=OLD),
}


@pytest.mark.parametrize(
    ("write", "whose", "page"),
    [
        (written.verl, "rollout and none of the trainer", "verl"),
        (partial(written.trl, hooked=False), "rollout and none of the trainer", "trl"),
        (partial(pickled.verl, old=False), "trainer", "verl"),
    ],
)
def test_what_a_trainer_writes_without_log_probs_is_refused_with_the_page_of_its_hook(
    write: Any, whose: str, page: str, tmp_path: Path
) -> None:
    source = write(tmp_path, batch())
    with pytest.raises(DumpError, match=f"no log-probs of the {whose}$") as caught:
        open_dump([str(source)])
    names = "old_log_probs" if whose == "trainer" else "rollout_log_probs,old_log_probs"
    hook = f"docs/trainers/{page}.md has a hook of ten lines that writes both"
    assert caught.value.hint.startswith(f"{hook}, or add them with --join FILE:{names};")
    assert "--columns" not in caught.value.hint
    assert (Path(__file__).parents[1] / "docs" / "trainers" / f"{page}.md").exists()


@pytest.mark.parametrize("name", TRIPS)
def test_batches_written_by_trainers_come_back(name: str, tmp_path: Path) -> None:
    trip = TRIPS[name]
    made = trip.made()
    reading: dict[str, str] = {}
    source = trip.write(tmp_path, made)
    if callable(trip.join):
        unconvertible(source, "no log-probs of the trainer")
        reading = {"join": f"{trip.join(tmp_path, made)}:old_log_probs"}
    elif trip.join:
        lacking = "rollout" if "rollout_log_probs" in trip.join else "trainer"
        unconvertible(source, f"no log-probs of the {lacking}")
        other = joinable(tmp_path, made, *trip.join)
        reading = {"join": f"{other}:{','.join(trip.join)}", "on": "row"}
    rows, notes = converted(source, **reading)
    if trip.order is None:
        contents = [values.tolist() for values in made.rollout]
        order = [contents.index(row["rollout_log_probs"]) for row in rows]
        assert sorted(order) == list(range(8))
    else:
        order = list(trip.order)
    for i, row in zip(order, rows, strict=True):
        if name == "open-instruct" and i == 1:
            row["rollout_log_probs"][8] = 0.0  # NaN there
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


def test_trl_files_that_repeat_the_one_before_are_read_once(tmp_path: Path) -> None:
    first, again = written.trl(tmp_path, batch(), 9), written.trl(tmp_path, batch(), 10)
    other = batch()
    other.prompts[0] = other.prompts[0] + 1
    written.trl(tmp_path, other, 11)
    rows, notes = converted(tmp_path)
    assert [row["step"] for row in rows] == [9] * 8 + [11] * 8
    assert f"{again} repeats {first} and is left out" in notes
    assert open_dump([str(first)]).info.columns["group_id"] == "group_id"


def test_slices_lie_where_the_trainer_cuts_them() -> None:
    for total in range(2, 40):
        for response in range(1, total):
            for count in (2, 4):
                one = reader.Slice({}, total, response, total, 0, count)
                for rank in range(count):
                    assert one.spans(rank) == pickled.spans(total, response, rank, count)


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


def test_a_large_batch_is_known_by_its_beginning(tmp_path: Path) -> None:
    made = batch()
    made.responses[0] = np.arange(30_000)
    for column in (made.rollout, made.old, made.mask):
        column[0] = np.resize(column[0], 30_000)
    assert "_rebuild_tensor_batch" in pickles.peek(pickled.skyrl(tmp_path, made))


FORMS = {"nemo-rl": written.nemo_rl, "prime-rl": written.prime_rl, "roll": written.roll}
FORMS |= {"open-instruct": written.open_instruct, "verl": written.verl, "trl": written.trl}
FORMS |= {"ms-swift": written.ms_swift}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_found_by_itself(name: str, tmp_path: Path) -> None:
    found = find([str(FORMS[name](tmp_path, batch()))], None, {}, always=True, joined=True)
    assert found is not None
    assert found.form.name == name
    assert found.form.source


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


def as_it_is(path: Path) -> Path:
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


def saved(value: Any) -> Callable[[Path], Path]:
    """Save something else in place of a file."""

    def damage(path: Path) -> Path:
        if path.suffix == ".pt":
            torch.save(value, path)
        else:
            path.write_bytes(pickle.dumps(value))
        return path

    return damage


def too_long(path: Path) -> Path:
    table = pq.read_table(path)
    at = table.schema.names.index("response_length")
    return Path(write(path, table.set_column(at, "response_length", pa.array([999] * 8))))


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
verl, queue = pickled.verl, pickled.verl_queue
MISTAKES: Mapping[str, tuple[Callable[..., Path], Callable[[Path], Path], str]] = {
    "nemo: cut off": (nemo_rl, cut_off, "line 8: no JSON"),
    "nemo: no length": (nemo_rl, changed(drop("input_lengths"), 2), "no 'input_len"),
    "nemo: no column": (nemo_rl, changed(drop("token_ids"), 2), "line 3: no token_ids"),
    "nemo: words": (nemo_rl, changed(put(prev_logprobs=[["a"]]), 2), "line 3: 'prev_logprobs' is no list"),
    "nemo: a word": (nemo_rl, changed(put(sample_loss_mask=["a"]), 2), "'sample_loss_mask' is no number"),
    "nemo: the pass was skipped": (nemo_rl, ZEROS, "line 1: no log-probs of the trainer"),
    "prime: cut off": (prime_rank, cut_off, "line 4: no JSON"),
    "prime: lists": (prime_rank, changed(put(trainer_logprobs=3), 2), "'trainer_logprobs' is no list"),
    "roll: not recomputed": (partial(written.roll, recomputed=False), as_it_is, "no log-probs of the"),
    "open: no log-probs": (
        written.open_instruct,
        changed(put(logprobs=None)),
        "1: no log-probs of the rollout",
    ),
    "trl: without columns": (partial(written.trl, hooked=False), as_it_is, "0: no log-probs of the rollout"),
    "trl: cut off": (written.trl, cut_off, "damaged, or cut off"),
    "swift: uneven": (
        written.ms_swift,
        changed(lambda r: r["advantages"].pop()),
        "'advantages' has 7 values for 8",
    ),
    "swift: cut off": (written.ms_swift, cut_off, "line 1: no JSON"),
    "slime: no samples": (slime, of_torch(put(samples=3)), "no 'samples' is in it"),
    "slime: words": (slime, of_torch(put(samples=["a"])), "sample 0: str, no mapping"),
    "slime: no mask": (slime, of_sample(3, drop("loss_masks")), "sample 3: no response_mask"),
    "slime: no log-probs": (slime, of_sample(0, drop("log_probs")), "no log-probs of the trainer"),
    "slime: length": (slime, of_sample(2, put(response_lengths=10**6)), "sample 2: the response has no"),
    "slime: short": (slime, of_sample(1, put(log_probs=torch.zeros(3))), "1: 'old_log_probs' has 3 values"),
    "rank: no lengths": (ranks, of_data(drop("response_lengths")), "no 'response_lengths' is in its"),
    "rank: words": (ranks, of_data(put(response_lengths=["a"])), "0: 'response_lengths' is no length"),
    "rank: log-probs": (ranks, of_data(put(log_probs=[["a"]] * 4)), "'log_probs' is no list"),
    "rank: long": (ranks, LONG, "is cut otherwise than for 1 context-parallel ranks"),
    "rank: another size": (ranks, of_rank(put(cp_size=2)), "some of its 2 context-parallel ranks"),
    "miles: no list": (pickled.miles_columns, too_long, "row 0: the response has no length, or"),
    "loss: slices": (SPLIT, of_call(lambda one: None), "is cut otherwise than for 1 context-parallel ranks"),
    "loss: no length": (
        pickled.policy_loss,
        of_call(drop("response_length")),
        "'response_length' is no length",
    ),
    "loss: words": (
        pickled.policy_loss,
        of_call(put(advantages=["a"])),
        "'advantages' is no list of numbers",
    ),
    "skyrl: no mask": (skyrl, replaced(b"loss_mask", b"loss_musk"), "no 'loss_mask' [sequences,"),
    "skyrl: size": (skyrl, replaced(b"float32", b"float16"), "is a damaged tensor"),
    "skyrl: type": (skyrl, replaced(b"float32", b"floatxx"), "is a damaged tensor"),
    "skyrl: class": (skyrl, replaced(b"InputBatch", b"InputBotch"), "TrainingInputBotch, which"),
    "verl: class": (verl, replaced(b"DataProto", b"DataPrato"), "holds verl.protocol.DataPrato, which"),
    "verl: a byte": (verl, replaced(b"_reductions", b"_reductionz"), "Bad CRC-32 for file"),
    "verl: archive": (verl, replaced(b"data.pkl", b"data.pkx"), "a damaged pickle"),
    "verl: no batch": (verl, saved({"DataProto": 1}), "holds no DataProto"),
    "queue: no batch": (queue, saved([{"tensordict": 1, "keys": 2}]), "list, no batch of tensors"),
    "queue: no table": (queue, replaced(b"_tensordict", b"_tensordikt"), "a damaged pickle"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_error_with_a_hint(name: str, tmp_path: Path) -> None:
    make, damage, says = MISTAKES[name]
    unconvertible(damage(make(tmp_path, batch())), says)


def test_a_prompt_of_token_ids_beyond_64_bits_is_a_group_as_well():
    tokens = {"token_ids": np.array([2.0**63, 3.0, 4.0]), "response_mask": np.array([0, 0, 1])}
    named = _prompt(Row(tokens, {}, ""))
    assert named != _prompt(Row(tokens | {"response_mask": np.array([0, 1, 1])}, {}, ""))


UNREAD: Mapping[str, tuple[Make, tuple[str, ...]]] = {
    "nemo-rl": (written.nemo_rl, ("content",)),
    "trl": (written.trl, ("completion", "accuracy_reward")),
    "slime": (pickled.slime, ("data_parallel_rank", "truncated")),
    "skyrl": (pickled.skyrl, ("response_mask",)),
    "verl-batch": (pickled.verl, ("prompts",)),
}


@pytest.mark.parametrize("form", UNREAD)
def test_fields_of_a_trainer_that_nobody_reads_are_listed_and_those_that_its_form_uses_are_not(
    form: str, tmp_path: Path
) -> None:
    make, unread = UNREAD[form]
    assert open_dump([str(make(tmp_path, batch()))]).info.ignored == unread

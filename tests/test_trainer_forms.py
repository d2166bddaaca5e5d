"""What trainers write, converted: equal to what was put in, and mistakes that are said."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from offpol_diag.analyze import analyze
from offpol_diag.cli import app
from offpol_diag.errors import DumpError
from offpol_diag.forms import Reading, convert, open_dump
from offpol_diag.forms.detect import find
from offpol_diag.forms.table import FORMS
from tests.forms import written
from tests.forms.written import Written, batch

Rows = list[dict[str, Any]]
FORM = {form.name: form for form in FORMS}


def converted(source: Path, to: Path, **reading: str) -> tuple[Rows, list[str]]:
    """Convert, and return the rows and the notes."""
    chosen = Reading(**reading)
    found = find([str(source)], chosen.form, {}, True, chosen.join is not None)
    assert found is not None
    made = convert(found, to, chosen, {})
    result: Rows = pq.read_table(to).to_pylist()
    return result, made.notes


def expected(made: Written, *order: int) -> Rows:
    """The rows of a batch from the first token that counts to the last one."""
    rows = []
    for i in order or range(len(made)):
        rows.append(
            {
                "rollout_log_probs": made.rollout[i].tolist(),
                "old_log_probs": made.old[i].tolist(),
                "response_mask": made.mask[i].tolist(),
                "token_ids": made.responses[i].tolist(),
                "rewards": made.rewards[i],
            }
        )
    return rows


def only(rows: Rows, *names: str) -> Rows:
    return [{name: row[name] for name in names or expected(batch())[0]} for row in rows]


def joinable(folder: Path, made: Written, *names: str) -> Path:
    """A second file with log-probs, in the order of the batch."""
    columns = {
        "rollout_log_probs": made.rollout,
        "old_log_probs": made.old,
        "response_mask": made.mask,
        "token_ids": made.responses,
    }
    path = folder / "other.parquet"
    pq.write_table(pa.table({name: [row.tolist() for row in columns[name]] for name in names}), path)
    return path


# ---------------------------------------------------------------- round trips


def test_nemo_rl(tmp_path: Path) -> None:
    made = batch()
    rows, notes = converted(written.nemo_rl(tmp_path, made), tmp_path / "out.parquet")
    there = [0, 1, 2, 3, 4, 6, 7]  # the sample mask of 5 is 0
    assert only(rows) == expected(made, *there)
    assert [row["advantages"] for row in rows] == [
        [made.advantages[i]] * len(made.responses[i]) for i in there
    ]
    assert [row["step"] for row in rows] == [7] * 7
    assert [row["sequence_id"] for row in rows] == [f"7/{i}" for i in there]
    groups = [row["group_id"] for row in rows]
    assert [groups.index(one) for one in groups] == [0, 0, 2, 2, 4, 5, 5]
    assert "1 sequences without a token that counts are left out" in notes
    assert "NeMo-RL (nemo-rl); log-probs: whole sequence, shift 0, padded on the right" in notes[0]


def test_nemo_rl_never_counts_index_0(tmp_path: Path) -> None:
    """Its log-prob is a placeholder, and the loss drops it, whatever the mask says."""
    source = written.nemo_rl(tmp_path, batch())
    all_of(lambda record: record["token_loss_mask"][0].__setitem__(0, 1))(source)
    rows, _ = converted(source, tmp_path / "out.parquet")
    assert only(rows) == expected(batch(), 0, 1, 2, 3, 4, 6, 7)


@pytest.mark.parametrize("tool", [False, True])
def test_nemo_rl_without_masks(tool: bool, tmp_path: Path) -> None:
    """Up to 0.5 the mask is inferred: certain tokens count, those of a tool do not."""
    made = batch(tool=tool)
    rows, _ = converted(written.nemo_rl(tmp_path, made, version="0.5"), tmp_path / "out.parquet")
    names = ("rollout_log_probs", "old_log_probs", "response_mask", "rewards")
    assert only(rows, *names) == only(expected(made), *names)


@pytest.mark.parametrize("old", [False, True])
def test_prime_rl(old: bool, tmp_path: Path) -> None:
    made = batch()
    written.prime_rl(tmp_path, made, old=old)
    rows, _ = converted(tmp_path, tmp_path / "out.parquet")
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    names = [name for name in expected(made)[0] if name != "rewards" or not old]
    assert only(rows, *names) == only(expected(made, *order), *names)
    assert all(row["current_log_probs"] == row["old_log_probs"] for row in rows)
    assert [row["advantages"][0] for row in rows] == [0.0 if i == 7 else made.advantages[i] for i in order]
    assert [row["env_name"] for row in rows] == ["math" if i < 4 else "code" for i in order]
    assert len({row["sequence_id"] for row in rows}) == len({row["group_id"] for row in rows}) * 2 == 8


def test_prime_rl_steps_that_are_not_stable_are_left_out(tmp_path: Path) -> None:
    written.prime_rl(tmp_path, batch(), step=2)
    last = written.prime_rl(tmp_path, batch(4), step=10, stable=False)
    rows, notes = converted(tmp_path, tmp_path / "out.parquet")
    assert {row["step"] for row in rows} == {2}
    assert f"{last} has no file STABLE and is left out" in notes
    with pytest.raises(DumpError, match="no file STABLE, so its ranks may still be writing"):
        converted(last, tmp_path / "out.parquet")


def test_roll(tmp_path: Path) -> None:
    made = batch()
    other = joinable(tmp_path, made, "rollout_log_probs", "token_ids")
    source = written.roll(tmp_path, made)
    rows, _ = converted(
        source, tmp_path / "out.parquet", join=f"{other}:rollout_log_probs,token_ids", on="row"
    )
    assert only(rows) == expected(made)
    assert rows[0]["entropy"] == [0.5] * len(made.responses[0])
    assert [row["group_id"] == rows[0]["group_id"] for row in rows] == [True, True, *[False] * 6]


def test_open_instruct(tmp_path: Path) -> None:
    made = batch()
    other = joinable(tmp_path, made, "old_log_probs")
    source = written.open_instruct(tmp_path, made)
    rows, _ = converted(source, tmp_path / "out.parquet", join=f"{other}:old_log_probs", on="row")
    rows[1]["rollout_log_probs"][8] = 0.0  # NaN there, and masked
    assert rows[1]["response_mask"] == (made.rollout[1] != 0).tolist()
    made.mask[1] = np.asarray(rows[1]["response_mask"])
    assert only(rows) == expected(made)
    assert [row["group_id"] for row in rows] == [f"40/{i // 2}" for i in range(8)]


@pytest.mark.parametrize("uid", [False, True])
def test_verl(uid: bool, tmp_path: Path) -> None:
    made = batch()
    names = ("rollout_log_probs", "old_log_probs", "response_mask", "token_ids")
    other = joinable(tmp_path, made, *names)
    source = written.verl(tmp_path, made, uid=uid)
    rows, _ = converted(source, tmp_path / "out.parquet", join=f"{other}:{','.join(names)}", on="row")
    assert only(rows) == expected(made)
    groups = [row["group_id"] for row in rows]
    assert [groups.index(one) for one in groups] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert (groups[0] == "0a-1b0") == uid


def test_trl(tmp_path: Path) -> None:
    made = batch()
    source = written.trl(tmp_path, made)
    names = ("rollout_log_probs", "old_log_probs", "response_mask")
    rows, _ = converted(source, tmp_path / "out.parquet")
    assert only(rows, *names) == only(expected(made), *names)
    assert [row["advantages"] for row in rows] == made.advantages
    assert len({row["group_id"] for row in rows}) == 4
    assert open_dump([str(source)]).info.columns["group_id"] == "group_id"


def test_trl_files_that_repeat_the_one_before_are_read_once(tmp_path: Path) -> None:
    first, again = written.trl(tmp_path, batch(), 9), written.trl(tmp_path, batch(), 10)
    other = batch()
    other.prompts[0] = other.prompts[0] + 1
    written.trl(tmp_path, other, 11)
    rows, notes = converted(tmp_path, tmp_path / "out.parquet")
    assert [row["step"] for row in rows] == [9] * 8 + [11] * 8
    assert f"{again} repeats {first} and is left out" in notes


@pytest.mark.parametrize("kind", ["hf", "megatron", "ray"])
def test_ms_swift(kind: str, tmp_path: Path) -> None:
    made = batch()
    rows, _ = converted(written.ms_swift(tmp_path, made, kind), tmp_path / "out.parquet")
    names = ("rollout_log_probs", "old_log_probs", "response_mask")
    assert only(rows, *names) == only(expected(made), *names)
    assert [row["step"] for row in rows] == [2] * 8
    assert [row["advantages"] for row in rows] == made.advantages


def test_the_numbers_are_those_computed_by_hand(tmp_path: Path) -> None:
    made = batch()
    summary = analyze(written.nemo_rl(tmp_path, made), device="cpu")
    kept = [i for i in range(8) if i != 5]
    gaps = np.concatenate(
        [(made.old[i].astype(np.float64) - made.rollout[i])[made.mask[i] == 1] for i in kept]
    )
    assert summary.metrics["k1"].value == pytest.approx(-gaps.mean(), rel=1e-12)
    assert summary.metrics["k3"].value == pytest.approx((np.expm1(gaps) - gaps).mean(), rel=1e-9)


# ---------------------------------------------------------------- mistakes


def all_of(change: Callable[[dict[str, Any]], Any], *places: int) -> Callable[[Path], None]:
    """Change the records of a file, or some of them."""

    def damage(path: Path) -> None:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for place in places or range(len(records)):
            change(records[place])
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    return damage


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return all_of(change, 2)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def rank_0(folder: Path, made: Written) -> Path:
    return written.prime_rl(folder, made) / "rank_0.jsonl"


MISTAKES: Mapping[str, tuple[Callable[..., Path], Callable[[Path], None], str]] = {
    "nemo: cut off": (written.nemo_rl, cut_off, "line 8: no JSON"),
    "nemo: a length is missing": (
        written.nemo_rl,
        changed(lambda r: r.pop("input_lengths")),
        "no 'input_len",
    ),
    "nemo: a column is missing": (
        written.nemo_rl,
        changed(lambda r: r.pop("token_ids")),
        "line 3: no token_ids",
    ),
    "nemo: words": (
        written.nemo_rl,
        changed(lambda r: r.update(prev_logprobs=[["a"]])),
        "line 3: 'prev_logprobs' is no list of numbers",
    ),
    "nemo: the pass was skipped": (
        written.nemo_rl,
        all_of(lambda r: r.update(prev_logprobs=[[0.0] * len(r["prev_logprobs"][0])])),
        "line 1: no log-probs of the trainer",
    ),
    "prime: cut off": (rank_0, cut_off, "line 4: no JSON"),
    "prime: lists": (
        rank_0,
        changed(lambda r: r.update(trainer_logprobs=3)),
        "'trainer_logprobs' is no list",
    ),
    "roll: alone": (written.roll, lambda _: None, "no log-probs of the rollout"),
    "roll: not recomputed": (
        lambda folder, made: written.roll(folder, made, recomputed=False),
        lambda _: None,
        "no log-probs of the",
    ),
    "open-instruct: alone": (written.open_instruct, lambda _: None, "line 1: no log-probs of the trainer"),
    "open-instruct: no log-probs": (
        written.open_instruct,
        all_of(lambda r: r.update(logprobs=None)),
        "line 1: no log-probs of the rollout",
    ),
    "verl: alone": (written.verl, lambda _: None, "line 1: no log-probs of the rollout"),
    "trl: without columns": (
        lambda folder, made: written.trl(folder, made, hooked=False),
        lambda _: None,
        "row 0: no log-probs of the rollout",
    ),
    "trl: cut off": (written.trl, cut_off, "damaged, or cut off"),
    "swift: uneven": (
        written.ms_swift,
        all_of(lambda r: r["advantages"].pop()),
        "'advantages' has 7 values for 8",
    ),
    "swift: cut off": (written.ms_swift, cut_off, "line 1: no JSON"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_error_with_a_hint(name: str, tmp_path: Path) -> None:
    write, damage, says = MISTAKES[name]
    path = write(tmp_path, batch())
    damage(path)
    target = tmp_path / "out.parquet"
    result = CliRunner().invoke(app, ["convert", str(path), "--to", str(target)])
    assert (result.exit_code, result.stderr[:7]) == (2, "error: "), result.stderr
    assert result.stderr.count("hint: ") == result.stderr.count("error: ") == 1
    assert says in result.stderr
    assert not target.exists()


WRITERS = {
    "nemo-rl": written.nemo_rl,
    "prime-rl": written.prime_rl,
    "roll": written.roll,
    "open-instruct": written.open_instruct,
    "verl": written.verl,
    "trl": written.trl,
    "ms-swift": written.ms_swift,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_form_is_found_by_itself(name: str, tmp_path: Path) -> None:
    found = find([str(WRITERS[name](tmp_path, batch()))], None, {}, always=True, joined=True)
    assert found is not None
    assert found.form.name == name
    assert found.form.source

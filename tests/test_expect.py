"""A run that is equal to the last bit: `tokens_differ`, and `gate --max tokens_differ=0`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.cli import app
from tests import factory

SEQUENCES, TOKENS = 128, 64
EQUAL = {"tokens_differ": 0}


def write(path: Path, differ: int = 0, **more: Any) -> Path:
    """Write a dump in which so many sequences differ, the i-th at token 40 − i and at the last one."""
    rollout = -np.random.default_rng(0).random((SEQUENCES, TOKENS))
    train = rollout.copy()
    for i in range(differ):
        train[i, 40 - i] = np.nextafter(train[i, 40 - i], -1)
        train[i, -1] -= 1e-3
    columns = {"rollout_log_probs": rollout.tolist(), "group_id": [i // 4 for i in range(SEQUENCES)]}
    return Path(factory.write(path, **{**columns, "old_log_probs": train.tolist()} | more))


def gate(path: Path, *options: str) -> tuple[int, str]:
    ran = CliRunner().invoke(app, ["gate", str(path), *options])
    return ran.exit_code, " ".join(ran.output.split())


@pytest.mark.parametrize("differ", [0, 1, 30])
def test_the_share_of_tokens_that_differ_is_an_exact_count(tmp_path: Path, differ: int) -> None:
    found = offpol_diag.analyze(write(tmp_path / "a.parquet", differ), presets=(), progress=False)
    assert found.number("tokens_differ").value == 2 * differ / (SEQUENCES * TOKENS)


def test_every_drift_has_it(tmp_path: Path) -> None:
    rollout = (-np.random.default_rng(0).random((SEQUENCES, TOKENS))).tolist()
    path = write(tmp_path / "a.parquet", 10, current_log_probs=rollout)
    found = offpol_diag.analyze(path, presets=(), progress=False).summary.whole
    shares = [found[f"{prefix}tokens_differ"].value for prefix in ("", "drift2.", "total.")]
    assert shares == [20 / 8192, 20 / 8192, 0.0]


def test_equal_columns_pass_where_equality_is_asked_and_are_no_copies_then(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    assert gate(path, "--fail-on", "bug")[0] == 2, "one may be a copy of the other"
    code, said = gate(path, "--max", "tokens_differ=0")
    assert (code, "open:" in said) == (0, False)
    code, said = gate(path, "--max", "tokens_differ=0", "--fail-on", "cannot_tell")
    assert code == 0
    assert "Passed: all 2 bounds hold" in said


def test_one_bit_of_one_token_fails(tmp_path: Path) -> None:
    code, said = gate(write(tmp_path / "a.parquet", 3), "--max", "tokens_differ=0")
    assert code == 1
    assert "Failed: tokens_differ is 0.073%, must be ≤ 0%" in said


def test_in_python_and_in_a_file(tmp_path: Path) -> None:
    equal, other = write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet", 1)
    assert offpol_diag.gate(equal, max=EQUAL, fail_on="bug", progress=False).passed
    (one,) = offpol_diag.gate(other, max=EQUAL, progress=False).gates
    assert (one.passed, one.judged_on, one.interval) == (False, "value", None)
    file = tmp_path / "gates.toml"
    file.write_text('[max]\n"step:tokens_differ" = 0\n', encoding="utf-8")
    assert not offpol_diag.gate(write(other, 1, step=[1] * SEQUENCES), gates=file, progress=False).passed
    assert offpol_diag.gate(write(equal, step=[1] * SEQUENCES), gates=file, progress=False).passed


def test_a_dump_of_two_policies_is_held_to_it_too(tmp_path: Path) -> None:
    rollout = (-np.random.default_rng(0).random((SEQUENCES, TOKENS))).tolist()
    columns = {"rollout_log_probs": rollout, "current_log_probs": rollout}
    path = factory.write(tmp_path / "a.parquet", **columns, old_log_probs=None)
    assert offpol_diag.gate(path, max={"total.tokens_differ": 0}, fail_on="bug", progress=False).passed


def test_a_bug_stays_a_bug_and_too_few_tokens_too_few(tmp_path: Path) -> None:
    few = factory.write(tmp_path / "a.parquet", rollout_log_probs=[[-1.0]], old_log_probs=[[-1.0]])
    found = offpol_diag.gate(few, max=EQUAL, fail_on="bug", progress=False)
    assert [one.passed for one in found.gates] == [None, True]
    assert not found.passed

"""A run that claims equality to the last bit: `tokens_differ`, and `gate --expect bitwise`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.cli import app
from offpol_diag.errors import UsageError
from offpol_diag.result import GateVerdict, Result
from tests import factory

SEQUENCES, TOKENS = 128, 64
EQUAL = "8,192 of 8,192 tokens are equal to the last bit, as --expect bitwise asks"


def write(path: Path, differ: int = 0, **more: Any) -> Path:
    """Write a dump in which so many sequences differ, the i-th at token 40 − i and at the last one."""
    rollout = -np.random.default_rng(0).random((SEQUENCES, TOKENS))
    train = rollout.copy()
    for i in range(differ):
        train[i, 40 - i] = np.nextafter(train[i, 40 - i], -1)
        train[i, -1] -= 1e-3
    columns = {"rollout_log_probs": rollout.tolist(), "group_id": [i // 4 for i in range(SEQUENCES)]}
    return Path(factory.write(path, **{**columns, "old_log_probs": train.tolist()} | more))


def verdict(summary: Result) -> GateVerdict:
    (one,) = [one for one in summary.gates if one.expects]
    return one


def gate(path: Path, *options: str) -> tuple[int, str]:
    ran = CliRunner().invoke(app, ["gate", str(path), *options])
    return ran.exit_code, " ".join(ran.output.split())


@pytest.mark.parametrize("differ", [0, 1, 30])
def test_the_share_of_tokens_that_differ_is_an_exact_count(tmp_path: Path, differ: int) -> None:
    found = offpol_diag.analyze(write(tmp_path / "a.parquet", differ), presets=(), progress=False)
    assert found.metrics["tokens_differ"].value == 2 * differ / (SEQUENCES * TOKENS)


def test_every_drift_has_it(tmp_path: Path) -> None:
    rollout = (-np.random.default_rng(0).random((SEQUENCES, TOKENS))).tolist()
    path = write(tmp_path / "a.parquet", 10, current_log_probs=rollout)
    found = offpol_diag.analyze(path, presets=(), progress=False).metrics
    shares = [found[f"{prefix}tokens_differ"].value for prefix in ("", "drift2.", "total.")]
    assert shares == [20 / 8192, 20 / 8192, 0.0]


def test_equal_columns_are_healthy_where_they_are_expected(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    assert gate(path, "--fail-on", "bug")[0] == 2, "one may be a copy of the other"
    code, said = gate(path, "--expect", "bitwise")
    assert code == 0
    assert f"Passed: {EQUAL}" in said
    assert "copied" not in said
    code, said = gate(path, "--expect", "bitwise", "--fail-on", "cannot_tell")
    assert code == 0
    assert EQUAL in said
    assert "diagnosis not cannot tell or worse healthy" in said


def test_one_bit_of_one_token_fails_with_the_share_and_the_first_positions(tmp_path: Path) -> None:
    code, said = gate(write(tmp_path / "a.parquet", 3), "--expect", "bitwise")
    assert code == 1
    assert "Failed: tokens_differ is 0.073%, must be ≤ 0%" in said
    assert (
        "6 of 8,192 tokens differ; the first positions known: 38 (sequence 2), 39 (sequence 1), 40 (" in said
    )


def test_in_python_and_in_a_file(tmp_path: Path) -> None:
    equal, other = write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet", 1)
    quiet: dict[str, Any] = {"progress": False}
    found = offpol_diag.gate(equal, expect="bitwise", **quiet)
    assert found.passed
    assert found.diagnosis.verdict == "healthy"
    assert found.diagnosis.headline == f"{EQUAL}."
    one = verdict(found.summary)
    assert (one.name, one.source, one.value, one.interval) == ("tokens_differ", "--expect", 0.0, None)
    assert not offpol_diag.gate(other, expect="bitwise", **quiet).passed
    file = tmp_path / "gates.toml"
    file.write_text('expect = "bitwise"\n', encoding="utf-8")
    found = offpol_diag.gate(other, gates=file, **quiet)
    assert not found.passed
    assert verdict(found.summary).source == "gates.toml: expect"
    with pytest.raises(UsageError, match="expect"):
        offpol_diag.gate(equal, expect="equal", **quiet)  # type: ignore[arg-type]
    file.write_text('expect = "equal"\n', encoding="utf-8")
    assert gate(equal, "--gates", str(file))[0] == 2


def test_a_dump_of_two_policies_is_held_to_it_too(tmp_path: Path) -> None:
    rollout = (-np.random.default_rng(0).random((SEQUENCES, TOKENS))).tolist()
    columns = {"rollout_log_probs": rollout, "current_log_probs": rollout}
    path = factory.write(tmp_path / "a.parquet", **columns, old_log_probs=None)
    found = offpol_diag.gate(path, expect="bitwise", progress=False)
    assert found.passed
    assert verdict(found.summary).name == "total.tokens_differ"


def test_a_bug_stays_a_bug_and_too_few_tokens_too_few(tmp_path: Path) -> None:
    few = factory.write(tmp_path / "a.parquet", rollout_log_probs=[[-1.0]], old_log_probs=[[-1.0]])
    found = offpol_diag.gate(few, expect="bitwise", fail_on="bug", progress=False)
    assert verdict(found.summary).passed
    assert found.diagnosis.verdict == "cannot_tell"
    assert not found.passed

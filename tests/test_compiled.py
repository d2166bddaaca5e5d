"""The compiled pass against the plain code: every number of every preset; and when it is used."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from offpol_diag.cli import running
from offpol_diag.pipeline import compiled, kernels
from offpol_diag.requests import Doctor
from tests.test_pipeline import assert_alike, case, columns_of, pytestmark

__all__ = ["case", "pytestmark"]


def test_the_compiled_pass_has_the_sums_of_the_plain_code(case):
    assert_alike(columns_of(case, compiled=True), columns_of(case))


@pytest.mark.parametrize("tile", [1, 7, 512, 10**6])
def test_the_tile_changes_nothing(case, tile, monkeypatch):
    wanted = columns_of(case)
    plain = compiled.sums
    monkeypatch.setattr(compiled, "sums", lambda plan, block, _=0: plain(plan, block, tile))
    assert_alike(columns_of(case, compiled=True), wanted)


def test_it_is_loaded_for_large_dumps_and_compiled_for_larger_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "folder", lambda: tmp_path / "none")
    compiled_now: list[int] = []
    monkeypatch.setattr(compiled, "compile_all", lambda: compiled_now.append(1))
    assert not kernels.compiled(kernels.WORTH_COMPILING - 1, kernels.MANY)
    assert kernels.compiled(kernels.WORTH_COMPILING, kernels.MANY)
    assert compiled_now == [1]
    (tmp_path / "none" / "one.nbc").write_bytes(b"")
    assert kernels.compiled(kernels.WORTH_LOADING, kernels.MANY)
    assert not kernels.compiled(kernels.WORTH_LOADING - 1, kernels.MANY)
    assert compiled_now == [1]


def test_quiet_commands_do_not_say_that_they_compile(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kernels, "folder", lambda: tmp_path)
    monkeypatch.setattr(compiled, "compile_all", lambda: None)
    for quiet, said in ((False, 1), (True, 0)):
        caplog.clear()
        with running.quietly(Doctor(quiet=quiet)):
            assert kernels.compiled(kernels.WORTH_COMPILING, kernels.MANY)
        assert len(caplog.records) == said


def test_few_presets_are_worth_it_of_more_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "folder", lambda: tmp_path)
    (tmp_path / "one.nbc").write_bytes(b"")
    assert not kernels.compiled(10 * kernels.WORTH_LOADING, 1)
    assert kernels.compiled(11 * kernels.WORTH_LOADING, 1)


def test_where_nothing_can_be_kept_the_plain_code_is_used(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(kernels, "folder", lambda: tmp_path / "file" / "below")
    assert not kernels.compiled(10**9, kernels.MANY)


def test_a_changed_source_has_a_folder_of_its_own(monkeypatch):
    before = kernels.folder()
    kernels.folder.cache_clear()
    plain = type(before).read_bytes
    monkeypatch.setattr(type(before), "read_bytes", lambda path: plain(path) + b"#")
    assert kernels.folder() != before
    kernels.folder.cache_clear()


def test_the_second_process_compiles_nothing():
    compiled.compile_all()
    code = (
        "from offpol_diag.pipeline import compiled as c; c.compile_all(); "
        "print(sum(c.one_pass.stats.cache_misses.values()))"
    )
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "0"

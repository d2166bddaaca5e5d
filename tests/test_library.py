"""The drawing library that every page carries: made once, beside what comes before a page."""

from __future__ import annotations

import base64
import gzip
import hashlib
import threading
import time
from collections.abc import Iterator

import plotly.offline
import pytest
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.report.render import library as module
from offpol_diag.report.render.library import begin, library

SOURCE = "draw()"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The threads in which plotly was asked for its script: slowly, and nothing is known yet."""
    threads: list[str] = []

    def slow() -> str:
        threads.append(threading.current_thread().name)
        time.sleep(0.2)
        return SOURCE

    monkeypatch.setattr(plotly.offline, "get_plotlyjs", slow)
    module._made.cache_clear()
    yield threads
    module._made.cache_clear()


def test_it_is_what_plotly_ships_and_is_named_by_its_digest() -> None:
    found, source = library(), plotly.offline.get_plotlyjs().encode()

    assert gzip.decompress(found.gzipped) == source
    assert base64.b64decode(found.digest) == hashlib.sha256(source).digest()


def test_who_asks_while_it_is_being_made_waits_for_it(asked: list[str]) -> None:
    begin()
    while not asked:
        time.sleep(0.001)
    found = library()

    assert gzip.decompress(found.gzipped).decode() == SOURCE
    assert asked == ["offpol-diag-library"]


def test_it_is_not_waited_for_at_the_end(asked: list[str]) -> None:
    before = time.perf_counter()
    begin()

    assert time.perf_counter() - before < 0.1
    assert all(one.daemon for one in threading.enumerate() if one.name == "offpol-diag-library")
    library()


def test_what_goes_wrong_is_told_to_who_asks(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> str:
        raise OSError("plotly.min.js is missing")

    monkeypatch.setattr(plotly.offline, "get_plotlyjs", broken)
    begin()
    for thread in threading.enumerate():
        if thread.name == "offpol-diag-library":
            thread.join()

    assert capsys.readouterr().err == ""
    with pytest.raises(OSError, match=r"plotly.min.js is missing"):
        library()


@pytest.mark.parametrize(
    "command",
    [
        ("analyze", "d.parquet", "-o", "p.html"),
        ("analyze", "d.parquet"),
        ("compare", "d.parquet", "-o", "p.html"),
        ("gate", "d.parquet", "--max", "k3=1", "-o", "p.html"),
        ("merge", "d.tally.json", "-o", "p.html"),
        ("report", "r.json", "-o", "p.html"),
        ("sweep", "d.parquet", "--preset", "token_is", "-o", "p.html"),
    ],
)
def test_a_command_begins_before_it_reads_anything(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun() -> None:
        raise SystemExit(77)

    monkeypatch.setattr(module, "begin", begun)

    assert CliRunner().invoke(app, list(command)).exit_code == 77


def test_nothing_is_begun_where_no_page_is_wanted(asked: list[str]) -> None:
    CliRunner().invoke(app, ["analyze", "d.parquet", "--no-html"])
    CliRunner().invoke(app, ["gate", "d.parquet", "--max", "k3=1"])

    assert asked == []
    assert "offpol-diag-library" not in {one.name for one in threading.enumerate()}

"""Files appear whole or not at all."""

from pathlib import Path

import pytest

from offpol_diag.cli import output
from offpol_diag.errors import UsageError


def test_a_file_that_cannot_be_finished_leaves_the_old_one_and_nothing_else(tmp_path, monkeypatch):
    target = tmp_path / "report.html"
    target.write_text("old")
    write = Path.write_bytes

    def torn(path, data):
        write(path, data[: len(data) // 2])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", torn)
    with pytest.raises(UsageError, match="cannot be written"):
        output.write_all({target: "a new report"})

    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]

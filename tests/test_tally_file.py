"""A tally file holds every number exactly, and a damaged one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offpol_diag.analysis import tally_file
from offpol_diag.analysis.merge import merge, summary
from offpol_diag.analysis.study import Study
from offpol_diag.analysis.tally_file import Settings, read, write
from offpol_diag.analyze import analyze, examine, opened
from offpol_diag.cli.settings import sample
from offpol_diag.errors import OffpolError, ResultError, UsageError
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight, catalogue
from tests.test_tally import equal

ALL = catalogue.load().resolve("all")
FEW = catalogue.load().resolve("token_is,seq_mis,areal_m2po")
VERSION = tally_file.version("offpol-diag")


RULES = (Reject("k3", "max", 1e-300, 0.1 + 0.2, safety=None), Reject("tv", upper=1 / 3))
ODD_PRESETS = (
    Preset("free", "", weight=Weight("sum", "none", safety=None), clip=Clip(None, None, None)),
    Preset("half", "", clip=Clip(0.1, None, 4.0), loss="gspo", denominator="all", apply=False),
    Preset("rules", "", reject=RULES),
    Preset("vetoed", "", veto=Veto(lower=1e-4), logs="verl-2026-01", aliases=("a.b-c",), source="ß"),
)


@pytest.mark.parametrize("presets", [ALL, ODD_PRESETS], ids=["built in", "odd"])
def test_presets_come_back_as_they_were(presets):
    columns = frozenset({"rollout_log_probs", "old_log_probs"})
    study = Study(presets, columns, (), 0, 256)
    text = Settings.of(study, presets, dict.fromkeys(columns, "x")).model_dump_json()
    assert Settings.model_validate_json(text).requested("x") == presets


# ---------------------------------------------------------------- files


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """Write part of the sample."""
    path = tmp_path_factory.mktemp("dump") / "dump.parquet"
    pq.write_table(pq.read_table(sample()).slice(0, 60), path)
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory, dump):
    """Write a tally with a few presets."""
    path = tmp_path_factory.mktemp("written") / "a.tally"
    analyze([str(dump)], presets=FEW, tally=path)
    return path


def test_a_file_holds_what_was_analysed_to_the_last_bit(written, dump, tmp_path):
    found = read(written)
    assert equal(found.tally, examine(opened(str(dump)), presets=FEW).tally)

    write(tmp_path / "b", found)
    assert (tmp_path / "b").read_bytes() == written.read_bytes()
    assert summary(merge([tmp_path / "b"])).dump.rows == 60


def test_odd_numbers_come_back_bit_for_bit(written, tmp_path):
    whole = read(written)
    odd = np.array([0.0, -0.0, 5e-324, 0.1, -1.7976931348623157e308, np.inf, -np.inf, np.nan])
    x = whole.tally.whole.sums["between"]
    x.flat[: len(odd)] = odd  # it may be written to
    write(tmp_path / "b", whole)

    assert read(tmp_path / "b").tally.whole.sums["between"].tobytes() == x.tobytes()


def test_a_file_that_cannot_be_finished_leaves_the_old_one_and_nothing_else(written, tmp_path, monkeypatch):
    (target := tmp_path / "a").write_text("old")
    whole, write_bytes = read(written), Path.write_bytes

    def torn(path: Path, data: bytes) -> None:
        write_bytes(path, data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", torn)
    with pytest.raises(UsageError, match="cannot be written"):
        write(target, whole)
    assert [(path, path.read_text()) for path in tmp_path.iterdir()] == [(target, "old")]


# ---------------------------------------------------------------- damage


def refused(data: bytes, tmp_path: Path) -> OffpolError:
    """Return the error for a file with these bytes."""
    path = tmp_path / "some.tally"
    path.write_bytes(data)
    with pytest.raises(OffpolError) as found:
        summary(merge([path]))
    assert "some.tally" in found.value.message
    assert found.value.hint
    return found.value


NOT_OURS: dict[str, bytes] = {
    "empty": b"",
    "a pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "a result": b'{"format": 1, "dump": {}, "metrics": {}}',
    "a number too large": b"offpol-diag tally 99999999999999999999\n",
    "a first line without end": b"offpol-diag tally 5" + bytes(1 << 20),
}


@pytest.mark.parametrize("what", NOT_OURS)
def test_what_is_no_tally_is_refused(tmp_path, what):
    assert "not a tally" in refused(NOT_OURS[what], tmp_path).message


def test_another_format_or_version_is_refused_by_its_number(written, tmp_path):
    data = written.read_bytes()
    old = data.replace(b"tally 5\n", b"tally 1\n", 1)
    new = changed(written, offpol_diag="9.9.9")
    assert "tally format 1, this version reads format 5" in refused(old, tmp_path).message
    assert f"offpol-diag 9.9.9 made it, and this is {VERSION}" in refused(new, tmp_path).message


def test_a_file_that_is_not_there_or_a_directory_is_refused(tmp_path):
    with pytest.raises(ResultError, match=r"gone: cannot be read .*No such file"):
        read(tmp_path / "gone")
    with pytest.raises(ResultError, match="cannot be read"):
        read(tmp_path)


def test_a_cut_file_and_one_with_a_flipped_bit_are_refused(written, tmp_path):
    whole, random = written.read_bytes(), np.random.default_rng(0)
    places = [*range(40), *random.integers(0, len(whole), 60)]
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << int(random.integers(0, 8))
        for data in (whole[:place], bytes(flipped)):
            refused(data, tmp_path)


def test_a_file_without_end_is_refused_before_it_is_read(written, tmp_path, monkeypatch):
    monkeypatch.setattr(tally_file, "MOST_BYTES", 1 << 10)
    assert "larger than" in refused(written.read_bytes(), tmp_path).message


def changed(written: Path, **values: Any) -> bytes:
    """Change what a good file says, so that its digest is right."""
    stream = written.read_bytes().partition(b"\n")[2][tally_file.DIGEST :]
    table = pa.ipc.open_stream(stream).read_all()
    about = json.loads(table.schema.metadata[b"about"]) | values
    return tally_file.framed(tally_file.streamed(table.replace_schema_metadata({"about": json.dumps(about)})))


@pytest.mark.parametrize("values", [{"pieces": 5}, {"more": 1}, {"settings": {}}])
def test_what_another_program_wrote_is_refused(written, tmp_path, values):
    assert "not what this version writes" in refused(changed(written, **values), tmp_path).message

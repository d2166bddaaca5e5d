"""A tally file holds every number exactly, and one from a stranger can do no harm."""

from __future__ import annotations

import base64
import gzip
import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from offpol_diag.advice.recommend import advised as decided
from offpol_diag.analysis import tally_file
from offpol_diag.analysis.merge import merge, summary
from offpol_diag.analysis.tally import Study
from offpol_diag.analysis.tally_file import Settings, decoded, encoded, read, write
from offpol_diag.analyze import analyze
from offpol_diag.cli.defaults import sample
from offpol_diag.engine import loglattice
from offpol_diag.engine.accumulators import (
    SAMPLE,
    Best,
    Bins,
    Counts,
    Extremes,
    GroupSample,
    LogSums,
    Places,
    State,
    Sums,
    extremes,
)
from offpol_diag.engine.fields import Floats, Ints
from offpol_diag.engine.prefixes import GRID, Prefixes
from offpol_diag.engine.sample import Sample
from offpol_diag.engine.segments import Array
from offpol_diag.engine.selection import LENGTH_BINS, Grid
from offpol_diag.engine.tails import Tail
from offpol_diag.errors import OffpolError, ResultError, UsageError
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight, catalogue
from offpol_diag.report.render.html import render_html
from offpol_diag.summary import WorstSequence, WorstToken
from tests.test_laws import equal, parts

ALL = catalogue.load().resolve("all")
FEW = catalogue.load().resolve("token_is,seq_mis,areal_m2po")
(ODD_NAN,) = struct.unpack("<d", struct.pack("<Q", 0x7FF800000000BEEF))
ODD = (0.0, -0.0, 5e-324, 0.1, -1.7976931348623157e308, math.inf, -math.inf, ODD_NAN)
VERSION = tally_file.version("offpol-diag")


def bits(x: Array) -> tuple[bytes, tuple[int, ...], np.dtype[Any]]:
    """Return all bits of an array: -0.0 differs from 0.0, and one NaN from another."""
    return x.tobytes(), x.shape, x.dtype


def floats(*values: float) -> Array:
    return np.array(values, np.float64)


def ones(*shape: int) -> Array:
    return np.ones(shape)


def array(*values: float) -> dict[str, Any]:
    return Floats("n").written(floats(*values))


# ---------------------------------------------------------------- arrays


@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2), (8, 1), (0,), (3, 0), ()])
def test_floats_come_back_bit_for_bit(shape):
    x = floats(*ODD[: math.prod(shape)]).reshape(shape)
    found = Floats().read(json.loads(json.dumps(Floats().written(x))))
    assert bits(found) == bits(x)
    found += 1  # it may be written to


def test_integers_come_back_and_an_array_is_base64_in_little_endian_and_c_order():
    x = np.array([-(2**63), -1, 0, 2**63 - 1])
    assert bits(Ints("n").read(Ints("n").written(x))) == bits(x)
    found = Floats("a", "b").written(np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).T)
    assert found["shape"] == [3, 2]
    assert struct.unpack("<6d", base64.b64decode(found["data"])) == (1.0, 4.0, 2.0, 5.0, 3.0, 6.0)


EIGHT = base64.b64encode(bytes(8)).decode()
WRAPS = [3, 12297829382473034411]
"""A shape whose product is 1 modulo 2**64."""
WHOLE: tuple[Any, ...] = ([2], [0], [2**40 - 1] * 2, [2**64], WRAPS, [-1, -1], [1] * 4)
SHAPES = (*WHOLE, [True], [1.0], "1", [[1]])
DATA: tuple[Any, ...] = ("!" * 12, EIGHT[:4] + " " + EIGHT[4:], 7, "ä" * 12, EIGHT[:-1])


@pytest.mark.parametrize(
    "found",
    [
        *(3, [1.0, 2.0], {"data": EIGHT}, {"shape": [1], "data": EIGHT, "dtype": "O"}),
        *({"shape": shape, "data": EIGHT} for shape in SHAPES),
        *({"shape": [1], "data": data} for data in DATA),
    ],
    ids=str,
)
def test_what_is_no_array_of_eight_bytes_is_refused(found):
    with pytest.raises(ValueError, match=r"array|shape|data"):
        Floats("n").read(found)


# ---------------------------------------------------------------- states


def again(state: Any, like: Any = None) -> Any:
    """Write and read a state."""
    return decoded(json.loads(json.dumps(encoded(state))), like or state)


NAMED: dict[str, Any] = {"sequence_id": "a", "length": 3}
SIZES = {"log_ratio_sum": 0.1, "k3_mean": 0.2, "max_abs_log_ratio": 0.3}
SEQUENCE = WorstSequence(**NAMED, **SIZES, step=None)
LOGS = {"rollout_log_prob": -0.1, "train_log_prob": -1e-300, "log_ratio": 0.1}
TOKEN = WorstToken(**NAMED | {"sequence_id": "é\x00"}, **LOGS, position=0, before=[0.1 + 0.2])
PARTS = parts()
STATES: dict[str, list[Any]] = {
    **PARTS,
    "Best": [
        Best(3, ((2.5, SEQUENCE), (0.1, SEQUENCE))),
        Best(3, ((2.0, SEQUENCE),)),
        Best(2, ((1.0, TOKEN),)),
    ],
    "Grid": [Grid(np.abs(one.values)) for one in PARTS["Grid"]],
    "Places": [*PARTS["Places"], Places({"x": Extremes.of({"a": extremes(np.ones(2))})})],
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_as_it_was_and_merges_as_it_did(name):
    for state in STATES[name]:
        assert equal(again(state), state)
    a, b, *_ = STATES[name]
    assert equal(again(a).merge(again(b)), a.merge(b))


@pytest.mark.parametrize("which", [None, np.array([2, 0, 2, 1])])
def test_sums_come_back_bit_for_bit_with_what_rounding_lost(which):
    tiny = np.array([1e-17, math.nan, math.inf])
    names = ("a", "b", "ü|/ ", "d")[: 3 if which is None else 4]
    sums = Sums(names, np.array([1.0, 2.0, -0.0]), tiny, np.random.default_rng(0).random((3, 4)), which)
    found = again(sums)
    assert found.names == names
    for one in ("point", "rest", "drawn", "which"):
        assert getattr(sums, one) is None or bits(getattr(found, one)) == bits(getattr(sums, one))


def sums(names: str, point: int, rest: int, *drawn: int, which: tuple[int, ...] | None = None) -> Sums:
    rows = None if which is None else np.array(which)
    return Sums(tuple(names), ones(point), ones(rest), ones(*drawn), rows)


def groups(*keys: int, values: Array | None = None, full: bool = False) -> GroupSample:
    return GroupSample(np.array(keys), ones(len(keys), 1) if values is None else values, full)


def sampled(order: tuple[int, ...] = (1, 2), lengths: tuple[int, ...] = (1, 1), **change: Any) -> Sample:
    values = {name: np.ones(2) for name in ("q", "p", "position")} | change.get("values", {})
    return Sample(np.array(order), np.array(lengths), values, change.get("scalars", {}))


def prefixes(shift: Array, once: Array, many: Array) -> Prefixes:
    return Prefixes(LogSums(shift, once, once), many)


BINS, LENGTHS = loglattice.SIZE, len(GRID)
NAN = floats(math.nan)
IMPOSSIBLE: dict[str, tuple[State, str]] = {
    "sums: a name twice": (sums("aa", 2, 2, 2, 1), "twice"),
    "sums: fewer points than names": (sums("ab", 1, 1, 1, 1), "shape"),
    "sums: fewer rests": (sums("ab", 2, 1, 2, 1), "must be 2"),
    "sums: fewer draws": (sums("ab", 2, 2, 1, 2), "must be 2"),
    "sums: flat draws": (sums("a", 1, 1, 1), "shape"),
    "sums: fewer rows named": (sums("ab", 1, 1, 1, 1, which=(0,)), "must be 2"),
    "sums: a row that is not there": (sums("ab", 1, 1, 1, 1, which=(0, 1)), "not among 1 rows"),
    "sums: a row before the first": (sums("ab", 1, 1, 1, 1, which=(0, -1)), "not among 1 rows"),
    "extremes: a name twice": (Extremes(("a", "a"), ones(2), ones(2)), "twice"),
    "extremes: fewer highs": (Extremes(("a", "b"), ones(2), ones(1)), "must be 2"),
    "counts: another lattice": (Counts(ones(1)), f"must be {BINS}"),
    "counts: a negative one": (Counts(-ones(BINS)), "negative"),
    "counts: NaN": (Counts(ones(BINS) * math.nan), "finite"),
    "bins: infinitely many": (Bins(ones(BINS) * math.inf, ones(BINS)), "finite"),
    "bins: fewer sums": (Bins(ones(BINS), ones(1)), f"must be {BINS}"),
    "tail: more values than there were": (Tail(1, floats(2, 1)), "of 1 values"),
    "tail: fewer values than there were": (Tail(3, floats(2, 1)), "of 3 values"),
    "tail: NaN": (Tail(1, NAN), "NaN"),
    "tail: fewer than none": (Tail(-1, ones(0)), "greater than or equal"),
    "tail: too many to count": (Tail(2**62, ones(0)), "less than"),
    "log sums: several shifts": (LogSums(ones(2), ones(1), ones(1)), "must be"),
    "log sums: no shift": (LogSums(NAN[0], ones(1), ones(1)), "number"),
    "log sums: unlike": (LogSums(ones(1)[0], ones(1), ones(2)), "must be 1"),
    "prefixes: fewer sums": (prefixes(ones(2), ones(2, 2), ones(LENGTHS, 2)), "one shape"),
    "prefixes: flat": (prefixes(ones(LENGTHS), ones(LENGTHS, 1), ones(LENGTHS)), "shape"),
    "prefixes: other lengths": (prefixes(ones(99), ones(99, 2), ones(99, 2)), f"must be {LENGTHS}"),
    "prefixes: a negative count": (prefixes(ones(LENGTHS), ones(LENGTHS, 2), -ones(LENGTHS, 2)), "negative"),
    "groups: keys that fall": (groups(2, 1), "rise"),
    "groups: a key twice": (groups(1, 1), "rise"),
    "groups: full and few": (groups(1, 2, full=True), "full"),
    "groups: too many": (groups(*range(SAMPLE + 1)), "at most"),
    "groups: fewer rows": (groups(1, 2, values=ones(1, 1)), "must be 2"),
    "groups: flat": (groups(1, values=ones(1)), "shape"),
    "groups: NaN": (groups(1, values=ones(1, 1) * math.nan), "finite"),
    "grid: other lengths": (Grid(ones(1, 1)), f"must be {LENGTH_BINS}"),
    "grid: flat": (Grid(ones(1)), "shape"),
    "grid: a negative count": (Grid(-ones(LENGTH_BINS, 3)), "negative"),
    "best: more than k": (Best(0, ((1.0, SEQUENCE), (2.0, SEQUENCE))), "more than 0"),
    "sample: falling": (sampled(order=(2, 1)), "rise"),
    "sample: an empty sequence": (sampled(lengths=(2, 0)), "out of range"),
    "sample: fewer lengths": (sampled(lengths=(2,)), "must be 2"),
    "sample: fewer tokens": (sampled(lengths=(2, 2)), "as many"),
    "sample: another column": (sampled(values={"eval": np.ones(2)}), "values are of"),
    "sample: NaN": (sampled(values={"entropy": np.full(2, math.nan)}), "NaN"),
    "sample: endless ids": (sampled(values={"token_ids": np.full(2, math.inf)}), "token id"),
    "sample: fewer scalars": (sampled(scalars={"step": [1]}), "2 values"),
    "places: a place of other columns": (Places({"x": sums("ab", 1, 1, 1, 1)}), "shape"),
    "spans: fewer highs": (Places({"x": Extremes(("a",), ones(1), ones(2))}), "must be 1"),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_a_state_that_no_dump_leaves_is_refused(what):
    state, said = IMPOSSIBLE[what]
    with pytest.raises(ValueError, match=said):
        again(state)


def test_a_state_of_other_columns_or_replicates_is_refused():
    like, spans = sums("ab", 2, 2, 2, 5), Extremes(("a", "b"), ones(2), ones(2))

    assert again(sums("ba", 2, 2, 2, 5), like).names == ("b", "a")
    for other in (sums("ac", 2, 2, 2, 5), sums("abc", 3, 3, 3, 5), sums("ab", 2, 2, 2, 4)):
        with pytest.raises(ValueError, match="presets and columns"):
            again(other, like)
    with pytest.raises(ValueError, match="presets and columns"):
        again(replace(spans, names=("b", "a")), spans)
    with pytest.raises(ValueError, match="presets and columns"):
        again(Best(10**9, ()), Best(3, ()))


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
def written(tmp_path_factory):
    """Write a tally with a few presets, of part of the sample."""
    folder = tmp_path_factory.mktemp("written")
    pq.write_table(pq.read_table(sample()).slice(0, 60), folder / "dump.parquet")
    analyze([str(folder / "dump.parquet")], presets=FEW, tally=folder / "a.tally.json")
    return folder / "a.tally.json"


def test_a_file_that_is_read_and_written_again_is_the_same(written, tmp_path):
    write(tmp_path / "b.json", read(written))
    write(tmp_path / "b.json.gz", read(written))
    packed = (tmp_path / "b.json.gz").rename(tmp_path / "packed.json")  # known by how it begins
    assert (tmp_path / "b.json").read_bytes() == written.read_bytes()
    assert gzip.decompress(packed.read_bytes()) == written.read_bytes()
    assert summary(merge([packed])).dump.rows == 60


def test_a_file_that_cannot_be_finished_leaves_the_old_one_and_nothing_else(written, tmp_path, monkeypatch):
    (target := tmp_path / "a.json").write_text("old")
    whole, write_bytes = read(written), Path.write_bytes

    def torn(path: Path, data: bytes) -> None:
        write_bytes(path, data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", torn)
    with pytest.raises(UsageError, match="cannot be written"):
        write(target, whole)
    assert [(path, path.read_text()) for path in tmp_path.iterdir()] == [(target, "old")]


# ---------------------------------------------------------------- strangers


def refused(data: bytes, tmp_path: Path, *others: Path) -> OffpolError:
    """Return the error for a file with these bytes, read after others."""
    path = tmp_path / "from a stranger.json"
    path.write_bytes(data)
    with pytest.raises(OffpolError) as found:
        summary(merge([*others, path]))
    assert "from a stranger.json" in found.value.message
    assert found.value.hint
    return found.value


def with_change(written: Path, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Change something in a good file."""
    found = json.loads(written.read_bytes())
    change(found)
    return json.dumps(found).encode()


NOT_OURS: dict[str, bytes] = {
    "empty": b"",
    "a pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "a list": b"[]",
    "a result": b'{"format": 1, "dump": {}, "metrics": {}}',
    "not UTF-8": b'{"format": 1, "offpol_diag": "\xff"}',
    "many arrays in arrays": b"[" * 3_000_000,
    "many objects in objects": b'{"a":' * 3_000_000,
    "arrays in arrays, closed": b"[" * 100_000 + b"]" * 100_000,
    "a packed bomb in a bomb": gzip.compress(b" " * (1 << 20)),
}


@pytest.mark.parametrize("what", NOT_OURS)
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_no_tally_is_refused(tmp_path, what, packed):
    data = NOT_OURS[what]
    assert "not a tally" in refused(gzip.compress(data, 1) if packed else data, tmp_path).message


def test_another_format_or_version_is_refused_by_its_number(written, tmp_path):
    old = with_change(written, lambda found: found.update(format=1, states="as they were"))
    new = with_change(written, lambda found: found.update(offpol_diag="9.9.9"))
    assert "tally format 1, this version reads format 2" in refused(old, tmp_path).message
    assert f"offpol-diag 9.9.9 made it, and this is {VERSION}" in refused(new, tmp_path).message


def test_a_file_that_is_not_there_or_a_directory_is_refused(tmp_path):
    with pytest.raises(ResultError, match=r"gone\.json: cannot be read .*No such file"):
        read(tmp_path / "gone.json")
    with pytest.raises(ResultError, match="cannot be read"):
        read(tmp_path)


def test_a_cut_or_damaged_file_is_refused(written, tmp_path):
    whole = written.read_bytes()
    packed = gzip.compress(whole, 1)
    for share in (0.0, 0.001, 0.5, 0.999):
        place = int(share * len(packed))
        for data in (whole[: int(share * len(whole))], packed[:place]):
            refused(data, tmp_path)
        refused(packed[:place] + bytes([packed[place] ^ 0xFF]) + packed[place + 1 :], tmp_path)


def test_a_file_without_end_is_refused_before_it_is_read(written, tmp_path, monkeypatch):
    many = b'{"format":2,"offpol_diag":"0","x":[' + b"{}," * 4_100_000 + b"{}]}"
    assert "more than 4000000 values" in refused(many, tmp_path).message

    monkeypatch.setattr(tally_file, "ALWAYS", 8 << 20)
    monkeypatch.setattr(tally_file, "MOST_BYTES", 64 << 20)
    bomb = gzip.compress(b" " * (32 << 20), 9)
    assert len(bomb) * tally_file.RATIO < 8 << 20
    assert "larger than 8 MiB" in refused(bomb, tmp_path).message

    monkeypatch.setattr(tally_file, "MOST_BYTES", 1 << 20)
    assert "larger than 1 MiB" in refused(written.read_bytes(), tmp_path).message


Change = Callable[[Any], Any]


def at(*path: Any, change: Change) -> Change:
    """Return a change of the value at a path."""
    return lambda found: change(reduce(lambda there, key: there[key], path, found))


def put(*path: Any) -> Change:
    """Return a change that puts the last of `path` where the others lead."""
    *where, last, value = path
    return at(*where, change=lambda there: there.__setitem__(last, value))


def drop(*where: Any, last: str) -> Change:
    return at(*where, change=lambda there: there.pop(last))


def copied(source: str, *where: str, to: str) -> Change:
    """Return a change that copies the entry `source` there to another name."""
    return at(*where, change=lambda there: there.__setitem__(to, there[source]))


def counted(of: dict[str, float], other: float, state: str = "sums", field: str = "point") -> Change:
    """Return a change of the columns of a state by name, and of all others."""

    def change(found: Any) -> None:
        one = found["states"][state]
        rows = [other] * one[field]["shape"][0]
        which = Ints("K").read(one["which"]).tolist() if one.get("which") else range(len(one["names"]))
        for name, row in zip(one["names"], which, strict=True):
            rows[row] = of.get(name, rows[row])
        one[field] = array(*rows)

    return change


UNLIKE = "the presets and columns"
HOSTILE: dict[str, tuple[Change, str]] = {
    "one key more": (put("more", 1), "more"),
    "no states": (put("states", {}), "the states in it are not"),
    "one state less": (drop("states", last="ranges"), "ranges: the states"),
    "one state more": (copied("sums", "states", to="x"), "x: the states"),
    "a state under another's name": (copied("logged", "states", to="sums"), "states.sums: its names"),
    "a state with a key more": (put("states", "sums", "more", 1), "states.sums.more"),
    "a state that is no table": (put("states", "sums", 5), "states.sums"),
    "a cut, which is not saved": (put("states", "tail.tokens", "cut", 0.0), "tail.tokens.cut"),
    "names that are no text": (put("states", "sums", "names", 0, 5), "names"),
    "a name that is NaN": (put("states", "sums", "names", 0, math.nan), "states.sums"),
    "a name that is missing": (put("states", "sums", "names", 0, "NaN"), UNLIKE),
    "a table for a scalar": (put("states", "sample", "scalars", "step", 0, {}), "states.sample"),
    "no pieces": (put("pieces", []), "pieces"),
    "a piece without facts": (drop("pieces", 0, last="facts"), "pieces.0.facts"),
    "steps twice": (put("pieces", 0, "steps", ["3", "3"]), "twice"),
    "more positive values than tokens": (
        put("pieces", 0, "signs", "old_log_probs", {"tokens": 0, "positive": 1, "first": ""}),
        "signs",
    ),
    "rows beyond count": (put("pieces", 0, "facts", "rows", 10**4000), "pieces.0"),
    "negative rows": (put("pieces", 0, "facts", "rows", -1), "pieces.0"),
    "endless seconds": (put("pieces", 0, "run", "seconds", {"total": 1e308}), "seconds"),
    "groups in a table": (put("pieces", 0, "groups", {"shape": [1, 1], "data": EIGHT}), "groups"),
    "replicates without end": (put("settings", "replicates", 10**12), "replicates"),
    "fewer replicates than there are": (put("settings", "replicates", 8), UNLIKE),
    "a seed beyond 64 bits": (put("settings", "seed", 2**63), "seed"),
    "a negative seed": (put("settings", "seed", -1), "seed"),
    "no policy to compare with": (put("settings", "columns", {"rollout_log_probs": "x"}), "two policies"),
    "no rollout": (drop("settings", "columns", last="rollout_log_probs"), "the states"),
    "one preset less": (drop("settings", "presets", last="seq_mis"), UNLIKE),
    "one preset more": (copied("token_is", "settings", "presets", to="x"), UNLIKE),
    "presets named all": (copied("token_is", "settings", "presets", to="all"), "[all]"),
    "a preset that is code": (put("settings", "presets", "token_is", "loss", "__import__('os')"), "loss"),
    "a preset with a key more": (put("settings", "presets", "token_is", "eval", "1"), "eval"),
    "a bound that is text": (put("settings", "presets", "token_is", "weight", "upper", "2"), "upper"),
    "a bound below 0": (put("settings", "presets", "token_is", "weight", "lower", -1.0), "lower"),
    "no sequences": (counted({}, 0.0), "counts no sequences"),
    "sequences without a token": (counted({"sequences": 1.0}, 0.0), "counts no sequences"),
    "NaN sequences": (counted({}, math.nan), "counts no sequences"),
    "lengths without end": (counted({}, math.inf, "ranges", "high"), "counts no sequences"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_that_was_tampered_with_is_refused(written, tmp_path, what):
    change, said = HOSTILE[what]
    data = with_change(written, change)
    assert said in refused(data, tmp_path).message
    if what in ("one state less", "a state under another's name", "no sequences"):  # as a second file, too
        assert said in refused(data, tmp_path, written).message


def test_a_histogram_that_counted_nothing_is_drawn_empty(written):
    whole = json.loads(written.read_bytes())
    whole["states"]["bins.d"]["counts"] = array(*[0.0] * BINS)
    found = decided(summary(tally_file.parse(json.dumps(whole).encode(), "x")))
    assert found.histograms["log_ratio"].counts == []
    assert "0 tokens" in render_html(found)

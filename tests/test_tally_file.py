"""A tally file holds every number exactly, and one from a stranger can do no harm."""

from __future__ import annotations

import base64
import copy
import gzip
import inspect
import json
import math
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offpol_diag import accumulators, catalogue, tallies
from offpol_diag.accumulators import Best, Extremes, Places, Sums
from offpol_diag.analyze import analyze
from offpol_diag.cli.defaults import sample
from offpol_diag.cli.request import decided
from offpol_diag.errors import OffpolError, ResultError, UsageError
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight
from offpol_diag.render.html import render_html
from offpol_diag.summary import WorstSequence, WorstToken
from offpol_diag.tallies import arrays, file, kinds, merging, states
from offpol_diag.tallies.settings import Settings
from tests.test_laws import equal, parts, state_classes

ALL = catalogue.load().resolve("all")
FEW = catalogue.load().resolve("token_is,seq_mis,areal_m2po")
ODD = (0.0, -0.0, 5e-324, 0.1, -1.7976931348623157e308, math.inf, -math.inf, math.nan)


def bits(x: torch.Tensor) -> tuple[list[int], torch.Size, torch.dtype]:
    """All of a tensor, -0.0 told from 0.0 and one NaN from another."""
    return x.contiguous().view(torch.int64).flatten().tolist(), x.shape, x.dtype


# ---------------------------------------------------------------- arrays


@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2), (8, 1), (0,), (3, 0), ()])
def test_floats_come_back_bit_for_bit(shape: tuple[int, ...]) -> None:
    many = math.prod(shape)
    x = torch.tensor((ODD * 2)[:many], dtype=torch.float64).reshape(shape)

    text = json.loads(json.dumps(arrays.written(x, arrays.FLOAT)))

    assert bits(arrays.read(text, arrays.FLOAT)) == bits(x)


def test_a_nan_keeps_its_bits() -> None:
    (x,) = struct.unpack("<d", struct.pack("<Q", 0x7FF800000000BEEF))

    assert bits(arrays.read(arrays.written(torch.tensor([x], dtype=torch.float64), "<f8"), "<f8"))[0] == [
        0x7FF800000000BEEF
    ]


def test_integers_come_back(tmp_path: Path) -> None:
    x = torch.tensor([-(2**63), -1, 0, 2**63 - 1])

    assert bits(arrays.read(arrays.written(x, arrays.INT), arrays.INT)) == bits(x)


def test_an_array_is_base64_of_little_endian_numbers_in_c_order() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64).T

    found = arrays.written(x, arrays.FLOAT)

    assert found["shape"] == [3, 2]
    assert struct.unpack("<6d", base64.b64decode(found["data"])) == (1.0, 4.0, 2.0, 5.0, 3.0, 6.0)


def test_an_array_that_was_read_may_be_written_to() -> None:
    x = arrays.read(arrays.written(torch.zeros(2, dtype=torch.float64), "<f8"), "<f8")
    x += 1

    assert x.tolist() == [1.0, 1.0]


EIGHT = base64.b64encode(bytes(8)).decode()
BAD_ARRAYS: dict[str, Any] = {
    "no array": 3,
    "a list of numbers": [1.0, 2.0],
    "no shape": {"data": EIGHT},
    "one thing more": {"shape": [1], "data": EIGHT, "dtype": "O"},
    "too few bytes": {"shape": [2], "data": EIGHT},
    "too many bytes": {"shape": [0], "data": EIGHT},
    "a huge shape": {"shape": [2**40 - 1, 2**40 - 1], "data": EIGHT},
    "a larger one": {"shape": [2**64], "data": EIGHT},
    "a shape whose product wraps around to 1": {"shape": [3, 12297829382473034411], "data": EIGHT},
    "a negative size": {"shape": [-1, -1], "data": EIGHT},
    "a size that is true": {"shape": [True], "data": EIGHT},
    "a size that is no whole number": {"shape": [1.0], "data": EIGHT},
    "many axes": {"shape": [1] * 4, "data": EIGHT},
    "a shape in text": {"shape": "1", "data": EIGHT},
    "a shape of shapes": {"shape": [[1]], "data": EIGHT},
    "no base64": {"shape": [1], "data": "!" * 12},
    "base64 with spaces": {"shape": [1], "data": EIGHT[:4] + " " + EIGHT[4:]},
    "no text": {"shape": [1], "data": 7},
    "letters of no alphabet": {"shape": [1], "data": "ä" * 12},
    "cut base64": {"shape": [1], "data": EIGHT[:-1]},
}


@pytest.mark.parametrize("what", BAD_ARRAYS)
def test_what_is_no_array_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match=r"array|shape|data"):
        arrays.read(BAD_ARRAYS[what], arrays.FLOAT)


# ---------------------------------------------------------------- states


def again(state: Any) -> Any:
    """A state, written and read."""
    text = kinds.saved(state).model_dump_json()
    return type(kinds.saved(state)).model_validate_json(text).state()


RECORD = WorstSequence(
    sequence_id="a", step=None, length=3, log_ratio_sum=0.1, k3_mean=0.2, max_abs_log_ratio=0.3
)
TOKEN = WorstToken(
    sequence_id="é\x00",
    position=0,
    length=1,
    rollout_log_prob=-0.1,
    train_log_prob=-1e-300,
    log_ratio=0.1,
    before=[0.1 + 0.2],
)
STATES: dict[str, list[Any]] = {
    **{name: found for name, found in parts().items() if name not in ("Best", "Bins", "Grid", "Places")},
    "Bins": [replace(one, sums=one.sums.to(torch.float64)) for one in parts()["Bins"]],
    "Best": [Best(3, ((2.5, RECORD), (0.1, RECORD))), Best(2, ((1.0, TOKEN),)), Best(2, ())],
    "Grid": [type(parts()["Grid"][0])(one.values.abs()) for one in parts()["Grid"]],
    "Places": [
        parts()["Places"][0],
        parts()["Places"][1],
        Places({"x": Extremes.of({"a": accumulators.extremes(torch.tensor([1.0, 2.0]).double())})}),
    ],
}


def test_every_kind_of_state_is_tried() -> None:
    assert set(STATES) == set(state_classes()) - {"Tally"}


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_as_it_was(name: str) -> None:
    for state in STATES[name]:
        assert equal(again(state), state)


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_was_read_merges_as_the_one_that_was_written(name: str) -> None:
    a, b, _ = STATES[name]
    if name == "Best":
        b = replace(a, records=((2.0, RECORD),))

    assert equal(again(a).merge(again(b)), a.merge(b))


def test_sums_come_back_bit_for_bit_with_what_rounding_lost() -> None:
    tiny = torch.tensor([1e-17, math.nan, math.inf], dtype=torch.float64)
    sums = Sums(("a", "b", "ü|/ "), torch.tensor([1.0, 2.0, -0.0]).double(), tiny, torch.rand(3, 4).double())

    found = again(sums)

    assert found.names == sums.names
    assert [bits(getattr(found, one)) for one in ("point", "rest", "drawn")] == [
        bits(getattr(sums, one)) for one in ("point", "rest", "drawn")
    ]


def test_places_with_unlike_columns_are_written_with_the_columns_of_all() -> None:
    one, two = (
        Sums((name,), torch.tensor([value]).double(), torch.zeros(1).double(), torch.ones(1, 2).double())
        for name, value in (("a", 1.0), ("b", 2.0))
    )

    found = again(Places({"x": one, "y": two}))

    assert found.sums["x"].read()["a"].tolist() == [1.0, 1.0, 1.0]
    assert found.sums["x"].read()["b"].tolist() == [0.0, 0.0, 0.0]
    assert found.sums["y"].read()["b"].tolist() == [2.0, 1.0, 1.0]


def floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


TOO_MANY = accumulators.SAMPLE + 1
BINS = states.loglattice.SIZE


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.float64)


def sums(names: str, point: int, rest: int, *drawn: int) -> object:
    return states.SavedSums(names=tuple(names), point=ones(point), rest=ones(rest), drawn=ones(*drawn))


def groups(*keys: int, values: torch.Tensor | None = None, full: bool = False) -> object:
    counts = ones(len(keys), 1) if values is None else values
    return states.SavedGroups(keys=torch.tensor(keys), values=counts, full=full)


def logs(shift: torch.Tensor, once: int, twice: int) -> object:
    return states.SavedLogSums(shift=shift, once=ones(once), twice=ones(twice))


def prefixes(shift: int, once: int, many: torch.Tensor) -> object:
    sums = {"once": ones(once, 2), "twice": ones(shift, 2)}
    return states.SavedPrefixes(shift=ones(shift), many=many, **sums)


def places(
    places: str, names: str, point: tuple[int, ...], rest: tuple[int, ...], drawn: tuple[int, ...]
) -> object:
    arrays = {"point": ones(*point), "rest": ones(*rest), "drawn": ones(*drawn)}
    return kinds.SavedPlaces(places=tuple(places), names=tuple(names), **arrays)


def spans(places: str, names: str, low: tuple[int, ...], high: tuple[int, ...]) -> object:
    return kinds.SavedSpans(places=tuple(places), names=tuple(names), low=ones(*low), high=ones(*high))


ONE = torch.tensor(1.0, dtype=torch.float64)
RECORDS = (RECORD, RECORD)
IMPOSSIBLE: dict[str, tuple[Callable[[], object], str]] = {
    "sums: a name twice": (lambda: sums("aa", 2, 2, 2, 1), "twice"),
    "sums: fewer points than names": (lambda: sums("ab", 1, 2, 2, 1), "shape"),
    "sums: fewer rests": (lambda: sums("ab", 2, 1, 2, 1), "shape"),
    "sums: fewer draws": (lambda: sums("ab", 2, 2, 1, 2), "shape"),
    "sums: flat draws": (lambda: sums("a", 1, 1, 1), "shape"),
    "extremes: a name twice": (
        lambda: states.SavedExtremes(names=("a", "a"), low=ones(2), high=ones(2)),
        "twice",
    ),
    "extremes: fewer highs": (
        lambda: states.SavedExtremes(names=("a", "b"), low=ones(2), high=ones(1)),
        "shape",
    ),
    "counts: another lattice": (lambda: states.SavedCounts(counts=ones(1)), "shape"),
    "counts: a negative one": (lambda: states.SavedCounts(counts=-ones(BINS)), "negative"),
    "counts: NaN": (lambda: states.SavedCounts(counts=ones(BINS) * math.nan), "finite"),
    "bins: infinitely many": (
        lambda: states.SavedBins(counts=ones(BINS) * math.inf, sums=ones(BINS)),
        "finite",
    ),
    "bins: fewer sums": (lambda: states.SavedBins(counts=ones(BINS), sums=ones(1)), "shape"),
    "tail: more values than there were": (lambda: states.SavedTail(n=1, top=floats(2, 1)), "shape"),
    "tail: fewer values than there were": (lambda: states.SavedTail(n=3, top=floats(2, 1)), "shape"),
    "tail: rising": (lambda: states.SavedTail(n=2, top=floats(1, 2)), "fall"),
    "tail: NaN": (lambda: states.SavedTail(n=1, top=floats(math.nan)), "NaN"),
    "tail: fewer than none": (lambda: states.SavedTail(n=-1, top=ones(0)), "greater than or equal"),
    "tail: too many to count": (lambda: states.SavedTail(n=2**62, top=ones(0)), "less than"),
    "log sums: several shifts": (lambda: logs(ones(2), 1, 1), "shape"),
    "log sums: no shift": (lambda: logs(ONE * math.nan, 1, 1), "number"),
    "log sums: nothing": (lambda: logs(ONE, 0, 0), "shape"),
    "log sums: unlike": (lambda: logs(ONE, 1, 2), "shape"),
    "prefixes: fewer sums": (lambda: prefixes(2, 1, ones(2, 2)), "shape"),
    "prefixes: flat": (lambda: prefixes(1, 1, ones(1)), "shape"),
    "prefixes: too many lengths": (lambda: prefixes(99, 99, ones(99, 2)), "at most"),
    "prefixes: a negative count": (lambda: prefixes(1, 1, -ones(1, 2)), "negative"),
    "groups: keys that fall": (lambda: groups(2, 1), "rise"),
    "groups: a key twice": (lambda: groups(1, 1), "rise"),
    "groups: full and few": (lambda: groups(1, 2, full=True), "full"),
    "groups: too many": (lambda: groups(*range(TOO_MANY)), "at most"),
    "groups: fewer rows": (lambda: groups(1, 2, values=ones(1, 1)), "shape"),
    "groups: flat": (lambda: groups(1, values=ones(1)), "shape"),
    "groups: NaN": (lambda: groups(1, values=ones(1, 1) * math.nan), "finite"),
    "grid: other lengths": (lambda: states.SavedGrid(values=ones(1, 1)), "shape"),
    "grid: flat": (lambda: states.SavedGrid(values=ones(1)), "columns"),
    "grid: a negative count": (lambda: states.SavedGrid(values=-ones(states.LENGTH_BINS, 3)), "negative"),
    "best: more than k": (lambda: states.SavedBest(k=0, scores=ones(2), records=RECORDS), "more than 0"),
    "best: fewer scores": (lambda: states.SavedBest(k=2, scores=ones(1), records=RECORDS), "shape"),
    "best: k without end": (lambda: states.SavedBest(k=10**9, scores=ones(0), records=()), "less than"),
    "places: a place twice": (lambda: places("xx", "a", (2, 1), (2, 1), (2, 1, 1)), "twice"),
    "places: a name twice": (lambda: places("x", "aa", (1, 2), (1, 2), (1, 2, 1)), "twice"),
    "places: fewer rests": (lambda: places("x", "a", (1, 1), (1,), (1, 1, 1)), "shape"),
    "places: flat draws": (lambda: places("x", "a", (1, 1), (1, 1), (1, 1)), "shape"),
    "places: fewer draws": (lambda: places("xy", "a", (2, 1), (2, 1), (1, 1, 1)), "shape"),
    "spans: a place twice": (lambda: spans("xx", "a", (2, 1), (2, 1)), "twice"),
    "spans: a name twice": (lambda: spans("x", "aa", (1, 2), (1, 2)), "twice"),
    "spans: fewer highs": (lambda: spans("x", "a", (1, 1), (1,)), "shape"),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_a_state_that_no_dump_leaves_is_refused(what: str) -> None:
    make, said = IMPOSSIBLE[what]

    with pytest.raises(ValueError, match=said):
        make()


# ---------------------------------------------------------------- presets


def test_every_built_in_preset_comes_back_as_it_was() -> None:
    found = json.loads(json.dumps(settings_of(ALL).model_dump(mode="json")))

    assert Settings.model_validate(found).asked("x") == ALL


ODD_PRESETS = (
    Preset("free", "", weight=Weight("sum", "none", safety=None), clip=Clip(None, None, None)),
    Preset("half", "", clip=Clip(0.1, None, 4.0), loss="gspo", denominator="all", apply=False),
    Preset(
        "rules", "", reject=(Reject("k3", "max", 1e-300, 0.1 + 0.2, safety=None), Reject("tv", upper=1 / 3))
    ),
    Preset("vetoed", "", veto=Veto(lower=1e-4), logs="verl-2026-01", aliases=("a.b-c",), source="ß"),
)


def test_odd_presets_come_back_as_they_were() -> None:
    text = settings_of(ODD_PRESETS).model_dump_json()

    assert Settings.model_validate_json(text).asked("x") == ODD_PRESETS


def settings_of(presets: tuple[Preset, ...]) -> Settings:
    from offpol_diag.tally import Study

    columns = frozenset({"rollout_log_probs", "old_log_probs"})
    return Settings.of(Study(presets, columns, (), 0, 256), presets, {name: name for name in columns})


# ---------------------------------------------------------------- files


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tally with a few presets, of part of the sample."""
    folder = tmp_path_factory.mktemp("written")
    pq.write_table(pq.read_table(sample()).slice(0, 60), folder / "dump.parquet")
    analyze([str(folder / "dump.parquet")], presets=FEW, tally=folder / "a.tally.json")
    return folder / "a.tally.json"


def test_a_file_that_is_read_and_written_again_is_the_same(written: Path, tmp_path: Path) -> None:
    tallies.write(tmp_path / "b.json", tallies.read(written))
    tallies.write(tmp_path / "b.json.gz", tallies.read(written))

    assert (tmp_path / "b.json").read_bytes() == written.read_bytes()
    assert gzip.decompress((tmp_path / "b.json.gz").read_bytes()) == written.read_bytes()


def test_a_packed_file_is_told_by_how_it_begins(written: Path, tmp_path: Path) -> None:
    (tmp_path / "packed.json").write_bytes(gzip.compress(written.read_bytes()))

    assert tallies.summary(tallies.merge([tmp_path / "packed.json"])).dump.rows == 60


def test_a_file_is_one_json_object_without_anything_that_is_no_json(written: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    found = json.loads(written.read_bytes(), parse_constant=refuse)

    assert list(found) == ["format", "offpol_diag", "settings", "pieces", "states"]


def test_a_file_that_cannot_be_finished_leaves_the_old_one_and_nothing_else(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, whole = tmp_path / "a.json", tallies.read(written)
    target.write_text("old")
    write = Path.write_bytes

    def torn(path: Path, data: bytes) -> None:
        write(path, data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", torn)
    with pytest.raises(UsageError, match="cannot be written"):
        tallies.write(target, whole)

    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


# ---------------------------------------------------------------- strangers


def refused(data: bytes, tmp_path: Path) -> OffpolError:
    """What is said of a file with these bytes."""
    path = tmp_path / "from a stranger.json"
    path.write_bytes(data)
    with pytest.raises(OffpolError) as found:
        tallies.summary(tallies.merge([path]))
    assert "from a stranger.json" in found.value.message
    assert found.value.hint
    return found.value


def with_change(written: Path, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A good file with something changed."""
    found = json.loads(written.read_bytes())
    change(found)
    return json.dumps(found).encode()


NOT_OURS: dict[str, bytes] = {
    "empty": b"",
    "text": b"hello",
    "a pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "a list": b"[]",
    "another object": b'{"format": 1}',
    "a result": b'{"format": 1, "dump": {}, "metrics": {}}',
    "not UTF-8": b'{"format": 1, "offpol_diag": "\xff"}',
    "Parquet": b"PAR1" * 100,
    "many arrays in arrays": b"[" * 3_000_000,
    "many objects in objects": b'{"a":' * 3_000_000,
    "arrays in arrays, closed": b"[" * 100_000 + b"]" * 100_000,
}


@pytest.mark.parametrize("what", NOT_OURS)
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_no_tally_is_refused(tmp_path: Path, what: str, packed: bool) -> None:
    data = NOT_OURS[what]

    assert "not a tally" in refused(gzip.compress(data, 1) if packed else data, tmp_path).message


def test_another_format_is_refused_by_its_number(written: Path, tmp_path: Path) -> None:
    data = with_change(written, lambda found: found.update(format=2, states="all new"))

    assert "tally format 2, this version reads format 1" in refused(data, tmp_path).message


def test_another_version_is_refused(written: Path, tmp_path: Path) -> None:
    data = with_change(written, lambda found: found.update(offpol_diag="9.9.9"))

    assert "offpol-diag 9.9.9 made it" in refused(data, tmp_path).message


def test_two_versions_are_told_apart(written: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(with_change(written, lambda found: found.update(offpol_diag="9.9.9")))

    with pytest.raises(ResultError, match=r"were not made alike: offpol-diag \S+ and 9\.9\.9"):
        tallies.merge([written, other])


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"gone\.json: cannot be read .*No such file"):
        tallies.read(tmp_path / "gone.json")


def test_a_directory_is_told(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="cannot be read"):
        tallies.read(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_cut_file_is_refused(written: Path, tmp_path: Path, share: float) -> None:
    whole = written.read_bytes()
    packed = gzip.compress(whole, 1)

    refused(whole[: int(share * len(whole))], tmp_path)
    refused(packed[: int(share * len(packed))], tmp_path)


def test_a_damaged_packed_file_is_refused(written: Path, tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(written.read_bytes(), 1))
    packed[len(packed) // 2] ^= 0xFF

    refused(bytes(packed), tmp_path)


def test_a_file_that_unpacks_without_end_is_refused_before_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "ALWAYS", 8 << 20)
    monkeypatch.setattr(file, "MOST_BYTES", 64 << 20)
    bomb = gzip.compress(b" " * (32 << 20), 9)
    assert len(bomb) * file.RATIO < 8 << 20

    assert "unpacks to more than 8 MiB" in refused(bomb, tmp_path).message


def test_a_packed_bomb_in_a_bomb_is_not_unpacked_twice(tmp_path: Path) -> None:
    assert "not a tally" in refused(gzip.compress(gzip.compress(b" " * (1 << 20))), tmp_path).message


def test_a_file_of_many_small_values_is_refused_before_they_are_made(tmp_path: Path) -> None:
    data = b'{"format":1,"offpol_diag":"0","x":[' + b"{}," * 4_100_000 + b"{}]}"

    assert "more than 4000000 values" in refused(data, tmp_path).message


def test_a_plain_file_may_not_be_larger_than_the_bound(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "MOST_BYTES", 1 << 20)

    assert "more than 1 MiB" in refused(written.read_bytes(), tmp_path).message


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """A change: the last of `path` stands where the others lead."""
    *where, last, value = path

    def change(found: Any) -> None:
        for key in where:
            found = found[key]
        found[last] = value

    return change


def drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    *where, last = path

    def change(found: Any) -> None:
        for key in where:
            found = found[key]
        del found[last]

    return change


def array(*values: float) -> dict[str, Any]:
    return arrays.written(torch.tensor(values, dtype=torch.float64), arrays.FLOAT)


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "one key more": (put("more", 1), "more"),
    "no states": (put("states", {}), "the states in it are not"),
    "one state less": (drop("states", "ranges"), "ranges"),
    "one state more": (lambda found: found["states"].update(x=found["states"]["sums"]), "x: the states"),
    "a state under another's name": (
        lambda found: found["states"].update(sums=found["states"]["logged"]),
        "sums: the states",
    ),
    "a state of no kind": (put("states", "sums", "kind", "pickle"), "states.sums"),
    "a state with a key more": (put("states", "sums", "more", 1), "states.sums"),
    "names that are no text": (put("states", "sums", "names", 0, 5), "names"),
    "a name that is NaN": (put("states", "sums", "names", 0, math.nan), "states.sums"),
    "a name that is missing": (put("states", "sums", "names", 0, "NaN"), "sums: the states"),
    "no pieces": (put("pieces", []), "pieces"),
    "a piece without facts": (drop("pieces", 0, "facts"), "pieces.0.facts"),
    "steps twice": (
        lambda found: found["pieces"][0]["steps"].append(found["pieces"][0]["steps"][0]),
        "twice",
    ),
    "more positive values than tokens": (
        put("pieces", 0, "signs", "old_log_probs", {"tokens": 0, "positive": 1, "first": ""}),
        "signs",
    ),
    "rows beyond count": (put("pieces", 0, "facts", "rows", 10**4000), "pieces.0"),
    "negative rows": (put("pieces", 0, "facts", "rows", -1), "pieces.0"),
    "endless seconds": (put("pieces", 0, "run", "seconds", {"total": 1e308}), "seconds"),
    "groups in a table": (put("pieces", 0, "groups", {"shape": [1, 1], "data": EIGHT}), "groups"),
    "replicates without end": (put("settings", "replicates", 10**12), "replicates"),
    "fewer replicates than there are": (put("settings", "replicates", 8), "the states"),
    "a seed beyond 64 bits": (put("settings", "seed", 2**63), "seed"),
    "a negative seed": (put("settings", "seed", -1), "seed"),
    "no policy to compare with": (put("settings", "columns", {"rollout_log_probs": "x"}), "two policies"),
    "no rollout": (drop("settings", "columns", "rollout_log_probs"), "the states"),
    "one preset less": (drop("settings", "presets", "seq_mis"), "the states"),
    "one preset more": (
        lambda found: found["settings"]["presets"].update(x=found["settings"]["presets"]["token_is"]),
        "the states",
    ),
    "presets named all": (
        lambda found: found["settings"]["presets"].update(all=found["settings"]["presets"]["token_is"]),
        "[all]",
    ),
    "a preset that is code": (put("settings", "presets", "token_is", "loss", "__import__('os')"), "loss"),
    "a preset with a key more": (put("settings", "presets", "token_is", "eval", "1"), "eval"),
    "a bound that is text": (put("settings", "presets", "token_is", "weight", "upper", "2"), "upper"),
    "a bound below 0": (put("settings", "presets", "token_is", "weight", "lower", -1.0), "lower"),
    "no sequences": (
        lambda found: found["states"]["sums"].update(
            point=array(*[0.0] * len(found["states"]["sums"]["names"])),
            rest=array(*[0.0] * len(found["states"]["sums"]["names"])),
        ),
        "counts no sequences",
    ),
    "sequences without a token": (
        lambda found: found["states"]["sums"].update(
            point=array(*[float(name == "sequences") for name in found["states"]["sums"]["names"]]),
            rest=array(*[0.0] * len(found["states"]["sums"]["names"])),
        ),
        "counts no sequences",
    ),
    "NaN sequences": (
        lambda found: found["states"]["sums"].update(
            point=array(*[math.nan] * len(found["states"]["sums"]["names"]))
        ),
        "counts no sequences",
    ),
    "lengths without end": (
        lambda found: found["states"]["ranges"].update(
            high=array(*[math.inf] * len(found["states"]["ranges"]["names"]))
        ),
        "counts no sequences",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_that_was_tampered_with_is_refused(written: Path, tmp_path: Path, what: str) -> None:
    change, said = HOSTILE[what]

    assert said in refused(with_change(written, change), tmp_path).message


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("one state less", "ranges: the states in it are not those of"),
        ("a state under another's name", "sums: the states in it are not those of"),
        ("no sequences", "counts no sequences"),
        ("lengths without end", "counts no sequences"),
    ],
)
def test_a_second_file_is_believed_no_more_than_the_first(
    written: Path, tmp_path: Path, what: str, said: str
) -> None:
    (tmp_path / "bad.json").write_bytes(with_change(written, HOSTILE[what][0]))

    with pytest.raises(ResultError, match=said) as found:
        tallies.merge([written, tmp_path / "bad.json"])

    assert "bad.json" in found.value.message


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every value of a JSON document stands."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    below = [place for key, one in inner for place in leaves(one, (*path, key))]
    return [path, *below] if path else below


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["rollout_log_probs", "", "old", "all", "∅", "0", "sums", "\x1b[2J"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.lists(st.floats(), min_size=1, max_size=3).map(lambda x: array(*x)),
)


@pytest.fixture(scope="module")
def places_of(written: Path) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    found = json.loads(written.read_bytes())
    return found, leaves(found)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_stands_where_there_is_a_report_or_an_error_with_a_hint(
    places_of: tuple[dict[str, Any], list[tuple[Any, ...]]], data: st.DataObject
) -> None:
    """One value, anywhere but in the numbers of arrays, replaced by another: nothing but our errors."""
    whole, everywhere = places_of
    *where, last = data.draw(st.sampled_from(everywhere))
    there = whole
    for key in where:
        there = there[key]
    before, there[last] = there[last], data.draw(VALUES)
    try:
        text = json.dumps(whole).encode()
    finally:
        there[last] = before
    judged(text)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_whatever_numbers_stand_in_an_array_there_is_a_report_or_an_error_with_a_hint(
    places_of: tuple[dict[str, Any], list[tuple[Any, ...]]], data: st.DataObject
) -> None:
    """The numbers of one state replaced, its shape kept."""
    whole = places_of[0]["states"]
    name = data.draw(st.sampled_from([key for key, one in whole.items() if isinstance(one, dict)]))
    field = data.draw(st.sampled_from([key for key, one in whole[name].items() if isinstance(one, dict)]))
    shape = whole[name][field]["shape"]
    some = data.draw(st.lists(st.floats() | st.sampled_from(ODD), min_size=1, max_size=4))
    x = torch.tensor((some * math.prod(shape))[: math.prod(shape)], dtype=torch.float64).reshape(shape)
    if data.draw(st.booleans()):
        x = x.flatten().sort(descending=True).values.reshape(shape)
    before, whole[name][field] = whole[name][field], arrays.written(x, arrays.FLOAT)
    try:
        text = json.dumps(places_of[0]).encode()
    finally:
        whole[name][field] = before
    judged(text)


def judged(text: bytes) -> None:
    """A report of a tally file's text, drawn; or one of our errors."""
    with suppress(OffpolError):
        found = decided(tallies.summary(merging._first(file.parse(text, "x"))))
        found.to_json()
        render_html(found)


def test_a_histogram_that_counted_nothing_is_drawn_empty(
    places_of: tuple[dict[str, Any], list[tuple[Any, ...]]],
) -> None:
    whole = copy.deepcopy(places_of[0])
    counts = whole["states"]["bins.d"]["counts"]
    counts.update(arrays.written(torch.zeros(counts["shape"], dtype=torch.float64), arrays.FLOAT))
    found = decided(tallies.summary(merging._first(file.parse(json.dumps(whole).encode(), "x"))))

    assert found.histograms["log_ratio"].counts == []
    assert "0 tokens" in render_html(found)


def test_nothing_that_a_file_says_is_looked_up_or_run() -> None:
    """No import, no attribute, no class is chosen by text of the file: the words stand in the tables."""
    for module in (arrays, states, kinds, file):
        source = inspect.getsource(module)
        assert not any(word in source for word in ("pickle", "eval(", "exec(", "__import__", "import_module"))

"""A tally as a file, so that parts of a dump can be analysed apart, on any machines, and merged.

A line that names the format, a digest of what follows, and an Arrow stream with a row for each array; its
metadata say what was analysed. Reading executes nothing, and a damaged file is refused by its digest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from offpol_diag import wholefiles
from offpol_diag.analysis.first_pass import FirstPass
from offpol_diag.analysis.study import Study
from offpol_diag.engine.tally import KINDS, Array, Arrays, ByKey, Names, Records, Tally
from offpol_diag.errors import ResultError, UsageError
from offpol_diag.presets import Preset, catalogue
from offpol_diag.presets.grammar import UNBOUNDED
from offpol_diag.readers import Dump, parquet
from offpol_diag.readers.checks import remarks
from offpol_diag.readers.sources import Part
from offpol_diag.result import DumpFacts, Model, Run

FORMAT = 5
MAGIC = "offpol-diag tally {}\n"
"""The first line of a file, with the number of its format."""
DIGEST = 16
"""Bytes of a digest: of all that follows it, of a footer, of an id."""
HINT = "give a file that `offpol-diag analyze --tally` wrote"
DAMAGED = "copy it again, or analyze that piece again"
AGAIN = "analyze the pieces again, all with the version that merges them"
MOST_BYTES = 2 << 30
"""Largest size of a tally file."""
MOST_GROUPS = 1 << 16
"""Most reward groups that a part lists; with more, only its steps are recorded."""
MOST_GROUPS_IN_ALL = 1 << 20
"""Most reward groups that all parts of a file list together; with more, only their steps are recorded."""

# ---------------------------------------------------------------- what was analysed


class Settings(Model):
    """Settings of an analysis, which must be equal before tallies may be merged.

    Attributes:
        presets: name → table as in a preset file with every key, null for "none"; in order.
        columns: our name → the column it was read from.
        made: columns computed from others: advantages, where they were computed from rewards.
        group_by: extra location axes.
        logs: names of the presets whose trainer's logged numbers were computed, sorted; None for all.
    """

    presets: dict[str, dict[str, Any]]
    columns: dict[str, str]
    made: list[str]
    group_by: list[str]
    seed: int
    replicates: int
    logs: list[str] | None = None

    @classmethod
    def of(cls, study: Study, requested: Sequence[Preset], columns: Mapping[str, str]) -> Settings:
        """Collect the settings of an analysis; `requested` are its presets, `columns` ours → the dump's."""
        tables: list[dict[str, Any]] = json.loads(json.dumps([asdict(preset) for preset in requested]))
        return cls(
            presets={table.pop("name"): table for table in tables},
            columns=dict(columns),
            made=sorted(study.columns - set(columns)),
            group_by=list(study.group_by),
            seed=study.seed,
            replicates=study.replicates,
            logs=None if study.logs is None else sorted(study.logs),
        )

    def requested(self, file: str) -> tuple[Preset, ...]:
        """Return the presets of the analysis, also those that lack a column; `file` is its name in errors."""
        return tuple(catalogue.preset(file, name, _toml(one)) for name, one in self.presets.items())

    def study(self, file: str) -> Study:
        """Return the study that such an analysis measures."""
        columns = {*self.columns, *self.made}
        study = Study.of(columns, self.requested(file), self.group_by, self.seed, self.replicates)
        return replace(study, logs=None if self.logs is None else frozenset(self.logs))


def _toml(value: Any) -> Any:
    """Turn JSON null into TOML: `inf` for a bound that may be absent, else no key."""
    if isinstance(value, dict):
        kept = ((k, v) for k, v in value.items() if v is not None or k in UNBOUNDED)
        return {k: math.inf if v is None else _toml(v) for k, v in kept}
    return [_toml(one) for one in value] if isinstance(value, list) else value


# ---------------------------------------------------------------- what was read


class File(Model):
    """A file of the dump: its path as given, and a digest of its Parquet footer."""

    name: str
    mark: str


class Signs(Model):
    """Counts of positive log-probs in one column."""

    tokens: int
    positive: int
    first: str


class Piece(Model):
    """The rows that one analysis read, with what shows whether it overlaps with another.

    Quantities of a whole trainer batch that are needed before its tokens are judged (the cuts of M2PO,
    smoothed tails, advantages computed from rewards) were computed from the rows of this part: they are those
    of the whole dump only if no other part holds rows of that trainer batch.

    Attributes:
        facts: of the dump, without the remarks that follow from `signs`.
        files: those that have rows.
        signs: column → its counts of positive values.
        steps: labels of the trainer batches that have rows in it.
        ends: in the long form, digests of the ids of the first and the last sequence.
        groups: keys of the groups whose rewards were made into advantages; None if none or too many.
    """

    facts: DumpFacts
    run: Run
    files: list[File]
    signs: dict[str, Signs]
    steps: list[str]
    ends: tuple[str, str] | None = None
    groups: list[int] | None = None

    @classmethod
    def of(cls, dump: Dump, tally: Tally, result: FirstPass, facts: DumpFacts, run: Run) -> Piece:
        """Describe a dump that was read, and the tally computed from it."""
        said = remarks(dump.signs)
        keys = result.rewards.keys if result.rewards else None
        tokens = dump.of_tokens
        name = dump.info.columns["sequence_id"] if tokens else ""
        return cls(
            facts=facts.model_copy(update={"notes": [note for note in facts.notes if note not in said]}),
            run=run,
            files=[
                File(name=str(part.path), mark=_digest(parquet.fingerprint(part)).hex())
                for part in tokens or dump.parts
            ],
            signs={
                column: Signs(tokens=count.tokens, positive=count.positive, first=count.first)
                for column, count in dump.signs.items()
            },
            steps=tally.by_key["batches"].keys.tolist(),
            ends=(_id(tokens[0], name, 0), _id(tokens[-1], name, -1)) if tokens else None,
            groups=keys.tolist() if keys is not None and len(keys) <= MOST_GROUPS else None,
        )


class Held(NamedTuple):
    """A part of a dump, and the tally file that it came from."""

    file: str
    piece: Piece


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST).digest()


def _id(part: Part, name: str, at: int) -> str:
    """Digest the id in the first (0) or the last (-1) row of a file that has rows."""
    result = part.partitions.get(name)
    if result is None:
        filled = [group for group, rows in enumerate(part.group_rows) if rows][at]
        one = replace(part, span=(filled, filled + 1))
        *_, (_, table) = islice(parquet.tables(one, [name], 1 << 20), 1 if at == 0 else None)
        result = table.column(name)[at]
    found = result.as_py()
    return _digest(found if isinstance(found, bytes) else str(found).encode()).hex()


# ---------------------------------------------------------------- the file


class About(Model):
    """What a tally file says beside its arrays.

    Attributes:
        offpol_diag: the version that made it.
        settings: of the analysis.
        pieces: parts of the dump, in order.
    """

    offpol_diag: str
    settings: Settings
    pieces: list[Piece]


@dataclass(frozen=True)
class TallyFile:
    """A tally with everything needed to merge it and to read it out; `held` are its parts in order."""

    name: str
    settings: Settings
    held: tuple[Held, ...]
    tally: Tally


def write(path: Path, tally: TallyFile) -> None:
    """Write a tally file beside its place and put it there; nothing is left behind when that fails."""
    pieces = [one.piece for one in tally.held]
    if sum(0 if one.groups is None else len(one.groups) for one in pieces) > MOST_GROUPS_IN_ALL:
        pieces = [one.model_copy(update={"groups": None}) for one in pieces]
    about = About(offpol_diag=version("offpol-diag"), settings=tally.settings, pieces=pieces)
    data = _packed(tally.tally, about)
    beside = wholefiles.beside(path.resolve())
    try:
        beside.write_bytes(framed(data))
        wholefiles.placed(beside, path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})", "choose another place") from error
    finally:
        beside.unlink(missing_ok=True)


def framed(data: bytes) -> bytes:
    """Return a file of an Arrow stream."""
    return MAGIC.format(FORMAT).encode() + _digest(data) + data


SCHEMA = pa.schema(
    {
        "table": pa.string(),
        "kind": pa.string(),
        "name": pa.string(),
        "shape": pa.list_(pa.int64()),
        "data": pa.large_binary(),
    }
)
"""A row for each array: what its keys are of ("" for the whole dump), kind, name, shape, and its numbers, or
JSON, or an Arrow stream, whose `shape` is how many records are kept, their room, and how many were seen."""


def _packed(tally: Tally, about: About) -> bytes:
    """Return a tally as an Arrow stream."""
    rows = list(_rows(tally))
    table = pa.table(dict(zip(SCHEMA.names, zip(*rows, strict=True), strict=True)), SCHEMA)
    table = table.replace_schema_metadata({"about": about.model_dump_json()})
    return streamed(table, "zstd")


def streamed(table: pa.Table, compression: str | None = None) -> bytes:
    """Return a table as an Arrow stream."""
    sink, options = pa.BufferOutputStream(), pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, table.schema, options=options) as out:
        out.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


Row = tuple[str, str, str, list[Any], bytes]


def _rows(tally: Tally) -> Iterator[Row]:
    """Yield the rows of a tally: arrays, names of their lines, keys, records."""
    yield from _of_arrays("", tally.whole)
    for table, by_key in tally.by_key.items():
        whole = by_key.keys.dtype == np.int64
        data = by_key.keys.astype("<i8").tobytes() if whole else json.dumps(by_key.keys.tolist()).encode()
        yield table, "keys" if whole else "labels", by_key.bound, [], data
        yield from _of_arrays(table, by_key.arrays)
    for name, one in tally.records.items():
        yield "", "records", name, [one.most, one.room, one.seen], streamed(one.table)


def _of_arrays(table: str, arrays: Arrays) -> Iterator[Row]:
    for kind in KINDS:
        for name, x in getattr(arrays, kind).items():
            yield table, kind, name, list(x.shape), np.ascontiguousarray(x, "<f8").tobytes()
    for name, names in arrays.names.items():
        lines = None if names.lines is None else names.lines.tolist()
        yield table, "names", name, [], json.dumps([names.names, lines]).encode()


def _unpacked(rows: Iterable[Row]) -> Tally:
    """Build a tally from its rows."""
    arrays, by_key, records = {"": Arrays()}, dict[str, Any](), dict[str, Records]()
    for table, kind, name, shape, data in rows:
        if kind in ("keys", "labels"):
            whole = kind == "keys"
            keys = np.frombuffer(data, "<i8").astype(np.int64) if whole else _labels(json.loads(data))
            by_key[table], arrays[table] = (keys, name), Arrays()
        elif kind == "records":
            most, room, seen = shape
            records[name] = Records(most, pa.ipc.open_stream(data).read_all(), room, seen)
        elif kind == "names":
            names, lines = json.loads(data)
            lines = None if lines is None else np.array(lines, np.int64)
            arrays[table].names[name] = Names(tuple(names), lines)
        else:
            getattr(arrays[table], kind)[name] = np.frombuffer(data, "<f8").astype(np.float64).reshape(shape)
    by = {name: ByKey(keys, arrays[name], bound) for name, (keys, bound) in by_key.items()}
    return Tally(arrays[""], by, records)


def _labels(texts: list[str]) -> Array:
    result = np.empty(len(texts), object)
    result[:] = texts
    return result


# ---------------------------------------------------------------- reading


def read(path: Path) -> TallyFile:
    """Read a file that `write` wrote.

    Raises:
        ResultError: not readable, not ours, too large, damaged, or of another format or version.
        PresetError: a preset in it that the grammar does not allow.
    """
    name = str(path)
    data = _data(path)
    try:
        table = pa.ipc.open_stream(data).read_all()
        about = json.loads(table.schema.metadata[b"about"])
        made = about["offpol_diag"]
        if made != version("offpol-diag"):
            what = f"offpol-diag {made} made it, and this is {version('offpol-diag')}"
            raise ResultError(f"{name}: {what}: what their numbers mean may differ", AGAIN)
        contents = About.model_validate(about)
        tally = _unpacked(zip(*(table[column].to_pylist() for column in SCHEMA.names), strict=True))
    except (pa.ArrowException, ValueError, KeyError, TypeError, AttributeError) as error:
        why = str(error).partition("\n")[0]
        raise ResultError(f"{name}: it is not what this version writes ({why})", AGAIN) from error
    return TallyFile(name, contents.settings, tuple(Held(name, one) for one in contents.pieces), tally)


def _data(path: Path) -> bytes:
    """Read a file, and return what its digest is of."""
    try:
        data = wholefiles.read(path, MOST_BYTES)
    except OSError as error:
        raise ResultError(f"{path}: cannot be read as a tally ({error.strerror or error})", HINT) from error
    first, _, rest = data.partition(b"\n")
    result = re.fullmatch(MAGIC.strip().format("([0-9]{1,9})").encode(), first)
    if result is None:
        raise ResultError(f"{path}: this is not a tally of offpol-diag", HINT)
    if int(result[1]) != FORMAT:
        what = f"tally format {int(result[1])}, this version reads format {FORMAT}"
        newer = int(result[1]) > FORMAT
        hint = "a newer version wrote it: update offpol-diag"
        raise ResultError(f"{path}: {what}", hint if newer else "analyze that piece again with this version")
    if _digest(rest[DIGEST:]) != rest[:DIGEST]:
        raise ResultError(f"{path}: it is damaged", DAMAGED)
    return rest[DIGEST:]

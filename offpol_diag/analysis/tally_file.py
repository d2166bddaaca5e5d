"""A tally as a file, so that parts of a dump can be analysed apart, on any machines, and merged.

One JSON object, gzip where its name ends in .gz. The file is untrusted: reading it executes nothing, its size
is bounded before and after unpacking, the number of its values before they are parsed, every array's shape
must match its bytes, and the states must be those that this version computes for the presets and columns
that the file names.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from hashlib import blake2b
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from offpol_diag import wholefiles
from offpol_diag.analysis import readout
from offpol_diag.analysis.first_pass import Found, Needs
from offpol_diag.analysis.tally import Study, Tally, observe
from offpol_diag.batch import Batch
from offpol_diag.engine.accumulators import Best, Places, State, Sums, typed
from offpol_diag.engine.fields import LARGE, Count, Ints, form, require
from offpol_diag.engine.scene import Scene
from offpol_diag.engine.scope import ONE, BatchFits
from offpol_diag.engine.segments import Array
from offpol_diag.errors import ResultError, UsageError
from offpol_diag.presets import Preset, catalogue
from offpol_diag.presets.grammar import UNBOUNDED
from offpol_diag.readers import Dump, parquet
from offpol_diag.readers.checks import remarks
from offpol_diag.readers.long import value
from offpol_diag.readers.sources import Part
from offpol_diag.summary import DumpFacts, Model, Run, WorstSequence, WorstToken

FORMAT = 2
HINT = "give a file that `offpol-diag analyze --tally` wrote"
DAMAGED = "copy it again, or analyze that piece again"
AGAIN = "analyze the pieces again, all with the version that merges them"
MOST_BYTES = 2 << 30
"""Largest size of a tally file as text."""
MOST_VALUES = 4_000_000
"""Largest number of values in it (numbers inside arrays not counted)."""
RATIO, ALWAYS = 64, 256 << 20
"""Largest unpacked size: this many times the packed size, or ALWAYS where that is more."""
GZIP, LEVEL = b"\x1f\x8b", 1
MOST_REPLICATES = MOST_PRESETS = 4096
FEW = 1
"""Replicates of the states that a file's states are compared with, however many it declares."""
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

    presets: dict[str, dict[str, Any]] = Field(max_length=MOST_PRESETS)
    columns: dict[str, str]
    made: list[str]
    group_by: list[str]
    seed: int = Field(ge=0, lt=2**63)
    replicates: int = Field(ge=0, le=MOST_REPLICATES)
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

    tokens: Count
    positive: Count
    first: str

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require(self.positive <= self.tokens, "no more tokens than there are can be positive")
        return self


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
    groups: Annotated[Array, Ints("groups")] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require(len(set(self.steps)) == len(self.steps), "a step stands twice")
        require(self.groups is None or self.groups.ndim == 1, "groups must be of shape [groups]")
        counts = (self.facts.rows, self.facts.skipped.count, self.run.peak_rss_bytes)
        require(all(0 <= count < LARGE for count in counts), "a count is not negative, and below 2^62")
        require(all(0 <= one < LARGE for one in self.run.seconds.values()), "seconds are not negative")
        return self

    @classmethod
    def of(cls, dump: Dump, tally: Tally, found: Found, facts: DumpFacts, run: Run) -> Piece:
        """Describe a dump that was read, and the tally computed from it."""
        said = remarks(dump.signs)
        keys = found.rewards.keys if found.rewards else None
        name = dump.info.columns["sequence_id"] if dump.long else ""
        return cls(
            facts=facts.model_copy(update={"notes": [note for note in facts.notes if note not in said]}),
            run=run,
            files=[File(name=str(part.path), mark=_digest(parquet.fingerprint(part))) for part in dump.parts],
            signs={
                column: Signs(tokens=count.tokens, positive=count.positive, first=count.first)
                for column, count in dump.signs.items()
            },
            steps=sorted(typed(tally.states["normal"], Places).sums),
            ends=(_id(dump.parts[0], name, 0), _id(dump.parts[-1], name, -1)) if dump.long else None,
            groups=keys if keys is not None and len(keys) <= MOST_GROUPS else None,
        )


class Held(NamedTuple):
    """A part of a dump, and the tally file that it came from."""

    file: str
    piece: Piece


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _id(part: Part, name: str, at: int) -> str:
    """Digest the id in the first (0) or the last (-1) row of a file that has rows."""
    found = part.partitions.get(name)
    if found is None:
        filled = [group for group, rows in enumerate(part.group_rows) if rows][at]
        one = replace(part, span=(filled, filled + 1))
        *_, (_, table) = islice(parquet.tables(one, [name], 1 << 20), 1 if at == 0 else None)
        found = table.column(name)[at]
    return _digest(str(value(found)).encode())


# ---------------------------------------------------------------- the file


class _Stamp(BaseModel):
    format: int
    offpol_diag: str


class _Contents(Model):
    """Contents of a tally file; each state is saved as its class declares."""

    format: Literal[2] = 2
    offpol_diag: str = Field(description="the version that made it")
    settings: Settings
    pieces: list[Piece] = Field(min_length=1)
    states: dict[str, Any]


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
    contents = _Contents(
        offpol_diag=version("offpol-diag"),
        settings=tally.settings,
        pieces=pieces,
        states={name: encoded(state) for name, state in tally.tally.states.items()},
    )
    text = contents.model_dump_json().encode() + b"\n"
    beside = wholefiles.beside(path)
    try:
        packed = path.suffix.lower() == ".gz"
        beside.write_bytes(gzip.compress(text, LEVEL, mtime=0) if packed else text)
        beside.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})", "choose another place") from error
    finally:
        beside.unlink(missing_ok=True)


def encoded(state: State) -> Any:
    """Encode a state for JSON, field by field as its class declares them."""
    return _codec(_kind(state)).dump_python(state, mode="json")


def decoded(data: object, like: State, replicates: int = FEW) -> State:
    """Decode a state encoded by `encoded`, mergeable with `like` but for the number of replicates.

    `like` has `FEW` of them: a file that declares thousands must not take the memory for them.

    Raises:
        ValueError: its fields are not those of such a state, contradict each other, or are of other columns.
    """
    state: State = _codec(_kind(like)).validate_python(data)
    added = replicates - FEW
    wanted = {(place, size + added if size and place.endswith(".B") else size) for place, size in form(like)}  # type: ignore[operator]
    require(form(state) <= wanted, "its names and sizes are not those of the presets and columns")
    return state


def _kind(state: State) -> Any:
    """Return the class of a state, with its type parameter."""
    if isinstance(state, Best):
        return Best[WorstSequence | WorstToken]
    if isinstance(state, Places):
        return Places[next(map(type, state.sums.values()), Sums)]  # type: ignore[misc]
    return type(state)


@cache
def _codec(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


# ---------------------------------------------------------------- reading


def read(path: Path) -> TallyFile:
    """Read a file that `write` wrote.

    Raises:
        ResultError: not readable, not ours, too large, damaged, or of another format or version; or states,
            names, sizes or counts that this version could not have made of such a study.
        PresetError: a preset in it that the grammar does not allow.
    """
    return parse(_text(path), str(path))


@np.errstate(all="ignore")
def parse(text: bytes, name: str) -> TallyFile:
    """Parse a tally file's text; `name` is its name in errors."""
    if text.count(b",") + text.count(b"[") + text.count(b"{") > MOST_VALUES:
        raise ResultError(f"{name}: more than {MOST_VALUES} values, which no tally has", HINT)
    try:
        stamp = _Stamp.model_validate_json(text)
    except ValidationError as error:
        raise ResultError(f"{name}: this is not a tally of offpol-diag", HINT) from error
    if stamp.format != FORMAT:
        hint = "analyze that piece again with this version"
        raise ResultError(f"{name}: tally format {stamp.format}, this version reads format {FORMAT}", hint)
    if stamp.offpol_diag != version("offpol-diag"):
        made = f"offpol-diag {stamp.offpol_diag} made it, and this is {version('offpol-diag')}"
        raise ResultError(f"{name}: {made}: what their numbers mean may differ", AGAIN)
    try:
        contents = _Contents.model_validate_json(text)
    except ValidationError as error:
        raise _damaged(name, "", error) from error
    study = contents.settings.study(name)
    if not study.drifts:
        raise ResultError(f"{name}: its columns are not those of two policies that can be compared", AGAIN)
    wanted, states = _small(study).states, dict[str, State]()
    unlike = sorted(wanted.keys() ^ contents.states.keys())
    if unlike:
        what = f"{', '.join(unlike[:3])}: the states in it are not those of its presets and columns"
        raise ResultError(f"{name}: {what}", DAMAGED)
    for key, like in wanted.items():
        try:
            states[key] = decoded(contents.states[key], like, study.replicates)
        except ValueError as error:
            raise _damaged(name, f"states.{key}", error) from error
    tally = Tally(states)
    try:
        counts = readout.counts(tally)
        possible = counts["sequences"] > 0 and counts["tokens"] > 0 and counts["masked_tokens"] >= 0
    except (ValueError, ArithmeticError):
        possible = False
    if not possible:
        raise ResultError(f"{name}: it counts no sequences and tokens as a dump has them", AGAIN)
    return TallyFile(name, contents.settings, tuple(Held(name, one) for one in contents.pieces), tally)


def _damaged(name: str, within: str, error: ValueError) -> ResultError:
    """Build the error with the place in the file and what is wrong there."""
    where, what = [within] if within else [], str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where, what = [*where, *map(str, first["loc"])], first["msg"]
    return ResultError(f"{name}: {'.'.join(where)}: {what}", DAMAGED)


def _text(path: Path) -> bytes:
    """Read and unpack a file, up to the largest size allowed."""
    try:
        wholefiles.check(path)
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if not stream.peek(2).startswith(GZIP):
                return wholefiles.up_to(stream, MOST_BYTES)
            with gzip.GzipFile(fileobj=stream) as plain:
                return wholefiles.up_to(plain, min(MOST_BYTES, max(RATIO * size, ALWAYS)))  # type: ignore[arg-type]
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ResultError(f"{path}: cannot be read as a tally ({why})", HINT) from error


# ---------------------------------------------------------------- what a study makes

LABEL = "0"


@lru_cache(maxsize=1)  # files that are merged have one study
def _small(study: Study) -> Tally:
    """Analyse one sequence of two tokens: the states of every tally of the study have the same form."""
    asked = Needs.of(study.presets, rewards=False)
    fits = BatchFits(
        {cut: {ONE: math.inf, LABEL: math.inf} for cut in asked.cuts},
        {tail: {ONE: None, LABEL: None} for tail in asked.tails},
    )
    return observe(study, Scene.of(_batch(study), study.seed, FEW, fits))


def _batch(study: Study) -> Batch:
    logs, ends = np.array([-1.0, -1.0]), np.array([0, 2])
    lag = {"policy_lag"} if study.columns >= {"rollout_version", "train_version"} else set()
    values = {
        "old": ("old_log_probs", logs),
        "current": ("current_log_probs", logs),
        "advantages": ("advantages", logs),
        "entropy": ("entropy", -logs),
        "token_ids": ("token_ids", np.array([1, 2])),
        "rewards": ("rewards", -logs[:1]),
    }
    return Batch(
        rollout=logs,
        cu_seqlens=ends,
        cu_runs=ends,
        position=np.arange(2),
        key=np.array([0]),
        masked=np.array([0]),
        scalars={name: [int(LABEL)] for name in {*study.columns, *study.group_by} | lag},
        **{field: array for field, (column, array) in values.items() if column in study.columns},
    )

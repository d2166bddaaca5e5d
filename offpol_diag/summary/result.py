"""The whole result, its JSON (`format = 1`), and that read again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from pydantic import BaseModel, Field, ValidationError

from offpol_diag.errors import ResultError
from offpol_diag.printable import printable_json
from offpol_diag.summary.advice import Diagnosis, GateVerdict, Lengths, Recommendation
from offpol_diag.summary.compared import Against, Comparison
from offpol_diag.summary.facts import DumpFacts, Run
from offpol_diag.summary.number import Model, Numbers
from offpol_diag.summary.places import Histogram, Location, Worst
from offpol_diag.summary.presets import PresetResult
from offpol_diag.summary.swept import Sweep
from offpol_diag.wholefiles import MOST_RESULT, read, up_to

FORMAT = 1
HINT = "give the file that `offpol-diag analyze --json` wrote"


class Summary(Model):
    """One dump, analysed."""

    format: Literal[1] = 1
    dump: DumpFacts
    metrics: Numbers
    presets: dict[str, PresetResult]
    by: dict[str, Location] = {}
    histograms: dict[str, Histogram] = {}
    worst: Worst = Worst()
    lengths: Lengths | None = None
    weights: dict[str, Numbers] = Field(
        {}, description="of the weights of each method that can be recommended"
    )
    diagnosis: Diagnosis | None = None
    recommendation: Recommendation | None = None
    gates: list[GateVerdict] = []
    sweep: Sweep | None = Field(None, description="one preset over many thresholds (`sweep`)")
    comparison: Comparison | None = Field(None, description="presets side by side (`compare DUMP`)")
    against: Against | None = Field(None, description="this run against another (`compare A B`)")
    run: Run

    def to_json(self) -> str:
        """The published JSON, one object, indented, ending in a newline."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False)
        return printable_json(text) + "\n"


class _Stamp(BaseModel):
    format: Annotated[int, Field()]


def load(path: Path) -> Summary:
    """Read a result written by `to_json`.

    Raises:
        ResultError: not readable, not JSON, not ours, or of another format.
    """
    with _readable(str(path)):
        return loads(read(path, MOST_RESULT).decode(), str(path))


def load_stream(stream: BinaryIO, name: str) -> Summary:
    """Read a result from a stream, as `load` does; `name` is what errors call it."""
    with _readable(name):
        return loads(up_to(stream, MOST_RESULT).decode(), name)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ResultError(f"{name}: cannot be read as a result ({why})", HINT) from error


def loads(text: str, name: str) -> Summary:
    """Parse the JSON of a result; `name` is what errors call it."""
    try:
        stamp = _Stamp.model_validate_json(text)
    except ValidationError as error:
        raise ResultError(f"{name}: this is not a result of offpol-diag", HINT) from error
    if stamp.format != FORMAT:
        message = f"{name}: result format {stamp.format}, this version reads format {FORMAT}"
        raise ResultError(message, "analyze the dump again")
    try:
        return Summary.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ResultError(f"{name}: {where}: {first['msg']}", HINT) from error

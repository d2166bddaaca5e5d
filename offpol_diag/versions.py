"""Versions of the weights that sampled each token: runs → a version per token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

UNKNOWN = -1
"""Version of a token that was not sampled, or of which nothing is known, as in AReaL."""


def are_runs(row: Any) -> bool:
    """Return whether one response has runs in place of a version per token."""
    if getattr(row, "ndim", 1) > 1:
        return True
    return (
        isinstance(row, list | tuple)
        and len(row) > 0
        and isinstance(row[0], Mapping | list | tuple | np.ndarray)
    )


def spread(runs: Sequence[Any], length: int, prompt: int = 0) -> Ints:
    """Return the version of each token of a response, [length], `UNKNOWN` outside of the runs.

    Args:
        runs: pairs [start, version], or mappings with `start` and `version` (and `end`, as SGLang writes
            spans), or those of several calls in lists, with `abs_start` and `abs_end` (as miles does). A run
            without an end lasts until the next one.
        length: tokens of the response.
        prompt: tokens of the prompt, which `abs_start` and `abs_end` count too.

    Raises:
        ValueError: what is wrong with the runs.
    """
    each = list(_runs(runs, length, prompt))
    if not each and length:
        raise ValueError(f"it has no run for {length} tokens")
    found = np.full(length, UNKNOWN, np.int64)
    before = -1
    nexts = [first for first, _, _ in each[1:]]
    for (first, end, version), after in zip(each, [*nexts, length], strict=False):
        last = after if end is None else end
        if first <= before or (first and first >= length) or not first <= last <= length:
            what = f"a run covers tokens {first} to {last} of {length}"
            raise ValueError(f"{what}; runs begin within the response, each after the one before it")
        found[first:last] = version
        before = first
    if each and each[0][0] and each[0][1] is None:
        raise ValueError(f"its first run begins at token {each[0][0]}, and 0 is needed")
    return found


def _runs(runs: Sequence[Any], length: int, prompt: int) -> Iterator[tuple[int, int | None, int]]:
    """Yield start, end and version of runs."""
    for run in runs:
        if isinstance(run, Sequence) and not isinstance(run, str) and run and isinstance(run[0], Mapping):
            yield from _runs(run, length, prompt)
        elif isinstance(run, Mapping):
            absolute = "abs_start" in run
            names = ("abs_start", "abs_end", "version") if absolute else ("start", "end", "version")
            first, end, version = (run.get(name) for name in names)
            if first is None or version is None:
                raise ValueError(f"a run holds {', '.join(map(str, run))}, and start and version are needed")
            moved = prompt if absolute else 0
            yield _whole(first) - moved, None if end is None else _whole(end) - moved, _whole(version)
        elif isinstance(run, Sequence | np.ndarray) and not isinstance(run, str) and len(run) == 2:
            yield _whole(run[0]), None, _whole(run[1])
        else:
            raise ValueError(f"a run is {str(run)[:40]}, and a pair [start, version] is needed")


def _whole(value: Any) -> int:
    """Return a start or a version as an integer; engines write versions as text."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 19:
        return int(value)
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and abs(int(value)) < 2**63:
        return int(value)
    if isinstance(value, float | np.floating) and float(value).is_integer() and abs(float(value)) < 2**63:
        return int(value)
    raise ValueError(f"a run holds {str(value)[:40]!r}, and integers are needed")


def falls(versions: npt.NDArray[Any], live: npt.NDArray[np.bool_], offsets: Ints) -> npt.NDArray[np.bool_]:
    """Return flags of tokens of older weights than the token before them in their response, [T].

    Args:
        versions: of each token, [T].
        live: which tokens count, [T]; those that do not are passed over, as are unknown versions.
        offsets: where each response starts, [S+1].
    """
    at = np.flatnonzero(live & (versions > UNKNOWN))
    row = np.searchsorted(offsets, at, side="right")
    down = (np.diff(versions[at]) < 0) & (np.diff(row) == 0)
    found = np.zeros(len(versions), np.bool_)
    found[at[1:][down]] = True
    return found


def listed(rows: Any, lengths: Ints) -> Any:
    """Replace the runs of responses of some lengths [S] by a version per token; padded columns stay."""
    if getattr(rows, "ndim", 1) > 1:
        return rows
    found = []
    for i, row in enumerate(rows):
        if not are_runs(row):
            found.append(row)
            continue
        try:
            runs = row.tolist() if hasattr(row, "tolist") else row
            found.append(spread(runs, int(lengths[i]) if i < len(lengths) else 0))
        except ValueError as slip:
            hint = "pass a version per token, or runs [[0, 5], [120, 6]]"
            raise ValueError(f"weight_versions, sequence {i}: {slip}; {hint}") from slip
    return found


def require_rising(versions: npt.NDArray[Any], live: npt.NDArray[np.bool_], lengths: Ints) -> None:
    """Refuse versions [T] of tokens that count which are none, or fall within a response."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    low = f"and a version is at least 0, or {UNKNOWN} where it is unknown"
    late = "and the tokens before it are of a later version; pass the engine's counter of updates"
    for bad, why in (((versions < UNKNOWN) & live, low), (falls(versions, live, offsets), late)):
        if bad.any():
            at = int(np.argmax(bad))
            row = int(np.searchsorted(offsets, at, side="right")) - 1
            where = f"weight_versions, sequence {row}: token {at - offsets[row]}"
            raise ValueError(f"{where} is of version {versions[at]}, {why}")

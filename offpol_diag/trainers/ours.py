"""Names that trainers log, and the number of ours that each is: `rollout_corr/kl` is `k1`."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

from offpol_diag.errors import UsageError, did_you_mean
from offpol_diag.metrics import METRICS, PAIRS
from offpol_diag.presets import Preset

GAPS = tuple(filter(None, PAIRS))


class Ours(NamedTuple):
    """Which number of ours a logged one is, as the tables of `ours.toml` say; "" for none."""

    gap: str = ""
    preset: str = ""
    near: str = ""
    unlike: str = ""


@cache
def rows() -> Mapping[str, Ours]:
    """Return the rows of all trainers' logs by logged name."""
    text = resources.files("offpol_diag.trainers").joinpath("ours.toml").read_text("utf-8")
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for kind, numbers in tomllib.loads(text).items():
        for number, names in numbers.items():
            for name in names:
                found[name][kind] = number
    return {name: Ours(**row) for name, row in found.items()}


def ours(name: str) -> str:
    """Return our name of a number: `total.k3` for `total.k3_kl`, or the name itself if it is no trainer's."""
    if name.rpartition(".")[2] in METRICS:
        return name
    before, row = _found(name)
    if row.gap and before in PAIRS and not (before and "." in row.gap):
        return before + row.gap
    of_preset = row.preset and before and not before.startswith(GAPS)
    return before + row.preset if of_preset else name


def summed_by_step(names: Sequence[str], presets: Sequence[Preset]) -> tuple[str, ...]:
    """Return numbers by our names, each of which is summed at every step under these presets.

    Raises:
        UsageError: one is not.
    """
    from offpol_diag.core.breakdowns import names_by_step, row_by_step

    found = tuple(map(ours, names))
    for said, name in zip(names, found, strict=True):
        if row_by_step(name, presets) is None:
            near = did_you_mean(name, names_by_step(presets))
            hint = near or "docs/metrics.md lists the names; those of a preset are PRESET.NAME"
            raise UsageError(f'"{said}" is no number that is summed by step', hint)
    return found


def unlike(said: str) -> str:
    """Return in what the trainer's number may differ from ours; empty if it cannot."""
    return _found(said)[1].unlike


def advice(name: str) -> str:
    """Return what an unknown name is, or the number of ours that is nearest; empty if none is known."""
    _, row = _found(name)
    if row.preset:
        return f"it is a number of a preset: name one, PRESET.{row.preset}"
    if row.near:
        return f"a trainer logs it; the nearest of ours is {row.near}"
    known = [one for one, row in rows().items() if row.gap or row.near]
    return did_you_mean(name, known) if "/" in name else ""


def _found(name: str) -> tuple[str, Ours]:
    """Return what stands before a logged name (`total.`, `token_is.`), and its row."""
    for at in (0, *(at for at, letter in enumerate(name, 1) if letter == ".")):
        if name[at:] in rows():
            return name[:at], rows()[name[at:]]
    return "", Ours()

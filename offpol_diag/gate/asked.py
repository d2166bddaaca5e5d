"""All that one run of the gate asks for: options, a gate file, a baseline."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from offpol_diag.errors import UsageError
from offpol_diag.gate import judge
from offpol_diag.gate.baseline import Against, against, uncompared
from offpol_diag.gate.bounds import Bound, parse, presets_in
from offpol_diag.gate.file import Gates, read
from offpol_diag.gate.tolerance import comparable, named_tolerance
from offpol_diag.summary import GateVerdict, Summary

EXAMPLE = (
    "say what must hold: --max k3=0.002 --min ess_tokens=0.5, --gates FILE.toml or --baseline RESULT.json"
)


@dataclass(frozen=True)
class Asked:
    """What must hold.

    Attributes:
        bounds: in their order: options, then the file.
        against: what is asked of the baseline, or None.
        result: where the baseline is, or None.
    """

    bounds: tuple[Bound, ...]
    against: Against | None = None
    result: Path | None = None

    @property
    def by_step(self) -> tuple[str, ...]:
        """The numbers that are asked for by step."""
        names = [bound.asked for bound in self.bounds]
        names += list(self.against.named) if self.against else []
        return tuple(dict.fromkeys(one.number for one in names if one.over))

    def presets_by_place(self, known: Container[object]) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The presets that are spoken of, by who speaks of them."""
        for bound in self.bounds:
            yield "" if bound.source.startswith("--") else bound.source, presets_in([bound.name], known)
        if self.against:
            yield "", presets_in([one.number for one in self.against.named], known)
            yield "", self.against.presets

    def judge(self, now: Summary, base: Summary | None) -> tuple[GateVerdict, ...]:
        """Every verdict."""
        compared = against(now, base, self.against) if base and self.against else ()
        return (*judge(now, self.bounds), *compared)

    def remarks(self, now: Summary, base: Summary | None) -> tuple[str, ...]:
        """What a reader should know besides."""
        said = uncompared(now, base, self.against) if base and self.against else ""
        return (said,) if said else ()


def gather(
    at_most: Sequence[str],
    at_least: Sequence[str],
    file: Path | None,
    result: Path | None,
    tolerances: Sequence[str],
    only: str | None,
    presets: str,
    point: bool,
) -> Asked:
    """What options and a gate file ask for; options go before the file.

    Raises:
        UsageError: nothing is asked for, or an option cannot be meant.
        GateFileError: the file has slips in it.
    """
    gates = read(file) if file else Gates(())
    bounds = (
        *(parse(one, "max") for one in at_most),
        *(parse(one, "min") for one in at_least),
        *gates.bounds,
    )
    base = result or gates.result
    if base is None and (tolerances or only or gates.against):
        raise UsageError("there is a tolerance and no baseline", "name it: --baseline RESULT.json")
    if not bounds and base is None:
        raise UsageError("no bound is given", EXAMPLE)
    made = _against(gates.against, base, tolerances, only, presets) if base else None
    if point:
        bounds = tuple(replace(one, judge="point") for one in bounds)
        made = replace(made, judge="point") if made else None
    return Asked(bounds, made, base)


def _against(
    said: Against | None, base: Path, tolerances: Sequence[str], only: str | None, presets: str
) -> Against:
    given = dict(named_tolerance(one) for one in tolerances)
    general = given.pop(None, None)
    found = replace(said or Against(), label=base.name)
    return replace(
        found,
        default=general or found.default,
        tolerances={**found.tolerances, **{name: one for name, one in given.items() if name}},
        only=tuple(comparable(word) for word in _words(only)) or found.only,
        presets=_words(presets) or found.presets,
    )


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())

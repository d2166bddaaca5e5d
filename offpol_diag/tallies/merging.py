"""Tallies of pieces → the tally of all of them, or why they do not belong together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from offpol_diag import readout
from offpol_diag.accumulators import Best, State
from offpol_diag.errors import ResultError, UsageError
from offpol_diag.presets import Preset
from offpol_diag.scope import ONE
from offpol_diag.settle import Asked
from offpol_diag.summary import Summary
from offpol_diag.tallies import expected, pieces
from offpol_diag.tallies.file import TallyFile, read
from offpol_diag.tallies.settings import differences
from offpol_diag.tally import Tally

ALIKE = "analyze every piece with the same version and options: presets, columns, group-by, seed"
ONCE = "give every piece once; if two tallies overlap, analyze the rows that only one of them has again"
BETWEEN = "where a row is a token, cut the dump between sequences"
WHOLE = "cut the dump between steps, so that each step lies whole in one piece"
WORST = ("worst.sequences", "worst.tokens")
MOST_SAID = 3


def merge(paths: Iterable[Path]) -> TallyFile:
    """Read tally files one after the other and merge them; two are held at a time.

    Args:
        paths: in the order of the dump, which numbers rows that have no `sequence_id`; no other number
            depends on it.

    Raises:
        UsageError: no file.
        ResultError: a file that is no tally, or files that do not belong together.
        PresetError: a preset in a file that the grammar does not allow.
    """
    whole: TallyFile | None = None
    for path in paths:
        one = read(path)
        whole = _first(one) if whole is None else _joined(whole, one)
    if whole is None:
        raise UsageError("no tally is given", "name the files that `analyze --tally` wrote")
    return whole


def _first(one: TallyFile) -> TallyFile:
    if one.version != version("offpol-diag"):
        made = f"offpol-diag {one.version} made it, and this is {version('offpol-diag')}"
        raise ResultError(f"{one.name}: {made}: what their numbers mean may differ", expected.OTHER)
    expected.check(one.tally, one.settings.study(one.name), one.name)
    _refuse_twice(one)
    return one


def _joined(whole: TallyFile, one: TallyFile) -> TallyFile:
    """Both together, once it is sure that they belong together."""
    _refuse_unlike(whole, one)
    found, wanted = expected.forms(one.tally.states), expected.forms(whole.tally.states)
    expected.refuse_unlike(found, wanted, one.name, f"those of {whole.name}")
    expected.refuse_impossible(one.tally, one.name)
    both = replace(whole, held=(*whole.held, *one.held))
    _refuse_twice(both)
    _refuse_torn(both)
    return replace(both, tally=whole.tally.merge(_renumbered(one, _rows(whole))))


def _refuse_unlike(whole: TallyFile, one: TallyFile) -> None:
    found = differences(whole.settings, one.settings)
    if whole.version != one.version:
        found.insert(0, f"offpol-diag {whole.version} and {one.version}")
    if found:
        raise ResultError(
            f"{whole.name} and {one.name} were not made alike: {_some(found)}",
            ALIKE,
        )


def _refuse_twice(whole: TallyFile) -> None:
    for name, first, second in pieces.twice(whole.held):
        where = f"{first}, which is given twice" if first == second else f"{first} and {second}"
        raise ResultError(f"{name} was read for {where}: its rows would count twice", ONCE)


def _refuse_torn(whole: TallyFile) -> None:
    for first, second in pieces.torn(whole.held):
        raise ResultError(f"{first} ends with a sequence that goes on in {second}", BETWEEN)


def _rows(whole: TallyFile) -> int:
    return sum(one.piece.facts.rows for one in whole.held)


def _renumbered(one: TallyFile, before: int) -> Tally:
    """Its tally; rows that have no id but their number get the number they have in the whole dump."""
    if "sequence_id" in one.settings.columns:
        return one.tally
    moved = {name: _moved(one.tally.states[name], before) for name in WORST}
    return Tally(one.tally.states | moved)


def _moved(best: State, before: int) -> State:
    assert isinstance(best, Best)
    return Best(
        best.k,
        tuple(
            (score, row.model_copy(update={"sequence_id": _plus(row.sequence_id, before)}))
            for score, row in best.records
        ),
    )


def _plus(number: str, before: int) -> str:
    return str(int(number) + before) if number.isdecimal() and len(number) < 20 else number


# ---------------------------------------------------------------- what comes of it


def summary(whole: TallyFile) -> Summary:
    """Every number of the report, of presets that the pieces can tell about.

    `update` is how many sequences an update of the trainer has; None: those of a usual step.

    Raises:
        ResultError: advantages were made of the rewards of groups that lie in more than one piece; or numbers
            in the files contradict each other, as no dump leaves them.
    """
    broken = pieces.shared_steps(whole.held)
    if whole.settings.made and broken and not pieces.groups_apart(whole.held):
        raise ResultError(
            f"advantages were made of the rewards of each group, and {_steps(broken)}: a group may be torn",
            f"{WHOLE}; or write advantages into the dump",
        )
    try:
        return _summary(whole, broken)
    except (ArithmeticError, ValueError) as error:
        files = _some(list(dict.fromkeys(one.file for one in whole.held)))
        raise ResultError(f"{files}: the numbers contradict each other", expected.OTHER) from error


def _summary(whole: TallyFile, broken: dict[str, list[str]]) -> Summary:
    asked = whole.settings.asked(whole.name)
    torn = [one for one in asked if broken and Asked.of((one,), rewards=False)]
    counts = readout.counts(whole.tally)
    held = [one.piece for one in whole.held]
    return readout.summary(
        whole.settings.study(whole.name),
        whole.tally,
        [one for one in asked if one not in torn],
        pieces.facts(held, counts, _left_out(torn, broken)),
        pieces.run(held, counts, whole.version),
    )


def _left_out(torn: Sequence[Preset], broken: dict[str, list[str]]) -> list[str]:
    if not torn:
        return []
    names = ", ".join(one.name for one in torn)
    return [f"left out: {names}. They judge a token by all of its step, and {_steps(broken)}; {WHOLE}"]


def _steps(broken: dict[str, list[str]]) -> str:
    files = list(dict.fromkeys(file for where in broken.values() for file in where))
    if list(broken) == [ONE]:
        return f"the dump, which has no step and is one, lies in {len(files)} pieces ({_some(files)})"
    return f"rows of step {_some(list(broken))} lie in more than one piece ({_some(files)})"


def _some(words: Sequence[str]) -> str:
    rest = f" and {len(words) - MOST_SAID} more" if len(words) > MOST_SAID else ""
    return ", ".join(words[:MOST_SAID]) + rest

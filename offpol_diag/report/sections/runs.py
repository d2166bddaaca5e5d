"""Section on run A against run B: whether they differ, in which numbers and by how much."""

from __future__ import annotations

from pathlib import PurePath

from offpol_diag.blocks import Block, Cell, Section, Table, Text, Tone, Verdict
from offpol_diag.directions import FIRST_GAP, GAP_PREFIXES
from offpol_diag.numerals import count, say_value
from offpol_diag.summary import Against, Contrast, DumpFacts, Number, Summary

HEADER = ("metric", "A", "B", "B against A", "p, corrected")


def runs(summary: Summary) -> Section | None:
    """Return the comparison of two runs; None if there is one run."""
    found = summary.against
    if found is None:
        return None
    blocks = (
        Verdict("A against B", found.headline, _tone(found), _detail(summary, found)),
        *(Text(note, "warn") for note in found.notes),
        _facts(summary.dump, found.b.dump),
        *_tables(found),
        *_needs(found),
    )
    return Section("runs", "Run A against run B", blocks)


def _tone(found: Against) -> Tone:
    if not found.tested:
        return "warn"
    return "warn" if found.differing else "good"


def _detail(summary: Summary, found: Against) -> tuple[str, ...]:
    names = f"A is {named(summary.dump)}; B is {named(found.b.dump)}"
    corrected = (
        f"{count(found.tested)} metrics were tested, and p-values are corrected for that "
        f"({found.correction}): were nothing different, the chance of naming anything is "
        f"{say_value(found.level, 'share')} at most."
    )
    return (names, found.pairing.sentence, *([corrected] if found.tested else []))


def named(dump: DumpFacts) -> str:
    """Return a name for a run: its first file, and the number of others."""
    first = dump.files[0] if dump.files else "a dump"
    more = f" and {count(len(dump.files) - 1)} more" if len(dump.files) > 1 else ""
    return f"{first}{more}"


def _facts(a: DumpFacts, b: DumpFacts) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = (
        ("file", PurePath(named(a)).name, PurePath(named(b)).name),
        ("tokens", a.tokens, b.tokens),
        ("sequences", a.sequences, b.sequences),
        ("groups (prompts)", a.groups, b.groups),
        ("mean length", Number(value=a.mean_length), Number(value=b.mean_length)),
        ("longest", a.max_length, b.max_length),
        ("rows skipped", a.skipped.count, b.skipped.count),
        *_provenance(a.provenance, b.provenance),
    )
    return Table("runs", "The two runs", ("what", "A", "B"), rows)


def _provenance(a: dict[str, object], b: dict[str, object]) -> list[tuple[Cell, ...]]:
    """Return the provenance fields in which the runs differ."""
    mine, theirs = _flat(a), _flat(b)
    keys = dict.fromkeys([*mine, *theirs])
    absent = "not said"
    rows = [(key, mine.get(key, absent), theirs.get(key, absent)) for key in keys]
    return [row for row in rows if row[1] != row[2]]


def _flat(found: dict[str, object], before: str = "") -> dict[str, str]:
    """Flatten nested tables to keys such as `outer.inner`."""
    flat: dict[str, str] = {}
    for key, value in found.items():
        name = f"{before}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: str(value)}
    return flat


# ---------------------------------------------------------------- tables


def _tables(found: Against) -> tuple[Block, ...]:
    """Return tables of differing, equal (main metrics unfolded) and untested numbers."""
    first = _looked_at_first(found)
    differ = [one for one in found.contrasts if one.differs]
    alike = [one for one in found.contrasts if one.differs is False]
    rest = [one for one in found.contrasts if one.differs is None]
    notes = (
        f"p, corrected: {found.correction} over {count(found.tested)} tests; the intervals are 95% each and "
        "not corrected.",
    )
    main, more = ([one for one in alike if (one.name in first) is wanted] for wanted in (True, False))
    left = (f"{count(len(more))} more cannot be told apart; an HTML report has them.",) if more else ()
    return (
        *_table("differ", f"{count(len(differ))} metrics differ, what matters first", differ, notes),
        *_table("alike", "Of the main metrics these cannot be told apart", main, left),
        *_table("alike-more", f"{count(len(more))} more metrics cannot be told apart", more, (), folded=True),
        *_untested("untested", "main numbers", [one for one in rest if one.name in first], False),
        *_untested("untested-more", "more numbers", [one for one in rest if one.name not in first], True),
    )


def _looked_at_first(found: Against) -> set[str]:
    """Return the main metrics of the first pair of policies that both runs have."""
    names = {one.name for one in found.contrasts}
    prefix = next((drift for drift in GAP_PREFIXES if f"{drift}k3" in names), "")
    return {prefix + name for name in FIRST_GAP}


def _table(
    name: str, caption: str, found: list[Contrast], notes: tuple[str, ...], folded: bool = False
) -> tuple[Block, ...]:
    rows = tuple((one.name, one.a, one.b, one.effect, _p(one.p_adjusted)) for one in found)
    return (Table(name, caption, HEADER, rows, notes, collapsed=folded),) if rows else ()


def _p(value: float | None) -> str:
    if value is None:
        return "–"
    return "< 0.0001" if value < 1e-4 else f"{value:.2g}"


def _untested(name: str, what: str, found: list[Contrast], folded: bool) -> tuple[Block, ...]:
    rows = tuple((one.name, one.a, one.b, one.difference, one.reason) for one in found)
    caption = f"{count(len(rows))} {what} were not tested"
    header = ("number", "A", "B", "B − A", "why not")
    return (Table(name, caption, header, rows, collapsed=folded),) if rows else ()


def _needs(found: Against) -> tuple[Block, ...]:
    lacking = "; ".join(f"{what}: {why}" for what, why in found.needs.items())
    return (Text(f"Cannot be compared: {lacking}.", "warn"),) if lacking else ()

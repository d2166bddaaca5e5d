"""Section on run A against run B: whether they differ, in which numbers and by how much."""

from __future__ import annotations

from pathlib import PurePath

from offpol_diag.blocks import Block, Cell, Section, Table, Text, Tone, Verdict, filled
from offpol_diag.metrics import FIRST_GAP, PAIRS
from offpol_diag.numerals import count, say_value
from offpol_diag.report.sections import columns
from offpol_diag.summary import Against, Contrast, DumpFacts, Number, Summary

HEADER = ("metric", "A", "B", "B against A", "p, corrected")


def runs(summary: Summary) -> Section | None:
    """Return the comparison of two runs; None if there is one run."""
    found = summary.against
    if found is None:
        return None
    detail = [f"A is {named(summary.dump)}; B is {named(found.b.dump)}", found.pairing.sentence]
    if found.tested:
        detail.append(
            f"{count(found.tested)} metrics were tested, and p-values are corrected for that "
            f"({found.correction}): were nothing different, the chance of naming anything is "
            f"{say_value(found.level, 'share')} at most."
        )
    tone: Tone = "warn" if found.differing or not found.tested else "good"
    lacking = "; ".join(f"{what}: {why}" for what, why in found.needs.items())
    blocks = (
        Verdict("A against B", found.headline, tone, tuple(detail)),
        *(Text(note, "warn") for note in found.notes),
        _facts(summary.dump, found.b.dump),
        *columns.of_two(summary.dump, found.b.dump, columns.sentences),
        *_tables(found),
        *((Text(f"Cannot be compared: {lacking}.", "warn"),) if lacking else ()),
    )
    return Section("runs", "Run A against run B", blocks)


def named(dump: DumpFacts) -> str:
    """Return a name for a run: its first file, and the number of others."""
    first = dump.files[0] if dump.files else "a dump"
    more = f" and {count(len(dump.files) - 1)} more" if len(dump.files) > 1 else ""
    return f"{first}{more}"


def file_name(dump: DumpFacts) -> str:
    """Return the same without the directory."""
    return PurePath(named(dump)).name


def bugs(summary: Summary, found: Against) -> list[tuple[str, str]]:
    """Return A, B or both: the runs whose diagnosis is a bug, each with its headline."""
    both = (("A", summary.diagnosis), ("B", found.b.diagnosis))
    return [(run, one.headline) for run, one in both if one is not None and one.verdict == "bug"]


def _facts(a: DumpFacts, b: DumpFacts) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = (
        ("file", file_name(a), file_name(b)),
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
    names = {one.name for one in found.contrasts}
    prefix = next((drift for drift in PAIRS if f"{drift}k3" in names), "")
    main = {prefix + name for name in FIRST_GAP}
    differ = [one for one in found.contrasts if one.differs]
    alike, alike_more, rest, rest_more = (
        [one for one in found.contrasts if one.differs is differs and (one.name in main) is wanted]
        for differs in (False, None)
        for wanted in (True, False)
    )
    notes = (
        f"p, corrected: {found.correction} over {count(found.tested)} tests; the intervals are 95% each and "
        "not corrected.",
    )
    more = f"{count(len(alike_more))} more"
    left = (f"{more} cannot be told apart; an HTML report has them.",) if alike_more else ()
    return filled(
        _table("differ", f"{count(len(differ))} metrics differ, what matters first", differ, notes),
        _table("alike", "Of the main metrics these cannot be told apart", alike, left),
        _table("alike-more", f"{more} metrics cannot be told apart", alike_more, (), folded=True),
        _untested("untested", "main numbers", rest, False),
        _untested("untested-more", "more numbers", rest_more, True),
    )


def _table(
    name: str, caption: str, found: list[Contrast], notes: tuple[str, ...], folded: bool = False
) -> Table:
    rows = []
    for one in found:
        p = one.p_adjusted
        said = "–" if p is None else "< 0.0001" if p < 1e-4 else f"{p:.2g}"
        rows.append((one.name, one.a, one.b, one.effect, said))
    return Table(name, caption, HEADER, rows, notes, collapsed=folded)


def _untested(name: str, what: str, found: list[Contrast], folded: bool) -> Table:
    rows = [(one.name, one.a, one.b, one.difference, one.reason) for one in found]
    caption, header = f"{count(len(rows))} {what} were not tested", ("number", "A", "B", "B − A", "why not")
    return Table(name, caption, header, rows, collapsed=folded)

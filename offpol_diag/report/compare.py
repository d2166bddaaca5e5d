"""The answers of `compare`: presets side by side on one dump, and further runs against run A."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, takewhile
from pathlib import PurePath

from offpol_diag.metrics import PAIRS, Tone, title
from offpol_diag.number import Number
from offpol_diag.numerals import count, format_number, minus
from offpol_diag.report.analyze import cautions, dropped_by_length, of_dump
from offpol_diag.report.answer import Answer, Fact, listed
from offpol_diag.report.charts import COLOURS, Chart, chart, curve, k3_panel, steps_axis
from offpol_diag.result import Comparison, Contrast, DumpFacts, Result, at_steps
from offpol_diag.table import Cell, Table

COLUMNS = ("ess_tokens", "tokens_weighted", "sequences_dropped", "truncated_high")
"""Numbers of presets in the short table."""
MOST_PRESETS, IN_SENTENCE, MOST_NUMBERS = 12, 3, 8
"""Most presets in the short table, and in the sentence; most numbers of runs in the short table."""
PAIRED = "Differences are taken within each bootstrap replicate; those of shares are in percentage points."
DROPPED = "Dropped: rejected, vetoed, or of weight 0. Length and reward: of sequences that are dropped whole."
TOO_FEW = "Cannot say: too few groups (prompts) for intervals. "
TESTED = (
    "intervals are 95% each, not corrected. ×: times A's value; else the difference, of shares in points."
)


def of_presets(result: Result, found: Comparison) -> Answer:
    """Return the answer on presets: what each keeps, how it differs from the first, and what each drops."""
    able = {name: result.preset(name) for name, facts in result.presets.items() if not facts.needs}
    lacking = [f"{name} needs {listed(facts.needs)}" for name, facts in result.presets.items() if facts.needs]
    rows, shown = list[tuple[Cell, ...]](), [*able][:MOST_PRESETS]
    for name in shown:
        rows.append((name, *(able[name].get(key) for key in COLUMNS)))
        if name in found.differences:
            rows.append((f"− {found.against}", *(found.differences[name].get(key) for key in COLUMNS)))
    notes = [PAIRED, *(f"{name}: {result.presets[name].method}" for name in shown)]
    notes += [f"{len(able) - len(shown)} more presets: --json."] if len(able) > len(shown) else []
    tables = (
        Table("presets", "", ("preset", *map(title, COLUMNS)), rows, tuple(notes)),
        *_drops(found),
        dropped_by_length(result, able),
    )
    ess = [f"{name} {format_number(able[name].get('ess_tokens', Number()))}" for name in shown[:IN_SENTENCE]]
    diagnosed = result.diagnosis.headline if result.diagnosis else ""
    return of_dump(result, *((f"Not computed: {'; '.join(lacking)}.",) if lacking else ()))(
        "Bug" if result.is_bug else "",
        diagnosed.rstrip(".") if result.is_bug else f"ESS of tokens: {', '.join(ess)}",
        "bad" if result.is_bug else "info",
        more="Fix it before a correction is chosen." if result.is_bug else "",
        facts=(Fact("Bug?", diagnosed),) if diagnosed and not result.is_bug else (),
        tables=tuple(table for table in tables if table.rows),
    )


def _drops(found: Comparison) -> Iterator[Table]:
    """Yield how much each preset drops that the other keeps, and examples."""
    subsets = [(x.dropped_by, x.kept_by, x.tokens, x.sequences) for x in found.drops if x.tokens.count]
    if found.all_tokens and found.all_sequences:
        subsets.append(("(all)", "", found.all_tokens, found.all_sequences))
    rows = list[tuple[Cell, ...]]()
    for dropped_by, kept_by, tokens, sequences in subsets:
        numbers = (sequences.numbers.get(name, Number()) for name in ("length", "reward"))
        known = (one if one.known else None for one in numbers)  # no reward, or no sequence dropped whole
        rows.append((dropped_by, kept_by, tokens.count, tokens.numbers["share"], sequences.count, *known))
    means = ("mean length", "mean reward")
    header: tuple[str, ...] = ("dropped by", "kept by", "tokens", "share", "whole sequences", *means)
    yield Table("drops", "What one drops and the other keeps", header, rows, (DROPPED,)).without_empty()
    rows = [
        (drops.dropped_by, drops.kept_by, *(Number(x) if isinstance(x, float) else x for x in example))
        for drops in found.drops
        for example in drops.examples
    ]
    header = ("dropped by", "kept by", "sequence", "step", "length", "tokens lost", "ΣΔ, nats", "reward")
    caption = "Sequences that lose tokens to one preset only, the largest |ΣΔ| first"
    table = Table("dropped", caption, header, rows, shown="more" if len(found.differences) == 1 else "page")
    yield table.without_empty()


def of_runs(result: Result) -> Answer:
    """Return the answer on runs: whether they differ from the first, in which numbers and by how much."""
    runs = {"A": result} | {other.letter: other.run for other in result.against}
    contrasts: dict[str, dict[str, Contrast]] = {}
    for other in result.against:
        for contrast in other.contrasts:
            contrasts.setdefault(contrast.name, {})[other.letter] = contrast
    k3 = next((contrasts[f"{pair}k3"] for pair in PAIRS if f"{pair}k3" in contrasts), {})
    worse = {letter: (one.difference.value or 0.0) > 0 for letter, one in k3.items() if one.differs}
    word = ", ".join(f"{'Worse' if up else 'Better'} in {letter}" for letter, up in worse.items())
    tone: Tone = "bad" if any(worse.values()) else "good" if worse else "info"
    each = [f"{format_number(one.a)} in A" for one in k3.values()][:1]
    each += [f"{format_number(one.b)} in {letter}" for letter, one in k3.items()]
    sentence = f"K3 KL is {listed(each) if each else 'not known in both'}"
    more = ""
    for other in result.against:
        tested = [contrast.differs for contrast in other.contrasts if contrast.differs is not None]
        more += f"{sum(tested)} of {len(tested)} metrics differ after correction. " if tested else TOO_FEW
        more += f"{other.pairing} "
    diagnosed = {letter: run.diagnosis.headline for letter, run in runs.items() if run.diagnosis}
    if bugs := [letter for letter, run in runs.items() if run.is_bug]:
        word, tone, sentence = f"Bug in {listed(bugs)}", "bad", diagnosed[bugs[0]].rstrip(".")
        more = f"Fix it before the runs are compared. {more}"
    missing = dict.fromkeys(name for other in result.against for name in other.missing)
    names = zip(runs, named(*(run.dump for run in runs.values())), strict=True)
    return Answer(
        "; ".join(f"{letter} is {name}" for letter, name in names),
        word,
        sentence,
        tone,
        more=more.strip(),
        facts=tuple(Fact(f"{letter}, bug?", headline) for letter, headline in diagnosed.items()),
        cautions=(
            *(f"{letter}: {text}" for letter, run in runs.items() for text in cautions(run.dump)),
            *((f"Not in all runs, and not compared there: {'; '.join(missing)}.",) if missing else ()),
        ),
        tables=tuple(_numbers(contrasts, [*runs])),
        charts=tuple(_by_step(runs, f"{word}: K3 by step" if word else "K3 by step")),
    )


def named(*dumps: DumpFacts) -> tuple[str, ...]:
    """Return a name for each run: its first file, by as much of its path as tells the runs apart."""
    paths = [PurePath(dump.files[0] if dump.files else "a dump").parts for dump in dumps]
    alike = len({path[-1] for path in paths}) < len({*paths})
    shared = [*takewhile(lambda parts: len({*parts}) == 1, zip(*paths, strict=False))]
    names = [str(PurePath(*path[len(shared) if alike else -1 :])) for path in paths]
    more = [f" and {count(len(dump.files) - 1)} more" if len(dump.files) > 1 else "" for dump in dumps]
    return tuple(map(str.__add__, names, more))


def _numbers(contrasts: Mapping[str, Mapping[str, Contrast]], letters: Sequence[str]) -> Iterator[Table]:
    """Yield the numbers that differ first, and all numbers; a column for each run."""
    others, rows = letters[1:], list[tuple[Cell, ...]]()
    differ = [name for name, row in contrasts.items() if any(one.differs for one in row.values())]
    for name in dict.fromkeys([*differ, *contrasts]):
        found = [contrasts[name].get(letter) for letter in others]
        against = [_difference(one) if one and one.differs else "not told apart" for one in found]
        tests = [one and (one.reason if one.p_adjusted is None else f"{one.p_adjusted:.2g}") for one in found]
        a = next(one.a for one in contrasts[name].values())
        rows.append((name, *against, a, *(one and one.b for one in found), *tests))
    tested = sum(one.differs is not None for row in contrasts.values() for one in row.values())
    left = f"{count(max(len(rows) - MOST_NUMBERS, 0))} more numbers: the report and --json."
    notes = (f"Corrected for {count(tested)} tests (Holm); {TESTED}", left)
    header = ("number", *(f"{one} against A" for one in others), *letters, *(f"p of {one}" for one in others))
    short, caption = len(others) + len(letters) + 1, f"Numbers that differ: {len(differ)}"
    yield Table("decisive", caption, header[:short], [row[:short] for row in rows[:MOST_NUMBERS]], notes)
    yield Table("numbers", "Every number", header, rows, shown="page")


def _difference(one: Contrast) -> str:
    return f"×{format_number(one.ratio)}" if one.ratio else minus(format_number(one.difference))


def _by_step(runs: Mapping[str, Result], title: str) -> Iterator[Chart]:
    """Yield K3 of all runs by step, where each has two steps."""
    curves = []
    for (letter, run), colour in zip(runs.items(), cycle(COLOURS), strict=False):
        places = [place for place in at_steps(run) if place.key.lstrip("-").isdecimal()]
        k3 = {int(place.key): place.numbers.get(f"{run.prefix}k3", Number()) for place in places}
        known = {step: k3[step] for step in sorted(k3) if k3[step].value is not None}
        if len(known) < 2:
            return
        curves.append(curve([*known], [*known.values()], letter, colour))
    axis = steps_axis([step for one in curves for step in one["x"]])
    yield chart("runs_by_step", title, k3_panel("training step", curves, axis))

"""Pieces of a dump, analysed apart and merged, say what one run over the whole says, or why they cannot."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner
from typer.testing import Result as Ran

from offpol_diag.analysis import tally_file
from offpol_diag.analysis.merge import merge, summary
from offpol_diag.analysis.tally_file import read, write
from offpol_diag.analyze import analyze
from offpol_diag.cli import app
from offpol_diag.cli.settings import sample
from offpol_diag.errors import OffpolError, ResultError, UsageError
from offpol_diag.presets import Preset, Reject, Weight, catalogue
from offpol_diag.result import Result, load, loads
from tests import factory
from tests.kinds import EACH
from tests.test_laws import different

SOME = catalogue.load().resolve("token_is,seq_mis,vanilla_is")
BY_STEP = tuple(
    one
    for one in EACH
    if any(rule.over == "batch" for rule in one.reject) or (one.weight and one.weight.action == "psis")
)
NORMED = Preset("normed", "", weight=Weight("token", upper=2.0, normalize=True))


def named(*names: str) -> tuple[Preset, ...]:
    return catalogue.load().resolve(",".join(names))


def whole_of(files: Sequence[str], **options: Any) -> Result:
    """Return the Result of one run, of a few presets by default."""
    return analyze(files, **{"presets": SOME, **options})


def cut(table: pa.Table, folder: Path, parts: Sequence[Any]) -> list[str]:
    """Write a table to files, one for each list of row numbers; small row groups."""
    return [
        factory.write(folder / f"part-{number}.parquet", table.take(list(part)), 100)
        for number, part in enumerate(parts)
    ]


def by_step(table: pa.Table, pieces: int = 2, every: int = 1) -> list[list[int]]:
    """List row numbers, or one in `every`, with each step in one piece."""
    steps = table["step"].to_pylist()
    order = sorted(set(steps))
    return [
        [row for row, step in enumerate(steps) if order.index(step) % pieces == piece][::every]
        for piece in range(pieces)
    ]


def by_group(table: pa.Table) -> list[list[int]]:
    """List row numbers in two pieces, every group whole."""
    groups = table["group_id"].to_pylist()
    order = sorted(set(groups))
    return [[row for row, group in enumerate(groups) if order.index(group) % 2 == part] for part in range(2)]


def scattered(table: pa.Table, pieces: int = 2) -> list[list[int]]:
    """Return row numbers, cut without a look at steps and groups."""
    return [list(range(table.num_rows))[start::pieces] for start in range(pieces)]


Cut = Callable[[pa.Table], list[list[int]]]


def analysed(files: Sequence[str], folder: Path, ending: str = ".json", **options: Any) -> list[Path]:
    """Write the tally of every file on its own."""
    made = []
    for number, file in enumerate(files):
        made.append(folder / f"{number}.tally{ending}")
        analyze([file], tally=made[-1], **{"presets": SOME, **options})
    return made


def merged(paths: Sequence[Path]) -> Result:
    return summary(merge(paths))


@pytest.fixture(scope="module")
def table():
    """Return two of the eight groups of each of the sample's eight steps, of eight rows each."""
    whole = pq.read_table(sample())
    pairs = list(zip(whole["step"].to_pylist(), whole["group_id"].to_pylist(), strict=True))
    groups = {step: sorted({pair for pair in pairs if pair[0] == step}) for step, _ in pairs}
    return whole.take([row for row, pair in enumerate(pairs) if pair in groups[pair[0]][:2]])


# ---------------------------------------------------------------- merged = whole


def test_pieces_cut_between_steps_say_what_one_run_says_in_any_order_and_as_a_tree(table, tmp_path):
    presets = (*EACH, NORMED)
    files = cut(table, tmp_path, by_step(table, 3))
    whole = analyze(files, presets=presets)
    a, b, c = paths = analysed(files, tmp_path, ".json.gz", presets=presets)
    found = merged(paths)

    assert list(found.presets) == list(whole.presets)
    assert len(presets) == len(whole.presets)
    assert different(whole, found) == {}
    assert (found.worst, found.dump) == (whole.worst, whole.dump)
    nothing = {"as_logged": {}}
    for one, other in zip(found.presets.values(), whole.presets.values(), strict=True):
        assert one.model_copy(update=nothing) == other.model_copy(update=nothing)
    for place in (found.whole, found.at("position")[0].numbers):
        assert place["k3"].interval is not None
    assert found.preset("areal_m2po")["ess_tokens"].interval is not None

    write(tmp_path / "ca.json.gz", merge([c, a]))
    assert different(whole, merged([b, tmp_path / "ca.json.gz"])) == {}

    runs = [read(path).held[0].piece.run for path in paths]
    assert (found.run.tokens, found.run.sequences) == (whole.run.tokens, whole.run.sequences)
    assert found.run.seconds["total"] == pytest.approx(sum(run.seconds["total"] for run in runs))
    assert found.run.peak_rss_bytes == max(run.peak_rss_bytes for run in runs)
    assert (found.run.device, found.run.engine, found.run.seed) == (runs[0].device, runs[0].engine, 0)
    assert found.run.command == "merge"


def without(*columns: str) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.drop_columns(list(columns))


def only(*columns: str) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.select(list(columns))


def spoilt(rows: Sequence[int], value: float) -> Callable[[pa.Table], pa.Table]:
    """Return a change that sets the first token of some rows' old policy to this value."""

    def change(table: pa.Table) -> pa.Table:
        lists = table["old_log_probs"].to_pylist()
        for row in rows:
            lists[row][0] = value
        return table.set_column(table.column_names.index("old_log_probs"), "old_log_probs", pa.array(lists))

    return change


def hosts(table: pa.Table) -> pa.Table:
    """Name the host of every row, and number the sequences."""
    rows = range(table.num_rows)
    table = table.drop_columns(["sequence_id"]).append_column("sequence_id", pa.array([*map(str, rows)]))
    return table.append_column("host", pa.array([f"host-{row % 5}" for row in rows]))


AXIS = {"group_by": ["host"], "seed": 7, "presets": ()}
MADE = without("advantages")
WITHOUT_CURRENT = (*SOME, *named("gspo", "recompute", "areal_m2po"))
SAME: dict[str, tuple[Callable[[pa.Table], pa.Table], Cut, dict[str, Any]]] = {
    "no current policy": (without("current_log_probs"), by_step, {"presets": WITHOUT_CURRENT}),
    "two policies and no other column": (only("rollout_log_probs", "current_log_probs"), scattered, {}),
    "ids that are numbers, an axis of one's own, another seed": (hosts, scattered, AXIS),
    "advantages made of rewards, steps whole": (MADE, by_step, {"presets": (*SOME, *BY_STEP)}),
    "advantages made of rewards, groups whole": (MADE, by_group, {}),
    "rows without ids, numbered as in the whole dump": (without("sequence_id"), scattered, {}),
    "positive log-probs, counted over all": (spoilt([3, 4, 5, 100], 0.5), scattered, {"presets": ()}),
    "skipped rows": (spoilt(range(20), math.nan), scattered, {"on_bad_row": "skip", "presets": ()}),
    "the same without steps": (without("advantages", "step"), by_group, {}),
}


@pytest.mark.parametrize("what", SAME)
def test_merged_pieces_say_what_one_run_says(table, tmp_path, what):
    change, pieces, options = SAME[what]
    files = cut(change(table), tmp_path, pieces(table))
    whole, found = whole_of(files, **options), merged(analysed(files, tmp_path, **options))
    assert different(whole, found) == {}
    assert (found.worst, found.dump) == (whole.worst, whole.dump)
    assert list(found.axes) == list(whole.axes)


def test_what_files_say_of_themselves_is_put_together(table, tmp_path):
    said: list[dict[str, Any]] = [{"engine": engine, "tags": [1, 2]} for engine in "aba"]
    said[2]["x"] = 1
    files = cut(table, tmp_path, scattered(table, 3))
    for file, one in zip(files, said, strict=True):
        rows = pq.read_table(file).replace_schema_metadata({"offpol_diag": json.dumps(one)})
        factory.write(Path(file), rows)
    a, b, c = analysed(files, tmp_path, presets=())
    write(tmp_path / "ab.json", merge([a, b]))

    whole = {"engine": ["a", "b"], "tags": [1, 2], "x": 1}
    for one in (whole_of(files, presets=()), merged([a, b, c]), merged([tmp_path / "ab.json", c])):
        assert one.dump.provenance == whole


def test_a_column_is_ignored_that_is_read_of_no_piece(table, tmp_path):
    files = cut(table, tmp_path, scattered(table, 2))
    notes = pa.array([[0.5]] * pq.read_metadata(files[1]).num_rows)
    factory.write(Path(files[1]), pq.read_table(files[1]).append_column("notes", notes))
    a, b = analysed(files, tmp_path, presets=())
    assert merged([a, b]).dump.ignored == whole_of(files, presets=()).dump.ignored == ["notes"]
    assert merged([a, b]).dump.others == whole_of(files, presets=()).dump.others


def long_form(table: pa.Table, rows: int) -> pa.Table:
    """Return the first rows of the table, with a row for each of their tokens."""
    names = ("sequence_id", "group_id", "rollout_log_prob", "old_log_prob")
    found = [
        dict(zip(names, (row["sequence_id"], row["group_id"], *two), strict=True))
        for row in table.slice(0, rows).to_pylist()
        for two in zip(row["rollout_log_probs"], row["old_log_probs"], strict=True)
    ]
    return pa.Table.from_pylist(found)


def test_a_dump_of_one_row_per_token_may_be_cut_between_sequences_only(table, tmp_path):
    """Pieces of one sequence, which begin and end with the same, among them."""
    for rows, first in ((40, 17), (2, 1)):
        long = long_form(table, rows)
        border = long["sequence_id"].to_pylist().index(table["sequence_id"][first].as_py())
        files = cut(long, tmp_path, [range(border), range(border, long.num_rows)])
        a, b = analysed(files, tmp_path, presets=SOME[:1])
        whole = whole_of(files, presets=SOME[:1])
        assert whole.dump.rows == rows
        assert different(whole, merged([a, b])) == different(whole, merged([b, a])) == {}

        torn = cut(long, tmp_path, [range(border + 1), range(border + 1, long.num_rows)])
        a, b = analysed(torn, tmp_path, presets=())
        for paths in ([a, b], [b, a]):
            assert f"{a} ends with a sequence that goes on in {b}" in refusal(paths).message


# ---------------------------------------------------------------- what a whole step settles


def test_presets_by_step_are_left_out_where_a_step_is_torn_and_no_other_is_wrong(table, tmp_path):
    files = cut(table, tmp_path, scattered(table))
    presets = (*BY_STEP, *SOME, NORMED)

    found = merged(analysed(files, tmp_path, presets=presets))

    gone = {one.name for one in BY_STEP}
    assert set(found.presets) == {one.name for one in presets} - gone
    whole = analyze(files, presets=presets)
    kept = whole.model_copy(update={"presets": {k: v for k, v in whole.presets.items() if k not in gone}})
    assert different(kept, found) == {}
    (note,) = found.dump.notes
    assert note.startswith("left out: ")
    assert all(name in note for name in (*gone, "rows of step 10, 3, 4 and 5 more", "0.tally"))

    files = cut(table.drop_columns(["step"]), tmp_path, scattered(table))
    found = merged(analysed(files, tmp_path, presets=(*BY_STEP, *SOME)))
    assert set(found.presets) == {one.name for one in SOME}
    assert "the dump, which has no step and is one, lies in 2 pieces" in found.dump.notes[0]


def test_a_step_torn_between_branches_of_a_tree_is_seen_and_named(table, tmp_path):
    rows = by_step(table)
    files = cut(table, tmp_path, [rows[0][:1], rows[1], rows[0][1:]])
    a, b, c = analysed(files, tmp_path, presets=BY_STEP)
    write(tmp_path / "ab.json", merge([a, b]))

    assert set(merged([a, b]).presets) == {one.name for one in BY_STEP}
    found = merged([tmp_path / "ab.json", c])
    assert found.presets == {}
    assert f"rows of step {table['step'][rows[0][0]].as_py()} lie in" in found.dump.notes[0]


def test_advantages_made_of_the_rewards_of_torn_groups_are_refused(table, tmp_path):
    files = cut(table.drop_columns(["advantages"]), tmp_path, scattered(table))
    said = r"rows of step 10, 3, 4 and 5 more .* a group may be torn"
    with pytest.raises(ResultError, match=said) as refused:
        merged(analysed(files, tmp_path))
    assert "write advantages into the dump" in refused.value.hint


def test_groups_too_many_to_list_are_not_trusted_to_be_whole(table, tmp_path, monkeypatch):
    """The table has 16 groups, 8 a piece; in a branch of a tree that lists too many, none is listed."""
    files = cut(table.drop_columns(["advantages"]), tmp_path, by_group(table))

    def again(tallies: Sequence[Path]) -> Result:
        write(tmp_path / "branch.json", merge(tallies))
        return merged([tmp_path / "branch.json"])

    monkeypatch.setattr(tally_file, "MOST_GROUPS", 8)
    monkeypatch.setattr(tally_file, "MOST_GROUPS_IN_ALL", 16)
    listed = analysed(files, tmp_path, presets=SOME[:1])
    assert again(listed).presets
    monkeypatch.setattr(tally_file, "MOST_GROUPS_IN_ALL", 15)
    with pytest.raises(ResultError, match="a group may be torn"):
        again(listed)
    monkeypatch.setattr(tally_file, "MOST_GROUPS_IN_ALL", 16)
    monkeypatch.setattr(tally_file, "MOST_GROUPS", 7)
    with pytest.raises(ResultError, match="a group may be torn"):
        again(analysed(files, tmp_path, presets=SOME[:1]))


# ---------------------------------------------------------------- what does not belong together


def refusal(paths: Sequence[Path]) -> OffpolError:
    with pytest.raises(ResultError) as refused:
        merge(paths)
    assert refused.value.hint
    return refused.value


@pytest.fixture(scope="module")
def halves(table, tmp_path_factory):
    return cut(table, tmp_path_factory.mktemp("halves"), by_step(table, 2, every=4))


@pytest.fixture(scope="module")
def half(halves, tmp_path_factory):
    """The tally of the first half."""
    return analysed(halves[:1], tmp_path_factory.mktemp("half"))[0]


TOKEN_IS = named("token_is")[0]


def changed(**change: Any) -> dict[str, Any]:
    """Return token IS alone, changed from how it ships."""
    return {"presets": (replace(TOKEN_IS, **change),)}


def rules(*upper: float) -> dict[str, Any]:
    return changed(reject=tuple(Reject(upper=one) for one in upper))


UPPER, UNBOUNDED = Weight("token", upper=3.0), Weight("token", upper=2.0, safety=None)
UNLIKE: list[tuple[dict[str, Any], dict[str, Any], list[str], str]] = [
    # how the first piece was analysed, how the second one, the columns that it lacks, what is said
    ({}, {"seed": 1}, [], "seed: 0 and 1"),
    ({}, {"group_by": ["policy_lag"]}, [], 'group_by: [] and ["policy_lag"]'),
    ({}, {"columns": {"old": "current_log_probs"}}, [], "column old_log_probs"),
    ({}, {"presets": SOME[:2]}, [], "preset vanilla_is is in only one of them"),
    ({}, {"presets": SOME[::-1]}, [], "order of the presets"),
    ({}, {}, ["entropy"], 'column entropy: "entropy" and nothing'),
    ({}, {}, ["advantages"], "columns made"),
    (changed(), changed(weight=UPPER), [], "preset token_is.weight.upper: 2.0 and 3.0"),
    (changed(), changed(weight=UNBOUNDED), [], "preset token_is.weight.safety: 20.0 and null"),
    (rules(2.0, 3.0), rules(2.0, 4.0), [], "preset token_is.reject.1.upper: 3.0 and 4.0"),
    (rules(), rules(2.0), [], "preset token_is.reject"),
]


@pytest.mark.parametrize(("one", "two", "lacking", "said"), UNLIKE, ids=[row[-1] for row in UNLIKE])
def test_pieces_that_were_not_analysed_alike_are_refused(halves, half, tmp_path, one, two, lacking, said):
    a = analysed(halves[:1], tmp_path, ".a.json", **one)[0] if one else half
    other = factory.write(tmp_path / "b.parquet", pq.read_table(halves[1]).drop_columns(lacking))
    (b,) = analysed([other], tmp_path, ".b.json", **two)
    message = refusal([a, b]).message
    assert f"{a} and {b} were not made alike: " in message
    assert said in message


def test_no_tally_and_rows_that_are_read_twice_are_refused(halves, half, tmp_path):
    a, (b,) = half, analysed(halves[1:], tmp_path)
    copy, both, branch = tmp_path / "another name.parquet", tmp_path / "both.json", tmp_path / "branch.json"
    copy.write_bytes(Path(halves[0]).read_bytes())
    analyze([halves[1], str(copy)], tally=both, presets=SOME)
    write(branch, merge([a, b]))

    with pytest.raises(UsageError, match="no tally is given"):
        merge([])
    assert f"part-0.parquet was read for {a}, which is given twice" in refusal([a, b, a]).message
    assert f"another name.parquet was read for {a} and {both}" in refusal([a, both]).message
    assert f"{b} and {branch}" in refusal([b, branch]).message


def test_files_of_one_shape_with_other_numbers_are_not_one(tmp_path):
    """As many rows, tokens and bytes; what differs is the statistics in the footer."""
    files = []
    for name, x in (("a", -1.0), ("b", -2.0)):
        logs = dict.fromkeys(("rollout_log_probs", "old_log_probs"), [[x, x]] * 8)
        files.append(factory.write(tmp_path / f"{name}.parquet", None, None, {"compression": "none"}, **logs))
    assert Path(files[0]).stat().st_size == Path(files[1]).stat().st_size
    assert merged(analysed(files, tmp_path)).dump.rows == 16


# ---------------------------------------------------------------- from outside

PRESETS = ("--presets", "token_is,areal_m2po")


@pytest.fixture
def work(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv("COLUMNS", raising=False)


def run(*args: object) -> Ran:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def files() -> list[str]:
    return sorted(path.name for path in Path().iterdir())


@pytest.fixture(scope="module")
def dumps(table, tmp_path_factory):
    """Write two steps of the sample, a file each."""
    steps = table["step"].to_pylist()
    rows = [[row for row, one in enumerate(steps) if one == step] for step in (3, 4)]
    return [Path(file) for file in cut(table, tmp_path_factory.mktemp("dumps"), rows)]


@pytest.fixture(scope="module")
def pieces(dumps, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pieces")
    made = [folder / "3.tally", folder / "4.tally"]
    for dump, tally in zip(dumps, made, strict=True):
        ran = run("analyze", dump, *PRESETS, "--no-html", "--tally", tally)
        assert ran.exit_code == 0, ran.output
        assert ran.stdout.endswith(f"tally   {tally}\n")
    return made


def test_merged_pieces_are_reported_as_one_run_over_both(dumps, pieces, work):
    one = run("analyze", *dumps, *PRESETS, "--json", "whole.json", "-o", "whole.html")
    two = run("merge", *pieces, "--json", "merged.json", "-o", "merged.html")

    assert (one.exit_code, two.exit_code) == (0, 0), two.output
    said = two.stdout
    whole, merged = load(Path("whole.json")), load(Path("merged.json"))
    assert different(whole, merged) == {}
    assert merged.recommendation == whole.recommendation
    assert merged.diagnosis is not None
    how = ("--for", "trl", "--json", "-", "-q")
    one, two = run("analyze", *dumps, *PRESETS, *how), run("merge", *pieces, *how)
    assert loads(one.stdout, "").recommendation == loads(two.stdout, "").recommendation is not None
    assert run("merge", *pieces, "--for", "nobody").exit_code == 2
    assert merged.run.command == "merge"
    assert "<html" in Path("merged.html").read_text()
    assert said.endswith("report  merged.html\njson    merged.json\n")


def test_merge_writes_a_page_unless_told_otherwise_and_what_is_asked_for(pieces, work):
    ran = run("merge", *pieces, "--no-html", "--json", "-")
    assert loads(ran.stdout, "stdout").dump.rows == 32
    assert files() == []
    assert run("merge", *pieces).exit_code == 0
    assert files() == ["offpol-diag-merged.html"]
    assert run("merge", *pieces, "--no-html", "--md", "report.md").exit_code == 0
    assert "K3 KL" in Path("report.md").read_text()


def test_what_is_left_out_is_said_on_stdout_in_the_page_and_in_json(dumps, work):
    torn = pq.read_table(dumps[0])
    for part in (0, 1):
        factory.write(Path(f"{part}.parquet"), torn.slice(part * 8, 8))
        ran = run("analyze", f"{part}.parquet", *PRESETS, "--no-html", "--tally", f"{part}.tally")
        assert ran.exit_code == 0

    ran = run("merge", "0.tally", "1.tally", "--json", "merged.json")

    for said in (" ".join(ran.stdout.split()), Path("offpol-diag-merged.html").read_text()):
        assert "left out: areal_m2po" in said
    found = load(Path("merged.json"))
    assert list(found.presets) == ["token_is"]
    assert "rows of step 3 lie in more than one piece (0.tally, 1.tally)" in found.dump.notes[0]


def refused(*args: object) -> str:
    """Check that a command fails cleanly and leaves no file; return its stderr."""
    before = files()
    ran = run(*args)
    assert (ran.exit_code, ran.stdout, files()) == (2, "", before), ran.output
    assert re.match(r"error: .+\n\nhint: ", ran.stderr)
    assert "Traceback" not in ran.output
    return ran.stderr


def test_a_file_that_is_no_tally_is_an_error_with_a_hint_and_nothing_is_written(dumps, pieces, work):
    Path("bad.json").write_bytes(b"[" * 1_000_000)
    run("merge", *pieces, "--no-html", "--json", "result.json")
    said = refused("merge", pieces[0], "bad.json", "--json", "out.json", "--tally", "out.tally")
    assert "bad.json: this is not a tally of offpol-diag" in said
    assert "not a tally" in refused("merge", dumps[0])
    assert "not a tally" in refused("merge", "result.json")


def test_a_tally_is_written_to_a_file_of_its_own(dumps, pieces, work):
    before = pieces[0].read_bytes()

    assert "a tally needs a file" in refused("analyze", dumps[0], "--tally", "-")
    assert "a tally needs a file" in refused("merge", pieces[0], "--tally", "/dev/null")
    assert "is what is read" in refused("merge", *pieces, "--tally", pieces[0])
    assert "is what is read" in refused("merge", *pieces, "--json", pieces[0])
    assert "is what is read" in refused("analyze", dumps[0], "--tally", dumps[0])
    assert "one file" in refused("analyze", dumps[0], "--tally", "x.json", "--json", "x.json")
    assert "its directory does not exist" in refused("analyze", "no.parquet", "--tally", "no/x.json")
    assert Path("/dev/null").is_char_device()
    assert pieces[0].read_bytes() == before


@pytest.mark.parametrize("command", ["analyze", "merge"])
def test_help_says_what_a_torn_step_means(command):
    said = " ".join(run(command, "--help").output.split())
    assert re.search("M2PO.*(each step lies|every step to lie) whole in one piece", said)

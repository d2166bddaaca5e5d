"""The benchmarks at a tiny size: that they run, that what they compare agrees, and that they can fail."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import complexity
import duck
import dump
import gpu
import machine
import memory
import numpy as np
import padded
import part
import peak
import peers
import presets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reading
import report
import rounds
import run
import scale
import startup
import threads
import torch

from offpol_diag.analyze import analyze
from offpol_diag.errors import MemoryShortage
from offpol_diag.presets.catalogue import load
from tests.factory import with_numbers

ROOT = Path(__file__).parents[1]
TINY = part.Given(sequences=12, rounds=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Write a dump so long that each of the nine numbers but the veto is not 0."""
    path = tmp_path_factory.mktemp("bench") / "dump.parquet"
    dump.make(path, sequences=40, rows_per_group=16)
    return path


@pytest.fixture(scope="module")
def analysed(path):
    """Analyze that dump under the presets whose numbers are compared."""
    return analyze([str(path)], presets=Few().resolve("all"))


drawn = part.dump


@pytest.fixture(autouse=True)
def dumps_are_made_in_this_process(tmp_path, monkeypatch):
    """Make dumps in this process: a process for each takes a second."""

    @contextmanager
    def made(sequences, **options):
        path = tmp_path / f"{options.get('shape', 'dump')}.parquet"
        yield path, dump.make(path, sequences, **options)

    monkeypatch.setattr(part, "dump", made)
    monkeypatch.setattr(dump, "block", BLOCK)


BLOCK = cache(dump.block)


class Few:
    """A catalogue of a few presets."""

    def resolve(self, names):
        assert names == "all"
        return load().resolve("token_is,slime_mis_token_mask,seq_mis,geo_rs,seq_is")


def ratios(path):
    """Compute Δ of every sequence, in plain Python."""
    names = ("rollout_log_probs", "old_log_probs", "response_mask")
    rows = pq.read_table(path).to_pylist()
    return [[p - q for q, p, m in zip(*map(row.get, names), strict=True) if m] for row in rows]


# ---------------------------------------------------------------- every script


def test_a_part_runs_prints_its_section_and_keeps_its_result(tmp_path, monkeypatch, capsys):
    kept = tmp_path / "results.json"
    monkeypatch.setattr(machine, "limit", lambda threads: None)
    monkeypatch.setattr(peak, "offpol_diag", lambda *options: peak.Spent(1.0, 2.0, 5, 7))
    monkeypatch.setattr(sys, "argv", ["startup.py", "--rounds=2", "--write", f"--results={kept}"])

    part.main("startup", startup.measure, "about")
    done = SimpleNamespace(returncode=0, stdout=capsys.readouterr().out)
    monkeypatch.setattr(run.subprocess, "run", lambda *_, **__: done)

    assert run.show("startup", [])
    assert capsys.readouterr().out.startswith(f"## {report.SECTIONS['startup']}\n")
    assert report.results(kept)["startup"]["result"]["seconds"] == {"--help": 1.0, "analyze": 1.0}


def test_the_reading_alone_is_compared_with_pyarrows(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reading.py", str(path), "--rounds=1"])

    reading.main()

    assert capsys.readouterr().out.count("ratio") == 2


def test_two_threads_are_compared_with_one(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(threads.peak, "offpol_diag", lambda *options: asked.append(options[-1]))
    monkeypatch.setattr(sys, "argv", ["threads.py", "--sequences=12", "--rounds=2"])

    threads.main()

    assert asked == ["--threads=1", "--threads=2"] * 2
    assert capsys.readouterr().out.count("of the time of one") == 1


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--only=speed"], 2, "no part 'speed'; there are peers, presets"),
        (["--only=memory", "--sequences=-1"], 1, "failed: memory"),
    ],
)
def test_an_unknown_part_and_one_that_fails_have_their_exit_codes(options, code, said):
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, said in done.stderr) == (code, True)


def test_a_part_that_fails_says_what_and_exits_with_1_and_keeps_nothing(tmp_path, monkeypatch):
    def measure(given):
        raise part.Failed("they do not agree")

    monkeypatch.setattr(machine, "limit", lambda threads: None)
    monkeypatch.setattr(sys, "argv", ["x.py", "--write", f"--results={tmp_path / 'r.json'}"])

    with pytest.raises(SystemExit, match=r"^x: they do not agree$"):
        part.main("x", measure, "about")
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize(
    ("result", "options", "kept"),
    [
        ({"value": 1}, ["--write"], True),
        ({"value": 1}, [], False),
        ({"value": 1, part.NOTHING: "no GPU here"}, ["--write"], False),
    ],
)
def test_a_result_is_kept_when_that_is_asked_and_something_was_measured(
    result, options, kept, tmp_path, monkeypatch
):
    path = tmp_path / "r.json"
    limits = []
    monkeypatch.setattr(machine, "limit", limits.append)
    monkeypatch.setattr(sys, "argv", ["x.py", f"--results={path}", *options])

    part.main("x", lambda given: result, "about", threads=2)

    assert path.exists() == kept
    assert limits == [2]


def test_a_dump_for_which_there_is_no_room_is_not_begun(monkeypatch):
    monkeypatch.setattr(part.shutil, "disk_usage", lambda folder: SimpleNamespace(free=100 * part.ROOM))

    with drawn(100, rows_per_group=30) as (path, _):
        assert path.stat().st_size < 100 * part.ROOM
        assert pq.ParquetFile(path).num_row_groups == 4
    with pytest.raises(part.Failed, match="no room"), drawn(101):
        pass


# ---------------------------------------------------------------- the dump


def test_the_same_numbers_make_the_same_dump_and_a_longer_one_begins_with_it(tmp_path):
    for name, sequences, rows in (("a", 1030, 400), ("b", 1030, 400), ("c", 1100, 1100)):
        dump.make(tmp_path / name, sequences, rows)
    a, b, c = (tmp_path / name for name in "abc")

    assert a.read_bytes() == b.read_bytes()
    assert pq.read_table(c).slice(0, 1030).combine_chunks().equals(pq.read_table(a).combine_chunks())
    groups = [pq.ParquetFile(a).metadata.row_group(i).num_rows for i in range(3)]
    assert groups == [400, 400, 230]
    assert pq.ParquetFile(c).num_row_groups == 1


def test_the_dump_is_what_the_page_says_of_it(tmp_path):
    facts = dump.make(tmp_path / "d", 1024)
    table = pq.read_table(tmp_path / "d")
    lengths = table["rollout_log_probs"].combine_chunks().value_lengths().to_numpy()
    mask = table["response_mask"].combine_chunks().flatten().to_numpy()

    assert facts["tokens"] == lengths.sum() == len(mask)
    assert facts["bytes"] == (tmp_path / "d").stat().st_size
    assert 900 < lengths.mean() < 1100
    assert lengths.max() <= 8192
    assert 0.018 < 1 - mask.mean() < 0.022
    assert table.schema.field("old_log_probs").type == pa.list_(pa.float32())
    assert table.schema.field("response_mask").type == pa.list_(pa.int8())
    assert all(max(row) <= 0 for row in table["current_log_probs"].slice(0, 50).to_pylist())
    assert table["group_id"].to_pylist()[7:9] == [0, 1]


def test_other_shapes_have_as_many_tokens_in_other_rows_or_with_another_drift(tmp_path):
    def made(shape, sequences):
        path = tmp_path / shape
        facts = dump.make(path, sequences, rows_per_group=256, shape=shape)
        table = pq.read_table(path)
        rollout, old = (table[f"{name}_log_probs"].combine_chunks() for name in ("rollout", "old"))
        drift = np.abs(np.subtract(old.flatten(), rollout.flatten()))
        lengths = rollout.value_lengths().to_numpy()
        assert (facts["sequences"], facts["tokens"]) == (len(lengths), lengths.sum())
        assert 0.8 < facts["tokens"] / (1024 * sequences) < 1.2
        return lengths, float(np.median(drift)), pq.ParquetFile(path).num_row_groups

    ordinary, small, groups = made("ordinary", 512)
    collapsed, large, _ = made("collapsed", 512)
    spread, _, _ = made("log_normal", 1024)
    short, _, of_short = made("short", 512)

    assert np.array_equal(collapsed, ordinary)
    assert large > 20 * small
    assert np.median(spread) < 350 < np.median(ordinary)
    assert 8192 < spread.max() <= 65_536
    assert len(short) == 128 * len(ordinary)
    assert 7 < short.mean() < 9
    assert short.max() <= 32
    assert groups == of_short == 2


def test_the_drift_gives_presets_something_to_do_and_keeps_the_mean_ratio_at_1(analysed):
    found = duck.ours(analysed)
    ratio = analysed.whole["mean_ratio"].value

    assert 1e-5 < found["tokens_rejected"] < 1e-2
    assert 0 < found["sequences_dropped"] < 1
    assert abs(ratio - 1) < 2e-3


# ---------------------------------------------------------------- DuckDB


def test_the_bounds_of_the_query_are_on_both_sides(tmp_path):
    gaps = [[math.log(r) for r in row] for row in ([0.49, 0.51, 1.99, 2.01], [2.01], [0.49], [9e-5, 1e4])]
    lists = {"rollout_log_probs": [[-10.0] * len(row) for row in gaps]}
    lists |= {"old_log_probs": [[d - 10 for d in row] for row in gaps]}
    pq.write_table(
        pa.table(lists | {"response_mask": [[1] * len(row) for row in gaps]}), tmp_path / "d.parquet"
    )

    found = duck.Duck(1).nine(tmp_path / "d.parquet")

    assert (found["tokens_rejected"], found["sequences_dropped"], found["vetoed"]) == (6 / 8, 2 / 4, 1 / 4)


@pytest.mark.parametrize("found", [{"k3": 1 + 2e-6}, {"k3": math.nan}, {}, {"K3": 1.0}])
def test_numbers_that_differ_or_are_missing_are_a_failure_and_so_is_nothing_compared(found):
    duck.agree({"k3": 1 + 5e-7, "more": 2.0}, {"k3": 1.0})
    with pytest.raises(part.Failed, match="k3"):
        duck.agree(found, {"k3": 1.0})
    with pytest.raises(part.Failed, match="nothing was compared"):
        duck.agree(found, {})


@pytest.fixture(scope="module")
def nine(path):
    """Compute the nine numbers of that dump by the query."""
    return duck.Duck(2).nine(path)


@pytest.mark.parametrize(
    ("right", "wrong", "name"),
    [
        ("r NOT BETWEEN 0.5 AND 2", "r NOT BETWEEN 0.5 AND 1.2", "tokens_rejected"),
        ("ln(0.5) AND ln(2)", "ln(0.5) AND ln(1.1)", "sequences_dropped"),
        ("least(exp(d), 2)", "least(exp(d), 1.5)", "truncated_ess"),
        ("WHERE m = 1", "", "tokens"),
        ("ln(1e-4)", "ln(0.9)", "vetoed"),
        ("sum(r - 1 - d)", "sum(r - 1 - d + 1e-9)", "k3"),
        ("sum(r * r)", "sum(r)", "chi2_token"),
        ("exp(2 * s)", "exp(s)", "chi2_sequence"),
        ("exp(-s / n)", "exp(s / n)", "ppl_ratio"),
    ],
)
def test_a_query_that_asks_something_else_does_not_agree(
    right, wrong, name, path, analysed, nine, monkeypatch
):
    assert right in duck.QUERY
    duck.agree(duck.ours(analysed), nine)
    monkeypatch.setattr(duck, "QUERY", duck.QUERY.replace(right, wrong))

    with pytest.raises(part.Failed, match=name):
        duck.agree(duck.ours(analysed), duck.Duck(2).nine(path))


def test_peers_that_do_not_agree_have_no_times(analysed, monkeypatch):
    # of another dump
    monkeypatch.setattr(peers, "analyze", lambda sources, presets, threads, every_log: analysed)

    with pytest.raises(part.Failed, match="tokens"):
        peers.measure(TINY)


# ---------------------------------------------------------------- the padded baseline


def test_a_padded_batch_has_the_tokens_in_place_and_nothing_else(path):
    table, batches = pq.read_table(path), list(padded.batches(path))
    batch = batches[1]
    row = table.slice(16 + 3, 1).to_pylist()[0]
    n = len(row["response_mask"])

    assert [len(one.mask) for one in batches] == [16, 16, 8]
    assert batch.rollout.dtype == torch.float32
    assert batch.rollout.shape == batch.old.shape == batch.mask.shape
    assert batch.old[3, :n].tolist() == row["old_log_probs"]
    assert batch.mask[3, :n].tolist() == row["response_mask"]
    assert not batch.mask[3, n:].any()
    assert not batch.rollout[3, n:].any()


def test_the_padded_passes_have_the_numbers_of_plain_python(path):
    gaps = ratios(path)
    tokens = [d for row in gaps for d in row]
    n = len(tokens)
    w = [min(math.exp(d), 2) for d in tokens]
    v = [(len(row), min(math.exp(math.fsum(row)), 2)) for row in gaps]

    numbers, seconds, places = padded.sweep(path)

    assert numbers["truncated_ess"] == pytest.approx(sum(w) ** 2 / (n * sum(x * x for x in w)), rel=1e-4)
    ess = sum(k * x for k, x in v) ** 2 / (n * sum(k * x * x for k, x in v))
    assert numbers["sequence_weight_ess"] == pytest.approx(ess, rel=1e-4)
    rejected = sum(not 0.5 <= math.exp(d) <= 2 for d in tokens) / n
    assert numbers["tokens_rejected"] == pytest.approx(rejected, rel=1e-4)
    assert numbers["vetoed"] == sum(math.exp(min(row)) < 1e-4 for row in gaps) / len(gaps)
    assert places == sum(batch.mask.numel() for batch in padded.batches(path))
    assert seconds > 0


def test_a_padded_baseline_that_computes_something_else_fails(monkeypatch):
    def twice(batch):
        return {name: 2 * value for name, value in padded.token_truncation(batch).items()}

    monkeypatch.setattr(padded, "PASSES", (twice, *padded.PASSES[1:]))
    monkeypatch.setattr(padded, "load", Few)

    with pytest.raises(part.Failed, match="truncated_ess"):
        padded.measure(TINY)


# ---------------------------------------------------------------- measuring


def test_peers_take_turns_and_a_ratio_is_of_one_round():
    order = []

    rounds.alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    timed = rounds.Rounds({"a": [1.0, 100.0, 3.0], "b": [1.0, 10.0, 1.0]}, {"a": [0.0], "b": [0.0]})

    assert order == ["a", "b", "a", "b"]
    assert timed.ratio("a", "b") == 3
    assert timed.median("a") == 3


def test_a_slope_is_that_of_the_line_and_says_how_far_points_are_off_it():
    assert rounds.slope([1, 20, 60], [12, 50, 130]) == pytest.approx((10, 2, 0))

    _, _, off = rounds.slope([0, 1, 2], [10, 16, 10])
    assert off == pytest.approx(0.25)


def test_sets_of_presets_lie_within_each_other_and_are_spread_over_the_catalogue():
    every = load().resolve("all")

    sets = presets.spread(every, presets.COUNTS)

    assert [*sets] == [1, 20, 60, len(every)]
    assert set(sets[1]) < set(sets[20]) < set(sets[60]) < set(sets[len(every)]) == set(every)
    at = sorted(every.index(preset) for preset in sets[20])
    assert max(b - a for a, b in pairwise([0, *at, len(every)])) < len(every) / 5
    assert [*presets.spread(every[:5], presets.COUNTS)] == [1, 5]


def test_the_peak_is_the_commands_own_and_not_that_of_who_starts_it():
    held = torch.ones(1 << 25)  # 128 MiB in this process
    small = peak.run([sys.executable, "-S", "-c", "pass"])
    large = peak.run([sys.executable, "-S", "-c", "x = bytearray(200 << 20); x[::4096] = bytes(51200)"])

    assert held.sum() > 0
    assert small.peak < 60 << 20
    assert 200 << 20 < large.peak < 300 << 20
    assert small.cpu > 0
    assert small.wall > 0
    with pytest.raises(subprocess.CalledProcessError):
        peak.run([sys.executable, "-S", "-c", "raise SystemExit(3)"])


@pytest.mark.skipif(sys.platform != "linux", reason="of other systems' processes nothing is known")
def test_memory_and_time_of_a_command_are_those_of_all_its_processes():
    child = (
        "import time; x = bytearray(200 << 20); x[::4096] = bytes(51200); sum(range(9**6)); time.sleep(0.5)"
    )
    two = (
        "import subprocess, sys; "
        f"both = [subprocess.Popen([sys.executable, '-S', '-c', {child!r}]) for _ in range(2)]; "
        "[one.wait() for one in both]"
    )
    own, alone = (peak.run([sys.executable, "-S", "-c", code]) for code in (two, child))

    assert 1.8 * alone.together < own.together < 2.6 * alone.together
    assert 200 << 20 < own.peak < 300 << 20
    assert own.cpu > 1.5 * alone.cpu > 0


@pytest.mark.skipif(sys.platform != "linux", reason="of other systems' processes nothing is known")
def test_seconds_of_processor_are_also_those_of_processes_that_were_started():
    busy = [sys.executable, "-S", "-c", "sum(range(9_000_000)); print(flush=True); input()"]
    with subprocess.Popen(busy, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        job = {"wait": lambda: child.stdout.readline() if child.stdout else None}
        found = rounds.alternate(job, 1)
        child.communicate("\n")

    assert found.cpu["wait"][0] > 0.05


def test_sizes_grow_fourfold_up_to_the_largest():
    assert part.sizes(65_536, 1024) == [1024, 4096, 16_384, 65_536]
    assert part.sizes(5000, 1024) == [1024, 4096, 5000]
    assert part.sizes(12, 1024) == [12]


def test_growth_is_the_worst_from_a_size_to_any_larger_one_and_of_the_last_presets():
    assert [complexity.growth(one) for one in ([4.0, 2.0, 1.0], [2.0, 1.0, 1.5], [2.0])] == [-0.5, 0.5, 0]
    for last, steep in ((160, 0), (260, 1), (110, -0.5)):
        assert complexity.steeper([1, 20, 60, 160], [1, 20, 60, last]) == pytest.approx(steep)


@pytest.mark.parametrize(
    ("growth", "steep", "said"),
    [(0.26, 0.1, "with the dump"), (0.1, 0.51, "further preset"), (math.nan, 0.1, "with the dump")],
)
def test_time_that_grows_too_fast_is_a_failure(growth, steep, said):
    complexity.held(0.25, 0.5)

    with pytest.raises(part.Failed, match=said):
        complexity.held(growth, steep)


def test_waits_are_those_that_cuda_warns_of(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def work():
        for said in (
            "called a synchronizing CUDA operation",
            "called a synchronizing CUDA operation",
            "else",
        ):
            warnings.warn(said, UserWarning, stacklevel=1)

    assert gpu.waits(gpu.Bench(Path(), "cuda:0", (), 1), work) == 2
    assert modes == ["warn", "default"]
    assert gpu.waits(gpu.Bench(Path(), "cpu", (), 1), lambda: None) is None


def test_a_block_that_does_not_fit_ends_the_table(monkeypatch, capsys):
    def resident(bench, size):
        if size > 2:
            raise MemoryShortage("full", "")
        return {"block_tokens": size}

    monkeypatch.setattr(gpu, "resident", resident)

    assert gpu.swept(gpu.Bench(Path(), "cpu", (), 1), (1, 2, 4, 8)) == [
        {"block_tokens": 1},
        {"block_tokens": 2},
    ]
    assert "blocks of 4 tokens do not fit" in capsys.readouterr().err


# ---------------------------------------------------------------- what is made of times


def timed(monkeypatch, wall, order=None):
    """Pretend that every job runs once and takes this long, twice that of processor; note their names."""

    def alternate(jobs, times):
        for name, job in jobs.items():
            if order is not None:
                order.append(name)
            job()
        return rounds.Rounds({job: [wall[job]] for job in jobs}, {job: [2 * wall[job]] for job in jobs})

    monkeypatch.setattr(rounds, "alternate", alternate)


OF_SHAPES = {"ordinary": 1, "collapsed": 6, "log_normal": 2, "short": 3}
"""Seconds of `analyze` for each second of an ordinary dump, pretended."""


def test_the_ratios_of_the_peers_are_the_right_way_up(monkeypatch):
    wall = {"reading": 2, "duckdb": 3, "analyze": 12, "one": 6}
    shapes = {f"{shape} {job}": by * s for shape, by in OF_SHAPES.items() for job, s in wall.items()}
    wall["every log"] = 30
    order = []
    timed(monkeypatch, wall | shapes, order)
    monkeypatch.setattr(peers, "load", Few)
    asked = []
    real = analyze

    def counted(sources, presets, threads, every_log):
        asked.append((len(presets), every_log))
        return real(sources, presets=presets, threads=1, every_log=every_log)

    monkeypatch.setattr(peers, "analyze", counted)

    found = peers.measure(TINY)

    assert (found["analyze_over_duckdb"], found["duckdb_over_reading"], found["presets"]) == (4, 1.5, 5)
    assert found["one_over_duckdb"] == 2
    assert found["every_log_over_duckdb"] == 10
    assert asked == [(5, False), (1, True), (5, True), *[(5, False), (1, True)] * 4]
    assert found["seconds"]["analyze"] == {"wall": 12, "cpu": 24}
    assert order == [*wall, *shapes]
    assert {row["shape"]: row["seconds"]["analyze"] for row in found["shapes"]} == {
        shape: 12 * by for shape, by in OF_SHAPES.items()
    }
    tokens = found["shapes"][0]["tokens"]
    for row in found["shapes"]:
        assert (row["analyze_over_duckdb"], row["one_over_duckdb"]) == (4, 2)
        assert row["over_ordinary"] == pytest.approx(OF_SHAPES[row["shape"]] * tokens / row["tokens"])
    text = report.body("peers", found)
    assert " |\n\nThe same on [dumps of other shapes]" in text
    assert "| `analyze`, one preset | 6 | 12 | 2.00 × DuckDB |" in text
    assert re.search(
        r"\| very short rows \| 384 \| [^|]+ \| 9 \| 36 \| \*\*4\.00\*\* \| 18 \| 2\.00 \| ", text
    )


def test_a_further_preset_is_a_share_of_an_analysis_with_one(monkeypatch):
    timed(monkeypatch, {"1": 10, "3": 10.4, "5": 10.8})
    monkeypatch.setattr(presets, "load", Few)
    monkeypatch.setattr(presets, "COUNTS", (1, 3))

    found = presets.measure(TINY)

    assert found["presets"] == [1, 3, 5]
    assert found["each"] == pytest.approx(0.02)


def test_time_per_token_is_in_nanoseconds_and_its_growth_is_judged(monkeypatch):
    timed(monkeypatch, {"analyze": 12, "1": 10, "3": 10.4, "5": 10.8})
    monkeypatch.setattr(complexity, "load", Few)
    monkeypatch.setattr(presets, "load", Few)
    monkeypatch.setattr(presets, "COUNTS", (1, 3))
    monkeypatch.setattr(complexity, "SMALLEST", 6)
    judged = []
    monkeypatch.setattr(complexity, "held", lambda *found: judged.append(found))

    found = complexity.measure(part.Given(sequences=12, rounds=1))

    assert [row["sequences"] for row in found["rows"]] == [6, 12]
    assert [row["ns_per_token"] * row["tokens"] for row in found["rows"]] == pytest.approx([12e9, 12e9])
    assert judged == [(found["growth"], found["steeper"])]


def test_the_padded_way_is_counted_per_token_and_pass(monkeypatch, analysed):
    ticks = iter(range(100))
    monkeypatch.setattr(padded, "load", Few)
    monkeypatch.setattr(padded, "sweep", lambda path: (padded.ours(analysed), 8.0, 3e6))
    monkeypatch.setattr(padded, "analyze", lambda sources, presets, threads: analysed)
    monkeypatch.setattr(padded.time, "perf_counter", lambda: float(next(ticks)))

    found = padded.measure(TINY)

    tokens = found["tokens"]
    assert found["padded_ns"] == pytest.approx(8 / 4 * 1e9 / tokens)
    assert found["ours_ns"] == pytest.approx(1 / 5 * 1e9 / tokens)
    assert found["padded_over_ours"] == pytest.approx(10)
    assert found["places_per_token"] == pytest.approx(3e6 / tokens)


def test_a_gpus_throughput_is_of_tokens_and_its_share_of_bytes(path, monkeypatch):
    timed(monkeypatch, {"resident": 2, "copy": 4})
    bench = gpu.Bench(path, "cpu", Few().resolve("all"), 1)

    row = gpu.resident(bench, 1 << 13)
    tokens = sum(context.batch.tokens for context in gpu.scenes(bench))

    assert row["tokens_per_second"] == tokens / 2
    assert row["bytes_per_second"] > 8 * 3 * tokens / 2
    assert gpu.copied(bench, 1 << 10) == 2 * (1 << 10) / 4


def test_the_section_of_a_gpu_is_written_from_its_result(monkeypatch):
    monkeypatch.setattr(gpu, "load", Few)

    text = report.body("gpu", gpu.measure(TINY))

    assert "5 presets on one" in text
    assert re.search(r"From the file \(local\): [\d.,]+ [kM] tokens per second", text)


def test_a_gpu_that_finds_other_numbers_fails(path, monkeypatch):
    def other(sources, presets, device, **rest):
        analysed = analyze(sources, presets=Few().resolve("all"))
        if device == "cpu":
            return analysed
        moved = replace(analysed.whole["k3"], value=1.0)
        return with_numbers(analysed, "dump", analysed.whole | {"k3": moved})

    monkeypatch.setattr(gpu, "analyze", other)

    with pytest.raises(part.Failed, match="k3"):
        gpu.end_to_end(gpu.Bench(path, "cuda:0", (), 1), 1)


def test_memory_is_measured_of_every_shape_and_of_one_large_row_group(monkeypatch):
    seen = []

    def spent(command, path, *rest):
        table = pq.read_table(path, columns=["rollout_log_probs", "old_log_probs"])
        rollout, old = (column.combine_chunks() for column in table.columns)
        drift = float(np.median(np.abs(np.subtract(old.flatten(), rollout.flatten()))))
        lengths = rollout.value_lengths().to_numpy()
        seen.append(
            (pq.ParquetFile(path).num_row_groups, drift > 0.1, int(lengths.max()) > 8192, len(lengths))
        )
        return peak.Spent(1.0, 1.0, 5 * len(seen), 7)

    monkeypatch.setattr(peak, "offpol_diag", spent)
    monkeypatch.setattr(memory, "SMALLEST", 300)

    found = memory.measure(part.Given(sequences=1030, rounds=1))

    many = len(dump.SHAPES)
    assert [row["kind"] for row in found["rows"]] == [
        *report.SHAPES.values(),
        *report.SHAPES.values(),
        "in one row group",
    ]
    assert seen[many:] == [
        (2, False, False, 1030),
        (2, True, False, 1030),
        (2, False, True, 1030),
        (2, False, False, 128 * 1030),
        (1, False, False, 1030),
    ]
    assert [row.get("over_ordinary") for row in found["rows"]] == [
        *(None, 2, 3, 4),
        *(None, 6 / 5, 7 / 5, 8 / 5),
        None,
    ]
    assert "| a collapsed run | 10 B | 2.00 | 7 B | 1 |" in report.body("memory", found)


def test_every_shape_of_a_dump_has_its_words():
    assert [*report.SHAPES] == [*dump.SHAPES]


def test_a_process_is_held_to_its_threads():
    code = (
        "import machine, os, pyarrow; machine.limit(1); "
        "print(len(os.sched_getaffinity(0)), pyarrow.cpu_count())"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "benchmarks", check=True
    )

    assert done.stdout.split() == ["1", "1"]


# ---------------------------------------------------------------- the pages


def test_a_part_replaces_its_own_result_and_no_other(tmp_path):
    path = tmp_path / "results.json"
    for name, value in (("startup", 1), ("gpu", 2), ("startup", 3)):
        report.keep(name, {"value": value}, {"cpu": "x"}, path)

    kept = {name: one["result"]["value"] for name, one in report.results(path).items()}
    assert kept == {"startup": 3, "gpu": 2}


def test_a_part_that_was_not_measured_says_how_to_measure_it():
    pages = report.pages({})

    assert pages["benchmarks.md"].count("Not measured yet") == len(report.SECTIONS)
    assert "Not measured yet" in pages["scale.md"]


def test_the_facts_of_a_machine_name_processor_versions_and_day():
    facts = machine.facts()

    assert re.fullmatch(r"\d{4}-\d\d-\d\d", str(facts["date"]))
    assert facts["cpu"]
    assert {"torch", "duckdb", "pyarrow"} <= set(facts["versions"])
    assert report.machine(facts).startswith("Measured 20")


MEASURED = {
    "peers": {
        "machine": {"cpu": "a core of ours"},
        "result": {"tokens": 1e6, "bytes": 13e6, "seconds": {"analyze": {"wall": 1.0, "cpu": 2.0}}},
    }
}
GPU = {
    "result": {
        "device": "H1",
        "rows": [{"tokens_per_second": 1e9}, {"tokens_per_second": 2e9}],
        "end_to_end": {"tokens_per_second": 1e8},
    }
}


def test_scale_is_reckoned_from_the_seconds_of_processor():
    costs = scale.costs(MEASURED)
    row = next(row for row in costs["rows"] if row["name"] == "10¹²")

    assert costs["core"] == 5e5
    assert costs["read_per_core"] == 6.5e6
    assert row["core_hours"] == pytest.approx(1e12 / 5e5 / 3600)
    assert row["machine_hours"] == pytest.approx(1e12 / 5e5 / 3600 / 64)
    assert row["machines"] == 9  # 8.68 of them
    assert row["disk"] == 13e12
    assert row["per_second"] == pytest.approx(13e12 / 3600)

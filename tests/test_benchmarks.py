"""The benchmarks at a tiny size: that they run, that what they compare agrees, and that they can fail."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import complexity
import duck
import dump
import gpu
import machine
import memory
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
import startup
import tallies
import torch
import workers

from offpol_diag.analyze import analyze
from offpol_diag.presets import Preset
from offpol_diag.presets.catalogue import load
from offpol_diag.summary import Summary

ROOT = Path(__file__).parents[1]
TINY = part.Given(sequences=12, rounds=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long enough that every one of the nine numbers has something to see but the veto."""
    path = tmp_path_factory.mktemp("bench") / "dump.parquet"
    dump.make(path, sequences=40, rows_per_group=16)
    return path


@pytest.fixture(scope="module")
def analysed(path: Path) -> Summary:
    """That dump under the presets whose numbers are compared."""
    return analyze([str(path)], presets=Few().resolve("all"))


class Few:
    """A catalogue of those alone."""

    def resolve(self, names: str) -> tuple[Preset, ...]:
        assert names == "all"
        return load().resolve("token_is,slime_mis_token_mask,seq_mis,geo_rs,seq_is")


def ratios(path: Path) -> list[list[float]]:
    """Δ of every sequence, in plain Python."""
    rows = pq.read_table(path).to_pylist()
    return [
        [
            p - q
            for q, p, m in zip(
                row["rollout_log_probs"], row["old_log_probs"], row["response_mask"], strict=True
            )
            if m
        ]
        for row in rows
    ]


# ---------------------------------------------------------------- every script


def test_a_part_runs_prints_its_section_and_keeps_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "results.json"
    monkeypatch.setattr(machine, "limit", lambda threads: None)
    monkeypatch.setattr(peak, "offpol_diag", lambda *told: peak.Spent(1.0, 2.0, 5, 7))
    monkeypatch.setattr(sys, "argv", ["startup.py", "--rounds=2", "--write", f"--results={kept}"])

    part.main("startup", startup.measure, "about")
    done = SimpleNamespace(returncode=0, stdout=capsys.readouterr().out)
    monkeypatch.setattr(run.subprocess, "run", lambda *_, **__: done)

    assert run.show("startup", [])
    assert capsys.readouterr().out.startswith(f"## {report.SECTIONS['startup']}\n")
    assert report.results(kept)["startup"]["result"]["seconds"] == {"--help": 1.0, "analyze": 1.0}


def test_the_reading_alone_is_compared_with_pyarrows(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["reading.py", str(path), "--rounds=1"])

    reading.main()

    assert capsys.readouterr().out.count("ratio") == 2


def test_two_workers_are_compared_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(workers.peak, "offpol_diag", lambda *told: asked.append(told[-1]))
    monkeypatch.setattr(sys, "argv", ["workers.py", "--sequences=12", "--rounds=2"])

    workers.main()

    assert asked == ["--workers=1", "--workers=2"] * 2
    assert capsys.readouterr().out.count("of the time of one") == 1


def test_an_unknown_part_is_told_from_those_there_are() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--only=speed"]

    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 2
    assert "no part 'speed'; there are peers, presets" in done.stderr


def test_a_part_that_fails_says_what_and_exits_with_1_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(given: part.Given) -> part.Result:
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
    result: part.Result, options: list[str], kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    limits: list[int] = []
    monkeypatch.setattr(machine, "limit", limits.append)
    monkeypatch.setattr(sys, "argv", ["x.py", f"--results={path}", *options])

    part.main("x", lambda given: result, "about", threads=2)

    assert path.exists() == kept
    assert limits == [2]


def test_a_run_with_a_part_that_failed_exits_with_1() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--only=memory", "--sequences=-1"]

    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 1
    assert "failed: memory" in done.stderr


def test_a_dump_for_which_there_is_no_room_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part.shutil, "disk_usage", lambda folder: SimpleNamespace(free=100 * part.ROOM))

    with part.dump(100) as (path, _):
        assert path.stat().st_size < 100 * part.ROOM
    with pytest.raises(part.Failed, match="no room"), part.dump(101):
        pass


# ---------------------------------------------------------------- the dump


def test_the_same_numbers_make_the_same_dump_and_a_longer_one_begins_with_it(tmp_path: Path) -> None:
    for name, sequences, rows in (("a", 1030, 400), ("b", 1030, 400), ("c", 1100, 1100)):
        dump.make(tmp_path / name, sequences, rows)
    a, b, c = (tmp_path / name for name in "abc")

    assert a.read_bytes() == b.read_bytes()
    assert pq.read_table(c).slice(0, 1030).combine_chunks().equals(pq.read_table(a).combine_chunks())
    groups = [pq.ParquetFile(a).metadata.row_group(i).num_rows for i in range(3)]
    assert groups == [400, 400, 230]
    assert pq.ParquetFile(c).num_row_groups == 1


def test_the_dump_is_what_the_page_says_of_it(tmp_path: Path) -> None:
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


def test_the_drift_gives_presets_something_to_do_and_keeps_the_mean_ratio_at_1(analysed: Summary) -> None:
    found = duck.ours(analysed)
    ratio = analysed.metrics["mean_ratio"].value

    assert 1e-5 < found["tokens_rejected"] < 1e-2
    assert 0 < found["sequences_dropped"] < 1
    assert ratio is not None
    assert abs(ratio - 1) < 2e-3


# ---------------------------------------------------------------- DuckDB


def test_the_bounds_of_the_query_are_on_both_sides(tmp_path: Path) -> None:
    gaps = [[math.log(r) for r in row] for row in ([0.49, 0.51, 1.99, 2.01], [2.01], [0.49], [9e-5, 1e4])]
    lists = {"rollout_log_probs": [[-10.0] * len(row) for row in gaps]}
    lists |= {"old_log_probs": [[d - 10 for d in row] for row in gaps]}
    pq.write_table(
        pa.table(lists | {"response_mask": [[1] * len(row) for row in gaps]}), tmp_path / "d.parquet"
    )

    found = duck.Duck(1).nine(tmp_path / "d.parquet")

    assert (found["tokens_rejected"], found["sequences_dropped"], found["vetoed"]) == (6 / 8, 2 / 4, 1 / 4)


@pytest.mark.parametrize("found", [{"k3": 1 + 2e-6}, {"k3": math.nan}, {}, {"K3": 1.0}])
def test_numbers_that_differ_or_are_missing_are_a_failure(found: dict[str, float]) -> None:
    with pytest.raises(part.Failed, match="k3"):
        duck.agree(found, {"k3": 1.0})


def test_numbers_within_the_tolerance_agree_and_nothing_compared_is_a_failure() -> None:
    duck.agree({"k3": 1 + 5e-7, "more": 2.0}, {"k3": 1.0})

    with pytest.raises(part.Failed, match="nothing was compared"):
        duck.agree({"k3": 1.0}, {})


def test_the_query_and_the_analysis_agree(path: Path, analysed: Summary) -> None:
    duck.agree(duck.ours(analysed), duck.Duck(2).nine(path))


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
    right: str, wrong: str, name: str, path: Path, analysed: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert right in duck.QUERY
    monkeypatch.setattr(duck, "QUERY", duck.QUERY.replace(right, wrong))

    with pytest.raises(part.Failed, match=name):
        duck.agree(duck.ours(analysed), duck.Duck(2).nine(path))


def test_peers_that_do_not_agree_have_no_times(analysed: Summary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "analyze", lambda sources, presets, workers: analysed)  # of another dump

    with pytest.raises(part.Failed, match="tokens"):
        peers.measure(TINY)


# ---------------------------------------------------------------- the padded baseline


def test_a_padded_batch_has_the_tokens_in_place_and_nothing_else(path: Path) -> None:
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


def test_the_padded_passes_have_the_numbers_of_plain_python(path: Path) -> None:
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


def test_a_padded_baseline_that_computes_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(batch: padded.Padded) -> padded.Numbers:
        return {name: 2 * value for name, value in padded.token_truncation(batch).items()}

    monkeypatch.setattr(padded, "PASSES", (twice, *padded.PASSES[1:]))
    monkeypatch.setattr(padded, "load", Few)

    with pytest.raises(part.Failed, match="truncated_ess"):
        padded.measure(TINY)


# ---------------------------------------------------------------- measuring


def test_peers_take_turns_and_a_ratio_is_of_one_round() -> None:
    order: list[str] = []

    rounds.alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    timed = rounds.Rounds({"a": [1.0, 100.0, 3.0], "b": [1.0, 10.0, 1.0]}, {"a": [0.0], "b": [0.0]})

    assert order == ["a", "b", "a", "b"]
    assert timed.ratio("a", "b") == 3
    assert timed.median("a") == 3


def test_a_slope_is_that_of_the_line_and_says_how_far_points_are_off_it() -> None:
    assert rounds.slope([1, 20, 60], [12, 50, 130]) == pytest.approx((10, 2, 0))

    _, _, off = rounds.slope([0, 1, 2], [10, 16, 10])
    assert off == pytest.approx(0.25)


def test_sets_of_presets_lie_within_each_other_and_are_spread_over_the_catalogue() -> None:
    every = load().resolve("all")

    sets = presets.spread(every, presets.COUNTS)

    assert [*sets] == [1, 20, 60, len(every)]
    assert set(sets[1]) < set(sets[20]) < set(sets[60]) < set(sets[len(every)]) == set(every)
    at = sorted(every.index(preset) for preset in sets[20])
    assert max(b - a for a, b in pairwise([0, *at, len(every)])) < len(every) / 5
    assert [*presets.spread(every[:5], presets.COUNTS)] == [1, 5]


def test_the_peak_is_the_commands_own_and_not_that_of_who_starts_it() -> None:
    held = torch.ones(1 << 25)  # 128 MiB in this process
    small = peak.run([sys.executable, "-S", "-c", "pass"])
    large = peak.run([sys.executable, "-S", "-c", "x = bytearray(200 << 20); x[::4096] = bytes(51200)"])

    assert held.sum() > 0
    assert small.peak < 60 << 20
    assert 200 << 20 < large.peak < 300 << 20
    assert small.cpu > 0
    assert small.wall > 0


@pytest.mark.skipif(sys.platform != "linux", reason="of other systems' processes nothing is known")
def test_what_a_command_takes_is_what_all_its_processes_take() -> None:
    child = (
        "import time; x = bytearray(200 << 20); x[::4096] = bytes(51200); sum(range(5 << 20)); time.sleep(1)"
    )
    two = (
        "import subprocess, sys; "
        f"both = [subprocess.Popen([sys.executable, '-S', '-c', {child!r}]) for _ in range(2)]; "
        "[one.wait() for one in both]"
    )
    own, alone = (peak.run([sys.executable, "-S", "-c", code]) for code in (two, child))

    assert own.together is not None
    assert alone.together is not None
    assert 1.8 * alone.together < own.together < 2.6 * alone.together
    assert 200 << 20 < own.peak < 300 << 20
    assert own.cpu > 1.5 * alone.cpu > 0


@pytest.mark.skipif(sys.platform != "linux", reason="of other systems' processes nothing is known")
def test_seconds_of_processor_are_also_those_of_processes_that_were_started() -> None:
    busy = [sys.executable, "-S", "-c", "sum(range(30_000_000)); print(flush=True); input()"]
    with subprocess.Popen(busy, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        job = {"wait": lambda: child.stdout.readline() if child.stdout else None}
        found = rounds.alternate(job, 1)
        child.communicate("\n")

    assert found.cpu["wait"][0] > 0.05


def test_a_command_that_fails_has_no_peak() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        peak.run([sys.executable, "-c", "raise SystemExit(3)"])


def test_sizes_grow_fourfold_up_to_the_largest() -> None:
    assert part.sizes(65_536, 1024) == [1024, 4096, 16_384, 65_536]
    assert part.sizes(5000, 1024) == [1024, 4096, 5000]
    assert part.sizes(12, 1024) == [12]


def test_growth_is_the_worst_from_a_size_to_any_larger_one() -> None:
    assert complexity.growth([4.0, 2.0, 1.0]) == -0.5
    assert complexity.growth([2.0, 1.0, 1.5]) == 0.5
    assert complexity.growth([2.0]) == 0


@pytest.mark.parametrize(
    ("growth", "steep", "said"),
    [(0.26, 0.1, "with the dump"), (0.1, 0.51, "further preset"), (math.nan, 0.1, "with the dump")],
)
def test_time_that_grows_too_fast_is_a_failure(growth: float, steep: float, said: str) -> None:
    complexity.held(0.25, 0.5)

    with pytest.raises(part.Failed, match=said):
        complexity.held(growth, steep)


def test_the_last_presets_are_compared_with_those_before() -> None:
    assert complexity.steeper([1, 20, 60, 160], [1, 20, 60, 160]) == pytest.approx(0)
    assert complexity.steeper([1, 20, 60, 160], [1, 20, 60, 260]) == pytest.approx(1)
    assert complexity.steeper([1, 20, 60, 160], [1, 20, 60, 110]) == pytest.approx(-0.5)


def test_waits_are_those_that_cuda_warns_of(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def work() -> None:
        for said in (
            "called a synchronizing CUDA operation",
            "called a synchronizing CUDA operation",
            "else",
        ):
            warnings.warn(said, UserWarning, stacklevel=1)

    assert gpu.waits(torch.device("cuda"), work) == 2
    assert modes == ["warn", "default"]
    assert gpu.waits(torch.device("cpu"), lambda: None) is None


def test_a_batch_that_does_not_fit_ends_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resident(bench: gpu.Bench, size: int) -> part.Result:
        if size > 2:
            raise torch.OutOfMemoryError
        return {"batch_tokens": size}

    monkeypatch.setattr(gpu, "resident", resident)

    assert gpu.swept(gpu.Bench(Path(), torch.device("cpu"), (), 1), (1, 2, 4, 8)) == [
        {"batch_tokens": 1},
        {"batch_tokens": 2},
    ]
    assert "batches of 4 tokens do not fit" in capsys.readouterr().err


# ---------------------------------------------------------------- what is made of times


def timed(monkeypatch: pytest.MonkeyPatch, wall: dict[str, float]) -> None:
    """Every job runs once and is said to have taken this long, twice that of processor."""

    def alternate(jobs: Mapping[str, rounds.Job], times: int) -> rounds.Rounds:
        for job in jobs.values():
            job()
        return rounds.Rounds({job: [wall[job]] for job in jobs}, {job: [2 * wall[job]] for job in jobs})

    monkeypatch.setattr(rounds, "alternate", alternate)


def test_the_ratios_of_the_peers_are_the_right_way_up(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, {"reading": 2, "duckdb": 3, "analyze": 12})
    monkeypatch.setattr(peers, "load", Few)

    found = peers.measure(TINY)

    assert (found["analyze_over_duckdb"], found["duckdb_over_reading"], found["presets"]) == (4, 1.5, 5)
    assert found["seconds"]["analyze"] == {"wall": 12, "cpu": 24}


def test_a_further_preset_is_a_share_of_an_analysis_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, {"1": 10, "3": 10.4, "5": 10.8})
    monkeypatch.setattr(presets, "load", Few)
    monkeypatch.setattr(presets, "COUNTS", (1, 3))

    found = presets.measure(TINY)

    assert found["presets"] == [1, 3, 5]
    assert found["each"] == pytest.approx(0.02)


def test_time_per_token_is_in_nanoseconds_and_its_growth_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed(monkeypatch, {"analyze": 12, "1": 10, "3": 10.4, "5": 10.8})
    monkeypatch.setattr(complexity, "load", Few)
    monkeypatch.setattr(presets, "load", Few)
    monkeypatch.setattr(presets, "COUNTS", (1, 3))
    monkeypatch.setattr(complexity, "SMALLEST", 6)
    judged: list[tuple[float, float]] = []
    monkeypatch.setattr(complexity, "held", lambda *found: judged.append(found))

    found = complexity.measure(part.Given(sequences=12, rounds=1))

    assert [row["sequences"] for row in found["rows"]] == [6, 12]
    assert [row["ns_per_token"] * row["tokens"] for row in found["rows"]] == pytest.approx([12e9, 12e9])
    assert judged == [(found["growth"], found["steeper"])]


def test_the_padded_way_is_counted_per_token_and_pass(
    monkeypatch: pytest.MonkeyPatch, analysed: Summary
) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(padded, "load", Few)
    monkeypatch.setattr(padded, "sweep", lambda path: (padded.ours(analysed), 8.0, 3e6))
    monkeypatch.setattr(padded, "analyze", lambda sources, presets, workers: analysed)
    monkeypatch.setattr(padded.time, "perf_counter", lambda: float(next(ticks)))

    found = padded.measure(TINY)

    tokens = found["tokens"]
    assert found["padded_ns"] == pytest.approx(8 / 4 * 1e9 / tokens)
    assert found["ours_ns"] == pytest.approx(1 / 5 * 1e9 / tokens)
    assert found["padded_over_ours"] == pytest.approx(10)
    assert found["places_per_token"] == pytest.approx(3e6 / tokens)


def test_a_gpus_throughput_is_of_tokens_and_its_share_of_bytes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, {"resident": 2, "copy": 4})
    bench = gpu.Bench(path, torch.device("cpu"), Few().resolve("all"), 1)

    row = gpu.resident(bench, 1 << 13)
    batches = gpu.job(bench, 1 << 13)[1]

    tokens = sum(batch.tokens for batch in batches)
    assert row["tokens_per_second"] == tokens / 2
    assert row["batches"] == len(batches) > 1
    assert row["bytes_per_second"] > 8 * 3 * tokens / 2
    assert gpu.copied(bench, 1 << 10) == 2 * (1 << 10) / 4


def test_the_section_of_a_gpu_is_written_from_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "load", Few)

    text = report.body("gpu", gpu.measure(TINY))

    assert "5 presets on one" in text
    assert re.search(
        r"From the file, in batches of [\d.,]+ [kM] tokens: [\d.,]+ [kM] tokens per\nsecond", text
    )


def test_a_gpu_that_finds_other_numbers_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(sources: list[str], presets: object, device: str, **rest: object) -> Summary:
        analysed = analyze(sources, presets=Few().resolve("all"))
        if device != "cpu:0":
            return analysed
        moved = analysed.metrics["k3"].model_copy(update={"value": 1.0})
        return analysed.model_copy(update={"metrics": analysed.metrics | {"k3": moved}})

    monkeypatch.setattr(gpu, "analyze", other)

    with pytest.raises(part.Failed, match="k3"):
        gpu.end_to_end(gpu.Bench(path, torch.device("cpu:0"), (), 1), 1, 1)


def test_a_merge_is_what_each_further_tally_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, {"one": 1, "all": 2})
    monkeypatch.setattr(tallies, "merge", lambda paths: None)
    monkeypatch.setattr(peak, "offpol_diag", lambda *given: Path(given[-1]).write_bytes(bytes(7)))

    found = tallies.measure(part.Given(sequences=80, rounds=1))

    assert found["merge_seconds"] == 2
    assert [(row["sequences"], row["tally_bytes"]) for row in found["rows"]] == [(10, 7), (80, 7)]


def test_the_large_row_group_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []

    def seen(command: str, path: str, *rest: str) -> peak.Spent:
        groups.append(pq.ParquetFile(path).num_row_groups)
        return peak.Spent(1.0, 1.0, 5, 7)

    monkeypatch.setattr(peak, "offpol_diag", seen)

    found = memory.measure(part.Given(sequences=1030, rounds=1))

    assert groups == [2, 1]
    assert [row["one_row_group"] for row in found["rows"]] == [False, True]
    assert [(row["peak"], row["together"]) for row in found["rows"]] == [(5, 7)] * 2


def test_a_process_is_held_to_its_threads() -> None:
    code = (
        "import machine, os, pyarrow, torch; machine.limit(1); "
        "print(len(os.sched_getaffinity(0)), pyarrow.cpu_count(), torch.get_num_threads())"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "benchmarks", check=True
    )

    assert done.stdout.split() == ["1", "1", "1"]

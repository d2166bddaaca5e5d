"""Devices: what a name means, several at once, the way of a batch to one, and what does not fit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from offpol_diag.analysis.first_pass import Found
from offpol_diag.analysis.tally import Study
from offpol_diag.analyze import Observe, analyze
from offpol_diag.batch import Batch
from offpol_diag.engine.scope import NO_FITS
from offpol_diag.errors import DumpError, MemoryShortage, UsageError
from offpol_diag.presets import catalogue
from offpol_diag.readers import open_dump
from offpol_diag.run import gpu as named
from offpol_diag.run.gpu import Fit, Sent, receive, send
from offpol_diag.run.pool import Devices, on
from offpol_diag.run.task import Each, Local
from tests import kinds, pretended
from tests.devices import REAL, gpu, like_gpu, numbers, present, same

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SAMPLE = "sample_data/stale.parquet"
RECKONED = catalogue.load().resolve("token_is,m2po")


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Freeze existing objects (`gc.freeze`): a lack of memory triggers collections, which skip them."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def dump(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("devices") / "small_groups.parquet"
    pq.write_table(pq.read_table(SAMPLE).slice(0, 80), path, row_group_size=16)
    return str(path)


@pytest.fixture(scope="module")
def batch(dump) -> Batch:
    return next(open_dump([dump], batch_tokens=5000).batches())


plain_trouble = named.trouble


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(named, "trouble", lambda device: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [
        ("auto", 0, ["cpu"]),
        ("auto", 1, ["cuda:0"]),
        ("auto", 3, ["cuda:0", "cuda:1", "cuda:2"]),
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("cuda:1", 2, ["cuda:1"]),
        ("cpu", 2, ["cpu"]),
    ],
)
def test_a_name_means_the_devices_that_are_there(name, count, expected, monkeypatch):
    gpus(monkeypatch, count)

    assert [str(one) for one in named.devices(name).devices] == expected


@pytest.mark.parametrize(
    ("name", "count", "said"),
    [
        ("cuda", 0, "0 CUDA"),
        ("cuda:1", 1, "1 CUDA"),
        ("cuda:2", 2, "2 CUDA"),
        ("tpu", 1, "not known"),
        ("meta", 1, "not supported"),
    ],
)
def test_a_device_that_is_not_there_is_refused(name, count, said, monkeypatch):
    gpus(monkeypatch, count)

    with pytest.raises(UsageError, match=said):
        named.devices(name)


def broken(monkeypatch: pytest.MonkeyPatch, *which: int) -> None:
    """Let nothing be made on some GPUs, as where others hold all their memory; on the others on the host."""
    plain = torch.ones

    def ones(*args: Any, device: Any = "cpu", **kwargs: Any) -> Tensor:
        if torch.device(device).index in which:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 MiB.")
        return plain(*args, **kwargs)

    monkeypatch.setattr(named, "trouble", plain_trouble)
    monkeypatch.setattr(torch, "ones", ones)


@pytest.mark.parametrize(
    ("which", "expected", "said"),
    [
        ((), ["cuda:0", "cuda:1"], ""),
        ((1,), ["cuda:0"], ""),
        (
            (0, 1),
            ["cpu"],
            "cuda:0 does not work: CUDA out of memory.; cuda:1 does not work: CUDA out of memory.",
        ),
    ],
)
def test_a_gpu_that_does_not_work_is_not_taken_unless_it_was_asked_for(which, expected, said, monkeypatch):
    gpus(monkeypatch, 2)
    broken(monkeypatch, *which)
    found = named.devices("auto")

    assert [str(one) for one in found.devices] == expected
    assert found.unused == said
    for at in which:
        for name in ("cuda", f"cuda:{at}"):
            with pytest.raises(UsageError, match="does not work: CUDA out of memory") as caught:
                named.devices(name)
            assert "--device cpu" in caught.value.hint


def test_a_report_says_why_no_gpu_was_taken(monkeypatch):
    gpus(monkeypatch, 1)
    broken(monkeypatch, 0)
    run = analyze([SAMPLE], presets=catalogue.load().resolve("token_is")).run

    assert run.device == "cpu"
    assert run.engine == "local; cuda:0 does not work: CUDA out of memory."


def test_one_device_is_the_local_engine_and_several_are_read_by_shards():
    assert isinstance(on([CPU]), Local)
    assert isinstance(on([CPU, CPU]), Devices)


def read(engine: Any, dump: str, each: Each | None = None) -> tuple[Any, Any]:
    opened = open_dump([dump], batch_tokens=1500)
    study = Study.of(opened.info.columns, catalogue.load().resolve("token_is,geo_rs"), (), 0)
    seen = engine.reduce(opened, Observe(study, Found(NO_FITS, None), rows=False), each)
    return seen.tally.states, opened


def test_the_number_of_devices_changes_no_bit_and_no_finding(dump):
    (one, seen), *others = (read(Devices((CPU,) * many, shard=1), dump) for many in (1, 2, 3))
    plain, opened = read(Local(CPU), dump)

    for other, _ in others:
        assert one["sums"].names == other["sums"].names
        assert torch.equal(one["sums"].point, other["sums"].point)
        assert torch.equal(one["sums"].drawn, other["sums"].drawn)
    assert torch.allclose(plain["sums"].whole.point, one["sums"].whole.point, rtol=1e-12, atol=1e-12)
    assert torch.equal(*(each["tail.tokens"].kept.sort().values for each in (plain, one)))
    for name in ("tokens", "rows"):
        assert getattr(seen.findings(), name) == getattr(opened.findings(), name)


def test_results_are_picked_in_the_order_of_the_rows(dump):
    orders: list[list[float]] = []
    for engine in (Local(CPU), Devices((CPU, CPU, CPU), shard=1)):
        seen: list[float] = []
        read(engine, dump, Each(_tokens, seen.append))
        orders.append(seen)

    assert sum(orders[0]) == sum(orders[1])
    assert len(orders[1]) > 3
    rows = [batch.tokens for batch in open_dump([dump]).batches()]
    assert sum(rows) == sum(orders[1])


def _tokens(seen: Any) -> float:
    return float(seen.tally.states["sums"].read()["tokens"][0])


@pytest.mark.parametrize("shard", [1, 1 << 30])
def test_progress_of_all_devices_ends_with_all_rows(dump, shard):
    reported: list[tuple[int, int]] = []
    engine = Devices((CPU, CPU), lambda done, rows: reported.append((done, rows)), shard=shard)
    read(engine, dump)
    rows = open_dump([dump]).rows

    assert reported[-1] == (rows, rows)
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert engine.clock.compute > 0


def test_the_error_of_the_first_shard_is_the_error(tmp_path):
    logs = [np.full(3, -1.0) for _ in range(40)]
    logs[25] = np.array([-1.0, np.nan, -1.0])
    logs[35] = np.array([-1.0, 7.0, -1.0])
    path = tmp_path / "bad.parquet"
    table = {"rollout_log_probs": logs, "old_log_probs": logs}
    pq.write_table(pa.table({name: pa.array(list(map(list, x))) for name, x in table.items()}), path, 10)
    errors = []
    for engine in (Local(CPU), Devices((CPU, CPU), shard=1)):
        with pytest.raises(DumpError) as caught:
            read(engine, str(path))
        errors.append(caught.value.message)

    assert errors[0] == errors[1]
    assert "25" in errors[0]


@pytest.mark.parametrize(
    ("many", "presets", "lacking"),
    [(1, kinds.EACH, []), (1, RECKONED, ["advantages"]), (2, RECKONED, ["advantages"])],
)
@pytest.mark.parametrize("device", [gpu("auto", name="real"), like_gpu("auto")])
def test_a_gpu_has_the_numbers_of_a_cpu(device, many, presets, lacking, dump, tmp_path):
    """Also of advantages that are made of rewards, on one and on several."""
    path = str(tmp_path / "dump.parquet")
    pq.write_table(pq.read_table(dump).drop_columns(lacking), path, row_group_size=16)
    here = numbers(analyze([path], presets=presets, device="cpu"))
    files = {"sequences": tmp_path / "sequences.parquet", "tally": tmp_path / "tally.json"}
    with present("cuda", many):
        summary = analyze([path], presets=presets, device=device, **files)
    there = numbers(summary)

    assert summary.run.device.startswith("cuda")
    for part in here:
        assert same(here[part], there[part]), part


@pytest.mark.skipif(REAL, reason="a real GPU is here")
def test_copies_run_on_a_stream_of_their_own_and_the_work_waits_for_them(batch):
    with pretended.gpus():
        sent = send(batch, GPU)
        with pytest.raises(RuntimeError, match="another stream"):
            sent.there.rollout + 1
        found = receive(sent, GPU)

    assert sent.host is batch
    assert torch.equal(found.rollout.cpu(), batch.rollout)


SHORT = {
    "torch": torch.OutOfMemoryError("no room"),
    "CUDA": torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be …"),
    "a library": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}
"""Source of an out-of-memory error → the error."""


def raising(error: Exception) -> Any:
    def fail(*_: Any) -> Any:
        raise error

    return fail


@pytest.mark.skipif(REAL, reason="a real GPU is here")
@pytest.mark.parametrize("error", SHORT.values(), ids=SHORT)
def test_a_batch_that_has_no_room_when_it_is_sent_is_sent_again_when_it_is_wanted(error, batch, monkeypatch):
    monkeypatch.setattr(Tensor, "pin_memory", raising(error))
    with pretended.gpus():
        sent = send(batch, GPU)
        assert sent.there is None
        assert torch.equal(receive(sent, GPU).rollout.cpu(), batch.rollout)


@pytest.mark.skipif(REAL, reason="a real GPU is here")
def test_errors_other_than_out_of_memory_are_raised(batch, monkeypatch):
    broken = raising(RuntimeError("CUDA error: an illegal memory access was encountered"))
    monkeypatch.setattr(Tensor, "pin_memory", broken)
    with pretended.gpus(), pytest.raises(RuntimeError, match="illegal"):
        send(batch, GPU)
    with pytest.raises(RuntimeError, match="illegal"):
        Fit(CPU).results(broken, Sent(batch, batch))


@dataclass
class Cramped:
    """Job with room for so many tokens, or for one sequence; `seen` are the tokens of its batches."""

    most: float
    job: Callable[[Batch], Any] = attrgetter("rollout")
    error: Exception = SHORT["torch"]
    seen: list[int] = field(default_factory=list)

    def __call__(self, batch: Batch) -> Any:
        self.seen.append(batch.tokens)
        if batch.tokens > self.most and batch.sequences > 1:
            raise self.error
        return self.job(batch)


@pytest.mark.parametrize(
    ("most", "said"), [(10**9, "torch"), (3000, "torch"), (600, "CUDA"), (0, "a library")]
)
def test_a_batch_that_does_not_fit_is_cut_whoever_says_so_and_its_parts_come_in_order(most, said, batch):
    found = Fit(CPU).results(Cramped(most, error=SHORT[said]), Sent(batch, batch))

    assert (len(found) == 1) == (most == 10**9)
    assert torch.equal(torch.cat(found), batch.rollout)


def test_a_batch_as_large_as_one_that_did_not_fit_is_not_tried_again(batch):
    fit, job = Fit(CPU), Cramped(batch.tokens - 1)
    first, again = (torch.cat(fit.results(job, Sent(batch, batch))) for _ in range(2))
    whole, *halves = job.seen

    assert whole == batch.tokens
    assert halves[: len(halves) // 2] == halves[len(halves) // 2 :]
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("memory", "tokens"),
    [(1 << 20, 1 << 20), (8 << 30, 1 << 21), (16 << 30, 1 << 22), (80 << 30, 1 << 23), (139 << 30, 1 << 23)],
)
def test_a_batch_on_a_gpu_is_as_large_as_its_memory_allows(memory, tokens, monkeypatch):
    gpus(monkeypatch, 2)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(total_memory=memory if device.index else 1 << 50),
    )

    assert named.at_once(named.devices("cuda:0").devices) == named.MOST
    assert named.at_once(named.devices("auto").devices) == tokens
    assert named.at_once([CPU]) == named.TOKENS == 1 << 20


def test_a_batch_that_is_cut_has_the_numbers_and_rows_of_the_whole(dump, tmp_path, monkeypatch):
    def done(name: str) -> tuple[Any, Any]:
        presets = catalogue.load().resolve("token_is,geo_rs")
        summary = analyze([dump], presets=presets, device="cpu", sequences=tmp_path / name)
        return numbers(summary), pq.read_table(tmp_path / name)["sequence_id"].to_pylist()

    plain, seen = Observe.__call__, list[int]()
    whole = done("whole.parquet")
    cramped = lambda self, batch: Cramped(3000, partial(plain, self), seen=seen)(batch)  # noqa: E731
    monkeypatch.setattr(Observe, "__call__", cramped)

    assert same([*whole], [*done("parts.parquet")])
    assert len(seen) > 2


def test_a_single_sequence_that_does_not_fit_is_an_error_with_a_hint(batch):
    with pytest.raises(MemoryShortage, match=r"one sequence of .* tokens") as caught:
        Fit(CPU).results(raising(SHORT["torch"]), Sent(batch, batch))
    assert "--device cpu" in caught.value.hint


def test_halves_hold_every_token_once_and_in_order(batch):
    one, two = batch.halves()

    assert one.sequences > 0
    assert two.sequences > 0
    for name in ("rollout", "old", "position", "key", "masked", "lengths"):
        whole = getattr(batch, name)
        assert torch.equal(torch.cat((getattr(one, name), getattr(two, name))), whole), name
    assert torch.equal(torch.cat((one.cu_runs[:-1], two.cu_runs + one.tokens)), batch.cu_runs)
    for name, column in batch.scalars.items():
        assert one.scalars[name] + two.scalars[name] == column


def test_empty_sequences_are_cut_like_others():
    offsets = torch.tensor([0, 0, 4, 4, 4, 5])
    x = -torch.arange(1.0, 6.0, dtype=torch.float64)
    batch = Batch(
        rollout=x,
        cu_seqlens=offsets,
        cu_runs=torch.tensor([0, 2, 4, 5]),
        position=torch.arange(5),
        key=torch.arange(5),
        masked=torch.zeros(5, dtype=torch.int64),
    )
    parts = [batch]
    while any(one.sequences > 1 for one in parts):
        parts = [half for one in parts for half in (one.halves() if one.sequences > 1 else (one,))]

    assert [one.tokens for one in parts] == [0, 4, 0, 0, 1]
    assert [one.cu_runs.tolist() for one in parts] == [[0], [0, 2, 4], [0], [0], [0, 1]]
    assert torch.equal(torch.cat([one.rollout for one in parts]), x)

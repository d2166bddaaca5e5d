"""Check that the emulated GPU refuses what a real one does, and that an analysis on it equals the CPU's."""

from __future__ import annotations

import gc
import math
import pickle
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from offpol_diag.analysis.first_pass import Needs, read_ahead
from offpol_diag.analysis.tally import Study
from offpol_diag.analyze import Observe, analyze
from offpol_diag.batch import Batch
from offpol_diag.engine import method, policyloss, residual, segments, update
from offpol_diag.engine.preset_sums import PresetSums
from offpol_diag.engine.scene import Scene
from offpol_diag.presets import Preset, Reject, Weight, catalogue
from offpol_diag.readers import Dump, open_dump
from offpol_diag.run import gpu
from offpol_diag.run.task import Local, one_thread
from tests import pretended
from tests.devices import REAL
from tests.kinds import EACH

pytestmark = pytest.mark.skipif(REAL, reason="a real GPU is here")
FEW = catalogue.load().resolve("token_is,seq_mis,m2po,geo_rs")
SAMPLE = "sample_data/stale.parquet"
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def dump(tmp_path_factory) -> str:
    """Write a part of a sample, with rewards instead of advantages."""
    path = tmp_path_factory.mktemp("pretended") / "rewards.parquet"
    pq.write_table(pq.read_table(SAMPLE).slice(0, 64).drop_columns(["advantages"]), path)
    return str(path)


def on(*values: float, device: Any = GPU) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).to(device)


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=GPU)


REFUSED = {
    "both memories in a sum": lambda x: x + torch.ones(3),
    "the host's first": lambda x: torch.ones(3) * x,
    "joined": lambda x: torch.cat((x, torch.ones(3))),
    "stacked": lambda x: torch.stack((x.sum(), torch.tensor(1.0))),
    "chosen by the host": lambda x: torch.where(torch.ones(3) > 0, x, x),
    "flags of a GPU": lambda x: torch.ones(3)[x > 0],
    "added to the host": lambda x: torch.ones(3).scatter_add_(0, torch.tensor([0]), x),
    "two GPUs": lambda x: x + on(1, 2, 3, device="cuda:1"),
    "searched": lambda x: torch.searchsorted(torch.arange(3.0), x),
    "numpy": lambda x: x.numpy(),
    "an array": np.asarray,
    "a function of numpy": np.exp,
    "pickle": pickle.dumps,
    "a product of whole numbers": lambda x: x.long().view(1, 3) @ x.long(),
    "an operator without a kernel": lambda x: torch.histogram(x, 2),
    "unsigned numbers": lambda x: x.to(torch.int64).view(torch.uint64) + 1,
    "runs of a table": lambda x: torch.segment_reduce(x.view(-1, 1), "sum", offsets=offsets(0, 3), axis=0),
    "runs of whole numbers": lambda x: torch.segment_reduce(x.long(), "sum", offsets=offsets(0, 3)),
    "another size": lambda x: torch.repeat_interleave(x, offsets(1, 2, 0), output_size=4),
}


@pytest.mark.parametrize("asks", REFUSED.values(), ids=REFUSED)
def test_calls_that_a_gpu_refuses_are_refused(asks):
    with pytest.raises((RuntimeError, TypeError)):
        asks(on(1, 2, 3))


def test_memory_that_nothing_wrote_holds_no_numbers():
    assert torch.empty(2, dtype=torch.float64, device=GPU).isnan().all()
    assert torch.empty(2, dtype=torch.int64, device=GPU).tolist() == [torch.iinfo(torch.int64).min] * 2
    assert torch.empty(1, dtype=torch.bool, device=GPU).tolist() == [True]
    assert torch.zeros(2, device=GPU).tolist() == torch.empty(2, device=GPU).fill_(0).tolist() == [0, 0]


WAITS = {
    "a number": lambda x: float(x.sum()),
    "a branch": lambda x: bool((x > 1).any()),
    "a list": lambda x: x.tolist(),
    "the host": lambda x: x.cpu(),
    "the host by name": lambda x: x.to("cpu"),
    "flags": lambda x: x[x > 1],
    "their places": lambda x: torch.nonzero(x > 1),
    "distinct ones": lambda x: x.unique(),
    "places of the host": lambda x: x[torch.tensor([0])],
    "a number put somewhere": lambda x: x.__setitem__(torch.tensor([0]).to(GPU), 1.0),
    "a size that nobody said": lambda x: torch.repeat_interleave(x, (x > 1).long()),
    "what is sent": lambda x: torch.ones(3).to(GPU),
    "what is sent later from common memory": lambda x: torch.ones(3).to(GPU, non_blocking=True),
    "what is made of a list": lambda x: torch.tensor([1.0], device=GPU),
    "what is made like it": lambda x: x.new_tensor([1.0]),
}


@pytest.mark.parametrize("asks", WAITS.values(), ids=WAITS)
def test_waits_of_the_host_are_counted(asks):
    x = on(1, 2, 3)
    with pretended.counted() as seen:
        asks(x)

    assert sum(seen.values()) in (1, 2)  # a place of the host's is sent first


def test_calls_without_an_answer_do_not_wait():
    x = on(1, 2, 3)
    with pretended.counted() as seen:
        x[x > 1] = 0.0
        x.index_fill_(0, torch.arange(2, device=GPU), 1.0)
        torch.where(x > 1, x, 0.0)
        torch.repeat_interleave(x, torch.ones(3, dtype=torch.int64, device=GPU), output_size=3)
        segments.sent(torch.ones(3), GPU)
        x.new_zeros(2), x.new_full((), 3.0), torch.arange(3, device=GPU)

    assert not seen


def test_a_copy_that_nobody_waits_for_has_not_arrived():
    with pretended.gpus():
        stream, done = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(stream):
            x = pretended.pinned(torch.ones(3)).to(GPU, non_blocking=True)
            done.record(stream)
        with pytest.raises(RuntimeError, match="another stream"):
            x + 1
        x.record_stream(torch.cuda.current_stream())
        early = (x + 1).tolist()
        torch.cuda.current_stream().wait_event(done)

    assert all(map(math.isnan, early))
    assert (x + 1).tolist() == [2, 2, 2]


SUMS = {
    "all": lambda x, at: x.sum(),
    "along a table": lambda x, at: x.view(4, -1).sum(dim=1),
    "by place": lambda x, at: x.new_zeros(5).index_add_(0, at % 5, x),
    "by place, scattered": lambda x, at: x.new_zeros(5).scatter_add_(0, at % 5, x),
    "of runs": lambda x, at: torch.segment_reduce(x, "sum", offsets=(at[::57] // 3 * 3)[:7], initial=0.0),
    "products": lambda x, at: x.view(4, -1) @ x.view(-1, 4),
    "whole numbers": lambda x, at: at.sum(),
}


@pytest.mark.parametrize("sums", SUMS.values(), ids=SUMS)
def test_sums_are_those_of_the_host_but_for_their_order(sums):
    x, at = torch.randn(400, dtype=torch.float64), torch.arange(400)
    here, there = sums(x, at), sums(x.to(GPU), at.to(GPU)).cpu()

    assert torch.allclose(there, here, rtol=0, atol=1e-12)


@pytest.mark.parametrize("adds", ["index_add_", "scatter_add_"])
def test_atomic_additions_come_in_another_order_each_time(adds):
    x = torch.tensor([1e16, 1.0, -1e16, 1.0] * 8, dtype=torch.float64).to(GPU)
    at = torch.zeros(32, dtype=torch.int64).to(GPU)

    assert len({float(getattr(x.new_zeros(1), adds)(0, at, x)[0]) for _ in range(20)}) > 1


def test_functions_of_a_gpu_differ_in_the_last_bit_and_are_the_same_each_time():
    x = torch.cat((torch.randn(100, dtype=torch.float64), torch.tensor([0.0, -torch.inf, torch.nan])))
    here, there, again = x.exp(), x.to(GPU).exp().cpu(), x.to(GPU).exp().cpu()

    assert torch.equal(there.nan_to_num(), again.nan_to_num())
    assert torch.allclose(there, here, rtol=5e-16, atol=0, equal_nan=True)
    assert int((there[:100] != here[:100]).sum()) > 20
    assert there[100:].tolist()[:2] == [1, 0]


def test_tensors_made_on_a_gpu_stay_there_until_fetched():
    x = on(1, 2, 3)
    made = [
        x + 1,
        x[x > 1],
        x[torch.tensor([0])],
        torch.zeros_like(x),
        torch.arange(3, device=GPU),
        x.to(GPU),
    ]
    made += [torch.full((2,), 1.0, device=x.device), torch.tensor([1], device="cuda"), x.new_zeros(2)]
    x += 1
    x[0] = 7.0

    assert all(one.device == GPU and isinstance(one, pretended.There) for one in made)
    assert x.to("cuda:1").device == torch.device("cuda", 1)
    assert x.tolist() == x.cpu().tolist() == x.to("cpu").tolist() == [7, 3, 4]
    assert x.cpu().device == x.to(torch.float32).cpu().device == torch.device("cpu")
    assert float(x.sum()) == 14
    assert x.to(torch.float32).dtype == torch.float32


@pytest.mark.parametrize("asked", [None, 3_000])
def test_a_gpu_takes_more_at_once_than_a_cpu_unless_asked_for_less(asked, dump, monkeypatch):
    seen: list[int] = []
    plain = Observe.__call__

    def noted(self: Any, batch: Any) -> Any:
        seen.append(batch.tokens)
        return plain(self, batch)

    monkeypatch.setattr(Observe, "__call__", noted)
    monkeypatch.setattr(gpu, "TOKENS", 1 << 10)
    with pretended.gpus(memory=gpu.BYTES << 22):
        analyze([dump], presets=(), batch_tokens=asked)

    assert (len(seen) == 1) == (asked is None)


VIEWS = {"view", "_unsafe_view", "expand", "slice", "select", "unsqueeze", "alias", "detach", "unbind", "t"}


def observed(presets: tuple[Preset, ...], path: str, **options: Any) -> tuple[Observe, Dump]:
    """Return the job of an analysis, and its dump."""
    dump = open_dump([path])
    study = Study.of(dump.info.columns, presets, (), 0, **options)
    asked = Needs.of(study.presets, "advantages" not in dump.info.columns)
    return Observe(study, read_ahead(Local(torch.device("cpu")), dump, asked), rows=True), dump


def seen(presets: tuple[Preset, ...], path: str) -> tuple[Counter[str], int]:
    """Count the host's waits in one batch that is sent as batches are, and the kernels started for it."""
    job, dump = observed(presets, path)
    with pretended.gpus(), one_thread():
        job(gpu.receive(gpu.send(next(dump.batches()), GPU), GPU))  # constants are sent once
        with pretended.counted() as waits, pretended.counted(pretended.observers) as started:
            job(gpu.receive(gpu.send(next(dump.batches()), GPU), GPU))
    return waits, sum(many for name, many in started.items() if name not in VIEWS)


def test_the_host_waits_as_often_with_presets_of_every_kind_as_with_one_and_few_kernels_are_started(
    dump, monkeypatch
):
    """Once more at most: statistics with a bound of their own ask where the near tokens stand."""
    alone, (every, started) = seen(FEW[:1], dump), seen(EACH, dump)

    assert alone[0] <= every
    assert every - alone[0] <= Counter({"nonzero": 1})
    assert 0 < sum(every.values()) <= 40
    assert 0 < started < 100 * len(EACH)  # half of it what trainers log, preset by preset
    monkeypatch.setattr(sys.modules["offpol_diag.analyze"], "ROWS", 1)
    assert seen(FEW[:1], dump) == alone, "a batch of many sequences stays whole"


def test_a_gpu_need_not_be_asked_how_many_tokens_a_batch_has(dump):
    batch, offsets = next(open_dump([dump]).batches()), on(0, 2, 5).long()
    with pretended.gpus():
        batch = gpu.receive(gpu.send(batch, GPU), GPU)
        alone = segments.lengths(offsets)
        with pretended.counted() as known:
            segments.spread(batch.lengths, batch.cu_seqlens)
            segments.spread(segments.lengths(batch.cu_runs), batch.cu_runs)
        with pretended.counted() as unknown:
            made = [segments.spread(alone, offsets) for _ in range(3)]

    assert not known
    assert sum(unknown.values()) == 1
    assert [one.tolist() for one in made] == [[2, 2, 3, 3, 3]] * 3


def test_memory_of_a_gpu_is_counted_and_limited():
    with pretended.room(100) as room:
        x = on(1, 2, 3)
        view, taken = x[1:], room.taken
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(20, device=GPU)
        del x
        still = room.taken
        del view

    assert (taken, still, room.taken) == (24, 24, 0)
    assert room.most <= 100


def test_a_batch_that_does_not_fit_lets_go_of_all_it_held_before_its_halves_are_tried():
    """An error holds the frames it passed, and those hold its tensors."""
    taken, (job, dump) = list[int](), observed(FEW, SAMPLE)

    def noted(batch: Batch) -> Any:
        taken.append(room.taken)
        room.limit = 12 * taken[0]
        cycle = [batch.rollout.repeat(4)]  # as outcomes and ratios are in one
        cycle.append(cycle)
        return job(batch) if len(taken) == 1 else None

    gc.disable()
    try:
        with pretended.gpus(), one_thread(), pretended.room() as room:
            gpu.Fit(GPU).results(noted, gpu.send(next(dump.batches()), GPU))
    finally:
        gc.enable()

    whole, *halves = taken
    assert len(halves) == 2
    assert max(halves) < whole


PARTS = (method, residual, policyloss, update)


def alike(count: int) -> tuple[Preset, ...]:
    """Make presets that differ in the bounds on tokens alone."""
    base = Preset("p", "", policy="old")
    return tuple(
        replace(
            base,
            name=f"{bound}",
            weight=Weight(over="token", upper=bound),
            reject=(Reject("ratio", "token", 1 / bound, bound),),
        )
        for bound in (2.0 + at / 8 for at in range(count))
    )


def of_columns(count: int) -> int:
    """Count kernels started for the columns of so many presets, once kept tokens and weights are known."""
    presets, batch = alike(count), next(open_dump([SAMPLE], batch_tokens=4000).batches()).to(GPU)
    done = PresetSums.of(Scene.of(batch, 0, 16), presets)
    with pretended.counted(pretended.observers) as started:
        for part in PARTS:
            part.columns(done)
    return sum(many for name, many in started.items() if name not in VIEWS)


def test_the_columns_of_more_presets_take_no_more_kernels():
    few, many = of_columns(4), of_columns(24)

    assert abs(many - few) < 8, "but for where all rows are asked for in their order"
    assert 0 < many < 350

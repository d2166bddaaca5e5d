"""GPUs: what a device's name means, and the numbers of presets on one."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from offpol_diag.core import gap, preset_numbers, readout
from offpol_diag.core.observe import Ahead, Observe
from offpol_diag.core.segments import to_host
from offpol_diag.core.study import Readout, Study
from offpol_diag.dump.batch import Batch
from offpol_diag.dump.read import open_dump
from offpol_diag.errors import MemoryShortage, UsageError
from offpol_diag.presets import catalogue
from offpol_diag.run import devices as named
from offpol_diag.run import threads
from tests import factory
from tests.devices import gpu, numbers, same
from tests.kinds import EACH
from tests.reading import analyze

SAMPLE = "sample_data/stale.parquet"
COLUMNS = frozenset(("rollout_log_probs", "old_log_probs", "current_log_probs", "advantages"))


@pytest.fixture(scope="module")
def batch() -> Batch:
    return next(open_dump([SAMPLE], batch_tokens=5000).batches())


# ---------------------------------------------------------------- names


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, broken: tuple[int, ...] = ()) -> None:
    """Let so many names of GPUs be there; on broken ones others hold all the memory."""
    plain = torch.ones

    def ones(*args: Any, device: Any = "cpu", **kwargs: Any) -> torch.Tensor:
        if torch.device(device).index in broken:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 MiB.")
        return plain(*args, **kwargs)

    monkeypatch.setattr(named, "NODES", "dev/null" if count else "dev/nothing")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch, "ones", ones)


FULL = "CUDA out of memory."
NAMES = [  # name, how many GPUs are there, which are broken, the answer
    ("auto", 0, (), "cpu"),
    ("auto", 3, (), "cuda:0 cuda:1 cuda:2"),
    ("auto", 2, (1,), "cuda:0"),
    ("auto", 2, (0, 1), f"cpu, no GPU is used: {FULL}"),
    ("cuda", 2, (), "cuda:0 cuda:1"),
    ("cuda:1", 2, (), "cuda:1"),
    ("cpu", 2, (), "cpu"),
    ("cuda", 0, (), "device 'cuda': there are 0 CUDA devices here, use --device cpu"),
    ("cuda:1", 1, (), "device 'cuda:1': there are 1 CUDA devices here, use --device cpu"),
    ("cuda", 2, (1,), f"device 'cuda': {FULL}, use --device cpu"),
    ("cuda:1", 2, (1,), f"device 'cuda:1': {FULL}, use --device cpu"),
    ("tpu", 1, (), "device 'tpu' is not known, give auto, cpu, cuda or cuda:N"),
    ("cuda:x", 1, (), "device 'cuda:x' is not known, give auto, cpu, cuda or cuda:N"),
]


def answered(name: str) -> str:
    try:
        found = named.devices(name)
    except UsageError as error:
        return f"{error.message}, {error.hint}"
    return " ".join(found.devices) + f", {found.unused}" * bool(found.unused)


@pytest.mark.parametrize(("name", "count", "broken", "answer"), NAMES)
def test_a_name_means_the_devices_that_are_there_and_work(name, count, broken, answer, monkeypatch):
    gpus(monkeypatch, count, broken)
    assert answered(name) == answer


def test_auto_starts_no_gpu_that_is_hidden_or_for_a_small_dump(monkeypatch):
    gpus(monkeypatch, 1)
    assert [named.devices(one, worth=False).name for one in ("auto", "cuda")] == ["cpu", "cuda:0"]
    assert [named.worth_a_gpu(tokens, 207) for tokens in (1e5, 1e7)] == [False, True]
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert named.devices("auto").name == "cpu"


def test_a_report_says_why_no_gpu_was_taken(monkeypatch):
    gpus(monkeypatch, 1, (0,))
    monkeypatch.setattr(named, "WORTH_STARTING", 0)
    run = analyze([SAMPLE], presets="token_is").run
    assert (run.device, run.engine) == ("cpu", f"local; no GPU is used: {FULL}")


class Chosen(tuple):
    """The devices of the batches that were computed."""

    def merge(self, other: Chosen) -> Chosen:
        return Chosen(self + other)


def test_threads_take_gpus_in_turn(tmp_path):
    barrier = Barrier(3, timeout=60)  # so that each thread has one of the three batches

    def job(_: Batch) -> Chosen:
        barrier.wait()
        return Chosen((threads.own(("cuda:0", "cuda:1")),))

    dump = open_dump([factory.write(tmp_path / "a.parquet")], batch_tokens=2)
    assert sorted(threads.Threads(3).reduce(dump, job)) == ["cuda:0", "cuda:0", "cuda:1"]


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("lacking", [gpu([], name="all"), gpu(["advantages"]), gpu(["current_log_probs"])])
def test_a_gpu_has_the_numbers_of_a_cpu(lacking, tmp_path):
    path = str(tmp_path / "dump.parquet")
    pq.write_table(pq.read_table(SAMPLE).slice(0, 80).drop_columns(lacking), path, row_group_size=16)
    here, there = (analyze([path], presets=EACH, device=device) for device in ("cpu", "cuda"))

    assert there.run.device == "cuda:0"
    assert same(numbers(here), numbers(there))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tensors_of_the_cpu_have_the_numbers_of_arrays(batch):
    """The path of a GPU, where there is none."""
    study = Study.of(COLUMNS, EACH)
    found = [Observe(study, devices=(device,), rows=True)(batch) for device in ("cpu", "cpu:0")]
    here, there = (
        {
            f"{preset.name}.{name}": number.value
            for preset in EACH
            for name, number in readout.of_preset(Readout(study, one.state), preset).items()
        }
        for one in found
    )
    assert same(here, there)
    assert same(*(one.rows.to_pydict() for one in found))


@pytest.mark.parametrize("device", [gpu("cuda:0")])
def test_the_host_waits_for_a_gpu_where_it_fetches_the_sums_alone(batch, device):
    cut = partial(Ahead.of_batch(Study(EACH, frozenset()), batch).cut, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = preset_numbers.columns(gap.Tokens.of(batch, cut, device), EACH)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {x.shape for x in to_host(found).values()} == {(batch.sequences,)}


def test_a_block_that_does_not_fit_is_an_error_with_a_hint(batch, monkeypatch):
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(gap, "sent", full)
    with pytest.raises(MemoryShortage, match="memory of cuda:0 is too small") as caught:
        Observe(Study(catalogue.load().resolve("token_is"), COLUMNS), Ahead({}), devices=("cuda:0",))(batch)
    assert "--device cpu" in caught.value.hint


# ---------------------------------------------------------------- without torch

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails
from offpol_diag.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "line",
    [
        "analyze {} -q -o r.html",
        "doctor {}",
        "compare --presets token_is,m2po {} -q -o r.html",
        "gate {} -q --max k3=9",
    ],
)
def test_commands_work_where_torch_is_not_installed(line, tmp_path):
    given = line.format(Path(SAMPLE).resolve()).split()
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *given], capture_output=True, text=True, cwd=tmp_path
    )
    assert (ran.returncode, "torch" in ran.stderr) == (0, False), ran.stderr


def test_without_torch_a_gpu_is_not_used(monkeypatch):
    gpus(monkeypatch, 1)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert answered("auto").startswith("cpu, no GPU is used: import of torch halted")
    assert answered("cuda").startswith("device 'cuda': import of torch halted")

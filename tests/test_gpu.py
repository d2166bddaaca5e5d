"""GPUs: what a device's name means, and the numbers of presets on one."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Barrier, BrokenBarrierError, get_ident
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

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
from tests import kinds
from tests.devices import REAL, numbers, same
from tests.reading import analyze

SAMPLE = "sample_data/stale.parquet"
COLUMNS = frozenset(("rollout_log_probs", "old_log_probs", "current_log_probs", "advantages"))
gpu_only = pytest.mark.skipif(not REAL, reason="NO GPU HERE: what runs on CUDA was not tested")


@pytest.fixture(scope="module")
def dump(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("gpu") / "small_groups.parquet"
    pq.write_table(pq.read_table(SAMPLE).slice(0, 80), path, row_group_size=16)
    return str(path)


@pytest.fixture(scope="module")
def batch(dump) -> Batch:
    return next(open_dump([dump], batch_tokens=5000).batches())


# ---------------------------------------------------------------- names


plain_ones = torch.ones


def gpus(monkeypatch: pytest.MonkeyPatch, count: int, broken: tuple[int, ...] = ()) -> None:
    """Let there be GPUs, on the host; on broken ones nothing can be made, as others hold all their memory."""

    def ones(*args: Any, device: Any = "cpu", **kwargs: Any) -> Tensor:
        if torch.device(device).index in broken:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 MiB.")
        return plain_ones(*args, **kwargs)

    monkeypatch.setattr(named, "NODES", "dev/null" if count else "dev/nothing")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch, "ones", ones)


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

    assert [*named.devices(name).devices] == expected


def test_auto_starts_no_gpu_for_a_small_dump(monkeypatch):
    gpus(monkeypatch, 1)

    assert named.devices("auto", worth=False).devices == ("cpu",)
    assert named.devices("cuda", worth=False).devices == ("cuda:0",)
    assert not named.worth_a_gpu(1e5, 207)
    assert named.worth_a_gpu(1e7, 207)


@pytest.mark.parametrize(
    ("name", "count", "said"),
    [
        ("cuda", 0, "0 CUDA"),
        ("cuda:1", 1, "1 CUDA"),
        ("cuda:2", 2, "2 CUDA"),
        ("tpu", 1, "not known"),
        ("cuda:x", 1, "not known"),
    ],
)
def test_a_device_that_is_not_there_is_refused(name, count, said, monkeypatch):
    gpus(monkeypatch, count)

    with pytest.raises(UsageError, match=said):
        named.devices(name)


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_the_environment_hides_are_not_there(hidden, monkeypatch):
    gpus(monkeypatch, 1)
    assert named.devices("auto").name == "cuda:0"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert named.devices("auto").name == "cpu"


def test_without_torch_a_gpu_is_not_used(monkeypatch):
    gpus(monkeypatch, 1)
    monkeypatch.setitem(sys.modules, "torch", None)
    found = named.devices("auto")

    assert found.devices == ("cpu",)
    assert "import of torch halted" in found.unused
    with pytest.raises(UsageError, match="import of torch halted"):
        named.devices("cuda")


@pytest.mark.parametrize(
    ("which", "expected", "said"),
    [
        ((), ["cuda:0", "cuda:1"], ""),
        ((1,), ["cuda:0"], ""),
        ((0, 1), ["cpu"], "no GPU is used: CUDA out of memory."),
    ],
)
def test_a_gpu_that_does_not_work_is_not_taken_unless_it_was_asked_for(which, expected, said, monkeypatch):
    gpus(monkeypatch, 2, which)
    found = named.devices("auto")

    assert [*found.devices] == expected
    assert found.unused == said
    for at in which:
        for name in ("cuda", f"cuda:{at}"):
            with pytest.raises(UsageError, match="CUDA out of memory") as caught:
                named.devices(name)
            assert "--device cpu" in caught.value.hint


def test_a_report_says_why_no_gpu_was_taken(monkeypatch):
    gpus(monkeypatch, 1, (0,))
    monkeypatch.setattr(named, "WORTH_STARTING", 0)
    run = analyze([SAMPLE], presets=catalogue.load().resolve("token_is")).run

    assert run.device == "cpu"
    assert run.engine == "local; no GPU is used: CUDA out of memory."


@dataclass
class Chosen:
    """The device of each thread that has computed a batch."""

    devices: dict[int, str]

    def merge(self, other: Chosen) -> Chosen:
        return Chosen(self.devices | other.devices)


def test_threads_take_gpus_in_turn(dump):
    barrier = Barrier(3)

    def job(batch: Batch) -> Chosen:
        with suppress(BrokenBarrierError):  # the last batches are fewer than threads
            barrier.wait(5)
        return Chosen({get_ident(): threads.own(("cuda:0", "cuda:1"))})

    found = threads.Threads(3).reduce(open_dump([dump], batch_tokens=500), job)
    assert sorted(found.devices.values()) == ["cuda:0", "cuda:0", "cuda:1"]


# ---------------------------------------------------------------- numbers


@gpu_only
@pytest.mark.parametrize("lacking", [[], ["advantages"], ["current_log_probs"]])
def test_a_gpu_has_the_numbers_of_a_cpu(lacking, dump, tmp_path):
    path = str(tmp_path / "dump.parquet")
    pq.write_table(pq.read_table(dump).drop_columns(lacking), path, row_group_size=16)
    here = with_own(numbers(analyze([path], presets=kinds.EACH, device="cpu")))
    summary = analyze([path], presets=kinds.EACH, device="cuda", sequences=tmp_path / "sequences.parquet")
    there = with_own(numbers(summary))

    assert summary.run.device == "cuda:0"
    for part in here:
        assert same(here[part], there[part]), part


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_tensors_of_the_cpu_have_the_numbers_of_arrays(batch):
    """The path of a GPU, where there is none."""
    study = Study.of(COLUMNS, kinds.EACH)
    found = [Observe(study, devices=(device,), rows=True)(batch) for device in ("cpu", "cpu:0")]
    here, there = (Readout(study, one.state) for one in found)
    for preset in study.presets:
        one, other = (
            {name: number.value for name, number in readout.of_preset(out, preset).items()}
            for out in (here, there)
        )
        assert same(one, other), preset.name
    assert same(*(one.rows.to_pydict() for one in found))


def with_own(summary: Any) -> Any:
    """Leave out which presets have the same numbers to the last bit: a GPU rounds each sum anew."""
    for preset in summary["presets"].values():
        del preset["same_as"]
    return summary


@gpu_only
def test_the_host_waits_for_a_gpu_where_it_fetches_the_sums_alone(batch):
    cut = partial(Ahead.of_batch(Study(kinds.EACH, frozenset()), batch).cut, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = preset_numbers.columns(gap.Tokens.of(batch, cut, "cuda:0"), kinds.EACH)
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


def test_the_sums_of_presets_are_started_before_the_host_computes_its_own(batch, monkeypatch):
    order: list[str] = []
    for module in (preset_numbers, gap):
        plain, name = module.columns, module.__name__.rpartition(".")[2]
        noted = lambda *given, plain=plain, name=name: order.append(name) or plain(*given)  # noqa: E731
        monkeypatch.setattr(module, "columns", noted)
    Observe(Study.of(COLUMNS, catalogue.load().resolve("token_is")))(batch)

    assert order == ["preset_numbers", "gap", "gap", "gap"]


# ---------------------------------------------------------------- without torch

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails
from offpol_diag.__main__ import main
sys.argv = ["offpol-diag", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    "command",
    [
        ("analyze", SAMPLE, "-q", "-o", "r.html"),
        ("doctor", SAMPLE),
        ("compare", "--presets", "token_is,m2po", SAMPLE, "-q", "-o", "r.html"),
        ("gate", SAMPLE, "-q", "--max", "k3=9"),
    ],
    ids=" ".join,
)
def test_commands_work_where_torch_is_not_installed(command, tmp_path):
    sample = str(Path(SAMPLE).resolve())
    given = [sample if one == SAMPLE else one for one in command]
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *given],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )

    assert ran.returncode == 0, ran.stderr
    assert "torch" not in ran.stderr

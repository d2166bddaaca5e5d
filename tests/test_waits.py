"""On a GPU the host waits as often with all presets as with one, and the numbers are those of a CPU.

There need be no GPU: `host.here` is told that nothing lies in the host's memory, so the code goes the way it
goes on one, and every operator that would make the host wait there is counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offpol_diag.analysis.first_pass import Needs, settle
from offpol_diag.analysis.tally import Study
from offpol_diag.analyze import Observe, analyze
from offpol_diag.engine import segments
from offpol_diag.presets import catalogue
from offpol_diag.readers import open_dump
from offpol_diag.run.task import Local
from tests.devices import gpu
from tests.gpu_rules import WAITING

SAMPLE = "sample_data/stale.parquet"


def waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an operator makes the host wait for a GPU."""
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("aten::index", "aten::index_put", "aten::index_put_"):
        return any(at is not None and at.dtype == torch.bool for at in args[1])
    return name in WAITING


class Waits(TorchDispatchMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if waits(name, args, kwargs or {}):
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def far(monkeypatch) -> None:
    """Everywhere a tensor is taken for one on a GPU."""
    for module in [one for name, one in sys.modules.items() if name.startswith("offpol_diag")]:
        if hasattr(module, "here"):
            monkeypatch.setattr(module, "here", lambda x: False)


def counted(names: str, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What makes the host wait in one batch under some presets; copies of many numbers count as one."""
    presets = catalogue.load().resolve(names)
    dump = open_dump([SAMPLE])
    study = Study.of(dump.info.columns, presets, (), 0)
    found = settle(Local(torch.device("cpu")), dump, Needs.of(study.presets, rewards=False))
    batch = next(dump.batches()).to(torch.device("cpu"))
    seen, plain = Waits(), {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy", "cpu")}
    with monkeypatch.context() as patch, seen:
        for name, method in plain.items():
            patch.setattr(torch.Tensor, name, _told(seen.seen, name, method))
        Observe(study, found, rows=False)(batch)
    return seen.seen


def _told(seen: Counter[str], name: str, method: Any) -> Any:
    def call(self, *args, **kwargs):
        seen[name] += 1
        return method(self, *args, **kwargs)

    return call


def test_the_host_waits_as_often_with_all_presets_as_with_one(far, monkeypatch):
    """Once more at most: statistics with a bound of their own ask where the near tokens stand."""
    one, every = counted("tis", monkeypatch), counted("all", monkeypatch)

    assert every - one <= Counter({"aten::nonzero": 1})
    assert one <= every
    assert 0 < sum(every.values()) < 40


def test_a_batch_of_many_sequences_stays_whole_on_a_gpu(far, monkeypatch):
    plain = counted("all", monkeypatch)
    monkeypatch.setattr(sys.modules["offpol_diag.analyze"], "ROWS", 1)

    assert counted("all", monkeypatch) == plain


def test_numpy_and_counts_of_the_host_are_not_asked_of_a_gpu(far, monkeypatch):
    seen = counted("all", monkeypatch)

    assert seen["numpy"] == seen["aten::bincount"] == seen["aten::repeat_interleave"] == 0


def test_the_counter_sees_what_waits():
    x = torch.arange(4.0)
    with Waits() as seen:
        float(x.sum())
        x[x > 1]
        torch.repeat_interleave(x, torch.tensor([1, 2, 0, 1]))
        torch.repeat_interleave(x, torch.tensor([1, 2, 0, 1]), output_size=4)
        torch.where(x > 1, x, 0.0)

    assert seen.seen["aten::_local_scalar_dense"] == seen.seen["aten::index"] == 1
    assert seen.seen["aten::repeat_interleave"] == 1


def numbers(model: Any) -> Any:
    """A Summary without what no two runs share."""
    found = model.model_dump(mode="json")
    del found["run"]
    return found


def same(one: Any, two: Any) -> bool:
    """Equal to 1e-9, through dicts and lists."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, float) and isinstance(two, float):
        return one == pytest.approx(two, rel=1e-9, abs=1e-12)
    return one == two


@pytest.mark.parametrize("device", [gpu("cuda:0")])
@pytest.mark.parametrize("sample", ["stale", "healthy"])
def test_a_gpu_has_the_numbers_of_a_cpu(sample, device):
    presets = catalogue.load().resolve("all")
    here, there = (
        numbers(analyze([f"sample_data/{sample}.parquet"], presets=presets, device=where))
        for where in ("cpu", device)
    )

    for part in here:
        assert same(here[part], there[part]), part


def test_a_gpu_need_not_be_asked_how_many_tokens_a_batch_has(far):
    batch = next(open_dump([SAMPLE]).batches()).to(torch.device("cpu"))
    alone = segments.lengths(torch.tensor([0, 2, 5]))
    with Waits() as seen:
        segments.spread(batch.lengths, batch.cu_seqlens)
        segments.spread(segments.lengths(batch.cu_runs), batch.cu_runs)
    with Waits() as unknown:
        offsets = torch.tensor([0, 2, 5])
        for _ in range(3):
            assert segments.spread(alone, offsets).tolist() == [2, 2, 3, 3, 3]

    assert not seen.seen
    assert unknown.seen["aten::_local_scalar_dense"] == 1

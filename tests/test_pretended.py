"""The pretended GPU refuses what a real one refuses, and an analysis on it has the numbers of the CPU."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from offpol_diag import catalogue
from offpol_diag.analyze import Observe, analyze
from offpol_diag.engines import fitting
from tests import pretended
from tests.devices import REAL
from tests.test_waits import numbers, same

pytestmark = pytest.mark.skipif(REAL, reason="a real GPU is here")
GPU = torch.device("cuda", 0)
SAMPLES = ("healthy", "stale", "quantized")


def on(*values: float, device: Any = GPU) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).to(device)


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.ones(3) * x,
        lambda x: torch.cat((x, torch.ones(3))),
        lambda x: torch.stack((x.sum(), torch.tensor(1.0))),
        lambda x: torch.where(torch.ones(3) > 0, x, x),
        lambda x: torch.ones(3)[x > 0],
        lambda x: torch.ones(3).scatter_add_(0, torch.tensor([0]), x),
        lambda x: x + on(1, 2, 3, device="cuda:1"),
        lambda x: torch.searchsorted(torch.arange(3.0), x),
    ],
)
def test_tensors_of_two_places_do_not_meet(mixed):
    with pytest.raises(RuntimeError):
        mixed(on(1, 2, 3))


@pytest.mark.parametrize("look", [lambda x: x.numpy(), np.asarray, np.exp, pickle.dumps])
def test_numpy_and_pickle_do_not_see_a_tensor_on_a_gpu(look):
    with pytest.raises((TypeError, RuntimeError)):
        look(on(1, 2, 3))


def test_products_of_whole_numbers_are_refused():
    whole = torch.ones(2, 2, dtype=torch.int64, device=GPU)

    with pytest.raises(RuntimeError, match="whole numbers"):
        whole @ whole


def test_what_is_made_there_stays_there_until_it_is_fetched():
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


@pytest.fixture(scope="module", params=SAMPLES)
def sample(request) -> tuple[str, Any]:
    path = f"sample_data/{request.param}.parquet"
    return path, numbers(analyze([path], presets=catalogue.load().resolve("all"), device="cpu"))


@pytest.mark.parametrize(("device", "many"), [("auto", 1), ("cuda", 2)])
def test_an_analysis_on_it_has_the_numbers_of_the_cpu(sample, device, many, tmp_path):
    path, here = sample
    with pretended.gpus(many):
        summary = analyze(
            [path],
            presets=catalogue.load().resolve("all"),
            device=device,
            sequences=tmp_path / "sequences.parquet",
            tally=tmp_path / "tally.json",
        )
    there = numbers(summary)

    assert summary.run.device.startswith("cuda")
    for part in here:
        assert same(here[part], there[part]), part


@pytest.mark.parametrize("asked", [None, 5000])
def test_a_gpu_takes_more_at_once_than_a_cpu_unless_asked_for_less(asked, monkeypatch):
    seen: list[int] = []
    plain = Observe.__call__

    def noted(self: Any, batch: Any) -> Any:
        seen.append(batch.tokens)
        return plain(self, batch)

    monkeypatch.setattr(Observe, "__call__", noted)
    monkeypatch.setattr(fitting, "TOKENS", 1 << 10)
    with pretended.gpus(memory=fitting.BYTES << 22):
        analyze(["sample_data/stale.parquet"], batch_tokens=asked)

    assert (len(seen) == 1) == (asked is None)

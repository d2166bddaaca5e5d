"""How many operations a batch starts on a GPU: each costs the host microseconds, however few the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from offpol_diag.analysis.first_pass import Needs, read_ahead
from offpol_diag.analysis.tally import Study
from offpol_diag.analyze import Observe
from offpol_diag.engine import method, policyloss, residual, update
from offpol_diag.engine.outcome import Outcomes
from offpol_diag.engine.scene import Nearness, Scene
from offpol_diag.presets import Preset, Reject, Weight, catalogue
from offpol_diag.readers import open_dump
from offpol_diag.run.task import Local
from tests import pretended
from tests.devices import REAL

pytestmark = pytest.mark.skipif(REAL, reason="a pretended GPU is asked")
SAMPLE = "sample_data/stale.parquet"
GPU = torch.device("cuda", 0)
VIEWS = {"view", "_unsafe_view", "expand", "slice", "select", "unsqueeze", "alias", "detach", "unbind", "t"}
PARTS = (method, residual, policyloss, update)


@contextmanager
def started() -> Iterator[Counter[str]]:
    """The operators that run on the pretended GPU within the block, but for those that only look."""
    seen: Counter[str] = Counter()

    def tell(name: str) -> None:
        if name.removeprefix("aten::") not in VIEWS:
            seen[name] += 1

    pretended.told.append(tell)
    try:
        yield seen
    finally:
        pretended.told.remove(tell)


def on_gpu():
    return next(open_dump([SAMPLE]).batches()).to(GPU)


def alike(count: int) -> tuple[Preset, ...]:
    """Presets that differ in the bounds on tokens alone."""
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
    """What the columns of so many presets start, once what each keeps and weighs is known."""
    presets = alike(count)
    outcomes = Outcomes.of(Scene.of(on_gpu(), 0, 16, near=Nearness.of(presets)), presets)
    for one in outcomes.each:
        assert one.near
        assert one.weighed is not None
    with started() as seen:
        for part in PARTS:
            part.columns(outcomes)
    return sum(seen.values())


def test_the_columns_of_more_presets_take_no_more_kernels():
    few, many = of_columns(4), of_columns(24)

    assert abs(many - few) < 8, "but for where all rows are asked for in their order"
    assert 0 < many < 350


@pytest.mark.slow
def test_a_batch_starts_few_kernels_for_each_of_all_presets():
    dump = open_dump([SAMPLE])
    presets = catalogue.load().resolve("all")
    study = Study.of(dump.info.columns, presets, (), 0)
    found = read_ahead(Local(torch.device("cpu")), dump, Needs.of(study.presets, False))
    job, batch = Observe(study, found, rows=False), on_gpu()
    job(batch)
    with started() as seen:
        job(batch)

    assert 0 < sum(seen.values()) < 58 * len(presets)  # half of it what trainers log, preset by preset

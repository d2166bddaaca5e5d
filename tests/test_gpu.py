"""GPUs: the numbers of presets on one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from offpol_diag.core import gap, preset_numbers, readout
from offpol_diag.core.observe import Observe
from offpol_diag.core.segments import to_host
from offpol_diag.core.study import Readout, Study
from offpol_diag.core.whole_steps import WholeSteps
from offpol_diag.dump.batch import Batch
from offpol_diag.dump.read import open_dump
from offpol_diag.errors import MemoryShortage
from offpol_diag.presets import catalogue
from tests.devices import gpu, numbers, same
from tests.kinds import EACH
from tests.reading import analyze

SAMPLE = "sample_data/stale.parquet"
COLUMNS = frozenset(("rollout_log_probs", "old_log_probs", "current_log_probs", "advantages"))


@pytest.fixture(scope="module")
def batch() -> Batch:
    return next(open_dump([SAMPLE], batch_tokens=5000).batches())


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
    assert same(*(one.rows[0].to_pydict() for one in found))


@pytest.mark.parametrize("device", [gpu("cuda:0")])
def test_the_host_waits_for_a_gpu_where_it_fetches_the_sums_alone(batch, device):
    cut = partial(WholeSteps.of_batch(Study(EACH, frozenset()), batch).cut, batch)
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
        Observe(Study(catalogue.load().resolve("token_is"), COLUMNS), WholeSteps({}), devices=("cuda:0",))(
            batch
        )
    assert "--device cpu" in caught.value.hint

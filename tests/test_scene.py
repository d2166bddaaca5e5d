"""A batch is let go of once it is tallied: memory must not grow with the dump."""

import gc
import weakref

import pytest
import torch

from offpol_diag import catalogue
from offpol_diag.analyze import plan
from offpol_diag.engines import Local
from offpol_diag.metrics.scene import Scene
from offpol_diag.readers import open_dump
from offpol_diag.settle import Asked, settle
from offpol_diag.tally import observe


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()


def test_nothing_of_a_batch_outlives_it_without_the_garbage_collector(no_collector):
    dump = open_dump(["sample_data/healthy.parquet"])
    study = plan(dump, catalogue.load().resolve("all"), (), 0)
    settled = settle(Local(torch.device("cpu")), dump, Asked.of(study.presets, rewards=False)).settled
    scene = Scene.of(next(dump.batches()), 0, 8, settled)
    tally = observe(study, scene)
    kept = [weakref.ref(scene.ratios(policy).delta) for policy in ("old", "current")]

    scene.forget()
    del scene

    assert tally.states
    assert [one() for one in kept] == [None, None]

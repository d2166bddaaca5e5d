"""A batch is let go of once it is tallied: memory must not grow with the dump."""

import gc
import weakref

import pytest
import torch

from offpol_diag.analysis.first_pass import Needs, read_ahead
from offpol_diag.analysis.tally import Study, observe
from offpol_diag.engine.scene import Scene
from offpol_diag.presets import catalogue
from offpol_diag.readers import open_dump
from offpol_diag.run.task import Local


@pytest.fixture
def no_collector():
    gc.disable()
    yield
    gc.enable()


def test_nothing_of_a_batch_outlives_it_without_the_garbage_collector(no_collector):
    dump = open_dump(["sample_data/healthy.parquet"])
    study = Study.of(dump.info.columns, catalogue.load().resolve("all"), (), 0)
    fits = read_ahead(Local(torch.device("cpu")), dump, Needs.of(study.presets, rewards=False)).fits
    scene = Scene.of(next(dump.batches()), 0, 8, fits, study.near)
    tally = observe(study, scene)
    parts = [ratios for ratios, _ in scene.parts(study.presets[0])]
    every = [scene.ratios("old"), scene.ratios("current"), *parts]
    kept = [weakref.ref(ratios.delta) for ratios in every]
    del parts, every

    scene.forget()
    del scene

    assert tally.states
    assert [one() for one in kept] == [None] * 4

"""What a few sequences teach of near tokens is all that a whole batch asks; what a study knows travels."""

from dataclasses import replace

import pytest

from offpol_diag.analysis import tally
from offpol_diag.engine.ratios import ROWS
from offpol_diag.engine.scene import Scene
from offpol_diag.presets import Preset, Reject, catalogue
from offpol_diag.run.task import packed, unpacked
from tests import oracles
from tests.test_near import opened

OUTLIERS = {"calm": 0.0, "a few far": 0.02, "many far": 0.3}


@pytest.fixture(scope="module", params=OUTLIERS)
def dump(request, tmp_path_factory):
    rows = oracles.make_rows(0.03, seed=7, many=40, outliers=OUTLIERS[request.param])
    return opened(rows, tmp_path_factory.mktemp("rehearsal"))


def test_a_few_sequences_teach_all_that_a_whole_batch_asks_of_near_tokens(dump):
    assert len(learned(dump[0], *dump[1:])) > 80


def test_what_only_a_preset_without_a_book_asks_is_learned_too(dump):
    judge = Preset("judge", "", "old", reject=(Reject("k3", over="max", upper=0.01),))
    study = replace(dump[0], presets=(catalogue.load()["token_is"], judge))

    assert ("old", (ROWS, "k3", "max")) in learned(study, *dump[1:])


def learned(study, found, batch):
    """What a whole batch asks, all of which is known from a few sequences."""
    study = replace(study)
    whole = Scene.of(batch, 0, 2, found.settled, study.near)
    whole.learned = {}
    tally.observe(study, whole)
    asked = {*whole.learned, *whole.asked_of_sequences()}
    fresh = replace(study)
    tally._rehearse(fresh, Scene.of(batch, 0, 2, found.settled, fresh.near), fresh.near)

    assert asked <= {*fresh.near.asked}
    return asked


def test_what_a_study_knows_travels_with_it(dump, monkeypatch):
    study = replace(dump[0]).ready()
    monkeypatch.setattr(catalogue, "load", lambda path=None: pytest.fail("the catalogue is read again"))
    there = unpacked(packed(study))

    for name in ("candidates", "near", "normalised", "logging"):
        assert name in vars(there)
        assert getattr(there, name) == getattr(replace(dump[0]), name)


def test_the_presets_that_ship_are_read_once(monkeypatch):
    before = catalogue.load()
    monkeypatch.setattr(catalogue, "toml", lambda text: pytest.fail("they are read again"))

    assert {**catalogue.load()} == {**before}

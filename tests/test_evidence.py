"""What speaks for each candidate, as it stands in a result."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
import torch

from offpol_diag import evidence
from offpol_diag.analyze import examine
from offpol_diag.candidates import CANDIDATES, DEFAULT, REFERENCE
from offpol_diag.evidence import per_update
from offpol_diag.metrics.alignment import BUCKETS, FOLDS, Folds, estimates, moved, systematic
from offpol_diag.summary import Alignment, Location, Summary, loads
from tests.estimated import alignment
from tests.factory import make_summary, place

NAMES = tuple(one.name for one in CANDIDATES)
SAMPLE = "sample_data/stale.parquet"


def folds(signal=0.1, offset=0.3, sequences=320, length=7, seed=0):
    """Sums of every candidate: a common mean, noise of its own, and kinds of tokens that are off."""
    rng = np.random.default_rng(seed)
    n = np.full(FOLDS, sequences / FOLDS)
    noise = rng.normal(size=(len(NAMES), FOLDS, BUCKETS)) * np.sqrt(n)[None, :, None]
    common = rng.normal(size=(FOLDS, BUCKETS)) * np.sqrt(n)[:, None]
    there = np.full((FOLDS, BUCKETS), length * sequences / FOLDS / BUCKETS)
    off = offset * there + 0.05 * rng.normal(size=(FOLDS, BUCKETS))
    tokens = float(length * sequences)
    return Folds(
        NAMES,
        torch.tensor(common + 0.1 * noise + n[:, None] * signal),
        torch.linspace(0.9, 1.0, len(NAMES), dtype=torch.float64) * tokens,
        torch.tensor(np.stack((off, there))),
        torch.tensor(tokens * (offset**2 + 0.01), dtype=torch.float64),
        torch.tensor(0.1 * n + rng.normal(size=FOLDS)),
        torch.tensor(n),
        torch.tensor(tokens, dtype=torch.float64),
    )


def of(sums, policy="old", columns=evidence.DIRECTION, batch=64.0):
    return evidence.alignment(sums, policy, columns, batch)


# ---------------------------------------------------------------- the rows


def test_every_candidate_has_its_estimate_under_its_name():
    sums = folds()
    found, told = of(sums), estimates(sums, REFERENCE.name, 64.0)

    assert list(found.rows) == list(NAMES)
    for name, row in found.rows.items():
        assert (row.kept, row.noise, row.expected, row.measured, row.error, row.score) == (
            told[name].kept,
            told[name].noise,
            told[name].expected,
            told[name].measured,
            told[name].error,
            told[name].score,
        )
        assert row.refused is None
    assert (found.batch_sequences, found.reference) == (64.0, "token_tis_5.0")


@pytest.mark.parametrize("policy", ["old", "current"])
def test_a_row_says_which_preset_it_is_on_this_train_side(policy):
    rows = of(folds(), policy).rows

    for one in CANDIDATES:
        row = rows[one.name]
        assert (row.method, row.threshold, row.settings) == one.named(policy)
        assert (row.title, row.judges) == (one.title, one.judges)


def test_the_batch_of_the_trainer_changes_the_estimates():
    """In a large batch noise is no matter, in a small one it is all."""
    small, large = (of(folds(), batch=batch).rows[DEFAULT.name] for batch in (1.0, 1e9))

    assert small.noise == large.noise
    assert abs(large.expected) < 1e-6 < abs(small.expected)


def test_the_printed_alignment_is_the_score_and_what_was_seen_has_its_interval():
    for row in of(folds()).rows.values():
        assert row.alignment.value == pytest.approx(math.exp(row.score))
        assert row.alignment.interval is None
        assert row.seen.value == pytest.approx(math.exp(row.measured))
        if row.error:
            ends = [math.exp(row.measured + sign * 1.959964 * row.error) for sign in (-1, 1)]
            assert row.seen.interval == pytest.approx(ends)


def test_what_drowns_in_noise_is_unknown_and_says_so():
    found = of(folds(signal=-0.0, seed=3), batch=1.0).rows
    rows = [row for row in found.values() if row.measured is None]

    assert rows
    assert all(row.seen.unknown == "the signal drowns in noise" for row in rows)
    assert all(row.seen.value is None and row.error is None for row in rows)
    assert all(row.score is not None for row in rows)


@pytest.mark.parametrize(
    ("columns", "seen"),
    [
        ({"token_ids", "advantages", "rewards"}, True),
        ({"token_ids", "advantages"}, True),
        ({"token_ids"}, False),
        ({"advantages"}, False),
        (set(), False),
    ],
)
def test_a_direction_is_seen_only_with_token_ids_and_advantages(columns, seen):
    assert of(folds(), columns=columns).direction is seen


# ---------------------------------------------------------------- what tells for a bias


def test_the_systematic_share_and_how_the_trainer_has_moved_stand_in_the_result():
    sums = folds()
    found = of(sums, columns={"advantages"})

    assert found.systematic == systematic(sums).value
    assert found.moved == moved(sums)
    assert of(sums, columns=set()).moved is None


def test_without_a_mismatch_nothing_is_systematic():
    sums = folds()
    assert of(replace(sums, spread=torch.tensor(0.0, dtype=torch.float64))).systematic is None


def test_what_all_sequences_of_one_fold_share_is_not_known():
    """It cannot be told from what each has."""
    sums = folds()
    alone = torch.zeros(FOLDS, dtype=torch.float64)
    alone[0] = 320
    found = of(replace(sums, sequences=alone))

    assert found.systematic is None
    assert all(row.measured is None for row in found.rows.values())


# ---------------------------------------------------------------- sequences in an update


def steps(*sequences):
    places = [
        place(str(i), i, 1e-3).model_copy(update={"sequences": count}) for i, count in enumerate(sequences)
    ]
    return Location(axis="step", title="step", numeric=True, places=places)


@pytest.mark.parametrize(
    ("given", "update"),
    [
        (steps(64, 64, 8), 64.0),
        (steps(10, 1000, 100), 100.0),
        (steps(10, 20), 15.0),
        (steps(5), 5.0),
        (steps(), 999.0),
        (None, 999.0),
    ],
)
def test_an_update_has_the_sequences_of_a_usual_step_else_of_the_dump(given, update):
    assert per_update(given, 999) == update


def test_sequences_of_an_update_can_be_told():
    found = examine([SAMPLE], device="cpu")
    told = replace(found, study=replace(found.study, update=4096.0)).summary().alignment
    usual = found.summary().alignment

    assert (usual.batch_sequences, told.batch_sequences) == (64.0, 4096.0)
    assert usual.rows[DEFAULT.name].expected != told.rows[DEFAULT.name].expected
    assert examine([SAMPLE], device="cpu", update=7.0).summary().alignment.batch_sequences == 7.0


# ---------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    "given", [alignment(), of(folds()), of(folds(signal=0.0))], ids=["hand", "all", "few"]
)
def test_a_result_gives_every_estimate_back(given):
    summary = make_summary(alignment=given)

    assert loads(summary.to_json(), "x").alignment == given
    jsonschema.validate(json.loads(summary.to_json()), Summary.model_json_schema(mode="serialization"))


def test_every_estimate_is_described_in_the_schema():
    schema = Summary.model_json_schema(mode="serialization")["$defs"]
    row = schema["AlignmentRow"]["properties"]

    for name in ("kept", "noise", "expected", "measured", "error", "score", "judges", "method", "refused"):
        assert row[name]["description"], name
    assert schema["Alignment"]["properties"]["moved"]["description"]


def test_a_result_without_estimates_is_read_as_well():
    """Those of before had none."""
    old = json.loads(make_summary().to_json())
    old.pop("alignment")

    assert loads(json.dumps(old), "x").alignment is None


@pytest.mark.parametrize("name", ["kept", "score"])
def test_what_is_not_finite_is_refused(name):
    said = alignment().model_dump()
    said["rows"][DEFAULT.name][name] = math.nan
    with pytest.raises(ValueError, match="finite"):
        Alignment.model_validate(said)

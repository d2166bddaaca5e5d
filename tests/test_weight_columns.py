"""Columns that tell which weights sampled, how long prompts were and why responses ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from offpol_diag.core.gap import DRIFTS, Tokens
from offpol_diag.core.kept_rows import Sample
from offpol_diag.core.state import groups_of
from offpol_diag.dump.batch import Batch
from offpol_diag.dump.convert import open_dump
from offpol_diag.dump.read import open_dump as open_parquet
from tests import factory
from tests.factory import DumpFile

LENGTHS = (4, 1, 3)
LOGS = [[-0.5] * n for n in LENGTHS]
VERSIONS = [[5, 5, 6, 8], [5], [6, 6, 6]]
DIGESTS = ("weight_digest_rollout", "weight_digest_train")
TOLD = {"prompt_length": [12, 0, None], "finish_reason": ["stop", "length", None]}
TOLD |= {DIGESTS[0]: ["a", "a", None], DIGESTS[1]: ["a", "b", None]}


def write(path: Path, **columns: Any) -> Path:
    return Path(factory.write(path, None, 2, **{"rollout_log_probs": LOGS, "old_log_probs": LOGS} | columns))


def versions(path: Path | str, **options: Any) -> list[int]:
    (one,) = open_dump([str(path)], **options).batches()
    assert one.weight_versions is not None
    assert one.weight_versions.dtype == np.int64
    return [int(version) for version in one.weight_versions]


def test_a_padded_batch_keeps_its_versions_and_those_of_masked_tokens_may_be_anything(tmp_path: Path) -> None:
    logs, mask = -np.ones((2, 4)), np.array([[1, 0, 1, 0], [1, 1, 1, 1]])
    given = np.array([[5, -1, 6, 0], [7, 7, 7, 8]])
    with DumpFile(tmp_path / "a.parquet") as out:
        out.write(rollout_log_probs=logs, old_log_probs=logs, response_mask=mask, weight_versions=given)
    assert pq.read_table(tmp_path / "a.parquet")["weight_versions"].to_pylist() == [[5, -1, 6], [7, 7, 7, 8]]
    assert versions(tmp_path / "a.parquet") == [5, 6, 7, 7, 7, 8]


def test_keys_of_sequences_do_not_depend_on_them(tmp_path: Path) -> None:
    paths = write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet", weight_versions=VERSIONS, **TOLD)
    keys = [[int(key) for one in open_parquet([str(path)]).batches() for key in one.key] for path in paths]
    assert keys[0] == keys[1]


def sample(batch: Batch) -> Sample:
    """Return the sample of a dump that is this batch."""
    terms = Tokens.of(batch).terms(DRIFTS[0])
    return Sample.of(terms, groups_of(batch.key, None)).read()


def test_the_sample_of_the_diagnosis_has_them_and_the_rewards(tmp_path: Path) -> None:
    columns = {"rewards": [0.0, 1.0, 2.0], **TOLD}
    (one,) = open_dump([str(write(tmp_path / "a.parquet", **columns))]).batches()
    found = sample(one)
    assert sorted(zip(found.scalars["rewards"], found.scalars["prompt_length"], strict=True), key=str) == [
        (0.0, 12), (1.0, 0), (2.0, None),
    ]  # fmt: skip
    assert {*TOLD} < found.scalars.keys()


# ---------------------------------------------------------------- prompts

PROMPTS: list[Any] = [[7, 8, 9, 9], [5], None]


def test_prompts_reach_the_diagnosis_with_lengths_of_their_own(tmp_path: Path) -> None:
    ids = [[9, 1, 7, 2], [5], [5, 5, 5]]
    path = write(tmp_path / "a.parquet", token_ids=ids, prompt_ids=PROMPTS)
    (one,) = open_dump([str(path)]).batches()
    assert one.scalars["prompt_length"] == [4, 1, None]
    found = sample(one)
    rows = {one: i for i, one in enumerate(found.scalars["sequence_id"])}
    digests = [found.scalars["prompt_ids"][rows[i]] for i in range(3)]
    assert (digests[2], len({*digests})) == (None, 3)

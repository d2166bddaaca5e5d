"""Laws whatever the numbers are: how a dump is cut, packed, masked, ordered or merged changes nothing.

Two Summaries are equal here when every number (values, interval ends, places) agrees to 1e-12
relative. Where terms of both signs cancel (k1, kl, log-PPL differences, χ², losses) and for standard
deviations, which are roots of differences, 1e-12 is taken of what the terms measure instead (`SCALES`):
their sum cannot be rounded better.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from offpol_diag.core import readout
from offpol_diag.core.observe import Observe
from offpol_diag.core.state import State
from offpol_diag.core.study import Readout, Study
from offpol_diag.dump.read import open_dump
from offpol_diag.presets import catalogue
from offpol_diag.result import Result, Run
from tests import oracles
from tests.devices import same
from tests.kinds import EACH, MADE
from tests.reading import analyze

SCALES = (
    (r"[ ./_](k1|kl)$|log_ppl_diff|ppo_kl|seq_sum_k1|mean_k1|token_k1", 1.0),  # mean |Δ| is 0.2 here
    (r"chi2", 30.0),  # mean |e^{2Δ} − 1|, and of products
    (r"std", 1.0),
    (r"pg_loss", 60.0),  # a sequence's sum of |A| up to 2
    (r"tokens_rejected", 1.0),  # 1 − kept
)
EVERY = (*EACH, *MADE)
ALONE = tuple(one for one in EVERY if not any(rule.over == "batch" for rule in one.reject))
"""Presets that judge one sequence at a time: others need a reading of the dump that goes before."""
BY_TURN = [one for one in EVERY if any(part and part.over == "segment" for part in (one.weight, *one.reject))]
POLICIES = ("old_log_probs", "current_log_probs")
RUN = Run(
    version="0", device="cpu", seed=0, replicates=256, tokens=0, sequences=0, peak_rss_bytes=0, seconds={}
)


def numbers(summary: Result) -> Iterator[tuple[str, float | None]]:
    """Yield every number of a Result under a name that says where it is."""
    found = {subject: each for subject, each in summary.subjects.items() if "candidate/" not in subject}
    found |= {f"length {at.tokens}": {"ess": at.ess_sequences} for at in summary.lengths.curve}
    for subject, each in found.items():
        for name, number in each.items():
            low, high = number.interval or (None, None)
            yield f"{subject}: {name}", number.value
            yield from ((f"{subject}: {what} {name}", x) for what, x in (("low", low), ("high", high)))
            yield f"{subject}: log10 {name}", number.log10
    for axis, one in summary.axes.items():
        yield from ((f"dump@{axis}/{at}: tokens", n) for at, n in zip(one.places, one.tokens, strict=True))
    yield from ((f"bin {low:.9g}", count) for low, _, count, _ in summary.charts.log_ratios)


def different(one: Result, two: Result, but: str = "$^") -> dict[str, tuple[Any, Any]]:
    """Return numbers that are not equal, by name; `but` names those that may differ."""
    first, second = (
        {name: x for name, x in numbers(some) if not re.search(but, name)} for some in (one, two)
    )
    assert set(first) == set(second)
    return {name: (x, second[name]) for name, x in first.items() if not _equal(x, second[name], name)}


def of_presets(presets: Any) -> str:
    """Return the pattern of the names of these presets' numbers."""
    return f"^preset/({'|'.join(re.escape(one.name) for one in presets)})[:@]"


def _equal(x: float | None, y: float | None, name: str) -> bool:
    if x is None or y is None:
        return x is y
    scale = max((size for pattern, size in SCALES if re.search(pattern, name)), default=0.0)
    return abs(x - y) <= 1e-12 * max(abs(x), abs(y), scale)


@pytest.fixture(scope="module")
def rows():
    return oracles.make_rows(0.3, seed=1, many=72)


@pytest.fixture(scope="module")
def whole_and_rows(rows, tmp_path_factory):
    """Return the Result of the rows in one file, one row group, one batch, and its table of sequences."""
    folder = tmp_path_factory.mktemp("whole")
    summary = analyzed([rows], folder, sequences=folder / "rows.parquet")
    return summary, pl.read_parquet(folder / "rows.parquet")


@pytest.fixture(scope="module")
def whole(whole_and_rows):
    return whole_and_rows[0]


def analyzed(
    files: list[list[dict[str, Any]]], folder: Path, row_group: int | None = None, **more: Any
) -> Result:
    paths = [oracles.write(part, folder / f"part{i}.parquet", row_group) for i, part in enumerate(files)]
    return analyze(paths, presets=EVERY, group_by=["host"], **more)


# ---------------------------------------------------------------- on policy, and what is read


NO_GAP = dict.fromkeys(("k1", "k2", "k3", "chi2_token", "chi2_sequence", "tv", "f_1_1", "prob_diff_max"), 0)
NO_GAP |= {"log_ratio_std": 0, "khat_tokens": None, "pearson": pytest.approx(1.0, rel=1e-12)}
NO_GAP |= dict.fromkeys(("mean_ratio", "ess_tokens", "ess_sequences", "ppl_ratio", "mult_prob_error"), 1)
IDENTITY = dict.fromkeys(("weight_mean", "weight_min", "weight_max", "ess_tokens", "ess_sequences"), 1)
IDENTITY |= dict.fromkeys(("weight_std", "ppo_kl", "truncated_high", "truncated_low", "tokens_rejected"), 0)
IDENTITY |= dict.fromkeys(("sequences_dropped", "sequences_touched", "catastrophic_tokens", "vetoed"), 0)


def test_on_policy_there_is_no_gap_and_every_preset_leaves_everything_alone(rows, tmp_path):
    alike = [row | dict.fromkeys(POLICIES, row["rollout_log_probs"]) for row in rows[:24]]
    every = (*catalogue.load().values(), *MADE)
    summary = analyze([oracles.write(alike, tmp_path / "a.parquet")], presets=every)
    for prefix in oracles.DRIFTS:
        assert {name: summary.whole[prefix + name].value for name in NO_GAP} == NO_GAP
    for preset in every:
        found = summary.preset(preset.name)
        assert {name: found[name].value for name in IDENTITY} == IDENTITY, preset.name


@pytest.mark.parametrize("column", [*POLICIES, "advantages"])
def test_a_preset_reads_no_column_that_its_needs_do_not_name(rows, whole_and_rows, tmp_path, column):
    fewer = [{name: x for name, x in row.items() if name != column} for row in rows]
    found = analyzed([fewer], tmp_path, sequences=tmp_path / "rows.parquet")
    able = [one.name for one in EVERY if column not in one.lacking(())]
    needs = {one.name: [] if one.name in able else [column] for one in EVERY}
    assert {name: one.needs for name, one in found.presets.items()} == needs
    names = [name for name in whole_and_rows[1].columns if name.split(".")[0] in able]
    assert_frame_equal(pl.read_parquet(tmp_path / "rows.parquet")[names], whole_and_rows[1][names])


# ---------------------------------------------------------------- cutting, order


CUTS = {
    "row groups of 1": ([range(72)], {"row_group": 1, "batch_tokens": 1}),
    "row groups of 7": ([range(72)], {"row_group": 7}),
    "shuffled files": (np.split((7 * np.arange(72) + 1) % 72, [27, 30]), {"batch_tokens": 300}),
}


@pytest.mark.parametrize("cut", CUTS)
def test_cutting_the_dump_changes_no_number(rows, whole_and_rows, tmp_path, cut):
    (whole, whole_rows), (files, how) = whole_and_rows, CUTS[cut]
    table = tmp_path / "rows.parquet"
    summary = analyzed([[rows[at] for at in file] for file in files], tmp_path, sequences=table, **how)
    assert different(whole, summary) == {}
    assert summary.worst == whole.worst
    assert same(*(one.charts.model_dump(mode="json") for one in (summary, whole)))
    assert len(whole.lengths.curve) > 3
    order = np.argsort(np.concatenate(files))
    assert_frame_equal(pl.read_parquet(table)[order], whole_rows, rel_tol=1e-12, abs_tol=0)


def test_the_seed_moves_intervals_and_nothing_else(rows, whole, tmp_path):
    other = analyzed([rows], tmp_path, seed=1)

    assert different(whole, other, but=": (low|high) ") == {}
    assert len(different(whole, other)) > 100


# ---------------------------------------------------------------- packing, masks


def states(rows: list[dict[str, Any]], folder: Path, presets: Any = ALONE) -> tuple[Any, list[State]]:
    """Make a state per row, each read from a file of its own; rows without a token go with the row before."""
    files: list[list[dict[str, Any]]] = []
    for row in rows:
        if any(row["response_mask"]):
            files.append([row])
        else:
            files[-1].append(row)
    study, found = None, []
    for i, part in enumerate(files):
        dump = open_dump([oracles.write(part, folder / f"row{i}.parquet")], group_by=["host"])
        study = study or replace(Study.of(dump.columns, presets), group_by=("host",))
        found += [Observe(study)(batch).state for batch in dump.batches()]
    return study, found


def read(study: Any, whole: State, like: Result) -> Result:
    return readout.summary(Readout(study, whole), study.presets, like.dump, RUN)


def test_packed_sequences_count_as_they_do_alone(rows, whole, tmp_path):
    study, alone = states(rows, tmp_path)
    found = read(study, reduce(State.merge, alone), whole)
    assert len(ALONE) > 30
    assert different(whole, found, but=of_presets(one for one in EVERY if one not in ALONE)) == {}


def test_states_merge_in_any_order_and_nesting(rows, whole, tmp_path):
    study, alone = states(rows, tmp_path, EACH[:8])
    backwards, level = reduce(lambda merged, one: one.merge(merged), alone[::-1]), alone
    while len(level) > 1:  # a tree, the right operand first
        pairs = zip(level[::2], level[1::2], strict=False)
        level = [b.merge(a) for a, b in pairs] + level[len(level) // 2 * 2 :]
    assert different(read(study, backwards, whole), read(study, level[0], whole)) == {}


def test_a_masked_token_counts_like_one_that_is_not_there(rows, whole, tmp_path):
    """Except for what is about the response as sampled: positions, turns, its length."""
    dropped = []
    for row in rows:
        live = [t for t, m in enumerate(row["response_mask"]) if m]
        short = {n: [v[t] for t in live] if isinstance(v, list) else v for n, v in row.items()}
        dropped.append({name: value for name, value in short.items() if name != "response_mask"})
    sampled = f"{of_presets(BY_TURN)}|_segment_|@(position|turn)/|pg_loss_seq_norm"
    assert different(whole, analyzed([dropped], tmp_path), but=sampled) == {}


def test_masked_values_are_never_read(rows, whole, tmp_path):
    odd = copy.deepcopy(rows)
    for row in odd:
        for t, m in enumerate(row["response_mask"]):
            if not m:
                row["rollout_log_probs"][t], row["old_log_probs"][t] = 0.0, -9999.0
                row["current_log_probs"][t] = row["advantages"][t] = float("nan")

    assert different(whole, analyzed([odd], tmp_path)) == {}

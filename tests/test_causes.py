"""Every cause is a class: its fault, made in healthy rows, is named; its texts are complete."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from faults import Policy
from faults import responses as sampled
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.diagnosis.cause import TRAINERS, Cause, Found
from offpol_diag.diagnosis.metadata import Metadata
from offpol_diag.diagnosis.profile import Profile
from offpol_diag.diagnosis.registry import CAUSES
from offpol_diag.diagnosis.rows import Rows, jittered
from offpol_diag.report.words import filled
from tests import faults

IDS = {one.id: one for one in CAUSES}
SEEDS = range(5)
MADE = [one.id for one in CAUSES if type(one).make is not Cause.make]


@cache
def healthy(seed):
    """Return rows of a policy that samples and scores alike but for rounding: 320 responses to 40 prompts."""
    policy = Policy(seed)
    given = sampled(lambda t: policy, policy, seed=seed)
    q, p = (np.concatenate(given[name]).astype(float) for name in ("rollout_log_probs", "old_log_probs"))
    lengths = [len(one) for one in given["token_ids"]]
    return Rows(
        q,
        p,
        np.concatenate(([0], np.cumsum(lengths))),
        np.concatenate([np.arange(n) for n in lengths]),
        np.concatenate(given["token_ids"]),
        scalars={"group_id": given["group_id"], "sequence_id": [f"s{i}" for i in range(len(lengths))]},
    )


def diagnosed(rows, tmp_path):
    """Diagnose a dump of rows, with what their metadata records."""
    recorded = dict(entry.split(": ") for entry in rows.metadata if entry)
    return faults.diagnosed(tmp_path, faults.columns(rows), recorded=recorded, drop=())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", MADE)
def test_a_fault_made_in_healthy_rows_is_named_first_and_no_bug_is_named_beside_it(tmp_path, name, seed):
    cause = IDS[name]
    rows = cause.make(healthy(seed), np.random.default_rng(seed))
    found = diagnosed(rows, tmp_path)
    assert found.causes[0].id == name, found.headline
    assert faults.bugs(found) == [name] * (cause.kind != "honest")
    assert all((found.causes[0].statistic, found.causes[0].statement))
    if found.causes[0].after:
        assert found.causes[0].after.k3 < 0.01


@pytest.mark.parametrize("seed", SEEDS)
def test_healthy_rows_are_no_bug(tmp_path, seed):
    found = diagnosed(healthy(seed), tmp_path)
    assert (found.verdict, [one.id for one in found.causes]) == ("healthy", ["numerics"])


@pytest.mark.parametrize("side", ["q", "p"])
@pytest.mark.parametrize("base", [2, 10])
def test_a_logarithm_to_another_base_is_no_temperature_and_no_likeliest_token(tmp_path, side, base):
    rows = healthy(0)
    found = diagnosed(replace(rows, **{side: getattr(rows, side) / np.log(base)}), tmp_path)
    assert (found.verdict, found.causes) == ("cannot_tell", [])
    assert "token for token" in found.headline
    assert f"to base {base}" in found.headline


@pytest.mark.parametrize("offset", [6, 17])
def test_a_row_that_is_only_shifted_from_a_token_on_is_not_in_another_order(offset):
    rows = healthy(0)
    moved = rows.p.copy()
    for a, b in zip(rows.starts[:-1], rows.starts[1:], strict=True):
        moved[a + 20 : b] = np.roll(moved[a + 20 : b], offset)
        moved[a + 20 : a + 20 + offset] = -1.0
    assert IDS["segment_order"].look(replace(rows, p=moved)) is None


@pytest.mark.parametrize(("share", "helps"), [(0.0, True), (0.5, True), (0.95, False), (1.0, False)])
def test_a_repair_has_to_bring_tokens_at_least_halfway_to_the_others(share, helps):
    rows = healthy(0)
    concerned = rows.index % 2 == 0
    broken, repaired = (replace(rows, p=rows.p - x * concerned) for x in (0.5, 0.5 * share))
    assert Found(IDS["boundary"], "", broken, concerned, repaired).helps is helps


@pytest.mark.parametrize(("size", "excused"), [((0.3, 0.3), True), ((0.03, 0.3), False)])
@pytest.mark.parametrize("column", ["step", "host"])
def test_a_format_excuses_ten_times_what_it_has_at_the_dumps_own_steps_and_hosts(
    tmp_path, column, size, excused
):
    """W4A16 is published up to K3 0.03; where another step or host has 0.0003, 0.03 is something else."""
    rows = healthy(0)
    part = np.arange(rows.sequences) % 2
    columns = {"policy_lag": [0] * rows.sequences, column: part.tolist()}
    sizes = np.where(part == 1, size[1], size[0])[rows.owner]
    rows = jittered(rows, sizes, np.random.default_rng(0), **columns)
    metadata = Metadata(quantised="quantization: awq")
    assert Profile(replace(rows, metadata=metadata, synced=0.012)).inexcusable is not excused


# ---------------------------------------------------------------- texts


@pytest.mark.parametrize("name", IDS)
def test_a_cause_is_complete_and_what_looks_like_it_exists(name):
    cause = IDS[name]
    assert all((cause.title, cause.apart, cause.sentence))
    assert cause.looks.endswith(".")
    assert cause.kind == "honest" or all((cause.confirm, cause.fix))
    assert [one for one in cause.apart if one not in IDS or one == name] == []
    assert set(cause.settings) == set(TRAINERS) or name == "segment_order"
    assert "{" not in filled(cause, cause.confirm) + filled(cause, cause.fix)


def test_every_thread_is_named_in_full_and_once():
    every = [one for cause in CAUSES for one in cause.threads]
    at = [name for one in every for name in one.at]
    assert len(every) >= 50
    assert [name for name in at if not re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", name)] == []
    assert len(at) == len(set(at))


def explain(*words):
    return CliRunner().invoke(app, ["doctor", "--explain", *words])


@pytest.mark.parametrize("name", IDS)
def test_a_cause_is_printed_whole_at_any_width_without_a_dump(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cause = IDS[name]
    for width in ("80", "140"):
        monkeypatch.setenv("COLUMNS", width)
        ran = explain(name)
        assert ran.exit_code == 0
        lines, said = ran.stdout.splitlines(), "".join(ran.stdout.split())
        assert lines[0].startswith(f"{name}: ")
        assert max(map(len, lines)) <= int(width)
        texts = (cause.title, cause.looks, *cause.settings.values(), *cause.apart.values())
        texts += tuple(filled(cause, text) for text in (cause.confirm, cause.fix) if text)
        assert [text for text in texts if "".join(text.replace("`", "").split()) not in said] == []
    assert list(tmp_path.iterdir()) == []


def test_without_a_cause_all_are_listed():
    ran = explain("list")
    assert ran.exit_code == 0
    rows = [line.split()[0] for line in ran.stdout.splitlines() if line.split()[:1]]
    assert [name for name in IDS if name not in rows] == []


REFUSED = [
    (("weights_not_sync",), "there is no cause 'weights_not_sync'", "did you mean weights_not_synced"),
    (("zzz",), "there is no cause 'zzz'", "`offpol-diag doctor --explain list` lists all"),
]


@pytest.mark.parametrize(("words", "error", "hint"), REFUSED, ids=lambda one: str(one)[:20])
def test_what_cannot_be_explained_is_refused(words, error, hint):
    ran = explain(*words)
    assert ran.exit_code == 2
    first, last = ran.stderr.strip().split("\n\n")
    assert (first[:7], last[:6]) == ("error: ", "hint: ")
    assert error in first
    assert hint in last


@pytest.mark.parametrize("command", ["doctor", "analyze"])
def test_an_answer_that_names_a_cause_ends_with_the_command_that_explains_it(command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    dump = faults.dump(str(tmp_path / "shift.parquet"), "shift")
    call = [command, dump, *(["--presets", "token_is", "--no-html"] if command == "analyze" else [])]
    lines = CliRunner().invoke(app, call).stdout.splitlines()
    assert lines[-1] == "explain offpol-diag doctor --explain off_by_one"
    assert explain(lines[-1].split()[-1]).exit_code == 0

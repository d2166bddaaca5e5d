"""A place is found where it was planted in log-probs of a real small model, and none elsewhere."""

from __future__ import annotations

import re
import time
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from drawn import html, markdown, terminal

from offpol_diag.core.gap import DRIFTS, Tokens
from offpol_diag.core.kept_rows import Sample
from offpol_diag.core.state import groups_of
from offpol_diag.diagnosis import splits
from offpol_diag.diagnosis.locate import GAIN, LEVEL, MOST, locate
from offpol_diag.diagnosis.rows import Rows
from offpol_diag.dump.batch import joined
from offpol_diag.dump.read import open_dump
from offpol_diag.report import answered
from offpol_diag.result import loads
from tests.reading import analyze

ROOT = Path(__file__).parents[1]


@cache
def healthy():
    """Return rows of a healthy run with columns that say nothing of it; prompts come again after 4 steps."""
    table = pq.read_table(ROOT / "sample_data" / "healthy.parquet").to_pydict()
    many, chance = len(table["step"]), np.random.default_rng(0)
    more = {
        "policy_lag": [step % 3 for step in table["step"]],
        "host": [f"h{i}" for i in chance.integers(0, 4, many)],
        "dp_rank": chance.integers(0, 4, many).tolist(),
        "image": chance.integers(0, 2, many).astype(bool).tolist(),
        "difficulty": chance.integers(0, 20, many).tolist(),
        "prompt_length": chance.integers(40, 240, many).tolist(),
    }
    groups = [f"{step % 4}-{group % 8}" for step, group in zip(table["step"], table["group_id"], strict=True)]
    return table | more | {"group_id": groups}


def tokens(given):
    """Yield of each row what a place is said by: arrays over its tokens, and its values."""
    seen = {}
    for i, mask in enumerate(given["response_mask"]):
        mask = np.array(mask, bool)
        at, there = np.arange(len(mask)), np.flatnonzero(mask)
        key = given["step"][i], given["group_id"][i]
        seen[key] = seen.get(key, -1) + 1
        first = there[np.unique(np.array(given["token_ids"][i])[there], return_index=True)[1]]
        before = given["prompt_length"][i]
        whole = before + len(mask)
        yield {name: given[name][i] for name in given} | {
            "at": at,
            "turn": np.cumsum(np.diff(mask.astype(int), prepend=0) == 1) - 1,
            "end": there[-1] - at,
            "absolute": before + at,
            "share": (before + at + 0.5) / whole,
            "piece": np.isin(before + at, (round(0.25 * whole), round(0.75 * whole))),
            "place": seen[key],
            "length": len(there),
            "first": np.isin(at, first),
            "chance": np.random.default_rng(i).uniform(size=len(mask)),
        }


def planted(inside, nats=None, given=None):
    """Damage tokens: the old column holds log-probs of others there, or is off by so many nats.

    Args:
        inside: which tokens are damaged, in the names that `tokens` yields.
        nats: standard deviation of the noise that is added.
        given: rows; None for those of the healthy run.
    """
    given, chance, found = given or healthy(), np.random.default_rng(1), []
    pool = np.concatenate(given["old_log_probs"])
    pool = pool[pool < -0.5]  # of tokens that were in doubt
    for row in tokens(given):
        p = np.array(row["old_log_probs"])
        noisy = np.minimum(p + (nats or 0) * chance.normal(size=len(p)), 0)
        other = chance.choice(pool, len(p)) if nats is None else noisy
        found.append(np.where(eval(inside, {}, row), other, p))
    return given | {"old_log_probs": found}


def read(path, given):
    """Write a dump with these columns, and return its rows as the diagnosis sees them."""
    pq.write_table(pa.table(given), path)
    batch = joined([*open_dump([str(path)]).batches()])
    groups = groups_of(batch.key, batch.steps)
    sample = Sample.of(Tokens.of(batch).terms(DRIFTS[0]), groups)
    return Rows.of(sample.read())


def places(path, given):
    return locate(read(path, given))


PLACES = """
turn > 0                | turn              | after the first tool output
turn > 1                | turn              | from turn 3 on
place > 0               | place_in_group    | in all rows of a prompt but the first
step > 3                | visit             | in rows of prompts that come again
end == 0                | from_end          | at the last token of a response
at == 0                 | position          | at the first token of a response
at >= 40                | position          | from token 40 of a response on
abs(at - 25) < 6        | position          | from token 20 of a response to token 30 of a response
absolute >= 256         | absolute_position | from position 256 of prompt and response on
share > 0.8             | row_share         | from 80% of the row on
piece                   | row_piece         | at a quarter or three quarters of the row
policy_lag > 0          | policy_lag        | from lag 1 on
step > 4                | step              | from step 5 on
length > 150            | length            | from a length of 152 tokens on
~first                  | first_use         | at later uses of a token id in a response
advantages < 0          | advantage         | where A < 0
host == "h2"            | host              | with host = h2
host != "h2"            | host              | with host = h0 or h1 or h3
dp_rank == 1            | dp_rank           | with dp_rank = 1
image                   | image             | with image = True
difficulty > 14         | difficulty        | from difficulty 15 on
image & (at > 40)       | image and position | with image = True, from token 41 of a response on
"""
"""What is damaged, the split that tells it apart, and the tokens inside in words."""
PLACED = [tuple(map(str.strip, line.split("|"))) for line in PLACES.strip().splitlines()]
HOST = 'host == "h2"'


@pytest.mark.parametrize("nats", [None, 0.5], ids=["other log-probs", "noise"])
@pytest.mark.parametrize(("inside", "split", "words"), PLACED)
def test_a_planted_place_is_found(tmp_path, inside, split, words, nats):
    found = places(tmp_path / "a.parquet", planted(inside, nats))[0]
    assert (found.split, found.words) == (split, words)
    assert found.inside > 100 * found.outside
    flags = np.concatenate([eval(inside, {}, row) & (row["at"] >= 0) for row in tokens(healthy())])
    mask = np.concatenate(healthy()["response_mask"]).astype(bool)
    beside = 2 if split == "row_piece" else 1  # the tokens on both sides of a cut
    assert found.share == pytest.approx(beside * flags[mask].mean(), rel=0.3 if beside > 1 else 0.02)


EVERYWHERE = ("at < 0", "at >= 0", "chance < 0.1", "place == length % 8", "end > 2")
"""Nothing, all tokens, single ones anywhere, single sequences, more than 90% of the tokens."""


@pytest.mark.parametrize("nats", [None, 0.5], ids=["other log-probs", "noise"])
@pytest.mark.parametrize("inside", EVERYWHERE)
def test_no_place_is_found_where_there_is_none(tmp_path, inside, nats):
    assert places(tmp_path / "a.parquet", planted(inside, nats)) == []


FOUND = {
    "n02_cp_label_roll": ["row_share"],
    "n11_bf16_positions": ["absolute_position", "position"],
    "n12_tool_unattended": ["turn"],
    "n20_adapter_switch": ["position"],
    "collapse": ["step"],
    "stale": ["policy_lag"],
}


DUMPS = sorted([*ROOT.glob("tests/field/*.parquet"), *ROOT.glob("sample_data/*.parquet")])


@pytest.mark.parametrize("path", DUMPS, ids=lambda path: path.stem)
def test_dumps_have_the_place_that_is_true_of_them(tmp_path, path):
    found = places(tmp_path / "a.parquet", pq.read_table(path).to_pydict())
    assert [one.split for one in found] == FOUND.get(path.stem, [])


def test_an_established_place_has_a_level_a_gain_and_few_enough_tokens(tmp_path):
    path = tmp_path / "a.parquet"
    assert not places(path, planted(HOST, 0.03))  # K3 of 0.0004
    for one in places(path, planted("at >= 10")) + places(path, planted(HOST, 0.1)):
        assert one.inside >= LEVEL
        assert one.gain >= GAIN
        assert one.share <= MOST


@pytest.mark.parametrize("groups", [4, 24])
def test_a_few_groups_are_no_host(tmp_path, groups):
    """Groups of which half are damaged, each on a host of its own choosing: by chance all of these on one."""
    given = {name: column[: 8 * groups] for name, column in healthy().items()}
    given |= {"group_id": [i // 8 for i in range(8 * groups)], "step": [0] * 8 * groups}
    given |= {"host": ["ab"[i // 8 % 2] for i in range(8 * groups)]}
    found = places(tmp_path / "a.parquet", planted('host == "b"', 0.5, given))
    assert [one.split for one in found] == ["host"] * (groups > 4)


def test_places_of_64k_tokens_are_found_in_0_3_seconds(tmp_path):
    given = planted("image & (at > 40)")
    longer = {name: column + column[:200] for name, column in given.items()}
    longer["group_id"] = [f"{i // 8}" for i in range(len(longer["step"]))]
    rows = read(tmp_path / "a.parquet", longer)
    assert rows.tokens > 64_000
    begin = time.process_time()
    assert locate(rows)
    assert time.process_time() - begin < 0.3


# ---------------------------------------------------------------- reports


@pytest.fixture(scope="module")
def tools():
    """Return the result of a dump whose tokens after a tool output differ."""
    return analyze([str(ROOT / "tests/field/n12_tool_unattended.parquet")], presets=())


def test_the_place_stands_in_every_form(tools):
    said = "K3 is 0.14 after the first tool output and 1.0e-4 before it"
    (place,) = tools.diagnosis.where
    lines = [line for line in terminal(tools).splitlines() if line.startswith("Where")]
    assert [line.split(maxsplit=1)[1] for line in lines] == [f"{said}."]
    assert f"**Where** {said}." in markdown(tools)
    for drawn in (markdown(tools), html(tools)):
        assert "Where the mismatch lives" in drawn
        assert place.measure in drawn
    assert said in re.sub("<[^>]*>", "", html(tools))
    assert [one.rows[0][0] for one in answered(tools).tables if one.id == "where"] == [
        "after the first tool output"
    ]
    assert loads(tools.model_dump_json(), "result.json").diagnosis.where == [place]


def test_neither_side_is_accused_by_a_place():
    measures = [one.measure for one in splits.SPLITS] + [splits.KIND, splits.MACHINE]
    assert not [one for one in measures for words in ("engine", "trainer", "rollout") if words in one]


def test_mismatch_by_turn_is_a_table_where_there_are_turns(tools):
    (table,) = (one for one in answered(tools).tables if one.id == "by-turn")
    assert [row[0] for row in table.rows] == [one.key for one in tools.at("turn")]
    assert "By turn of the response" in markdown(tools)
    assert "By turn of the response" in html(tools)
    single = analyze([str(ROOT / "tests/frozen/dumps/shift.parquet")], presets=())
    assert "By turn" not in markdown(single) + html(single)

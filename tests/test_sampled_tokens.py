"""What sampled tokens tell of a logged number: its base, token, model and sampler; and look-alikes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import PROMPTS, WORDS, Policy, colder, draw, log_softmax, penalised, pick
from faults import responses as sampled

from offpol_diag.analyze import analyze
from offpol_diag.diagnosis.candidates import deciding, fitting
from offpol_diag.diagnosis.definition import faded
from offpol_diag.diagnosis.honest import Seen
from offpol_diag.diagnosis.laws import carried, systematic
from offpol_diag.diagnosis.rows import Rows
from offpol_diag.diagnosis.sampled import _not_updated as before_updates
from offpol_diag.diagnosis.signatures import sentinels, special_tokens

OLD = Policy()
NEW = OLD.moved(0.3)
"""Weights of another step: what is honestly off by 0.2 nats a token."""


@cache
def honest(size=0.0, temperature=1.0):
    """Return a dump whose trainer is right: the same weights, or others."""
    return sampled(lambda t: colder(temperature, OLD.moved(size)), colder(temperature, OLD))


def each(name, change, given=None):
    """Return a dump with a column changed: `change` of (row, its values, the other column's)."""
    given = given or honest()
    other = "old_log_probs" if name == "rollout_log_probs" else "rollout_log_probs"
    rows = zip(given[name], given[other], strict=True)
    return given | {name: [np.float32(change(i, x, y)) for i, (x, y) in enumerate(rows)]}


def rng(i):
    return np.random.default_rng(i)


def pieces(i, q, p):
    """Sum over pieces of one to three tokens, written at the first."""
    starts = np.unique(np.append(0, np.cumsum(rng(i).integers(1, 4, len(q)))))
    starts = starts[starts < len(q)]
    found = np.zeros(len(q))
    found[starts] = np.add.reduceat(q, starts)
    return found


def likeliest(given):
    """Log the likeliest token's log-prob: of the same policy, recomputed along the sampled tokens."""
    rows = []
    for ids, group in zip(given["token_ids"], given["group_id"], strict=True):
        before = np.append(-1, ids[:-1])
        logits = [OLD.begin[group] / (1 + t) + (OLD.after[b] if b >= 0 else 0) for t, b in enumerate(before)]
        rows.append(np.float32(log_softmax(np.array(logits)).max(-1)))
    return given | {"rollout_log_probs": rows}


def drafted():
    """Sample by speculative decoding, and log the draft model's log-prob of an accepted token."""
    chance, draft, group = rng(3), OLD.moved(1.0), np.repeat(np.arange(PROMPTS), 8)
    before, tried = None, np.zeros(len(group), int)
    seen = np.zeros((len(group), WORDS), bool)
    columns = {"rollout_log_probs": [], "old_log_probs": [], "token_ids": []}
    for t in range(50):
        own, theirs = (policy.log_probs(group, t, before, seen) for policy in (OLD, draft))
        guess = draw(theirs, chance)
        fits = np.exp(pick(own, guess) - pick(theirs, guess))
        taken = (tried < 3) & (chance.random(len(group)) < fits)
        left = np.log(np.maximum(np.exp(own) - np.exp(theirs), 1e-12))
        other = np.where(tried < 3, draw(left, chance), draw(own, chance))
        token = np.where(taken, guess, other)
        columns["rollout_log_probs"].append(np.where(taken, pick(theirs, token), pick(own, token)))
        noise = 1 + 0.005 * chance.normal(size=len(group))
        columns["old_log_probs"].append(pick(own, token) * noise)
        columns["token_ids"].append(token)
        before, tried = token, np.where(taken, tried + 1, 0)
    return {name: list(np.array(x).T) for name, x in columns.items()} | {"group_id": group.tolist()}


def noisy(size):
    """Compute the trainer's log-probs with noise of its logits, anew for each sequence."""
    return each("old_log_probs", lambda i, p, q: p - size * np.expm1(p) * rng(i).normal(size=len(p)))


def part(temperature, every, raw=False):
    """Sample every so many sequences at another temperature that one column does not know of."""
    cold = sampled(lambda t: colder(temperature, OLD), OLD, logged=OLD if raw else None, seed=5)
    names = ("rollout_log_probs", "old_log_probs", "token_ids")
    rows = {n: [(cold if i % every == 0 else honest())[n][i] for i in range(len(cold[n]))] for n in names}
    scored = {"old_log_probs": rows["old_log_probs"]}
    if raw:  # the trainer divides by the temperature, and the engine logs what it had before
        right = sampled(lambda t: colder(temperature, OLD), colder(temperature, OLD), seed=5)
        scored = {
            "old_log_probs": [
                right["old_log_probs"][i] if i % every == 0 else x
                for i, x in enumerate(rows["old_log_probs"])
            ]
        }
    return honest() | rows | scored


def exchanged(given):
    names = ("rollout_log_probs", "old_log_probs")
    return given | dict(zip(names, (given[name] for name in reversed(names)), strict=True))


FAULTS = {
    "log 2 in the engine": ("log_base", lambda: each("rollout_log_probs", lambda i, q, p: q / np.log(2))),
    "log 10 in the trainer": ("log_base", lambda: each("old_log_probs", lambda i, p, q: p / np.log(10))),
    "sums over pieces": ("summed_pieces", lambda: each("rollout_log_probs", pieces)),
    "the likeliest token": ("top1_logged", lambda: likeliest(honest())),
    "a draft model": ("draft_log_probs", drafted),
    "a penalty": ("repetition_penalty", lambda: sampled(lambda t: penalised(OLD, 1.3), OLD)),
    "a small penalty": ("repetition_penalty", lambda: sampled(lambda t: penalised(OLD, 1.1), OLD)),
    "dropout": ("stochastic_forward", lambda: noisy(0.2)),
    "columns exchanged": ("columns_exchanged", lambda: exchanged(honest(0.3))),
    "exchanged, of weights that hardly differ": ("columns_exchanged", lambda: exchanged(honest(0.1))),
    "a part at 0.6": ("mixed_temperature", lambda: part(0.6, 4)),
    "a part at 0.6, raw": ("mixed_temperature", lambda: part(0.6, 4, raw=True)),
    "a mean": (
        "copied_mean",
        lambda: each("rollout_log_probs", lambda i, q, p: np.full(len(q), q.mean())),
    ),
}
HONEST = {
    "the same weights": honest,
    "other weights": lambda: honest(0.3),
    "another model": lambda: honest(1.0),
    "a temperature on both sides": lambda: honest(temperature=0.6),
    "both certain, other weights": lambda: honest(0.1, 0.2),
}


def diagnosed(tmp_path, given, *more, recorded=None):
    names = ("rollout_log_probs", "old_log_probs", "token_ids", "group_id", *more)
    table = pa.table({name: given[name] for name in names})
    if recorded:
        table = table.replace_schema_metadata({"offpol_diag": json.dumps(recorded)})
    pq.write_table(table, tmp_path / "d.parquet")
    return analyze([str(tmp_path / "d.parquet")], presets=()).diagnosis


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_named_and_nothing_else(tmp_path, name):
    cause, make = FAULTS[name]
    found = diagnosed(tmp_path, make())
    assert (found.verdict, [one.id for one in found.causes if one.kind == "bug"]) == ("bug", [cause])


@pytest.mark.parametrize("name", HONEST)
def test_a_look_alike_is_no_bug(tmp_path, name):
    assert diagnosed(tmp_path, HONEST[name]()).verdict != "bug"


@pytest.mark.parametrize("name", ["log 2 in the engine", "log 10 in the trainer", "sums over pieces"])
def test_what_is_undone_exactly_leaves_rounding(tmp_path, name):
    (first,) = diagnosed(tmp_path, FAULTS[name][1]()).causes
    assert first.exact
    assert first.after.k3 < 1e-4


def certain(share):
    """Return a dump in which the engine logs 0.0 where it is certain, and the trainer doubts a few of these.

    At a `share` of all tokens, whatever they are, 0.0 stands for a missing value.
    """

    def change(i, q, p):
        chance = rng(i)
        zero = chance.random(len(q)) < 0.1
        doubt = -chance.exponential(0.4, len(q)) * (chance.random(len(q)) < 0.12) - 1e-4
        p[:] = np.where(zero, doubt, p)
        return np.where(zero | (chance.random(len(q)) < share), 0.0, q)

    given = honest(0.3)
    return each(
        "rollout_log_probs", change, given | {"old_log_probs": [x.copy() for x in given["old_log_probs"]]}
    )


@pytest.mark.parametrize(("share", "causes"), [(0.0, []), (0.05, ["sentinel"])])
def test_zeros_of_a_peaked_policy_are_no_sentinels(tmp_path, share, causes):
    """A missing value stands at tokens of all kinds; another model is seldom far off where one is certain."""
    found = diagnosed(tmp_path, certain(share))
    assert [one.id for one in found.causes if one.kind == "bug"] == causes


@pytest.mark.parametrize(("lowest", "causes"), [(-1.45, []), (-6.0, ["wrong_mask"])])
def test_a_token_that_truncated_sampling_left_alone_is_no_sentinel(lowest, causes):
    """Its log-prob is exactly 0.0; the trainer's is no further below it than below all others."""
    chance, many = rng(0), 40 * 64
    q, alone = -chance.uniform(0.1, 3.0, many), np.arange(many) % 16 < 3
    q[alone] = 0.0
    p = q - np.where(alone, -chance.uniform(lowest, -0.5, many), chance.uniform(0.1, 1.5, many))
    rows = Rows(q, p, np.arange(0, many + 1, 64), np.tile(np.arange(64), 40), chance.integers(0, 99, many))
    found = sentinels(rows)
    assert [one.cause for one in (found,) if one] == causes


@pytest.mark.parametrize(("around", "named"), [(0.04, True), (0.47, False)])
def test_an_id_is_scored_differently_where_the_tokens_before_it_agree(around, named):
    """Where weights differ, some id differs most."""
    chance, many = rng(0), 40 * 64
    ids = chance.integers(0, 31, many)
    q = np.where(ids == 5, -1.0, -3.0)
    p = q - np.where(ids == 5, 3.0, around * chance.choice([-1, 1], many))
    rows = Rows(q, p, np.arange(0, many + 1, 64), np.tile(np.arange(64), 40), ids)
    assert (special_tokens(rows) is not None) is named


def off_by(sizes):
    """Return a dump whose trainer is off by so much in each sequence, as a function of the token."""
    ids = honest()["token_ids"]
    return each("old_log_probs", lambda i, p, q: p + sizes[i] * np.expm1(p) * np.sin(37.0 * ids[i]) / 2)


def scored_after(size):
    """Return a dump of prompts of 8 to 47 tokens, its trainer off by `size` of the prompt's length."""
    given = honest()
    lengths = [8 + group for group in given["group_id"]]
    off = off_by([size(length) for length in lengths])
    return off | {"prompt_length": lengths}


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (lambda length: 0.02 * (47 - length), True),
        (lambda length: 0.01 * length, False),
        (lambda length: 0.4, False),
    ],
    ids=["padding", "absolute positions", "all alike"],
)
def test_padding_that_counts_is_told_by_the_length_of_the_prompt(tmp_path, size, told):
    found = diagnosed(tmp_path, scored_after(size), "prompt_length")
    assert ("prompt_positions" in [one.id for one in found.causes]) is told


@pytest.mark.parametrize("fades", [False, True])
def test_what_fades_within_a_window_may_be_padding_or_another_beginning_of_the_prompt(tmp_path, fades):
    """Where only short prompts differ, and those soon no more, the fix is not of padding alone."""
    given = scored_after(lambda length: 0.02 * (47 - length))
    if fades:
        q, p = given["rollout_log_probs"], given["old_log_probs"]
        soon = [np.exp(-np.arange(len(one)) / 12) for one in q]
        given["old_log_probs"] = [a + (b - a) * x for a, b, x in zip(q, p, soon, strict=True)]
    found = next(
        one for one in diagnosed(tmp_path, given, "prompt_length").causes if one.id == "prompt_positions"
    )
    assert ("another beginning of the prompt" in found.statement) is fades


@pytest.mark.parametrize("leaks", [True, False])
def test_the_first_of_a_pack_is_clean_where_packs_leak(tmp_path, leaks):
    given = honest()
    place = [i % 4 for i in range(len(given["group_id"]))]
    size = [0.4 if at or not leaks else 0.0 for at in place]
    off = off_by(size)
    found = diagnosed(tmp_path, off | {"pack_index": place}, "pack_index")
    assert ("packing_leak" in [one.id for one in found.causes]) is leaks


@pytest.mark.parametrize("clean", [1, 2, 0])
def test_without_a_place_in_the_pack_one_clean_sequence_of_each_says_that_packs_leak(tmp_path, clean):
    """Two clean ones of four, or none, are another fault."""
    many = len(honest()["group_id"])
    off = off_by([0.4 if rng(i // 4).permutation(4)[i % 4] >= clean else 0.0 for i in range(many)])
    given = off | {"pack_id": [i // 4 for i in range(many)], "group_id": list(range(many))}
    found = diagnosed(tmp_path, given, "pack_id")
    assert ("packing_leak" in [one.id for one in found.causes]) is (clean == 1)


IN_PROMPTS = rng(8).random((PROMPTS, WORDS)) < 0.2


@pytest.mark.parametrize("counts", [True, False])
def test_which_penalty_it_is_is_told_by_the_ids_of_the_prompt(tmp_path, counts):
    """A repetition penalty counts them, presence and frequency penalties do not."""
    given = sampled(lambda t: penalised(OLD, 1.3), OLD, known=IN_PROMPTS if counts else None)
    prompts = [np.flatnonzero(IN_PROMPTS[group]) for group in given["group_id"]]
    (one,) = diagnosed(tmp_path, given | {"prompt_ids": prompts}, "prompt_ids").causes
    assert one.id == "repetition_penalty"
    assert ("in the prompt too, as repetition_penalty does" in one.statement) is counts
    assert ("as presence_penalty and frequency_penalty do" in one.statement) is not counts
    assert one.fix.startswith("sample with repetition_penalty=1.0" if counts else "sample with presence")


@pytest.mark.parametrize("same", [True, False])
def test_tokens_after_equal_prompts_are_compared_and_no_others(tmp_path, same):
    """Rows of one group may follow different prompts, as turns of a conversation do."""
    given = noisy(0.2)
    prompts = [[group, 0 if same else row] for row, group in enumerate(given["group_id"])]
    found = diagnosed(tmp_path, given | {"prompt_ids": prompts}, "prompt_ids")
    assert ("stochastic_forward" in [one.id for one in found.causes]) is same


def test_a_context_that_differs_where_there_are_images_is_told_to_be_theirs(tmp_path):
    given = fading()
    image = [i % 8 < 3 for i in range(len(given["group_id"]))]
    right = honest()["old_log_probs"]

    def change(i, p, q):
        size = 2.0 * np.exp(-np.arange(len(p)) / 3) * image[i]
        return right[i] + size * np.expm1(right[i]) * rng(i).choice([-1, 1], len(p), p=[0.2, 0.8])

    spans = [[1, 7] if there else [] for there in image]
    for told in (spans, None):
        off = each("old_log_probs", change) | ({"image_spans": spans} if told else {})
        found = diagnosed(tmp_path, off, *(["image_spans"] if told else []))
        (one,) = [one for one in found.causes if one.id == "wrong_context"]
        assert ("images = some" in one.statement, "mrope" in one.fix) == (bool(told), bool(told))


ROW = np.arange(48)


def carriers(labels=None, scalars=None, ids=None):
    """Return what a mismatch of 48 rows of 64 tokens goes with; its level is given by row, its sign by id."""
    chance = rng(0)
    size = np.repeat(0.05 * (1.0 + (ROW * 0 if labels is None else labels)), 64)
    sign = chance.choice([-1, 1], 48 * 64)
    kinds = chance.integers(0, 12, 48 * 64)
    if ids:
        sign = np.where(kinds % 2, 1, -1)
    size = size * chance.uniform(0.8, 1.2, 48 * 64)
    q = np.full(48 * 64, -1.0)
    rows = Rows(q, q - sign * size * np.expm1(q), np.arange(0, 48 * 64 + 1, 64), np.tile(np.arange(64), 48))
    return carried(replace(rows, ids=kinds, scalars=scalars or {}))


@pytest.mark.parametrize(
    ("key", "labels", "scalars"),
    [
        ("length", ROW // 12, {"prompt_length": (64 * (1 + ROW // 12)).tolist()}),
        ("prompt", ROW % 8, {"group_id": (ROW % 8).tolist()}),
        ("pack", ROW // 4 % 3, {"pack_id": (ROW // 4).tolist()}),
        ("image", ROW % 3 == 0, {"image_spans": [[0, 9] if row % 3 == 0 else [] for row in ROW]}),
        ("group", ROW % 4 == 1, {"env": [("code", "math", "web", "qa")[row % 4] for row in ROW]}),
        ("kind", None, None),
    ],
)
def test_what_a_mismatch_goes_with_is_measured_against_shuffled_rows(key, labels, scalars):
    found = carriers(labels, scalars, ids=key == "kind")
    assert list(found) == [key]
    assert found[key][1] > 0.8
    shuffled = None if labels is None else rng(1).permutation(labels)
    assert key not in carriers(shuffled, scalars)


@pytest.mark.parametrize("shift", [0, 1])
def test_a_shift_behind_a_tools_answer_only_is_found(tmp_path, shift):
    """The mask has a hole of five tokens; what comes after it is shifted against the other column."""
    given = honest()
    masks = [(np.arange(len(q)) < 15) | (np.arange(len(q)) >= 20) for q in given["rollout_log_probs"]]
    moved = each("old_log_probs", lambda i, p, q: np.append(p[:20], np.roll(p[20:], shift)))
    found = diagnosed(
        tmp_path, moved | {"response_mask": [x.astype(np.int8) for x in masks]}, "response_mask"
    )
    assert [one.id for one in found.causes if one.kind == "bug"] == ["off_by_one"] * shift


BF16 = {"rollout_dtype": "bfloat16"}


def by_step(given, first=0, lag=0):
    """Give each of four steps a part of the prompts, at a recorded lag."""
    step = [first + group % 4 for group in given["group_id"]]
    return given | {"step": step, "policy_lag": [lag] * len(step)}


OTHERS = {
    "from step 0 on": (True, lambda: by_step(honest(1.0)), BF16),
    "nothing recorded": (False, lambda: by_step(honest(1.0)), None),
    "fp8 recorded": (False, lambda: by_step(honest(1.0)), {"rollout_dtype": "fp8"}),
    "step 0 not in the dump": (False, lambda: by_step(honest(1.0), 1), BF16),
    "at a lag": (False, lambda: by_step(honest(1.0), lag=1), BF16),
    "small": (False, lambda: by_step(honest(0.1)), BF16),
    "not at step 0": (False, lambda: by_step(late()), BF16),
    "noise of single tokens, and experts": (
        False,
        lambda: by_step(noisy(0.6)),
        BF16 | {"model": "Mixtral-8x7B"},
    ),
}


def late():
    """Return another model whose first step is that of the same weights."""
    right = honest()
    other = honest(1.0)
    names = ("rollout_log_probs", "old_log_probs", "token_ids")
    first = [group % 4 == 0 for group in right["group_id"]]
    return right | {name: [(right if at else other)[name][i] for i, at in enumerate(first)] for name in names}


@pytest.mark.parametrize("name", OTHERS)
def test_two_models_are_told_where_no_weights_and_no_format_explain_it(tmp_path, name):
    told, make, recorded = OTHERS[name]
    found = diagnosed(tmp_path, make(), "step", "policy_lag", recorded=recorded)
    assert ("model_differs" in [one.id for one in found.causes]) is told
    if told:
        assert "offpol-diag rescore" in found.causes[0].fix


@pytest.mark.parametrize("known", [True, False])
def test_an_edge_at_a_place_in_prompt_and_response_is_found_by_the_length_of_the_prompt(tmp_path, known):
    given = honest()
    lengths = [8 + group % 32 for group in given["group_id"]]
    off = off_by([1.0] * len(lengths))["old_log_probs"]
    edge = each("old_log_probs", lambda i, p, q: np.where(np.arange(len(p)) + lengths[i] < 45, p, off[i]))
    found = diagnosed(tmp_path, edge | {"prompt_length": lengths}, *(["prompt_length"] if known else []))
    said = "Beyond about token 45 of prompt and response the engine computes something else."
    assert (said in [one.statement for one in found.causes]) is known


def fading(part=1.0):
    """Return a dump whose mismatch falls with the place in the response, in a part of the sequences."""
    off = off_by([0.8] * len(honest()["group_id"]))["old_log_probs"]

    def change(i, p, q):
        there = i % 8 < 8 * part
        return p + there * (off[i] - p) / np.sqrt(1 + np.arange(len(p)))

    given = each("old_log_probs", change)
    return by_step(given) | {"prompt_length": [8 + group for group in given["group_id"]]}


FADING = ("step", "policy_lag", "prompt_length")


@pytest.mark.parametrize(
    ("part", "columns", "told"),
    [(1.0, FADING, True), (0.5, FADING, False), (1.0, FADING[:2], False), (1.0, FADING[1:], False)],
    ids=["every sequence", "a part of them", "no prompt_length", "no step"],
)
def test_a_prompt_that_was_changed_is_told_by_a_mismatch_that_fades(tmp_path, part, columns, told):
    """A pack that leaks has clean sequences; padding fades alike, and so do keys of older weights."""
    found = diagnosed(tmp_path, fading(part), *columns)
    assert ("wrong_context" in [one.id for one in found.causes]) is told


@pytest.mark.parametrize(("size", "told"), [(0.4, True), (0.02, False)])
def test_a_second_scoring_tells_a_forward_that_is_computed_with_noise(tmp_path, size, told):
    first, second = noisy(size), off_by([0.0] * len(honest()["group_id"]))
    again = [
        np.float32(p - size * np.expm1(p) * rng(10_000 + i).normal(size=len(p)))
        for i, p in enumerate(second["old_log_probs"])
    ]
    given = first | {"old_log_probs_repeat": again, "group_id": list(range(len(again)))}
    found = diagnosed(tmp_path, given, "old_log_probs_repeat")
    causes = [(one.id, one.statistic.partition(",")[0]) for one in found.causes if one.kind == "bug"]
    assert (("stochastic_forward", "scored a second time") in causes) is told


@pytest.mark.parametrize("leaks", [False, True])
def test_scatter_that_first_sequences_of_packs_lack_is_a_leak(tmp_path, leaks):
    """They are off, too, but each token as its like: nothing of another sequence stands before them."""
    given, alike = noisy(0.2), off_by([0.4] * len(honest()["group_id"]))
    place = [i % 4 for i in range(len(given["group_id"]))]
    old = [
        b if leaks and at == 0 else a
        for at, a, b in zip(place, given["old_log_probs"], alike["old_log_probs"], strict=True)
    ]
    found = diagnosed(tmp_path, given | {"old_log_probs": old, "pack_index": place}, "pack_index")
    assert [one.id for one in found.causes] == ["packing_leak" if leaks else "stochastic_forward"]


def test_another_model_scores_the_same_twice(tmp_path):
    given = honest(1.0)
    found = diagnosed(
        tmp_path, given | {"old_log_probs_repeat": given["old_log_probs"]}, "old_log_probs_repeat"
    )
    assert "stochastic_forward" not in [one.id for one in found.causes]


def scattered(i, p, noise):
    """Return log-probs with noise of the logits."""
    return np.float32(np.minimum(p - noise * np.expm1(p) * rng(20_000 + i).normal(size=len(p)), 0.0))


def trained(noise=0.0, moved=0.0, first=0.0, **columns):
    """Return a dump with the log-probs of the policy that is trained, in two minibatches a step.

    They differ by noise that is drawn anew, in minibatch 1 by `moved` as other weights do, in 0 by `first`.
    """
    given = honest()
    size = [first if i % 2 == 0 else moved for i in range(len(given["group_id"]))]
    off = off_by(size)["old_log_probs"]
    current = [scattered(i, p, noise) for i, p in enumerate(off)]
    index = [i % 2 for i in range(len(off))]
    return given | {"current_log_probs": current, "minibatch": index} | columns


NEEDS = {"minibatch": "needs the column minibatch", "again": "needs the column old_log_probs_repeat"}
CURRENT = {
    "dropout": (lambda: trained(noise=0.3), True, None, ("minibatch",)),
    "dropout and training": (lambda: trained(noise=0.3, moved=1.0), True, None, ("minibatch",)),
    "training": (lambda: trained(moved=1.0), False, None, ("minibatch",)),
    "written after the update": (lambda: trained(moved=1.0, first=1.0), False, "again", ("minibatch",)),
    "dropout, no minibatch": (lambda: trained(noise=0.3), False, "minibatch", ()),
    "training, no minibatch": (lambda: trained(moved=1.0, first=0.8), False, None, ()),
    "minibatches of each epoch": (
        lambda: trained(moved=1.0, minibatch=[0] * 320, ppo_epoch=[i % 2 for i in range(320)]),
        False,
        None,
        ("minibatch", "ppo_epoch"),
    ),
    "rounding": (lambda: trained(noise=0.03), False, None, ("minibatch",)),
}


@pytest.mark.parametrize("name", CURRENT)
def test_current_log_probs_before_any_update_tell_noise_from_training(tmp_path, name):
    make, told, needs, columns = CURRENT[name]
    found = diagnosed(tmp_path, make(), "current_log_probs", *columns)
    said = [(one.id, one.statement) for one in found.causes if one.kind == "bug"]
    assert [one for one, _ in said] == ["stochastic_forward"] * told
    assert all("current column" in statement for _, statement in said)
    untold = [one for one in found.undecidable if "current_log_probs" in one]
    assert [one.partition(": ")[2].rpartition(": ")[2] or one for one in untold] == (
        [NEEDS[needs]] if needs else []
    )


@pytest.mark.parametrize(("noise", "moved", "told"), [(0.3, 0.0, True), (0.0, 0.3, False), (0.0, 0.0, False)])
def test_a_current_column_that_scatters_makes_noise_of_the_trainer_a_candidate(noise, moved, told):
    """What training moves is common to tokens of one kind."""
    chance, many = rng(0), 40 * 64
    ids = chance.integers(0, 12, many)
    p = -1.0 - 0.1 * ids
    q = p + 0.2 * chance.normal(size=many) * np.expm1(p)
    current = p - (noise * chance.normal(size=many) + moved * np.sin(37.0 * ids)) * np.expm1(p)
    rows = Rows(q, p, np.arange(0, many + 1, 64), np.tile(np.arange(64), 40), ids, extra={"current": current})
    seen = Seen(rows, share=systematic(rows))
    found = {one.id: one for one in fitting(seen)}
    assert ("stochastic_forward" in found) is told
    if told:
        assert "current_log_probs differ" in found["stochastic_forward"].for_[0]
        assert "old_log_probs_repeat" in deciding(seen, [found["stochastic_forward"]]).text


@pytest.mark.parametrize("knows", [False, True])
def test_kept_mass_undoes_truncated_sampling_exactly(tmp_path, knows):
    """The engine renormalises over a part of the mass; a trainer that does so as well is right."""
    given = honest()
    own = [np.exp(np.float64(q)) for q in given["rollout_log_probs"]]
    mass = [np.float32(p + (1 - p) * rng(i).uniform(0.5, 1.0, len(p))) for i, p in enumerate(own)]
    cut = each("rollout_log_probs", lambda i, q, p: q - np.log(mass[i]))
    if knows:
        cut = each("old_log_probs", lambda i, p, q: p - np.log(mass[i]), cut)
    found = diagnosed(tmp_path, cut | {"kept_mass": mass}, "kept_mass")
    bugs = [one for one in found.causes if one.id == "truncated_sampling"]
    assert bool(bugs) is not knows
    if bugs:
        assert (bugs[0].after.approximate, bugs[0].after.k3 < 1e-4) == (False, True)


STEEP = [1.4, 0.7, 0.4, *[0.25] * 5]
"""|Δ|/(1 − π) of the first tokens after another prompt."""


@pytest.mark.parametrize(("begin", "told"), [(STEEP, True), ([1.4] * 3 + [0.9] * 5, False)])
def test_a_first_token_that_is_far_off_is_another_prompt_where_it_fades_at_once(tmp_path, begin, told):
    """Weights that were updated during a response are off alike for a while."""

    def change(i, p, q):
        size = np.append(begin, np.full(len(p), 0.01))[: len(p)]
        return p + size * np.expm1(p) * rng(i).choice([-1, 1], len(p), p=[0.3, 0.7])

    found = diagnosed(tmp_path, each("old_log_probs", change))
    assert ("wrong_context" in [one.id for one in found.causes]) is told


def rows_of(size, certain=0.0):
    """Return 40 sequences of 64 tokens, off by `size` [40, 64] of what they are uncertain of.

    From the middle on a part of the tokens is certain.
    """
    chance = rng(0)
    sure = (np.arange(64) >= 32) & (chance.random((40, 64)) < certain)
    q = np.where(sure, -1e-3, -1.0).ravel()
    p = q - size.ravel() * np.expm1(q) * chance.choice([-1, 1], q.shape)
    return Rows(q, p, np.arange(0, 40 * 64 + 1, 64), np.tile(np.arange(64), 40))


ALONG = np.tile(0.8 / np.sqrt(1 + np.arange(64)), (40, 1))
CUT = rng(1).uniform(0, 64, (40, 1))


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (rows_of(ALONG), True),
        (rows_of(ALONG, certain=0.4), False),
        (rows_of(np.where(np.arange(64) < CUT, 0.3, 0.005)), False),
        (rows_of(ALONG * (np.arange(40) % 4 > 0)[:, None]), False),
        (rows_of(np.full((40, 64), 0.3)), False),
    ],
    ids=["another prompt", "text that grows certain", "an update on the way", "packs", "level"],
)
def test_what_fades_for_another_reason_is_no_other_prompt(rows, told):
    assert (faded(rows) is not None) is told


def test_minibatches_that_count_anew_in_each_epoch_are_before_an_update_in_the_first_alone():
    p = np.full(8, -1.0)
    epoch, minibatch = [0, 0, 1, 1], [0, 1, 0, 1]
    scalars = {"step": [3] * 4, "ppo_epoch": epoch, "minibatch": minibatch}
    rows = Rows(p, p, np.arange(0, 9, 2), np.tile([0, 1], 4), scalars=scalars)
    assert before_updates(rows).tolist() == [True, False, False, False]

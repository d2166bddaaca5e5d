"""The diagnosis names the planted cause, beside its look-alikes, on real rollouts of the sample dumps."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from faults import Policy, anew, bugs, capped, colder, diagnosed, joined, old, rollout, seeded, write
from faults import responses as sampled
from scipy import stats

from offpol_diag.diagnosis.causes.ends import Boundary, WrongContext
from offpol_diag.diagnosis.causes.ids import SpecialToken
from offpol_diag.diagnosis.estimates import SURE, bound, common_share, percent
from offpol_diag.diagnosis.rows import Rows
from tests import faults
from tests.reading import analyze

ROOT = Path(__file__).parent.parent
SAMPLES = ("healthy", "quantized", "stale", "collapse")
HOSTS = ["abcd"[i % 4] for i in range(512)]


@cache
def columns(name):
    """Read a sample dump without masked tokens: column → one array or value per sequence."""
    table = pq.read_table(ROOT / "sample_data" / f"{name}.parquet").to_pydict()
    masks = [np.array(mask, bool) for mask in table["response_mask"]]
    found = {
        key: [np.array(row)[mask] for row, mask in zip(table[key], masks, strict=True)]
        for key in ("rollout_log_probs", "old_log_probs", "token_ids")
    }
    return found | {key: table[key] for key in ("step", "group_id", "policy_lag", "sequence_id")}


def permuted(given):
    """Give row i the train log-probs of row i + 1, padded with what a forward pass makes of padding."""
    p, chance = given["old_log_probs"], seeded()
    following = [(p[(i + 1) % len(p)][: len(mine)], len(mine)) for i, mine in enumerate(p)]
    rows = [np.concatenate((one, -chance.exponential(3, n - len(one)))) for one, n in following]
    return given | {"old_log_probs": rows}


def block(values):
    """Give six tokens of one response in five, from token 40 on, train log-probs of their own."""

    def change(i, p, q, ids):
        short = i % 5 or len(p) < 60
        return p if short else np.concatenate((p[:40], values(seeded(i), p[40:46]), p[46:]))

    return old(change)


def rare(i, x, value):
    """Put this value at one token in fifty."""
    return np.where(seeded(i).random(len(x)) < 0.02, value, x)


def bf16(x):
    return (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def onwards(start, shift):
    """Return a change that moves all values from `start` on by `shift` places."""
    return lambda i, p, q, ids: np.concatenate((p[:start], np.roll(p[start:], shift)))


FAULTS = {
    "off_by_one": old(lambda i, p, q, ids: np.roll(p, 1)),
    "off_by_one, the other way": old(lambda i, p, q, ids: np.roll(p, -1)),
    "off_by_one, by three": rollout(lambda i, q, p, ids: np.roll(q, 3)),
    "off_by_one, one row in ten": old(lambda i, p, q, ids: np.roll(p, 1) if i % 10 == 0 else p),
    "row_permutation": permuted,
    "sentinel, -9999": rollout(lambda i, q, p, ids: rare(7, q, -9999.0)),
    "sentinel, 0.0": rollout(lambda i, q, p, ids: rare(i, q, 0.0)),
    "sentinel, log 1/V": old(lambda i, p, q, ids: rare(i, p, np.log(1 / 48))),
    "boundary, last": old(lambda i, p, q, ids: np.append(p[:-1], -1 - 3 * seeded(i).random())),
    "boundary, first": rollout(lambda i, q, p, ids: np.append(-1 - 3 * seeded(i).random(), q[1:])),
    "special_token": old(lambda i, p, q, ids: np.where(ids == 4, p - 1.0, p)),
    "low_precision_storage": rollout(lambda i, q, p, ids: bf16(q)),
    "low_precision_storage, decimals": rollout(lambda i, q, p, ids: np.round(q, 3)),
}
BREAKS = {
    "retokenization": old(lambda i, p, q, ids: p if i % 10 else onwards(len(p) // 2, 1)(i, p, q, ids)),
    "retokenization, one early": old(
        lambda i, p, q, ids: p if i % 6 else np.concatenate((p[:5], p[6:], p[-1:]))
    ),
    "retokenization, a block that fades": block(lambda chance, p: p - np.array([9, 6, 3, 1.5, 0.8, 0.4])),
    "wrong_mask, a block": block(lambda chance, p: -1 - chance.exponential(2.5, 6)),
    "long_context": old(onwards(60, 3)),
}
"""What stale weights hide: in `collapse` they differ as much as unrelated columns do."""
PLANTED = [(fault, name) for fault in FAULTS for name in ("healthy", "collapse")]
PLANTED += [(fault, "healthy") for fault in BREAKS]


@pytest.mark.parametrize(("fault", "name"), PLANTED)
def test_the_planted_cause_is_named_first(tmp_path, name, fault):
    summary = analyze([write(tmp_path / "d.parquet", (FAULTS | BREAKS)[fault](columns(name)))], presets=())
    first = summary.diagnosis.causes[0]

    assert (summary.diagnosis.verdict, first.id) == ("bug", fault.split(",")[0])
    assert all((first.statistic, first.fix, first.examples))
    assert bugs(summary.diagnosis)[:1] == [first.id]
    if first.after:
        assert first.after.k3 < 1.05 * summary.whole["k3"].value


@pytest.mark.parametrize("many", [512, 24])
@pytest.mark.parametrize("name", SAMPLES)
def test_an_honest_mismatch_is_no_bug(tmp_path, name, many):
    given = {key: value[:: 512 // many] for key, value in columns(name).items()}
    assert diagnosed(tmp_path, given).verdict in ("healthy", "honest_mismatch")


@pytest.mark.parametrize("name", ["healthy", "collapse"])
def test_unmasked_tool_output_is_a_wrong_mask_and_no_sentinel(tmp_path, name):
    table = pq.read_table(ROOT / "sample_data" / f"{name}.parquet").drop_columns(["response_mask"])
    assert bugs(diagnosed(tmp_path, table)) == ["wrong_mask"]


def test_the_repair_brings_back_the_numbers(tmp_path):
    right = analyze([write(tmp_path / "a.parquet", columns("stale"))], presets=()).whole
    after = diagnosed(tmp_path, FAULTS["off_by_one"](columns("stale"))).causes[0].after
    for name, rel in (("k3", 0.05), ("mean_ratio", 0.01), ("ess_tokens", 0.05)):
        assert getattr(after, name) == pytest.approx(right[name].value, rel=rel)


OF_A_HOST = {
    "off_by_one": old(lambda i, p, q, ids: np.roll(p, 1) if i % 4 == 2 else p),
    "group_fault": old(lambda i, p, q, ids: q + (3.5 if i % 4 == 2 else 1) * (p - q)),
}


@pytest.mark.parametrize("cause", OF_A_HOST)
def test_a_fault_of_one_host_names_the_host(tmp_path, cause):
    found = diagnosed(tmp_path, OF_A_HOST[cause](columns("healthy")) | {"host": HOSTS})
    assert found.causes[0].id == cause
    assert "host = c" in found.causes[0].statement + "".join(one.words for one in found.where)


def test_a_kind_of_prompt_that_differs_threefold_is_no_fault_and_a_flagged_one_tenfold_is(tmp_path):
    given = columns("healthy")
    assert bugs(diagnosed(tmp_path, OF_A_HOST["group_fault"](given) | {"dataset": HOSTS})) == []
    far = old(lambda i, p, q, ids: np.where(q + 9 * (p - q) < 0, q + (9 if i % 4 == 2 else 1) * (p - q), p))
    flags = [i % 4 == 2 for i in range(len(HOSTS))]
    assert bugs(diagnosed(tmp_path, far(given) | {"used": flags})) == ["group_fault"]


def test_permuted_rows_are_told_by_their_ids_and_seen_without_their_partners(tmp_path):
    first = diagnosed(tmp_path, permuted(columns("healthy"))).causes[0]
    one, two = first.confirm.rsplit(": ", 1)[1].split(", ")[0].split(" → ")
    names = columns("healthy")["sequence_id"]
    assert names[(names.index(one) + 1) % len(names)] == two

    one, two = (sampled(lambda t: OLD, OLD, (60, 60), seed=seed) for seed in (0, 1))
    given = {name: part[name] for name, part in (("rollout_log_probs", one), ("old_log_probs", two))}
    first = diagnosed(tmp_path, given).causes[0]
    assert (first.id, "not in the sample" in first.statistic) == ("row_permutation", True)


def test_identical_columns_and_a_handful_of_tokens_cannot_tell_and_positive_log_probs_are_a_bug(tmp_path):
    given = columns("healthy")
    same = diagnosed(tmp_path, given | {"old_log_probs": given["rollout_log_probs"]})
    assert (same.verdict, "same numbers" in same.headline) == ("cannot_tell", True)
    few = {"rollout_log_probs": [[-1.0]] * 63, "old_log_probs": [[-1.1]] * 63}
    assert diagnosed(tmp_path, few).verdict == "cannot_tell"
    found = analyze([str(ROOT / "tests" / "golden" / "stale.parquet")], presets=()).diagnosis
    assert (found.verdict, found.causes[0].id, "positive" in found.headline) == ("bug", "sentinel", True)


# ---------------------------------------------------------------- two policies, logged rightly and wrongly

OLD = Policy()
NEW, ANOTHER = OLD.moved(0.3), OLD.moved(1.0)
NUCLEUS = faults.changed(
    OLD, lambda logits, seen: np.maximum(faults.nucleus(faults.log_softmax(logits), 0.9), -60)
)
FEW = np.repeat(np.arange(10), 8)
RIGHT = cache(lambda: sampled(lambda t: OLD, OLD))


def with_prompts(size):
    """Return a policy that sees the prompt with the keys of other weights; of other prompts for None."""
    other = OLD.moved(0.0)
    other.begin = OLD.begin[::-1] if size is None else OLD.moved(size).begin
    return other


def first_sync():
    """Return four steps; from the second on the engine's weights are others."""
    engines = [OLD, *(OLD.moved(2.5, seed) for seed in (1, 2, 3))]
    parts = [sampled(lambda t, one=one: one, OLD, group=FEW) for one in engines]
    return joined(parts, step=range(4), host=list("abab"))


def groups(**named):
    """Return three parts, the last of which has other weights, with a value of each column for each."""
    return joined([sampled(lambda t, k=k: OLD.moved(0.3 * k), OLD, group=FEW) for k in (0, 0.2, 3)], **named)


def packed(column, place):
    """Give the first token of each row the last value of the row before, or the other way round."""
    given = RIGHT()
    rows, (at, beside, shift) = given[column], {"first": (0, -1, -1), "last": (-1, 0, 1)}[place]
    moved = [x.copy() for x in rows]
    for i, x in enumerate(moved):
        x[at] = rows[(i + shift) % len(rows)][beside]
    return given | {column: moved}


def padded():
    """Return rows that are filled up with 0.0 in both columns, as no mask leaves out."""
    names = ("rollout_log_probs", "old_log_probs", "token_ids")
    return RIGHT() | {name: [np.pad(x, (0, 61 - len(x))) for x in RIGHT()[name]] for name in names}


def repeating():
    """Return responses that repeat a token until the longest length, ever more certain of it."""
    tail = np.minimum(-np.exp(-np.arange(20.0) - 2), 0.0)
    ends = [np.append(tail[: 12 - i % 5], np.zeros(8 + i % 5)) for i in range(320)]
    cut = {
        name: [np.append(x[-40:-20], end) for x, end in zip(RIGHT()[name], ends, strict=True)]
        for name in ("rollout_log_probs", "old_log_probs")
    }
    ids = [np.append(x[-40:-20], np.full(20, i % 40)) for i, x in enumerate(RIGHT()["token_ids"])]
    return RIGHT() | cut | {"token_ids": ids}


def certain(column, size):
    """Return tokens of which the engine is certain; the trainer is next to it, or anywhere."""
    x = [np.full_like(one, -1e-9) for one in RIGHT()[column]] if size == 0 else RIGHT()[column]
    return RIGHT() | {"rollout_log_probs": [np.zeros_like(one) for one in x], "old_log_probs": x}


def short_shift():
    """Return short responses at a temperature, three of which fit at a shift by chance."""
    given = sampled(lambda t: colder(0.7, OLD), OLD, (3, 7), np.repeat(np.arange(16), 8))
    moved = [i for i, x in enumerate(given["rollout_log_probs"]) if len(x) == 7][:3]
    return rollout(lambda i, q, p, ids: np.append(p[1:], q[-1]) if i in moved else q)(given)


def at_temperature(sampling, trainer, **more):
    return sampled(lambda t: colder(sampling, OLD), colder(trainer, OLD), **more)


HONEST = {
    "updated after the first token, a little": lambda: sampled(lambda t: (OLD, NEW)[t > 0], NEW),
    "updated after the first token": lambda: sampled(lambda t: (OLD, ANOTHER)[t > 0], ANOTHER),
    "updated after eight tokens": lambda: sampled(lambda t: (OLD, NEW)[t > 7], NEW),
    "updated after eight tokens, by much": lambda: sampled(lambda t: (OLD, ANOTHER)[t > 7], ANOTHER),
    "a prefix cache a little older than the weights": lambda: sampled(lambda t: with_prompts(0.3), OLD),
    "a prefix cache older than the weights": lambda: sampled(lambda t: with_prompts(0.6), OLD),
    "a soft cap that the trainer lacks": lambda: sampled(lambda t: capped(OLD), OLD),
    "a soft cap that the engine lacks": lambda: sampled(lambda t: OLD, capped(OLD)),
    "a temperature on both sides": lambda: at_temperature(0.6, 0.6),
    "another model": lambda: sampled(lambda t: OLD.moved(1.5), OLD),
    "another model altogether": lambda: sampled(lambda t: Policy(9), OLD),
    "another model, both certain": lambda: sampled(lambda t: colder(0.05, ANOTHER), colder(0.05, OLD)),
    "another model, more certain": lambda: sampled(lambda t: colder(0.05, OLD.moved(2)), colder(0.05, OLD)),
    "a first sync that breaks the weights": first_sync,
    "the engine certain of every token": lambda: certain("old_log_probs", 0),
    "a token repeated until the longest length": repeating,
    "hosts at lags of their own": lambda: groups(host=list("abc"), policy_lag=range(3)),
    "hosts at steps of their own": lambda: groups(host=list("abc"), step=range(3)),
    "lengths of prompts": lambda: groups(prompt_length=[100, 200, 300]),
}
WRONG = {
    **{
        f"boundary, {place}, {column}": partial(packed, column, place)
        for place in ("first", "last")
        for column in ("rollout_log_probs", "old_log_probs")
    },
    "boundary, of no policy": lambda: FAULTS["boundary, first"](RIGHT()),
    "wrong_context": lambda: sampled(lambda t: OLD, with_prompts(None)),
    "off_by_one, short responses": lambda: FAULTS["off_by_one"](sampled(lambda t: OLD, OLD, (4, 24))),
    "trainer_temperature, and a few that fit at a shift": short_shift,
    "trainer_temperature, never divided": lambda: at_temperature(0.7, 1.0),
    "trainer_temperature, twice": lambda: at_temperature(0.7, 0.49),
    "trainer_temperature, above 1": lambda: at_temperature(1.4, 1.0),
    "trainer_temperature, noisy": lambda: at_temperature(0.7, 1.0, noise=0.15),
    "rollout_raw_logprobs": lambda: at_temperature(0.7, 0.7, logged=OLD),
    "rollout_raw_logprobs, noisy": lambda: at_temperature(0.7, 0.7, logged=OLD, noise=0.15),
    "truncated_sampling": lambda: sampled(lambda t: NUCLEUS, OLD),
    "truncated_sampling, noisy": lambda: sampled(lambda t: NUCLEUS, OLD, noise=0.05),
    "special_token, 19": lambda: sampled(lambda t: OLD, anew(OLD, 19)),
    "special_token, 4": lambda: sampled(lambda t: OLD, anew(OLD, 4)),
    "special_token, 34": lambda: sampled(lambda t: OLD, anew(OLD, 34)),
    "sentinel, a column of 0.0": lambda: certain("old_log_probs", 1),
    "sentinel, a column of -3.7": lambda: rollout(lambda i, q, p, ids: np.full_like(q, -3.7))(RIGHT()),
    "copied_mean": lambda: old(lambda i, p, q, ids: np.full_like(p, p.mean()))(RIGHT()),
    "wrong_mask, padding in both columns": padded,
    "group_fault, at one step": lambda: groups(host=list("abc"), step=[5] * 3, policy_lag=[1] * 3),
    "group_fault, of a rank": lambda: groups(rank=range(3)),
}


@pytest.mark.parametrize("known", ["with ids", "without ids"])
@pytest.mark.parametrize("name", [*HONEST, *WRONG])
def test_right_values_of_two_policies_are_no_bug_and_wrong_ones_are(tmp_path, name, known):
    drop = ("entropy", "sampled", *(() if known == "with ids" else ("group_id", "token_ids")))
    if known == "with ids" or not name.startswith("special_token"):
        found = diagnosed(tmp_path, (HONEST | WRONG)[name](), drop=drop)
        assert bugs(found) == ([name.split(",")[0]] if name in WRONG else [])


@pytest.mark.parametrize("column", ["entropy", "sampled"])
def test_raw_log_probs_in_both_columns_show_beside_an_entropy_and_honest_ones_fit_either(tmp_path, column):
    """The entropy is the trainer's, of the raw distribution; or that of the one tokens were sampled from."""
    for heat in (0.7, 1.4):
        raw = sampled(lambda t, heat=heat: colder(heat, OLD), OLD, logged=OLD)
        found = diagnosed(tmp_path, raw | {"entropy": raw[column]}, drop=["sampled"])
        assert bugs(found) == ["rollout_raw_logprobs"]
        assert "surprisal − entropy" in found.causes[0].statistic
    for size in (0.0, 0.3, 1.0):
        honest = sampled(lambda t, size=size: OLD.moved(size), OLD)
        assert bugs(diagnosed(tmp_path, honest | {"entropy": honest[column]}, drop=["sampled"])) == []


def test_a_few_tokens_that_are_far_off_are_no_temperature_and_a_value_repeated_is_no_sentinel(tmp_path):
    """One in 200 is logged 3 to 7 nats too low, at any place: E[r] is 2, and 1 without them."""

    def change(i, q, p, ids):
        chance = seeded(i)
        return q - (chance.random(len(q)) < 0.005) * chance.uniform(3, 7, len(q))

    found = diagnosed(tmp_path, rollout(change)(columns("healthy")))
    assert (found.verdict, found.causes) == ("cannot_tell", [])

    # a loop in a few responses repeats one log-prob to the last bit; nobody wrote −0.1157038
    loop = rollout(lambda i, q, p, ids: np.where(seeded(i).random(len(q)) < 0.06 * (i < 40), -0.1157038, q))
    given = loop(columns("healthy"))
    given["rollout_log_probs"] = [x.astype(np.float32) for x in given["rollout_log_probs"]]
    assert not {"sentinel", "wrong_mask"} & {*bugs(diagnosed(tmp_path, given))}


@pytest.mark.parametrize(("noise", "named"), [(0.3, True), (1.2, False)])
def test_other_text_is_far_worse_than_what_is_around_it(tmp_path, noise, named):
    """Outliers of few bits come in runs, too, in a policy that is nearly certain of its tokens."""
    chance = seeded(0)
    blur = old(lambda i, p, q, ids: np.minimum(p + noise * np.expm1(p) * chance.normal(size=len(p)), 0.0))
    found = diagnosed(tmp_path, blur(BREAKS["retokenization"](columns("healthy"))))
    assert ("retokenization" in bugs(found)) is named


# ---------------------------------------------------------------- single looks, beside what looks alike


def rows_of(size, q=None, ids=None, length=80, **scalars):
    """Return 100 sequences whose train column is `size` × (1 − π_rollout) below the other's."""
    index = np.tile(np.arange(length), 100)
    q = -seeded().exponential(1.5, len(index)) - 0.3 if q is None else q
    columns = {name: [value] * 100 for name, value in scalars.items()}
    off = size * seeded(1).normal(1, 0.1, len(index)) * np.expm1(q)
    return Rows(q, q + off, np.arange(0, len(q) + 1, length), index, ids, scalars=columns)


INDEX, KIND = np.tile(np.arange(80), 100), seeded(3).random(8000)
UNSURE = np.where((INDEX < 16) | (KIND < 0.15), -seeded().exponential(1.5, 8000) - 0.3, -1e-4)
SELDOM = np.where(KIND < 0.035, -2.0 - seeded().exponential(1.0, 8000), -1e-4)
IDS = np.where(KIND < 0.02, 3, seeded(4).integers(10, 30, 8000))
BEGIN = np.where((INDEX == 0) & (KIND < 0.5), 3, np.where(IDS == 3, 4, IDS))
AT_3, HEAD = IDS == 3, INDEX < 16
LOOKS = {
    "one of a mismatch of all": (Boundary, rows_of(np.where(INDEX < 1, 1.2, 0.8)), False),
    "moved a little by an update": (SpecialToken, rows_of(0.25 * AT_3, ids=IDS, policy_lag=1), False),
    "the same at lag 0": (SpecialToken, rows_of(0.25 * AT_3, ids=IDS, policy_lag=0), True),
    "off by more": (SpecialToken, rows_of(2.0 * AT_3, ids=IDS, policy_lag=1), True),
    "an id that begins responses": (SpecialToken, rows_of(np.where(INDEX < 1, 2, 0.02), ids=BEGIN), False),
    "one in doubt in certain text": (SpecialToken, rows_of(np.where(AT_3, 3, 1.8), SELDOM, IDS), False),
    "others are right": (SpecialToken, rows_of(np.where(AT_3, 3, 0.1), SELDOM, IDS), True),
    "text that grows certain": (WrongContext, rows_of(2.5, UNSURE), False),
    "what fades": (WrongContext, rows_of(np.where(HEAD, 2.5, 0.25), UNSURE), True),
    "an adapter": (WrongContext, rows_of(np.select([INDEX < 1, HEAD], [2.6, 2.0], 0.45)), False),
    "another prompt": (WrongContext, rows_of(np.select([INDEX < 1, HEAD], [2.6, 2.0], 0.12)), True),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_tells_a_fault_from_what_looks_alike(name):
    cause, rows, found = LOOKS[name]
    assert (cause().look(rows) is not None) is found


@pytest.mark.parametrize("groups", [8, 20, 128, 100_000])
def test_few_groups_need_more_standard_errors(groups):
    """Beyond it a t of that many groups is as rare as a normal number beyond 5."""
    assert bound(groups) == pytest.approx(stats.t.isf(stats.norm.sf(SURE), groups - 1), rel=0.05)


# ---------------------------------------------------------------- what tokens of one kind share


def by_pairs(rows, named):
    """Compute the systematic share, its ends and the number of clusters, by a loop over pairs of tokens."""
    prompts, kinds = rows.column("group_id"), defaultdict(list)
    for t, owner in enumerate(rows.owner):
        follows = rows.index[t] > 0 and rows.position[t - 1] == rows.position[t] - 1
        kind = (prompts[owner] if named else "", int(rows.ids[t - 1]) if follows else None, int(rows.ids[t]))
        kinds[kind].append((owner, min(math.exp(rows.delta[t]), 2.0)))
    middle = float(np.minimum(np.exp(rows.delta), 2).mean())
    above, below = defaultdict(list), defaultdict(list)
    for kind, mine in kinds.items():
        off = [(owner, r - middle) for owner, r in mine]
        pairs = [x * y for (i, x), (j, y) in product(off, off) if i != j]
        if pairs:
            cluster = kind[0] if named else kind
            above[cluster].append(len(off) * math.fsum(pairs) / len(pairs))
            below[cluster].append(math.fsum(x * x for _, x in off))
    top, bottom = (np.array([math.fsum(sums[key]) for key in above]) for sums in (above, below))
    value, parts = top.sum() / bottom.sum(), len(top)
    spread = np.square(top - value * bottom).sum() * parts / (parts - 1)
    half = stats.t.ppf(0.975, parts - 1) * math.sqrt(spread) / bottom.sum()
    return value, value - half, value + half, parts


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_the_systematic_share_is_that_of_all_pairs_of_different_responses(seed, named):
    chance, words = seeded(seed), 4
    at = [np.flatnonzero(chance.random(n) < 0.85) for n in chance.integers(4, 14, 30)]
    position, ids = np.concatenate(at), chance.integers(0, words, sum(map(len, at)))
    delta = 0.3 * chance.normal(size=words)[ids] + 0.2 * chance.normal(size=len(ids))
    scalars = {"group_id": [f"p{i % 10}" for i in range(30)]} if named else {}
    starts = np.concatenate(([0], np.cumsum([*map(len, at)])))
    rows = Rows(np.full(len(ids), -1.0), delta - 1.0, starts, position, ids, scalars=scalars)
    found, (value, low, high, parts) = common_share(rows), by_pairs(rows, named)
    assert found.value == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-3)
    assert found.groups == parts


def test_a_share_beside_1_has_one_digit_more():
    assert [percent(share) for share in (0.0042, 0.123, 0.994, 0.9987, 1.0)] == [
        "0.42%",
        "12%",
        "99%",
        "99.9%",
        "100%",
    ]


@pytest.mark.parametrize(
    ("late", "certain", "found"),
    [(0, False, True), (8, False, False), (0, True, False)],
    ids=["another prompt", "as many rows are off late", "late tokens only more certain"],
)
def test_another_prompt_is_off_early_more_often_than_late_and_fades(late, certain, found):
    """80 responses of 48 tokens, of which 8 are off by 2 nats at first, and by 0.7 up to token 8."""
    q, gap = np.full((80, 48), -2.0), np.full((80, 48), 1e-3)
    gap[:8, :8], gap[:8, 0] = 0.7, 2.0
    gap[8 : 8 + late, 32:] = 0.7
    if certain:
        q[:8, 32:], gap[:8, 32:] = -0.03, 0.02
    starts, position = np.arange(0, 80 * 48 + 1, 48), np.tile(np.arange(48), 80)
    rows = Rows(q.ravel(), (q - gap).ravel(), starts, position)
    assert (WrongContext().look(rows) is not None) is found

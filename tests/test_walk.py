"""Check that a walk over the tokens in blocks leaves what is seen at once; sums are in `test_oracle.py`."""

import math

import numpy as np
import pytest

from offpol_diag.dump.batch import Batch
from offpol_diag.engine import gap, segments, tails, terms
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.gap import DRIFTS
from offpol_diag.engine.terms import walk

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # ratios that overflow

LENGTHS = [7, 0, 1, 40, 3, 0, 0, 25, 90, 2, 2, 60, 0]
SIZES = {
    "none": 0.0,
    "tiny": 1e-9,
    "usual": 0.02,
    "up to where r stops to stand for itself": 0.9,
    "large": 2.0,
    "huge": 40.0,
    "beyond what can be exponentiated": 300.0,
}


def ends(lengths):
    return np.array([0, *np.cumsum(lengths)])


def batch(size=0.02, lengths=LENGTHS, advantages="of sequences", masked=True, seed=0):
    """Make random sequences; where masked, a few tokens are missing here and there."""
    random, n = np.random.default_rng(seed), sum(lengths)
    rollout = np.log(random.beta(2, 0.4, n).clip(1e-9))
    rollout[::3] -= 3 * size if size > 100 else 0  # so that ratios are huge both ways
    old = np.minimum(rollout + random.normal(0, size, n), 0.0) if size else rollout
    current = np.minimum(old + random.normal(0, size / 2, n), 0.0) if size else old
    position = np.concatenate([np.cumsum(_steps(random, k, masked)) - 1 for k in lengths]).astype(np.int64)
    begins = set(np.cumsum([0, *lengths])[:-1].tolist()) | {
        i for i in range(1, n) if position[i] != position[i - 1] + 1
    }
    signs = {
        "of sequences": np.repeat(random.integers(-1, 2, len(lengths)), lengths),
        "of tokens": random.integers(-1, 2, n),
        "of parts": np.sign(np.sin(np.arange(n) / 17.0).round(1)),
    }.get(advantages)
    return Batch(
        rollout=rollout,
        old=old,
        current=current,
        cu_seqlens=ends(lengths),
        cu_runs=np.array([*sorted(i for i in begins if i < n), n]),
        position=position,
        key=np.arange(len(lengths)),
        masked=np.zeros(len(lengths), dtype=np.int64),
        advantages=None if signs is None else signs.astype(np.float64),
    )


def _steps(random, k, masked):
    steps = np.ones(k, np.int64)
    if masked and k > 10:
        steps[random.integers(0, k, 3)] = [5, 200_000, 33]
    return steps


def context(of):
    return BatchContext.of(of, 0, 4)


def seen(of):
    """Return everything the walk yields, as numbers by name."""
    one = context(of)
    every = (gap.Gap, tails.Tails)
    walk(one, dict.fromkeys(DRIFTS, every))
    found = {}
    for drift in DRIFTS:
        found |= {f"gap {name}": x.tolist() for name, x in gap.columns(one, drift).items()}
        found |= {f"range {name}": [float(x) for x in span] for name, span in gap.ranges(one, drift).items()}
        arrays = tails.arrays(one, drift)
        found[f"d {drift.prefix}"] = arrays.sums[f"{drift.prefix}bins.d"].tolist()
        found[f"k3 {drift.prefix}"] = arrays.sums[f"{drift.prefix}bins.k3"].flatten().tolist()
        largest = arrays.largest[f"{drift.prefix}tail.tokens"]
        found[f"tail {drift.prefix}"] = largest[largest > -np.inf].tolist()
    return found


def same(one, two, rel=1e-12):
    assert one.keys() == two.keys()
    for name, values in one.items():
        scale = max(map(abs, values), default=0.0) if name.startswith("gap") else 0.0
        finite = scale if math.isfinite(scale) else 0.0
        np.testing.assert_allclose(two[name], values, rtol=rel, atol=1e-14 * finite, err_msg=name)


EACH_WITH_EACH = [
    *zip(SIZES, ["of sequences", "of tokens", "of parts", "none"] * 2, strict=False),
]
"""Every size once, every kind of advantages once or twice."""


@pytest.mark.parametrize(("size", "advantages"), EACH_WITH_EACH)
def test_blocks_leave_what_is_seen_at_once(size, advantages, monkeypatch):
    of = batch(SIZES[size], advantages=advantages)
    whole = seen(of)
    monkeypatch.setattr(terms, "BLOCK", 60)
    same(whole, seen(of))


@pytest.mark.parametrize("lengths", [[0], [0, 0], [1], [1, 0]])
def test_hardly_any_token_is_no_trouble(lengths):
    found = seen(batch(lengths=lengths))

    assert len(found["gap d"]) == len(lengths)


@pytest.mark.parametrize("wanted", [1, 2, 10, 1000])
@pytest.mark.parametrize("lengths", [[], [0], [5], [0, 0, 5, 0], LENGTHS])
def test_spans_cover_every_run_once_and_in_order(lengths, wanted):
    offsets = ends(lengths)
    found = segments.spans(offsets, wanted)

    assert [row for first, last in found for row in range(first, last)] == list(range(len(lengths)))
    longest = max(lengths, default=0)
    assert all(int(offsets[last] - offsets[first]) < wanted + longest + 1 for first, last in found)


@pytest.mark.parametrize("lengths", [LENGTHS, [40, 40, 40], [7] * 9])
def test_a_block_leaves_nothing_to_the_next(lengths, monkeypatch):
    """Blocks share their memory: what one made must be summed, or copied, before the next is looked at."""
    of = batch(0.3, lengths=lengths, advantages="of tokens")
    monkeypatch.setattr(terms, "BLOCK", 1)
    found = seen(of)
    monkeypatch.setattr(terms.Block, "out", lambda block, name: np.ones_like(block.log("rollout")))

    assert seen(of) == found

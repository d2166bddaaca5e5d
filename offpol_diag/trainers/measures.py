"""Numbers of tokens that trainers log means and extremes of, each formula once.

numpy is imported by the first value, so that printing a trainer's configuration is fast.
Throughout r = π_train/π_rollout = e^Δ, and u = log π_θ − log π_anchor is the log of the ratio that a policy
loss clips.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

from offpol_diag.presets import Clip, Policy

if TYPE_CHECKING:
    from offpol_diag.engine.segments import Array
    from offpol_diag.trainers.view import Tokens, View

EPS = 1e-8
"""Constant that several trainers' masked means add to the denominator; reproduced here."""
SAFETY = 20.0
"""Bound on log-ratios before exp, nats, in most trainers."""
FLOAT32_MAX = 2.0**128 - 2.0**104
FLOAT32_OVERFLOW = math.log(FLOAT32_MAX)
"""From here on e^x is infinite in float32."""


@dataclass(frozen=True, eq=False)
class Measure:
    """A number or flag of each token.

    Attributes:
        name: unique among the measures that do not depend on the preset.
        of: computes the values, [T].
        own: whether it depends on more of the preset than its numerator policy.
        rows: computes one value per sequence, [S], for presets under which its tokens share it; else None.
        policy: fixed numerator policy; None for the preset's.
        needs: fields of the batch that it requires, beside the preset's numerator.
    """

    name: str
    of: Callable[[Tokens], Array]
    own: bool = False
    rows: Callable[[View], Array | None] | None = None
    policy: Policy | None = None
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mask:
    """A selection of tokens.

    Attributes:
        of: computes the flags of the selected tokens, [T] bool; None for all.
    """

    of: Callable[[Tokens], Array | None]


KEPT = Mask(lambda x: x.kept)
"""The tokens that pass the rules on tokens."""

# ---------------------------------------------------------------- functions of arrays


def exp(x: Array) -> Array:
    """Compute e^x."""
    import numpy as np

    found: Array = np.exp(x)
    return found


def expm1(x: Array) -> Array:
    """Compute e^x − 1."""
    import numpy as np

    found: Array = np.expm1(x)
    return found


def log_cosh(x: Array) -> Array:
    """Compute log cosh x, precise near 0."""
    import numpy as np

    found: Array = np.log1p(2 * np.sinh(x / 2) ** 2)
    return found


def where(flags: Array, x: Array | float, other: Array | float) -> Array:
    """Return x where flags are set, and the other elsewhere."""
    import numpy as np

    return np.where(flags, x, other)


# ---------------------------------------------------------------- of Δ

ONE = Measure("1", lambda x: x.delta * 0 + 1)
LOG = Measure("Δ", lambda x: x.delta)
DISTANCE = Measure("|Δ|", lambda x: abs(x.delta))
SQUARED = Measure("Δ²", lambda x: x.delta**2)
EXCESS = Measure("r − 1", lambda x: x.excess())
EXCESS_SIZE = Measure("|r − 1|", lambda x: abs(x.excess()))
EXCESS_SQUARED = Measure("(r − 1)²", lambda x: x.excess() ** 2)
EXCESS_CLAMPED = Measure("r − 1, Δ within ±20", lambda x: x.excess(SAFETY))
RATIO = Measure("r", lambda x: x.ratio())
RATIO_CLAMPED = Measure("r, Δ within ±20", lambda x: x.ratio(SAFETY))
K1 = Measure("−Δ", lambda x: -x.delta)
K2 = Measure(
    "Δ²/2",
    lambda x: x.delta**2 / 2,
)
K3 = Measure("r − 1 − Δ", lambda x: x.k3())
K3_CLAMPED = Measure("k3, Δ within ±20, at most 10", lambda x: x.k3(SAFETY).clip(max=10.0))
K3_REVERSE = Measure("1/r − 1 + Δ", lambda x: x.ratios.token("k3_reverse"))
PROB_DIFF = Measure("π_train − π_rollout", lambda x: x.ratios.difference())
ROLLOUT = Measure("log π_rollout", lambda x: x.batch.rollout, policy="rollout")
TRAIN = Measure("log π_train", lambda x: x.ratios.train)
CURRENT = Measure("log π_θ", lambda x: x.column("current"), needs=("current",))

# ---------------------------------------------------------------- of the advantage, and of u


def clipped(x: Array, clip: Clip) -> Array:
    """Clip a ratio to [1 − low, 1 + high]; None means no bound on that side."""
    low = -math.inf if clip.low is None else 1 - clip.low
    return x.clip(low, math.inf if clip.high is None else 1 + clip.high)


def _clip_decides(tokens: Tokens) -> Array:
    """Flag the tokens whose clipped term is the larger loss: −A clip(e^u) > −A e^u, [T]."""
    r, a = tokens.update_ratio, tokens.column("advantages")
    return -a * clipped(r, tokens.preset.clip) > -a * r


POSITIVE = Measure("A > 0", lambda x: x.column("advantages") > 0, policy="rollout")
NEGATIVE = Measure("A < 0", lambda x: x.column("advantages") < 0, policy="rollout")
UPDATE = ("current",)
"""The field that u requires; a preset is never run without its own numerator."""
U = Measure("u", lambda x: x.update, rows=lambda view: view.pooled_update, needs=UPDATE)
UPDATE_RATIO = Measure(
    "e^u",
    lambda x: x.update_ratio,
    rows=lambda view: view.pooled_ratio,
    needs=UPDATE,
)
WEIGHT = Measure("weight", lambda x: x.weigh().final.values, own=True)
"""The final weight of a token, applied or not; only for presets with token weights."""
CLIP_DECIDES = Measure("the clip decides", _clip_decides, own=True)


def _clipped_at(side: Literal["low", "high"], clip: Clip, r: Array) -> Array:
    """Flag ratios, bounded by the dual clip, that lie below 1 − low or above 1 + high."""
    r = r if clip.dual is None else r.clip(max=clip.dual)
    if side == "low":
        return r < (-math.inf if clip.low is None else 1 - clip.low)
    return r > (math.inf if clip.high is None else 1 + clip.high)


CLIPPED_LOW = Measure(
    "π_θ/π_anchor below 1 − low where A < 0",
    lambda x: _clipped_at("low", x.preset.clip, x.update_ratio) & (x.column("advantages") < 0),
    own=True,
    needs=("current", "advantages"),
)
CLIPPED_HIGH = Measure(
    "π_θ/π_anchor above 1 + high where A > 0",
    lambda x: _clipped_at("high", x.preset.clip, x.update_ratio) & (x.column("advantages") > 0),
    own=True,
    needs=("current", "advantages"),
)


def clipped_row(view: View, side: Literal["low", "high"]) -> Array | None:
    """Flag sequences whose pooled ratio is clipped on one side, [S] float64; None where tokens are."""
    r = view.pooled_ratio
    if r is None:
        return None
    pushed = view.total(NEGATIVE if side == "low" else POSITIVE) > 0
    return (_clipped_at(side, view.preset.clip, r) & pushed) * 1.0


def clip_decides(view: View, mask: Mask | None = None) -> Array:
    """Count the tokens whose clipped term is the larger loss, [S]; under GSPO all with one sign of A."""
    r = view.pooled_ratio
    if r is None:
        return view.total(CLIP_DECIDES, mask)
    bounded = clipped(r, view.preset.clip)
    flags: Array = view.total(POSITIVE, mask) * (bounded < r) + view.total(NEGATIVE, mask) * (bounded > r)
    return flags


# ---------------------------------------------------------------- made of others


@cache
def squared(of: Measure) -> Measure:
    """Return the square of a measure that does not depend on the preset."""
    return Measure(f"({of.name})²", lambda x: of.of(x) ** 2, needs=of.needs)


@cache
def under(of: Measure, policy: Policy) -> Measure:
    """Return the measure with a fixed numerator policy instead of the preset's."""
    return replace(of, policy=policy, rows=None, needs=(*of.needs, policy))


RATIO_SQUARED = squared(RATIO_CLAMPED)

"""Sequences of a dump as flat numpy arrays, and the statistics that causes use."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from offpol_diag.core.intervals import quantile
from offpol_diag.core.kept_rows import Sample
from offpol_diag.diagnosis.recorded import Recorded
from offpol_diag.dump.schema import DIGESTS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
T = TypeVar("T")

CAP, LARGEST = 3.0, 1e6
"""Bounds, nats: of |Δ| in robust statistics, a factor of 20; of logged values, whose squares stay finite."""


@dataclass(frozen=True)
class Rows:
    """S non-empty sequences with T tokens in all, concatenated, without masked tokens.

    Attributes:
        q: log π_rollout of the sampled token, [T], nats.
        p: log π_train of the same token (old, or current in a dump of two policies), [T], nats.
        starts: index of the first token of each sequence, and T, [S + 1].
        position: index of the token in its response, counting masked tokens, [T].
        ids: token ids [T], or None.
        entropy: logged entropy of the train policy, or of the one that sampled, [T] nats, or None.
        scalars: name → other column of the sequences, S values each, None for null.
        reference: log-prob under the run's model, computed again by `rescore`, [T] nats, or None.
        turn: index of its turn (a run of tokens between holes of the mask) in its response, [T], or None.
        width: number of tokens of its row, masked ones and padding included, [T], or None.
        sign: 0 where the advantage is negative, 1 where it is 0, 2 where it is positive, [T], or None.
        recorded: what the metadata says of the engine.
        synced: lower end of the interval of K3 at lag 0, or of all rows where no lag is recorded, nats.
        healthy: whether the mismatch is as small as rounding makes it, but for single tokens.
    """

    q: Floats
    p: Floats
    starts: Ints
    position: Ints
    ids: Ints | None = None
    entropy: Floats | None = None
    scalars: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    reference: Floats | None = None
    turn: Ints | None = None
    width: Ints | None = None
    sign: Floats | None = None
    recorded: Recorded = field(default_factory=Recorded)
    synced: float | None = None
    healthy: bool = False

    @classmethod
    def sampled(cls, sample: Sample) -> Rows:
        """Build the rows from a sample."""
        values = sample.values
        ids, entropy = values.get("token_ids"), values.get("entropy")
        return cls(
            np.clip(values["q"], -LARGEST, LARGEST),
            np.clip(values["p"], -LARGEST, LARGEST),
            np.concatenate(([0], np.cumsum(sample.lengths))),
            values["position"].astype(np.int64),
            None if ids is None else ids.astype(np.int64),
            None if entropy is None else np.clip(entropy, -LARGEST, LARGEST),
            {"sequence_id": [*range(len(sample.lengths))]} | sample.scalars,
            values.get("reference"),
            values["turn"],
            np.repeat(sample.rows[4], sample.lengths),
            values.get("sign"),
        )

    @property
    def tokens(self) -> int:
        """Number of tokens T."""
        return len(self.q)

    @property
    def sequences(self) -> int:
        """Number of sequences S."""
        return len(self.starts) - 1

    @property
    def both(self) -> tuple[tuple[str, Floats, Floats], ...]:
        """Each column by its name, with the other one."""
        return ("rollout", self.q, self.p), ("train", self.p, self.q)

    @cached_property
    def lengths(self) -> Ints:
        """Number of tokens of each sequence, [S]."""
        return np.diff(self.starts)

    @cached_property
    def owner(self) -> Ints:
        """Index of the sequence of each token, [T]."""
        return np.repeat(np.arange(self.sequences), self.lengths)

    @cached_property
    def index(self) -> Ints:
        """Index of each token among the unmasked tokens of its sequence, [T]."""
        return np.arange(self.tokens) - self.starts[self.owner]

    @cached_property
    def from_end(self) -> Ints:
        """Index counted back from the last unmasked token of the sequence, [T]."""
        return self.lengths[self.owner] - 1 - self.index

    @cached_property
    def delta(self) -> Floats:
        """Δ = log π_train − log π_rollout, [T] nats."""
        return self.p - self.q

    @cached_property
    def size(self) -> Floats:
        """min(|Δ|, `CAP`), [T] nats."""
        return np.minimum(np.abs(self.delta), CAP)

    @cached_property
    def scaled(self) -> Floats:
        """min(|Δ|/(1 − π_rollout), `CAP`), [T]: what logits differ by, however certain the token is."""
        return np.minimum(np.abs(self.delta) / np.maximum(-np.expm1(np.minimum(self.q, 0.0)), 1e-3), CAP)

    @cached_property
    def level(self) -> Floats:
        """Mean of `size` per sequence, [S] nats."""
        return self.mean(self.size)

    @cached_property
    def k3_cut(self) -> Floats:
        """min(K3, 1) of each token, [T] nats."""
        delta = np.minimum(self.delta, 2.0)
        return np.asarray(np.minimum(np.expm1(delta) - delta, 1.0))

    @cached_property
    def edges(self) -> tuple[Ints, Ints]:
        """Distance of each token from both ends of its run of unmasked tokens, [T] each."""
        new = np.append((self.index == 0) | (np.diff(self.position, prepend=-1) != 1), True)
        at = np.flatnonzero(new)
        which, place = np.cumsum(new[:-1]) - 1, np.arange(self.tokens)
        return place - at[which], at[which + 1] - 1 - place

    @cached_property
    def again(self) -> Flags:
        """Whether the id of a token came before in its sequence, [T]; of rows with token ids."""
        assert self.ids is not None
        ids = np.unique(self.ids, return_inverse=True)[1]
        again = np.ones(self.tokens, np.bool_)
        again[np.unique(self.owner * (int(ids.max()) + 1) + ids, return_index=True)[1]] = False
        return again

    def of(self, sequences: Ints) -> Flags:
        """Return flags of these sequences, [S]."""
        return np.isin(np.arange(self.sequences), sequences)

    def sum(self, x: NDArray[Any]) -> Floats:
        """Sum values [T] over each sequence, [S]."""
        return np.add.reduceat(x.astype(np.float64), self.starts[:-1]) if self.tokens else np.zeros(0)

    def mean(self, x: NDArray[Any]) -> Floats:
        """Average values [T] over each sequence, [S]."""
        return self.sum(x) / self.lengths

    def keep(self, tokens: Flags) -> Rows:
        """Drop the tokens that are not flagged, and sequences that become empty."""
        counts = np.bincount(self.owner[tokens], minlength=self.sequences)
        filled = counts > 0
        every: dict[str, Any] = {name: getattr(self, name) for name in OF_TOKENS}
        every = {name: None if x is None else x[tokens] for name, x in every.items()}
        scalars = {
            name: [x for x, there in zip(column, filled, strict=True) if there]
            for name, column in self.scalars.items()
        }
        starts = np.concatenate(([0], np.cumsum(counts[filled])))
        return replace(self, **every, starts=starts, scalars=scalars)

    def only(self, sequences: Flags) -> Rows:
        """Drop the sequences that are not flagged."""
        return self if sequences.all() else self.keep(sequences[self.owner])

    def once(self, make: Callable[[Rows], T]) -> T:
        """Return what is made of the rows, the same each time."""
        name = f"once {make.__qualname__}"
        if name not in vars(self):
            vars(self)[name] = make(self)
        found: T = vars(self)[name]
        return found

    def with_q(self, q: Floats) -> Rows:
        """Replace the rollout log-probs, and drop the logged entropy, which belongs to the old ones."""
        return replace(self, q=q, entropy=None)

    def column(self, name: str) -> list[Any]:
        """Return a scalar column, [S]; all None if the dump lacks it."""
        return list(self.scalars.get(name, [None] * self.sequences))

    def numbers(self, name: str) -> Floats:
        """Return a scalar column as floats, [S], NaN for what is no finite number."""
        column = self.column(name)
        known = (isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in column)
        return np.array([x if k else np.nan for x, k in zip(column, known, strict=True)], np.float64)


OF_TOKENS = ("q", "p", "position", "ids", "entropy", "reference", "turn", "width", "sign")
"""Attributes of `Rows` with a value for each token."""


def percent(share: float) -> str:
    """Format a share: 16%, 0.42%."""
    return f"{100 * share:.2g}%" if share < 0.995 else f"{100 * share:.3g}%"


def correlation(x: Floats, y: Floats) -> float:
    """Return the Pearson correlation of log-probs cut at −20; NaN for fewer than 3 values or a constant."""
    x, y = np.maximum(x, -20), np.maximum(y, -20)
    varies = len(x) > 2 and x.std() > 0 and y.std() > 0
    return float(np.corrcoef(x, y)[0, 1]) if varies else float("nan")


def against_chance(rows: Rows, first: int, last: int) -> float:
    """Return the ratio of mean |p − q| of tokens to that of all pairs (p, q) of them; 1: unrelated."""
    last = min(last, first + 256)
    p, q = rows.p[first:last], rows.q[first:last]
    pairs = np.minimum(np.abs(p[:, None] - q[None, :]), CAP).mean()
    return float(np.minimum(np.abs(p - q), CAP).mean() / pairs) if pairs > 0 else 0.0


def jittered(rows: Rows, size: Any, rng: np.random.Generator) -> Floats:
    """Return log π_train with noise of `size` [T] × (1 − π_rollout) added so that E[r] stays, [T]."""
    wide = size * -np.expm1(rows.q)
    off = np.where(wide > 0, wide * rng.standard_normal(rows.tokens) - wide**2 / 2, 0.0)
    return np.asarray(np.where(off == 0, rows.p, np.minimum(rows.p + off, -1e-9)))


def uncertain(rows: Rows) -> Flags:
    """Flag tokens whose logits show: −8 < log π_rollout < −0.02, [T]."""
    return (rows.q < -0.02) & (rows.q > -8)


# ---------------------------------------------------------------- groups of sequences


def numbered(keys: Iterable[Hashable]) -> Ints:
    """Number what is equal alike, from 0 in the order in which it comes."""
    held = list(keys)
    number = {key: i for i, key in enumerate(dict.fromkeys(held))}
    return np.array([number[key] for key in held], np.int64)


def clusters(rows: Rows) -> Ints:
    """Return the group index of each sequence, [S]: its prompt where there is no group_id, or it alone."""
    column = rows.column("group_id" if "group_id" in rows.scalars else "prompt_ids")
    return numbered((i if value is None else None, value) for i, value in enumerate(column))


WEIGHTS = ("step", "policy_lag", "rollout_version", "train_version")
"""Columns that say which weights sampled and scored a sequence."""


def alike(rows: Rows) -> Ints:
    """Return a number for each sequence, [S], equal where the same weights sampled and scored it."""
    return numbered(zip(*(rows.column(name) for name in WEIGHTS), strict=True))


MACHINES = re.compile("host|engine|rank|worker|node|server|replica|gpu|device|pod|instance")
"""Words in the names of columns that say where a sequence was computed."""
NOT_GROUPS = {"sequence_id", "group_id", "prompt_ids", "prompt_length", "rewards", *WEIGHTS[1:], *DIGESTS}
MOST_VALUES, FEWEST = 64, 4
"""Columns that say nothing of a sequence's origin; most values of one that does, and fewest sequences of two
of its values."""


def partitions(rows: Rows) -> Iterator[tuple[str, dict[Any, Flags]]]:
    """Yield columns with few values that describe a sequence's origin, and value → flags [S].

    A number is a quantity, and no origin, but for steps and the numbers of machines.
    """
    for name, column in rows.scalars.items():
        numeric = all(isinstance(one, int | float | None) and not isinstance(one, bool) for one in column)
        if name in NOT_GROUPS or (numeric and name != "step" and not MACHINES.search(name.lower())):
            continue
        values = dict.fromkeys(column)
        if 2 <= len(values) <= MOST_VALUES:
            parts = {value: np.array([one == value for one in column]) for value in values}
            if sum(at.sum() >= FEWEST for at in parts.values()) >= 2:
                yield name, parts


# ---------------------------------------------------------------- estimates

SURE = 5.0
"""Standard errors beyond which an identity counts as violated, with many groups: two-sided p = 6e-7."""


def bound(groups: int) -> float:
    """Return the critical value, in standard errors of so many groups, with the significance level of `SURE`.

    The tails are those of Student's t, by Wallace's normal approximation (1959).
    """
    freedom = max(groups - 1, 2)
    exponent = (SURE * (8 * freedom + 3) / (8 * freedom + 1)) ** 2 / freedom
    return math.sqrt(freedom * math.expm1(exponent))


def ratio(above: NDArray[Any], below: NDArray[Any]) -> tuple[float, float]:
    """Return Σ above / Σ below over clusters, [G] each, and its standard error; infinite for one cluster."""
    value, many = float(above.sum() / below.sum()), len(above)
    if many < 2:
        return value, math.inf
    rest = np.square(above - value * below).sum()
    return value, float(np.sqrt(rest * many / (many - 1)) / below.sum())


class Estimate(NamedTuple):
    """A mean, its standard error over groups, and the number of groups."""

    value: float
    error: float
    groups: int

    @property
    def half(self) -> float:
        """Half the width of its 95% interval, by Student's t."""
        return self.error * float(quantile(max(self.groups - 1, 2)))

    @property
    def low(self) -> float:
        """Lower end of its 95% interval."""
        return self.value - self.half

    @property
    def high(self) -> float:
        """Upper end of its 95% interval."""
        return self.value + self.half

    @property
    def text(self) -> str:
        """The mean and its interval in words."""
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"

    def off(self, target: float) -> int:
        """Return 1 if the mean is significantly above the target, −1 if below, else 0."""
        off = self.value - target
        return int(np.sign(off)) if abs(off) > bound(self.groups) * self.error else 0


def estimate(rows: Rows, x: NDArray[Any], among: Flags | None = None) -> Estimate:
    """Estimate the mean of x over tokens, all or flagged ones, [T] each, with an error over prompts."""
    kept, which = np.ones(rows.tokens, np.bool_) if among is None else among, clusters(rows)
    total, count = (np.bincount(which, rows.sum(some)) for some in (np.where(kept, x, 0.0), kept))
    return Estimate(*ratio(total[count > 0], count[count > 0]), int((count > 0).sum()))

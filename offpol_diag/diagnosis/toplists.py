"""Signatures in the lists of the likeliest ids that both sides write, and how far the lists are apart.

Each takes `Rows` and returns a `Found` or None, as those of `signatures` do. What is read of the lists is in
`engine.toplists`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from offpol_diag.diagnosis import laws
from offpol_diag.diagnosis.rows import Estimate, Floats, Rows, clusters, estimate
from offpol_diag.diagnosis.signatures import Found, percent
from offpol_diag.engine.formula import quantile

SIDES = {"q": "rollout", "p": "train"}
FEWEST = 3
"""Fewest shared ids of a token by which a temperature is measured."""


def top1(rows: Rows) -> Found | None:
    """Find a column that holds the log-prob of the likeliest token where another one was sampled."""
    for side, name in SIDES.items():
        x, listed, top = getattr(rows, side), rows.extra.get(f"listed_{side}"), rows.extra.get(f"top_{side}")
        if listed is None or top is None or np.isnan(listed).all():
            continue
        other = ~(listed > top - 0.01)  # not listed is another one, too
        if other.sum() < 20:
            continue
        share = float(np.mean(np.abs(x - top)[other] < 1e-3 * (1 + np.abs(top[other]))))
        if share < 0.9:
            continue
        statistic = (
            f"at {int(other.sum()):,} tokens the sampled id is not the likeliest one of the {name} side's "
            f"list; in {percent(share)} of them the column holds the log-prob of the likeliest one"
        )
        kept = rows.keep(np.isfinite(listed))
        right = kept.extra[f"listed_{side}"]
        repaired = kept.with_q(right) if side == "q" else replace(kept, p=right)
        fields = {"column": name, "after": "with the log-probs that the list has for the sampled tokens"}
        return Found.of_tokens(
            "top1_logged", statistic, rows, other, repaired=repaired, fields=fields, exact=True
        )
    return None


MISSED, OFTEN, KINDS, BEYOND = 0.002, 30, 6, 0.05
"""Smallest share and number of tokens that miss an id of a missing shard, number of such ids (an engine may
suppress a few), and share of the other side's lists that hold an id beyond all that this side ever lists."""


def shard(rows: Rows) -> Found | None:
    """Find a range of ids that one side never lists, though they are likely on the other side."""
    for side, name in SIDES.items():
        lacks = rows.extra.get(f"lacks_{side}")
        if lacks is None:
            continue
        some = np.isfinite(lacks)
        if some.sum() < OFTEN or some.mean() < MISSED:
            continue
        low, high = np.quantile(lacks[some], (0.005, 0.995))
        inside = {
            one: (rows.extra[f"top_id_{one}"] >= low) & (rows.extra[f"top_id_{one}"] <= high) for one in SIDES
        }
        many = len(np.unique(lacks[some]))
        theirs = inside["p" if side == "q" else "q"]
        last = rows.extra[f"last_{side}"].max()
        beyond = float(np.mean(rows.extra[f"last_{'p' if side == 'q' else 'q'}"] > last))
        said = f"as the likeliest, and the other side at {percent(float(theirs.mean()))} of the tokens"
        if many < KINDS:
            continue
        if last < low and beyond > BEYOND:
            said = f"or any later id, and the other side at {percent(beyond)} of the tokens"
        elif inside[side].any() or theirs.sum() < OFTEN:
            continue
        statistic = (
            f"of ids {low:.0f} to {high:.0f} the {name} side never lists one {said}; "
            f"{percent(float(some.mean()))} of its lists miss one of {many:,} ids there that belong in them"
        )
        fields = {"column": name, "low": f"{low:.0f}", "high": f"{high:.0f}"}
        return Found.of_tokens(
            "vocabulary_shard", statistic, rows, some, repaired=_levelled(rows, 1.0), fields=fields
        )
    return None


def _levelled(rows: Rows, power: float) -> Rows:
    """Return rows whose rollout log-probs are raised to a power and renormalised by the shared ids.

    Tokens with too few of them are left out.
    """
    extra = rows.extra
    q = extra["mean_p"] + power * (rows.q - extra["mean_q"])
    return rows.with_q(np.where(extra["shared"] > 0, q, rows.q)).keep(extra["shared"] >= FEWEST)


LEAST, PLAIN, BENT = 0.03, 0.7, 0.3
"""Smallest |log T|, share of the mean square that a temperature explains, and largest difference between
log T of the likelier half of the ids and log T, as a share of it."""
ALL = 0.9
"""Share of sequences on the side of T from which it is that of all."""


class Fit(NamedTuple):
    """Fit of log π_train as `power` times log π_rollout over the ids that both sides list for a token.

    Attributes:
        power: with its interval over groups.
        explained: share of the mean square of the difference that it explains.
        bent: log of the power of the likelier half of the ids less that of all, over that of all.
    """

    power: Estimate
    explained: float
    bent: float

    @property
    def clear(self) -> bool:
        """Whether a temperature on one side is the cause."""
        some = abs(np.log(self.power.value)) > LEAST and self.power.off(1.0)
        return bool(some) and self.explained > PLAIN and abs(self.bent) < BENT


def fit(rows: Rows) -> Fit:
    """Fit the power by the ratio of the sums of squares, so that neither side's noise makes it smaller."""
    extra, group = rows.extra, clusters(rows)
    many = int(group.max()) + 1
    below, above = (np.bincount(group, rows.sum(extra[name]), many) for name in ("square_q", "square_p"))
    there = below > 0
    below, above, groups = below[there], above[there], int(there.sum())
    ratio = above.sum() / below.sum()
    error = np.sqrt(np.square(above - ratio * below).sum() * groups / max(groups - 1, 1)) / below.sum()
    power, error = float(np.sqrt(ratio)), float(error / (2 * np.sqrt(ratio)))
    half = error * quantile(max(groups - 1, 2))
    explained = float(1 - _left(rows, power).sum() / max(_left(rows, 1.0).sum(), 1e-300))
    head = float(np.sqrt(extra["head_p"].sum() / max(extra["head_q"].sum(), 1e-300)))
    bent = float(np.log(max(head, 1e-9)) / np.log(power)) - 1 if power != 1 else 0.0
    return Fit(Estimate(power, power - half, power + half, error, groups), explained, bent)


def _left(rows: Rows, power: float | Floats) -> Floats:
    """Return what a power, of all or of each sequence, leaves of the sum of squares of each, [S]."""
    q, p, both = (rows.sum(rows.extra[name]) for name in ("square_q", "square_p", "product"))
    return np.asarray(p - 2 * power * both + power**2 * q)


def temperature(rows: Rows) -> Found | None:
    """Find a temperature on one side: over the ids of one token one log-prob is a multiple of the other."""
    if not partial_kl(rows) or not _of_the_columns(rows):
        return None
    rows = rows.keep(rows.extra["shared"] >= FEWEST)
    if rows.tokens < 100:
        return None
    squares = [np.maximum(rows.sum(rows.extra[name]), 1e-300) for name in ("square_p", "square_q")]
    logs = 0.5 * np.log(squares[0] / squares[1])
    part, apart = rows, np.ones(rows.sequences, np.bool_)
    fitted = fit(rows)
    if np.mean(logs * np.sign(np.log(fitted.power.value)) > LEAST / 2) < ALL:
        explained = 1 - _left(rows, np.exp(logs)) / np.maximum(_left(rows, 1.0), 1e-300)
        apart = (np.abs(logs) > 2 * LEAST) & (explained > PLAIN)
        if min(apart.sum(), (~apart).sum()) < 8 or fit(rows.only(~apart)).clear:
            return None
        part = rows.only(apart)
        fitted = fit(part)
    if not fitted.clear:
        return None
    raw = _sampled_from_train(part)
    power = fitted.power
    value, *ends = (x**-1 if raw else x for x in (power.value, power.low, power.high))
    statistic = (
        f"over the ids that both sides list for a token, log π_train is {power.text} times log π_rollout and "
        f"a constant, which explains {percent(fitted.explained)} of the mean square of their difference"
    )
    fields = {
        "temperature": f"{value:.4g} [{min(ends):.4g}, {max(ends):.4g}]",
        "shape": "temperature",
        "column": "rollout" if raw else "train",
        "after": "with one temperature on both sides",
    }
    if not apart.all():
        fields["share"] = percent(float(apart.mean()))
        rest = rows.only(~apart)
        del fields["after"]
        return Found.of_sequences("mixed_temperature", statistic, rows, apart, repaired=rest, fields=fields)
    if not raw and power.value > 1:
        fields |= laws.twice(power.value)
    cause = "rollout_raw_logprobs" if raw else "trainer_temperature"
    return Found.of_all(cause, statistic, rows, repaired=_levelled(rows, power.value), fields=fields)


def _of_the_columns(rows: Rows) -> bool:
    """Return whether the lists are of the distributions that the columns are of, as far as ids tell."""
    gaps = (np.abs(getattr(rows, side) - rows.extra[f"listed_{side}"]) for side in SIDES)
    return not any(np.isfinite(gap).sum() >= 30 and np.nanmedian(gap) > 0.1 for gap in gaps)


def _sampled_from_train(rows: Rows) -> bool:
    """Return whether the mean of Δ is nearer to KL(train ‖ rollout) than to −KL(rollout ‖ train)."""
    own, other = rows.extra["kl"].mean(), rows.extra["kl_reverse"].mean()
    return bool(rows.delta.mean() > (other - own) / 2)


def partial_kl(rows: Rows) -> dict[str, Estimate]:
    """Estimate both directions of the KL over what both sides list: a lower bound; none without lists."""
    names = {"kl_listed": "kl", "kl_listed_reverse": "kl_reverse"}
    there = rows.extra.get("shared")
    if there is None or not np.isfinite(there).all() or len(np.unique(clusters(rows))) < 2:
        return {}
    return {name: estimate(rows, rows.extra[key]) for name, key in names.items()}

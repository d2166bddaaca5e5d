"""Signatures of what is logged for single tokens: another base, another token, another model, other sums.

Each takes `Rows` and returns a `Found` or None, as those of `signatures` do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from offpol_diag.diagnosis import laws
from offpol_diag.diagnosis.drift import numbers, uncertain
from offpol_diag.diagnosis.honest import unsystematic
from offpol_diag.diagnosis.rows import (
    CAP,
    Estimate,
    Flags,
    Floats,
    Ints,
    Rows,
    alike,
    bound,
    clusters,
    estimate,
)
from offpol_diag.diagnosis.signatures import FAR, Found, percent
from offpol_diag.engine.sample import IN_PROMPT

BASES = {
    np.log(2): ("rollout", "2"),
    1 / np.log(2): ("train", "2"),
    np.log(10): ("rollout", "10"),
    1 / np.log(10): ("train", "10"),
}
"""Ratio of the train to the rollout column → the column that has logarithms of another base, and the base."""
RANGES = 5


def log_base(rows: Rows) -> Found | None:
    """Find a column of logarithms to base 2 or 10: both columns have one ratio at every log-prob.

    Another temperature bends the ratio: it is 1 where a token is nearly certain.
    """
    some = (rows.q < -0.05) & (rows.p < -0.05) & (rows.q > -12)
    if some.sum() < 50 * RANGES:
        return None
    q, ratio = rows.q[some], rows.p[some] / rows.q[some]
    at = np.searchsorted(np.quantile(q, np.linspace(0, 1, RANGES + 1)[1:-1]), q)
    if np.bincount(at, minlength=RANGES).min() < 20:
        return None
    medians = np.array([np.median(ratio[at == k]) for k in range(RANGES)])
    off = {target: float(np.abs(np.log(medians / target)).max()) for target in BASES}
    target = min(off, key=off.__getitem__)
    if off[target] > 0.06:
        return None
    column, base = BASES[target]
    listed = ", ".join(f"{one:.3f}" for one in medians)
    statistic = (
        f"log π_train / log π_rollout is {listed} in five ranges of log π_rollout (medians), not 1: "
        f"{'1/' if column == 'train' else ''}log {base} = {target:.3f}"
    )
    right = replace(rows, p=rows.p / target)
    repaired = rows.with_q(rows.q * target) if column == "rollout" else right
    fields = {"column": column, "base": base}
    return Found.of_all("log_base", statistic, rows, repaired=repaired, fields=fields, exact=True)


def summed_pieces(rows: Rows) -> Found | None:
    """Find log-probs of several tokens that are summed at the first of them, with zeros at the others."""
    for name, x, other in (("rollout", rows.q, rows.p), ("train", rows.p, rows.q)):
        zero = (x == 0) & (rows.index > 0) & (np.diff(rows.position, prepend=-1) == 1)
        if zero.mean() < 0.05:
            continue
        which = np.cumsum(~zero) - 1  # the piece of each token
        first = np.flatnonzero(~zero)
        whole = np.bincount(which, other)
        behind = np.bincount(which, np.where(zero, other, 0.0))
        known = (behind < -0.5) & (whole > -40)
        if known.sum() < 20:
            continue
        summed, alone = np.abs(whole - x[first])[known], np.abs(other[first] - x[first])[known]
        if np.median(summed) > 0.25 * np.median(alone):
            continue
        share = float(np.mean(summed < np.maximum(0.5 * alone, 0.02)))
        if share < 0.8:
            continue
        statistic = (
            f"{int(zero.sum()):,} tokens hold 0 in the {name} column; the value before them is the sum of "
            f"the other column over both, to {np.median(summed):.2g} nats, in {percent(share)} of "
            f"{int(known.sum()):,} places"
        )
        total = other.copy()
        total[first] = whole
        mended = (
            replace(rows, p=total, entropy=None)
            if name == "rollout"
            else replace(rows, q=total, entropy=None)
        )
        fields = {"column": name}
        return Found.of_tokens(
            "summed_pieces", statistic, rows, zero, repaired=mended.keep(~zero), fields=fields, exact=True
        )
    return None


def top1_logged(rows: Rows) -> Found | None:
    """Find the log-prob of the likeliest token in place of the sampled one.

    Then it is never below the sampled token's, and where they differ both are probabilities of two tokens of
    one distribution: together they are at most 1.
    """
    for name, x, other in (("rollout", rows.q, rows.p), ("train", rows.p, rows.q)):
        side = f"listed_{'q' if name == 'rollout' else 'p'}"
        if side in rows.extra and np.isfinite(rows.extra[side]).any():
            continue  # the lists say it
        above = x - other
        far = above > FAR
        near = np.abs(above) < 0.1
        if far.mean() < 0.05 or far.sum() < 30 or near.mean() < 0.05 or np.mean(above < -0.3) > 0.01:
            continue
        both = np.exp(np.minimum(x[far], 0)) + np.exp(np.minimum(other[far], 0))
        share = float(np.mean(both <= 1.02))
        if share < 0.985 or (x[far] > -1e-4).mean() > 0.2 or len(np.unique(x[far])) < 0.5 * far.sum():
            continue
        statistic = (
            f"the {name} column is below the other by more than 0.3 nats at "
            f"{percent(float(np.mean(above < -0.3)))} of the tokens, above it by more than {FAR:g} at "
            f"{percent(float(far.mean()))}; both probabilities add up to at most 1.02 in {percent(share)} "
            "of these"
        )
        nothing = rows.keep(
            np.zeros(rows.tokens, bool)
        )  # what was sampled is likely where the column is right
        fields = {"column": name}
        return Found.of_tokens("top1_logged", statistic, rows, far, repaired=nothing, fields=fields)
    return None


UNCERTAIN = (-8.0, -0.3)
"""Range of log π_rollout in which a token is neither certain nor an outlier, nats."""
LEAST_GAP, LEAST_EXPLAINED = 0.12, 0.15
"""Smallest gap between ids that came before and others, nats, and share of the variance of Δ that it
explains: 0.20 to 0.79 and 30 to 48% of penalties from 1.1 on, at most 0.05 and 2% where there is none."""


def _seen(rows: Rows) -> Flags:
    """Return whether the id of a token came before in its sequence, [T]."""
    assert rows.ids is not None
    ids = np.unique(rows.ids, return_inverse=True)[1]
    first = np.unique(rows.owner * (int(ids.max()) + 1) + ids, return_index=True)[1]
    found = np.ones(rows.tokens, bool)
    found[first] = False
    return found


class Gap(NamedTuple):
    """What a flag explains of Δ: means of flagged and other tokens, and the share of the variance."""

    seen: Flags
    after: Estimate
    before: Estimate
    explained: float

    @property
    def size(self) -> float:
        """The difference of the means, nats."""
        return self.after.value - self.before.value

    @property
    def sure(self) -> bool:
        """Whether the difference is beyond doubt."""
        return self.size > bound(self.after.groups) * float(np.hypot(self.after.error, self.before.error))


def _gap(rows: Rows, some: Flags, seen: Flags) -> Gap | None:
    """Compare flagged tokens with others, among some; None where there are few of a kind."""
    if min((some & seen).sum(), (some & ~seen).sum()) < 50:
        return None
    delta = np.clip(rows.delta, -CAP, CAP)
    after, before = (estimate(rows, delta, some & part) for part in (seen, ~seen))
    among, expected = delta[some], np.where(seen[some], after.value, before.value)
    left, whole = np.square(among - expected).sum(), np.square(among - among.mean()).sum()
    return Gap(seen, after, before, float(1 - left / whole) if whole > 0 else 0.0)


def repetition_penalty(rows: Rows) -> Found | None:
    """Find tokens that the engine makes less likely once they have come: those seen before stand apart.

    A repetition penalty counts the ids of the prompt too; presence and frequency penalties do not.
    """
    if rows.ids is None:
        return None
    came, prompt = _seen(rows), rows.extra.get(IN_PROMPT)
    some = (rows.q > UNCERTAIN[0]) & (rows.q < UNCERTAIN[1])
    whole = came if prompt is None else came | (prompt > 0)
    found = [one for one in (_gap(rows, some, came), _gap(rows, some, whole)) if one is not None]
    if not found:
        return None
    best = max(found, key=lambda one: one.explained)
    if best.size < LEAST_GAP or best.explained < LEAST_EXPLAINED or not best.sure:
        return None
    statistic = (
        "log π_train − log π_rollout of tokens whose id came before in the "
        f"{'response' if best.seen is came else 'prompt or response'} lies {best.size:.2g} nats "
        f"above that of others ({best.after.value:.2g} and {best.before.value:.2g}), which explains "
        f"{percent(best.explained)} of its variance"
    )
    alone = None if prompt is None else _gap(rows, some & ~came, whole)
    fields = {}
    if alone is not None and alone.sure and alone.size > 0.5 * best.size:
        fields = PENALTIES["prompt"]
    elif alone is not None and alone.size < 0.25 * best.size:
        fields = PENALTIES["response"]
    if alone is not None:
        statistic += f"; ids that only the prompt holds lie {alone.size:.2g} above ids that are new"
    repaired = rows.keep(~best.seen)
    return Found.of_tokens(
        "repetition_penalty", statistic, rows, best.seen, repaired=repaired, fields=fields, approximate=True
    )


PENALTIES = {
    "prompt": {
        "sentence": "the engine penalises tokens that came before, in the prompt too, as repetition_penalty "
        "does, and only the rollout column knows of it",
        "fix": "sample with repetition_penalty=1.0 (vLLM: "
        'generation_config="vllm" takes none from the model)',
    },
    "response": {
        "sentence": "the engine penalises tokens that came before in the response, not those of the prompt, "
        "as presence_penalty and frequency_penalty do, and only the rollout column knows of it",
        "fix": "sample with presence_penalty=0 and frequency_penalty=0",
    },
}
"""What is penalised → the sentences, of vLLM and SGLang alike."""


def draft_log_probs(rows: Rows) -> Found | None:
    """Find tokens whose log-prob is that of a draft model: exact agreement and far tokens take turns.

    Of a proposed and accepted token the draft model's log-prob is logged, of any other the engine's own.
    """
    part = rows.keep((rows.q > UNCERTAIN[0]) & (rows.q < UNCERTAIN[1]))
    if part.tokens < 300:
        return None
    low, high = np.quantile(part.scaled, (0.15, 0.85))
    exact = part.scaled < max(4 * low, 0.02)
    share = float(exact.mean())
    ratio = estimate(rows, 1 + np.expm1(np.minimum(rows.delta, 3.0)))
    if high < 0.2 or low > 0.06 * high or not 0.12 < share < 0.9:
        return None
    if not (ratio.off(1) > 0 and ratio.value > 1.05) or min(_far(part.delta), _far(-part.delta)) < 0.01:
        return None
    changes = float((exact[1:] != exact[:-1])[part.index[1:] > 0].mean() / (2 * share * (1 - share)))
    long = part.mean(exact)[part.lengths >= 10]
    if not 0.8 < changes < 1.2 or len(long) < 8 or np.quantile(long, 0.1) < 0.3 * share:
        return None  # in runs, or in whole sequences
    statistic = (
        f"{percent(share)} of the uncertain tokens agree to {max(4 * low, 0.02):.2g}, the others differ by "
        f"{part.size[~exact].mean():.2g} nats on average; both alternate within the responses as by chance; "
        f"E[r] = {ratio.text}"
    )
    far = rows.scaled >= max(4 * low, 0.02)
    return Found.of_tokens("draft_log_probs", statistic, rows, far, approximate=True)


def _far(delta: Floats) -> float:
    """Return the share of tokens with Δ above `FAR`."""
    return float(np.mean(delta > FAR))


def mixed_temperature(rows: Rows) -> Found | None:
    """Find sequences, a part of all, that a temperature on one side explains, while the others agree."""
    level = rows.mean(rows.scaled)
    usual = float(np.quantile(level, 0.1))
    apart = (level > 4 * usual) & (level > 0.05)
    share = float(apart.mean())
    if apart.sum() < 8 or (~apart).sum() < 8 or not 0.03 < share < 0.9:
        return None
    some, rest = rows.only(apart), rows.only(~apart)
    fitted = laws.fit_temperature(some)
    if not (fitted.likely and fitted.explained > laws.EXPLAINED and fitted.bent < MOST_BENT):
        return None
    if abs(np.log(fitted.power)) < 0.1 or laws.fit_temperature(rest).clear:
        return None
    k1 = float(-some.delta.mean())
    temperature = 1 / fitted.power if k1 < 0 else fitted.power
    statistic = (
        f"in {int(apart.sum()):,} of {rows.sequences:,} sequences log π_train follows {fitted.power:.2f} × "
        f"log π_rollout (renormalised), which explains {percent(fitted.explained)} of the mean square of Δ; "
        f"the others differ by {rest.size.mean():.2g} nats a token on average"
    )
    fields = {
        "share": percent(share),
        "temperature": f"{temperature:.2g}",
        "column": "rollout" if k1 < 0 else "train",
        "shape": "temperature",
    }
    return Found.of_sequences(
        "mixed_temperature", statistic, rows, apart, repaired=rest, fields=fields, approximate=True
    )


MOST_BENT = 0.2
BELOW = 3.0
"""Standard errors of k1 below 0 from which columns may be exchanged, where E[r] is off beyond doubt."""


def columns_exchanged(rows: Rows) -> Found | None:
    """Find that tokens were sampled from what the train column holds: k1 < 0, and E[1/r] = 1, not E[r].

    Where log π_train follows a power of log π_rollout, it is the temperature that one column lacks.
    """
    k1 = estimate(rows, -rows.delta)
    if k1.errors_from(0.0) > -BELOW or k1.value > -1e-4:
        return None
    ratio, inverse = (estimate(rows, 1 + np.expm1(np.minimum(x, 3.0))) for x in (rows.delta, -rows.delta))
    if ratio.off(1) <= 0 or inverse.off(1) or abs(inverse.value - 1) > 0.25 * (ratio.value - 1):
        return None
    fitted = laws.fit_temperature(rows)
    if abs(np.log(fitted.power)) > 0.03 or laws.few_far(rows):
        return None
    statistic = (
        f"k1 = {k1.text} nats and E[r] = {ratio.text}; with the columns exchanged k1 = "
        f"{-k1.value:.2g} and E[r] = {inverse.text}"
    )
    repaired = replace(rows, q=rows.p, p=rows.q, entropy=None)
    return Found.of_all("columns_exchanged", statistic, rows, repaired=repaired)


def scored_twice(rows: Rows) -> Found | None:
    """Find a trainer whose second scoring differs from its first about as much as from the engine."""
    again, some = rows.extra.get("old_repeat"), uncertain(rows)
    if again is None or some.sum() < 100:
        return None
    scale = -np.expm1(rows.q[some]) * 0.6745
    noise, size = (float(np.median(np.abs(x[some]) / scale)) for x in (rows.p - again, rows.delta))
    if noise < NOISY or noise < 0.5 * size:
        return None
    statistic = (
        f"scored a second time, the train column differs by {noise:.2g} of the uncertainty of a token, and "
        f"from the rollout column by {size:.2g}"
    )
    return Found.of_all("stochastic_forward", statistic, rows, fields={"column": "train"})


def current_anew(rows: Rows) -> Found | None:
    """Find current log-probs that differ before any update, and between tokens of one past and weights."""
    first, moved = rows.only(_not_updated(rows)), current_drift(rows)
    if moved is None or moved.ids is None or current_size(first) < NOISY:
        return None
    keys = zip(*(rows.column(name) for name in ("group_id", "minibatch", *_epochs(rows))), strict=True)
    within = [None if key[0] is None else str(key) for key in keys]
    cell, again = _repeated(replace(moved, scalars={**rows.scalars, "group_id": within}))
    if len(cell) < 8:
        return None
    off = moved.delta[again] / -np.expm1(moved.q[again])
    size, scatter = (float(np.median(x)) / 0.6745 for x in (np.abs(off), _within(cell, off)))
    if scatter < max(0.5 * size, 0.7 * NOISY):
        return None  # weights that were updated, or another code path, are off alike
    statistic = (
        f"in minibatch 0, before any update, current_log_probs differ from old_log_probs by "
        f"{current_size(first):.2g} of the uncertainty of a token ({first.sequences:,} sequences); at "
        f"{len(cell):,} tokens of one minibatch with the same tokens before them as another, the differences "
        f"scatter by {scatter:.2g} around their mean, and are {size:.2g} large"
    )
    return Found.of_all("stochastic_forward", statistic, rows, fields={"column": "current"})


def _epochs(rows: Rows) -> list[str]:
    """Return the columns that number epochs, in each of which minibatches may count from 0."""
    return [name for name in rows.scalars if "epoch" in name.lower()]


def _not_updated(rows: Rows) -> Flags:
    """Return which sequences the dump says were scored before the first update of their step, [S]."""
    first = np.asarray(numbers(rows.column("minibatch")) == 0)
    steps = np.unique([str(one) for one in rows.column("step")], return_inverse=True)[1]
    for name in _epochs(rows):
        epoch = np.nan_to_num(numbers(rows.column(name)), nan=np.inf)
        least = np.full(int(steps.max(initial=0)) + 1, np.inf)
        np.minimum.at(least, steps, epoch)
        first &= epoch == least[steps]
    return first


def current_drift(rows: Rows) -> Rows | None:
    """Return the rows with log π_old and log π_current in place of the columns; None for too few tokens."""
    current = rows.extra.get("current")
    if current is None or uncertain(rows).sum() < 100:
        return None
    return replace(rows, q=rows.p, p=current)


def current_size(rows: Rows) -> float:
    """Return by what part of its uncertainty a token's current log-prob differs from the old one."""
    moved = current_drift(rows)
    if moved is None:
        return 0.0
    some = moved.keep(uncertain(moved))
    return float(np.median(some.scaled)) / 0.6745 if some.tokens else 0.0


def current_undecided(rows: Rows) -> str:
    """Return what the dump cannot tell of current log-probs that differ from the old ones, or nothing."""
    part = rows.only(_not_updated(rows))
    if current_size(part) >= NOISY:
        return (
            "current_log_probs that differ from old_log_probs in minibatch 0, by noise, another code path or "
            "an update before they were written: needs the column old_log_probs_repeat"
        )
    moved = current_drift(rows)
    if part.sequences or moved is None or current_size(rows) < NOISY:
        return ""
    share = laws.systematic(moved)
    if share is not None and not unsystematic(share):
        return ""  # training moves tokens of one kind alike
    return (
        "current_log_probs that differ from old_log_probs by training, or by noise as well (dropout, "
        "router): needs the column minibatch"
    )


NOISY = 0.1
"""Scale of the difference of two scorings, over 1 − π, that no rounding reaches: in bf16 it is 0.04."""


def truncated(rows: Rows) -> Found | None:
    """Find truncated sampling that only the rollout column knows of, by the mass that was kept."""
    mass = rows.extra.get("kept_mass")
    if mass is None:
        return None
    whole, some = rows.q + np.log(np.clip(mass, 1e-9, 1.0)), mass < 0.999
    if some.sum() < 50:
        return None
    logged, undone = (float(np.median(np.abs(rows.p - q)[some])) for q in (rows.q, whole))
    if undone > 0.3 * logged:
        return None  # the trainer knows of it too, or something else is larger
    statistic = (
        f"kept_mass is below 0.999 at {percent(float(some.mean()))} of the tokens; log π_train differs there "
        f"by {logged:.2g} nats from log π_rollout, and by {undone:.2g} from log π_rollout + log kept_mass"
    )
    fields = {"after": "with the kept mass given back to the rollout log-probs"}
    return Found.of_all("truncated_sampling", statistic, rows, repaired=rows.with_q(whole), fields=fields)


def stochastic_forward(rows: Rows) -> Found | None:
    """Find a forward that differs each time: tokens after one prompt and prefix differ in one column only."""
    if rows.ids is None:
        return None
    cell, again = _repeated(rows)
    if len(cell) < 24:
        return None
    scale = -np.expm1(rows.q[again])
    q, p = rows.q[again] / scale, rows.p[again] / scale
    size = float(np.median(np.abs(p - q)))
    scatter = {name: float(np.median(_within(cell, x))) for name, x in (("rollout", q), ("train", p))}
    both = float(np.median(_within(cell, p - q)))
    column = max(scatter, key=scatter.__getitem__)
    if size < 0.05 or both < 0.5 * size or min(scatter.values()) > 0.2 * scatter[column]:
        return None
    statistic = (
        f"{len(cell):,} tokens have the same prompt and the same tokens before them as another: Δ/(1 − q) "
        f"scatters there by {both:.2g} around their mean, {both / size:.2f} of its size; the rollout column "
        f"by {scatter['rollout']:.2g}, the train column by {scatter['train']:.2g}"
    )
    cause, fields = "stochastic_forward", {"column": column}
    level = rows.mean(rows.scaled)
    if 0.03 < np.mean(level < 0.1 * np.median(level)) < 0.6 or _first_repeat(rows, both):
        cause = "packing_leak"
    return Found.of_all(cause, statistic, rows, fields=fields)


def _first_repeat(rows: Rows, scatter: float) -> bool:
    """Return whether first sequences of packs, which have none before them, scatter far less than all."""
    first = rows.only(numbers(rows.column("pack_index")) == 0)
    if first.sequences < 8:
        return False
    cell, again = _repeated(first)
    off = first.delta[again] / -np.expm1(first.q[again])
    return len(cell) >= 8 and float(np.median(_within(cell, off))) < 0.3 * scatter


def _repeated(rows: Rows) -> tuple[Ints, Ints]:
    """Return tokens that come again after one prompt and prefix: number of the context and index of each."""
    assert rows.ids is not None
    group = clusters(rows, "prompt_ids" if "prompt_ids" in rows.scalars else "group_id")
    which = alike(rows) * (int(group.max()) + 1) + group
    chance = np.random.default_rng(0)
    values, ids = np.unique(rows.ids, return_inverse=True)
    code = chance.integers(1, 1 << 62, len(values)).astype(np.uint64)
    times = chance.integers(1, 1 << 62, int(rows.lengths.max())).astype(np.uint64) | np.uint64(1)
    mixed = np.cumsum(code[ids] * times[rows.index])  # of a prefix, modulo 2^64
    begin = rows.starts[:-1]
    prefix = mixed - np.where(begin > 0, mixed[begin - 1], np.uint64(0))[rows.owner]
    whole = (rows.index == rows.position) & (rows.index < 64)
    some = np.flatnonzero(whole & (rows.q > -8) & (rows.q < -0.02))
    key = np.stack([which[rows.owner][some], rows.index[some], prefix[some].astype(np.int64)])
    _, cell, many = np.unique(key, axis=1, return_inverse=True, return_counts=True)
    again = many[cell.ravel()] > 1
    return np.unique(cell.ravel()[again], return_inverse=True)[1], some[again]


def _within(cell: Ints, x: Floats) -> Floats:
    """Return |x − mean of its cell|, unbiased for the number of values in it."""
    many = np.bincount(cell)
    mean = np.bincount(cell, x) / many
    return np.asarray(np.abs(x - mean[cell]) * np.sqrt(many / np.maximum(many - 1, 1))[cell])

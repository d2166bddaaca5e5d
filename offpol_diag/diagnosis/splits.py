"""Splits: ways of dividing the tokens of a dump, in words, with the measurement that each place calls for.

A place points to a family of faults and to the measurement that decides. It accuses neither engine nor
trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from offpol_diag.core.kept_rows import PLACE
from offpol_diag.diagnosis.rows import MACHINES, MOST_VALUES, Floats, Ints, Rows
from offpol_diag.dump.schema import DIGESTS

Values = Floats | Ints | None


class Split(NamedTuple):
    """A way of dividing tokens, and the measurement that decides what a place along it comes from.

    `values` are a number for each token, [T], or sequence, [S], NaN where it has none, or None where the dump
    has none; `noun` is one of them in words. `kinds` name the values 0, 1, … where they have no order.
    """

    id: str
    values: Callable[[Rows], Values]
    noun: str
    measure: str
    kinds: tuple[str, ...] = ()

    def words(self, low: float | None, high: float | None) -> tuple[str, str]:
        """Return in words what lies from `low` to `high`, None for an open end, and the rest."""
        if (self.id, low, high) in WORDS:
            return WORDS[self.id, low, high]
        first, last = (self.noun.format(0.0 if end is None else end) for end in (low, high))
        if low is None:
            return f"up to {last}", "after that"
        if high is None:
            return f"from {first} on", "before that"
        return (f"at {first}" if low == high else f"from {first} to {last}"), "elsewhere"


def column(name: str, add: float = 0) -> Callable[[Rows], Values]:
    """Return what reads a column of numbers, [S]."""
    return lambda rows: rows.numbers(name) + add if name in rows.scalars else None


def visit(rows: Rows) -> Values:
    """Return at which of the steps with its prompt each sequence was sampled, counted from 1, [S]."""
    name = "prompt_ids" if "prompt_ids" in rows.scalars else "group_id"
    if name not in rows.scalars:
        return None
    pairs = [*zip(map(str, rows.column(name)), rows.numbers("step").tolist(), strict=True)]
    steps: dict[str, list[float]] = {}
    for prompt, step in sorted(set(pairs)):
        steps.setdefault(prompt, []).append(step)
    return np.array([1 + steps[prompt].index(step) for prompt, step in pairs])


def first_use(rows: Rows) -> Values:
    """Return 1 at the first use of a token id in its response, else 0, [T]."""
    return None if rows.ids is None else (~rows.repeated).astype(np.int64)


def absolute(rows: Rows) -> Values:
    """Return the position of each token in prompt and response together, [T]."""
    known = "prompt_length" in rows.scalars
    return rows.position + rows.numbers("prompt_length")[rows.owner] if known else None


def along(rows: Rows) -> tuple[Floats, Floats]:
    """Return the middle of each token in its row, and the width of the row, in tokens, [T] each.

    A row is prompt and response where the dump has prompt_length, else the response, with masked tokens.
    """
    before = np.nan_to_num(rows.numbers("prompt_length"))[rows.owner]
    return rows.position + 0.5 + before, (0 if rows.width is None else rows.width) + before


def eighth(rows: Rows) -> Values:
    """Return k − 1 for the token on either side of k eighths of the row, NaN for others, [T]."""
    at, width = along(rows)
    k = np.round(at * 8 / width)
    return np.where((np.abs(at - k * width / 8) <= 1) & (k > 0) & (k < 8), k - 1, np.nan)


CONTEXT = "Compare the token ids and the attention mask of one row, tool outputs included, on both sides."
CACHE = "Rows of a prompt share what a prefix cache keeps: sample one step with prefix caching off."
PARALLEL = "Sequence parallelism and packing cut rows at such places: score the same rows once without them."
ABSOLUTE = "Windows and RoPE depend on it: compare the position ids of one long row, and score it in float32."
SWITCH = "Record the version of the weights at each token, and score one response in a single pass."
EDGE = "Print ids and both log-probs at the ends of one row on each side: columns are cut and padded there."
LENGTH = "Rows are batched and cut by their length: score one of the rows concerned in a batch of its own."
LAG = "Older weights differ more: compare a checksum of the weights of both sides at lag 0."
TIME = "Compare a checksum of the weights of both sides, at the last step before the change and the next one."
PENALTY = "Penalties act on tokens that were used before: sample one step without penalties."
OUTCOME = "Advantages are known only after sampling: compare the rows before and after any are filtered."
KIND = "Compare what each side is given for a row of each kind: ids, masks, positions, images, settings."
MACHINE = "Let that machine and another one compute the same row, and compare a checksum of their weights."
EIGHTHS = (
    *("an eighth", "a quarter", "three eighths", "half"),
    *("five eighths", "three quarters", "seven eighths"),
)
USES, SIGNS = ("later uses", "first uses"), ("A < 0", "A = 0", "A > 0")
SPLITS = (
    Split("turn", lambda rows: None if rows.turn is None else rows.turn + 1, "turn {:g}", CONTEXT),
    Split("place_in_group", column(PLACE, add=1), "row {:g} of a prompt", CACHE),
    Split("visit", visit, "visit {:g} of a prompt", CACHE),
    Split("row_piece", eighth, "at {} of the row", PARALLEL, EIGHTHS),
    Split("absolute_position", absolute, "position {:g} of prompt and response", ABSOLUTE),
    Split("position", lambda rows: rows.position, "token {:g} of a response", SWITCH),
    Split("from_end", lambda rows: -1 - rows.from_end, "token {:g} from the end of a response", EDGE),
    Split("row_share", lambda rows: np.divide(*along(rows)) * 100, "{:.0f}% of the row", PARALLEL),
    Split("policy_lag", column("policy_lag"), "lag {:g}", LAG),
    Split("step", column("step"), "step {:g}", TIME),
    Split("length", lambda rows: rows.lengths, "a length of {:g} tokens", LENGTH),
    Split("first_use", first_use, "at {} of a token id in a response", PENALTY, USES),
    Split("advantage", lambda rows: rows.sign, "where {}", OUTCOME, SIGNS),
)
"""Of splits that gain as much, the first one is listed first."""
WORDS: dict[tuple[str, float | None, float | None], tuple[str, str]] = {
    ("turn", 2, None): ("after the first tool output", "before it"),
    ("turn", None, 1): ("before the first tool output", "after it"),
    ("place_in_group", 2, None): ("in all rows of a prompt but the first", "in the first"),
    ("place_in_group", None, 1): ("in the first row of a prompt", "in the others"),
    ("visit", 2, None): ("in rows of prompts that come again", "at a prompt's first visit"),
    ("visit", None, 1): ("at the first visit of a prompt", "where it comes again"),
    ("from_end", -1, None): ("at the last token of a response", "elsewhere"),
    ("position", None, 0): ("at the first token of a response", "elsewhere"),
    ("policy_lag", None, 0): ("at lag 0", "above it"),
}
"""Split, first and last value → the tokens between in words, and the rest, where there is a plainer name."""
NO_SPLITS = {PLACE, "sequence_id", "group_id", "prompt_ids", "prompt_length", *DIGESTS}
NO_SPLITS |= {split.id for split in SPLITS}
"""Columns that are no split of their own."""


def splits(rows: Rows) -> Iterator[Split]:
    """Yield the splits above, and one for each further column of the sequences."""
    yield from SPLITS
    for name, values in rows.scalars.items():
        known = {one for one in values if isinstance(one, int | float | str)}
        machine = MACHINES.search(name.lower())
        if name in NO_SPLITS or not known:
            continue
        if not machine and not any(isinstance(one, bool | str) for one in known):
            yield Split(name, column(name), f"{name} {{:g}}", KIND)
        elif len(known) <= MOST_VALUES:
            kinds = tuple(sorted(map(str, known)))
            codes = np.array([np.nan if one is None else kinds.index(str(one)) for one in values])
            measure = MACHINE if machine else KIND
            yield Split(name, lambda _, codes=codes: codes, f"with {name} = {{}}", measure, kinds)  # type: ignore[misc]

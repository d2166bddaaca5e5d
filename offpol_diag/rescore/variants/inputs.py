"""Other inputs: prompts without a part, padding that is attended, other positions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from offpol_diag.rescore.score import Ints, Row

Rows = Sequence[Row]


def shared(prompts: Sequence[Ints]) -> int:
    """Return the length of what all prompts begin with."""
    most = min(map(len, prompts))
    first = prompts[0][:most]
    same = np.logical_and.reduce([one[:most] == first for one in prompts])
    return most if same.all() else int(np.argmin(same))


def prompts_of(rows: Rows) -> list[Ints]:
    """Return the prompts."""
    return [row.ids[: row.start] for row in rows]


def cut(rows: Rows, to: Callable[[Ints], Ints]) -> list[Row]:
    """Return rows with another prompt; of an empty one the last token stays: it predicts."""
    found = []
    for row in rows:
        prompt = to(row.ids[: row.start])
        prompt = prompt if len(prompt) else row.ids[row.start - 1 : row.start]
        found.append(replace(row, ids=np.concatenate((prompt, row.ids[row.start :])), start=len(prompt)))
    return found


def system_block(prompt: Ints, marks: Collection[int]) -> tuple[int, int]:
    """Return where the first block of a template begins and ends: before the next block of its kind, or role.

    ChatML opens each block with the same mark; others have a mark for each role, after one that ends a block.
    """
    at = [i for i, one in enumerate(prompt.tolist()) if one in marks]
    openers = [
        i for i in at if i > 0 or len(at) < 2 or at[1] > 1
    ]  # a token that begins the text opens no block
    if len(openers) < 2:
        return 0, 0
    first = openers[0]
    again = next((i for i in openers[1:] if prompt[i] == prompt[first]), None)
    if again is not None:
        return first, again
    ended = openers[1] + 1 in openers  # an end of the block right before the next mark
    return first, openers[2] if ended and len(openers) > 2 else openers[1]


def without_system(rows: Rows, marks: Collection[int]) -> list[Row]:
    """Drop the system block of the template."""

    def dropped(prompt: Ints) -> Ints:
        begin, end = system_block(prompt, marks)
        return np.concatenate((prompt[:begin], prompt[end:]))

    return cut(rows, dropped)


def without_beginning(rows: Rows, keep: int) -> list[Row]:
    """Drop what all prompts begin with, but for its last tokens (the header of the user's turn) and a BOS."""
    prompts = prompts_of(rows)
    first, same = prompts[0], shared(prompts)
    end, begin = same - keep, 0 if (first[1:same] == first[0]).any() else 1
    return cut(rows, lambda prompt: np.concatenate((prompt[:begin], prompt[max(end, begin) :])))


def suffix(rows: Rows) -> int:
    """Return the length of what all prompts end with, but for whole prompts that are alike."""
    prompts = prompts_of(rows)
    same = shared([one[::-1] for one in prompts])
    return same if same < min(map(len, prompts)) else 0


def padded(rows: Rows, pad: int) -> list[Row]:
    """Pad on the left, up to the longest prompt, with padding that is attended."""
    most = max(row.start for row in rows)
    return [
        replace(row, ids=np.concatenate((np.full(most - row.start, pad), row.ids)), start=most)
        for row in rows
    ]


def moved(rows: Rows, by: Callable[[Row], int]) -> list[Row]:
    """Let positions jump where the response begins."""
    return [
        replace(
            row,
            positions=np.concatenate((np.arange(row.start), np.arange(row.start, len(row.ids)) + by(row))),
        )
        for row in rows
    ]

"""Tokens and sequences that one preset drops and another keeps."""

from __future__ import annotations

from collections.abc import Sequence, Set

from offpol_diag.blocks import Block, Cell, Table, Text, filled
from offpol_diag.numerals import count, say, written
from offpol_diag.summary import Comparison, Drops, Number, Subset

HEADER = ("what", "count", "share", "mean length", "mean reward", "A > 0", "A < 0", "mean Δ or ΣΔ, nats")
EXAMPLES = (
    "sequence",
    "dropped by",
    "kept by",
    "step",
    "length",
    "tokens lost",
    "ΣΔ, nats",
    "reward",
    "what dropped them",
)
NOTE = (
    "A token is dropped where nothing of its update is left: rejected, vetoed, or of weight 0; a sequence, "
    "where all its tokens are. Lengths and rewards are those of the sequences. A sequence has the sign of "
    "its mean advantage. Δ is per token, ΣΔ per sequence."
)
TOO_MANY = "Name up to 8 presets to see what each drops that the first keeps."


def drops(found: Comparison, many: bool) -> tuple[Block, ...]:
    """Return sentences, a table by kind, and examples."""
    if many:
        return (Text(TOO_MANY),)
    if not found.drops or found.all_tokens is None or found.all_sequences is None:
        return ()
    said = tuple(Text(_sentence(one, found.all_sequences)) for one in found.drops)
    return filled(*said, _kinds(found, found.all_tokens, found.all_sequences), _examples(found))


def _sentence(one: Drops, every: Subset) -> str:
    head = f"{one.dropped_by} drops"
    if not one.tokens.count:
        return f"{head} nothing that {one.kept_by} keeps."
    whole = one.sequences
    share = written(one.tokens.share).value
    text = f"{head} {count(one.tokens.count)} tokens ({share}) that {one.kept_by} keeps"
    if not whole.count:
        return f"{text}, and no sequence whole."
    lengths = f"{say(whole.length)} tokens long on average, against {say(every.length)} of all"
    rewards = f", of mean reward {say(whole.reward)} against {say(every.reward)}"
    many = f"{count(whole.count)} sequences ({written(whole.share).value})"
    return (
        f"{text}, among them all of {many}; these are {lengths}"
        f"{rewards if whole.reward.value is not None else ''}."
    )


def _kinds(found: Comparison, tokens: Subset, sequences: Subset) -> Table:
    ways = [(f"dropped by {one.dropped_by}, kept by {one.kept_by}", one) for one in found.drops]
    subsets = [
        ("all tokens", tokens),
        *((f"tokens {way}", one.tokens) for way, one in ways if one.tokens.count),
        ("all sequences", sequences),
        *((f"sequences {way}", one.sequences) for way, one in ways if one.sequences.count),
    ]
    rows: list[tuple[Cell, ...]] = [
        (what, of.count, of.share, of.length, of.reward, of.positive, of.negative, of.log_ratio)
        for what, of in subsets
    ]
    absent = {i for i, cell in enumerate(rows[0]) if isinstance(cell, Number) and cell.unknown}
    header, *kept = _without(absent, HEADER, *rows)
    lacking = tuple(f"The dump does not say: {HEADER[i]}." for i in sorted(absent))
    caption = "What one drops and the other keeps"
    return Table("drops", caption, [*map(str, header)], kept, (NOTE, *lacking))


def _examples(found: Comparison) -> Table:
    """Return a table of examples, without columns that the dump lacks."""
    rows: list[tuple[Cell, ...]] = [
        (
            row.sequence_id,
            one.dropped_by,
            one.kept_by,
            None if row.step is None else str(row.step),
            row.length,
            row.tokens,
            Number(value=row.log_ratio_sum),
            None if row.reward is None else Number(value=row.reward),
            "; ".join(row.fired),
        )
        for one in found.drops
        for row in one.examples
    ]
    absent = {i for i in range(len(EXAMPLES)) if all(row[i] is None for row in rows)}
    header, *kept = _without(absent, EXAMPLES, *rows)
    caption = "Sequences that lose tokens to one preset only, the largest |ΣΔ| first"
    return Table("dropped", caption, [*map(str, header)], kept, context=("step", "reward"))


def _without(absent: Set[int], *rows: Sequence[Cell]) -> list[list[Cell]]:
    return [[cell for i, cell in enumerate(row) if i not in absent] for row in rows]

"""Tokens and sequences that one preset drops and another keeps."""

from __future__ import annotations

from offpol_diag.blocks import Block, Cell, Table, Text
from offpol_diag.numerals import count, say, written
from offpol_diag.summary import Comparison, Drops, LostSequence, Number, Subset

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
    return (*said, _kinds(found, found.all_tokens, found.all_sequences), *_examples(found))


def _sentence(one: Drops, every: Subset) -> str:
    head = f"{one.dropped_by} drops"
    if not one.tokens.count:
        return f"{head} nothing that {one.kept_by} keeps."
    whole = one.sequences
    text = f"{head} {count(one.tokens.count)} tokens ({_share(one.tokens)}) that {one.kept_by} keeps"
    if not whole.count:
        return f"{text}, and no sequence whole."
    lengths = f"{say(whole.length)} tokens long on average, against {say(every.length)} of all"
    rewards = f", of mean reward {say(whole.reward)} against {say(every.reward)}"
    return (
        f"{text}, among them all of {count(whole.count)} sequences ({_share(whole)}); these are {lengths}"
        f"{rewards if whole.reward.value is not None else ''}."
    )


def _share(lot: Subset) -> str:
    return written(lot.share).value


def _kinds(found: Comparison, tokens: Subset, sequences: Subset) -> Table:
    rows = [_row("all tokens", tokens)]
    rows += [_row(f"tokens {_way(one)}", one.tokens) for one in found.drops if one.tokens.count]
    rows += [_row("all sequences", sequences)]
    rows += [_row(f"sequences {_way(one)}", one.sequences) for one in found.drops if one.sequences.count]
    absent = [i for i, cell in enumerate(rows[0]) if isinstance(cell, Number) and cell.unknown]
    kept = tuple(tuple(cell for i, cell in enumerate(row) if i not in absent) for row in rows)
    header = tuple(head for i, head in enumerate(HEADER) if i not in absent)
    lacking = tuple(f"The dump does not say: {HEADER[i]}." for i in absent)
    return Table("drops", "What one drops and the other keeps", header, kept, (NOTE, *lacking))


def _way(one: Drops) -> str:
    return f"dropped by {one.dropped_by}, kept by {one.kept_by}"


def _row(what: str, lot: Subset) -> tuple[Cell, ...]:
    return (
        what,
        lot.count,
        lot.share,
        lot.length,
        lot.reward,
        lot.positive,
        lot.negative,
        lot.log_ratio,
    )


def _examples(found: Comparison) -> tuple[Block, ...]:
    """Return a table of examples, without columns that the dump lacks."""
    rows = [_example(one, row) for one in found.drops for row in one.examples]
    if not rows:
        return ()
    absent = [i for i in range(len(EXAMPLES)) if all(row[i] is None for row in rows)]
    kept = tuple(tuple(cell for i, cell in enumerate(row) if i not in absent) for row in rows)
    header = tuple(head for i, head in enumerate(EXAMPLES) if i not in absent)
    caption = "Sequences that lose tokens to one preset only, the largest |ΣΔ| first"
    return (Table("dropped", caption, header, kept, context=("step", "reward")),)


def _example(one: Drops, row: LostSequence) -> tuple[Cell, ...]:
    reward = None if row.reward is None else Number(value=row.reward)
    total = Number(value=row.log_ratio_sum)
    why = "; ".join(row.fired)
    step = None if row.step is None else str(row.step)
    return (row.sequence_id, one.dropped_by, one.kept_by, step, row.length, row.tokens, total, reward, why)

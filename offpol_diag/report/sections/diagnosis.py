"""Section on the diagnosis, bug or real mismatch: one sentence, causes with evidence, and open questions."""

from __future__ import annotations

from offpol_diag.blocks import Block, Section, Text, Tone, Verdict, filled
from offpol_diag.numerals import count, counted, say, say_value
from offpol_diag.summary import (
    After,
    CandidateCause,
    Cause,
    Diagnosis,
    DumpFacts,
    Number,
    Numbers,
    Summary,
)

DIAGNOSES: dict[str, tuple[str, Tone]] = {
    "healthy": ("Healthy", "good"),
    "honest_mismatch": ("Honest mismatch", "info"),
    "bug": ("Bug", "bad"),
    "cannot_tell": ("Cannot tell", "warn"),
}
UNDECIDED = "Cannot tell from this dump: "
"""How the headline begins where several causes fit."""
NOTHING = "nothing in this dump."
KINDS: dict[str, Tone] = {"bug": "bad", "honest": "info"}


def diagnosis(summary: Summary) -> Section | None:
    """Return the diagnosis of the dump, with skipped rows, or of both runs; None if there is neither."""
    own = summary.diagnosis, summary.dump, summary.metrics
    other = summary.against
    if other is None:
        conclusion, *rest = _blocks(*own) or (None,)
        blocks = filled(conclusion, _skipped(summary), *rest)
    else:
        theirs = {one.name: one.b for one in other.contrasts}
        blocks = (*_blocks(*own, "A: "), *_blocks(other.b.diagnosis, other.b.dump, theirs, "B: "))
    return Section("diagnosis", "Diagnosis", blocks) if blocks else None


def is_bug(summary: Summary) -> bool:
    """Return whether the log-probs are logged wrongly, so that no correction may be ranked."""
    return summary.diagnosis is not None and summary.diagnosis.verdict == "bug"


def undecided(summary: Summary) -> Diagnosis | None:
    """Return the diagnosis of a dump that cannot decide between causes that fit; None of any other."""
    given = summary.diagnosis
    return given if given is not None and given.candidates else None


def _skipped(summary: Summary) -> Verdict | None:
    skipped = summary.dump.skipped
    if not skipped.count:
        return None
    rows = "1 row was" if skipped.count == 1 else f"{count(skipped.count)} rows were"
    text = f"{rows} skipped as bad; no number here covers them."
    return Verdict("Skipped rows", text, "warn", tuple(skipped.examples))


def _blocks(given: Diagnosis | None, dump: DumpFacts, metrics: Numbers, run: str = "") -> tuple[Block, ...]:
    """Return the conclusion with its cause, the other causes, and the checks that found nothing."""
    if given is None:
        return ()
    label, tone = DIAGNOSES[given.verdict]
    blocks: list[Block] = []
    head: tuple[str, ...] = ()
    text = _clause(given.headline)
    for place, cause in enumerate(given.causes, 1):
        detail = cause_details(cause, given, metrics)
        if place == 1 and given.headline.startswith(cause.statement):
            head = (f"Cause: {cause.id}", *detail)
        else:
            blocks.append(Verdict(f"Cause {place}, {cause.id}", cause.statement, KINDS[cause.kind], detail))
    if given.candidates:
        label, text = UNDECIDED.rstrip(": "), given.headline.removeprefix(UNDECIDED)
        head = (*candidate_lines(given), given.decide and f"To decide: {given.decide}")
    return filled(
        Verdict(f"{run}{label}", text, tone, head),
        *blocks,
        _sampled(given, dump),
        _listed("Ruled out", given.ruled_out),
        _listed("Cannot be decided from this dump", given.undecidable),
    )


def candidate_lines(given: Diagnosis) -> tuple[str, ...]:
    """Return a line for each candidate, with what speaks for it and against it."""
    return tuple(
        f"Candidate {place}, {one.id}: {one.statement} {spoken(one)}"
        for place, one in enumerate(given.candidates, 1)
    )


def spoken(one: CandidateCause) -> str:
    """Return what speaks for a candidate and against it."""
    sides = (("For", one.for_), ("Against", one.against))
    if not (one.for_ or one.against):
        return f"For and against: {NOTHING}"
    return " ".join(f"{side}: {' '.join(said) if said else NOTHING}" for side, said in sides)


def _clause(text: str) -> str:
    """Return a sentence with its first word in lower case, unless it is a symbol, to follow a colon."""
    word = text.partition(" ")[0].rstrip(",:;").replace("-", "")
    plain = word.isalpha() and word[0].isupper() and (len(word) == 1 or word[1:].islower())
    return text[0].lower() + text[1:] if plain else text


def cause_details(cause: Cause, given: Diagnosis, metrics: Numbers) -> tuple[str, ...]:
    """Return the evidence of a cause, how to confirm it and its fix, a line each."""
    detail = (
        f"{'Counted' if cause.exact else 'Evidence'}: {cause.statistic}",
        cause.violates and f"Violates: {cause.violates}",
        _found(cause, given),
        _examples(cause),
        cause.confirm and f"To confirm: {cause.confirm}",
        cause.fix and f"Fix: {cause.fix}",
        cause.after and _after(cause.after, metrics),
    )
    return tuple(line for line in detail if line)


def _found(cause: Cause, given: Diagnosis) -> str:
    """Return the location of a cause, and how many of the examined tokens and sequences it affects."""
    concerned = (
        f"{_of(cause.tokens, given.tokens)} tokens" if cause.tokens is not None else "",
        f"{_of(cause.sequences, given.sequences)} sequences" if cause.sequences is not None else "",
    )
    said = "; ".join(part for part in (cause.where, *concerned) if part)
    return said and f"Where: {said}"


def _of(some: int, whole: int | None) -> str:
    if whole is None:
        return count(some)
    return f"all {count(some)}" if some == whole else f"{count(some)} of {count(whole)}"


def _examples(cause: Cause) -> str:
    said = "; ".join(
        f"sequence {one.sequence_id}, position {one.position}: log π_rollout "
        f"{say_value(one.rollout_log_prob)}, log π_train {say_value(one.train_log_prob)}"
        for one in cause.examples
    )
    return said and f"Examples: {said}"


def _after(after: After, metrics: Numbers) -> str:
    """Return K3, E[r] and ESS, as logged and with the cause fixed."""
    sign = "≈ " if after.approximate else ""
    pairs = (
        ("K3", "k3", after.k3, "nats"),
        ("E[r]", "mean_ratio", after.mean_ratio, ""),
        ("ESS", "ess_tokens", after.ess_tokens, "fraction"),
    )
    numbers = ", ".join(
        f"{name} {_before(short, metrics)}{sign}{say_value(value, unit)}"
        for name, short, value, unit in pairs
    )
    return f"After the fix, {after.what}: {numbers} (over {counted(after.tokens, 'token')})"


def _before(short: str, metrics: Numbers) -> str:
    """Return the logged value of the main drift, followed by an arrow; empty if unknown."""
    found = (metrics.get(name, Number()) for name in (short, f"total.{short}"))
    value = next((one for one in found if one.known), None)
    return f"{say(value.model_copy(update={'interval': None, 'note': None}))} → " if value else ""


def _sampled(given: Diagnosis, dump: DumpFacts) -> Text | None:
    """Return how much of the dump was examined token by token, if not all of it."""
    if given.sequences is None or given.tokens is None or given.sequences >= dump.sequences:
        return None
    looked = f"{counted(given.tokens, 'token')} of {counted(given.sequences, 'sequence')}"
    return Text(f"Looked at one by one: {looked}, of the {count(dump.sequences)} in the dump.")


def _listed(title: str, lines: list[str]) -> Text | None:
    return Text(f"{title}: {'; '.join(line.rstrip('.') for line in lines)}.") if lines else None

"""Which columns of a dump were read, under which name, and which were ignored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from offpol_diag.numerals import count
from offpol_diag.result import DumpFacts

WORDS = {
    "rollout_log_probs": "rollout",
    "old_log_probs": "old",
    "current_log_probs": "current",
    "response_mask": "mask",
}
"""Our name → the word for `--columns`."""
DECIDES = {
    "policy_lag": "it decides between stale weights and weights that do not arrive",
    "group_id": "intervals are too narrow where a prompt was sampled more than once",
}
"""Column that a hook can write → what a dump without it cannot say."""
VERSIONS = {"rollout_version", "train_version"}
"""Columns whose difference is the policy lag."""
LINE, NAME = (100, 60), 40
"""Characters for what was read and for what was ignored in the short form, and for one name."""
WHOLE, LONG = 20_000, 200
"""Characters for a list and for one name elsewhere: room for all but the names of a very wide dump."""


def all_read(facts: DumpFacts) -> str:
    """Return that every column was read under its own name, a mask among them; empty if not so."""
    own = all(role == column for role, column in facts.columns.items())
    every = own and "response_mask" in facts.columns and facts.ignored == []
    return f", all {count(len(facts.columns) + len(facts.others))} columns read" if every else ""


def missing(facts: DumpFacts) -> dict[str, str]:
    """Return those of policy_lag and group_id that the dump lacks, each with what it would decide."""
    held = {*facts.columns, *facts.others}
    held |= {"policy_lag"} if held >= VERSIONS else set()
    return {name: why for name, why in DECIDES.items() if name not in held}


def in_short(facts: DumpFacts) -> str:
    """Return both in short: log-probs, mask, columns of other names; what is too much is counted."""
    said = {
        role: role if role == column else f"{WORDS.get(role, role)} = {_cut(column, NAME)}"
        for role, column in facts.columns.items()
    }
    first = [role for role in WORDS if role in said]
    mask = [] if "response_mask" in said else ["no mask"]
    rest = sorted((role for role in said if role not in first), key=lambda role: role == said[role])
    others = [_cut(name, NAME) for name in facts.others]
    read = _listed([*(said[role] for role in first), *mask, *(said[role] for role in rest), *others], LINE[0])
    if facts.ignored is None:
        return read
    ignored = _listed([_cut(name, NAME) for name in facts.ignored], LINE[1])
    return f"{read}; {f'ignored: {ignored}' if ignored else 'none ignored'}"


def unlike(facts: DumpFacts) -> tuple[str, ...]:
    """Return a sentence on what was read and ignored; none where `all_read` says it."""
    return () if all_read(facts) else (f"Columns: {in_short(facts)}.",)


def of_runs(runs: Mapping[str, DumpFacts]) -> tuple[str, ...]:
    """Return what was read and ignored of several runs, once if it is the same."""
    each = {run: in_short(dump) for run, dump in runs.items()}
    every = f"{', '.join([*runs][:-1])} and {[*runs][-1]}"
    said = {every: each["A"]} if len({*each.values()}) == 1 else each
    return tuple(f"{run}. Columns: {text}." for run, text in said.items())


def ignored(facts: DumpFacts) -> str:
    """Return what was ignored."""
    return "this result does not say" if facts.ignored is None else whole(facts.ignored) or "none"


def whole(names: Iterable[str]) -> str:
    """Return a list of names that may take a few pages, but not hundreds."""
    return _listed([_cut(name, LONG) for name in names], WHOLE)


def _cut(name: str, room: int) -> str:
    return name if len(name) <= room else f"{name[: room - 1]}…"


def _listed(names: Sequence[str], room: int) -> str:
    """Return names separated by commas as far as there is room, and the number of the others."""
    size = shown = 0
    for name in names:
        size += len(name) + 2
        if shown and size > room:
            break
        shown += 1
    left = f" and {count(len(names) - shown)} more" if shown < len(names) else ""
    return f"{', '.join(names[:shown])}{left}"

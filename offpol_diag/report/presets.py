"""The table of presets: what each does to this batch."""

from __future__ import annotations

from offpol_diag.number import Numbers
from offpol_diag.result import PresetFacts, Result
from offpol_diag.table import Table

COLUMNS = {
    "ess_tokens": "ESS, tokens",
    "ess_sequences": "ESS, sequences",
    "tokens_rejected": "tokens rejected",
    "sequences_dropped": "sequences dropped",
    "vetoed": "vetoed",
    "truncated_high": "truncated",
    "k3": "K3 of what is kept",
    "ppl_ratio": "PPL ratio of what is kept",
}
"""Number → the header of its column."""


def presets(summary: Result) -> Table:
    """Return what each preset does to this batch, the recommended method and those beside it first."""
    known = {name: (one.method, summary.preset(name)) for name, one in by_family(summary).items()}
    given, first = summary.recommendation, dict[str, tuple[str, Numbers]]()
    if given is not None and given.method in known and not summary.is_bug:
        first[f"{given.method} (recommended)"] = known.pop(given.method)
        first |= {name: known.pop(name) for name in given.alternatives}
    rows = [
        (name, rule, *(numbers.get(key) for key in COLUMNS))
        for name, (rule, numbers) in (first | known).items()
    ]
    caption = "What each preset does to this batch"
    return Table("presets", caption, ("preset", "rule", *COLUMNS.values()), rows)


def missing(summary: Result) -> Table:
    """Return the presets that need a column, and how a dump of two policies is read for most of them."""
    lacking = {name: one for name, one in summary.presets.items() if one.needs}
    rows = [(name, ", ".join(one.needs), one.summary) for name, one in lacking.items()]
    current = summary.dump.columns.get("current_log_probs")
    read = any("old_log_probs" in one.needs for one in lacking.values()) and current is not None
    hint = f"The trainer's one policy is read as the old one with --columns old={current}."
    caption, header = "Presets that need a column this dump lacks", ("preset", "needs", "what it is")
    return Table("needs", caption, header, rows, (hint,) if read else (), shown="page")


def by_family(summary: Result) -> dict[str, PresetFacts]:
    """Return the computed presets, families together and the recommended one first in its own."""
    chosen = (summary.recommendation and summary.recommendation.method) or ""
    able = {name: one for name, one in summary.presets.items() if not one.needs}
    order = list(dict.fromkeys(one.family for one in able.values()))
    ranked = sorted(able, key=lambda name: (order.index(able[name].family), name != chosen))
    return {name: able[name] for name in ranked}

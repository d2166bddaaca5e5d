"""The page on causes, of the classes that `doctor --explain` prints; for make.py."""

from __future__ import annotations

from collections.abc import Callable

from offpol_diag.diagnosis.cause import Cause
from offpol_diag.diagnosis.registry import CAUSES
from offpol_diag.report.words import KINDS, filled

MADE = "<!-- Made by `python docs/make.py`; do not edit. -->\n\n"


def causes() -> str:
    """Every cause in a paragraph: what it looks like, how to confirm and fix it, look-alikes, threads."""
    return f"""{MADE}# Causes of a mismatch

`offpol-diag doctor --explain CAUSE` prints one of these entries in the terminal, and needs no dump. It adds
how to confirm the cause with the settings of verl, TRL, slime and NeMo-RL, and what was seen in each thread.
If nothing in a dump establishes a cause, `doctor` says `cannot_tell`, with the measurement that decides. K3
is in nats per token, Δ = log π_train − log π_rollout, r = e^Δ. "Of its uncertainty" is |Δ|/(1 − π_rollout).
Threads were read up to September 2026.
{"".join(map(_section, CAUSES))}"""


def _section(cause: Cause) -> str:
    said = [f"**{cause.title}** ({KINDS[cause.kind]}). {cause.looks}"]
    how = {"Confirm": cause.confirm, "Fix": cause.fix}
    said += [f"*{name}:* {filled(cause, text)}" for name, text in how.items() if text]
    said += [f"*Look-alike [`{name}`](#{name}):* {what}" for name, what in cause.apart.items()]
    threads = ", ".join(_link(at) for one in cause.threads for at in one.at)
    return f"\n## {cause.id}\n\n{' '.join(said)}{f' *Public threads:* {threads}.' if threads else ''}\n"


def _link(thread: str) -> str:
    """Link a thread; GitHub leads from an issue's address to the pull request of that number."""
    repository, _, number = thread.partition("#")
    return f"[{thread}](https://github.com/{repository}/issues/{number})"


PAGES: dict[str, Callable[[], str]] = {"causes.md": causes}
"""File → what makes its text."""

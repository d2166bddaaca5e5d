"""The page on causes, of the classes that `doctor --explain` prints; for make.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from offpol_diag.diagnosis.cause import TRAINERS, Cause, Thread
from offpol_diag.diagnosis.registry import CAUSES
from offpol_diag.report.explain import KINDS, filled
from offpol_diag.report.words import sentence

MADE = "<!-- Made by `python docs/make.py`; do not edit. -->\n\n"
READ = (
    "verl-project/verl 1dda039b (2026-08-22)",
    "huggingface/trl f2cd5771 (2026-07-24)",
    "THUDM/slime 624b824a8 (2026-08-21)",
    "NVIDIA-NeMo/RL 7ea279abf (2026-08-22)",
)
"""Where the settings of trainers were read."""


def causes() -> str:
    """Every cause: what it looks like, public threads, how to confirm and fix it, what looks alike."""
    rows = [(f"[`{one.id}`](#{one.id})", one.kind, one.title) for one in CAUSES]
    return f"""{MADE}# Causes of a mismatch

`offpol-diag doctor --explain CAUSE` prints one of these in the terminal, without a dump. Where nothing in a
dump establishes a cause, `doctor` says `cannot_tell`, with the measurement that decides. K3 is in nats a
token, Δ = log π_train − log π_rollout, r = e^Δ. "Of its uncertainty" is |Δ|/(1 − π_rollout). Threads were
read up to September 2026. Settings were read in {", ".join(READ[:-1])}
and {READ[-1]}; flags that begin with `--sglang-` are SGLang's own, which slime hands on.

{_table(("cause", "kind", "what it is"), rows)}{"".join(map(_section, CAUSES))}"""


def _section(cause: Cause) -> str:
    parts = {"Looks like": cause.looks, "Violates": sentence(cause.violates) if cause.violates else ""}
    said = "".join(f"**{name}.** {text}\n\n" for name, text in parts.items() if text)
    threads = "".join(f"- {_thread(one)}\n" for one in cause.threads)
    known = f"**Known from**\n\n{threads}\n" if threads else ""
    settings = "".join(f"- {TRAINERS[name]}: {text}\n" for name, text in cause.settings.items())
    confirm = f"**Confirm.** {filled(cause, cause.confirm)}\n\n" if cause.confirm else "**Confirm**\n\n"
    fix = f"**Fix.** {filled(cause, cause.fix)}\n\n" if cause.fix else ""
    apart = "".join(f"- [`{name}`](#{name}): {what}\n" for name, what in cause.apart.items())
    return f"""
## {cause.id}

{cause.title}: {KINDS[cause.kind]}.

{said}{known}{confirm}{settings}{chr(10) if settings else ""}{fix}**Look-alikes**

{apart}"""


def _thread(one: Thread) -> str:
    came = f" Cause: {one.cause}." if one.cause else ""
    return f"{', '.join(map(_link, one.at))}: {one.symptom}.{came}"


def _link(thread: str) -> str:
    """Link a thread; GitHub leads from an issue's address to the pull request of that number."""
    repository, _, number = thread.partition("#")
    return f"[{thread}](https://github.com/{repository}/issues/{number})"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


PAGES: dict[str, Callable[[], str]] = {"causes.md": causes}
"""File → what makes its text."""

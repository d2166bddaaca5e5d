"""The page on causes, of the data that `doctor --explain` prints; for make.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from offpol_diag.diagnosis.causes import CAUSES
from offpol_diag.diagnosis.pages import KINDS, TRAINERS, Case, Page, pages
from offpol_diag.report.diagnosis import sentence

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
    known = pages()
    rows = [(f"[`{one.id}`](#{one.id})", one.kind, one.title) for one in known.values()]
    return f"""{MADE}# Causes of a mismatch

`offpol-diag doctor --explain CAUSE` prints one of these in the terminal, without a dump. Where nothing in a
dump establishes a cause, `doctor` says `cannot_tell`, with the measurement that decides. K3 is in nats a
token, Δ = log π_train − log π_rollout, r = e^Δ. "Of its uncertainty" is |Δ|/(1 − π_rollout). Threads were
read up to September 2026. Settings were read in {", ".join(READ[:-1])}
and {READ[-1]}; flags that begin with `--sglang-` are SGLang's own, which slime hands on.

{_table(("cause", "kind", "what it is"), rows)}{"".join(map(_section, known.values()))}"""


def _section(page: Page) -> str:
    violates = CAUSES[page.id].violates
    violates = f"**Violates.** {sentence(violates)}\n\n" if violates else ""
    threads = "".join(f"- {_thread(one)}\n" for one in page.cases)
    known = f"**Known from**\n\n{threads}\n" if threads else ""
    confirm = "".join(
        f"- {name}: {page.confirm[key]}\n"
        for key, name in TRAINERS.items()
        if key != "any" and key in page.confirm
    )
    alike = "".join(f"- [`{name}`](#{name}): {what}\n" for name, what in page.alike.items())
    return f"""
## {page.id}

{page.title}: {KINDS[page.kind]}.

**Looks like.** {page.looks}

{violates}{known}**Confirm.** {page.confirm["any"]}

{confirm}
**Fix.** {page.fix}

**Look-alikes**

{alike}"""


def _thread(case: Case) -> str:
    cause = f" Cause: {case.cause}." if case.cause else ""
    return f"{', '.join(map(_link, case.threads))}: {case.symptom}.{cause}"


def _link(thread: str) -> str:
    """Link a thread; GitHub leads from an issue's address to the pull request of that number."""
    repository, _, number = thread.partition("#")
    return f"[{thread}](https://github.com/{repository}/issues/{number})"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


PAGES: dict[str, Callable[[], str]] = {"causes.md": causes}
"""File → what makes its text."""

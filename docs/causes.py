"""The pages on causes and on public threads, of the data that `doctor --explain` prints; for make.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from offpol_diag.diagnosis.causes import CAUSES
from offpol_diag.diagnosis.pages import KINDS, TRAINERS, Case, Page, cases, pages
from offpol_diag.report.diagnosis import sentence

PICTURES = Path(__file__).parent / "pictures" / "causes"
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
    rows = [(f"[`{one.id}`](#{one.id})", one.kind or "not established", one.title) for one in known.values()]
    return f"""{MADE}# Causes of a mismatch

`offpol-diag doctor --explain CAUSE` prints one of these in the terminal, without a dump. Where `doctor` does
not name a cause yet, a dump of it ends in `cannot tell` with the measurement that decides, or under another
name. K3 is in nats a token, Δ = log π_train − log π_rollout, r = e^Δ. "Of its uncertainty" is
|Δ|/(1 − π_rollout). Threads are those of [the field cases](field-cases.md). Settings were read in
{", ".join(READ[:-1])} and {READ[-1]}; flags that begin with `--sglang-` are
SGLang's own, which slime hands on.

{_table(("cause", "kind", "what it is"), rows)}{"".join(map(_section, known.values()))}"""


def _section(page: Page) -> str:
    row, picture = CAUSES.get(page.id), PICTURES / f"{page.id}.svg"
    image = f"![{page.title}](pictures/causes/{page.id}.svg)\n\n" if picture.exists() else ""
    violates = f"**Violates.** {sentence(row.violates)}\n\n" if row and row.violates else ""
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

{image}**Looks like.** {page.looks}

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


def field_cases() -> str:
    """Every public thread by cause: symptom, cause, what this version says, what a dump needs for it."""
    order = [*pages(), ""]
    every = sorted(cases(), key=lambda one: order.index(one.id))
    threads = sum(len(one.threads) for one in every)
    named = sum(one.answer == one.id for one in every)
    rows = [
        (
            f"[`{one.id}`](causes.md#{one.id})" if one.id else "–",
            ", ".join(map(_link, one.threads)),
            one.symptom,
            one.cause or "–",
            f"`{one.answer}`" if one.answer in CAUSES else one.answer,
            one.needs or "–",
        )
        for one in every
    ]
    header = ("cause", "threads", "symptom", "where it came from", "`doctor` says", "a dump needs")
    return f"""{MADE}# Field cases

{threads} public threads about {len(every)} events, as read up to September 2026: what was seen, what it came
from as the thread says, and what `doctor` says of a dump of it that has the columns in the last one (besides
log-probs of both policies). It names {named} of them by their cause. "cannot tell" comes with candidates and
the measurement that decides. The threads' own dumps are not public: this is a judgement from the causes, not
a run. The data is [`field_cases.toml`](../offpol_diag/data/field_cases.toml); [every cause](causes.md) has a
page.

{_table(header, rows)}"""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


PAGES: dict[str, Callable[[], str]] = {"causes.md": causes, "field-cases.md": field_cases}
"""File → what makes its text."""

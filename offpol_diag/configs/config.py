"""What a printed configuration is: snippets in a trainer's own syntax, and what differs there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Language = Literal["yaml", "toml", "python", "flags", "hydra"]


@dataclass(frozen=True)
class Snippet:
    """One piece of text to paste.

    Attributes:
        language: yaml, toml, python, flags (of a command line) or hydra (overrides on a command line).
        text: what is pasted; empty where there is nothing to set.
        title: what it is beside others for the same versions: `as overrides`.
        file: the file it belongs in, where the trainer reads one by its name.
        versions: of the trainer, that take it: `verl from 0.7.1`; empty where its table has one version only.
        age: of the newest and of the oldest of them, in changes of the trainer's keys; 0 is today's.
    """

    language: Language
    text: str
    title: str = ""
    file: str = ""
    versions: str = ""
    age: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Config:
    """One preset in one trainer's own syntax.

    Attributes:
        preset: its name.
        trainer: the trainer's name.
        snippets: the newest version's first.
        remarks: what the trainer does differently from the preset as computed here. The bounds, what they
            are on and what is rejected never differ.
    """

    preset: str
    trainer: str
    snippets: tuple[Snippet, ...]
    remarks: tuple[str, ...] = ()

    def text(self) -> str:
        """All of it, to be pasted: remarks and headings are comments, which every syntax here spells `#`."""
        head = [f"# {self.preset} for {self.trainer}", *(f"# {remark}" for remark in self.remarks)]
        return "\n".join([*head, *map(_block, self.snippets)]) + "\n"


def _block(snippet: Snippet) -> str:
    heading = ", ".join(word for word in (snippet.file, snippet.versions, snippet.title) if word)
    return (f"\n# {heading}\n" if heading else "") + (snippet.text or "# nothing to set")

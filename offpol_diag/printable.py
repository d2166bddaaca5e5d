"""Escape text for printing: names in it must not control a terminal, break lines or command a CI system.

Names of files, columns, keys and options are untrusted. `printable` escapes a text with such names into one
line; `printable_lines` escapes whole output and keeps its line ends.
"""

from __future__ import annotations

import json
import re
import unicodedata

CONTROLS = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories of control and format characters, lone surrogates, and line and paragraph separators."""
COMMAND = re.compile(r"^(\s*):(?=:)|##(?=\[)", re.MULTILINE)
"""GitHub workflow commands: `::error::` at the beginning of a line, `##[error]` anywhere."""


def printable(text: str) -> str:
    r"""Escape invisible characters as Python does, line ends included: `\n`, `\x1b`, `\udcff`."""
    if not text.isprintable():
        text = "".join(map(_escaped, text))
    return COMMAND.sub(_disarmed, text) if ":" in text or "#" in text else text


def printable_lines(text: str) -> str:
    """Apply `printable` to each line; line ends stay."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(text: str) -> str:
    """Return equivalent JSON with unprintable characters escaped; lone surrogates become text."""
    if not text.replace("\n", "").isprintable():
        text = "".join(char if char == "\n" else _escaped_in_json(char) for char in text)
    return text.replace("##[", "##\\u005b")


def disarmed(text: str) -> str:
    """Disable GitHub workflow commands in lines, keeping our colour codes."""
    return COMMAND.sub(_disarmed, text)


def _escaped(char: str) -> str:
    if unicodedata.category(char) not in CONTROLS:
        return char
    return char.encode("unicode_escape").decode("ascii")


def _escaped_in_json(char: str) -> str:
    category = unicodedata.category(char)
    if category not in CONTROLS:
        return char
    return f"\\{_escaped(char)}" if category == "Cs" else json.dumps(char)[1:-1]


def _disarmed(found: re.Match[str]) -> str:
    return r"#\x23" if found[0] == "##" else f"{found[1]}\\x3a"

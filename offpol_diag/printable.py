"""Text as it may be printed: names in it cannot drive a terminal, start a line, or command a CI system.

File names, columns, keys of files and options are of anyone's making. What is printed passes through here:
`printable` makes one line of a text that holds such names, `printable_lines` goes over whole output whose
line ends are our own.
"""

from __future__ import annotations

import json
import re
import unicodedata

CONTROLS = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: controls, invisible marks of direction and the like, lone surrogates, line ends."""
COMMAND = re.compile(r"^(\s*):(?=:)|##(?=\[)", re.MULTILINE)
"""What GitHub reads as a command: `::error::` at the beginning of a line, `##[error]` anywhere in it."""


def printable(text: str) -> str:
    r"""One line, with what is no visible character written as Python escapes it: `\n`, `\x1b`, `\udcff`."""
    if not text.isprintable():
        text = "".join(map(_escaped, text))
    return COMMAND.sub(_disarmed, text) if ":" in text or "#" in text else text


def printable_lines(text: str) -> str:
    """The same of each line; line ends stay."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(text: str) -> str:
    """The text of a JSON value, which means the same; a lone surrogate, which no JSON may hold, as text."""
    if not text.replace("\n", "").isprintable():
        text = "".join(char if char == "\n" else _escaped_in_json(char) for char in text)
    return text.replace("##[", "##\\u005b")


def disarmed(text: str) -> str:
    """Lines that hold colours of our own, none of which is a command."""
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

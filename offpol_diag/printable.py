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
    return disarmed(text)


def printable_lines(text: str) -> str:
    """Apply `printable` to each line; line ends stay."""
    return "\n".join(map(printable, text.split("\n")))


def printable_json(text: str) -> str:
    """Return equivalent JSON with unprintable characters escaped; lone surrogates become text."""
    if not text.replace("\n", "").isprintable():
        text = "".join(char if char == "\n" else _escaped(char, in_json=True) for char in text)
    return text.replace("##[", "##\\u005b")


def disarmed(text: str) -> str:
    """Disable GitHub workflow commands in lines, keeping our colour codes."""
    return COMMAND.sub(_disarmed, text)


def _escaped(char: str, in_json: bool = False) -> str:
    category = unicodedata.category(char)
    if category not in CONTROLS:
        return char
    if in_json and category != "Cs":
        return json.dumps(char)[1:-1]
    return "\\" * in_json + char.encode("unicode_escape").decode("ascii")


def _disarmed(found: re.Match[str]) -> str:
    return r"#\x23" if found[0] == "##" else f"{found[1]}\\x3a"


# ---------------------------------------------------------------- URLs, without what is secret

URL = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]+(?:::[A-Za-z][\w+.-]+)*)://(?P<rest>.*)", re.DOTALL)
LOGIN = re.compile(r"[^/:@]*(?P<secret>:(?!\d+(?:/|$))[^@]*)?@")
"""A login before a host, whose port is no password; a secret key may hold slashes."""
QUERY = re.compile(r"\?(?=[\w.-]+=).*$", re.DOTALL)
"""A `?` that is not followed by a word and `=` is part of a glob, except in http(s) URLs."""
IN_TEXT = re.compile(r"[A-Za-z][\w+.-]+://[^\s'\"<>]*")


def is_url(source: str) -> bool:
    """Return whether a source is a URL, such as `s3://…`."""
    return bool(URL.match(source))


def clean(source: str) -> str:
    """Return a source for display: a URL without credentials and options."""
    found = URL.fullmatch(source)
    if not found:
        return source
    scheme, rest = found["scheme"].lower(), found["rest"]
    rest = rest.partition("?")[0] if scheme.rpartition("::")[2] in ("http", "https") else QUERY.sub("", rest)
    login = LOGIN.match(rest)
    return f"{scheme}://{rest[login.end() :] if login else rest}"


def cleaned(text: str) -> str:
    """Remove credentials and options from every URL in a message."""
    return IN_TEXT.sub(lambda found: clean(found[0]), text)

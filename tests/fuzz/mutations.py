"""Ways to damage what a command reads: values in a tree, the text of JSON and TOML, bytes.

Everything takes a `Random` and changes nothing that it is given.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Tree = Any  # dict, list, str, int, float, bool, None

DEEP, LONG, DIGITS = 20_000, 200_000, 5_000
RAW, TWICE = "@@raw ", "@@twice "
"""In a tree: a string that is written as it stands, without quotes (' for "); a key written without this."""

TEXTS = (
    "",
    " ",
    "\x1b[8mconcealed\x1b[2J",
    "\x1b]0;title\x07",
    "a\n::error::planted",
    "\r\n::error::planted\r",
    "\x00",
    "a\x00b",
    "\x7f\x9b31m",
    "\u202etxt.exe",
    "\u2028\u2029\ufeff",
    "\ud800",
    "a\udcffb",
    "\U0001f600\u0301é",
    "<planted a='1'>&\"",
    "</script><planted>",
    "[bold]x[/bold]",
    "[/]",
    "{x}%s%n$(x)`x`",
    "|a|*b*_c_",
    "\\",
    "..",
    "-",
    "--",
    "a.b.c",
    "a:b",
    "a=b",
    "a,b",
    ",",
    "=",
    ":",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "-1",
    "0",
    "1_000",
    "0x10",
    "٣",
    "²",
    "１２",
    "1..2",
    "2..1",
    "50%",
    "p50",
    "all",
    "none",
    "true",
    "null",
    "k3",
    "token_is",
    "9" * DIGITS,
    "x" * LONG,
    "é" * 300,
)
NUMBERS = (
    0,
    -0.0,
    1,
    -1,
    2,
    7,
    0.5,
    -0.5,
    1e-320,
    1e-12,
    1e16,
    1e300,
    1.7e308,
    -1.7e308,
    math.nan,
    math.inf,
    -math.inf,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    2**64,
    10**18,
    10**400,
    -(10**400),
)
RAWS = (
    "1e400",
    "-1e400",
    "9" * DIGITS,
    "1e" + "9" * 30,
    "nan",
    "NaN",
    "Infinity",
    "01",
    "0x1",
    "+1",
    "1.",
    "tru",
)
DATES = (datetime.date(1, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59), datetime.time(1, 2, 3))


def text(random: Random) -> str:
    """Draw a string that code may not expect; sometimes two of them joined."""
    found = random.choice(TEXTS)
    return found + random.choice(TEXTS) if random.random() < 0.1 else found


def argument(random: Random) -> str:
    """Draw a string that a program can be given: short, without NUL, and encodable."""
    return given(text(random))


def given(said: str) -> str:
    """Convert a string to what a program receives."""
    return (
        said.replace("\x00", "")[:60_000]
        .encode(errors="replace" if "\ud800" in said else "surrogateescape")
        .decode(errors="surrogateescape")
    )


def value(random: Random) -> Tree:
    """Draw any value."""
    kinds: Sequence[Callable[[], Tree]] = (
        lambda: text(random),
        lambda: random.choice(NUMBERS),
        lambda: random.choice(NUMBERS),
        lambda: RAW + random.choice(RAWS),
        lambda: random.choice((None, True, False, [], {})),
        lambda: random.choice(DATES),
        lambda: [random.choice(NUMBERS) for _ in range(random.choice((1, 2, 3, 1000)))],
        lambda: {text(random): random.choice(NUMBERS)},
        lambda: [text(random), None, {}],
    )
    return random.choice(kinds)()


# ---------------------------------------------------------------- trees


def tree(random: Random, whole: Tree, times: int | None = None) -> Tree:
    """Make a few changes to a tree in place.

    Mostly all values keep their types: what only looks at those is passed.
    """
    changes = random.choice((CHANGES, (_nudge,), (_nudge,)))
    for _ in range(times or random.choice((1, 1, 1, 2, 3, 6))):
        holder, key = _place(random, whole)
        if holder is None:
            return value(random)
        random.choice(changes)(random, holder, key, whole)
    return whole


def _place(random: Random, whole: Tree) -> tuple[Any, Any]:
    """Draw a container and one of its keys, every level with the same chance."""
    holder, key, at = None, None, whole
    while isinstance(at, dict | list) and at and (holder is None or random.random() < 0.85):
        holder = at
        key = random.choice(list(at)) if isinstance(at, dict) else random.randrange(len(at))
        at = at[key]
    return holder, key


def _replace(random: Random, holder: Any, key: Any, whole: Tree) -> None:
    holder[key] = value(random)


def _nudge(random: Random, holder: Any, key: Any, whole: Tree) -> None:
    """Replace a value by another of its type, which passes a check of types."""
    old = holder[key]
    if isinstance(old, bool) or old is None:
        holder[key] = random.choice((True, False, None))
    elif isinstance(old, int):
        ints = [one for one in NUMBERS if isinstance(one, int)]
        holder[key] = random.choice((-old, old + 1, old - 1, old * 10, *ints))
    elif isinstance(old, float):
        floats = [one for one in NUMBERS if isinstance(one, float) and math.isfinite(one)]
        holder[key] = random.choice((-old, old + 1, old * 10, old / 1e9, *floats))
    elif isinstance(old, str):
        at = random.randint(0, len(old))
        odd = text(random)
        holder[key] = random.choice((old[:at] + odd + old[at:], old[:at], old.upper(), old + " ", odd))
    elif isinstance(old, list):
        holder[key] = random.choice((old[::-1], old[:1], old * 2, old * 50, old[1:], []))
    elif isinstance(old, dict):
        rows = list(old.items())
        holder[key] = random.choice(({}, dict(rows[::-1]), dict(rows[:1]), dict(rows[1:])))


def _remove(random: Random, holder: Any, key: Any, whole: Tree) -> None:
    del holder[key]


def _repeat(random: Random, holder: Any, key: Any, whole: Tree) -> None:
    if isinstance(holder, dict):
        holder[f"{TWICE}{key}"] = random.choice((holder[key], value(random)))
    else:
        holder.insert(key, holder[key])


def _rename(random: Random, holder: Any, key: Any, whole: Tree) -> None:
    if isinstance(holder, dict):
        holder[random.choice((text(random), f"{key}x", f"{key}"[:-1], f"{key}".upper()))] = holder.pop(key)


def _graft(random: Random, holder: Any, key: Any, whole: Tree) -> None:
    """Copy a value from elsewhere in the tree; never a part of itself."""
    other, at = _place(random, whole)
    if other is not None:
        holder[key] = json.loads(json.dumps(other[at], default=str))


def _wrap(random: Random, holder: Any, key: Any, whole: Tree) -> None:
    old = holder[key]
    holder[key] = random.choice(
        ([old], {"x": old}, RAW + "[" * DEEP + "]" * DEEP, RAW + "{'a':" * DEEP + "1" + "}" * DEEP)
    )


CHANGES = (_replace, _replace, _nudge, _nudge, _nudge, _remove, _repeat, _rename, _graft, _wrap)


# ---------------------------------------------------------------- texts


def as_json(random: Random, whole: Tree) -> bytes:
    """Write a tree as JSON; marked values are written raw."""
    ascii_only = random.random() < 0.7
    said = json.dumps(whole, ensure_ascii=ascii_only, default=str, skipkeys=True)
    parts = said.split(f'"{RAW}')
    plain = parts[0] + "".join(_unquoted(part) for part in parts[1:])
    return plain.replace(TWICE, "").encode("utf-8", "surrogatepass")


def _unquoted(part: str) -> str:
    """Return the raw value after its mark, without the quote that ends it."""
    raw, _, rest = part.partition('"')
    return raw.replace("'", '"') + rest


def as_toml(whole: Tree) -> bytes:
    """Write a tree as TOML: a table per key of the top level, everything inside it inline."""
    if not isinstance(whole, dict):
        return _inline(whole).encode("utf-8", "surrogatepass")
    plain = [f"{_key(k)} = {_inline(v)}" for k, v in whole.items() if not _is_table(v)]
    tables = [
        "\n".join([f"[[{_key(k)}]]" if isinstance(v, list) else f"[{_key(k)}]", *_lines(one)])
        for k, v in whole.items()
        if _is_table(v)
        for one in (v if isinstance(v, list) else [v])
    ]
    return ("\n".join([*plain, *tables]) + "\n").replace(TWICE, "").encode("utf-8", "surrogatepass")


def _is_table(value: Tree) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)
    )


def _lines(table: dict[str, Tree]) -> list[str]:
    return [f"{_key(key)} = {_inline(value)}" for key, value in table.items()]


def _key(key: object) -> str:
    said = str(key)
    bare = said.removeprefix(TWICE).replace("_", "").replace("-", "")
    return said if bare.isascii() and bare.isalnum() else json.dumps(said, ensure_ascii=False)


def _inline(value: Tree) -> str:
    if isinstance(value, str):
        return (
            value.removeprefix(RAW).replace(":", "=")
            if value.startswith(RAW)
            else json.dumps(value, ensure_ascii=False)
        )
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ", ".join(_lines(value)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return value.isoformat() if hasattr(value, "isoformat") else repr(value)


# ---------------------------------------------------------------- bytes

PIECES = (
    b"\x00",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\x1b[2J",
    b"\n",
    b"\r",
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b"'''",
    b",",
    b"=",
    b"#",
    b"1e999",
    b"nan",
)


def blob(random: Random, whole: bytes, times: int | None = None) -> bytes:
    """Make a few changes to bytes."""
    for _ in range(times or random.choice((1, 1, 2, 4, 16))):
        whole = random.choice(CUTS)(random, whole)
    return whole


def _span(random: Random, whole: bytes) -> tuple[int, int]:
    start = random.randint(0, len(whole))
    return start, min(len(whole), start + random.choice((1, 2, 8, 64, 1024)))


def _flip(random: Random, whole: bytes) -> bytes:
    if not whole:
        return b"\x01"
    at = random.randrange(len(whole))
    return whole[:at] + bytes([whole[at] ^ 1 << random.randrange(8)]) + whole[at + 1 :]


def _insert(random: Random, whole: bytes) -> bytes:
    at = random.randint(0, len(whole))
    return whole[:at] + random.choice(PIECES) + whole[at:]


def _cut(random: Random, whole: bytes) -> bytes:
    start, end = _span(random, whole)
    return whole[:start] + whole[end:]


def _copy(random: Random, whole: bytes) -> bytes:
    start, end = _span(random, whole)
    at = random.randint(0, len(whole))
    return whole[:at] + whole[start:end] + whole[at:]


def _end(random: Random, whole: bytes) -> bytes:
    return whole[: random.randint(0, len(whole))]


def _encode(random: Random, whole: bytes) -> bytes:
    return random.choice(
        (
            b"\xef\xbb\xbf" + whole,
            whole.decode(errors="replace").encode("utf-16"),
            whole.replace(b"\n", b"\r\n"),
        )
    )


CUTS = (_flip, _flip, _flip, _insert, _insert, _cut, _copy, _copy, _end, _encode)

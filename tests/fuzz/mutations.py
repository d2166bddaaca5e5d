"""Ways to damage what is read: values in a tree, lines of TOML, bytes. Nothing that is given is changed."""

from __future__ import annotations

import json
import math
import re
from random import Random
from typing import Any

ODD = "\x1b[8mx\x1b[2J a\n::error::planted a\x00b \x9b31m \u202etxt.exe \ud800 <planted/> </script><planted>"
ODD += (
    r" [/] {x}%s%n [bold]x[/bold] |a|*b*_c_ \ .. -- a.b.c a=b,c:d , nan -inf 1e999 -1 0x10 ٣ ² 1..2 50% p50"
)
TEXTS = [
    "",
    " ",
    *ODD.split(" "),
    "all",
    "none",
    "null",
    "k3",
    "token_is",
    "é" * 300,
    "9" * 5000,
    "x" * 200_000,
]
INTEGERS = [0, 1, -1, 7, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**18, 10**400]
FLOATS = [-0.0, 0.5, -0.5, 1e-320, 1e16, 1.7e308, -1.7e308]
NUMBERS = [*INTEGERS, *FLOATS, math.nan, math.inf, -math.inf]
RAW = "@@raw "
"""In a tree: a string that is written to JSON as it stands, without quotes (' for ")."""
RAWS = ["1e400", "NaN", "01", "tru", "9" * 5000, "[" * 20_000, "{'a':" * 20_000 + "1" + "}" * 20_000]
LITERALS = ['""', '"x"', '"token"', "nan", "1e400", "0", "-1", "1.5", "true", "[]", "{}", "[1]", "1979-05-27"]


def argument(random: Random) -> str:
    """Draw a text that a program can be given: short, without NUL, and encodable."""
    text = random.choice(TEXTS).replace("\x00", "")[:60_000]
    return text.encode(errors="replace").decode()


def value(random: Random) -> Any:
    """Draw any value of JSON, and some that are none."""
    odd = [
        RAW + random.choice(RAWS),
        None,
        True,
        [],
        {},
        [random.choice(NUMBERS)] * random.choice([1, 3, 1000]),
    ]
    return random.choice([random.choice(TEXTS), random.choice(NUMBERS), *odd, {random.choice(TEXTS): 1}])


def nudged(random: Random, old: Any) -> Any:
    """Draw another value of the same type, which passes a check of types."""
    match old:
        case bool() | None:
            return random.choice([True, False, None])
        case int():
            return random.choice([-old, old + 1, old * 10, *INTEGERS])
        case float():
            return random.choice([-old, old + 1, old / 1e9, *FLOATS])
        case str():
            at, odd = random.randint(0, len(old)), random.choice(TEXTS)
            return random.choice([old[:at] + odd + old[at:], old[:at], old.upper(), odd])
        case list():
            return random.choice([old[::-1], old[:1], old * 2, old * 50, old[1:], []])
        case dict():
            return random.choice([{}, dict([*old.items()][1:]), dict([*old.items()][:1])])
        case _:
            return value(random)


def tree(random: Random, whole: Any) -> Any:
    """Make a few changes to a tree of lists and dicts; mostly all values keep their types."""
    typed = random.random() < 0.6
    for _ in range(random.choice([1, 1, 1, 2, 6])):
        path, at = list[Any](), whole
        while isinstance(at, dict | list) and at and (not path or random.random() < 0.85):
            path.append(random.choice([*at] if isinstance(at, dict) else range(len(at))))
            at = at[path[-1]]
        if not path:
            return value(random)
        whole = _changed(random, whole, path, "nudge" if typed else random.choice(CHANGES))
    return whole


CHANGES = ("replace", "nudge", "remove", "repeat", "rename", "wrap")


def _changed(random: Random, whole: Any, path: list[Any], change: str) -> Any:
    """Return a copy with a change at the end of a path."""
    copy, (key, *rest) = whole.copy(), path
    if rest:
        copy[key] = _changed(random, whole[key], rest, change)
    elif change == "remove":
        del copy[key]
    elif change in ("repeat", "rename") and isinstance(copy, dict):
        moved = copy[key] if change == "repeat" else copy.pop(key)
        copy[random.choice([random.choice(TEXTS), f"{key}x", f"{key}"[:-1], f"{key}".upper()])] = moved
    elif change in ("repeat", "rename"):
        copy.insert(key, copy[key])
    else:
        old = whole[key]
        copy[key] = {"nudge": nudged, "wrap": lambda *_: [old], "replace": lambda *_: value(random)}[change](
            random, old
        )
    return copy


def as_json(random: Random, whole: Any) -> bytes:
    """Write a tree as JSON on one line; marked values are written raw."""
    text = json.dumps(whole, ensure_ascii=random.random() < 0.7, default=str, skipkeys=True)
    text = re.sub(f'"{RAW}([^"]*)"', lambda found: found[1].replace("'", '"'), text)
    return text.encode("utf-8", "surrogatepass")


def toml(random: Random, text: str) -> bytes:
    """Change a few lines of TOML: a value, a key; or leave a line out, or write it twice."""
    lines = text.splitlines()
    for _ in range(random.choice([0, 1, 1, 2, 6])):
        at = random.randrange(len(lines))
        key, _, old = lines[at].partition("=")
        new = random.choice([*LITERALS, json.dumps(random.choice(TEXTS)), str(random.choice(NUMBERS))])
        odd = random.choice([key.strip()[:-1] + "x", json.dumps(random.choice(TEXTS)), "upper", "name"])
        ways = [[f"{key}= {new}"], [f"{key}= {new}"], [f"{odd} ={old}"], [], [lines[at]] * 2]
        lines[at : at + 1] = random.choice(ways) if len(lines) > 1 else ways[0]
    return blob(random, "\n".join(lines).encode("utf-8", "surrogatepass"), 0.1)


PIECES = b'\x00 \xff \xed\xa0\x80 \xef\xbb\xbf \x1b[2J \n [ } " , = 1e999 nan'.split(b" ")


def blob(random: Random, whole: bytes, share: float = 1.0) -> bytes:
    """Make a few changes to bytes, or with a probability of 1 − share none."""
    for _ in range(random.choice([1, 1, 2, 4, 16]) if random.random() < share else 0):
        at = random.randint(0, max(len(whole) - 1, 0))
        end, to = at + random.choice([1, 2, 8, 64, 1024]), random.randint(0, len(whole))
        flipped = (
            whole[:at] + bytes([(whole[at] if whole else 0) ^ 1 << random.randrange(8)]) + whole[at + 1 :]
        )
        put = whole[:at] + random.choice(PIECES) + whole[at:]
        moved = whole[:to] + whole[at:end] + whole[to:]
        whole = random.choice(
            [flipped, flipped, flipped, put, put, whole[:at] + whole[end:], moved, whole[:at]]
        )
    return whole

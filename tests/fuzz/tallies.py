"""Damaged tallies, merged with good ones and with one another.

python tests/fuzz/tallies.py --seconds 60 --seed 0
"""

from __future__ import annotations

import base64
import gzip
import json
import struct
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

import mutations
import runner

WAYS: tuple[tuple[str, ...], ...] = (
    ("merge", "bad", "good", "--no-html", "--json", "whole.json"),
    ("merge", "good", "bad", "--no-html", "--md", "-"),
    ("merge", "bad", "-o", "whole.html", "--md", "whole.md"),
    ("merge", "bad", "good", "--no-html", "--tally", "both.tally.json"),
    ("merge", "bad", "good", "--no-html", "--for", "verl"),
)
SHAPES: tuple[list[Any], ...] = (
    [],
    [0],
    [1],
    [2**62],
    [-1],
    [3, 0],
    [0, 2**40],
    [1, 1, 1, 1],
    [True],
    [1.0],
    ["1"],
)


@cache
def pairs() -> tuple[tuple[bytes, bytes], ...]:
    """Make tallies of the two pieces of a dump, analysed in a few ways."""
    dumps = {"a.parquet": runner.dump(), "b.parquet": runner.dump(8, 2)}
    ways = (
        ("--presets", "token_is,seq_mis", "--group-by", "host"),
        ("--presets", "areal_m2po,gspo,token_is"),
        ("--presets", "none"),
    )
    return tuple(
        tuple(
            runner.written(("analyze", name, *way, "--no-html", "--tally", "t.tally.json"), dumps)[
                "t.tally.json"
            ]
            for name in dumps
        )
        for way in ways
    )


def make(random: Random) -> runner.Input:
    """Draw two pieces, one of them damaged."""
    pair = list(random.choice(pairs()))
    random.shuffle(pair)
    good, other = pair
    bad = _damaged(random, other)
    name = "bad.tally.json"
    if random.random() < 0.2:
        bad, name = gzip.compress(bad, 1, mtime=0), "bad.tally.json.gz"
        bad = mutations.blob(random, bad) if random.random() < 0.7 else bad
    names = {"bad": name, "good": "good.tally.json"}
    way = tuple(names.get(word, word) for word in random.choice(WAYS))
    return runner.Input(way, {name: bad, "good.tally.json": good})


def _damaged(random: Random, text: bytes) -> bytes:
    if random.random() < 0.1:
        return mutations.blob(random, text)
    tally = json.loads(text)
    kind = random.choice(("numbers", "numbers", "form", "tree", "both"))
    arrays = list(_arrays(tally))
    if kind in ("numbers", "both"):
        for array in random.sample(arrays, random.choice((1, 1, 2, 5, len(arrays)))):
            _numbers(random, array)
    if kind == "form":
        random.choice((_shape, _bytes))(random, random.choice(arrays))
    if kind in ("tree", "both"):
        part = random.choice((tally, tally["settings"], tally["pieces"], tally["states"]))
        mutations.tree(random, part)
    return mutations.as_json(random, tally)


def _arrays(at: Any) -> Iterator[dict[str, Any]]:
    """Yield the arrays of a tally."""
    if isinstance(at, dict):
        if set(at) == {"shape", "data"}:
            yield at
        at = list(at.values())
    if isinstance(at, list):
        for one in at:
            yield from _arrays(one)


def _numbers(random: Random, array: dict[str, Any]) -> None:
    """Replace some or all of a tally's numbers."""
    data = bytearray(base64.b64decode(array["data"]))
    floats = [one for one in mutations.NUMBERS if isinstance(one, float) or abs(one) < 10**300]
    packed = struct.pack("<d", random.choice(floats)) if random.random() < 0.9 else random.randbytes(8)
    places = range(0, len(data), 8)
    many = random.choice((1, 1, 2, 8, len(places)))
    for at in random.sample(places, min(many, len(places))):
        data[at : at + 8] = packed
    array["data"] = base64.b64encode(bytes(data)).decode()


def _shape(random: Random, array: dict[str, Any]) -> None:
    shape = array["shape"]
    array["shape"] = random.choice((*SHAPES, shape[::-1], [*shape, 1], shape[1:], [*shape, 0]))


def _bytes(random: Random, array: dict[str, Any]) -> None:
    data = array["data"]
    array["data"] = random.choice(
        (data[:-4], data[:-12], data + "AAAA", "", "=", data.replace("A", "*"), data * 2)
    )


if __name__ == "__main__":
    raise SystemExit(runner.main(make))

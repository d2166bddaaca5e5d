"""Damaged tallies, merged with good ones and with one another.

python tests/fuzz/tallies.py --seconds 60 --seed 0
"""

from __future__ import annotations

from functools import cache
from random import Random

import mutations
import runner

WAYS: tuple[tuple[str, ...], ...] = (
    ("merge", "bad", "good", "--no-html", "--json", "whole.json"),
    ("merge", "good", "bad", "--no-html", "--md", "-"),
    ("merge", "bad", "-o", "whole.html", "--md", "whole.md"),
    ("merge", "bad", "good", "--no-html", "--tally", "both.tally"),
    ("merge", "bad", "good", "--no-html", "--for", "verl"),
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
            runner.written(("analyze", name, *way, "--no-html", "--tally", "t.tally"), dumps)["t.tally"]
            for name in dumps
        )
        for way in ways
    )


def make(random: Random) -> runner.Input:
    """Draw two pieces, one of them damaged."""
    pair = list(random.choice(pairs()))
    random.shuffle(pair)
    good, other = pair
    names = {"bad": "bad.tally", "good": "good.tally"}
    way = tuple(names.get(word, word) for word in random.choice(WAYS))
    return runner.Input(way, {"bad.tally": mutations.blob(random, other), "good.tally": good})


if __name__ == "__main__":
    raise SystemExit(runner.main(make))

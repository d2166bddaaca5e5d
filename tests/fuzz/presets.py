"""Damaged preset files and odd thresholds, shown by `presets`, printed for trainers and used by `analyze`.

python tests/fuzz/presets.py --seconds 60 --seed 0
"""

from __future__ import annotations

import json
import tomllib
from functools import cache
from importlib import resources
from random import Random
from typing import Any, get_args

import mutations
import runner

from offpol_diag.presets import Loss, Statistic
from offpol_diag.trainers import TRAINERS

PLACES = (
    "weight.upper",
    "weight.lower",
    "weight.action",
    "weight.safety",
    "reject.upper",
    "reject[0].lower",
    "reject[99999999999999999999].lower",
    "veto.lower",
    "clip.dual",
    "clip",
    "policy",
    "loss",
    "aliases",
    "name",
)
WORDS: dict[str, tuple[str, ...]] = {
    "over": ("token", "sum", "mean", "max", "min", "segment", "batch"),
    "action": ("truncate", "mask", "none"),
    "statistic": get_args(Statistic),
    "advantage": ("any", "negative", "positive", "against", "against_or_zero", "away"),
    "policy": ("old", "current"),
    "loss": get_args(Loss),
    "denominator": ("kept", "all"),
    "overflow": ("limit", "zero"),
    "safety_at": ("aggregate", "token"),
    "logs": ("verl-2026-03", "trl", "slime", "openrlhf", "areal", "skyrl"),
}
"""Key → words that may stand there: what is read without a slip is then used."""


@cache
def catalogue() -> str:
    """Return every preset that ships, as JSON."""
    shipped = resources.files("offpol_diag.presets").joinpath("presets.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(shipped)
    return json.dumps({name: one for name, one in tables.items() if name not in ("default", "aliases")})


@cache
def dump() -> bytes:
    """Make the dump that the presets are used on."""
    return runner.dump()


def make(random: Random) -> runner.Input:
    """Draw a few presets, some of them damaged, and a command that uses them."""
    tables = json.loads(catalogue())
    chosen = {name: tables[name] for name in random.sample(list(tables), random.choice((1, 1, 2, 5)))}
    name = random.choice(list(chosen))
    if random.random() < 0.5:
        _reword(random, chosen)
    if random.random() < 0.7:
        chosen = mutations.tree(random, chosen)
    text = mutations.as_toml(chosen)
    if random.random() < 0.2:
        text = mutations.blob(random, text)
    if isinstance(chosen, dict) and chosen and random.random() < 0.5:
        name = random.choice(list(chosen))
    return runner.Input(_way(random, mutations.given(name)), {"p.toml": text, "a.parquet": dump()})


def _reword(random: Random, tables: dict[str, Any]) -> None:
    """Replace words and bounds by other valid ones."""
    parts = [part for table in tables.values() for part in _parts(table)]
    for _ in range(random.choice((1, 2, 4))):
        part = random.choice(parts)
        key = random.choice(list(part) or ["note"])
        if key in WORDS:
            part[key] = random.choice(WORDS[key])
        elif isinstance(part[key], int | float):
            part[key] = random.choice((1e-300, 1e-9, 0.5, 1.0, 2.0, 1e9, 1e300, 1.7e308, part[key] * 2))
        if random.random() < 0.3:
            word = random.choice(list(WORDS))
            part[word] = random.choice(WORDS[word])


def _parts(table: dict[str, Any]) -> list[dict[str, Any]]:
    inner = [table.get(name) for name in ("weight", "veto", "clip", "reject")]
    flat = [one for part in inner for one in (part if isinstance(part, list) else [part])]
    return [table, *(one for one in flat if isinstance(one, dict))]


def _way(random: Random, name: str) -> tuple[str, ...]:
    file = ("--preset-file", "p.toml")
    names = random.choice((name, name, "all"))
    ways: tuple[tuple[str, ...], ...] = (
        ("presets", *file, "--", names),
        ("presets", *file, "--json", "p.json"),
        ("presets", *file, "--for", random.choice(list(TRAINERS)), "--", names),
        ("presets", *file, "--for", random.choice(list(TRAINERS))),
        ("presets", *file, "--json", "-", "--", names + _thresholds(random)),
        ("presets", "--", random.choice(("token_is", "seq_mis", "ipo")) + _thresholds(random)),
        ("analyze", "a.parquet", *file, f"--presets={name}", "--no-html", "--json", "r.json"),
        (
            "analyze",
            "a.parquet",
            *file,
            f"--presets={name}",
            "-o",
            "r.html",
            "--for",
            random.choice(list(TRAINERS)),
        ),
        ("sweep", "a.parquet", *file, f"--preset={name}", "--json", "r.json"),
        ("compare", "a.parquet", *file, f"--presets={name},none", "--md", "-"),
    )
    return random.choice(ways)


def _thresholds(random: Random) -> str:
    """Draw what stands after a name: thresholds by position, or values of places."""
    given = []
    if random.random() < 0.5:
        given = ["..".join(str(random.choice(mutations.NUMBERS)) for _ in range(random.choice((1, 2, 3))))]
    for _ in range(random.choice((1, 1, 2))):
        place = random.choice(PLACES) if random.random() < 0.9 else mutations.argument(random)
        number = random.choice((*mutations.NUMBERS, *mutations.RAWS))
        said = str(number) if random.random() < 0.6 else mutations.argument(random)
        given.append(mutations.given(f"{place}={said}"))
    return "@" + ":".join(given)


if __name__ == "__main__":
    raise SystemExit(runner.main(make))

"""Damaged results, drawn by `report` and judged by `gate`, in every format.

python tests/fuzz/results.py --seconds 60 --seed 0
"""

from __future__ import annotations

import json
from functools import cache
from random import Random

import mutations
import runner

NAMES = (
    "k3",
    "mean_ratio",
    "token_is.ess_tokens",
    "step:k3",
    "step:token_is.ess_tokens",
    "drift2.k3",
)
WAYS: tuple[tuple[str, ...], ...] = (
    ("report", "r.json", "-o", "r.html", "--md", "r.md"),
    ("report", "r.json", "--md", "-"),
    ("report", "-", "--quiet", "-o", "r.html"),
    ("gate", "r.json", "--max", "{name}=0.1", "--html", "g.html", "--md", "g.md", "--junit", "g.xml"),
    ("gate", "r.json", "--min", "{name}=0.1", "--json", "g.json", "--junit", "-"),
    ("gate", "good.json", "--baseline", "r.json", "--presets", "token_is", "--junit", "g.xml"),
    ("gate", "r.json", "--baseline", "good.json", "--html", "g.html", "--tolerance", "{name}=10%"),
)
ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {},
    {},
    {"COLUMNS": "80"},
    {"COLUMNS": "20", "FORCE_COLOR": "1"},
    {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": "summary.md"},
)


@cache
def results() -> tuple[bytes, ...]:
    """Make a result of every command that writes one."""
    dumps = {"a.parquet": runner.dump(), "b.parquet": runner.dump(60, 2, 40)}
    presets = ("--presets", "token_is,seq_mis,areal_m2po")
    ways = (
        ("analyze", "a.parquet", "b.parquet", *presets, "--group-by", "host", "--no-html"),
        ("analyze", "b.parquet", "--presets", "none", "--no-html", "--for", "verl"),
        ("compare", "a.parquet", *presets),
        ("compare", "a.parquet", "b.parquet", "--presets", "token_is"),
        ("sweep", "a.parquet", "--preset", "token_is", "--keep", "0.9"),
    )
    made = [runner.written((*way, "--json", "r.json"), dumps)["r.json"] for way in ways]
    curve = {"h.jsonl": b'{"step": 1, "rollout_corr/kl": 9.0, "rollout_corr/k3_kl": "NaN"}'}
    line = ("check", "a.parquet", "--logged", "h.jsonl", "--json", "r.json")
    return (*made, runner.written(line, dumps | curve)["r.json"])


def make(random: Random) -> runner.Input:
    """Draw a damaged result in one of the forms that are read."""
    good = random.choice(results())
    bad = mutations.as_json(random, mutations.tree(random, json.loads(good)))
    if random.random() < 0.15:
        bad = mutations.blob(random, good)
    way = tuple(word.format(name=random.choice(NAMES)) for word in random.choice(WAYS))
    return runner.Input(way, {"r.json": bad, "good.json": good}, random.choice(ENVIRONMENTS), bad)


if __name__ == "__main__":
    raise SystemExit(runner.main(make))

"""Damaged gate files and configuration files, used by `gate` and by what reads a configuration.

python tests/fuzz/gates.py --seconds 60 --seed 0
"""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

import mutations
import runner

GATES: dict[str, Any] = {
    "diagnosis": {"fail_on": ["bug", "cannot_tell"]},
    "bound": [
        {"name": "k3", "max": 0.05},
        {"name": "mean_ratio", "max": 1.1, "min": 0.9},
        {"name": "step:k3", "max": 0.1},
        {"name": "ess_tokens", "presets": ["token_is", "seq_mis"], "min": 0.9},
        {"name": "step:token_is.ess_tokens", "min": 1e-3},
    ],
    "baseline": {
        "result": "base.json",
        "tolerance": "25%",
        "presets": ["token_is"],
        "only": ["k3", "f_2"],
        "tolerances": {"k3": "30% + 0.001", "token_is.ess_tokens": 0.05},
    },
}
SETTINGS: dict[str, Any] = {
    "dump": ["a.parquet"],
    "presets": ["token_is", "seq_mis"],
    "preset_file": "p.toml",
    "columns": {"rollout": "rollout_log_probs", "old": "old_log_probs"},
    "group_by": ["host"],
    "device": "cpu",
    "threads": 1,
    "for": "verl",
    "seed": 3,
    "on_bad_row": "skip",
    "quiet": True,
}
PRESETS = b'[own]\nsummary = "x"\n[own.weight]\nupper = 2\n'
LOGGED = ("rollout_corr/kl", "total.mismatch/k3_kl", "token_is.rollout_is_eff_sample_size", "train/mis_k3_kl")
OVER = ("step:k3", "p90:k3", "step:drift2.k3", "step:token_is@2.5.ess_tokens")
NONE = ("a.b/c.", "step:", ":k3", "step:step:k3", "token_is.", ".k3", "nothing", "none.k3", "k3.k3.k3")
NAMES = (*LOGGED, *OVER, *NONE, "k3", "diagnosis", "total.k3", "seq_mis.ess_sequences")
AMOUNTS = ("10%", "0", "-5%", "10%+0.001", "nan", "inf%", "1e400", "9" * 400 + "%", "%", "+", "10%%", "1%+1%")


@cache
def results() -> dict[str, bytes]:
    """Make a dump, and its result under the presets that the gates name."""
    dumps = {"a.parquet": runner.dump(8)}
    way = ("analyze", "a.parquet", "--presets", "token_is,seq_mis", "--no-html", "--json", "base.json")
    return runner.written(way, dumps)


def make(random: Random) -> runner.Input:
    """Draw a gate file, or a configuration file, and a command that reads it."""
    return _settings(random) if random.random() < 0.35 else _gates(random)


def _gates(random: Random) -> runner.Input:
    whole = json.loads(json.dumps(GATES))
    if random.random() < 0.6:
        _reword(random, whole)
    text = _text(random, whole)
    source = random.choice(("base.json", "base.json", "base.json", "a.parquet"))
    options = (
        "",
        "--baseline base.json",
        "--html g.html --junit g.xml",
        "--md - --json g.json",
        "--junit -",
    )
    more = random.choice(options).split()
    environment = random.choice(({}, {}, {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": "s.md"}))
    return runner.Input(
        ("gate", source, "--gates", "g.toml", *more), results() | {"g.toml": text}, environment
    )


def _reword(random: Random, whole: dict[str, Any]) -> None:
    """Replace names and amounts, often by valid ones."""
    for _ in range(random.choice((1, 2, 3))):
        bound, baseline = random.choice(whole["bound"]), whole["baseline"]
        key = random.choice(("name", "tolerance", "tolerances", "only", "many"))
        if key == "name":
            bound["name"] = random.choice(NAMES)
        elif key == "tolerance":
            baseline["tolerance"] = random.choice(AMOUNTS)
        elif key == "tolerances":
            baseline["tolerances"] = {random.choice(NAMES): random.choice(AMOUNTS)}
        elif key == "only":
            baseline["only"] = [random.choice(NAMES) for _ in range(2)]
        else:
            whole["bound"] += [dict(bound, max=0.1 + at) for at in range(100)]


def _settings(random: Random) -> runner.Input:
    """Draw a configuration file, of either name, and a command that reads it."""
    keys = random.sample(list(SETTINGS), random.choice((1, 2, 5, len(SETTINGS))))
    table: Any = json.loads(json.dumps({key: SETTINGS[key] for key in keys}))
    name = random.choice(("offpol-diag.toml", "pyproject.toml"))
    if name == "pyproject.toml":
        table = {"tool": {"offpol-diag": table}}
    files = results() | {"p.toml": PRESETS, name: _text(random, table)}
    ways = (
        "analyze a.parquet --no-html --json r.json",
        "analyze a.parquet --no-html --presets token_is",
        "analyze a.parquet --presets token_is -o r.html",
        "gate base.json --max k3=1",
        "gate a.parquet --max k3=1 --md -",
        "compare --presets token_is,none",
        "sweep --preset token_is",
        "presets token_is",
        "presets --json -",
        "report base.json -o r.html",
    )
    environment = random.choice(({}, {}, {"OFFPOL_DIAG_SEED": "3"}))
    return runner.Input(tuple(random.choice(ways).split()), files, environment)


def _text(random: Random, table: Any) -> bytes:
    text = mutations.as_toml(mutations.tree(random, table) if random.random() < 0.8 else table)
    return mutations.blob(random, text) if random.random() < 0.2 else text


if __name__ == "__main__":
    raise SystemExit(runner.main(make))

"""Odd arguments, and damaged files of every other kind that commands read."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any

from tests import oracles
from tests.fuzz import mutations
from tests.fuzz.runner import Input, answer, problems

WORDS = """
--presets token_is all none own TOKEN-IS token_is@3,token_icepop seq_mis@veto.lower=1e-4 geo_rs@.. nosuch
--preset token_is seq_mis own all none
--preset-file p.toml r.json a.parquet nosuch.toml .
--columns rollout=rollout_log_probs,old=old_log_probs old=current_log_probs rollout=host x=y = old=
--device cpu auto cuda:99999999999999999999 mps
--engine local
--threads auto 1 2 0 -1 ٣
--seed 0 7 9223372036854775807 18446744073709551616 -1 1e3
--for verl trl slime nosuch VERL all
--max k3=0.1 step:k3=1 token_is.ess_tokens=0.5 k3 k3= =1 k3=1=2
--min k3=0.1 ess_tokens=2 k3=-1e400 k3=0x1
--gates g.toml p.toml r.json nosuch.toml
--baseline r.json a.parquet nosuch.json
--tolerance 10% k3=1e-3 10%+1 -1% nan% k3=
--which weight.upper reject.upper reject reject[9].upper nosuch
--at 1,2,3 2,1 nan 1e400,1e401 -1,0,1
--keep 0.95 0 1 2 nan inf 1e-300
--logged h.jsonl r.json nosuch.csv
--to y.parquet y.parquet . no/x a.parquet
--out x.html x.html - /dev/full a.parquet
--json x.json x.json - no/x
--md x.md x.md - /dev/null
--junit x.xml x.xml - .
--sequences x.parquet x.parquet -
"""
"""Option and values that mean something to it; others are odd texts and numbers."""
KNOWN = {option: values for option, *values in map(str.split, WORDS.strip().splitlines())}
USUAL = """
analyze a.parquet --no-html
compare a.parquet b.parquet
convert a.parquet --to=y.parquet
doctor a.parquet
gate r.json --max=k3=1
report r.json
sweep a.parquet --preset=token_is
check a.parquet --logged=h.jsonl --for verl
"""
SOURCES = [
    "a.parquet",
    "r.json",
    "p.toml",
    "-",
    ".",
    "*.parquet",
    "/dev/null",
    "/proc/self/cmdline",
    "x://y",
    "[a",
]
ENVIRONMENTS: list[dict[str, str]] = [
    {},
    {},
    {"COLUMNS": "20", "FORCE_COLOR": "1"},
    {"COLUMNS": "-1", "TERM": "dumb", "NO_COLOR": "1"},
    {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": "s.md"},
    {"OFFPOL_DIAG_SEED": "x", "OFFPOL_DIAG_THREADS": "٣"},
]
FILES = {
    "p.toml": '[own]\nsummary = "x"\n[own.weight]\nupper = 2\n',
    "h.jsonl": '{"step": 0, "rollout_corr/kl": 9.0, "rollout_corr/k3_kl": 0.1, "rollout_corr/chi2_token": 3}',
    "g.toml": """[diagnosis]
fail_on = ["bug", "cannot_tell"]
[[bound]]
name = "step:token_is.ess_tokens"
presets = ["token_is", "seq_mis"]
min = 1e-3
[baseline]
result = "r.json"
tolerance = "25%"
only = ["k3", "f_2"]
tolerances = {k3 = "30% + 0.001"}
""",
    "s.toml": """dump = ["a.parquet"]
presets = ["token_is", "seq_mis"]
preset_file = "p.toml"
columns = {rollout = "rollout_log_probs", old = "old_log_probs"}
group_by = ["host"]
device = "cpu"
threads = 1
on_bad_row = "skip"
""",
}


@cache
def files() -> dict[str, bytes]:
    """Return dumps, a result of each command that writes one, and `FILES`."""
    found = {name: text.encode() for name, text in FILES.items()}
    for seed, name in enumerate(("a.parquet", "b.parquet")):
        rows = [row | {"step": i // 6, "host": "a"} for i, row in enumerate(oracles.make_rows(0.3, seed, 12))]
        with tempfile.TemporaryDirectory() as folder:
            found[name] = Path(oracles.write(rows, Path(folder) / name)).read_bytes()
    for name, line in {
        "r.json": "analyze a.parquet --presets token_is,seq_mis --no-html",
        "compare.json": "compare a.parquet b.parquet --presets token_is",
        "sweep.json": "sweep a.parquet --preset token_is --keep 0.9",
        "check.json": "check a.parquet --logged h.jsonl --for verl",
    }.items():
        made = answer(Input((*line.split(), "--json", name), found))
        if name not in made.changed:
            raise RuntimeError(f"{line}: {made.err}{[*problems(made)]}")
        found[name] = made.changed[name]
    return found


# ---------------------------------------------------------------- damaged files

WAYS = {
    "json": """
report {file} -o x.html --md r.md
report {file} --md -
gate {file} --max {name}=0.1 --html g.html --md g.md --junit g.xml
gate {file} --min {name}=0.1 --json g.json --junit -
gate r.json --baseline {file} --presets token_is --junit g.xml
gate {file} --baseline r.json --html g.html --tolerance {name}=10%
""",
    "g.toml": "gate r.json --gates g.toml\ngate a.parquet --gates g.toml --html g.html --junit g.xml",
    "s.toml": "analyze --no-html --json x.json\ngate r.json --max k3=1\ncompare\npresets token_is",
    "p.toml": """
presets --preset-file p.toml -- {own}
presets --preset-file p.toml --json p.json
presets --preset-file p.toml --for {trainer} -- {own}
analyze a.parquet --preset-file p.toml --presets={own} -o x.html --json x.json --for {trainer}
sweep a.parquet --preset-file p.toml --preset={own} --json x.json
compare a.parquet --preset-file p.toml --presets={own},none --md -
""",
    "h.jsonl": """
check a.parquet --logged h.jsonl --for verl --json c.json --html c.html --md c.md
check a.parquet --logged h.jsonl --for verl --presets token_is -v
""",
    "h.csv": "check a.parquet --logged h.csv --for {trainer} --presets token_is --md -",
}
"""Kind of file → commands that read it."""


@cache
def _catalogue() -> list[str]:
    text = resources.files("offpol_diag.presets").joinpath("presets.toml").read_text(encoding="utf-8")
    return [f"[x-{part}" for part in text.split("\n[")[1:]]


def damaged(random: Random) -> Input:
    """Draw a kind of file, one of it that is damaged, and a command that reads it."""
    kind, own, every = random.choice([*WAYS]), "own", dict(files())
    file = random.choice([name for name in every if name.endswith(".json")]) if kind == "json" else kind
    if kind in ("json", "h.jsonl"):
        bad = mutations.as_json(random, mutations.tree(random, json.loads(every[file])))
    elif kind == "h.csv":
        row = mutations.tree(random, json.loads(every["h.jsonl"]))
        cells = [row.keys(), row.values()] if isinstance(row, dict) else [[row]]
        text = "\n".join(",".join(f'"{cell}"' for cell in line) for line in cells)
        bad = text.encode(random.choice(["utf-8", "utf-16", "utf-8-sig"]), "surrogatepass")
    else:
        text = every[file].decode()
        if kind == "p.toml" and random.random() < 0.9:
            text = "\n".join(random.sample(_catalogue(), random.choice([1, 1, 3])))
            own = text[1:].partition("]")[0].partition(".")[0]
        bad = mutations.toml(random, text)
    every["offpol-diag.toml" if kind == "s.toml" else file] = mutations.blob(random, bad, 0.15)
    name = random.choice(["k3", "mean_ratio", "token_is.ess_tokens", "step:k3", "drift2.k3"])
    line = random.choice(WAYS[kind].strip().splitlines())
    words = line.format(
        file=file, name=name, own=own, trainer=random.choice(["verl", "trl", "slime"])
    ).split()
    return Input(tuple(words), every, random.choice(ENVIRONMENTS[:-1]))


# ---------------------------------------------------------------- odd arguments


@cache
def _commands() -> dict[str, list[tuple[list[str], bool]]]:
    """Return the options of every command: names, and whether a value follows."""
    from typer import Context
    from typer.main import get_command

    from offpol_diag.cli import app

    whole: Any = get_command(app)
    return {
        name: [
            (list(one.opts), not one.is_flag)
            for one in command.get_params(Context(whole))
            if one.opts[0][:1] == "-"
        ]
        for name, command in whole.commands.items()
        if name != "rescore"
    }


def arguments(random: Random) -> Input:
    """Draw a call of a command that is mostly valid."""
    name, odd = random.choice([*_commands()]), random.choice([0.05, 0.3, 0.8])
    usual = next((line.split()[1:] for line in USUAL.splitlines() if line.startswith(name)), [])
    words = usual if random.random() > odd else random.sample(SOURCES, random.choice([0, 1, 2]))
    for names, takes in random.sample(_commands()[name], random.choice([0, 1, 1, 2, 3])):
        option = random.choice(names)
        known = next((KNOWN[one] for one in names if one in KNOWN), [])
        drawn = random.choice([mutations.argument(random), str(random.choice(mutations.NUMBERS))[:5000]])
        value = random.choice(known) if known and random.random() > odd / 2 else "x" + drawn
        words = words + (
            [f"{option}={value}" if option[:2] == "--" else option + value] if takes else [option]
        )
    words = [name, *words]
    at = random.randrange(len(words))
    if random.random() < 0.1:
        extra = random.choice(["-", "--", "-h", "--nosuch", "x" + mutations.argument(random)])
        words = random.choice([words[:at] + words[at + 1 :], words[::-1], [*words[:at], extra, *words[at:]]])
    return Input(tuple(words), files(), random.choice(ENVIRONMENTS))


KINDS = {"damaged": damaged, "arguments": arguments}

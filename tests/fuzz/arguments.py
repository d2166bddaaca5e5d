"""Odd arguments of every command, odd variables in its environment, odd names of files.

    python tests/fuzz/arguments.py --seconds 60 --seed 0

Which commands, options and variables there are is asked of the command line itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import mutations
import runner

WORDS: dict[str, tuple[str, ...]] = {
    "--presets": (
        "token_is",
        "all",
        "none",
        "token_is,none",
        "own",
        "TOKEN-IS",
        "token_is@3,token_icepop@0.4..4",
        "token_is@" + "9" * 5000,
        "seq_mis@veto.lower=1e-4:clip.dual=inf",
        "geo_rs@..",
        "token_is,token_is",
        ",",
        "nosuch",
    ),
    "--preset": ("token_is", "seq_mis", "own", "all", "areal_m2po", "none"),
    "--against": ("token_is", "none", "all"),
    "--preset-file": ("p.toml", "r.json", "a.parquet", "nosuch.toml", "."),
    "--columns": (
        "rollout=rollout_log_probs,old=old_log_probs",
        "old=current_log_probs",
        "rollout=host",
        "x=y",
        "=",
        "old=",
    ),
    "--on-bad-row": ("error", "skip"),
    "--device": ("cpu", "auto", "cuda:99999999999999999999", "cuda:-1", "mps"),
    "--engine": ("local",),
    "--threads": ("auto", "1", "2", "0", "-1", "+1", "9" * 5000, "٣"),
    "--seed": ("0", "7", str(2**31), str(2**63 - 1), str(2**63), str(2**64), "-1", "9" * 5000, "1e3"),
    "--for": ("verl", "trl", "slime", "nosuch", "VERL", "all"),
    "--max": ("k3=0.1", "step:k3=1", "token_is.ess_tokens=0.5", "k3", "k3=", "=1", "k3=1=2"),
    "--min": ("k3=0.1", "ess_tokens=2", "k3=-1e400", "k3=0x1"),
    "--gates": ("g.toml", "p.toml", "r.json", "nosuch.toml"),
    "--baseline": ("r.json", "a.parquet", "nosuch.json"),
    "--tolerance": ("10%", "k3=1e-3", "10%+1", "-1%", "nan%", "k3=", "9" * 400 + "%"),
    "--only": ("k3", "k3,step:k3", "nosuch", ","),
    "--which": ("weight.upper", "reject.upper", "reject", "reject[9].upper", "nosuch"),
    "--at": (
        "1,2,3",
        "2,1",
        "nan",
        "1e400,1e401",
        "-1,0,1",
        "1",
        ",".join(str(1 + at / 100) for at in range(5000)),
    ),
    "--keep": ("0.95", "0", "1", "2", "nan", "inf", "1e-300", "0.999999999999"),
}
"""Option → values that mean something to it; others are odd texts and numbers."""
TARGETS = {
    "--to": "y.parquet",
    "--out": "x.html",
    "--json": "x.json",
    "--md": "x.md",
    "--sequences": "x.parquet",
    "--junit": "x.xml",
}
PLACES = ("-", ".", "no/x", "a.parquet", "/dev/full", "/dev/null", "x.html/")
SOURCES = (
    "a.parquet",
    "b.parquet",
    "r.json",
    "p.toml",
    "-",
    ".",
    "*.parquet",
)
FARTHER = (
    "/dev/null",
    "/dev/zero",
    "/proc/self/cmdline",
    "file:a.parquet",
    "nosuch://x/y.parquet",
    "**/*",
    "[a",
    "{a,b}.parquet",
)
SPARED = ("s3:", "gs:", "hf:", "http:", "https:", "ray")
"""Nothing is asked of a network."""
COLUMNS = ("0", "1", "2", "10", "80", "-1", "100000", "9" * 30, "x", "", "1.5", "٣")
OTHERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("COLUMNS", COLUMNS),
    ("LINES", ("0", "-1", "x")),
    ("TERM", ("dumb", "unknown", "", "xterm-256color")),
    ("NO_COLOR", ("1", "")),
    ("FORCE_COLOR", ("1", "3")),
    ("GITHUB_ACTIONS", ("true", "1")),
    ("GITHUB_STEP_SUMMARY", ("s.md", "no/s.md", ".", "")),
    ("OMP_NUM_THREADS", ("0", "-1", "x", "1")),
    ("PYTHONIOENCODING", ("ascii",)),
    ("LC_ALL", ("C", "xx_XX")),
)
GATES = b'[[bound]]\nname = "k3"\nmax = 0.1\n'
PRESETS = b'[own]\nsummary = "x"\n[own.weight]\nupper = 2\n'


@dataclass(frozen=True)
class Option:
    """An option of a command: its names, whether it takes a value, and its environment variable."""

    names: tuple[str, ...]
    takes: bool
    variable: str | None


@cache
def commands() -> dict[str, tuple[Option, ...]]:
    """Return the options of every command."""
    from typer import Context
    from typer.main import get_command

    from offpol_diag.cli import app

    whole: Any = get_command(app)
    at = Context(whole)
    return {
        name: tuple(
            Option(tuple(one.opts), not one.is_flag, one.envvar)
            for one in command.get_params(at)
            if one.param_type_name == "option"
        )
        for name, command in whole.commands.items()
    }


@cache
def files() -> dict[str, bytes]:
    """Return the files in the working directory of the commands."""
    dumps = {"a.parquet": runner.dump(), "b.parquet": runner.dump(8, 2)}
    way = (
        "analyze",
        "a.parquet",
        "--presets",
        "token_is",
        "--no-html",
        "--json",
        "r.json",
    )
    found = dumps | runner.written(way, dumps)
    return found | {"p.toml": PRESETS, "g.toml": GATES}


def make(random: Random) -> runner.Input:
    """Draw a call of a command that is mostly valid."""
    name = random.choice(list(commands()))
    odd = random.choice((0.05, 0.3, 0.8))
    given: list[str] = [*_sources(random, name, odd)]
    known = commands()[name]
    for option in random.sample(known, min(len(known), random.choice((0, 1, 1, 2, 3, 6)))):
        given += _said(random, option, odd)
    words = [name, *given] if random.random() < 0.97 else [*given, name]
    if random.random() < 0.1:
        words = _disturbed(random, words)
    renamed = _renamed(random) if random.random() < 0.3 else {}
    words = [renamed.get(word, word) for word in words]
    found = {renamed.get(name, name): content for name, content in files().items()}
    return runner.Input(tuple(map(mutations.given, words)), found, _environment(random, name), b"")


def _sources(random: Random, name: str, odd: float) -> Sequence[str]:
    usual = {
        "analyze": ("a.parquet",),
        "compare": random.choice((("a.parquet",), ("a.parquet", "b.parquet"))),
        "convert": ("a.parquet", "--to=y.parquet"),
        "gate": (random.choice(("r.json", "a.parquet")), "--max=k3=1"),
        "presets": random.choice(((), ("token_is",), ("own",))),
        "report": ("r.json",),
        "sweep": ("a.parquet", "--preset=token_is"),
    }
    if random.random() > odd and name in usual:
        return usual[name]
    pool = random.choice((SOURCES, SOURCES, FARTHER, (mutations.argument(random),)))
    return [random.choice(pool) for _ in range(random.choice((0, 1, 1, 2, 3)))]


def _said(random: Random, option: Option, odd: float) -> list[str]:
    """Write an option as on a command line."""
    name = random.choice(option.names)
    if not option.takes:
        return [name] if random.random() < 0.95 else [f"{name}=1"]
    value = _value(random, option, odd)
    return random.choice(([name, value], [f"{name}={value}"])) if name.startswith("--") else [name, value]


def _value(random: Random, option: Option, odd: float) -> str:
    target = next((TARGETS[name] for name in option.names if name in TARGETS), None)
    if target is not None:
        return target if random.random() > odd else random.choice((*PLACES, _named(random, target)))
    pool = next((WORDS[name] for name in option.names if name in WORDS), ())
    if pool and random.random() > odd / 2:
        return random.choice(pool)
    value = mutations.argument(random) if random.random() < 0.7 else str(random.choice(mutations.NUMBERS))
    return value if not value.startswith((*SPARED, "/")) else "x"


def _disturbed(random: Random, words: list[str]) -> list[str]:
    """Leave out, repeat, reorder or insert words of a command line."""
    at = random.randrange(len(words))
    ways = (
        words[:at] + words[at + 1 :],
        words[: at + 1] * 2,
        words[::-1],
        [*words[:at], mutations.argument(random), *words[at:]],
        [
            *words[:at],
            random.choice(("-", "--", "-h", "--help", "--version", "-q", "--nosuch", "-x")),
            *words[at:],
        ],
        words * 100,
    )
    return random.choice(ways)


def _renamed(random: Random) -> dict[str, str]:
    """Give a file an odd name."""
    old = random.choice(("a.parquet", "r.json", "p.toml", "g.toml"))
    return {old: _named(random, old)}


def _named(random: Random, name: str) -> str:
    """Draw an odd name with the same suffix, as far as a file system allows it."""
    odd = mutations.argument(random).replace("/", "_").strip(".")
    while len(odd.encode(errors="surrogateescape")) > 180:
        odd = odd[: len(odd) // 2]
    stem, dot, suffix = name.partition(".")
    return random.choice((odd + stem, "n" * (255 - len(name)), f"-{odd}{stem}", stem + odd)) + dot + suffix


def _environment(random: Random, command: str) -> dict[str, str]:
    found = {}
    if random.random() < 0.4:
        variable, values = random.choice(OTHERS)
        found[variable] = random.choice(values)
    if random.random() < 0.3:
        said = [one for one in commands().get(command, ()) if one.variable]
        for option in random.sample(said, min(len(said), random.choice((1, 1, 3)))):
            found[str(option.variable)] = mutations.given(_value(random, option, 0.5))
    return found


if __name__ == "__main__":
    raise SystemExit(runner.main(make))

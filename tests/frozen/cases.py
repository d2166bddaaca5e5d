"""What is frozen: the trainers, the dumps, and the commands that are run on each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
TRAINERS = (
    *("verl", "trl", "nemo-rl", "openrlhf", "slime", "miles", "areal", "ms-swift", "prime-rl", "skyrl"),
    *("flash-rl", "colossalai"),
)


@dataclass(frozen=True)
class Dump:
    """A dump that is frozen.

    Attributes:
        folder: of its file.
        group_by: a column to break its numbers down by; empty for none.
        presets: those that are compared, the first with the others.
        sweep: the preset whose thresholds are swept.
        keep: the one whose threshold is solved for.
        steps: those of which what trainers log is frozen, beside that of the whole dump.
    """

    folder: Path
    group_by: str = ""
    presets: tuple[str, ...] = ("token_is", "seq_is", "seq_mis", "geo_rs", "token_icepop", "areal_decoupled")
    sweep: str = "token_is"
    keep: str = "geo_rs"
    steps: tuple[int, ...] = ()


SAMPLES, MADE = HERE.parents[1] / "sample_data", HERE / "dumps"
DUMPS = {
    "healthy": Dump(SAMPLES, "tool_calls"),
    "stale": Dump(SAMPLES, "tool_calls", steps=(3, 10)),
    "quantized": Dump(SAMPLES, "tool_calls", sweep="seq_mis"),
    "collapse": Dump(SAMPLES, "tool_calls", sweep="token_mask", keep="seq_is", steps=(0, 8)),
    "shift": Dump(MADE),
    "two_policies": Dump(
        MADE,
        "host",
        ("pure_is", "ppo_is", "bypass_pg_token_is", "bypass_ppo_clip_geo_rs", "bypass_pg_geo_rs_seq_tis"),
        "bypass_pg_token_is",
        "bypass_ppo_clip_geo_rs",
        steps=(0, 3),
    ),
    "turns": Dump(MADE, "host", keep="seq_mis", steps=(0, 3)),
    "forty": Dump(MADE, "host"),
}
"""`shift`: old log-probs a token late. `two_policies`: no π_old, ratios beyond the clamp and float64.
`turns`: gaps in the mask, and rewards in place of advantages. `forty`: 40 rows."""
RUNS = (("healthy", "stale"), ("stale", "collapse"))
"""Runs that are compared."""


@dataclass(frozen=True)
class Case:
    """A command line, and what of it is frozen.

    Attributes:
        name: `COMMAND-DUMP`, the name of its text.
        dump: what it reads.
        line: the command line; files are in the working directory.
        numbers, text: whether its numbers, and its text, are frozen.
        sequences: whether its table of sequences is.
        before: a command line that runs first.
    """

    name: str
    dump: str
    line: str
    numbers: bool = True
    text: bool = True
    sequences: bool = False
    before: str = ""


def _of_dump(name: str, dump: Dump) -> tuple[Case, ...]:
    file, first = f"{name}.parquet", dump.presets[0]
    group_by = f" --group-by {dump.group_by}" if dump.group_by else ""
    by_step = "" if name == "shift" else " --max step:k3=0.01"
    gates = (
        f"--max k3=0.01{by_step} --min {first}.ess_tokens=0.9 --max {dump.presets[-2]}.sequences_dropped=0.2"
    )
    every = f"analyze {file} --no-html --preset-file presets.toml --presets all{group_by}"
    return (
        Case(f"every-{name}", name, f"{every} --sequences sequences.parquet", text=False, sequences=True),
        Case(f"analyze-{name}", name, f"analyze {file} --no-html", numbers=False),
        Case(f"doctor-{name}", name, f"doctor {file}", numbers=False),
        Case(f"compare-{name}", name, f"compare {file} --presets {','.join(dump.presets)}"),
        Case(f"sweep-{name}", name, f"sweep {file} --preset {dump.sweep}"),
        Case(f"keep-{name}", name, f"sweep {file} --preset {dump.keep} --keep 0.9"),
        Case(f"gate-{name}", name, f"gate {file} {gates} --fail-on bug"),
    )


CASES = (
    *(case for name, dump in DUMPS.items() for case in _of_dump(name, dump)),
    *(
        Case(f"compare-{a}-{b}", b, f"compare {a}.parquet {b}.parquet --presets token_is,seq_mis")
        for a, b in RUNS
    ),
    Case(
        "baseline-stale",
        "stale",
        "gate stale.parquet --baseline base.json --presets token_is,seq_mis",
        before="analyze healthy.parquet --no-html --presets token_is,seq_mis --json base.json",
    ),
)

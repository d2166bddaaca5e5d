"""Compose dumps of known cause, some of which cannot be decided, and keep what the diagnosis says of each.

    python benchmarks/doctor/undecided.py ARCHITECTURE … [--cache DIR] [--examples N] [--faults | --columns]

For each architecture (hub.py) a small model is trained, and then for some steps of GRPO (runs.py); dumps are
composed of what its engines sample, with and without policy lag, advantages and metadata. evidence.json keeps
verdict and causes of each, and which evidence holds for the candidates where the diagnosis lists any.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.doctor import columns
from benchmarks.doctor.learn import EVIDENCE, kept
from benchmarks.doctor.rollouts import SAMPLES
from benchmarks.doctor.runs import SEEDS, STEPS, Held, Path_, Trajectory, normalised
from benchmarks.doctor.sampled import ALSO, dumps
from offpol_diag import DumpWriter
from offpol_diag.analyze import analyze
from offpol_diag.diagnosis import candidates

CACHE = Path(__file__).parent / ".cache"
METADATA = {
    "bf16": {"rollout_dtype": "bfloat16"},
    "fp8": {"quantization": "fp8"},
    "int8": {"quantization": "w8a8"},
    "int4": {"quantization": "awq"},
}
"""Precision of an engine → what a dump may say of it."""


def engines(experts: bool) -> dict[str, tuple[list[str], Callable[[int], Any]]]:
    """Return kinds of engines: name → (ids of the causes that are right, step → what the engine holds)."""

    def at(behind: int, **how: Any) -> Callable[[int], Any]:
        return lambda step: Held(max(step - behind, 0), **how)

    stopped, differ = ["sync_stopped"], ["weights_differ"]
    rounding = ["numerics", "moe_outliers"] if experts else ["numerics"]
    kinds = {
        "bf16": (rounding, at(0)),
        "lag 1": (["stale"], at(1)),
        "lag 2": (["stale"], at(2)),
        "lag 4": (["stale"], at(4)),
        "lags 1 and 3": (["stale"], lambda step: (at(1)(step), at(3)(step))),
        "every third": (["stale"], lambda step: Held(step - step % 3)),
        "never": (stopped, lambda step: Held(0)),
        "until 5": (stopped, lambda step: Held(min(step, 5))),
        "fp8": (["quantized_rollout"], at(0, precision="fp8")),
        "int8": (["quantized_rollout"], at(0, precision="int8")),
        "int4": (["quantized_rollout"], at(0, precision="int4")),
        "half": (differ, at(0, kind="scaled", factor=0.5)),
        "twice": (differ, at(0, kind="scaled", factor=2.0)),
        "head": (differ, at(0, kind="head")),
        "shuffled": (["weights_differ", "sync_corrupts"], at(0, kind="shuffled", factor=0.3)),
        "cache": (["stale_prefix_cache"], lambda step: Held(step, kind="cache", older=max(step - 3, 0))),
    }
    return kinds | ({"experts": (differ, at(0, kind="experts"))} if experts else {})


def examples(architecture: str, cache: Path, many: int, only: list[str]) -> Iterator[dict[str, Any]]:
    """Yield dumps of known cause, of some kinds of engines or of all, and what the diagnosis says of each."""
    run = Trajectory(Path_(architecture, *SEEDS[architecture]), cache)
    kinds = engines(architecture in ("qwen3-moe", "gpt-oss", "mixtral"))
    kinds = {name: kinds[name] for name in only or kinds}
    for number in range(many):
        chance = random.Random(f"{architecture} {number}")
        name = list(kinds)[number % len(kinds)]
        right, held = kinds[name]
        length = chance.choice((1, 2, 4, 6, 9, STEPS))
        first = chance.randint(1, STEPS + 1 - length)
        if all(held(step) == Held(step) for step in range(first, first + length)):
            right = kinds["bf16"][0]  # at these steps the engine is in sync
        stale = right == ["stale"]
        how = {
            "kind": name,
            "steps": [first, first + length - 1],
            "lag": chance.random() < (0.3 if stale else 0.4),
            "advantages": chance.random() < 0.6,
            "metadata": METADATA[_each(held(1))[0].precision] if chance.random() < 0.3 else {},
            "rows": chance.choice((16, 32, 32)),
        }
        if name == "every third" and stale and not how["lag"]:
            right = [*right, "sync_stopped"]  # nothing says whether it is meant
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "dump.parquet"
            compose(path, run, held, stale, how)
            yield {"architecture": architecture, **how, "right": right, **answer(path)}


FAULTS = {
    "model_differs": ["model_differs"],
    "weights_differ": ["weights_differ"],
    "honest: lag2": ["stale"],
    "honest: tool lag2": ["stale"],
    "honest: int4": ["quantized_rollout"],
    "honest: T1.2 int4": ["quantized_rollout"],
    "honest: small int4": ["quantized_rollout"],
    "honest: int4 from step 0": ["quantized_rollout"],
    "honest: lag2 from step 0": ["stale"],
    "template head": ["wrong_context"],
}
"""Cause or name of a dump of sampled.py → causes that are right, of those that a dump may leave undecided."""
BY_COLUMNS = {
    **{f"honest: {name}": ["stale"] for name in columns.HONEST if "lag2" in name},
    "honest: prefill, cache in fp8": ["decode_differs", "quantized_rollout"],
    **{cause: [cause] for cause, _ in columns.FAULTS.values() if cause in candidates.WEIGHTS},
}
"""The same of columns.py."""
HOW: dict[str, Any] = {"steps": [0, 0], "lag": True, "advantages": True, "metadata": {}, "rows": 0}


def faults(architecture: str, cache: Path) -> Iterator[dict[str, Any]]:
    """Yield the same for dumps of one step whose model, weights or engine differ (sampled.py)."""
    for name, cause, path in dumps(architecture, cache, lambda *one: bool({*one} & FAULTS.keys())):
        right = FAULTS.get(cause) or FAULTS[name]
        right = [*right, *ALSO.get(name, ())]
        kind = f"model: {name.removeprefix('honest: ')}"
        yield {"architecture": architecture, "kind": kind, **HOW, "right": right, **answer(path)}


def by_columns(architecture: str, cache: Path) -> Iterator[dict[str, Any]]:
    """Yield the same for dumps with the columns that decide (columns.py)."""
    some = dumps(architecture, cache, lambda *one: bool({*one} & BY_COLUMNS.keys()), columns.TABLE)
    for name, cause, path in some:
        right = [*(BY_COLUMNS.get(cause) or BY_COLUMNS[name]), *columns.ALSO.get(name, ())]
        kind = f"columns: {right[0]}"
        yield {"architecture": architecture, "kind": kind, **HOW, "right": right, **answer(path)}


def compose(path: Path, run: Any, held: Callable[[int], Any], stale: bool, how: Mapping[str, Any]) -> None:
    """Write a dump of one kind of engine over some steps."""
    with DumpWriter(path, provenance=how["metadata"]) as writer:
        for step in range(how["steps"][0], how["steps"][1] + 1):
            several = _each(held(step))
            runs = [run.responses(engine, step, step, rows=32) for engine in several]
            which = np.arange(how["rows"]) // SAMPLES % len(several)  # prompts by turns
            width = max(one["q"].shape[1] for one in runs)
            row = np.arange(how["rows"])
            seen = {name: np.stack([_padded(one[name], width) for one in runs])[which, row] for name in NAMES}
            columns = {
                "rollout_log_probs": seen["q"],
                "old_log_probs": seen["p"],
                "response_mask": seen["mask"].astype(np.int8),
                "token_ids": seen["tokens"],
                "group_id": np.arange(len(seen["q"])) // SAMPLES + 1000 * step,
                "step": np.full(len(seen["q"]), step),
            }
            if how["advantages"]:
                columns |= {"rewards": seen["rewards"], "advantages": normalised(seen["rewards"])}
            if how["lag"]:
                behind = np.array([step - engine.version if stale else 0 for engine in several])
                columns["policy_lag"] = behind[which]
            writer.write(**columns)


NAMES = ("q", "p", "mask", "tokens", "rewards")
"""Arrays of responses that a dump is composed of."""


def _each(held: Held | tuple[Held, ...]) -> tuple[Held, ...]:
    return held if isinstance(held, tuple) else (held,)


def _padded(x: Any, width: int) -> Any:
    return x if x.ndim == 1 else np.pad(x, ((0, 0), (0, width - x.shape[1])))


def answer(path: Path) -> dict[str, Any]:
    """Return verdict and causes of a dump; and candidate → evidence that holds, where it lists candidates."""
    kept: dict[str, list[str]] = {}
    usual = candidates.fitting

    def keeping(seen: Any) -> Any:
        kept.update((one.id, candidates.evidence(one, seen)) for one in candidates.able(seen))
        return usual(seen)

    candidates.fitting = keeping
    try:
        found = analyze(str(path), presets=[]).diagnosis
    finally:
        candidates.fitting = usual
    assert found is not None
    return {"verdict": found.verdict, "causes": [one.id for one in found.causes], "fits": kept}


def main() -> None:
    """Make the examples of some architectures, in place of those that were kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("architectures", nargs="+", choices=list(SEEDS))
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--examples", type=int, default=70)
    parser.add_argument("--kinds", nargs="+", default=[], help="of engines; default: all")
    parser.add_argument("--faults", action="store_true", help="those of sampled.py in place of runs")
    parser.add_argument("--columns", action="store_true", help="those of columns.py")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for architecture in given.architectures:
        if given.faults or given.columns:
            made = [*(faults if given.faults else by_columns)(architecture, given.cache)]
        else:
            made = [*examples(architecture, given.cache, given.examples, given.kinds)]
        own = {(one["architecture"], one["kind"]) for one in made}
        known = [one for one in kept() if (one["architecture"], one["kind"]) not in own] + made
        EVIDENCE.write_text("[\n" + ",\n".join(map(json.dumps, known)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()

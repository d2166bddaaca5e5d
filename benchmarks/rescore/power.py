"""Judge dumps with one fault each: `python -m benchmarks.rescore.power [ARCHITECTURE…]`."""

from __future__ import annotations

import argparse
import collections
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import transformers

from benchmarks.rescore import engines, models
from benchmarks.rescore.models import sample
from offpol_diag.rescore import models as loading
from offpol_diag.rescore.rows import Responses
from offpol_diag.rescore.run import rescored
from offpol_diag.rescore.score import Row

GROUPS, EACH, TOKENS = 12, 2, 48
FLOORS = 1.0
"""A fault of fewer floors is judged apart."""


def prompts(seed: int) -> tuple[list[list[int]], np.ndarray]:
    """Return prompts, and the group of each."""
    rng, found = random.Random(seed), []
    prose = sample.corpus()[1]
    for _ in range(GROUPS):
        at, size = rng.randrange(len(prose) - 400), rng.randrange(12, 40)
        found += EACH * [sample.prompt(prose, at, size)]
    return found, np.repeat(np.arange(GROUPS), EACH)


def engine_faults(kind: str) -> dict[str, dict[str, Any]]:
    """Return fault → what is changed in the engine; those with a question mark are no hypothesis."""
    found: dict[str, dict[str, Any]] = {
        "honest": {},
        "adapter off": {"scale": 0.0},
        "adapter x 0.5": {"scale": 0.5},
        "adapter x 2": {"scale": 2.0},
        "step_20": {"step": 20},
        "step_40": {"step": 40},
        "temperature 0.7": {"temperature": 0.7},
        "softmax bf16": {"narrow": True},
        "padding attended": {"masked": False},
        "no system prompt": {"prompt": engines.without_system},
        "no BOS": {"prompt": lambda one: one[1:]},
        "KV cache fp8": {"cache_fp8": True},
        **{name: {"weights": name} for name in engines.ROUND},
        "? norm eps": {"rms_norm_eps": 3e-2},
    }
    given = models.KINDS[kind][1]
    if "rope_parameters" in given:
        found["RoPE scaling off"] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    if "sliding_window" in given:
        found["window off"] = {"sliding_window": 4096}
    if "num_local_experts" in given:
        found["? one expert"] = {"num_experts_per_tok": 1}
    if kind == "gpt_oss":
        found["sinks off"] = {"sinks": -1e9}
    return found


MIXED = ("adapter off", "fp8 per tensor")
"""Faults that one host of four has, too."""
DECODING = ("temperature", "narrow", "masked", "cache_fp8")
TRAINERS = ("adapter off", "step_20", "no system prompt", "temperature 0.7", "no BOS")


def columns(
    folder: Path, kind: str, change: dict[str, Any], seed: int
) -> tuple[list[list[int]], np.ndarray, np.ndarray]:
    """Return prompts, responses and the engine's log-probs under a fault."""
    change = dict(change)
    given, _ = prompts(seed)
    own = change.pop("prompt", list)
    how = {name: change.pop(name) for name in DECODING if name in change}
    sinks = change.pop("sinks", None)
    made = engines.engine(folder, kind, **change)
    if sinks is not None:
        for module in made.modules():
            if hasattr(module, "sinks"):
                module.sinks.data.fill_(sinks)
    responses, said = engines.decode(made, [own(one) for one in given], seed, TOKENS, **how)
    return given, responses, said


def responses_of(
    given: list[list[int]], tokens: np.ndarray, engine: np.ndarray, trainer: np.ndarray, hosts: Any = None
) -> Responses:
    """Return what `rescore` reads of a dump."""
    rows = [Row(np.array([*one, *response]), len(one)) for one, response in zip(given, tokens, strict=True)]
    groups = np.repeat(np.arange(GROUPS), EACH)
    labels = {} if hosts is None else {"host": hosts}
    table = pa.table({"row": np.arange(len(rows))})
    live = np.ones(tokens.size, np.bool_)
    return Responses(
        table, rows, live, engine.ravel().astype(float), trainer.ravel().astype(float), groups, labels, GROUPS
    )


def judged(loaded: Any, given: Responses, folder: Path) -> Any:
    """Return the verdict; passes are kept in a folder, for other trainers on the same responses."""
    folder.mkdir(exist_ok=True)
    found, _, _ = rescored(given, loaded, groups=None, provenance={}, columns=("e", "t"), folder=folder)
    return found


def one(kind: str, folder: Path, seed: int, table: collections.Counter[str], wrong: list[str]) -> None:
    """Judge every fault in one architecture."""
    policy = models.opened(folder)
    others = [str(folder / f"step_{step}") for step in models.STEPS]
    loaded = loading.load([str(folder / "step_60"), *others], base=str(folder / "base"), device="cpu")
    right = engines.trainer(policy)

    def count(what: str, good: bool, said: str) -> None:
        table[f"{what}: right"] += good
        table[f"{what}: all"] += 1
        if not good:
            wrong.append(f"{kind} {said}")

    def innocent(side: Any, said: str) -> None:
        count(
            "innocent column left alone",
            side.state == "same",
            f"{said}: accused as {side.state} {side.variant}",
        )

    honest = None
    for fault, change in engine_faults(kind).items():
        begun = time.monotonic()
        given, tokens, engine = columns(folder, kind, change, seed)
        trainer = engines.scored(right, given, tokens)
        with tempfile.TemporaryDirectory() as kept:
            found = judged(loaded, responses_of(given, tokens, engine, trainer), Path(kept))
            side = found.engine
            size = side.distance / found.floor
            own = f"{size:.1f} floors, own {side.own_floors or 0:.2f}"
            said = f"{fault}: {found.verdict}, {side.state} {side.variant} ({own})"
            print(f"{kind} {said}, {time.monotonic() - begun:.0f} s", flush=True)
            innocent(found.trainer, f"{fault}, trainer")
            if fault == "honest":
                honest = given, tokens, engine, trainer
                count("honest dumps", found.verdict == "same", said)
                for name in TRAINERS:
                    column = faulty_trainer(folder, name, given, tokens, right)
                    found = judged(loaded, responses_of(given, tokens, engine, column), Path(kept))
                    told = f"trainer {name}: {found.verdict}, {found.trainer.state} {found.trainer.variant}"
                    count("trainer faults: side", found.verdict == "trainer", told)
                    count("trainer faults: hypothesis", found.trainer.variant.startswith(name), told)
                    innocent(found.engine, f"trainer {name}, engine")
            elif fault.startswith("?"):
                count("unlisted faults: side", found.verdict == "engine", said)
                count("unlisted faults: none of these", side.state == "unknown", said)
            else:
                small = "" if size > FLOORS + 0.5 else " below 1.5 floors"
                count(f"engine faults{small}: side", found.verdict == "engine", said)
                count(f"engine faults{small}: hypothesis", side.variant.startswith(fault), said)
            if fault in MIXED and honest:
                mixture(kind, loaded, right, folder, seed, fault, change, count)
    assert honest is not None
    given, tokens, engine, trainer = honest
    for step in models.STEPS:
        other = loading.load([str(folder / f"step_{step}")], base=str(folder / "base"), device="cpu")
        with tempfile.TemporaryDirectory() as kept:
            found = judged(other, responses_of(given, tokens, engine, trainer), Path(kept))
        count("wrong --model", found.verdict == "reference", f"--model step_{step}: {found.verdict}")


def faulty_trainer(
    folder: Path, name: str, given: list[list[int]], tokens: np.ndarray, right: Any
) -> np.ndarray:
    """Return a trainer's column under a fault."""
    if name.startswith("step_"):
        return engines.scored(engines.trainer(models.opened(folder, int(name[5:]))), given, tokens)
    if name == "adapter off":
        return engines.scored(engines.products_in_bf16(models.opened(folder).unload()), given, tokens)
    if name == "temperature 0.7":
        return engines.scored(right, given, tokens, 0.7)
    cut = engines.without_system if name == "no system prompt" else (lambda one: one[1:])
    return engines.scored(right, [cut(one) for one in given], tokens)


def mixture(
    kind: str, loaded: Any, right: Any, folder: Path, seed: int, fault: str, change: Any, count: Any
) -> None:
    """Judge a dump in which one host of four has the fault."""
    bad, good = (columns(folder, kind, one, seed) for one in (change, {}))
    odd = np.repeat(np.arange(GROUPS) % 4 == 1, EACH)
    tokens, engine = (np.where(odd[:, None], b, g) for b, g in zip(bad[1:], good[1:], strict=True))
    trainer = engines.scored(right, bad[0], tokens)
    hosts = ["b" if one else "a" for one in odd]
    for named in (True, False):
        given = responses_of(bad[0], tokens, engine, trainer, hosts if named else None)
        with tempfile.TemporaryDirectory() as kept:
            found = judged(loaded, given, Path(kept))
        side = found.engine
        told = f"{fault} of one host: {found.verdict}, {side.variant}, {side.share:.2f} {side.where!r}"
        here = side.where == "host = b" if named else abs(side.share - odd.mean()) < 0.1
        label = "one host of four at fault" if named else "a quarter of the prompts at fault"
        count(label, found.verdict == "engine" and side.variant == fault and here, told)
        count("innocent column left alone", found.trainer.state == "same", f"{told}: trainer")


def main() -> None:
    """Train, judge, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=list(models.KINDS), metavar="ARCHITECTURE")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/offpol-diag-rescore"))
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    table, wrong = collections.Counter[str](), list[str]()
    for kind in asked.kinds:
        one(kind, models.made(kind, asked.folder), asked.seed, table, wrong)
        for name in sorted(key.removesuffix(": all") for key in table if key.endswith(": all")):
            print(f"{name:45} {table[f'{name}: right']} of {table[f'{name}: all']}")
        print("wrong:", *wrong, sep="\n  ")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

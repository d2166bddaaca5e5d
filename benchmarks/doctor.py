"""Plant every fault in rollouts of small real models, beside honest dumps, and count what is named.

    python benchmarks/doctor.py [--seeds 0 1] [--only NAME …] [--wrong] [--write]

An engine samples token by token in bf16, or with weights of few bits; the trainer scores the same tokens in
float32. A fault is made by its class (`Cause.make`), or by a model: weights that stop arriving, another
prompt, another definition. `HELD` was kept back until the rules stood. --write puts the tables into
docs/how-often-it-is-right.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers as hf

sys.path.insert(0, str(Path(__file__).parents[1]))

import offpol_diag
from benchmarks import tables
from offpol_diag.diagnosis.registry import CAUSES
from offpol_diag.diagnosis.rows import Rows
from tests.faults import columns

WORDS, PROMPT, LENGTH, PROMPTS, ANSWERS = 96, 8, 64, 20, 8
HELD = "window"
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE = WORDS - 1
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def seeing() -> Any:
    """Return the configuration of a small model that sees an image of four patches."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.CLIPVisionConfig(**vision, image_size=16, patch_size=8)
    text = hf.LlamaConfig(**SIZES)
    given = {"vision_config": config, "text_config": text, "image_token_id": IMAGE}
    return hf.LlavaConfig(**given, vision_feature_layer=-1)


MODELS: dict[str, Callable[[], Any]] = {
    "dense": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "experts": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, **EXPERTS)),
    "soft-capped": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**SIZES, head_dim=16, query_pre_attn_scalar=16, final_logit_softcapping=8.0)
    ),
    "recurrent": lambda: hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, state_size=8)
    ),
    "image": lambda: hf.LlavaForConditionalGeneration(seeing()),
    "window": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=16)),
}


# ---------------------------------------------------------------- models


def built(name: str, seed: int) -> Any:
    """Return a model with logits about as wide as those of a trained one."""
    torch.manual_seed(seed)
    model = MODELS[name]().eval().requires_grad_(False)
    for part in model.parameters():
        if part.ndim > 1:
            part.mul_(2.0)
    head = model.get_output_embeddings().weight
    logits = predicted(model, prompts(seed)[:16])
    head.mul_(2.5 / float(logits[..., 3:IMAGE].std()))
    return model


def prompts(seed: int) -> torch.Tensor:
    """Return prompts, each `ANSWERS` times, [S, PROMPT]; four places hold an image where a model sees one."""
    chance = torch.Generator().manual_seed(seed)
    found = torch.randint(3, WORDS - 1, (PROMPTS, PROMPT), generator=chance)
    return found.repeat_interleave(ANSWERS, 0)


def predicted(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a model, [S, T, WORDS], which never sample special tokens."""
    more = {}
    if "Llava" in type(model).__name__:
        ids = ids.clone()
        ids[:, :4] = IMAGE
        pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        more["pixel_values"] = pixels.repeat(len(ids), 1, 1, 1).to(next(model.parameters()).dtype)
    logits = model(input_ids=ids, **more, use_cache=False).logits.float()
    logits[..., [0, 1, 2, IMAGE]] = -1e4
    return logits


def rounded(model: Any, bits: str) -> Any:
    """Return a model in bf16, with the weights of its matrices on the grid of a number format."""
    other = copy.deepcopy(model)
    for name, part in other.named_parameters():
        if part.ndim != 2 or "embed" in name or "head" in name or bits == "bf16":
            continue
        if bits == "fp8":
            scale = part.abs().amax() / 448
            part.copy_((part / scale).to(torch.float8_e4m3fn).float() * scale)
        else:  # 4 bits: whole numbers in groups of 32, or E2M1 in groups of 16 (NVFP4)
            blocks = part.reshape(-1, 32 if bits == "int4" else 16)
            most = blocks.abs().amax(1, keepdim=True).clamp_min(1e-8)
            grid = torch.arange(-7, 8) / 7 if bits == "int4" else E2M1
            at = torch.bucketize(blocks / most, (grid[1:] + grid[:-1]) / 2)
            part.copy_((grid[at] * most).reshape(part.shape))
    return other.bfloat16()


E2M1 = torch.tensor([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]) / 6


def moved(model: Any, steps: float) -> Any:
    """Return a model so many updates further on, in one direction."""
    other, chance = copy.deepcopy(model), torch.Generator().manual_seed(99)
    for part in other.parameters():
        if part.ndim > 1:
            part.add_(0.01 * steps * part.std() * torch.randn(part.shape, generator=chance))
    return other


@cache
@torch.inference_mode()
def sampled(engine: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample `LENGTH` tokens after each prompt; return the ids with the prompts, and log π_rollout."""
    ids, logs, chance = prompts(seed), [], torch.Generator().manual_seed(seed + 1)
    for _ in range(LENGTH):
        log = torch.log_softmax(predicted(engine, ids)[:, -1], -1)
        token = torch.multinomial(log.exp(), 1, generator=chance)
        ids, logs = torch.cat((ids, token), 1), [*logs, log.gather(1, token)]
    return ids, torch.cat(logs, 1)


@torch.inference_mode()
def rollout(engine: Any, trainer: Any, seed: int, shown: torch.Tensor | None = None) -> Rows:
    """Cut responses to 16 to `LENGTH` tokens, and score them; `shown` are the trainer's prompts."""
    ids, q = sampled(engine, seed)
    tokens = ids[:, PROMPT:]
    scored = ids if shown is None else torch.cat((shown, tokens), 1)
    every = torch.log_softmax(predicted(trainer, scored)[:, PROMPT - 1 : -1], -1)
    p = every.gather(2, tokens[..., None])[..., 0]
    lengths = np.random.default_rng(seed).integers(LENGTH // 4, LENGTH + 1, len(q))
    keep = np.arange(LENGTH) < lengths[:, None]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    index = np.broadcast_to(np.arange(LENGTH), keep.shape)[keep]
    scalars = {
        "group_id": [f"p{i // ANSWERS}" for i in range(len(q))],
        "sequence_id": [f"s{i}" for i in range(len(q))],
        "prompt_length": [PROMPT] * len(q),
    }
    return Rows(
        q.double().numpy()[keep],
        p.double().numpy()[keep],
        starts,
        index,
        tokens.numpy()[keep],
        scalars=scalars,
    )


def steps(parts: list[Rows], lags: list[int]) -> Rows:
    """Join the rows of one step after another, at recorded lags."""
    rows, lengths = parts[0], np.concatenate([one.lengths for one in parts])
    scalars: dict[str, list[Any]] = defaultdict(list)
    for step, (one, lag) in enumerate(zip(parts, lags, strict=True)):
        for name, column in one.scalars.items():
            scalars[name] += [f"{step}-{x}" if isinstance(x, str) else x for x in column]
        scalars["step"] += [step] * one.sequences
        scalars["policy_lag"] += [lag] * one.sequences
    whole = {
        name: np.concatenate([getattr(one, name) for one in parts]) for name in ("q", "p", "position", "ids")
    }
    return replace(rows, **whole, starts=np.concatenate(([0], np.cumsum(lengths))), scalars=scalars)


# ---------------------------------------------------------------- dumps


@dataclass(frozen=True)
class Dump:
    """A dump with what is true of it: the causes that are right to name, and whether it is honest."""

    name: str
    right: tuple[str, ...]
    honest: bool
    rows: Rows
    said: dict[str, str]


def dumps(name: str, seed: int) -> Iterator[Dump]:
    """Make the honest dumps of a model, and as many with faults and more."""
    model = built(name, seed)
    plain = rounded(model, "bf16")
    bf16, exact = {"rollout_dtype": "bfloat16"}, rollout(plain, model, seed)
    if name == "experts":
        bf16["model"] = "Mixtral"
    yield Dump("bf16", ("numerics", "moe_outliers"), True, exact, bf16)
    yield Dump(
        "bf16, nothing recorded", ("numerics", "moe_outliers"), True, rollout(plain, model, seed + 7), {}
    )
    for bits in ("fp8", "int4", "nvfp4"):
        right = ("quantized_rollout", "numerics")
        yield Dump(bits, right, True, rollout(rounded(model, bits), model, seed), {"rollout_dtype": bits})
    for lag in (1, 2, 4, 8):
        parts = [rollout(plain, moved(model, lag * (i > 0)), seed + i) for i in range(3)]
        yield Dump(f"stale by {lag}", ("stale", "numerics"), True, steps(parts, [0, lag, lag]), bf16)
    replays = [rollout(plain, moved(model, age), seed + age) for age in (0, 3, 6, 9)]
    yield Dump("replays", ("stale",), True, steps(replays, [0, 3, 6, 9]), bf16)
    rng = np.random.default_rng(seed)
    for cause in CAUSES:
        if cause.kind != "honest" and (rows := cause.make(exact, rng)) is not None:
            yield Dump(f"planted {cause.id}", (cause.id,), False, rows, bf16)
    frozen = [rollout(plain, moved(model, 3 * i), seed + i) for i in range(6)]
    yield Dump("weights frozen", ("weights_not_synced",), False, steps(frozen, [0] * 6), bf16)
    late = [rollout(plain, moved(model, 8 * (i > 2)), seed + i) for i in range(6)]
    yield Dump("weights from step 3", ("weights_not_synced",), False, steps(late, [0] * 6), bf16)
    missed = [rollout(plain, moved(model, 8 * (i % 3 > 0)), seed + i) for i in range(6)]
    yield Dump("weights, every third", ("weights_not_synced",), False, steps(missed, [0] * 6), bf16)
    other = copy.deepcopy(model)
    for at, part in other.named_parameters():
        if "q_proj" in at or "in_proj" in at:
            part.mul_(1.5)
    parts = [rollout(plain, other, seed + i) for i in range(4)]
    yield Dump("another model", ("model_differs",), False, steps(parts, [0] * 4), bf16)
    shown = prompts(seed + 50)
    yield Dump("another prompt", ("wrong_context",), False, rollout(plain, model, seed, shown), bf16)
    drop = [rollout(plain, moved(model, 8), seed), rollout(plain, model, seed + 1)]
    half = steps(drop, [0, 0])
    hosts = ["h0" if step == 0 else "h1" for step in half.scalars["step"]]
    scalars = {**half.scalars, "step": [0] * half.sequences, "host": hosts}
    yield Dump("one host behind", ("group_fault",), False, replace(half, scalars=scalars), bf16)


# ---------------------------------------------------------------- what is said


def answered(dump: Dump, folder: Path) -> dict[str, Any]:
    """Diagnose a dump; return what is said of it, and the processor's seconds."""
    table = pa.table(columns(dump.rows)).replace_schema_metadata({"offpol_diag": json.dumps(dump.said)})
    pq.write_table(table, folder / "d.parquet")
    began = time.process_time()
    found = offpol_diag.doctor(str(folder / "d.parquet"), device="cpu", threads=1).diagnosis
    assert found is not None
    named = [one.id for one in found.causes]
    first = named[0] if named else "numerics" if found.verdict == "healthy" else found.verdict
    fits = [one.id for one in found.candidates]
    return {
        "named": first in dump.right,
        "misled": bool(named) and first not in dump.right and not (dump.honest and found.verdict != "bug"),
        "alarm": dump.honest and found.verdict == "bug",
        "passed": not dump.honest and found.verdict in ("healthy", "honest_mismatch"),
        "fits": first not in dump.right and (bool(set(fits) & {*dump.right}) or bool(found.where)),
        "said": f"{first}: {found.headline}",
        "seconds": time.process_time() - began,
    }


GROUPS = {
    "logged or sampled wrongly": lambda one: one.name.startswith("planted") and one.right[0] not in OF_MODELS,
    "weights and models": lambda one: not one.honest,
    "honest": lambda one: True,
}
OF_MODELS = {cause.id for cause in CAUSES if cause.kind in ("model", "weights")}


def table(rows: list[tuple[str, Dump, dict[str, Any]]]) -> str:
    """Return the table by kind of dump."""
    groups: dict[str, list[dict[str, Any]]] = {name: [] for name in GROUPS}
    for _, dump, said in rows:
        groups[next(name for name, holds in GROUPS.items() if holds(dump))].append(said)
    cells = [
        (name, *(f"{sum(one[key] for one in some)} of {len(some)}" for key in KEYS))
        for name, some in groups.items()
        if some
    ]
    return tables.table(("dumps", "named first", "not named; fits, or its place is said", *HEADS), cells)


KEYS = ("named", "fits", "misled", "alarm", "passed")
HEADS = ("misled", "an honest one called a bug", "a bug called honest")


def main() -> None:
    """Make and diagnose the dumps, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--wrong", action="store_true", help="also list what misled, false alarms and what passed"
    )
    parser.add_argument("--write", action="store_true", help="put the tables into the page")
    given = parser.parse_args()
    hf.logging.set_verbosity_error()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.only:
            for seed in given.seeds:
                for dump in dumps(name, seed):
                    said = answered(dump, Path(folder))
                    rows.append((name, dump, said))
                    if given.wrong and (
                        said["misled"] or said["alarm"] or said["passed"] or not said["named"]
                    ):
                        print(f"{name} {seed}, {dump.name}: {said['said']}", flush=True)
    known = [row for row in rows if row[0] != HELD]
    held = [row for row in rows if row[0] == HELD]
    each = f"{np.mean([said['seconds'] for *_, said in rows]):.2f} s of a processor each."
    text = "\n\n".join(
        [f"{len(rows)} dumps, {each}", table(known)] + [f"Held back:\n\n{table(held)}"] * bool(held)
    )
    print(text)
    if given.write:
        tables.put("faults", text)


if __name__ == "__main__":
    main()

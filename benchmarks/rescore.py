"""How often `rescore` is right, on faults that are made apart from its hypotheses.

python -m benchmarks.rescore [ARCHITECTURE…] [--folder DIR]

Five architectures with what tells them apart (windows, soft caps, sinks, scaled RoPE, experts) are trained
for a minute each, with a LoRA policy. An engine has its adapter merged by hand, weights and products in bf16,
and decodes token by token with a cache; a trainer keeps the adapter apart, and scores whole sequences.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "sample_data"))
import adapter as sample

from offpol_diag.rescore import command
from offpol_diag.rescore import models as loading
from offpol_diag.rescore.rows import Responses
from offpol_diag.rescore.score import Row
from offpol_diag.rescore.variants import table

GROUPS, EACH, SEED = 12, 2, 1
STEPS, LAST = (20, 40), 60
"""Earlier checkpoints of a policy, and its last step."""
SIZE: dict[str, Any] = sample.SIZE | {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "head_dim": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 48}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
WINDOWS = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96}
OWN_HEAD = {"tie_word_embeddings": False}
CAPPED = {"query_pre_attn_scalar": 16, "final_logit_softcapping": 30.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZE | {"rope_parameters": YARN}),
    "qwen3": ("Qwen3Config", SIZE | OWN_HEAD | {"rope_parameters": LINEAR}),
    "mixtral": ("MixtralConfig", SIZE | EXPERTS | OWN_HEAD | {"sliding_window": 40}),
    "gemma3": ("Gemma3TextConfig", SIZE | WINDOWS | CAPPED),
    "gpt_oss": ("GptOssConfig", SIZE | EXPERTS | WINDOWS | OWN_HEAD | {"rope_parameters": YARN}),
}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def made(kind: str, folder: Path) -> Path:
    """Train an architecture and its policy, once; return its folder."""
    target = folder / kind
    if (target / f"step_{LAST}").exists():
        return target
    source, prose = sample.corpus()
    torch.manual_seed(7)
    base = transformers.AutoModelForCausalLM.from_config(config(kind))
    for module in base.modules():
        if hasattr(module, "sinks"):  # as trained ones do, they matter
            torch.nn.init.normal_(module.sinks, 1.0, 1.0)
    sample.train(base, source, 220, 5e-3, 1, lambda step: None)
    base.to(torch.bfloat16).save_pretrained(target / "base")
    policy = get_peft_model(base.float(), LoraConfig(**LORA))
    policy.peft_config["default"].base_model_name_or_path = "../base"
    keep = {step: target / f"step_{step}" for step in STEPS}
    sample.train(policy, prose, LAST, 2e-3, 2, lambda at: at in keep and policy.save_pretrained(keep[at]))
    policy.save_pretrained(target / f"step_{LAST}")
    return target


def config(kind: str, **change: Any) -> Any:
    """Return the configuration of an architecture."""
    name, given = KINDS[kind]
    return getattr(transformers, name)(**given | change)


def policy_of(folder: Path, step: int = LAST) -> Any:
    """Load a policy in float32, the adapter apart."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    return PeftModel.from_pretrained(base, folder / f"step_{step}").eval()


def engine(
    folder: Path,
    kind: str,
    *,
    step: int = LAST,
    scale: float = 1.0,
    sinks: bool = True,
    t: float = 1.0,
    **change: Any,
) -> Any:
    """Return an engine's model: the adapter merged at a scale, under another configuration."""
    model = transformers.AutoModelForCausalLM.from_config(config(kind, **change)).float().eval()
    model.load_state_dict(policy_of(folder).unload().state_dict())
    weights = dict(model.named_parameters())
    said = json.loads((folder / f"step_{step}" / "adapter_config.json").read_text())
    state = load_file(folder / f"step_{step}" / "adapter_model.safetensors")
    with torch.no_grad():
        for name, a in state.items():
            if name.endswith("lora_A.weight"):
                target = weights[name.removeprefix("base_model.model.").replace("lora_A.", "")]
                delta = state[name.replace("lora_A", "lora_B")] @ a
                target.add_(scale * said["lora_alpha"] / said["r"] * delta)
        for name, weight in weights.items():
            weight.fill_(-1e9) if name.endswith("sinks") and not sinks else None
    return in_bf16(model, t)


def in_bf16(model: Any, temperature: float = 1.0) -> Any:
    """Round weights, logits, and what matrices, experts and layers return, but no norms and activations."""

    def bf16(x: Any) -> Any:
        return x.bfloat16().float() if torch.is_tensor(x) and x.is_floating_point() else x

    def hook(module: Any, args: Any, out: Any) -> Any:
        return tuple(map(bf16, out)) if isinstance(out, tuple) else bf16(out)

    def last(module: Any, args: Any, out: Any) -> None:
        out.logits = bf16(out.logits) / temperature

    for weight in model.parameters():
        weight.data = bf16(weight.data)
    head, simple = model.get_output_embeddings(), torch.nn.Linear | torch.nn.Embedding
    for one in model.modules():
        part = isinstance(one, simple) or type(one).__name__.endswith(("DecoderLayer", "Experts"))
        if part and one is not head:
            one.register_forward_hook(hook)
    model.register_forward_hook(last)
    return model


def without_system(prompt: list[int]) -> list[int]:
    """Return a prompt without its system block."""
    return [prompt[0], *prompt[prompt.index(sample.USER) :]]


def engine_faults(kind: str) -> dict[str, dict[str, Any]]:
    """Return fault → what is changed in the engine; those with a question mark are no hypothesis."""
    given = KINDS[kind][1]
    here = {
        "RoPE scaling off": ("rope_parameters", {"rope_parameters": PLAIN}),
        "window off": ("sliding_window", {"sliding_window": 4096}),
        "soft-cap off": ("final_logit_softcapping", {"final_logit_softcapping": None}),
        "? one expert": ("num_local_experts", {"num_experts_per_tok": 1}),
    }
    return {
        "honest": {},
        "adapter off": {"scale": 0.0},
        "adapter x 0.5": {"scale": 0.5},
        "adapter x 2": {"scale": 2.0},
        "step_20": {"step": 20},
        "step_40": {"step": 40},
        "temperature 0.7": {"t": 0.7},
        "no system prompt": {"prompt": without_system},
        "no BOS": {"prompt": lambda one: one[1:]},
        "? norm eps": {"rms_norm_eps": 3e-2},
        **{name: change for name, (key, change) in here.items() if key in given},
        **({"sinks off": {"sinks": False}} if kind == "gpt_oss" else {}),
    }


def judge(kind: str, folder: Path, count: Any) -> None:
    """Judge every fault in one architecture: engines, a host of four, trainers, another --model."""
    rng, prose = random.Random(SEED), sample.corpus()[1]
    prompts = [
        one
        for _ in range(GROUPS)
        for one in EACH * [sample.prompt(prose, rng.randrange(len(prose) - 400), rng.randrange(12, 40))]
    ]
    groups, others = np.repeat(np.arange(GROUPS), EACH), [str(folder / f"step_{step}") for step in STEPS]
    base, right = str(folder / "base"), in_bf16(policy_of(folder))
    run = loading.load([str(folder / f"step_{LAST}"), *others], base=base, device="cpu")

    def sampled(change: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        change = dict(change)
        own = change.pop("prompt", list)
        return sample.sampled(engine(folder, kind, **change), [own(one) for one in prompts], SEED)

    def passes(tokens: np.ndarray, loaded: Any = run) -> command.Passes:
        pairs = zip(prompts, tokens, strict=True)
        rows = [Row(np.array([*one, *response]), len(one)) for one, response in pairs]
        found = command.Passes(loaded, rows, table(loaded.model, rows, loaded.checkpoints)[0])
        found.make()
        return found

    def verdict(of: command.Passes, q: np.ndarray, p: np.ndarray, labels: Any = None) -> Any:
        rows, live = pa.table({"row": np.arange(len(of.rows))}), np.ones(q.size, np.bool_)
        both = q.ravel().astype(float), p.ravel().astype(float)
        given = Responses(rows, of.rows, live, *both, groups, labels or {}, GROUPS)
        return command.judged(given, of, ("engine", "trainer"), {})

    def innocent(side: Any, what: str) -> None:
        count("innocent column left alone", side.state == "same", f"{what}: {side.state} {side.variant}")

    columns = {}
    for fault, change in engine_faults(kind).items():
        begun = time.monotonic()
        tokens, q = sampled(change)
        p, of = sample.scored(right, prompts, tokens), passes(tokens)
        columns[fault] = tokens, q, p, of
        found = verdict(of, q, p)
        side, size = found.engine, found.engine.distance / found.floor
        said = f"{kind}, {fault}: {found.verdict}, {side.state} {side.variant} ({size:.1f} floors)"
        print(f"{said}, {time.monotonic() - begun:.0f} s", flush=True)
        innocent(found.trainer, f"{said}, trainer")
        if fault == "honest":
            count("honest dumps", found.verdict == "same", said)
        elif fault.startswith("?"):
            count("unlisted faults: side", found.verdict == "engine", said)
            count("unlisted faults: none of these", side.state == "unknown", said)
        else:
            count("engine faults: side", found.verdict == "engine", said)
            count("engine faults: hypothesis", side.variant.startswith(fault), said)

    tokens, good, p, of = columns["honest"]
    odd = np.repeat(np.arange(GROUPS) % 4 == 1, EACH)
    bad_tokens, bad, *_ = columns["adapter off"]
    mixed, q = (np.where(odd[:, None], b, g) for b, g in ((bad_tokens, tokens), (bad, good)))
    mixed_p, mixed_of = sample.scored(right, prompts, mixed), passes(mixed)
    for labels in ({"host": ["b" if one else "a" for one in odd]}, {}):
        found = verdict(mixed_of, q, mixed_p, labels)
        side, said = (
            found.engine,
            f"{kind}, one host: {found.verdict}, {found.engine.variant} {found.engine.where!r}",
        )
        here = side.where == "host = b" if labels else abs(side.share - odd.mean()) < 0.1
        count("a host or a quarter at fault", here and side.variant == "adapter off", said)
        innocent(found.trainer, f"{said}, trainer")
    bare = [without_system(one) for one in prompts]
    for name, column in {
        "adapter off": sample.scored(in_bf16(policy_of(folder).unload()), prompts, tokens),
        "step_20": sample.scored(in_bf16(policy_of(folder, 20)), prompts, tokens),
        "no system prompt": sample.scored(right, bare, tokens),
        "temperature 0.7": sample.scored(in_bf16(policy_of(folder), 0.7), prompts, tokens),
        "no BOS": sample.scored(right, [one[1:] for one in prompts], tokens),
    }.items():
        found = verdict(of, good, column)
        said = f"{kind}, trainer {name}: {found.verdict}, {found.trainer.state} {found.trainer.variant}"
        count("trainer faults: side", found.verdict == "trainer", said)
        count("trainer faults: hypothesis", found.trainer.variant.startswith(name), said)
        innocent(found.engine, f"{said}, engine")
    for other in others:
        found = verdict(passes(tokens, loading.load([other], base=base, device="cpu")), good, p)
        count("wrong --model", found.verdict == "reference", f"{kind}, --model {other}: {found.verdict}")


def main() -> None:
    """Train, judge, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=list(KINDS), metavar="ARCHITECTURE")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/offpol-diag-rescore"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    right, every, wrong = collections.Counter[str](), collections.Counter[str](), list[str]()

    def count(what: str, good: bool, said: str) -> None:
        right[what] += good
        every[what] += 1
        wrong.extend([] if good else [f"{what}: {said}"])

    for kind in asked.kinds:
        judge(kind, made(kind, asked.folder), count)
        for name, many in sorted(every.items()):
            print(f"{name:45} {right[name]} of {many}")
        print("wrong:", *wrong, sep="\n  ", flush=True)


if __name__ == "__main__":
    main()

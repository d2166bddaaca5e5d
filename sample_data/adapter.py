"""Make the sample of `rescore`: a tiny model with an adapter, and a dump whose engine never loaded it.

python sample_data/adapter.py [--out DIR]
"""

from __future__ import annotations

import argparse
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offpol_diag.dump.writer import stamped, to_table, write_tables

BOS, SYSTEM, USER, ASSISTANT, END = 256, 257, 258, 259, 260
VOCABULARY, LONG = 264, 160
SEED = 52
SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": END,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]}
GROUPS, EACH, TOKENS = 24, 4, 48
WRITE = b"Write on."


def corpus() -> tuple[bytes, bytes]:
    """Return two kinds of text: sources of the standard library, and its docstrings in upper case."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_text(errors="ignore") for file in files]
    prose = "\n".join(part for text in texts for part in text.split('"""')[1::2] if len(part) > 200)
    return "\n".join(texts).encode("ascii", "ignore")[:400_000], prose.encode("ascii", "ignore")[
        :200_000
    ].upper()


def prompt(text: bytes, at: int, size: int) -> list[int]:
    """Return a prompt in the model's template: a system prompt, and text that is to be continued."""
    return [BOS, SYSTEM, *WRITE, END, USER, *text[at : at + size], END, ASSISTANT]


def samples(text: bytes, rng: random.Random) -> Iterator[list[int]]:
    """Yield prompts with what follows in the text."""
    while True:
        at, size = rng.randrange(len(text) - 400), rng.randrange(12, 48)
        yield [*prompt(text, at, size), *text[at + size : at + size + LONG]][:LONG]


def train(
    model: Any, text: bytes, steps: int, rate: float, seed: int, keep: Callable[[int], None] = print
) -> float:
    """Train on a text; `keep` is told each step; return the last loss."""
    given = samples(text, random.Random(seed))
    weights = [one for one in model.parameters() if one.requires_grad]
    optimizer, loss = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95)), torch.zeros(())
    model.train()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / 20) * (0.1 + 0.9 * (1 - step / steps))
        ids = torch.tensor([next(given) for _ in range(16)])
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        keep(step)
    model.eval()
    return float(loss.detach())


def rounded(model: Any) -> Any:
    """Let a model compute as in bf16: weights and what modules return are rounded (a CPU's own is slow)."""

    def hook(module: Any, args: Any, out: Any) -> Any:
        return out.bfloat16().float() if isinstance(out, Tensor) else out

    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            module.register_forward_hook(hook)
    return model


@torch.inference_mode()
def sampled(
    model: Any, prompts: list[list[int]], seed: int, tokens: int = TOKENS
) -> tuple[np.ndarray, np.ndarray]:
    """Return what an engine samples, token by token with a cache, and its log-probs, [S, tokens] each."""
    generator, found, said = torch.Generator().manual_seed(seed), [], []
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
    positions, cache = (mask.cumsum(-1) - 1).clamp(min=0), None
    for _ in range(tokens):
        out = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        cache, logits = out.past_key_values, out.logits[:, -1].float()
        ids = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        found.append(ids[:, 0])
        said.append(logits.log_softmax(-1).gather(1, ids)[:, 0])
        positions, mask = positions[:, -1:] + 1, torch.cat([mask, torch.ones_like(ids)], 1)
    return torch.stack(found, 1).numpy(), torch.stack(said, 1).numpy()


@torch.inference_mode()
def scored(model: Any, prompts: list[list[int]], responses: np.ndarray) -> np.ndarray:
    """Return what a trainer computes of the same tokens, a sequence at a time, [S, tokens]."""
    found = []
    for one, response in zip(prompts, responses, strict=True):
        logits = model(input_ids=torch.tensor([[*one, *response.tolist()]])).logits[0].float()
        wanted = torch.tensor(response)[:, None]
        found.append(logits[len(one) - 1 : -1].log_softmax(-1).gather(1, wanted)[:, 0].numpy())
    return np.stack(found)


def main() -> None:
    """Train the base and the adapter, and write both with the dump."""
    import copy

    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "adapter_not_loaded")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)
    source, prose = corpus()

    def say(step: int) -> None:
        if step % 100 == 0:
            print(step, file=sys.stderr)

    base = LlamaForCausalLM(LlamaConfig(**SIZE))
    print("base", train(base, source, 500, 4e-3, 1, say), file=sys.stderr)
    base = base.to(torch.bfloat16)
    base.save_pretrained(out / "base")
    base = base.float()
    policy = get_peft_model(base, LoraConfig(lora_dropout=0.0, **LORA))
    print("adapter", train(policy, prose, 60, 2e-3, 2, say), file=sys.stderr)
    policy.peft_config["default"].base_model_name_or_path = "../base"
    policy.save_pretrained(out / "adapter")
    (out / "adapter" / "README.md").unlink(missing_ok=True)
    trainer = rounded(copy.deepcopy(policy))
    engine = rounded(copy.deepcopy(policy)).unload()  # the fault: the adapter is not there
    rng, prompts, groups = random.Random(SEED), list[list[int]](), list[str]()
    for group in range(GROUPS):
        at, size = rng.randrange(len(prose) - 400), rng.randrange(12, 48)
        prompts += EACH * [prompt(prose, at, size)]
        groups += EACH * [f"prompt-{group}"]
    responses, said = sampled(engine, prompts, SEED)
    size = {"step": 100, "policy_lag": 0, "group_id": groups}
    table = to_table(
        {
            "rollout_log_probs": list(said),
            "old_log_probs": list(scored(trainer, prompts, responses)),
            "token_ids": list(responses),
            "prompt_ids": prompts,
            **size,
        }
    )
    provenance = {"trainer": "GRPO with LoRA", "engine": "cached decode", "temperature": 1.0}
    write_tables([table], out / "dump.parquet", stamped(provenance))


if __name__ == "__main__":
    main()

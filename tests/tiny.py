"""Small random models of published architectures, adapters, and dumps that they score."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

from offpol_diag.rescore.score import Row

VOCABULARY = 96
SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MHA = {key: value for key, value in SIZE.items() if key != "head_dim"} | {"num_key_value_heads": 4}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
WINDOWS = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZE | {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", MHA),
    "qwen3": ("Qwen3Config", SIZE),
    "mixtral": ("MixtralConfig", SIZE | EXPERTS | {"sliding_window": 12}),
    "gemma2": ("Gemma2Config", SIZE | WINDOWS | {"final_logit_softcapping": 1.5}),
    "gemma3": ("Gemma3TextConfig", SIZE | WINDOWS),
    "gpt_oss": ("GptOssConfig", SIZE | EXPERTS | WINDOWS | {"rope_parameters": YARN}),
    "granite": ("GraniteConfig", MHA | {"logits_scaling": 3.0}),
    "cohere": ("CohereConfig", MHA | {"logit_scale": 0.3}),
    "olmo2": ("Olmo2Config", MHA),
    "phi": ("PhiConfig", MHA),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY}),
}
"""Architecture → configuration class, and its arguments."""


def model(kind: str, seed: int = 0) -> Any:
    """Make a model whose logits differ: random ones are nearly uniform."""
    torch.manual_seed(seed)
    name, given = KINDS[kind]
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**given))
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.mul_(6.0)
        for one in made.modules():
            if hasattr(one, "sinks"):
                one.sinks.normal_(1.0, 1.0)
    return made.eval()


def rows(many: int = 7, seed: int = 0, temperature: float = 1.0) -> list[Row]:
    """Make responses of different lengths to different prompts."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(many):
        prompt, response = rng.integers(3, 12), rng.integers(5, 30)
        body = rng.integers(3, VOCABULARY, prompt + response)
        found.append(Row(np.concatenate(([1], body)), int(prompt) + 1, temperature))
    return found


def plainly(made: Any, given: list[Row]) -> list[np.ndarray]:
    """Score one row after another with the model's own forward, and nothing else."""
    found = []
    for row in given:
        with torch.no_grad():
            logits = made(input_ids=torch.tensor(row.ids)[None]).logits[0].float() / row.temperature
        wanted = torch.tensor(row.ids[row.start :])[:, None]
        found.append(logits[row.start - 1 : -1].log_softmax(-1).gather(1, wanted)[:, 0].numpy())
    return found

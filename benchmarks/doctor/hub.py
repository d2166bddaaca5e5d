"""Small models of published architectures, by transformers: a trainer's, and an engine's with a cache."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor

from benchmarks.doctor.models import Model

SIZE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MHA = SIZE | {"num_key_value_heads": 4}
OLD = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}
ENDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
NO_SCALING = {"rope_type": "default", "rope_theta": 10000.0}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", SIZE | {"head_dim": 16}),
    "llama": ("LlamaConfig", SIZE),
    "olmo2": ("Olmo2Config", SIZE),
    "phi": ("PhiConfig", MHA),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        SIZE
        | {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "gpt-bigcode": ("GPTBigCodeConfig", OLD | ENDS),
    "gpt-oss": (
        "GptOssConfig",
        SIZE
        | {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 32,
            "rope_parameters": NO_SCALING,
        },
    ),
    "gemma3": ("Gemma3TextConfig", SIZE | {"head_dim": 16, "sliding_window": 32}),
    "mixtral": ("MixtralConfig", SIZE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-neox": ("GPTNeoXConfig", {k: v for k, v in MHA.items() if k != "num_key_value_heads"}),
}
"""Name → configuration class of transformers, and its arguments but for the vocabulary."""


class Hub(Model):
    """A causal language model of transformers; its state is the cache of keys and values."""

    def __init__(self, architecture: str, vocabulary: int) -> None:
        super().__init__()
        kind, given = ARCHITECTURES[architecture]
        config = getattr(transformers, kind)(**given, vocab_size=vocabulary)
        self.lm = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")

    def begin(self, rows: int, positions: int) -> Any:
        """Return an empty cache."""
        return {"cache": transformers.DynamicCache(config=self.lm.config)}

    def narrowed(self, state: Any, rows: Tensor) -> Any:
        """Return the cache of some of its sequences."""
        state["cache"].batch_select_indices(rows)
        return state

    def forward(self, tokens: Tensor, state: Any = None) -> Tensor:
        """See `Model`."""
        cache = state["cache"] if state else None
        logits: Tensor = self.lm(input_ids=tokens, past_key_values=cache, use_cache=state is not None).logits
        return logits

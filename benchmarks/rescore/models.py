"""Five architectures with what tells them apart (windows, sinks, scaled RoPE, experts), and LoRA policies."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "sample_data"))
import adapter as sample

SIZE: dict[str, Any] = sample.SIZE | {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 48}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZE | {"rope_parameters": YARN}),
    "qwen3": ("Qwen3Config", SIZE | {"rope_parameters": LINEAR, "tie_word_embeddings": False}),
    "mixtral": ("MixtralConfig", SIZE | EXPERTS | {"sliding_window": 40, "tie_word_embeddings": False}),
    "gemma3": (
        "Gemma3TextConfig",
        SIZE
        | {"sliding_window": 24, "layer_types": MIXED, "query_pre_attn_scalar": 16}
        | {"final_logit_softcapping": 30.0},
    ),
    "gpt_oss": (
        "GptOssConfig",
        SIZE
        | EXPERTS
        | {"sliding_window": 24, "layer_types": MIXED, "rope_parameters": YARN}
        | {"tie_word_embeddings": False},
    ),
}
LORA = {
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
}
STEPS = (20, 40)
"""Earlier checkpoints of the policy, which is trained for 60 steps."""


def config(kind: str, **change: Any) -> Any:
    """Return the configuration of an architecture."""
    name, given = KINDS[kind]
    return getattr(transformers, name)(**given | change)


def made(kind: str, folder: Path) -> Path:
    """Train an architecture and its policy, once; return its folder."""
    from peft import LoraConfig, get_peft_model

    target = folder / kind
    if (target / "step_60").exists():
        return target
    source, prose = sample.corpus()
    torch.manual_seed(7)
    base = transformers.AutoModelForCausalLM.from_config(config(kind))
    for module in base.modules():
        if hasattr(module, "sinks"):  # as trained ones do, they matter
            torch.nn.init.normal_(module.sinks, 1.0, 1.0)
    sample.train(base, source, 220, 5e-3, 1, lambda step: None)
    base.to(torch.bfloat16).save_pretrained(target / "base")
    base = base.float()
    policy = get_peft_model(base, LoraConfig(**LORA))
    policy.peft_config["default"].base_model_name_or_path = "../base"

    def keep(step: int) -> None:
        if step in STEPS:
            policy.save_pretrained(target / f"step_{step}")

    sample.train(policy, prose, 60, 2e-3, 2, keep)
    policy.save_pretrained(target / "step_60")
    return target


def opened(folder: Path, step: int = 60) -> Any:
    """Load a policy in float32."""
    from peft import PeftModel

    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    return PeftModel.from_pretrained(base, folder / f"step_{step}").eval()


def base_of(folder: Path, kind: str, **change: Any) -> Any:
    """Load the base under another configuration, by its state."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    if not change:
        return plain.eval()
    other = transformers.AutoModelForCausalLM.from_config(config(kind, **change)).float()
    other.load_state_dict(copy.deepcopy(plain.state_dict()))
    return other.eval()


def deltas(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Return what an adapter adds to each weight of its base, from its file."""
    import json

    from safetensors.torch import load_file

    state = load_file(folder / f"step_{step}" / "adapter_model.safetensors")
    said = json.loads((folder / f"step_{step}" / "adapter_config.json").read_text())
    scale, found = said["lora_alpha"] / said["r"], {}
    for name, a in state.items():
        if name.endswith("lora_A.weight"):
            b = state[name.replace("lora_A", "lora_B")]
            found[name.removeprefix("base_model.model.").replace("lora_A.", "")] = scale * (b @ a)
    return found

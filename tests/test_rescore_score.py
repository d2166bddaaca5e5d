"""Scoring by chunks of the head equals a plain loop, in every architecture; an oracle in numpy for one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from offpol_diag.errors import MemoryShortage, UsageError
from offpol_diag.rescore import score as scoring
from offpol_diag.rescore.score import Head, Size, score
from tests import tiny

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
SMALL = Size(64, 3 * 4 * tiny.VOCABULARY)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def of_tokens(logits, given):
    """Return the log-probs of the response tokens, end to end, of logits [L, V] of each row."""
    pairs = zip(map(log_softmax, logits), given, strict=True)
    return np.concatenate(
        [one[np.arange(row.start - 1, len(row.ids) - 1), row.ids[row.start :]] for one, row in pairs]
    )


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_equals_a_plain_loop(kind, temperature):
    made, given = tiny.model(kind), tiny.rows(temperature=temperature)

    (found,) = score(made, given, size=SMALL)

    want = np.concatenate(tiny.plainly(made, given))
    assert np.abs(want).max() > 3  # the logits say something
    assert np.abs(found.log_probs - want).max() <= 3e-5


def test_adapters_on_body_and_head_are_the_models_own():
    made = tiny.model("qwen3")
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
    adapted, given = get_peft_model(made, config).eval(), tiny.rows()

    (found,) = score(adapted, given, size=SMALL)

    want = np.concatenate(tiny.plainly(adapted, given))
    assert np.abs(found.log_probs - want).max() <= 3e-5
    with adapted.disable_adapter():
        assert np.abs(want - np.concatenate(tiny.plainly(adapted, given))).max() > 0.1


def test_a_body_in_bf16_has_its_head_in_float32():
    made, given = tiny.model("llama").to(torch.bfloat16), tiny.rows()
    kept = {name: weight.clone() for name, weight in made.state_dict().items()}

    (found,) = score(made, given, size=SMALL)

    body = [made.base_model(input_ids=torch.tensor(row.ids)[None]).last_hidden_state[0] for row in given]
    logits = [(states.float() @ made.lm_head.weight.float().T).detach().numpy() for states in body]
    want = of_tokens(logits, given)
    rough = np.concatenate(tiny.plainly(made, given))
    assert np.abs(found.log_probs - want).mean() < 0.3 * np.abs(rough - want).mean()
    assert all(torch.equal(weight, kept[name]) for name, weight in made.state_dict().items())


def test_entropy_and_rank():
    made, given = tiny.model("gemma2"), tiny.rows(temperature=0.8)

    (found,) = score(made, given, size=SMALL, more=True)

    entropies, ranks = [], []
    for row in given:
        logits = made(input_ids=torch.tensor(row.ids)[None]).logits[0, row.start - 1 : -1]
        log_p = log_softmax(logits.detach().double().numpy() / 0.8)
        entropies.append(-(np.exp(log_p) * log_p).sum(-1))
        chosen = log_p[np.arange(row.size), row.ids[row.start :]]
        ranks.append((log_p > chosen[:, None]).sum(-1) + 1)
    assert np.abs(found.entropy - np.concatenate(entropies)).max() < 1e-4
    assert (found.rank == np.concatenate(ranks)).all()


def test_several_heads_share_one_pass_and_do_not_touch_each_other():
    made, given, passes = tiny.model("llama"), tiny.rows(), []
    made.model.layers[0].register_forward_pre_hook(lambda *_: passes.append(1))
    heads = (Head(), Head(0.5), Head(logits=torch.bfloat16), Head())

    first, hot, rounded, last = (
        one.log_probs for one in score(made, given, heads, size=Size(10_000, 1 << 20))
    )

    assert len(passes) == 1
    assert (first == last).all()
    assert np.abs(hot - first).mean() > 0.1
    assert 0 < np.abs(rounded - first).mean() < 0.05


def test_memory_that_runs_out_halves_the_batch_and_then_is_one_error(monkeypatch):
    made, given, real, tried = tiny.model("llama"), tiny.rows(), scoring._of_batch, []

    def scarce(causal, rows, heads, size, more):
        tried.append(len(rows))
        if len(rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(causal, rows, heads, size, more)

    monkeypatch.setattr(scoring, "_of_batch", scarce)
    (found,) = score(made, given, size=Size(10_000, 1 << 20))
    assert np.abs(found.log_probs - np.concatenate(tiny.plainly(made, given))).max() <= 3e-5
    assert max(tried) == 7

    def none(*_):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(scoring, "_of_batch", none)
    with pytest.raises(MemoryShortage, match="not enough memory for one sequence of") as caught:
        score(made, given)
    assert "--max-length" in caught.value.hint


def test_what_is_no_causal_model_is_an_error():
    with pytest.raises(UsageError, match="a Linear is no causal language model"):
        score(torch.nn.Linear(2, 2), tiny.rows(1))


# ---------------------------------------------------------------- an oracle in numpy


def rotated(x, base=10000.0):
    """RoPE of transformers' Llama, [heads, L, D]: halves are rotated."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate((a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)), -1)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def attended(q, k, v, scale):
    """Causal attention, [heads, L, D]."""
    scores = q @ k.transpose(0, 2, 1) * scale
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    return (softmax(scores) @ v).transpose(1, 0, 2).reshape(q.shape[1], -1)


def of_qwen2(w, ids, heads=4, layers=2):
    x = w["model.embed_tokens.weight"][ids]

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[f"{name}.weight"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def split(x):
        return x.reshape(len(ids), heads, -1).transpose(1, 0, 2)

    for i in range(layers):
        at, h = f"model.layers.{i}", norm(x, f"model.layers.{i}.input_layernorm")
        q, k, v = (split(linear(h, f"{at}.self_attn.{one}_proj")) for one in "qkv")
        x = x + linear(attended(rotated(q), rotated(k), v, q.shape[-1] ** -0.5), f"{at}.self_attn.o_proj")
        h = norm(x, f"{at}.post_attention_layernorm")
        gate = linear(h, f"{at}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    return norm(x, "model.norm") @ w["lm_head.weight"].T


def test_it_equals_an_oracle_in_numpy():
    made, given = tiny.model("qwen2"), tiny.rows()
    weights = {name: weight.double().numpy() for name, weight in made.state_dict().items()}

    (found,) = score(made, given, size=SMALL)

    want = of_tokens([of_qwen2(weights, row.ids) for row in given], given)
    assert np.abs(found.log_probs - want).max() <= 3e-5 * max(1, np.abs(want).max() / 10)

"""Scoring by chunks of the head equals a plain loop over the model's own forward, in every architecture."""

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
    assert np.abs(found - want).max() <= 3e-5


def test_adapters_on_body_and_head_are_the_models_own():
    made = tiny.model("qwen3")
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
    adapted, given = get_peft_model(made, config).eval(), tiny.rows()

    (found,) = score(adapted, given, size=SMALL)

    want = np.concatenate(tiny.plainly(adapted, given))
    assert np.abs(found - want).max() <= 3e-5
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
    assert np.abs(found - want).mean() < 0.3 * np.abs(rough - want).mean()
    assert all(torch.equal(weight, kept[name]) for name, weight in made.state_dict().items())


def test_several_heads_share_one_pass_and_do_not_touch_each_other():
    made, given, passes = tiny.model("llama"), tiny.rows(), []
    made.model.layers[0].register_forward_pre_hook(lambda *_: passes.append(1))
    heads = (Head(), Head(0.5), Head(logits=torch.bfloat16), Head())

    first, hot, rounded, last = (one for one in score(made, given, heads, size=Size(10_000, 1 << 20)))

    assert len(passes) == 1
    assert (first == last).all()
    assert np.abs(hot - first).mean() > 0.1
    assert 0 < np.abs(rounded - first).mean() < 0.05


def test_memory_that_runs_out_halves_the_batch_and_then_is_one_error(monkeypatch):
    made, given, real, tried = tiny.model("llama"), tiny.rows(), scoring._of_batch, []

    def scarce(causal, rows, heads, size):
        tried.append(len(rows))
        if len(rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(causal, rows, heads, size)

    monkeypatch.setattr(scoring, "_of_batch", scarce)
    (found,) = score(made, given, size=Size(10_000, 1 << 20))
    assert np.abs(found - np.concatenate(tiny.plainly(made, given))).max() <= 3e-5
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

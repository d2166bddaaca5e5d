"""The code blocks of docs/trainers/ are run on objects of each trainer's shape, and the dump analysed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import offpol_diag

PAGES = Path(__file__).parents[1] / "docs" / "trainers"
S, P, R = 48, 5, 24
"""Sequences, and tokens at most of a prompt and of a response."""
SAMPLING = SimpleNamespace(name="vllm", temperature=0.8, top_p=1.0)


def block(page: str) -> str:
    (code,) = re.findall(
        r"```python\n(.+?)```", (PAGES / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL
    )
    return str(code)


class Batch:
    """An honest mismatch: `lengths` [S]; `rollout`, `old`, `advantages` and `ids` [S, R], 0 after the end."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(3)
        self.lengths = torch.randint(3, R + 1, (S,), generator=random)
        self.mask = torch.arange(R) < self.lengths[:, None]
        self.rollout = -torch.rand((S, R), generator=random) * 3 * self.mask
        noise = 0.02 * torch.randn((S, R), generator=random)
        self.old = (self.rollout + noise).clamp(max=-1e-4) * self.mask
        self.advantages = torch.randn((S, 1), generator=random) * self.mask
        self.ids = torch.randint(2, 90, (S, R), generator=random)
        self.groups = [f"prompt {i // 4}" for i in range(S)]

    def whole(self, values: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """Put responses behind a prompt that holds `fill`, [S, P + R]."""
        return torch.cat([torch.full((S, P), fill, dtype=values.dtype), values], dim=1)

    def right(self, values: torch.Tensor) -> torch.Tensor:
        """Align responses on the right, [S, R]."""
        return torch.stack([row.roll(R - int(n)) for row, n in zip(values, self.lengths, strict=True)])

    def ragged(self, values: torch.Tensor) -> list[torch.Tensor]:
        return [row[:n] for row, n in zip(values, self.lengths, strict=True)]


def verl(b: Batch) -> list[tuple[Any, ...]]:
    tensors = {"rollout_log_probs": b.rollout, "old_log_probs": b.old, "response_mask": b.mask.long()}
    tensors["token_level_scores"] = b.advantages
    return [(SimpleNamespace(batch=tensors, non_tensor_batch={"uid": b.groups}), 7, SAMPLING)]


def slime(b: Batch) -> list[tuple[Any, ...]]:
    columns = {"rollout_log_probs": b.rollout, "log_probs": b.old, "advantages": b.advantages}
    data: dict[str, Any] = {name: b.ragged(values) for name, values in columns.items()}
    data |= {"loss_masks": b.ragged(b.mask.int()), "rewards": b.advantages[:, 0].tolist()}
    args = SimpleNamespace(rollout_temperature=0.8, rollout_top_p=1.0)
    return [(data, 7, 3, args)]


def openrlhf(b: Batch) -> list[tuple[Any, ...]]:
    def frame(values: torch.Tensor) -> torch.Tensor:
        return b.whole(values)[:, 1:]

    half = S // 2
    experiences = [
        SimpleNamespace(
            action_mask=frame(b.mask)[at],
            rollout_log_probs=frame(b.rollout)[at],
            action_log_probs=b.whole(b.old, -1.5)[at, 1:],
            advantages=frame(b.advantages)[at],
            prompts=b.groups[at],
        )
        for at in (slice(0, half), slice(half, S))
    ]
    return [(experiences, 7, SimpleNamespace(rollout=SAMPLING))]


def nemo_rl(b: Batch) -> list[tuple[Any, ...]]:
    data = {
        "token_mask": b.whole(b.mask.long()),
        "sample_mask": torch.ones(S),
        "generation_logprobs": b.whole(b.rollout),
        "prev_logprobs": b.whole(b.old, -1.5),
        "advantages": b.whole(b.advantages),
        "input_ids": b.whole(b.ids, 1),
    }
    return [(data, 7, {"temperature": 0.8, "top_p": 1.0})]


def areal(b: Batch) -> list[tuple[Any, ...]]:
    """Make batches after compute_advantages: values belong to the next token; the last column is empty."""
    names = {
        "loss_mask": b.mask.float(),
        "logprobs": b.rollout,
        "prox_logp": b.old,
        "advantages": b.advantages,
    }
    rolled = {name: b.whole(values).roll(-1, dims=1) for name, values in names.items()}
    one = [{name: values[i : i + 1] for name, values in rolled.items()} for i in range(S)]
    return [(one, 7, 3, SAMPLING)]


def skyrl(b: Batch) -> list[tuple[Any, ...]]:
    names = {"loss_mask": b.mask.float(), "rollout_logprobs": b.rollout, "action_log_probs": b.old}
    data = {name: b.right(values) for name, values in (names | {"advantages": b.advantages}).items()}
    return [(data, 7, SAMPLING)]


def prime_rl(b: Batch) -> list[tuple[Any, ...]]:
    names = {"inference_logprobs": b.rollout, "trainer_logprobs": b.old, "advantages": b.advantages}
    names |= {"entropy": -b.old, "token_ids": b.ids, "loss_mask": b.mask}
    records = [
        {name: b.whole(values)[i, : P + n].tolist() for name, values in names.items()} | {"env_name": "math"}
        for i, n in enumerate(b.lengths)
    ]
    return [(records, 7, 3)]


OBJECTS: dict[str, Callable[[Batch], list[tuple[Any, ...]]]] = {
    "verl": verl,
    "slime": slime,
    "openrlhf": openrlhf,
    "nemo-rl": nemo_rl,
    "areal": areal,
    "skyrl": skyrl,
    "prime-rl": prime_rl,
}


@pytest.mark.parametrize("page", sorted(path.stem for path in PAGES.glob("*.md")))
def test_a_recipe_is_short(page: str) -> None:
    lines = [line for line in block(page).splitlines() if line.strip()]
    words = (PAGES / f"{page}.md").read_text(encoding="utf-8").split()

    assert len([line for line in lines if not line.startswith("from ")]) <= 10
    assert len(words) < 500
    assert page == "trl" or page in OBJECTS


def check(b: Batch, folder: Path) -> None:
    """Check that a folder holds the batch, and that its mismatch is no bug."""
    table = pq.read_table(folder)
    masks = table["response_mask"].to_pylist()
    for name, values in (
        ("rollout_log_probs", b.rollout),
        ("old_log_probs", b.old),
        ("advantages", b.advantages),
    ):
        if name == "advantages" and name not in table.column_names:
            continue
        for given, kept, row in zip(b.ragged(values), masks, table[name].to_pylist(), strict=True):
            counted = [value for value, counts in zip(row, kept, strict=True) if counts]
            assert row[: len(counted)] == counted, f"{name} begins with the response"
            assert counted == given.tolist(), name
    report = offpol_diag.analyze(folder, presets="token_is", progress=False)
    assert report.diagnosis.verdict != "bug", report.diagnosis.headline
    assert report.metrics["k3"].value == pytest.approx(2e-4, rel=0.3)


@pytest.mark.parametrize("page", OBJECTS)
def test_a_recipe_writes_the_batch(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dumps").mkdir()
    names: dict[str, Any] = {}
    exec(compile(block(page), f"{page}.md", "exec"), names)
    b = Batch()
    for given in OBJECTS[page](b):
        names["dump_batch"](*given)

    check(b, tmp_path / "dumps")


def test_the_recipe_for_verl_takes_its_own_dataproto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "pip install --no-deps verl==0.9.1 tensordict pyvers omegaconf antlr4-python3-runtime==4.9.3"
    proto = pytest.importorskip("verl", reason=reason, exc_type=ImportError).DataProto
    import numpy as np

    monkeypatch.chdir(tmp_path)
    Path("dumps").mkdir()
    names: dict[str, Any] = {}
    exec(compile(block("verl"), "verl.md", "exec"), names)
    b = Batch()
    ((shaped, *others),) = verl(b)
    uid = np.array(b.groups, dtype=object)
    names["dump_batch"](proto.from_dict(tensors=shaped.batch, non_tensors={"uid": uid}), *others)

    check(b, tmp_path / "dumps")


@pytest.mark.filterwarnings("ignore")  # of trl, transformers and datasets
def test_the_recipe_for_trl_runs_in_its_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy of two thousand weights is trained; in vLLM's place it is its own engine, in bfloat16."""
    trl = pytest.importorskip("trl", reason="pip install -c constraints.txt trl", exc_type=ImportError)
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("dumps").mkdir()
    names: dict[str, Any] = {}
    exec(compile(block("trl"), "trl.md", "exec"), names)

    seen: list[dict[str, Any]] = []

    class Trainer(names["DumpingTrainer"]):  # type: ignore[misc]
        def _generate(self, *args: Any, **options: Any) -> Any:
            prompts, completions, tools, text, none, *others = super()._generate(*args, **options)
            assert none is None  # the log-probs, which only vLLM returns
            with torch.no_grad():
                sampled = [self.score(p, c) for p, c in zip(prompts, completions, strict=True)]
            return prompts, completions, tools, text, sampled, *others

        def score(self, prompt: list[int], completion: list[int]) -> list[float]:
            logits = self.model.bfloat16()(torch.tensor([prompt + completion])).logits.float()
            self.model.float()
            steps = logits[0, len(prompt) - 1 : -1].div(self.temperature).log_softmax(-1)
            return [float(row[token]) for row, token in zip(steps, completion, strict=True)]

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            seen.append(super()._generate_and_score_completions(inputs))
            return seen[-1]

    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *"abcdefghijklmnop"])}
    splitter = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    splitter.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=splitter, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    shape = {"vocab_size": len(words), "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=1, pad_token_id=0))
    config = trl.GRPOConfig(
        output_dir="out",
        per_device_train_batch_size=16,
        gradient_accumulation_steps=1,
        steps_per_generation=2,  # so that TRL computes the old log-probs
        num_generations=4,
        max_completion_length=24,
        max_steps=2,
        temperature=0.9,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
    )
    data = Dataset.from_list([{"prompt": word} for word in "abcdefghijklmnop"])
    trainer = Trainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
    )
    trainer.train()

    table = pq.read_table(tmp_path / "dumps")
    assert table.num_rows == sum(len(out["completion_ids"]) for out in seen) >= 32
    for name, theirs in (
        ("rollout_log_probs", "sampling_per_token_logps"),
        ("old_log_probs", "old_per_token_logps"),
    ):
        given = [
            [float(v) for v in row[: int(mask.sum())]]
            for out in seen
            for row, mask in zip(out[theirs], out["completion_mask"], strict=True)
        ]
        assert table[name].to_pylist() == given
    report = offpol_diag.analyze("dumps", presets="token_is", progress=False)
    assert report.diagnosis.verdict != "bug", report.diagnosis.headline
    assert 0 < report.metrics["k3"].value < 1e-2

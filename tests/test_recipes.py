"""The code blocks of docs/trainers/ are run on objects of each trainer's shape, and the dump analysed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest
import torch

import offpol_diag
from offpol_diag.presets.catalogue import load
from offpol_diag.trainers.translate import config_for

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
        self.lags = [i // 4 % 3 for i in range(S)]
        """One lag per prompt: the form of trainers that record it per prompt."""
        self.prompts = torch.tensor([[2 + i // 4] for i in range(S)]).expand(S, P)

    def whole(self, values: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """Put responses behind a prompt that holds `fill`, [S, P + R]."""
        return torch.cat([torch.full((S, P), fill, dtype=values.dtype), values], dim=1)

    def right(self, values: torch.Tensor) -> torch.Tensor:
        """Align responses on the right, [S, R]."""
        return torch.stack([row.roll(R - int(n)) for row, n in zip(values, self.lengths, strict=True)])

    def ids_of_all(self) -> torch.Tensor:
        """Return the tokens of prompts and responses, [S, P + R]."""
        return torch.cat([self.prompts, self.ids], dim=1)

    def ragged(self, values: torch.Tensor) -> list[torch.Tensor]:
        return [row[:n] for row, n in zip(values, self.lengths, strict=True)]


def verl(b: Batch) -> list[tuple[Any, ...]]:
    tensors = {"rollout_log_probs": b.rollout, "old_log_probs": b.old, "response_mask": b.mask.long()}
    tensors |= {"token_level_scores": b.advantages, "responses": b.ids, "prompts": b.prompts}
    tensors["attention_mask"] = b.whole(b.mask.long(), 1)
    versions = [
        None if lag == 0 else 7 - 1 - lag for lag in b.lags
    ]  # None: of the trainer that waits for each sync
    return [(SimpleNamespace(batch=tensors, non_tensor_batch={"uid": b.groups}), 7, SAMPLING, versions)]


def slime(b: Batch) -> list[tuple[Any, ...]]:
    columns = {"rollout_log_probs": b.rollout, "log_probs": b.old, "advantages": b.advantages}
    data: dict[str, Any] = {name: b.ragged(values) for name, values in columns.items()}
    data |= {"loss_masks": b.ragged(b.mask.int()), "rewards": b.advantages[:, 0].tolist()}
    data |= {"response_lengths": b.lengths.tolist(), "total_lengths": (b.lengths + P).tolist()}
    data["sample_indices"] = [100 * 4 + i for i in range(S)]
    data["tokens"] = [row[: P + n] for row, n in zip(b.ids_of_all(), b.lengths.tolist(), strict=True)]
    args = SimpleNamespace(rollout_temperature=0.8, rollout_top_p=1.0, n_samples_per_prompt=4)
    return [(data, 7, 3, args, b.lags)]


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
            sequences=b.ids_of_all()[at],
            attention_mask=b.whole(b.mask.long(), 1)[at],
            prompts=b.groups[at],
        )
        for at in (slice(0, half), slice(half, S))
    ]
    args = SimpleNamespace(rollout=SAMPLING, train=SimpleNamespace(async_enable=True))
    b.lags = [2] * S
    return [(experiences, 7, args, 2)]


def nemo_rl(b: Batch) -> list[tuple[Any, ...]]:
    data = {
        "token_mask": b.whole(b.mask.long()),
        "sample_mask": torch.ones(S),
        "generation_logprobs": b.whole(b.rollout),
        "prev_logprobs": b.whole(b.old, -1.5),
        "advantages": b.whole(b.advantages),
        "input_ids": b.ids_of_all(),
    }
    return [(data, 7, {"temperature": 0.8, "top_p": 1.0}, b.lags)]


def areal(b: Batch) -> list[tuple[Any, ...]]:
    """Make groups after compute_advantages: values belong to the next token; the last column is empty.

    Versions are not rolled: they belong to their own token. The end of a response may be of newer weights.
    """
    names = {
        "loss_mask": b.mask.float(),
        "logprobs": b.rollout,
        "prox_logp": b.old,
        "advantages": b.advantages,
    }
    rolled = {name: b.whole(values).roll(-1, dims=1) for name, values in names.items()}
    versions = b.whole((7 - torch.tensor(b.lags))[:, None].expand(S, R).clone(), -1)
    versions[:, P + 2 :] += 1
    versions *= b.whole(b.mask, True)
    rolled["versions"] = versions
    rolled["input_ids"] = b.ids_of_all()
    groups = [{name: values[i : i + 4] for name, values in rolled.items()} for i in range(0, S, 4)]
    return [(groups, 7, 3, SAMPLING)]


def skyrl(b: Batch) -> list[tuple[Any, ...]]:
    names = {"loss_mask": b.mask.float(), "rollout_logprobs": b.rollout, "action_log_probs": b.old}
    given = {name: b.right(values) for name, values in (names | {"advantages": b.advantages}).items()}
    padding = {name: torch.cat([values, torch.zeros((2, R))]) for name, values in given.items()}
    whole = {"sequences": b.ids_of_all(), "attention_mask": b.whole(b.mask.long(), 1)}
    for name, values in whole.items():
        rows = [row.roll(R - int(n)) for row, n in zip(values, b.lengths, strict=True)]
        padding[name] = torch.cat([torch.stack(rows), torch.zeros((2, P + R), dtype=values.dtype)])

    class TrainingInputBatch(dict[str, Any]):
        metadata: ClassVar = {"policy_prompt_boundaries": [(i, i + 4) for i in range(0, S, 4)]}

    return [(TrainingInputBatch(padding), 7, SAMPLING, b.lags[::4])]


def prime_rl(b: Batch) -> list[tuple[Any, ...]]:
    names = {"inference_logprobs": b.rollout, "trainer_logprobs": b.old, "advantages": b.advantages}
    whole = {
        name: b.whole(values) for name, values in (names | {"entropy": -b.old, "loss_mask": b.mask}).items()
    }
    whole["token_ids"] = b.ids_of_all()
    records = [
        {name: values[i, : P + n].tolist() for name, values in whole.items()} | {"env_name": "math"}
        for i, n in enumerate(b.lengths)
    ]
    b.lags = [1] * S
    return [(records, 7, 3, 1)]


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

    assert len([line for line in lines if not line.startswith("from ")]) <= 12
    assert len(words) < 520
    assert page == "trl" or page in OBJECTS


def same_groups(ours: list[Any], theirs: list[Any]) -> bool:
    """Return whether two lists of names put the same rows together."""
    pairs = set(zip(ours, theirs, strict=True))
    return None not in ours and len(pairs) == len(set(ours)) == len(set(theirs))


def check(b: Batch, folder: Path) -> None:
    """Check that a folder holds the batch, with step, lags and prompts, and that its mismatch is no bug."""
    table = pq.read_table(folder)
    assert table["policy_lag"].to_pylist() == b.lags
    assert set(table["step"].to_pylist()) == {7}
    assert same_groups(table["group_id"].to_pylist(), b.groups)
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
    assert set(table["prompt_length"].to_pylist()) == {P}
    for n, ids, row in zip(b.lengths.tolist(), b.ids.tolist(), table["token_ids"].to_pylist(), strict=True):
        assert row[:n] == ids[:n]
    report = offpol_diag.analyze(folder, presets="token_is", progress=False)
    assert report.diagnosis.verdict != "bug", report.diagnosis.headline
    assert report.number("k3").value == pytest.approx(2e-4, rel=0.3)


def test_the_configuration_that_leaves_no_log_probs_to_dump_says_so() -> None:
    said = {name: config_for(load()[name], "trl").text() for name in ("recompute", "token_is")}
    assert "computes no old log-probs to dump: docs/trainers/trl.md" in said["recompute"]
    assert "to dump" not in said["token_is"]
    assert "## Without a correction" in (PAGES / "trl.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", OBJECTS)
def test_a_recipe_writes_the_batch(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(block(page), f"{page}.md", "exec"), names)
    b = Batch()
    for given in OBJECTS[page](b):
        names["dump_batch"](*given)

    check(b, tmp_path / "dumps")


def test_the_recipe_for_areal_writes_the_versions_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(block("areal"), "areal.md", "exec"), names)
    b = Batch()
    names["dump_batch"](*areal(b)[0])

    table = pq.read_table("dumps")
    for row, n, lag in zip(table["weight_versions"].to_pylist(), b.lengths.tolist(), b.lags, strict=True):
        assert row[:n] == [7 - lag] * 2 + [8 - lag] * (n - 2), "weights changed after two tokens"


def test_the_recipe_for_openrlhf_knows_the_lag_only_where_nothing_is_asynchronous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(block("openrlhf"), "openrlhf.md", "exec"), names)
    ((experiences, _, args, _),) = openrlhf(Batch())

    names["dump_batch"](experiences, 1, args)
    args.train.async_enable = False
    names["dump_batch"](experiences, 2, args)

    assert "policy_lag" not in pq.read_schema("dumps/step_000001-rank00000-0.parquet").names
    assert set(pq.read_table("dumps/step_000002-rank00000-0.parquet")["policy_lag"].to_pylist()) == {0}


def test_the_recipe_for_verl_takes_its_own_dataproto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "pip install --no-deps verl==0.9.1 tensordict pyvers omegaconf antlr4-python3-runtime==4.9.3"
    proto = pytest.importorskip("verl", reason=reason, exc_type=ImportError).DataProto
    import numpy as np

    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(block("verl"), "verl.md", "exec"), names)
    b = Batch()
    ((shaped, *others),) = verl(b)
    uid = np.array(b.groups, dtype=object)
    names["dump_batch"](proto.from_dict(tensors=shaped.batch, non_tensors={"uid": uid}), *others)

    check(b, tmp_path / "dumps")


TRL = "pip install -c constraints.txt trl"
ALIGNED = {"gradient_accumulation_steps": 2, "steps_per_generation": 2}
"""One update per generation: TRL then needs no old log-probs, and computes them for a correction only."""


class Run:
    """A policy of two thousand weights, trained by TRL with the block of its page.

    In vLLM's place it is its own engine, in bfloat16; it gets new weights once per `sync_every` steps.
    """

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, sync_every: int = 1, **options: Any
    ) -> None:
        trl = pytest.importorskip("trl", reason=TRL, exc_type=ImportError)
        from datasets import Dataset
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

        monkeypatch.chdir(folder)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        names: dict[str, Any] = {}
        exec(compile(block("trl"), "trl.md", "exec"), names)
        self.seen: list[dict[str, Any]] = []
        seen = self.seen

        class Trainer(names["DumpingTrainer"]):  # type: ignore[misc]
            _last_loaded_step = -1

            def _generate(self, *args: Any, **options: Any) -> Any:
                self.use_vllm = False
                prompts, completions, tools, text, none, *others = super()._generate(*args, **options)
                self.use_vllm = True
                assert none is None  # the log-probs, which only vLLM returns
                if (
                    self._last_loaded_step < 0
                    or self.state.global_step >= self._last_loaded_step + sync_every
                ):
                    self._last_loaded_step = self.state.global_step
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
                seen[-1]["prompts"] = [row["prompt"] for row in inputs]
                return {name: value for name, value in seen[-1].items() if name != "prompts"}

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
            **{"gradient_accumulation_steps": 1, "steps_per_generation": 2} | options,
            num_generations=4,
            max_completion_length=24,
            max_steps=3,
            logging_steps=1,
            temperature=0.9,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
        )
        data = Dataset.from_list([{"prompt": word} for word in "abcdefghijklmnop"])
        self.trainer = Trainer(
            model=model,
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            args=config,
            train_dataset=data,
            processing_class=tokenizer,
        )
        self.trainer.train()


@pytest.mark.filterwarnings("ignore")  # of trl, transformers and datasets
def test_the_recipe_for_trl_runs_in_its_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, sync_every=5)

    table = pq.read_table(tmp_path / "dumps")
    assert table.num_rows == sum(len(out["completion_ids"]) for out in run.seen) >= 32
    for name, theirs in (
        ("rollout_log_probs", "sampling_per_token_logps"),
        ("old_log_probs", "old_per_token_logps"),
    ):
        given = [
            [float(v) for v in row[: int(mask.sum())]]
            for out in run.seen
            for row, mask in zip(out[theirs], out["completion_mask"], strict=True)
        ]
        assert table[name].to_pylist() == given
    assert same_groups(
        table["group_id"].to_pylist(), [prompt for out in run.seen for prompt in out["prompts"]]
    )
    lags = dict(zip(table["step"].to_pylist(), table["policy_lag"].to_pylist(), strict=True))
    assert lags == {1: 0, 3: 2}, "the engine has the first weights still"
    Path("logged.jsonl").write_text(
        "\n".join(map(json.dumps, run.trainer.state.log_history)), encoding="utf-8"
    )
    checked = offpol_diag.check("dumps", logged="logged.jsonl")
    assert not checked.different, "the steps are those that TRL logs"
    assert checked.steps == [1, 3]
    assert len(checked.rows) == 5
    report = offpol_diag.analyze("dumps", presets="token_is", progress=False)
    assert report.diagnosis.verdict != "bug", report.diagnosis.headline
    assert 0 < report.number("k3").value < 1e-2


@pytest.mark.filterwarnings("ignore")
def test_a_run_of_trl_without_a_correction_goes_on_without_a_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, vllm_importance_sampling_correction=False, num_iterations=1, **ALIGNED)

    assert run.trainer.state.global_step == 3
    assert "old_per_token_logps" not in run.seen[0], "which is what the page says"
    assert not Path("dumps").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_run_of_trl_with_every_weight_bound_by_1_is_dumped_and_not_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (PAGES / "trl.md").read_text(encoding="utf-8").partition("## Without a correction")[2]
    settings = dict(re.findall(r"`(vllm_importance_sampling_\w+)=([^`]+)`", text.partition("##")[0])[1:])
    assert len(settings) == 3
    run = Run(tmp_path, monkeypatch, **{name: eval(value) for name, value in settings.items()}, **ALIGNED)

    weights = torch.cat([out["importance_sampling_ratio"].flatten() for out in run.seen])
    assert torch.allclose(weights, torch.ones(()), atol=1e-5)
    table = pq.read_table("dumps")
    assert table.num_rows == sum(len(out["completion_ids"]) for out in run.seen)
    assert table["old_log_probs"] != table["rollout_log_probs"]
    assert set(table["policy_lag"].to_pylist()) == {0}

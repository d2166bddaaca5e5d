"""The forms, one row each, in the order in which they are tried: trainers' own first, guesses last."""

from __future__ import annotations

from collections.abc import Callable

from offpol_diag.forms import batches, generic, long, slime, trainers
from offpol_diag.forms.files import Head
from offpol_diag.forms.form import Form, having
from offpol_diag.readers.columns import CURRENT, OLD, ROLES, ROLLOUT

ROLLOUT_NAMES, TRAIN_NAMES = (
    frozenset(name for role in ROLES if role.name in roles for name in role.names)
    for roles in ((ROLLOUT,), (OLD, CURRENT))
)


def _guess(kind: str) -> Callable[[Head], bool]:
    """Return a test for files of a kind in which some column has a name that log-probs have."""
    names = ROLLOUT_NAMES | TRAIN_NAMES
    return lambda head: head.kind == kind and not names.isdisjoint(head.fields)


FORMS: tuple[Form, ...] = (
    Form(
        "nemo-rl",
        "NeMo-RL",
        "train_data_step*.jsonl",
        "rollout and old log-probs, mask, advantages, rewards, tokens (up to 0.5: log-probs and rewards)",
        having("jsonl", "generation_logprobs", "prev_logprobs", "input_lengths"),
        trainers.nemo_rl,
        "sequence",
        source="NVIDIA-NeMo/RL 7ea279abf nemo_rl/utils/logger.py:1071-1098, "
        "nemo_rl/algorithms/grpo.py:3632-3653",
    ),
    Form(
        "prime-rl",
        "prime-rl",
        "token_exports/step_*/rank_*.jsonl",
        "rollout log-probs, the trainer's as old and current, mask, advantages, entropy, tokens",
        having("jsonl", "inference_logprobs", "trainer_logprobs", "loss_mask"),
        trainers.prime_rl,
        "sequence",
        choose=trainers.stable,
        source="PrimeIntellect-ai/prime-rl 004274ec9 src/prime_rl/trainer/rl/token_export.py",
    ),
    Form(
        "slime",
        "slime",
        "train_data/*.pt (since 2026-08-12)",
        "rollout and old log-probs, mask, advantages, rewards, tokens; groups of the rollout dump beside it",
        having("torch", "format_version", "rollout_id", "samples"),
        slime.slime,
        source="THUDM/slime 624b824a8 slime/observability/train_data_utils.py (_build_dump_payload)",
    ),
    Form(
        "ranks",
        "slime up to 0.3.1, miles",
        "train_data/*_*.pt, a file per rank",
        "rollout and old log-probs, mask, advantages, rewards, tokens; groups of the rollout dump beside it",
        having("torch", "rollout_id", "rank", "rollout_data"),
        slime.ranks,
        source="THUDM/slime v0.3.1 slime/utils/train_dump_utils.py, radixark/miles 31f1ca961 "
        "miles/utils/train_dump_utils.py, miles/dashboard/dump_reader.py:113-290, "
        "miles/backends/training_utils/cp_utils.py:19-67",
    ),
    Form(
        "policy-loss",
        "miles",
        "policy_loss_debug/rank_*_call_*.pt",
        "rollout, old and current log-probs, mask, advantages of each call of the loss; no ids",
        having("torch", "rank", "call", "samples"),
        slime.policy_loss,
        source="radixark/miles 31f1ca961 miles/backends/training_utils/debug_dump.py",
    ),
    Form(
        "skyrl",
        "SkyRL",
        "dumped_data/global_step_*_training_input.pkl",
        "rollout and old log-probs, mask, advantages, tokens, groups",
        having("pickle", "_rebuild_tensor_batch"),
        batches.skyrl,
        "padded",
        source="NovaSky-AI/SkyRL a9564572e skyrl/backends/skyrl_train/training_batch.py:17-300, "
        "skyrl/train/trainer.py:1236-1242",
    ),
    Form(
        "tokens",
        "",
        "*.parquet",
        "a row per token, with the id of its sequence",
        lambda head: head.long,
        long.rows,
    ),
    Form(
        "jsonl",
        "",
        "*.jsonl, *.jsonl.gz",
        "one object per sequence, a list per token column",
        _guess("jsonl"),
        generic.jsonl,
    ),
    Form(
        "parquet", "", "*.parquet", "a row per sequence, lists per token", _guess("parquet"), generic.tables
    ),
)
"""To add a form, add a row; `Form` says what its fields are."""


def _lacking(kind: str, *fields: str) -> Callable[[Head], bool]:
    """Return a test for files of a kind with some fields and without the log-probs of both policies."""
    fits = having(kind, *fields)
    sides = ROLLOUT_NAMES, TRAIN_NAMES
    return lambda head: fits(head) and any(names.isdisjoint(head.fields) for names in sides)


ONE_POLICY: tuple[tuple[str, Callable[[Head], bool]], ...] = (
    ("verl", _lacking("jsonl", "input", "output", "score")),
    ("verl", _lacking("pickle", "DataProto")),
    ("verl", _lacking("torch", "tensordict", "keys")),
    ("TRL", _lacking("parquet", "step", "prompt", "completion")),
    ("ms-swift", _lacking("jsonl", "prompt", "completion")),
    ("slime", _lacking("torch", "rollout_id", "samples", "response_length")),
    ("miles", _lacking("parquet", "sample_index", "response_length", "tokens")),
)
"""Trainer → its own files with the log-probs of one policy, or of none."""
HOOKS = {"verl": "verl", "TRL": "trl", "ms-swift": "trl", "NeMo-RL": "nemo-rl", "prime-rl": "prime-rl"}
HOOKS |= {"SkyRL": "skyrl"} | dict.fromkeys(("slime", "miles", "slime up to 0.3.1, miles"), "slime")
"""Trainer of a file → page with the hook that writes the log-probs of both policies."""

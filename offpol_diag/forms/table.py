"""The forms, one row each, in the order in which they are tried: trainers' own first, guesses last."""

from __future__ import annotations

from offpol_diag.forms import batches, generic, long, slime, trainers
from offpol_diag.forms.files import Head
from offpol_diag.forms.form import Alignment, Form, Read, having
from offpol_diag.readers.columns import CURRENT, OLD, ROLES, ROLLOUT

WRITTEN = (
    *(".jsonl", ".jsonl.gz", ".parquet", ".arrow", ".feather", ".ipc"),
    *(".npz", ".pt", ".pth", ".pkl", ".pickle", ".dp"),
)
"""Endings of files that are looked at in a directory."""
LOG_PROBS = frozenset(name for role in ROLES if role.name in (ROLLOUT, OLD, CURRENT) for name in role.names)


def _guess(name: str, files: str, holds: str, read: Read, kind: str = "", padded: bool = False) -> Form:
    """Return the form of files of a kind (its name) in which some column has a name that log-probs have."""

    def detect(head: Head) -> bool:
        return head.kind == (kind or name) and not LOG_PROBS.isdisjoint(head.fields)

    return Form(name, "", files, holds, detect, read, Alignment(padding="right" if padded else "none"), True)


WHOLE = Alignment("full", padding="right")
_ROWS = "a row per sequence, lists per token"

FORMS: tuple[Form, ...] = (
    Form(
        "nemo-rl",
        "NeMo-RL",
        "train_data_step*.jsonl",
        "rollout and old log-probs, mask, advantages, rewards, tokens (up to 0.5: log-probs and rewards)",
        having("jsonl", "generation_logprobs", "prev_logprobs", "input_lengths"),
        trainers.nemo_rl,
        WHOLE,
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
        Alignment("full"),
        choose=trainers.stable,
        source="PrimeIntellect-ai/prime-rl 004274ec9 src/prime_rl/trainer/rl/token_export.py",
    ),
    Form(
        "roll",
        "ROLL",
        "data_*.jsonl (save_logging_board_dir)",
        "old log-probs, mask, entropy, rewards; the rollout's come by --join",
        having("jsonl", "logprobs", "log_probs2", "new_response_mask"),
        trainers.roll,
        Alignment(padding="right"),
        source="alibaba/ROLL 8eb27cc2 roll/pipeline/rlvr/rlvr_pipeline.py:378-447",
    ),
    Form(
        "open-instruct",
        "open-instruct",
        "*_rollouts_*.jsonl",
        "rollout log-probs, tokens, advantages, rewards; the trainer's come by --join",
        having("jsonl", "sample_idx", "prompt_idx", "prompt_tokens", "response_tokens"),
        trainers.open_instruct,
        source="allenai/open-instruct 00feb3a56 open_instruct/rl_utils.py (RolloutRecord, _save_rollouts)",
    ),
    Form(
        "verl",
        "verl",
        "rollout_data_dir/*.jsonl",
        "text and score; all log-probs come by --join",
        having("jsonl", "input", "output", "score", "step"),
        trainers.verl,
        source="verl-project/verl 1dda039b verl/trainer/ppo/ray_trainer.py:453-546",
    ),
    Form(
        "trl",
        "TRL",
        "completions/completions_*.parquet",
        "text, advantage, and log-probs in columns that a hook adds, or by --join",
        having("parquet", "step", "prompt", "completion"),
        trainers.trl,
        choose=trainers.unrepeated,
        source="huggingface/trl f2cd5771 trl/trainer/grpo_trainer.py:3293-3327",
    ),
    Form(
        "ms-swift",
        "ms-swift",
        "completions.jsonl",
        "text, advantages, and log-probs in fields that a hook adds, or by --join",
        trainers.is_swift,
        trainers.ms_swift,
        source="modelscope/ms-swift 3602360a swift/rlhf_trainers/grpo_trainer.py:1873-1897",
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
        "miles-columns",
        "miles",
        "dashboard_columns/rollout_*.parquet",
        "rollout log-probs, mask, tokens; the trainer's come by --join train_data:old_log_probs",
        having("parquet", "sample_index", "response_length", "tokens", named=r"^rollout_\d+\.parquet$"),
        slime.miles_columns,
        source="radixark/miles 31f1ca961 miles/ray/rollout/debug_data.py:36-72",
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
        Alignment(padding="left"),
        source="NovaSky-AI/SkyRL a9564572e skyrl/backends/skyrl_train/training_batch.py:17-300, "
        "skyrl/train/trainer.py:1236-1242",
    ),
    Form(
        "verl-batch",
        "verl",
        "gen_batch.dp (skip cache), DataProto.save_to_disk",
        "rollout log-probs, mask, tokens, groups, and old ones where the batch has them, or by --join",
        having("pickle", "DataProto"),
        batches.verl,
        Alignment(padding="right"),
        source="verl-project/verl 1dda039b9 verl/protocol.py:384-440, verl/utils/skip/rollout_skip.py:85-103",
    ),
    Form(
        "verl-queue",
        "verl",
        "tq_batch.pt (skip cache of V1)",
        "rollout log-probs, mask, tokens, groups; the trainer's come by --join",
        having("torch", "tensordict", "keys"),
        batches.verl_queue,
        Alignment(padding="right"),
        source="verl-project/verl 1dda039b9 verl/utils/skip/rollout_skip.py:136-173 of its part on V1",
    ),
    Form(
        "slime-rollout",
        "slime, miles",
        "rollout_data/*.pt",
        "rollout log-probs, mask, rewards, groups, tokens; the trainer's come by --join",
        having("torch", "rollout_id", "samples", "response_length"),
        slime.slime_rollout,
        source="THUDM/slime 624b824a8 slime/observability/rollout_data_utils.py:140-153, "
        "radixark/miles 31f1ca961 miles/ray/rollout/debug_data.py:98-115",
    ),
    Form(
        "tokens",
        "",
        "*.parquet",
        "a row per token, with the id of its sequence",
        lambda head: head.long,
        long.rows,
        guess=True,
    ),
    _guess("jsonl", "*.jsonl, *.jsonl.gz", "one object per sequence, a list per token column", generic.jsonl),
    _guess("arrow", "*.arrow, *.feather, *.ipc", f"Arrow IPC file or stream: {_ROWS}", generic.tables),
    _guess(
        "npz",
        "*.npz",
        "padded arrays [S, L] with a mask, or flat ones with cu_seqlens",
        generic.npz,
        padded=True,
    ),
    _guess(
        "pt",
        "*.pt, *.pth (torch.save)",
        "padded tensors [S, L] with a mask, flat ones with cu_seqlens, or a list with a dict per sequence",
        generic.pickled,
        "torch",
        padded=True,
    ),
    _guess(
        "pickle",
        "*.pkl, *.pickle",
        "the same as a pickle of NumPy arrays and lists; other classes are refused",
        generic.pickled,
        padded=True,
    ),
    _guess("parquet", "*.parquet", f"{_ROWS}; for --join and --align", generic.tables),
)
"""To add a form, add a row; `Form` says what its fields are."""
BY_COLUMNS = {{"pt": "torch"}.get(one.name, one.name): one for one in FORMS if one.guess}
"""Kind of file → the form that reads it by the names that `--columns` gives."""

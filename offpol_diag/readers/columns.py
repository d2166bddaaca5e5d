"""Whose column is whose: the parts a column can play, the names it goes by, and the user's own word.

A new alias is a word in `ROLES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offpol_diag.errors import DumpError, did_you_mean
from offpol_diag.readers import kinds
from offpol_diag.readers.kinds import Kind

ROLLOUT, OLD, CURRENT = "rollout_log_probs", "old_log_probs", "current_log_probs"
MASK, ADVANTAGES, REWARDS = "response_mask", "advantages", "rewards"
TOKEN_IDS, ENTROPY = "token_ids", "entropy"
SEQUENCE, GROUP = "sequence_id", "group_id"
STEP, LAG = "step", "policy_lag"
POSITION = "position"
ROLLOUT_VERSION, TRAIN_VERSION = "rollout_version", "train_version"
# What reaches a batch as `scalars`.
SCALARS = (SEQUENCE, GROUP, STEP, LAG, ROLLOUT_VERSION, TRAIN_VERSION)
# Those of them that are numbers.
COUNTS = (STEP, LAG, ROLLOUT_VERSION, TRAIN_VERSION)


@dataclass(frozen=True)
class Role:
    """A part a column can play.

    Attributes:
        name: our name, and the column's name in a canonical dump.
        kind: what the column must hold.
        aliases: what trainers call it.
        short: what `--columns` may call it.
        per_token: what else it is called where a row is a token.
    """

    name: str
    kind: Kind
    aliases: tuple[str, ...] = ()
    short: str = ""
    per_token: tuple[str, ...] = ()


ROLES = (
    Role(
        ROLLOUT,
        kinds.FLOATS,
        (
            "rollout_logprobs",
            "rollout_logps",
            "inference_logprobs",
            "inference_log_probs",
            "generation_logprobs",
            "sampling_per_token_logps",
            "rollout_per_token_logps",
            "sampling_logprobs",
            "behavior_logprobs",
            "vllm_logprobs",
            "sglang_logprobs",
            "logprobs",
        ),
        short="rollout",
        per_token=(
            "rollout_log_prob",
            "rollout_logprob",
            "rollout_logp",
            "inference_logprob",
            "inference_log_prob",
            "generation_logprob",
            "sampling_logprob",
            "behavior_logprob",
            "vllm_logprob",
            "sglang_logprob",
            "logprob",
        ),
    ),
    Role(
        OLD,
        kinds.FLOATS,
        (
            "old_logprobs",
            "old_logps",
            "old_logp",
            "prev_logprobs",
            "trainer_logprobs",
            "old_per_token_logps",
            "old_action_log_probs",
            "action_log_probs",
            "prox_logp",
            "log_probs",
        ),
        short="old",
        per_token=(
            "old_log_prob",
            "old_logprob",
            "old_logp",
            "prev_logprob",
            "trainer_logprob",
            "old_action_log_prob",
            "action_log_prob",
        ),
    ),
    Role(
        CURRENT,
        kinds.FLOATS,
        ("current_logprobs", "current_logps", "log_prob", "per_token_logps"),
        short="current",
        per_token=("current_log_prob", "current_logprob", "current_logp"),
    ),
    Role(
        MASK,
        kinds.FLAGS,
        ("loss_mask", "loss_masks", "completion_mask", "token_loss_mask", "action_mask"),
        short="mask",
    ),
    Role(ADVANTAGES, kinds.NUMBER_OR_LIST, ("advantage",)),
    Role(REWARDS, kinds.NUMBER, ("reward",)),
    Role(
        TOKEN_IDS,
        kinds.INTEGERS,
        ("response_token_ids", "response_ids", "completion_ids"),
        per_token=("token_id",),
    ),
    Role(ENTROPY, kinds.FLOATS, ("entropies", "rollout_entropy", "old_entropy")),
    Role(
        SEQUENCE,
        kinds.LABEL,
        ("sample_id", "sample_index"),
        per_token=("rollout_id", "trajectory_id", "request_id"),
    ),
    Role(GROUP, kinds.LABEL, ("prompt_id", "group_index", "uid")),
    Role(STEP, kinds.NUMBER, ("global_step",)),
    Role(LAG, kinds.NUMBER, ("staleness",)),
    Role(ROLLOUT_VERSION, kinds.NUMBER),
    Role(TRAIN_VERSION, kinds.NUMBER),
)


def resolve(
    names: Sequence[str], overrides: Mapping[str, str], file: str, roles: Sequence[Role] = ROLES
) -> dict[str, str]:
    """Which column plays which part: our name → the column's name, for the parts that are played.

    The user's word goes first. Without it, a part is played by the one column with its canonical name or one
    of its aliases. A column that the user gave a part plays no other.

    Args:
        names: the columns of the file.
        overrides: a part (canonical or short name) → the column that plays it.
        file: the file's name, for messages.
        roles: the parts there are.

    Raises:
        DumpError: a senseless override, two candidates for one part, or a required column missing.
    """
    given = _given(names, overrides, file, roles)
    free = [name for name in names if name not in given.values()]
    found = {role.name: given.get(role.name) or _candidate(role, free, file) for role in roles}
    mapping = {name: column for name, column in found.items() if column is not None}
    _require(mapping, names, file)
    for column in mapping.values():
        once(column, names, file)
    return mapping


def _given(
    names: Sequence[str], overrides: Mapping[str, str], file: str, roles: Sequence[Role]
) -> dict[str, str]:
    words = {role.name: role for role in roles} | {role.short: role for role in roles if role.short}
    given: dict[str, str] = {}
    for word, column in overrides.items():
        role = words.get(word)
        if role is None:
            known = ", ".join(words)
            raise DumpError(
                f"--columns {word}={column}: no part is called {word!r}",
                did_you_mean(word, list(words)) or f"the parts are {known}",
            )
        if column in given.values():
            raise DumpError(
                f"--columns: {column!r} is given two parts", "each part needs a column of its own"
            )
        given[role.name] = existing(column, names, file)
    return given


def existing(column: str, names: Sequence[str], file: str) -> str:
    """The column, which must be among `names`.

    Raises:
        DumpError: it is not.
    """
    if column not in names:
        near = did_you_mean(column, list(names))
        raise DumpError(f"{file}: there is no column {column!r}", near or there_are(names))
    return column


def _candidate(role: Role, names: Sequence[str], file: str) -> str | None:
    candidates = [name for name in dict.fromkeys((role.name, *role.aliases)) if name in names]
    if len(candidates) > 1:
        word = role.short or role.name
        ways = " or ".join(f"--columns {word}={column}" for column in candidates)
        raise DumpError(f"{file}: {' and '.join(candidates)} can each be {role.name}", f"say which: {ways}")
    return candidates[0] if candidates else None


def _require(mapping: Mapping[str, str], names: Sequence[str], file: str) -> None:
    if ROLLOUT not in mapping:
        raise DumpError(
            f"{file}: no column holds {ROLLOUT}", f"name it with --columns rollout=…; {there_are(names)}"
        )
    if OLD not in mapping and CURRENT not in mapping:
        raise DumpError(
            f"{file}: no column holds {OLD} or {CURRENT}, and one of them is needed",
            f"name it with --columns old=…; {there_are(names)}",
        )


def once(column: str, names: Sequence[str], file: str) -> None:
    """Check that no two columns go by a name.

    Raises:
        DumpError: they do.
    """
    if names.count(column) > 1:
        raise DumpError(
            f"{file}: two columns are called {column!r}", "write the file again with one of them renamed"
        )


def there_are(names: Sequence[str]) -> str:
    """The columns, for a hint."""
    return f"the columns are {', '.join(names)}"

"""Column roles: accepted types, trainers' names for them, and overrides from `--columns`.

To support another trainer's name for a column, add it to the aliases in `ROLES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.types as pt

from offpol_diag.errors import DumpError, did_you_mean

ROLLOUT, OLD, CURRENT = "rollout_log_probs", "old_log_probs", "current_log_probs"
MASK, ADVANTAGES, REWARDS = "response_mask", "advantages", "rewards"
TOKEN_IDS, ENTROPY = "token_ids", "entropy"
SEQUENCE, GROUP = "sequence_id", "group_id"
STEP, LAG = "step", "policy_lag"
POSITION = "position"
ROLLOUT_VERSION, TRAIN_VERSION = "rollout_version", "train_version"
COUNTS = (STEP, LAG, ROLLOUT_VERSION, TRAIN_VERSION)
SCALARS = (SEQUENCE, GROUP, *COUNTS)
"""Columns passed to a batch as `scalars`; those in `COUNTS` are numeric."""


# ---------------------------------------------------------------- what a column holds
# A width never matters (float16 or float64, list or large_list); what an element is does. The null type will
# do for anything: it is what some writers make of a column that is empty or null throughout.

Test = Callable[[pa.DataType], bool]

LISTS: tuple[Test, ...] = (
    pt.is_list,
    pt.is_large_list,
    pt.is_fixed_size_list,
    pt.is_list_view,
    pt.is_large_list_view,
)
BYTES: tuple[Test, ...] = (pt.is_binary, pt.is_large_binary, pt.is_binary_view, pt.is_fixed_size_binary)
TEXTS: tuple[Test, ...] = (pt.is_string, pt.is_large_string, pt.is_string_view, *BYTES[:3])
NUMBERS: tuple[Test, ...] = (pt.is_integer, pt.is_floating, pt.is_boolean)
FAMILIES = {"anything": (pt.is_null,), "number": NUMBERS, "text": TEXTS}


def is_list(dtype: pa.DataType) -> bool:
    """Return whether a column holds one list per row."""
    return _is_any(dtype, LISTS)


def is_padded(dtype: pa.DataType) -> bool:
    """Return whether the column has a fixed-size list type."""
    return bool(pt.is_fixed_size_list(dtype))


def is_float(dtype: pa.DataType) -> bool:
    """Return whether a column holds one float per row."""
    return bool(pt.is_floating(stored(dtype)))


def is_bytes(dtype: pa.DataType) -> bool:
    """Return whether a column holds binary values, which may be text."""
    return _is_any(stored(dtype), BYTES)


def is_described(dtype: pa.DataType) -> bool:
    """Return whether a column can describe a sequence's origin: text, integer or boolean."""
    return _is_any(stored(dtype), (pt.is_integer, pt.is_boolean, pt.is_string, pt.is_large_string))


def stored(dtype: pa.DataType) -> pa.DataType:
    """Return a type without dictionary encoding, and the storage type of an extension type."""
    inner = dtype.value_type if pt.is_dictionary(dtype) else dtype
    return inner.storage_type if isinstance(inner, pa.BaseExtensionType) else inner


def agree(one: pa.DataType, two: pa.DataType) -> bool:
    """Return whether two column types agree in being lists and in the family of their elements."""
    return is_list(one) == is_list(two) and len({_family(one), _family(two)} - {"anything"}) < 2


def _family(dtype: pa.DataType) -> str:
    inner = stored(dtype.value_type if is_list(dtype) else dtype)
    return next((name for name, tests in FAMILIES.items() if _is_any(inner, tests)), str(inner))


def _is_any(dtype: pa.DataType, tests: tuple[Test, ...]) -> bool:
    return any(test(dtype) for test in tests)


@dataclass(frozen=True)
class Kind:
    """A requirement on a column's type.

    Attributes:
        needs: the requirement in words, for messages.
        accepts: returns whether an Arrow type meets it.
    """

    needs: str
    accepts: Test


def _list_of(*tests: Test) -> Test:
    return lambda dtype: is_list(dtype) and _is_any(dtype.value_type, (*tests, pt.is_null))


def _one(*tests: Test) -> Test:
    return lambda dtype: _is_any(stored(dtype), (*tests, pt.is_null))


FLOATS = Kind("a list of floats per row", _list_of(pt.is_floating))
INTEGERS = Kind("a list of integers per row", _list_of(pt.is_integer))
FLAGS = Kind("a list of 0 and 1 per row", _list_of(*NUMBERS))
NUMBER = Kind("one number per row", _one(*NUMBERS))
NUMBER_OR_LIST = Kind(
    "one number or a list of numbers per row",
    lambda dtype: NUMBER.accepts(dtype) or _list_of(*NUMBERS)(dtype),
)
LABEL = Kind("one value per row", lambda dtype: not pt.is_nested(stored(dtype)))
IN_LONG_FORM = "per row, as the other columns of one row per token"
INTEGER = Kind(f"one integer {IN_LONG_FORM}", _one(pt.is_integer))
PER_TOKEN = {
    FLOATS: Kind(f"one float {IN_LONG_FORM}", _one(pt.is_floating)),
    INTEGERS: INTEGER,
    FLAGS: Kind(f"one 0 or 1 {IN_LONG_FORM}", _one(*NUMBERS)),
    NUMBER_OR_LIST: NUMBER,
}
"""Requirement in the wide form (a list per row) → requirement in the long form (a row per token)."""


# ---------------------------------------------------------------- roles


@dataclass(frozen=True)
class Role:
    """A role that a column can have.

    Attributes:
        name: canonical column name.
        kind: requirement on the column's type.
        aliases: trainers' names for the column.
        short: short name accepted by `--columns`.
        per_token: further names in the long form (one row per token).
    """

    name: str
    kind: Kind
    aliases: tuple[str, ...] = ()
    short: str = ""
    per_token: tuple[str, ...] = ()


ROLES = (
    Role(
        ROLLOUT,
        FLOATS,
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
        FLOATS,
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
        FLOATS,
        ("current_logprobs", "current_logps", "log_prob", "per_token_logps"),
        short="current",
        per_token=("current_log_prob", "current_logprob", "current_logp"),
    ),
    Role(
        MASK,
        FLAGS,
        ("loss_mask", "loss_masks", "completion_mask", "token_loss_mask", "action_mask"),
        short="mask",
    ),
    Role(ADVANTAGES, NUMBER_OR_LIST, ("advantage",)),
    Role(REWARDS, NUMBER, ("reward",)),
    Role(
        TOKEN_IDS,
        INTEGERS,
        ("response_token_ids", "response_ids", "completion_ids"),
        per_token=("token_id",),
    ),
    Role(ENTROPY, FLOATS, ("entropies", "rollout_entropy", "old_entropy")),
    Role(
        SEQUENCE,
        LABEL,
        ("sample_id", "sample_index"),
        per_token=("rollout_id", "trajectory_id", "request_id"),
    ),
    Role(GROUP, LABEL, ("prompt_id", "group_index", "uid")),
    Role(STEP, NUMBER, ("global_step",)),
    Role(LAG, NUMBER, ("staleness",)),
    Role(ROLLOUT_VERSION, NUMBER),
    Role(TRAIN_VERSION, NUMBER),
)


def resolve(
    names: Sequence[str], overrides: Mapping[str, str], file: str, roles: Sequence[Role] = ROLES
) -> dict[str, str]:
    """Assign columns to roles: canonical name → the column's name, for the roles found.

    Overrides take precedence. Otherwise a role goes to the one column with its canonical name or one of its
    aliases. A column named in an override has no other role.

    Args:
        names: the columns of the file.
        overrides: role (canonical or short name) → column.
        file: the file's name, for messages.
        roles: the roles to assign.

    Raises:
        DumpError: an invalid override, two candidates for one role, or a missing required column.
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
    """Return the column's name after checking that it is among `names`.

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
    """Check that column names are unique.

    Raises:
        DumpError: they do.
    """
    if names.count(column) > 1:
        raise DumpError(
            f"{file}: two columns are called {column!r}", "write the file again with one of them renamed"
        )


def there_are(names: Sequence[str]) -> str:
    """Return a list of the columns, for a hint."""
    return f"the columns are {', '.join(names)}"

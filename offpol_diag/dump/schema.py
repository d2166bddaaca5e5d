"""The columns of a dump: one table, from which writer, reader, `--columns` and the docs are made.

To read another trainer's name for a column, add it to the words of its row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.types as pt

from offpol_diag.errors import DumpError, did_you_mean

F, D, I, L, B, T = pa.float32(), pa.float64(), pa.int32(), pa.int64(), pa.int8(), pa.string()  # noqa: E741


@dataclass(frozen=True)
class Column:
    """A column that a dump can have.

    Attributes:
        name: its canonical name.
        stored: the type of its values as `DumpWriter` stores them; None is whatever they have.
        holds: `tokens` (a list per row, one value per response token), `list` (of a length of its own),
            `row` (one value), or `either` (tokens or row).
        meaning: one line for the docs.
        names: what trainers call it, words of one text.
        long: further names where a row is a token.
        short: its word in `--columns`.
    """

    name: str
    stored: pa.DataType | None
    holds: str
    meaning: str
    names: str = ""
    long: str = ""
    short: str = ""

    def called(self, long: bool) -> tuple[str, ...]:
        """Return its names in a dump of a row per sequence, or per token."""
        return self.name, *self.names.split(), *(self.long.split() if long else ())

    @property
    def of_tokens(self) -> bool:
        """Whether it can have a value per token."""
        return self.holds in ("tokens", "either")


ROLLOUT, OLD, CURRENT = "rollout_log_probs", "old_log_probs", "current_log_probs"
MASK, ADVANTAGES, REWARDS, ENTROPY = "response_mask", "advantages", "rewards", "entropy"
TOKEN_IDS, PROMPT_IDS, POSITION = "token_ids", "prompt_ids", "token_positions"
WEIGHT_VERSIONS, REFERENCE = "weight_versions", "reference_log_probs"
SEQUENCE, GROUP, STEP, LAG = "sequence_id", "group_id", "step", "policy_lag"
ROLLOUT_VERSION, TRAIN_VERSION = "rollout_version", "train_version"
PROMPT_LENGTH, FINISH_REASON = "prompt_length", "finish_reason"
DIGESTS = ("weight_digest_rollout", "weight_digest_train")

TABLE = (
    Column(
        ROLLOUT,
        F,
        "tokens",
        "required: log π of the sampled token where it was sampled, nats",
        "rollout_logprobs rollout_logps inference_logprobs inference_log_probs generation_logprobs "
        "sampling_per_token_logps rollout_per_token_logps sampling_logprobs behavior_logprobs vllm_logprobs "
        "sglang_logprobs logprobs",
        "rollout_log_prob rollout_logprob rollout_logp inference_logprob inference_log_prob "
        "generation_logprob sampling_logprob behavior_logprob vllm_logprob sglang_logprob logprob",
        "rollout",
    ),
    Column(
        OLD,
        F,
        "tokens",
        "required, or `current_log_probs` in its place: the trainer's policy at the start of the step",
        "old_logprobs old_logps old_logp prev_logprobs trainer_logprobs old_per_token_logps "
        "old_action_log_probs action_log_probs prox_logp log_probs",
        "old_log_prob old_logprob prev_logprob trainer_logprob old_action_log_prob action_log_prob",
        "old",
    ),
    Column(
        CURRENT,
        F,
        "tokens",
        "the trainer's policy during the step: the second drift, bypass presets, PPO clip",
        "current_logprobs current_logps log_prob per_token_logps",
        "current_log_prob current_logprob current_logp",
        "current",
    ),
    Column(
        MASK,
        B,
        "tokens",
        "1 = counts; 0 = tool output, observation, padding; left out: all 1",
        "mask loss_mask loss_masks completion_mask token_loss_mask action_mask",
        short="mask",
    ),
    Column(ADVANTAGES, D, "either", "losses, presets that depend on the sign", "advantage"),
    Column(REWARDS, D, "row", "with `group_id`, advantages where there are none", "reward"),
    Column(
        TOKEN_IDS,
        I,
        "tokens",
        "the sampled tokens: the worst ones, what tokens of one kind have in common, `rescore`",
        "response_token_ids response_ids completion_ids",
        "token_id",
    ),
    Column(
        ENTROPY,
        F,
        "tokens",
        "of the policy that `old_log_probs` are of, at its temperature, nats, as trainers log it",
        "entropies rollout_entropy old_entropy",
    ),
    Column(
        SEQUENCE,
        None,
        "row",
        "a name of the sequence",
        "sample_id sample_index",
        "rollout_id trajectory_id request_id",
    ),
    Column(
        GROUP,
        None,
        "row",
        "the prompt, shared by its samples: the unit of the intervals",
        "prompt_id group_index uid",
    ),
    Column(STEP, L, "row", "training step: trends", "global_step"),
    Column(
        LAG, L, "row", "trainer updates between the weights that sampled and those that train", "staleness"
    ),
    Column(
        ROLLOUT_VERSION, L, "row", "version of the weights that sampled; the lag is the difference of both"
    ),
    Column(TRAIN_VERSION, L, "row", "version of the trainer's weights"),
    Column(
        WEIGHT_VERSIONS,
        L,
        "tokens",
        "version of the weights that sampled each token, −1 where unknown",
        "output_versions",
        "weight_version output_version",
    ),
    Column(
        PROMPT_LENGTH,
        L,
        "row",
        "tokens of the prompt: faults that depend on the place in the context",
        "prompt_len prompt_lengths",
    ),
    Column(
        PROMPT_IDS,
        I,
        "list",
        "the tokens before the response as the model saw them: `rescore`",
        "prompt_token_ids",
    ),
    Column(FINISH_REASON, T, "row", "why the response ended, such as `stop` or `length`"),
    Column(DIGESTS[0], T, "row", "a text made of the weights that sampled, as the engine holds them"),
    Column(DIGESTS[1], T, "row", "the same text of the trainer's weights that `old_log_probs` are of"),
    Column(
        REFERENCE,
        F,
        "tokens",
        "log-probs under the run's model computed again: `rescore` writes it",
        long="reference_log_prob",
    ),
    Column("reference_entropy", F, "tokens", "entropy of that distribution"),
    Column("reference_rank", I, "tokens", "rank of the token in it"),
    Column(
        POSITION,
        I,
        "tokens",
        "place of each token in its response; one row per token only",
        long="position token_position pos t",
        short="position",
    ),
)
COLUMNS = {one.name: one for one in TABLE}
TOKENS = tuple(one.name for one in TABLE if one.holds == "tokens")
LOG_PROBS = (ROLLOUT, OLD, CURRENT)
COUNTS = tuple(one.name for one in TABLE if one.holds == "row" and one.stored == L)
"""Columns of whole numbers, one per row."""
LABELS = (SEQUENCE, GROUP, *COUNTS, FINISH_REASON, *DIGESTS)
"""Columns that a batch has as `scalars`."""
RESCORED = ("reference_entropy", "reference_rank")
"""Columns that `rescore` alone reads."""
NONE = "none"
"""Given to `--columns` for a column's name: the dump has none."""
MOST_LISTED = 50
"""Most names that a message lists."""


# ---------------------------------------------------------------- types


def is_list(dtype: pa.DataType) -> bool:
    """Return whether a column holds one list per row."""
    tests = pt.is_list, pt.is_large_list, pt.is_fixed_size_list, pt.is_list_view, pt.is_large_list_view
    return any(test(dtype) for test in tests)


def plain_type(dtype: pa.DataType) -> pa.DataType:
    """Return a type without dictionary encoding, and the storage of an extension type."""
    inner = dtype.value_type if pt.is_dictionary(dtype) else dtype
    return inner.storage_type if isinstance(inner, pa.BaseExtensionType) else inner


def is_text(dtype: pa.DataType) -> bool:
    """Return whether a type is text or bytes of any length."""
    tests = (
        pt.is_string,
        pt.is_large_string,
        pt.is_string_view,
        pt.is_binary,
        pt.is_large_binary,
        pt.is_binary_view,
    )
    return any(test(plain_type(dtype)) for test in tests)


def _numbers(column: Column) -> tuple[str, tuple[str, ...]]:
    """Return what the values of a column are, in words and as names of types; a width never matters."""
    if column.stored is None:
        return "value", ()
    if pt.is_string(column.stored):
        return "text", ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    if column.name == MASK:
        return "0 or 1", ("integer", "boolean", "floating")
    if column.holds in ("tokens", "list"):
        return ("float", ("floating",)) if pt.is_floating(column.stored) else ("integer", ("integer",))
    whole = column.stored == L
    return "number", ("integer", "floating") if whole else ("integer", "floating", "boolean")


def misfit(column: Column, dtype: pa.DataType, long: bool) -> str:
    """Return what a column needs to hold, if it does not; null throughout will do for anything."""
    one, names = _numbers(column)
    lists = is_list(dtype)
    inner = plain_type(dtype.value_type if lists else dtype)
    listed = (
        column.holds == "list"
        or (column.holds == "tokens" and not long)
        or (column.holds == "either" and lists)
    )
    fits = lists == listed and not (column.holds == "either" and lists and long)
    right = not pt.is_nested(inner) if not names else any(getattr(pt, f"is_{name}")(inner) for name in names)
    if pt.is_null(dtype) or (fits and (right or pt.is_null(inner))):
        return ""
    if column.holds == "either" and not long:
        return "one number or a list of numbers per row"
    return (
        f"a list of {'0 and 1' if one == '0 or 1' else f'{one}s'} per row" if listed else f"one {one} per row"
    )


# ---------------------------------------------------------------- which column is which


def is_long(schema: pa.Schema, given: Mapping[str, str]) -> bool:
    """Return whether a row is a token.

    The rollout log-probs then hold one float per row, and no column with a value per token holds lists.
    """
    types: dict[str, list[pa.DataType]] = {}
    for one in (one for one in TABLE if one.holds == "tokens"):
        wanted = [given[word] for word in (one.name, one.short) if word in given]
        names = [name for name in wanted or one.called(long=True) if schema.names.count(name) == 1]
        types[one.name] = [schema.field(name).type for name in names]
    lists = any(is_list(one) for some in types.values() for one in some)
    return not lists and any(pt.is_floating(plain_type(one)) for one in types[ROLLOUT])


def assigned(names: Sequence[str], given: Mapping[str, str], file: str, long: bool = False) -> dict[str, str]:
    """Return canonical name → column: the user's words first, then the names that trainers give.

    Raises:
        DumpError: a word or a column that is not there, or columns that can each be the same.
    """
    words = {one.name: one for one in TABLE} | {one.short: one for one in TABLE if one.short}
    found: dict[str, str] = {}
    for word, column in given.items():
        if word not in words:
            hint = did_you_mean(word, list(words)) or f"the parts are {', '.join(words)}"
            raise DumpError(f"--columns {word}={column}: no part is called {word!r}", hint)
        if column != NONE and column in found.values():
            raise DumpError(
                f"--columns: {column!r} is given two parts", "each part needs a column of its own"
            )
        found[words[word].name] = column
    if absent := [one for one in found.values() if one != NONE and one not in names]:
        some = "are no columns" if len(absent) > 1 else "is no column"
        raise DumpError(f"{file}: there {some} {' and '.join(map(repr, absent))}", meant(absent, names))
    for one in TABLE:
        there = [
            name for name in dict.fromkeys(one.called(long)) if name in names and name not in found.values()
        ]
        if one.name in found or one.name in RESCORED or not there:
            continue
        if len(there) > 1 and "mask" in there:
            there.remove("mask")  # beside a name that says more it may be anything
        if len(there) > 1:
            word = one.short or one.name
            ways = " or ".join(f"--columns {word}={name}" for name in there)
            raise DumpError(f"{file}: {' and '.join(there)} can each be the {word}", f"say which: {ways}")
        found[one.name] = there[0]
    return {one.name: found[one.name] for one in TABLE if found.get(one.name, NONE) != NONE}


def resolve(schema: pa.Schema, given: Mapping[str, str], file: str) -> dict[str, str]:
    """Assign columns as `assigned` does, and require what an analysis needs, of the right types.

    Raises:
        DumpError: one is missing, is there twice, or holds something else.
    """
    long, names = is_long(schema, given), schema.names
    found = assigned(names, given, file, long)
    absent = {} if ROLLOUT in found else {ROLLOUT: "rollout"}
    absent |= {} if found.keys() & {OLD, CURRENT} else {f"{OLD} or {CURRENT}": "old"}
    absent |= {f"{SEQUENCE} (there is one row per token)": SEQUENCE} if long and SEQUENCE not in found else {}
    if absent:
        them = "it" if len(absent) == 1 else "them"
        hint = f"name {them} with --columns {','.join(f'{word}=…' for word in absent.values())}"
        what = f"no column holds {', and none '.join(absent)}"
        raise DumpError(f"{file}: {what}", f"{hint}; the columns are {listed(names)}")
    for name, column in found.items():
        once(column, names, file)
        if needs := misfit(COLUMNS[name], schema.field(column).type, long):
            hint = "write the column again in that type, or give the part to another column with --columns"
            raise DumpError(
                f"{file}: column {column!r} holds {schema.field(column).type}, and {needs} is needed", hint
            )
    if len(there := found.keys() & {*DIGESTS}) == 1:
        (one,), (lacks,) = there, {*DIGESTS} - there
        hint = f"digests are compared: write both, or leave this one out with --columns {one}={NONE}"
        raise DumpError(f"{file}: column {found[one]!r} is there without {lacks!r}", hint)
    return found


def once(column: str, names: Sequence[str], file: str) -> None:
    """Refuse a column that is there twice, or not at all."""
    if column not in names:
        raise DumpError(f"{file}: there is no column {column!r}", meant([column], names))
    if names.count(column) > 1:
        raise DumpError(
            f"{file}: two columns are called {column!r}", "write the file again with one of them renamed"
        )


def meant(columns: Sequence[str], names: Sequence[str]) -> str:
    """Return a hint on columns that a file lacks."""
    if nested := sorted({one.partition(".")[0] for one in columns if "." in one} & {*names}):
        fields = ", ".join(one.rpartition(".")[2] for one in columns)
        said = " and ".join(map(repr, nested))
        hint = "is nested, and --columns takes names of the top level only: write its fields there"
        return f"{said} {hint} ({fields})"
    near = [did_you_mean(one, list(names)) for one in columns]
    return "; ".join(filter(None, near)) or f"the columns are {listed(names)}"


def listed(names: Sequence[str]) -> str:
    """Return names for a message."""
    more = f" and {len(names) - MOST_LISTED:,} more" if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more

"""The columns of a dump: one table, from which writer, reader, `--columns` and the docs are made.

To read another trainer's name for a column, add it to the names of its row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.types as pt

from offpol_diag.errors import DumpError, did_you_mean

FLOAT, DOUBLE, INT, LONG = pa.float32(), pa.float64(), pa.int32(), pa.int64()
FLAG, TEXT = pa.int8(), pa.string()
TYPES: dict[pa.DataType | None, tuple[str, Callable[[pa.DataType], bool]]] = {
    FLOAT: ("float", pt.is_floating),
    DOUBLE: ("float", lambda x: pt.is_floating(x) or pt.is_integer(x) or pt.is_boolean(x)),
    INT: ("int", pt.is_integer),
    LONG: ("int", lambda x: pt.is_floating(x) or pt.is_integer(x)),  # a float that is NaN is null
    FLAG: ("0 or 1", lambda x: pt.is_floating(x) or pt.is_integer(x) or pt.is_boolean(x)),
    TEXT: ("text", lambda x: not (pt.is_nested(x) or pt.is_primitive(x))),
    None: ("text or int", lambda x: not pt.is_nested(x)),
}
"""Type that the writer stores → its name in messages and docs, and whether the reader accepts a type."""


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

    def every_name(self, long: bool) -> tuple[str, ...]:
        """Return its names; in a `long` dump, of a row per token, log-probs are singular too."""
        names = (self.name, *self.names.split())
        singular = (one[:-1] for one in names if one.endswith(("probs", "logps")) and one != "log_probs")
        return tuple(dict.fromkeys((*names, *singular, *self.long.split()))) if long else names

    def type_needed(self, dtype: pa.DataType, long: bool) -> str:
        """Return what it needs to hold, in words, or nothing where a type will do; its width never matters.

        A column of nulls alone will do for all but the rollout's log-probs.
        """
        listed = is_list(dtype)
        wants_list = {"tokens": not long, "list": True, "row": False, "either": listed and not long}[
            self.holds
        ]
        inner = plain_type(dtype.value_type if listed else dtype)
        word, accepts = TYPES[self.stored]
        fits = listed == wants_list and (pt.is_null(inner) or accepts(inner))
        if fits or (pt.is_null(dtype) and self.name != ROLLOUT):
            return ""
        return f"{'a list of' if wants_list else 'one'} {word} per row"


ROLLOUT, OLD, CURRENT = "rollout_log_probs", "old_log_probs", "current_log_probs"
MASK, ADVANTAGES, REWARDS, ENTROPY = "response_mask", "advantages", "rewards", "entropy"
TOKEN_IDS, PROMPT_IDS, POSITION = "token_ids", "prompt_ids", "token_positions"
WEIGHT_VERSIONS, REFERENCE = "weight_versions", "reference_log_probs"
SEQUENCE, GROUP, STEP, LAG = "sequence_id", "group_id", "step", "policy_lag"
ROLLOUT_VERSION, TRAIN_VERSION = "rollout_version", "train_version"
PROMPT_LENGTH, FINISH_REASON = "prompt_length", "finish_reason"
DIGESTS = ("weight_digest_rollout", "weight_digest_train")

# fmt: off
TABLE = (
    Column(ROLLOUT, FLOAT, "tokens", "required: the engine's log-prob of the sampled token, nats",
           "rollout_logprobs rollout_logps inference_logprobs inference_log_probs generation_logprobs "
           "sampling_per_token_logps rollout_per_token_logps sampling_logprobs behavior_logprobs "
           "vllm_logprobs sglang_logprobs logprobs", short="rollout"),
    Column(OLD, FLOAT, "tokens",
           "required, or else `current_log_probs`: the trainer's policy at the start of the step",
           "old_logprobs old_logps old_logp prev_logprobs trainer_logprobs old_per_token_logps "
           "old_action_log_probs action_log_probs prox_logp log_probs", short="old"),
    Column(CURRENT, FLOAT, "tokens",
           "the trainer's policy during the step; for the second drift, bypass presets, PPO clip",
           "current_logprobs current_logps log_prob per_token_logps", short="current"),
    Column(MASK, FLAG, "tokens", "1 if the token counts; 0 on tool output, observations, padding; default 1",
           "mask loss_mask loss_masks completion_mask token_loss_mask action_mask", short="mask"),
    Column(ADVANTAGES, DOUBLE, "either", "for losses, and presets that depend on the sign", "advantage"),
    Column(REWARDS, DOUBLE, "row", "with `group_id`, for advantages if there are none", "reward"),
    Column(TOKEN_IDS, INT, "tokens",
           "the sampled tokens; to name the worst ones, compare equal tokens, and for `rescore`",
           "response_token_ids response_ids completion_ids", "token_id"),
    Column(ENTROPY, FLOAT, "tokens",
           "of the policy behind `old_log_probs`, at its temperature, nats, as trainers log it",
           "entropies rollout_entropy old_entropy"),
    Column(SEQUENCE, None, "row", "a name of the sequence",
           "sample_id sample_index", "rollout_id trajectory_id request_id"),
    Column(GROUP, None, "row", "the prompt, shared by its samples; the unit of the intervals",
           "prompt_id group_index uid"),
    Column(STEP, LONG, "row", "training step; for trends", "global_step"),
    Column(LAG, LONG, "row", "trainer updates between the weights that sampled and the trainer's",
           "staleness"),
    Column(ROLLOUT_VERSION, LONG, "row",
           "version of the weights that sampled; the lag is `train_version` minus it"),
    Column(TRAIN_VERSION, LONG, "row", "version of the trainer's weights"),
    Column(WEIGHT_VERSIONS, INT, "tokens", "version of the weights that sampled each token, −1 where unknown",
           "output_versions", "weight_version output_version"),
    Column(PROMPT_LENGTH, LONG, "row", "tokens in the prompt; for faults that depend on the context position",
           "prompt_len prompt_lengths"),
    Column(PROMPT_IDS, INT, "list", "the tokens before the response as the model saw them; for `rescore`",
           "prompt_token_ids"),
    Column(FINISH_REASON, TEXT, "row", "why the response ended, such as `stop` or `length`"),
    Column(DIGESTS[0], TEXT, "row", "digest of the weights that sampled, as the engine holds them"),
    Column(DIGESTS[1], TEXT, "row", "the same digest of the trainer's weights behind `old_log_probs`"),
    Column(REFERENCE, FLOAT, "tokens", "log-probs recomputed with the run's model; written by `rescore`"),
    Column(POSITION, INT, "tokens", "place of each token in its response; one row per token only",
           long="position token_position pos t", short="position"),
)
# fmt: on
COLUMNS = {one.name: one for one in TABLE}
TOKENS = tuple(one.name for one in TABLE if one.holds == "tokens")
OF_TOKENS = (*TOKENS, ADVANTAGES)
"""Columns that can have a value per token."""
LOG_PROBS = (ROLLOUT, OLD, CURRENT)
COUNTS = tuple(one.name for one in TABLE if one.holds == "row" and one.stored == LONG)
"""Columns of whole numbers, one per row."""
LABELS = (SEQUENCE, GROUP, *COUNTS, FINISH_REASON, *DIGESTS)
"""Columns that a batch has as `scalars`."""
HOOKS = {
    "verl": "input output score",
    "trl": "prompt completion",
    "slime": "sample_index response_length tokens",
}
"""Page of docs/trainers → fields of what its trainer writes by itself: one policy's log-probs, or none."""
NONE = "none"
"""Given to `--columns` for a column's name: the dump has none."""


def is_list(dtype: pa.DataType) -> bool:
    """Return whether a column holds one list per row."""
    kinds = pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType
    return isinstance(dtype, kinds)


def plain_type(dtype: pa.DataType) -> pa.DataType:
    """Return a type without dictionary encoding."""
    return dtype.value_type if pt.is_dictionary(dtype) else dtype


def is_long(schema: pa.Schema, given: Mapping[str, str]) -> bool:
    """Return whether a row is a token: a column of the rollout's log-probs holds floats, and none lists."""
    column = COLUMNS[ROLLOUT]
    names = [given[x] for x in (column.name, column.short) if x in given] or column.every_name(long=True)
    types = [plain_type(schema.field(name).type) for name in names if schema.names.count(name) == 1]
    return any(map(pt.is_floating, types)) and not any(map(is_list, types))


def find_columns(
    names: Sequence[str], given: Mapping[str, str], file: str, long: bool = False
) -> dict[str, str]:
    """Return canonical name → column: those that `--columns` gives first, then by the names of trainers.

    Raises:
        DumpError: `--columns` names what is not there, or several columns have names of one.
    """
    words = {one.name: one.name for one in TABLE} | {one.short: one.name for one in TABLE if one.short}
    found: dict[str, str] = {}
    for word, column in given.items():
        if word not in words:
            hint = did_you_mean(word, list(words)) or f"the parts are {', '.join(words)}"
            raise DumpError(f"--columns {word}={column}: no part is called {word!r}", hint)
        if column != NONE:
            require_one(column, names, f"{file}: --columns")
        found[words[word]] = column
    for one in (one for one in TABLE if one.name not in found):
        there = [name for name in one.every_name(long) if name in names and name not in found.values()]
        if len(there) > 1:
            word = one.short or one.name
            ways = " or ".join(f"--columns {word}={name}" for name in there)
            raise DumpError(f"{file}: {' and '.join(there)} can each be the {word}", f"say which: {ways}")
        if there:
            found[one.name] = there[0]
    return {one.name: found[one.name] for one in TABLE if found.get(one.name, NONE) != NONE}


def resolve(schema: pa.Schema, given: Mapping[str, str], file: str) -> dict[str, str]:
    """Find columns as `find_columns` does, and require what an analysis needs, of the right types.

    Raises:
        DumpError: one is missing, is there twice, or holds something else.
    """
    long = is_long(schema, given)
    found = find_columns(schema.names, given, file, long)
    require(found, schema.names, file, long)
    for name, column in found.items():
        require_one(column, schema.names, file)
        dtype = schema.field(column).type
        if needed := COLUMNS[name].type_needed(dtype, long):
            hint = "write the column again in that type, or give the part to another column with --columns"
            raise DumpError(f"{file}: column {column!r} holds {dtype}, and {needed} is needed", hint)
    return found


def require(
    found: Collection[str], names: Sequence[str], file: str, long: bool = False, page: str = ""
) -> None:
    """Refuse a dump that lacks what an analysis needs; `page` of docs/trainers has a hook that writes it."""
    needed = {"rollout": (ROLLOUT,), "old": (OLD, CURRENT)} | ({SEQUENCE: (SEQUENCE,)} if long else {})
    absent = {word: " or ".join(some) for word, some in needed.items() if not {*some} & {*found}}
    if absent:
        page = next((one for one, fields in HOOKS.items() if {*fields.split()} <= {*names}), page)
        hint = f"name it with --columns {'=…,'.join(absent)}=…; the columns are {', '.join(names)}"
        hint = f"docs/trainers/{page}.md has a hook that writes the log-probs of both" if page else hint
        what = f"{file}: no column holds {', and none '.join(absent.values())}"
        raise DumpError(what + " (a row is a token)" * long, hint)


def require_one(column: str, names: Sequence[str], file: str) -> None:
    """Refuse a column that is there twice, or not at all."""
    if column not in names:
        hint = did_you_mean(column, list(names)) or f"the columns are {', '.join(names)}"
        raise DumpError(f"{file}: there is no column {column!r}", hint)
    if names.count(column) > 1:
        hint = "write the file again with one of them renamed"
        raise DumpError(f"{file}: two columns are called {column!r}", hint)

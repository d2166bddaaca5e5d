"""The columns of a dump: one table, from which writer, reader, `--columns` and the docs are made.

To read another trainer's name for a column, add it to the names of its row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.types as pt

from offpol_diag.errors import DumpError, did_you_mean

F, D, I, L, B, T = pa.float32(), pa.float64(), pa.int32(), pa.int64(), pa.int8(), pa.string()  # noqa: E741
TEXTS = T, pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()
WORDS = {F: "float", D: "float", I: "int", L: "int", B: "0 or 1", T: "text", None: "text or int"}
"""Type in which values are stored → what they are, in messages and in the docs."""


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
        """Return its names in a dump of a row per sequence, or per token: log-probs are then singular too."""
        names = (self.name, *self.names.split())
        one = (name[:-1] for name in names if name.endswith(("probs", "logps")) and name != "log_probs")
        return tuple(dict.fromkeys((*names, *one, *self.long.split()))) if long else names

    def misfit(self, dtype: pa.DataType, long: bool) -> str:
        """Return what it needs to hold, if a type is no such thing; a width never matters.

        Null throughout will do for all but the rollout.
        """
        listed, inner = is_list(dtype), plain_type(dtype.value_type if is_list(dtype) else dtype)
        wanted = {"tokens": not long, "list": True, "row": False, "either": listed and not long}[self.holds]
        number = pt.is_floating(inner) or pt.is_integer(inner)
        fits = {
            F: pt.is_floating(inner),
            D: number or pt.is_boolean(inner),
            I: pt.is_integer(inner),
            L: number,  # NaN is null there
            B: number or pt.is_boolean(inner),
            T: inner in TEXTS,
            None: not pt.is_nested(inner),
        }[self.stored]
        empty = pt.is_null(dtype) and self.name != ROLLOUT
        if empty or (listed == wanted and (fits or pt.is_null(inner))):
            return ""
        return f"{'a list of' if wanted else 'one'} {WORDS[self.stored]} per row"


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
    Column(ROLLOUT, F, "tokens", "required: log π of the sampled token where it was sampled, nats",
           "rollout_logprobs rollout_logps inference_logprobs inference_log_probs generation_logprobs "
           "sampling_per_token_logps rollout_per_token_logps sampling_logprobs behavior_logprobs "
           "vllm_logprobs sglang_logprobs logprobs", short="rollout"),
    Column(OLD, F, "tokens",
           "required, or `current_log_probs` in its place: the trainer's policy at the start of the step",
           "old_logprobs old_logps old_logp prev_logprobs trainer_logprobs old_per_token_logps "
           "old_action_log_probs action_log_probs prox_logp log_probs", short="old"),
    Column(CURRENT, F, "tokens",
           "the trainer's policy during the step: the second drift, bypass presets, PPO clip",
           "current_logprobs current_logps log_prob per_token_logps", short="current"),
    Column(MASK, B, "tokens", "1 = counts; 0 = tool output, observation, padding; left out: all 1",
           "mask loss_mask loss_masks completion_mask token_loss_mask action_mask", short="mask"),
    Column(ADVANTAGES, D, "either", "losses, presets that depend on the sign", "advantage"),
    Column(REWARDS, D, "row", "with `group_id`, advantages where there are none", "reward"),
    Column(TOKEN_IDS, I, "tokens",
           "the sampled tokens: the worst ones, what tokens of one kind have in common, `rescore`",
           "response_token_ids response_ids completion_ids", "token_id"),
    Column(ENTROPY, F, "tokens",
           "of the policy that `old_log_probs` are of, at its temperature, nats, as trainers log it",
           "entropies rollout_entropy old_entropy"),
    Column(SEQUENCE, None, "row", "a name of the sequence",
           "sample_id sample_index", "rollout_id trajectory_id request_id"),
    Column(GROUP, None, "row", "the prompt, shared by its samples: the unit of the intervals",
           "prompt_id group_index uid"),
    Column(STEP, L, "row", "training step: trends", "global_step"),
    Column(LAG, L, "row", "trainer updates between the weights that sampled and those that train",
           "staleness"),
    Column(ROLLOUT_VERSION, L, "row",
           "version of the weights that sampled; the lag is the difference of both"),
    Column(TRAIN_VERSION, L, "row", "version of the trainer's weights"),
    Column(WEIGHT_VERSIONS, I, "tokens", "version of the weights that sampled each token, −1 where unknown",
           "output_versions", "weight_version output_version"),
    Column(PROMPT_LENGTH, L, "row", "tokens of the prompt: faults that depend on the place in the context",
           "prompt_len prompt_lengths"),
    Column(PROMPT_IDS, I, "list", "the tokens before the response as the model saw them: `rescore`",
           "prompt_token_ids"),
    Column(FINISH_REASON, T, "row", "why the response ended, such as `stop` or `length`"),
    Column(DIGESTS[0], T, "row", "a text made of the weights that sampled, as the engine holds them"),
    Column(DIGESTS[1], T, "row", "the same text of the trainer's weights that `old_log_probs` are of"),
    Column(REFERENCE, F, "tokens", "log-probs under the run's model computed again: `rescore` writes it"),
    Column("reference_entropy", F, "tokens", "entropy of that distribution"),
    Column("reference_rank", I, "tokens", "rank of the token in it"),
    Column(POSITION, I, "tokens", "place of each token in its response; one row per token only",
           long="position token_position pos t", short="position"),
)
# fmt: on
COLUMNS = {one.name: one for one in TABLE}
TOKENS = tuple(one.name for one in TABLE if one.holds == "tokens")
OF_TOKENS = (*TOKENS, ADVANTAGES)
"""Columns that can have a value per token."""
LOG_PROBS = (ROLLOUT, OLD, CURRENT)
COUNTS = tuple(one.name for one in TABLE if one.holds == "row" and one.stored == L)
"""Columns of whole numbers, one per row."""
LABELS = (SEQUENCE, GROUP, *COUNTS, FINISH_REASON, *DIGESTS)
"""Columns that a batch has as `scalars`."""
RESCORED = ("reference_entropy", "reference_rank")
"""Columns that `rescore` alone reads."""
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
    """Return a type without dictionary encoding, and the storage of an extension type."""
    inner = dtype.value_type if pt.is_dictionary(dtype) else dtype
    return inner.storage_type if isinstance(inner, pa.BaseExtensionType) else inner


def is_long(schema: pa.Schema, given: Mapping[str, str]) -> bool:
    """Return whether a row is a token: a column of the rollout's log-probs holds floats, and none lists."""
    column = COLUMNS[ROLLOUT]
    names = [given[x] for x in (column.name, column.short) if x in given] or column.called(long=True)
    types = [plain_type(schema.field(name).type) for name in names if schema.names.count(name) == 1]
    return any(map(pt.is_floating, types)) and not any(map(is_list, types))


def assigned(names: Sequence[str], given: Mapping[str, str], file: str, long: bool = False) -> dict[str, str]:
    """Return canonical name → column: the user's words first, then the names that trainers give.

    Raises:
        DumpError: a word or a column that is not there, or columns that can each be the same.
    """
    words = {one.name: one.name for one in TABLE} | {one.short: one.name for one in TABLE if one.short}
    found: dict[str, str] = {}
    for word, column in given.items():
        if word not in words:
            hint = did_you_mean(word, list(words)) or f"the parts are {', '.join(words)}"
            raise DumpError(f"--columns {word}={column}: no part is called {word!r}", hint)
        if column != NONE:
            once(column, names, f"{file}: --columns")
        found[words[word]] = column
    for one in (one for one in TABLE if one.name not in found and one.name not in RESCORED):
        there = [name for name in one.called(long) if name in names and name not in found.values()]
        if len(there) > 1:
            ways = " or ".join(f"--columns {one.short or one.name}={name}" for name in there)
            what = f"{file}: {' and '.join(there)} can each be the {one.short or one.name}"
            raise DumpError(what, f"say which: {ways}")
        if there:
            found[one.name] = there[0]
    return {one.name: found[one.name] for one in TABLE if found.get(one.name, NONE) != NONE}


def resolve(schema: pa.Schema, given: Mapping[str, str], file: str) -> dict[str, str]:
    """Assign columns as `assigned` does, and require what an analysis needs, of the right types.

    Raises:
        DumpError: one is missing, is there twice, or holds something else.
    """
    long = is_long(schema, given)
    found = assigned(schema.names, given, file, long)
    require(found, schema.names, file, long)
    for name, column in found.items():
        once(column, schema.names, file)
        if needs := COLUMNS[name].misfit(schema.field(column).type, long):
            what = f"{file}: column {column!r} holds {schema.field(column).type}, and {needs} is needed"
            hint = "write the column again in that type, or give the part to another column with --columns"
            raise DumpError(what, hint)
    return found


def require(
    found: Collection[str], names: Sequence[str], file: str, long: bool = False, page: str = ""
) -> None:
    """Refuse what lacks a column that an analysis needs, and name the page of a hook that writes it."""
    needed = {"rollout": [ROLLOUT], "old": [OLD, CURRENT]} | ({SEQUENCE: [SEQUENCE]} if long else {})
    absent = {word: " or ".join(some) for word, some in needed.items() if not {*some} & {*found}}
    if absent:
        page = next((one for one, fields in HOOKS.items() if {*fields.split()} <= {*names}), page)
        hint = f"name it with --columns {'=…,'.join(absent)}=…; the columns are {', '.join(names)}"
        hint = f"docs/trainers/{page}.md has a hook that writes the log-probs of both" if page else hint
        what = f"{file}: no column holds {', and none '.join(absent.values())}"
        raise DumpError(what + " (a row is a token)" * long, hint)


def once(column: str, names: Sequence[str], file: str) -> None:
    """Refuse a column that is there twice, or not at all."""
    if column not in names:
        hint = did_you_mean(column, list(names)) or f"the columns are {', '.join(names)}"
        raise DumpError(f"{file}: there is no column {column!r}", hint)
    if names.count(column) > 1:
        hint = "write the file again with one of them renamed"
        raise DumpError(f"{file}: two columns are called {column!r}", hint)

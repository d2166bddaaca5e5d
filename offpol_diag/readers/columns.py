"""Find the columns of a dump: roles, accepted types, trainers' names, overrides, and what all files share.

To support another trainer's name for a column, add it to the aliases in `ROLES`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.types as pt

from offpol_diag.errors import DumpError, did_you_mean
from offpol_diag.writer import PROMPT_IDS as PROMPT_IDS

if TYPE_CHECKING:
    from offpol_diag.readers.sources import Part

ROLLOUT, OLD, CURRENT = "rollout_log_probs", "old_log_probs", "current_log_probs"
MASK, ADVANTAGES, REWARDS = "response_mask", "advantages", "rewards"
TOKEN_IDS, ENTROPY, WEIGHT_VERSIONS = "token_ids", "entropy", "weight_versions"
REFERENCE = "reference_log_probs"
RESCORED = ("reference_entropy", "reference_rank")
"""Columns that `rescore` alone reads and writes."""
SEQUENCE, GROUP = "sequence_id", "group_id"
STEP, LAG = "step", "policy_lag"
POSITION = "token_positions"
ROLLOUT_VERSION, TRAIN_VERSION = "rollout_version", "train_version"
PROMPT_LENGTH, FINISH_REASON = "prompt_length", "finish_reason"
DIGESTS = ("weight_digest_rollout", "weight_digest_train")
COUNTS = (STEP, LAG, ROLLOUT_VERSION, TRAIN_VERSION, PROMPT_LENGTH)
SCALARS = (SEQUENCE, GROUP, *COUNTS, FINISH_REASON, *DIGESTS)
"""Columns passed to a batch as `scalars`; those in `COUNTS` are numeric."""


# ---------------------------------------------------------------- what a column holds
# A width never matters (float16 or float64, list or large_list); what an element is does. The null type will
# do for anything: it is what some writers make of a column that is empty or null throughout.

Test = Callable[[pa.DataType], bool]

LISTS: tuple[Test, ...] = (pt.is_list, pt.is_large_list, pt.is_fixed_size_list)
LISTS += (pt.is_list_view, pt.is_large_list_view)
BYTES: tuple[Test, ...] = (pt.is_binary, pt.is_large_binary, pt.is_binary_view, pt.is_fixed_size_binary)
TEXTS: tuple[Test, ...] = (pt.is_string, pt.is_large_string, pt.is_string_view, *BYTES[:3])
NUMBERS: tuple[Test, ...] = (pt.is_integer, pt.is_floating, pt.is_boolean)
FAMILIES = {"anything": (pt.is_null,), "number": NUMBERS, "text": TEXTS}


def is_list(dtype: pa.DataType) -> bool:
    """Return whether a column holds one list per row."""
    return _is_any(dtype, LISTS)


def has_runs(dtype: pa.DataType) -> bool:
    """Return whether a column holds runs of tokens, as lists of pairs or of structs."""
    return is_list(dtype) and _is_any(dtype.value_type, (*LISTS, pt.is_struct))


def stored(dtype: pa.DataType) -> pa.DataType:
    """Return a type without dictionary encoding, and the storage type of an extension type."""
    inner = dtype.value_type if pt.is_dictionary(dtype) else dtype
    return inner.storage_type if isinstance(inner, pa.BaseExtensionType) else inner


def _family(dtype: pa.DataType) -> str:
    inner = stored(dtype.value_type if is_list(dtype) else dtype)
    return next((name for name, tests in FAMILIES.items() if _is_any(inner, tests)), str(inner))


def _is_any(dtype: pa.DataType, tests: tuple[Test, ...]) -> bool:
    return any(test(dtype) for test in tests)


@dataclass(frozen=True)
class Kind:
    """A requirement on a column's type, in words and as a test."""

    needs: str
    accepts: Test


def _list_of(*tests: Test) -> Test:
    return lambda dtype: is_list(dtype) and _is_any(dtype.value_type, (*tests, pt.is_null))


def _one(*tests: Test) -> Test:
    return lambda dtype: _is_any(stored(dtype), (*tests, pt.is_null))


FLOATS = Kind("a list of floats per row", _list_of(pt.is_floating))
INTEGERS = Kind("a list of integers per row", _list_of(pt.is_integer))
FLAGS = Kind("a list of 0 and 1 per row", _list_of(*NUMBERS))
VERSIONS = Kind(
    "a list of integers or of pairs [start, version] per row",
    lambda dtype: INTEGERS.accepts(dtype) or has_runs(dtype),
)
NUMBER = Kind("one number per row", _one(*NUMBERS))
COUNT = Kind(
    NUMBER.needs,
    lambda dtype: _one(*NUMBERS[:2])(dtype) and getattr(dtype, "extension_name", "") != "arrow.bool8",
)
"""A number that is no boolean."""
NUMBER_OR_LIST = Kind(
    "one number or a list of numbers per row",
    lambda dtype: NUMBER.accepts(dtype) or _list_of(*NUMBERS)(dtype),
)
LABEL = Kind("one value per row", lambda dtype: not pt.is_nested(stored(dtype)))
TEXT = Kind("one text per row", _one(*TEXTS))
IN_LONG_FORM = "per row, as the other columns of one row per token"
INTEGER = Kind(f"one integer {IN_LONG_FORM}", _one(pt.is_integer))
PER_TOKEN = {
    FLOATS: Kind(f"one float {IN_LONG_FORM}", _one(pt.is_floating)),
    INTEGERS: INTEGER,
    VERSIONS: INTEGER,
    FLAGS: Kind(f"one 0 or 1 {IN_LONG_FORM}", _one(*NUMBERS)),
    NUMBER_OR_LIST: NUMBER,
}
"""Requirement in the wide form (a list per row) → requirement in the long form (a row per token)."""


# ---------------------------------------------------------------- roles


@dataclass(frozen=True)
class Role:
    """A role that a column can have, with trainers' names for it, as words of one text.

    `short` is accepted by `--columns`; names `per_token` are further ones in the long form (a row per token).
    """

    name: str
    kind: Kind
    aliases: str = ""
    short: str = ""
    per_token: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The canonical name and the aliases."""
        return self.name, *self.aliases.split()


ROLES = (
    Role(
        ROLLOUT,
        FLOATS,
        "rollout_logprobs rollout_logps inference_logprobs inference_log_probs generation_logprobs "
        "sampling_per_token_logps rollout_per_token_logps sampling_logprobs behavior_logprobs vllm_logprobs "
        "sglang_logprobs logprobs",
        short="rollout",
        per_token="rollout_log_prob rollout_logprob rollout_logp inference_logprob inference_log_prob "
        "generation_logprob sampling_logprob behavior_logprob vllm_logprob sglang_logprob logprob",
    ),
    Role(
        OLD,
        FLOATS,
        "old_logprobs old_logps old_logp prev_logprobs trainer_logprobs old_per_token_logps "
        "old_action_log_probs action_log_probs prox_logp log_probs",
        short="old",
        per_token="old_log_prob old_logprob old_logp prev_logprob trainer_logprob old_action_log_prob "
        "action_log_prob",
    ),
    Role(
        CURRENT,
        FLOATS,
        "current_logprobs current_logps log_prob per_token_logps",
        short="current",
        per_token="current_log_prob current_logprob current_logp",
    ),
    Role(MASK, FLAGS, "mask loss_mask loss_masks completion_mask token_loss_mask action_mask", short="mask"),
    Role(ADVANTAGES, NUMBER_OR_LIST, "advantage"),
    Role(REWARDS, NUMBER, "reward"),
    Role(TOKEN_IDS, INTEGERS, "response_token_ids response_ids completion_ids", per_token="token_id"),
    Role(ENTROPY, FLOATS, "entropies rollout_entropy old_entropy"),
    Role(REFERENCE, FLOATS, per_token="reference_log_prob"),
    Role(WEIGHT_VERSIONS, VERSIONS, "output_versions", per_token="weight_version output_version"),
    Role(POSITION, INTEGERS, short="position", per_token="position token_position pos t"),
    Role(SEQUENCE, LABEL, "sample_id sample_index", per_token="rollout_id trajectory_id request_id"),
    Role(GROUP, LABEL, "prompt_id group_index uid"),
    Role(STEP, COUNT, "global_step"),
    Role(LAG, COUNT, "staleness"),
    Role(ROLLOUT_VERSION, COUNT),
    Role(TRAIN_VERSION, COUNT),
    Role(PROMPT_LENGTH, COUNT, "prompt_len prompt_lengths"),
    Role(FINISH_REASON, TEXT),
    *(Role(name, TEXT) for name in DIGESTS),
)


# ---------------------------------------------------------------- a row is a sequence or a token


LONG_ROLES = tuple(
    replace(r, kind=PER_TOKEN.get(r.kind, r.kind), aliases=f"{r.aliases} {r.per_token}") for r in ROLES
)
"""Roles of the long form: a row is a token, with numbers in place of lists."""


def roles_of(long: bool) -> tuple[Role, ...]:
    """Return the roles of the long form, or of the wide one."""
    return LONG_ROLES if long else ROLES


def kind_of(name: str, long: bool) -> Kind:
    """Return the type requirement of a role's column."""
    return next(role.kind for role in roles_of(long) if role.name == name)


TOKENS = tuple(role.name for role in ROLES if role.kind in PER_TOKEN)
"""Roles with a value per token in the long form."""


# ---------------------------------------------------------------- columns → roles


MOST_LISTED = 50
"""Most columns that a message lists, where none can be guessed."""
NONE = "none"
"""Given to `--columns` for a column's name: no column has that role."""


def is_long(schema: pa.Schema, overrides: Mapping[str, str]) -> bool:
    """Return whether a file has the long form.

    It has if a column that can be the rollout log-probs holds one float per row and no column
    with a value per token holds lists.
    """
    types: dict[str, list[pa.DataType]] = {}
    for role in LONG_ROLES:
        if role.name in TOKENS:
            given = [overrides[word] for word in (role.name, role.short) if word in overrides]
            names = [name for name in given or role.names if schema.names.count(name) == 1]
            types[role.name] = [schema.field(name).type for name in names]
    lists = any(is_list(one) for some in types.values() for one in some)
    return not lists and any(pt.is_floating(stored(one)) for one in types[ROLLOUT])


def assigned(
    names: Sequence[str], overrides: Mapping[str, str], file: str, long: bool = False
) -> dict[str, str]:
    """Assign columns to roles: canonical name → the column's name, for the roles found.

    Overrides take precedence; `NONE` leaves a role without a column. Otherwise a role goes to the one column
    with its canonical name or one of its aliases. A column named in an override has no other role.
    """
    mapping = _given(names, overrides, file, roles_of(long))
    free = set(names).difference(mapping.values())
    for role in roles_of(long):
        candidates = [name for name in dict.fromkeys(role.names) if name in free]
        if role.name in mapping or not candidates or declined(role, overrides):
            continue
        if len(candidates) > 1 and "mask" in candidates:
            candidates.remove("mask")  # beside a name that says more it may be anything, and is ignored
        if len(candidates) > 1:
            ways = " or ".join(f"--columns {role.short or role.name}={column}" for column in candidates)
            hint = f"say which: {ways}"
            raise DumpError(
                f"{file}: {' and '.join(candidates)} can each be the {role.short or role.name}", hint
            )
        mapping[role.name] = candidates[0]
    return mapping


def resolve(
    names: Sequence[str], overrides: Mapping[str, str], file: str, long: bool = False
) -> dict[str, str]:
    """Assign columns to roles as `assigned` does, and require those that an analysis needs."""
    mapping = assigned(names, overrides, file, long)

    def lacking(what: str, hint: str) -> DumpError:
        return DumpError(f"{file}: {what}", f"{hint}; the columns are {_some(names)}")

    absent: dict[str, str] = {}  # what no column holds → the word of --columns
    if ROLLOUT not in mapping:
        absent[ROLLOUT] = "rollout"
    if OLD not in mapping and CURRENT not in mapping:
        absent[f"{OLD} or {CURRENT}"] = "old"
    if long and SEQUENCE not in mapping:
        absent[f"{SEQUENCE} (there is one row per token)"] = SEQUENCE
    if absent:
        which = "it" if len(absent) == 1 else "them"
        hint = f"name {which} with --columns {','.join(f'{word}=…' for word in absent.values())}"
        raise lacking(f"no column holds {', and none '.join(absent)}", hint)
    for column in mapping.values():
        _once(column, names, file)
    if len(one_sided := mapping.keys() & set(DIGESTS)) == 1:
        (there,) = one_sided
        (lacks,) = set(DIGESTS) - one_sided
        hint = f"digests are compared: write both, or leave this one out with --columns {there}={NONE}"
        raise DumpError(f"{file}: column {mapping[there]!r} is there without {lacks!r}", hint)
    return {role.name: mapping[role.name] for role in roles_of(long) if role.name in mapping}


def declined(role: Role, overrides: Mapping[str, str]) -> bool:
    """Return whether the user says that no column has a role."""
    return NONE in (overrides.get(role.name), overrides.get(role.short or role.name))


def _given(
    names: Sequence[str], overrides: Mapping[str, str], file: str, roles: Sequence[Role]
) -> dict[str, str]:
    words = {role.name: role for role in roles} | {role.short: role for role in roles if role.short}
    given: dict[str, str] = {}
    for word, column in overrides.items():
        role = words.get(word)
        if role is None:
            hint = did_you_mean(word, list(words)) or f"the parts are {', '.join(words)}"
            raise DumpError(f"--columns {word}={column}: no part is called {word!r}", hint)
        if column == NONE:
            continue
        if column in given.values():
            hint = "each part needs a column of its own"
            raise DumpError(f"--columns: {column!r} is given two parts", hint)
        given[role.name] = column
    _exist([*given.values()], names, file)
    return given


def _exist(columns: Sequence[str], names: Sequence[str], file: str) -> None:
    absent = [one for one in columns if one not in names]
    if absent:
        some = "no columns" if len(absent) > 1 else "no column"
        what = f"{file}: there {'are' if len(absent) > 1 else 'is'} {some} {' and '.join(map(repr, absent))}"
        raise DumpError(what, unknown(absent, names))


def unknown(columns: Sequence[str], names: Sequence[str]) -> str:
    """Return a hint on columns that a file lacks."""
    nested = {one.partition(".")[0] for one in columns if "." in one} & set(names)
    if nested:
        return (
            f"{' and '.join(map(repr, sorted(nested)))} is nested, and --columns takes names of the top "
            f"level only: write its fields there ({', '.join(one.rpartition('.')[2] for one in columns)})"
        )
    meant = [did_you_mean(one, list(names)) for one in columns]
    return "; ".join(filter(None, meant)) or f"the columns are {_some(names)}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_LISTED:,} more" if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more


def _once(column: str, names: Sequence[str], file: str) -> None:
    if names.count(column) > 1:
        hint = "write the file again with one of them renamed"
        raise DumpError(f"{file}: two columns are called {column!r}", hint)


# ---------------------------------------------------------------- which columns are read


OTHER_COLUMN = "write the column again in that type, or give the part to another column with --columns"
OTHER_GROUPS = "group by a column with one value per sequence"
DESCRIBED: tuple[Test, ...] = (pt.is_integer, pt.is_boolean, pt.is_string, pt.is_large_string)
"""Types of a column without a role that is read for the diagnosis."""


@dataclass(frozen=True)
class Plan:
    """The columns to read and their roles.

    Attributes:
        columns: canonical name → the column's name.
        extra: group-by columns without a role.
        described: further small columns, which the diagnosis searches for conspicuous groups.
        long: whether a row is a token.
        prompts: whether all files have `PROMPT_IDS`.
        bare: whether batches lack positions, turns and keys.
    """

    columns: dict[str, str]
    extra: tuple[str, ...]
    long: bool = False
    bare: bool = False
    described: tuple[str, ...] = ()
    prompts: bool = False

    @property
    def names(self) -> list[str]:
        """All columns to read, without duplicates."""
        prompts = (PROMPT_IDS,) if self.prompts else ()
        return list(dict.fromkeys((*self.columns.values(), *self.extra, *self.described, *prompts)))

    @property
    def labels(self) -> list[str]:
        """The columns that become labels of sequences, without duplicates."""
        found = (self.columns[role] for role in SCALARS if role in self.columns)
        return list(dict.fromkeys((*found, *self.extra)))

    def only(self, roles: Collection[str]) -> Plan:
        """Return a plan that reads only the columns of some roles."""
        found = {role: name for role, name in self.columns.items() if role in roles}
        return replace(self, columns=found, extra=(), described=(), prompts=False, bare=True)


def agree(parts: Sequence[Part], overrides: Mapping[str, str], group_by: Sequence[str]) -> Plan:
    """Return a plan that fits all files."""
    first = parts[0]
    names, file = first.schema.names, str(first.path)
    long = is_long(first.schema, overrides)
    mapping = resolve(names, overrides, file, long)
    versioned = {ROLLOUT_VERSION, TRAIN_VERSION} <= mapping.keys()
    known = {name for name in SCALARS if name in mapping} | ({LAG} if versioned else set())
    extra = tuple(name for name in group_by if name not in known)
    for name in extra:
        _exist([name], names, f"{file}: --group-by")
        _once(name, names, file)
        if long and name in {mapping.get(role) for role in TOKENS}:
            raise DumpError(f"{file}: --group-by: {name!r} holds a value per token", OTHER_GROUPS)
    prompts = not long and _everywhere(PROMPT_IDS, parts)
    plan = Plan(mapping, extra, long, prompts=prompts)
    _check_types(first, plan)
    for other in parts[1:]:
        _check_same(first, other, plan, overrides)
        _check_types(other, plan)
    return replace(plan, described=_described(parts, plan))


def ignored(parts: Sequence[Part], plan: Plan) -> tuple[str, ...]:
    """Return the columns of all files that nobody reads, in their order."""
    names = dict.fromkeys(parts[0].schema.names)
    for part in parts[1:]:
        if not part.schema.equals(parts[0].schema):
            names |= dict.fromkeys(part.schema.names)
    read = {*plan.names, *RESCORED}
    return tuple(name for name in names if name not in read)


def _described(parts: Sequence[Part], plan: Plan) -> tuple[str, ...]:
    """Return text, integer or boolean columns without a role that all files have with one type."""
    if plan.long:
        return ()
    fields = (one for one in parts[0].schema if _is_any(stored(one.type), DESCRIBED))
    free = [one for one in fields if one.name not in plan.names and _everywhere(one.name, parts)]
    return tuple(x.name for x in free if len({part.schema.field(x.name).type for part in parts}) == 1)


def _everywhere(name: str, parts: Sequence[Part]) -> bool:
    return all(part.schema.names.count(name) == 1 for part in parts)


def _check_types(part: Part, plan: Plan) -> None:
    needs = [(name, kind_of(role, plan.long), OTHER_COLUMN) for role, name in plan.columns.items()]
    needs += [(name, LABEL, OTHER_GROUPS) for name in plan.extra]
    needs += [(PROMPT_IDS, INTEGERS, "write it in that type, or under another name")] * plan.prompts
    for name, kind, hint in needs:
        dtype = part.schema.field(name).type
        if not kind.accepts(dtype):
            raise DumpError(f"{part.path}: column {name!r} holds {dtype}, and {kind.needs} is needed", hint)


def _check_same(first: Part, other: Part, plan: Plan, overrides: Mapping[str, str]) -> None:
    """Refuse a file whose columns differ from the first file's in name or family of types."""
    there = other.schema.names

    def differ(what: str) -> DumpError:
        hint = "read files of one form at a time, or write them alike"
        return DumpError(f"{first.path} and {other.path} differ: column {what}", hint)

    for name in plan.names:
        if name not in there:
            raise differ(f"{name!r} is in the first and missing in the second")
    for role, name in resolve(there, overrides, str(other.path), plan.long).items():
        if plan.columns.get(role) != name:
            raise differ(f"{name!r} is in the second and missing in the first")
    for name in plan.names:
        one, two = (part.schema.field(name).type for part in (first, other))
        if is_list(one) != is_list(two) or len({_family(one), _family(two)} - {"anything"}) > 1:
            raise differ(f"{name!r} holds {one} in the first and {two} in the second")

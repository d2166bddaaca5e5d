"""How an argument of a command is declared and checked, for the command line, Python and the settings file.

`opt` declares a field of a model with the help and the spelling of its option; `asked` makes the model of
what is given. To reword a message of pydantic, add a row to `WORDS`, or of one field to `GIVE`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from offpol_diag.errors import OffpolError, UsageError, did_you_mean

SHELL, PYTHON = "shell", "python"
MOST_SEED = 2**63 - 1
LONGEST = 80
"""Maximum characters of a value in a message."""
NUMBER = re.compile(r"[+-]?[0-9]{1,20}(\.[0-9]{1,20})?")


class Option(NamedTuple):
    """How a field is given.

    Attributes:
        metavar: what the help calls its value.
        panel: the part of the help that lists it.
        flags: its spellings on the command line; empty for `--name-of-the-field`.
        env: whether an environment variable sets it (OFFPOL_DIAG_NAME), and so the settings file.
        file: whether the settings file sets it.
        only: SHELL or PYTHON, where it exists in one of them.
        many: whether its flag may be repeated.
        required: whether the command line must have it, though Python has no such argument.
        usual: the default in the help, where it is not the model's.
        bare: its value on the command line where its flag stands without one; empty where it needs one.
    """

    metavar: str = ""
    panel: str = ""
    flags: tuple[str, ...] = ()
    env: bool = False
    file: bool = False
    only: str = ""
    many: bool = False
    required: bool = False
    usual: str = ""
    bare: str = ""


def opt(default: Any, metavar: str = "", panel: str = "", *flags: str, **more: Any) -> Any:
    """Return a field of pydantic with its `Option`; `more` are further attributes of that."""
    extra: Any = {"option": Option(metavar, panel, flags, **more)}
    return Field(default, json_schema_extra=extra)


# ---------------------------------------------------------------- kinds of values; text is what a flag has


def split(value: Any) -> Any:
    """Parse `a,b` into a tuple of words; anything else stays."""
    if not isinstance(value, str):
        return value
    return tuple(word.strip() for word in value.split(",") if word.strip())


def _paired(value: object) -> object:
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    for ours, sign, theirs in pairs:
        if not ours.strip() or not theirs.strip():
            raise ValueError(f'"{ours}{sign}{theirs}" names no column')
    return {ours.strip(): theirs.strip() for ours, _, theirs in pairs}


def _whole(value: Any) -> object:
    text = isinstance(value, str) and re.fullmatch("-?[0-9]{1,20}", value)
    return value if isinstance(value, bool) or not (text or isinstance(value, Integral)) else int(value)


def _threads(value: Any) -> object:
    return None if value == "auto" else _whole(value)


def _sample(value: Any) -> object:
    return None if value == "all" else _whole(value)


def _number(value: Any) -> object:
    if isinstance(value, bool):
        raise ValueError(f"it cannot be {value}")
    return float(value) if isinstance(value, Real) else value


def _joined(value: Any) -> object:
    several = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    return ",".join(map(str, value)) if several else value


def _limits(value: object) -> object:
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return tuple(f"{name}={limit}" for name, limit in value.items())
    return value


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, str | Path) and value != "" else value


Names = Annotated[tuple[str, ...], BeforeValidator(split)]
Pairs = Annotated[dict[str, str] | None, BeforeValidator(_paired)]
Whole = Annotated[int, Field(strict=True), BeforeValidator(_whole)]
Seed = Annotated[Whole, Field(ge=0, le=MOST_SEED)]
Count = Annotated[Whole, Field(ge=1, le=MOST_SEED)]
Threads = Annotated[Annotated[int, Field(strict=True, ge=1, le=9999)] | None, BeforeValidator(_threads)]
Sample = Annotated[Annotated[int, Field(strict=True, ge=2)] | None, BeforeValidator(_sample)]
Device = Annotated[str, Field(pattern="^(auto|cpu|cuda(:[0-9]+)?)$")]
Number = Annotated[float, BeforeValidator(_number)]
Joined = Annotated[str, BeforeValidator(_joined)]
Limits = Annotated[tuple[str, ...], BeforeValidator(_limits)]
Paths = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]
Files = Annotated[tuple[Path, ...], Field(min_length=1), BeforeValidator(_one_or_many)]
Progress = Callable[[int, int], None] | Literal[False] | None

# ---------------------------------------------------------------- a request


class Fields(BaseModel):
    """Options that several commands have; the text below a field is its help."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        defer_build=True,
        use_attribute_docstrings=True,
    )


class Request(Fields):
    """What any command is asked."""

    _places: Mapping[str, str] = PrivateAttr(default_factory=dict)
    _file: str = PrivateAttr("")

    quiet: bool = opt(False, "", "", "--quiet", "-q", env=True, only=SHELL)
    """One line; no progress and no remarks."""

    @property
    def shell(self) -> bool:
        """Whether the command line asks."""
        return bool(self._places)

    def named(self, field: str) -> str:
        """Return how the user wrote a field: `--against`, or `against` in Python."""
        return self._places.get(field, field)

    def example(self, field: str, value: str) -> str:
        """Return how to give a field: `--keep 0.95`, or `keep="0.95"` in Python."""
        return f"--{field.replace('_', '-')} {value}" if self.shell else f'{field}="{value}"'

    def from_file(self, field: str) -> str:
        """Return the settings file, if it sets a field; else nothing."""
        return self._file if self._file and self.named(field).startswith(f"{self._file}: ") else ""

    @contextmanager
    def judged(self, field: str) -> Iterator[None]:
        """Name the settings file in errors about a field that was set there, within the block."""
        try:
            yield
        except OffpolError as error:
            if not self.from_file(field):
                raise
            raise UsageError(f"{self.named(field)}: {error.message}", error.hint) from error


# ---------------------------------------------------------------- options of a model


def options(model: type[Request], without: str = "") -> dict[str, Option]:
    """Return the options of a model by field, but for those only in `without` (SHELL or PYTHON)."""
    fields: Any = {name: field.json_schema_extra for name, field in model.model_fields.items()}
    found = {name: extra["option"] for name, extra in fields.items()}
    return {name: one for name, one in found.items() if not without or one.only != without}


def key(field: str, option: Option) -> str:
    """Return the name of a field in the settings file: that of its flag."""
    return (option.flags[0] if option.flags else field).strip("-").replace("-", "_")


def settings(model: type[Request]) -> dict[str, str]:
    """Return the keys of the settings file that a model reads, with their fields."""
    return {key(name, one): name for name, one in options(model).items() if one.env or one.file}


# ---------------------------------------------------------------- checks

WORDS: Mapping[str, str] = {
    "bool_parsing": "True or False",
    "bool_type": "True or False",
    "float_parsing": "a number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "literal_error": "{expected}",
    "path_type": "the path of a file",
    "string_type": "a text",
    "tuple_type": "a list",
}
"""pydantic's type of a mistake → what to give instead."""
NAMES = 'a list of names, such as ["{}"]'
BOUNDED = '{"k3": 0.002}, or --max k3=0.002'
GIVE: Mapping[str, str] = {
    "at": "thresholds, such as 1.5,2,3",
    "batch_tokens": "a whole number from 1 on",
    "by_step": NAMES.format("k3"),
    "columns": '{"rollout": "my_logps"}, or --columns rollout=my_logps; mask=none says that no column is it',
    "device": "auto, cpu, cuda or cuda:N",
    "fail_on": "bug, cannot_tell or honest_mismatch",
    "group_by": NAMES.format("host"),
    "keep": "a share, such as 0.95",
    "logged": "the path of a file or folder of curves, or several",
    "max": BOUNDED,
    "min": BOUNDED,
    "progress": "a function of rows done and rows in all, or None or False for none",
    "seed": f"a whole number from 0 to {MOST_SEED}",
    "sample": "a number of prompts from 2 on, or all",
    "which": "the name of a bound, such as weight.upper",
    "threads": "a number of threads from 1 to 9999, or auto for one per core",
}
"""Field → what to give instead, where that says more."""
Asked = TypeVar("Asked", bound=Request)


def asked(
    model: type[Asked], given: Mapping[str, Any], places: Mapping[str, str] | None = None, file: str = ""
) -> Asked:
    """Check what a command is asked; the one place where a mistake in it becomes a message.

    Args:
        model: what the command can be asked.
        given: field → value; text is read as the value of a flag.
        places: field → where it was given (`--seed`); None in Python, where it is an argument of that name.
        file: the settings file, where there is one.

    Raises:
        UsageError: an argument is unknown, or has a value that it cannot have.
    """
    known = list(options(model, PYTHON if places else SHELL))
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f"there are {', '.join(known)}"
            raise UsageError(f"{model.__name__.lower()} has no argument {name!r}", hint)
    try:
        made = model(**given)
    except ValidationError as error:
        raise _refused(error.errors()[0], given, places or {}) from error
    made._places, made._file = places or {}, file
    return made


def _refused(mistake: Any, given: Mapping[str, Any], places: Mapping[str, str]) -> UsageError:
    """Return pydantic's mistake in our words."""
    name, context = mistake["loc"][0], mistake.get("ctx", {})
    value = given.get(name)
    why = str(context["error"]) if mistake["type"] == "value_error" else f"it cannot be {shown(value)}"
    near = did_you_mean(str(value), re.findall("'(.+?)'", str(context.get("expected", ""))))
    instead = GIVE.get(name) or WORDS.get(mistake["type"], mistake["msg"]).format(**context)
    return UsageError(f"{places.get(name, name)}: {why}", near or f"give {instead}")


def shown(value: object) -> str:
    """Return a value for a message, a number in text as a number; of what is no plain value its type."""
    if isinstance(value, str) and NUMBER.fullmatch(value):
        return value
    if isinstance(value, Integral | Real | str | bytes | complex | list | tuple | Mapping | Path | None):
        text = repr(value)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
    return f"a {type(value).__name__}"

"""One model per command: the command line and Python take the same, and refuse it with the same words."""

from __future__ import annotations

import inspect
import math

import pytest
from typer import Context
from typer.main import get_command
from typer.testing import CliRunner

import offpol_diag
from offpol_diag import api, requests
from offpol_diag.cli import COMMANDS, app
from offpol_diag.errors import OffpolError, UsageError
from offpol_diag.options import GIVE, PYTHON, SHELL, asked, options

SAMPLE = "sample_data/healthy.parquet"
FUNCTIONS = {name: getattr(offpol_diag, name) for name in api.__all__ if name != "Report"}


def flags(command):
    """Return field → spellings of a command's options, as typer has them."""
    whole = get_command(app)
    found = whole.commands[command].get_params(Context(whole))
    return {one.name: one.opts for one in found if one.name != "help"}


# ---------------------------------------------------------------- one set of arguments


@pytest.mark.parametrize("command", requests.MODELS)
def test_a_commands_options_are_the_fields_of_its_model(command):
    assert set(flags(command)) == set(options(requests.MODELS[command], PYTHON))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_functions_arguments_are_the_fields_of_its_model_with_their_defaults(name):
    fields = requests.MODELS[name].model_fields
    given = {key: one.default for key, one in inspect.signature(FUNCTIONS[name]).parameters.items()}
    assert given.pop("what") is inspect.Parameter.empty
    given.pop("other", None)
    assert set(given) == set(options(requests.MODELS[name], SHELL))
    positional = {key for key, default in given.items() if default is inspect.Parameter.empty}
    assert positional == {"sweep": {"preset"}, "rescore": {"model"}}.get(name, set())
    assert {key: given[key] for key in given.keys() - positional} == {
        key: fields[key].default for key in given.keys() - positional
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_function_takes_is_typed_too(name):
    """`how` is typed with every argument that the function does not spell out."""
    how = api.Reads if name == "rescore" else api.Computes
    own = inspect.signature(inspect.unwrap(FUNCTIONS[name]), follow_wrapped=False).parameters
    assert set(how.__annotations__) <= set(own)
    assert set(FUNCTIONS[name].__annotations__) | set(how.__annotations__) >= set(own)


def test_every_option_but_those_listed_is_in_python_too():
    """Python lacks what says where a result goes, and has what only a program can give."""
    shell = {"quiet", "verbose", "strict", "out", "no_html", "json_file", "md", "junit"}
    shell |= {"tokenizer", "dump", "as_one", "explain"}
    for name in FUNCTIONS:
        rows = options(requests.MODELS[name])
        alone = {field for field, one in rows.items() if one.only == SHELL}
        assert alone <= shell, name
        alone = {field for field, one in rows.items() if one.only == PYTHON}
        assert alone <= {"reading", "progress", "batch_tokens", "by_step", "group_by"}, name


def test_every_command_has_a_model_and_words_for_its_fields():
    assert [one.__name__ for one in COMMANDS] == [*requests.MODELS]
    fields = {name for model in requests.MODELS.values() for name in model.model_fields}
    assert GIVE.keys() <= fields
    for model in requests.MODELS.values():
        assert all(model.model_fields[name].description for name in options(model, PYTHON))


# ---------------------------------------------------------------- one message


WRONG = [
    ("analyze", "seed", "x", "seed: it cannot be 'x'"),
    ("analyze", "seed", -1, "seed: it cannot be -1"),
    ("analyze", "seed", 1.5, "seed: it cannot be 1.5"),
    ("analyze", "seed", 2**63, "seed: it cannot be 9223372036854775808"),
    ("analyze", "threads", 0, "threads: it cannot be 0"),
    ("analyze", "threads", "many", "threads: it cannot be 'many'"),
    ("analyze", "device", "tpu", "device: it cannot be 'tpu'"),
    ("analyze", "engine", "rey", "engine: it cannot be 'rey'"),
    ("analyze", "on_bad_row", "skipp", "on_bad_row: it cannot be 'skipp'"),
    ("analyze", "columns", "rollout", 'columns: "rollout" names no column'),
    ("analyze", "columns", "rollout=", 'columns: "rollout=" names no column'),
    ("analyze", "presets", "tokn_is", 'unknown preset "tokn_is"'),
    ("analyze", "presets", ",", "no preset is named"),
    ("analyze", "trainer", "verll", 'unknown trainer "verll"'),
    ("analyze", "preset_file", "none.toml", "none.toml"),
    ("analyze", "group_by", "nosuch", "nosuch"),
    ("doctor", "seed", "x", "seed: it cannot be 'x'"),
    ("compare", "against", "all", "against: 'all' names"),
    ("compare", "against", "tokn_is", 'unknown preset "tokn_is"'),
    ("compare", "presets", "tokn_is", 'unknown preset "tokn_is"'),
    ("sweep", "which", "weight.uper", 'has no bound "weight.uper"'),
    ("sweep", "keep", "x", "keep: it cannot be 'x'"),
    ("sweep", "keep", 2.0, "keep 2"),
    ("sweep", "keep", math.nan, "above 0 and at most 1"),
    ("sweep", "at", "2,1", "thresholds must rise"),
    ("sweep", "trainer", "verl", "prints the bounds that"),
    ("gate", "max", "k3", "max"),
    ("gate", "fail_on", "bugs", "bugs"),
    ("gate", "gates", "none.toml", "none.toml"),
    ("gate", "baseline", "none.json", "none.json"),
    ("check", "logged", "none.jsonl", "none.jsonl"),
    ("check", "trainer", "verll", 'unknown trainer "verll"'),
]
BESIDE = {"sweep": {"preset": "token_is"}, "gate": {"max": "k3=1"}}
"""Command → what it cannot do without."""


def plain(text, command):
    """Return a message with options as Python names them."""
    for field, spellings in flags(command).items():
        for one in spellings if spellings[0].startswith("-") else ():
            text = text.replace(f"{one}:", f"{field}:").replace(f"{one} ", f"{field} ")
    return text.replace("--", "")


@pytest.mark.parametrize(("command", "field", "value", "said"), WRONG)
def test_a_wrong_value_is_refused_alike(command, field, value, said):
    given = BESIDE.get(command, {}) | {field: value}
    listed = {key: [one] if key == "max" else one for key, one in given.items()}
    with pytest.raises(OffpolError) as refused:
        FUNCTIONS[command](SAMPLE, **listed)
    known = flags(command)
    words = [word for name, one in given.items() for word in (known[name][0], str(one))]
    ran = CliRunner().invoke(app, [command, SAMPLE, *words], env={"OFFPOL_DIAG_QUIET": "1"})
    assert ran.exit_code == 2, ran.output
    message, _, hint = ran.stderr.removeprefix("error: ").partition("\n\nhint: ")
    assert said in refused.value.message
    assert plain(message.strip(), command) == plain(refused.value.message, command)
    if "=" not in refused.value.hint:  # which is an example of the one or of the other
        assert plain(hint.strip(), command) == plain(refused.value.hint, command)


def test_a_near_word_is_suggested_for_a_name_and_for_a_value():
    with pytest.raises(UsageError) as refused:
        asked(requests.Analyze, {"sead": 1})
    assert (refused.value.message, refused.value.hint) == (
        "analyze has no argument 'sead'",
        "did you mean seed?",
    )
    with pytest.raises(UsageError) as refused:
        asked(requests.Analyze, {"on_bad_row": "skipp"})
    assert refused.value.hint == "did you mean skip?"


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"threads": "4"}, {"threads": 4}),
        ({"threads": "auto"}, {"threads": None}),
        ({"seed": "7"}, {"seed": 7}),
        ({"columns": "rollout=a, old=b"}, {"columns": {"rollout": "a", "old": "b"}}),
        ({"group_by": "host, env"}, {"group_by": ["host", "env"]}),
        ({"sequences": "a.parquet"}, {"sequences": api.Path("a.parquet")}),
    ],
)
def test_text_is_read_as_the_value_of_a_flag(given, same):
    assert asked(requests.Analyze, given) == asked(requests.Analyze, same)

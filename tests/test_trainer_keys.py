"""Every printed key is one that its trainer has, with a value that it takes, and is read."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest

from offpol_diag.errors import ConfigError
from offpol_diag.presets import Clip, Preset, Shape, Weight
from offpol_diag.presets.catalogue import load
from offpol_diag.trainers import TRAINERS, Snippet, config_for, sayable
from offpol_diag.trainers.schema import Schema, schema
from tests import trainer_settings

CATALOGUE = load()
VESPO = ("k_positive", "lambda_positive", "k_negative", "lambda_negative")
FIPO = {"half_life": 8.0, "lowest": 0.7, "highest": 1.3, "threshold": 2.0}
TUNED = {
    "dual": replace(CATALOGUE["token_is"], clip=Clip(0.1, 0.28, 4.0)),
    "roll_cispo": replace(CATALOGUE["cispo"], clip=Clip(0.1, 0.1, None)),
    "dual_gspo": replace(CATALOGUE["gspo"], clip=Clip(0.1, 0.28, 4.0)),
    "normalized": replace(CATALOGUE["bypass_pg_is"], weight=Weight("sum", upper=2.0, normalize=True)),
    "steep_sapo": replace(CATALOGUE["sapo"], shape=Shape(2.0, 3.0)),
    "own_vespo": replace(CATALOGUE["trl_vespo"], shape=Shape(**dict.fromkeys(VESPO, 1.5))),
    "own_fipo": replace(CATALOGUE["swift_fipo"], shape=Shape(**FIPO)),
    "weighted_gspo": replace(CATALOGUE["nemo_rl_tis"], loss="gspo"),
}
PRESETS: dict[str, Preset] = {**CATALOGUE, **TUNED}
Keys = dict[str, Any]


# ---------------------------------------------------------------- readers


def scalar(word: str) -> Any:
    try:
        return int(word) if word.isdigit() else float(word)
    except ValueError:
        return word


def flags(text: str) -> Keys:
    """Each flag as it stands, whether its trainer has it or not."""
    found: Keys = {}
    for part in re.split(r"(?:^|\s)--", text.replace("\\\n", " "))[1:]:
        key, *values = shlex.split(part)
        given = [scalar(word) for word in values]
        found[key] = True if not given else given[0] if len(given) == 1 else tuple(given)
    return found


READERS = {
    "yaml": trainer_settings.read_yaml,
    "toml": trainer_settings.read_toml,
    "flags": flags,
    "hydra": trainer_settings.read_hydra,
    "python": lambda text: getattr(trainer_settings, "read_dict" if " = {" in text else "read_call")(text),
}


def read(snippet: Snippet) -> Keys:
    keys = READERS[snippet.language](snippet.text) if snippet.text else {}
    return {f"{snippet.file}/{key}": value for key, value in keys.items()} if snippet.file else keys


def versions(snippet: Snippet, table: Schema) -> tuple[str, ...]:
    """Those that its heading names."""
    newest, oldest = snippet.age
    return table.versions[len(table.versions) - 1 - oldest : len(table.versions) - newest]


# ---------------------------------------------------------------- all presets, all trainers


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_printed_key_is_one_that_its_versions_take_and_each_key_is_printed_or_asked_for(
    trainer: str,
) -> None:
    """A key that nothing prints could be wrong without anything to tell."""
    table, printed = schema(trainer), set()
    for name, preset in PRESETS.items():
        if trainer not in sayable(preset):
            continue
        snippets = config_for(preset, trainer).snippets
        settings = [read(snippet) for snippet in snippets]
        every = {key: value for one in settings for key, value in one.items()}
        printed |= set(every)
        beside = every if any(one.file and keys for one, keys in zip(snippets, settings, strict=True)) else {}
        for snippet, keys in zip(snippets, settings, strict=True):
            assert versions(snippet, table), name
            for version in versions(snippet, table):
                assert table.errors({**keys, **beside}, version) == [], name
    asked = {key for rule in table.rules for key in (*rule.when, *rule.need)}

    assert {key for key in table.keys if "[]" not in key} - printed - asked == set()


# ---------------------------------------------------------------- the tables themselves


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_table_says_where_each_row_was_read(trainer: str) -> None:
    table = schema(trainer)

    assert re.search(r"\b[0-9a-f]{7,9}\b", table.source)
    assert all(key.file for rows in table.keys.values() for key in rows)
    assert all(rule.file and rule.why for rule in table.rules)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_table_names_only_versions_and_keys_that_it_has(trainer: str) -> None:
    table = schema(trainer)
    rows = [*(key for rows in table.keys.values() for key in rows), *table.rules]
    named = {one for row in rows for one in (row.since, row.until) if one}
    keys = {key for rule in table.rules for key in (*rule.when, *rule.need)}

    assert named <= set(table.versions)
    assert keys <= set(table.keys)


def test_every_trainer_has_a_table_and_every_table_a_trainer() -> None:
    files = resources.files("offpol_diag.trainers").joinpath("keys").iterdir()

    assert {one.name.removesuffix(".toml") for one in files if one.name.endswith(".toml")} == set(TRAINERS)


# ---------------------------------------------------------------- what they would have caught


WRONG = {
    "AReaL's M2PO without the decoupled loss": (
        "areal",
        {"actor.use_decoupled_loss": False, "actor.recompute_logprob": True, "actor.m2_threshold": 0.04},
    ),
    "ROLL's variant outside its worker": ("roll", {"pg_variant": "cispo"}),
    "ROLL's variant of a worker that does not read it": ("roll", {"actor_train.pg_variant": "cispo"}),
    "ROLL's bounds of CISPO": ("roll", {"actor_train.cispo_epsilon_low": 1.0}),
    "OpenRLHF's two forms at once": (
        "openrlhf",
        {"algo.advantage.is_correction_enable": True, "algo.advantage.is_correction_level": "token"},
    ),
    "NeMo-RL's ratio without a type": (
        "nemo-rl",
        {
            "loss_fn.use_importance_sampling_correction": True,
            "loss_fn.truncated_importance_sampling_type": None,
            "loss_fn.truncated_importance_sampling_ratio": 2.0,
        },
    ),
    "prime-rl's keys of two releases at once": (
        "prime-rl",
        {"trainer.loss.token_mask_low": 0.1, "trainer.loss.type": "ipo"},
    ),
    "verl's keys of five days": ("verl", {"algorithm.rollout_correction.use_pure_rollout_correction": True}),
    "verl's bypass without the actor's copy": (
        "verl",
        {
            "algorithm.rollout_correction.bypass_mode": True,
            "algorithm.rollout_correction.loss_type": "reinforce",
        },
    ),
    "ms-swift's weights without the rollout's log-probs": (
        "ms-swift",
        {"rollout_importance_sampling_mode": "token_truncate"},
    ),
    "Flash-RL's cap without the rollout's log-probs": (
        "flash-rl",
        {"actor_rollout_ref.actor.tis_imp_ratio_cap": 2.0},
    ),
    "slime's veto outside use_rs": (
        "slime",
        {"mis.yaml/use_rs": False, "mis.yaml/rs_veto_threshold": 1e-4},
    ),
    "a number where a word belongs": ("verl", {"algorithm.rollout_correction.rollout_is": 2.0}),
    "true for a number": ("areal", {"actor.eps_clip": True}),
    "a third bound": ("openrlhf", {"actor.eps_clip_low_high": (0.1, 0.2, 0.3)}),
    "an option that is none": ("verl", {"algorithm.rollout_correction.rollout_rs": "token_k1,seq_max_k1"}),
    "an upper bound that is not above 1": ("open-instruct", {"rho_mask_upper_bound": 0.5}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_configuration_that_does_not_do_what_it_says_is_refused(what: str) -> None:
    trainer, settings = WRONG[what]

    with pytest.raises(ConfigError):
        schema(trainer).span(settings)


def test_adv_tau_begins_at_0_3_0() -> None:
    settings = {"trainer.loss.ratio_type": "token", "trainer.loss.adv_tau": 1.0}

    assert schema("prime-rl").errors(settings, "0.2")
    assert not schema("prime-rl").errors(settings, "0.3.0")


def test_a_span_has_no_gap() -> None:
    """rollout_is takes the same words in every version of the block."""
    table = schema("verl")

    first, last = table.span({"algorithm.rollout_correction.rollout_is": None})

    assert (table.versions[first], table.versions[last]) == ("0.6.1", "0.9.0")
    assert table.heading(first, last) == "verl from 0.6.1"
    assert table.heading(1, 2) == "verl from 0.6.1, before 0.7.1"

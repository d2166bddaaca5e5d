"""Printed configurations: read back by real readers, and run, they do what the preset does."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from offpol_diag.cli import app
from offpol_diag.errors import ConfigError, PresetError, UsageError
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight
from offpol_diag.presets.catalogue import load
from offpol_diag.presets.tuning import tuned
from offpol_diag.trainers import TRAINERS, Config, Snippet, config_for, sayable
from offpol_diag.trainers.schema import inverse, number
from tests import oracles, trainer_settings
from tests.trainer_settings import Flat
from tests.trainers.padded import Padded, padded

CATALOGUE = load()
RAW, TIS = Weight(action="none"), Weight(upper=2.0)
OWN = {
    "product_clip_gspo": Preset("", "", weight=Weight("sum", lower=0.2, upper=5.0), loss="gspo"),
    "raw_counted_above_2": Preset("", "", weight=Weight(action="none", upper=2.0)),
    "raw_product": Preset("", "", weight=Weight("sum", "none")),
    "mask_from_below": Preset("", "", weight=Weight(action="mask", lower=0.5)),
    "clip_from_below": Preset("", "", weight=Weight(lower=0.5)),
    "tokens_above": Preset("", "", weight=TIS, reject=(Reject(lower=0.9),)),
    "tokens_below": Preset("", "", weight=RAW, reject=(Reject(upper=1.1),)),
    "narrow_in_wide": Preset("", "", weight=Weight(upper=9.0), reject=(Reject(lower=0.9, upper=1.1),)),
    "wide_in_narrow": Preset("", "", weight=Weight(upper=1.1), reject=(Reject(lower=0.9, upper=9.0),)),
    "means_above": Preset("", "", weight=RAW, reject=(Reject(over="mean", lower=0.99),)),
    "k1_of_tokens": Preset("", "", weight=RAW, reject=(Reject("k1", lower=-0.2, upper=1.0),)),
    "k1_of_means": Preset("", "", weight=RAW, reject=(Reject("k1", "mean", upper=0.01),)),
    "two_rules": Preset("", "", reject=(Reject(upper=1.1), Reject("k3", "mean", upper=0.01))),
    "veto_above": Preset("", "", weight=TIS, veto=Veto(upper=3.0)),
    "product_of_all": Preset("", "", weight=Weight("sum", upper=2.0), reject=(Reject(upper=1.1),)),
    "normalized_mask": Preset("", "", weight=Weight(action="mask", upper=2.0, normalize=True)),
    "normalized_raw": Preset("", "", weight=replace(RAW, normalize=True), reject=(Reject(upper=1.1),)),
    "unclipped_below": Preset("", "", weight=TIS, clip=Clip(None, 0.28, None)),
    "cispo_two_sided": Preset("", "", loss="cispo", clip=Clip(0.5, 2.0)),
    "error_and_icepop": Preset(
        "",
        "",
        weight=Weight(action="mask", upper=2.0),
        reject=(Reject("mult_prob_error", "mean", upper=1.5),),
    ),
}
"""Corrections that are no row of the catalogue, where a translator could go wrong."""
PRESETS = {**CATALOGUE, **{name: replace(one, name=name) for name, one in OWN.items()}}
PAIRS = [(name, trainer) for name, one in PRESETS.items() for trainer in sayable(one)]
"""Every preset and every trainer that can say it, whichever it is from."""


def settings_of(snippet: Snippet, trainer: str) -> Flat:
    """A snippet as its own reader reads it."""
    readers = {
        "yaml": trainer_settings.read_yaml,
        "hydra": trainer_settings.read_hydra,
        "toml": trainer_settings.read_toml,
        "flags": lambda text: trainer_settings.read_flags(text, command_line(snippet, trainer)),
        "python": trainer_settings.read_dict if trainer == "colossalai" else trainer_settings.read_call,
    }
    return readers[snippet.language](snippet.text) if snippet.text or snippet.language == "flags" else {}


def command_line(snippet: Snippet, trainer: str) -> str:
    """Whose flags they are: OpenRLHF has had three spellings."""
    if trainer != "openrlhf":
        return trainer
    newest = "from 2026-09" in snippet.versions
    return (
        "openrlhf of 2026-09"
        if newest
        else "openrlhf"
        if "from 0.10.2" in snippet.versions
        else "openrlhf before 0.10.2"
    )


def alternatives(config: Config) -> list[Flat]:
    """Each way in which a configuration is written, as settings; a file goes with the flags that name it."""
    if any(one.file for one in config.snippets):
        return [{k: v for one in config.snippets for k, v in settings_of(one, config.trainer).items()}]
    return [settings_of(one, config.trainer) for one in config.snippets]


@cache
def batch() -> tuple[tuple[oracles.Sequence, ...], Padded]:
    """Ragged sequences of several turns, all three policies, one advantage each, a few wild tokens."""
    dice = random.Random(8)
    rows = [made_row(dice) for _ in range(160)]
    return tuple(oracles.sequences(rows)), padded(rows)


def made_row(dice: random.Random) -> dict[str, Any]:
    """A row of three turns at most, with a masked token between two of them."""
    n = dice.randint(1, 8)
    wild = dice.random() < 0.25
    spread = dice.choice((0.0005, 0.01, 0.3))
    rollout = [-dice.expovariate(1.0) - (6.0 if wild else 1e-3) for _ in range(n)]
    old = [q + step(dice, spread, wild and t == 0, q) for t, q in enumerate(rollout)]
    current = [q + step(dice, spread, wild and t == n - 1, q) for t, q in enumerate(rollout)]
    advantage, mask = dice.choice((-1.0, 0.0, 0.7)), [1] * n
    for t in sorted({-(-n * i // 3) for i in (1, 2)} - {0, n}, reverse=True):
        for column, between in ((rollout, -3.0), (old, -1.0), (current, -2.0), (mask, 0)):
            column.insert(t, between)
    policies = {"rollout_log_probs": rollout, "old_log_probs": old, "current_log_probs": current}
    return {**policies, "response_mask": mask, "advantages": [advantage] * len(mask)}


def step(dice: random.Random, spread: float, wild: bool, q: float) -> float:
    """A drift that leaves the probability below 1; a wild one is at most 9.5 nats."""
    far = dice.choice((-9.5, -5.0, -1.5, 1.2, 4.7)) * dice.uniform(0.98, 1.0)  # of equals M2PO drops some
    drift = far if wild else dice.gauss(0, spread)
    return min(drift, -q - 1e-4)


@cache
def expected(preset: Preset) -> list[float]:
    """The textbook: what multiplies the loss of each token."""
    data = list(batch()[0])
    scope = oracles.scopes_of(data, preset)[None]
    done = [oracles.apply(s, preset, scope) for s in data]
    norm = oracles._norms(data, done, preset)[None]
    return [w / norm if k else 0.0 for a in done for w, k in zip(a.weights, a.kept, strict=True)]


# ---------------------------------------------------------------- what is printed does what the preset does


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_is_printed_does_what_the_preset_does(trainer: str) -> None:
    p = batch()[1]
    for name in (name for name, other in PAIRS if other == trainer):
        preset = PRESETS[name]
        clip = (1.0 if preset.clip.low is None else preset.clip.low, preset.clip.high)
        anchor = "old" if preset.policy == "old" else "rollout"

        for settings in alternatives(config_for(preset, trainer)):
            did = trainer_settings.TRAINERS[trainer](settings, p)

            assert did.loss == preset.loss, name
            assert did.anchor == anchor, name
            unclipped = preset.loss in ("reinforce", "surrogate", "sapo", "vespo", "dro")
            assert unclipped or did.clip == pytest.approx(clip), name
            np.testing.assert_allclose(
                did.verdict.factor[p.mask], expected(preset), rtol=1e-9, atol=1e-300, err_msg=name
            )


def test_the_batch_reaches_every_rule() -> None:
    """Else a wrong bound could pass: every preset that rejects rejects some of it and keeps some."""
    shares = {
        name: [w > 0 for w in expected(one)]
        for name, one in PRESETS.items()
        if (one.reject or one.veto) and one.apply
    }

    assert [name for name, kept in shares.items() if all(kept) or not any(kept)] == []


def test_every_trainer_that_a_row_names_can_say_it() -> None:
    for name, preset in CATALOGUE.items():
        assert set(preset.trainers) <= set(TRAINERS), name
        assert sayable(preset, preset.trainers) == preset.trainers, name


@pytest.mark.parametrize("trainer", TRAINERS)
def test_overrides_say_what_the_yaml_says(trainer: str) -> None:
    for name in (name for name, other in PAIRS if other == trainer):
        said = config_for(PRESETS[name], trainer).snippets
        yaml = [settings_of(one, trainer) for one in said if one.language == "yaml" and not one.file]
        hydra = [settings_of(one, trainer) for one in said if one.language == "hydra"]

        assert not hydra or hydra == yaml


@pytest.mark.parametrize("trainer", TRAINERS)
def test_everything_but_the_snippets_is_a_comment(trainer: str) -> None:
    for name in (name for name, other in PAIRS if other == trainer):
        config = config_for(PRESETS[name], trainer)
        rest = config.text()
        for snippet in config.snippets:
            assert snippet.text in rest
            rest = rest.replace(snippet.text, "", 1)

        assert [line for line in rest.splitlines() if line and not line.startswith("#")] == []


# ---------------------------------------------------------------- quirks


def test_every_correction_of_our_own_can_be_said_by_someone() -> None:
    assert [name for name in OWN if not sayable(PRESETS[name])] == []


BLOCK, ACTOR = "algorithm.rollout_correction.", "actor_rollout_ref.actor."
POLICY_LOSS = ACTOR + "policy_loss."
OPENRLHF, NEMO = "algo.advantage.is_correction_", "loss_fn.truncated_importance_sampling_"
TWO_RULES = Preset("", "", reject=(Reject("k2", "max", upper=2.5), Reject("ratio", "token", 0.625, 1 / 0.6)))
DUAL = replace(CATALOGUE["token_is"], clip=Clip(0.1, 0.28, 4.0))
ROLLS_CISPO = replace(CATALOGUE["cispo"], clip=Clip(0.1, 0.1, None))
WORKER = "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"

SETTINGS: list[tuple[str | Preset, str, int, Flat]] = [
    # unquoted, YAML reads 0.5_2 as 0.52 and 1_5 as 15
    ("decoupled_token_icepop", "verl", 0, {BLOCK + "rollout_is_threshold": "0.5_5.0"}),
    ("decoupled_k3_rs", "verl", 0, {BLOCK + "rollout_rs_threshold": "0.01"}),
    # verl's k1 bounds are mirrored
    ("decoupled_geo_rs", "verl", 0, {BLOCK + "rollout_rs_threshold": "0.999_1.001"}),
    ("verl_2026_01_rs_token_k1", "verl", 0, {BLOCK + "rollout_rs_threshold": "0.6_1.4"}),
    (TWO_RULES, "verl", 1, {BLOCK + "rollout_rs": "seq_max_k2,token_k1"}),
    (TWO_RULES, "verl", 1, {BLOCK + "rollout_rs_threshold": "2.5,0.6_1.6"}),
    # each generation has its own keys; bypass repeats the block where the actor reads it
    ("verl_2025_10_token_mask_veto", "verl", 2, {"algorithm.rollout_is_veto_threshold": 1e-4}),
    ("geo_rs", "verl", 0, {BLOCK + "rollout_token_veto_threshold": 1e-4, BLOCK + "rollout_rs": "geometric"}),
    ("bypass_pg_is", "verl", 0, {POLICY_LOSS + "rollout_correction.loss_type": "reinforce"}),
    ("bypass_pg_is", "verl", 0, {POLICY_LOSS + "loss_mode": "bypass_mode"}),
    ("tis", "flash-rl", 0, {"actor_rollout_ref.rollout.calculate_log_probs": True}),
    (DUAL, "verl", 0, {ACTOR + "clip_ratio_c": 4.0}),
    # M2PO needs the decoupled loss: with the recomputed log-probs in the rollout's place its Δ is 0
    ("areal_m2po", "areal", 0, {"actor.use_decoupled_loss": True, "actor.rejection_sampling": None}),
    (
        "areal_m2po",
        "areal",
        1,
        {"actor.use_decoupled_loss": True, "actor.behave_imp_weight_mode": "disabled"},
    ),
    ("areal_cap_token_mask", "areal", 0, {"actor.rejection_sampling.action": "mask"}),
    ("areal_cap_token_mask", "areal", 1, {"actor.behave_imp_weight_mode": "token_mask"}),
    # ROLL reads pg_variant from its worker alone; its dual clip is 1 + 2 pg_clip
    (ROLLS_CISPO, "roll", 0, {"actor_train.pg_variant": "cispo", "actor_train.worker_cls": WORKER}),
    ("gspo", "roll", 0, {"importance_sampling": "seq"}),
    (DUAL, "roll", 0, {"dual_clip_loss": True, "pg_clip": 1.5, "pg_clip_low": 0.1, "pg_clip_high": 0.28}),
    # NeMo-RL's ratio is null where its type is; icepop has both bounds
    *(
        (name, "nemo-rl", 0, {NEMO + "type": None, NEMO + "ratio": None})
        for name in ("vanilla_is", "recompute", "nemo_rl_seq_error_mask")
    ),
    ("trl_token_mask", "nemo-rl", 0, {NEMO + "ratio_min": 0.0, NEMO + "ratio": 3.0}),
    ("prime_rl_ipo", "prime-rl", 0, {"trainer.loss.adv_tau": 1.0}),
    ("swift_opsm", "ms-swift", 0, {"use_vllm": True}),
    # OpenRLHF's lower bound is 0.5 by default, so that an idle one is 0
    ("token_is", "openrlhf", 1, {OPENRLHF + "threshold": [0.0, 2.0]}),
    *(
        (
            name,
            "openrlhf",
            0,
            {f"{OPENRLHF}level": level, f"{OPENRLHF}mode": mode, f"{OPENRLHF}gating": "ratio"}
            | {f"{OPENRLHF}threshold": bounds},
        )
        for name, level, mode, bounds in (
            ("token_is", "token", "clip", [0.0, 2.0]),
            ("openrlhf_tis", "token", "clip", [0.5, 5.0]),
            ("openrlhf_icepop", "token", "mask", [0.5, 5.0]),
            ("openrlhf_seq_mask_tis", "seq", "mask", [0.5, 5.0]),
        )
    ),
    ("openrlhf_seq_mask_tis", "openrlhf", 2, {"vllm_is_correction_type": "seq-mask-tis"}),
    ("openrlhf_seq_mask_tis", "openrlhf", 3, {"vllm_is_correction_type": "mis"}),
    # a 0 turns a bound of open-instruct off
    ("open_instruct_rho_mask", "open-instruct", 0, {"rho_clamp_upper_bound": 0}),
    ("recompute", "open-instruct", 0, {"use_rho_correction": False}),
    # slime's veto comes with the rejection that looks at it
    ("slime_mis_veto", "slime", 0, {"use_rs": True, "rs_lower_bound": 1e-9, "rs_upper_bound": 1e9}),
    ("slime_mis_veto", "slime", 0, {"rs_veto_threshold": 1e-4}),
    (DUAL, "trl", 0, {"epsilon_high": 0.28, "delta": 4.0}),
    (DUAL, "slime", 0, {"eps-clip-c": 4.0}),
]


@pytest.mark.parametrize(("preset", "trainer", "which", "settings"), SETTINGS)
def test_a_block_has_these_settings(preset: str | Preset, trainer: str, which: int, settings: Flat) -> None:
    preset = CATALOGUE[preset] if isinstance(preset, str) else preset
    found = settings_of(config_for(preset, trainer).snippets[which], trainer)

    assert {key: found.get(key) for key in settings} == settings


def test_prime_rls_first_losses_have_no_adv_tau() -> None:
    (snippet,) = config_for(CATALOGUE["prime_rl_v02_token"], "prime-rl").snippets

    assert "adv_tau" not in snippet.text


HEADINGS = {
    ("seq_mis", "verl"): ["verl from 0.7.1"] * 2 + ["verl from 0.6.1, before 0.7.1"] * 2,
    ("token_is", "verl"): ["verl from 0.6.1"] * 2,  # as YAML, as overrides: a newer block covers the older
    ("decoupled_token_icepop", "verl"): ["verl from 0.8.0"] * 2,
    ("decoupled_token_is", "verl"): ["verl from 0.6.1"] * 2,
    ("pure_is", "verl"): ["verl from 0.7.1"] * 2,
    ("ppo_is_bypass", "verl"): ["verl from 0.7.1"] * 2 + ["verl from 0.6.1, before 0.7.1"] * 2,
    ("verl_2025_10_token_mask_veto", "verl"): ["verl from 0.6.1, before 0.7.1"] * 2
    + ["verl from 0.6.0, before 0.6.1"] * 2,
    ("areal_m2po", "areal"): ["AReaL from 1.0.4", "AReaL from 1.0.1, before 1.0.4"],
    ("areal_cap_token_mask", "areal"): ["AReaL from 1.0.4", "AReaL from 1.0.1, before 1.0.4"],
    ("prime_rl_ipo", "prime-rl"): ["prime-rl from 2026-06-14 (release 0.6.0)"],
    ("prime_rl_v02_token", "prime-rl"): ["prime-rl from 0.2, before 0.5.0"],
    ("skyrl_dppo_tv", "skyrl"): ["SkyRL from 0.3.0"],
    ("cispo", "nemo-rl"): ["NeMo-RL from 0.7.0"],
    ("cispo", "slime"): ["slime from 0.3.1"],
    ("openrlhf_icepop", "openrlhf"): [
        "OpenRLHF from 2026-09 (pull request 1339)",
        "OpenRLHF from 0.10.2, before 2026-09 (pull request 1339)",
        "OpenRLHF from 0.9.1, before 0.10.2",
    ],
    ("trl_token_clip", "trl"): ["TRL from 1.6.0"],
    ("trl_token_truncate", "trl"): ["TRL from 1.6.0", "TRL from 0.26.0, before 1.6.0"],
}


@pytest.mark.parametrize(("name", "trainer"), HEADINGS)
def test_blocks_carry_the_releases_that_take_them(name: str, trainer: str) -> None:
    found = [one.versions for one in config_for(CATALOGUE[name], trainer).snippets]

    assert found[: len(HEADINGS[name, trainer])] == HEADINGS[name, trainer]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_newest_versions_block_comes_first(trainer: str) -> None:
    for name in (name for name, other in PAIRS if other == trainer):
        ages = [one.age for one in config_for(PRESETS[name], trainer).snippets]

        assert [newest for newest, _ in ages] == sorted(newest for newest, _ in ages)
        assert all(newest <= oldest for newest, oldest in ages)


REMARKS: list[tuple[str | Preset, str, str, bool]] = [
    ("geo_rs", "verl", "verl from 0.7.1 cannot say this: a veto", True),
    (
        "token_is",
        "skyrl",
        "no dual clip here unless policy_loss_type is dual_clip and clip_ratio_c is 3;",
        True,
    ),
    (
        "token_is",
        "roll",
        "no dual clip here unless dual_clip_loss and use_pg_clip_range are true and pg_clip is 1 ",
        True,
    ),
    (DUAL, "roll", "no dual clip", False),
    ("token_is", "trl", "no dual clip here unless delta is 3;", True),
    *((name, name.split("_")[0], "clamped", False) for name in ("skyrl_dppo_tv", "skyrl_dppo_kl")),
    ("swift_opsm", "ms-swift", "clamped", False),
    (
        "token_is",
        "trl",
        "the log-ratio of the weight is not clamped here before exp; in the preset clamped to ±20",
        True,
    ),
    ("decoupled_geo_rs_token_tis", "verl", "clamped", False),
    ("verl_2025_11_token_is_rs_veto", "skyrl", "rejected tokens stay", True),
    ("areal_icepop", "roll", "rejected tokens leave", True),
    ("vanilla_is", "verl", "bounds of 1.0e-9 and 1.0e+9 are idle", True),
    ("vanilla_is", "skyrl", "bounds of 1.0e-9 and 1.0e+9 are idle", True),
    ("trl_sequence_mask", "slime", "bounds of 1.0e-9 and 1.0e+9 are idle", True),
    ("vanilla_is", "ms-swift", "a threshold of 1.0e+9 is idle", True),
    ("token_is", "verl", "idle", False),
    # guards are those of the newest version that can say it
    ("seq_mis", "verl", "the clamp of the rejection acts on each token here", True),
    ("geo_rs", "verl", "acts on each token", False),
    ("slime_mis_veto", "verl", "rejected tokens leave", True),
    ("prime_rl_v02_token", "prime-rl", "pin prime-rl", True),
    ("prime_rl_ipo", "prime-rl", "pin prime-rl", False),
    ("torchforge", "torchforge", "nothing to paste", True),
]


@pytest.mark.parametrize(("preset", "trainer", "words", "there"), REMARKS)
def test_what_is_done_otherwise_is_remarked(
    preset: str | Preset, trainer: str, words: str, there: bool
) -> None:
    preset = CATALOGUE[preset] if isinstance(preset, str) else preset

    assert (words in "\n".join(config_for(preset, trainer).remarks)) is there


def test_a_small_number_has_a_dot_so_that_yaml_reads_a_float() -> None:
    snippet = config_for(CATALOGUE["slime_mis_veto"], "slime").snippets[0]

    assert (snippet.file, snippet.language) == ("mis.yaml", "yaml")
    assert "rs_veto_threshold: 1.0e-4" in snippet.text


@pytest.mark.parametrize(
    "value", [1e-4, 1e-9, 1e9, 2.0, 0.999, 1.001001001001001, 1 / 3, 1.5e-300, 3e-4, 0.0]
)
def test_a_number_reads_back_as_itself_everywhere(value: float) -> None:
    text = number(value)

    assert float(text) == value
    assert trainer_settings.read_yaml(f"x: {text}") == {"x": value}
    assert trainer_settings.read_toml(f"x = {text}") == {"x": value}


@pytest.mark.parametrize(
    "bound", [0.999, 1.001, 0.6, 1.4, 0.5, 2.0, 1 / 3, 1.001001001001001, 0.7142857142857143]
)
def test_an_inverse_is_short_and_goes_back(bound: float) -> None:
    assert math.isclose(1 / inverse(bound), bound, rel_tol=4.5e-16)
    assert len(str(inverse(1 / 0.999))) == 5


REFUSED: list[tuple[Preset, str, str, str]] = [
    # verl drops the second option of two alike before it matches thresholds
    (Preset("", "", reject=(Reject(upper=2.0), Reject(upper=9.0))), "verl", "rejection by ratio", ""),
    (CATALOGUE["cispo"], "roll", r"other than 0\.1 and 0\.1.*dropped", "verl, trl"),
    *(
        (replace(CATALOGUE["gspo"], clip=Clip(0.1, 0.28, 4.0)), trainer, "dual clip under the GSPO loss", "")
        for trainer in ("verl", "skyrl")
    ),
    (
        CATALOGUE["seq_is"],
        "ms-swift",
        "product ratio",
        "its config can be printed for verl, trl, slime, miles, skyrl, roll",
    ),
    (replace(CATALOGUE["areal_token_clamp"], weight=Weight(upper=0.9)), "areal", "above 1", ""),
    (
        replace(
            CATALOGUE["open_instruct_rho_tv"], reject=(Reject("tv", "mean", upper=0.1, advantage="away"),)
        ),
        "open-instruct",
        "above 1",
        "",
    ),
]


@pytest.mark.parametrize(("preset", "trainer", "message", "hint"), REFUSED)
def test_what_a_trainer_refuses_or_lacks_is_said(
    preset: Preset, trainer: str, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config_for(preset, trainer)

    assert hint in str(caught.value.hint)


# ---------------------------------------------------------------- what cannot be said


STRANGE = {
    "a strict bound": Preset("x", "", weight=Weight(upper=2.0), reject=(Reject(upper=2.0, strict=True),)),
    "a veto on large ratios": Preset("x", "", weight=Weight(upper=2.0), veto=Veto(1e-4, 100.0)),
    "smoothing": Preset("x", "", weight=Weight(action="psis")),
    "a smallest token": Preset("x", "", reject=(Reject(over="min", lower=0.1),)),
    "another numerator": Preset(
        "x", "", weight=Weight(upper=2.0), reject=(Reject(upper=2.0, policy="current"),)
    ),
    "no upper clip": Preset("x", "", clip=Clip(high=None)),
    "metrics": Preset("x", "", weight=Weight(upper=2.0), apply=False),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_part_is_never_dropped_in_silence(trainer: str) -> None:
    for what, preset in STRANGE.items():
        if (what, trainer) == ("a veto on large ratios", "skyrl"):
            continue
        with pytest.raises(ConfigError, match=f"^{trainer} cannot say x: ") as caught:
            config_for(preset, trainer)

        assert caught.value.hint, what


# ---------------------------------------------------------------- the command


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["presets", *args])


def refused(*args: str) -> str:
    """Exit code 2, an error and a hint on stderr, nothing on stdout, no traceback."""
    ran = run(*args)
    assert ran.exit_code == 2, ran.output
    assert ran.stdout == ""
    assert re.fullmatch(r"error: .+\n\nhint: .+\n", ran.stderr), ran.stderr
    return ran.stderr


def test_stdout_is_what_is_pasted() -> None:
    ran = run("token_is", "--for", "TRL")

    assert ran.exit_code == 0
    assert ran.stdout == config_for(CATALOGUE["token_is"], "trl").text()
    assert ran.stderr == ""


def test_several_presets_are_printed_one_after_the_other() -> None:
    ran = run("tis,trl_default", "--for", "trl")

    assert [line for line in ran.stdout.splitlines() if " for trl" in line] == [
        "# tis for trl",
        "# trl_sequence_mask for trl",
    ]


def test_one_that_cannot_be_said_leaves_nothing_printed() -> None:
    error = refused("tis,geo_rs", "--for", "trl")

    assert "trl cannot say geo_rs: " in error
    assert "hint: its config can be printed for verl" in error


def test_an_unknown_trainer_is_answered_with_the_list() -> None:
    error = refused("token_is", "--for", "open_rhlf")

    assert 'unknown trainer "open_rhlf"; there are verl, trl, ' in error
    assert "did you mean openrlhf" in error


def test_json_has_the_snippets_apart() -> None:
    (one,) = json.loads(run("slime_mis", "--for", "slime", "--json", "-").stdout)["configs"]

    assert [(snippet["language"], snippet["file"]) for snippet in one["snippets"]] == [
        ("yaml", "mis.yaml"),
        ("flags", ""),
    ]
    assert one["remarks"]


def test_without_a_name_a_trainer_lists_what_it_can_say() -> None:
    ran = run("--for", "prime-rl", "--json", "-")

    assert list(json.loads(ran.stdout)["presets"]) == [
        name for name, one in CATALOGUE.items() if sayable(one, ["prime-rl"])
    ]
    assert "presets NAME --for prime-rl" in ran.stderr


def test_the_catalogue_keeps_families_together() -> None:
    from offpol_diag.presets.formulas import catalogue_section

    (table,) = catalogue_section(CATALOGUE).blocks
    families = [row[1] for row in table.rows]
    runs = [family for i, family in enumerate(families) if i == 0 or families[i - 1] != family]

    assert len(families) == len(CATALOGUE)
    assert len(runs) == len(set(runs))


# ---------------------------------------------------------------- --set


def test_a_tuned_threshold_is_the_one_that_is_printed() -> None:
    ran = run(
        "seq_mis", "--for", "verl", "--set", "weight.upper=3,reject.lower=0.25", "--set", "clip.high=0.28"
    )

    assert "rollout_is_threshold: 3.0" in ran.stdout
    assert "rollout_rs_threshold_lower: 0.25" in ran.stdout
    assert "clip_ratio_high: 0.28" in ran.stdout
    assert 'rollout_rs_threshold: "0.5_4.0"' in ran.stdout


def test_a_tuned_preset_shows_its_formulas() -> None:
    said = run("token_is", "--set", "weight.upper=3,weight.normalize=true").stdout

    assert "min(r_t, 3) / batch mean" in said
    assert "with weight.upper=3, weight.normalize=true" in " ".join(said.split())


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({"weight.upper": "3"}, Weight(upper=3.0)),
        ({"weight.lower": "1e-1"}, Weight(upper=2.0, lower=0.1)),
        ({"weight.safety": "inf"}, Weight(upper=2.0, safety=None)),
        ({"weight.action": "mask"}, Weight(action="mask", upper=2.0)),
        ({"weight.lower": "4", "weight.upper": "5"}, Weight(upper=5.0, lower=4.0)),
    ],
)
def test_settings_are_read_as_in_a_preset_file(settings: dict[str, str], want: Weight) -> None:
    assert tuned(CATALOGUE["token_is"], settings).weight == want


def test_rules_are_tuned_all_at_once_or_one_by_one() -> None:
    preset = CATALOGUE["prime_rl_v02_token"]
    every, first = tuned(preset, {"reject.upper": "12"}), tuned(preset, {"reject[0].upper": "9"})

    assert [rule.upper for rule in every.reject] == [12.0, 12.0]
    assert [rule.upper for rule in first.reject] == [9.0, 10.0]


def test_veto_clip_and_the_presets_own_keys_can_be_set() -> None:
    found = tuned(CATALOGUE["geo_rs"], {"veto.lower": "1e-6", "clip.dual": "inf", "policy": "current"})

    assert (found.veto, found.clip.dual, found.policy) == (Veto(1e-6), None, "current")
    assert tuned(found, {}) is found


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("wieght.upper=3", ["[token_is] wieght: the preset has no such part", "did you mean weight"]),
        ("weight.uper=3", ["weight.uper: no such key", "did you mean upper"]),
        ("weight.upper=-3", ["weight.upper = -3.0; it must be above 0"]),
        ("weight.upper=big", ['weight.upper = "big"; it must be a number']),
        ("weight.upper=nan", ["weight.upper = nan; it must be finite"]),
        ("weight.lower=5", ["weight.lower = 5.0; it must not exceed upper = 2.0"]),
        ("weight.action=drop", ['weight.action = "drop"; it must be one of truncate']),
        ("weight.normalize=yes", ['weight.normalize = "yes"; it must be true or false']),
        ("weight=3", ["weight: it is a table of over, action"]),
        ("veto.lower=1e-4", ["veto: the preset has no such part"]),
        ("reject.lower=1", ["reject: the preset has no such part"]),
        ("reject[2].lower=1", ["reject[2]: the preset has 0 rules"]),
        ("clip[0].low=1", ["clip[0]: only reject has more than one"]),
        ("policy.upper=1", ["policy: the preset has no such part"]),
        ("weight..upper=1", ["weight..upper: not a place in a preset"]),
        ("policy=new", ['policy = "new"; it must be one of old']),
        ("weight.upper", ['--set "weight.upper" sets nothing']),
        ("=3", ['--set "=3" sets nothing']),
    ],
)
def test_a_slip_in_a_setting_is_answered_with_its_place(settings: str, words: list[str]) -> None:
    error = refused("token_is", "--set", settings)

    assert [word for word in words if word not in error] == []


def test_a_setting_needs_a_preset() -> None:
    assert "none is named" in refused("--set", "weight.upper=3")


def test_a_tuned_preset_that_cannot_be_said_is_refused() -> None:
    assert "a lower bound" in refused("token_is", "--for", "ms-swift", "--set", "weight.lower=0.5")


def test_errors_of_a_library_call_are_ours() -> None:
    with pytest.raises(PresetError, match="mine"):
        tuned(CATALOGUE["token_is"], {"weight.upper": "0"}, file="mine")
    with pytest.raises(UsageError):
        config_for(CATALOGUE["token_is"], "tlr")

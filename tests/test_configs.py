"""Printed configurations: read back by real readers, and run, they do what the preset does."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from functools import cache
from typing import Any

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
    dice = random.Random(7)
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
    scope = oracles.settle(data, preset)[None]
    done = [oracles.apply(s, preset, scope) for s in data]
    norm = oracles._norms(data, done, preset)[None]
    return [w / norm if k else 0.0 for a in done for w, k in zip(a.weights, a.kept, strict=True)]


# ---------------------------------------------------------------- what is printed does what the preset does


@pytest.mark.parametrize(("name", "trainer"), PAIRS)
def test_what_is_printed_does_what_the_preset_does(name: str, trainer: str) -> None:
    preset = PRESETS[name]
    p = batch()[1]
    clip = (1.0 if preset.clip.low is None else preset.clip.low, preset.clip.high)
    anchor = "old" if preset.policy == "old" else "rollout"

    for settings in alternatives(config_for(preset, trainer)):
        did = trainer_settings.TRAINERS[trainer](settings, p)

        assert did.loss == preset.loss
        assert did.anchor == anchor
        assert preset.loss in ("reinforce", "surrogate") or did.clip == pytest.approx(clip)
        assert did.verdict.factor[p.mask] == pytest.approx(expected(preset), rel=1e-9, abs=1e-300)


def test_the_batch_reaches_every_rule() -> None:
    """Else a wrong bound could pass: every preset that rejects rejects some of it and keeps some."""
    shares = {
        name: [w > 0 for w in expected(one)]
        for name, one in PRESETS.items()
        if (one.reject or one.veto) and one.apply
    }

    assert [name for name, kept in shares.items() if all(kept) or not any(kept)] == []


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_trainer_that_a_row_names_can_say_it(name: str) -> None:
    preset = CATALOGUE[name]

    assert set(preset.trainers) <= set(TRAINERS)
    assert sayable(preset, preset.trainers) == preset.trainers


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


def said(name: str, trainer: str, which: int = 0) -> Flat:
    return settings_of(config_for(CATALOGUE[name], trainer).snippets[which], trainer)


def remarks(name: str, trainer: str) -> str:
    return "\n".join(config_for(CATALOGUE[name], trainer).remarks)


BLOCK = "algorithm.rollout_correction."


def test_a_threshold_of_two_bounds_stays_a_string_in_yaml() -> None:
    """Unquoted, YAML reads 0.5_2 as 0.52 and 1_5 as 15."""
    assert said("decoupled_token_icepop", "verl")[BLOCK + "rollout_is_threshold"] == "0.5_5.0"
    assert said("decoupled_k3_rs", "verl")[BLOCK + "rollout_rs_threshold"] == "0.01"


def test_verls_k1_bounds_are_mirrored() -> None:
    assert said("decoupled_geo_rs", "verl")[BLOCK + "rollout_rs_threshold"] == "0.999_1.001"
    assert said("verl_2026_01_rs_token_k1", "verl")[BLOCK + "rollout_rs_threshold"] == "0.6_1.4"


def test_several_of_verls_options_are_one_quoted_list() -> None:
    rules = (Reject("k2", "max", upper=2.5), Reject("ratio", "token", 0.625, 1 / 0.6))
    snippets = config_for(Preset("mine", "", reject=rules), "verl").snippets

    assert "rollout_rs='\"seq_max_k2,token_k1\"'" in snippets[1].text
    assert settings_of(snippets[1], "verl")[BLOCK + "rollout_rs_threshold"] == "2.5,0.6_1.6"


def test_two_rules_of_one_option_cannot_be_said_to_verl() -> None:
    """verl drops the second option before it matches thresholds."""
    rules = (Reject("ratio", "token", 0.5, 2.0), Reject("ratio", "token", 0.9, 9.0))

    with pytest.raises(ConfigError, match="rejection by ratio"):
        config_for(Preset("mine", "", reject=rules), "verl")


def test_each_generation_of_verl_has_its_own_keys() -> None:
    assert said("verl_2025_10_token_mask_veto", "verl", 2)["algorithm.rollout_is_veto_threshold"] == 1e-4
    assert said("geo_rs", "verl")[BLOCK + "rollout_token_veto_threshold"] == 1e-4
    assert said("geo_rs", "verl")[BLOCK + "rollout_rs"] == "geometric"
    assert "verl from 0.7.1 cannot say this: a veto" in remarks("geo_rs", "verl")


def headings(name: str, trainer: str) -> list[str]:
    return [one.versions for one in config_for(CATALOGUE[name], trainer).snippets]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_newest_versions_block_comes_first(trainer: str) -> None:
    for name in (name for name, other in PAIRS if other == trainer):
        ages = [one.age for one in config_for(PRESETS[name], trainer).snippets]

        assert [newest for newest, _ in ages] == sorted(newest for newest, _ in ages)
        assert all(newest <= oldest for newest, oldest in ages)


def test_blocks_carry_the_releases_that_take_them() -> None:
    assert headings("seq_mis", "verl")[::2] == ["verl from 0.7.1", "verl from 0.6.1, before 0.7.1"]
    assert headings("areal_m2po", "areal") == ["AReaL from 1.0.4", "AReaL from 1.0.1, before 1.0.4"]
    assert headings("prime_rl_ipo", "prime-rl")[0] == "prime-rl from 2026-06-14 (release 0.6.0)"
    assert headings("verl_2025_10_token_mask_veto", "verl")[::2] == [
        "verl from 0.6.1, before 0.7.1",
        "verl from 0.6.0, before 0.6.1",
    ]
    assert headings("skyrl_dppo_tv", "skyrl")[0] == "SkyRL from 0.3.0"
    assert headings("prime_rl_v02_token", "prime-rl") == ["prime-rl from 0.2, before 0.5.0"]
    assert headings("cispo", "nemo-rl")[0] == "NeMo-RL from 0.7.0"
    assert headings("cispo", "slime") == ["slime from 0.3.1"]
    assert headings("openrlhf_icepop", "openrlhf") == [
        "OpenRLHF from 2026-09 (pull request 1339)",
        "OpenRLHF from 0.10.2, before 2026-09 (pull request 1339)",
        "OpenRLHF from 0.9.1, before 0.10.2",
    ]


def test_a_block_that_a_newer_one_covers_is_not_repeated() -> None:
    assert headings("token_is", "verl") == ["verl from 0.6.1"] * 2  # as YAML, as overrides


def test_in_bypass_mode_the_releases_before_0_7_1_go_on_with_ppos_clip() -> None:
    assert headings("ppo_is_bypass", "verl")[-1] == "verl from 0.6.1, before 0.7.1"
    assert headings("pure_is", "verl") == ["verl from 0.7.1"] * 2


def test_m2po_needs_the_decoupled_loss() -> None:
    """With the recomputed log-probs in the rollout's place its Δ is 0 and nothing is masked."""
    new, old = said("areal_m2po", "areal"), said("areal_m2po", "areal", 1)

    assert (new["actor.use_decoupled_loss"], new["actor.rejection_sampling"]) == (True, None)
    assert (old["actor.use_decoupled_loss"], old["actor.behave_imp_weight_mode"]) == (True, "disabled")


def test_roll_reads_pg_variant_from_its_worker_alone() -> None:
    preset = replace(CATALOGUE["cispo"], clip=Clip(0.1, 0.1, None))
    settings = settings_of(config_for(preset, "roll").snippets[0], "roll")

    assert settings["actor_train.pg_variant"] == "cispo"
    assert settings["actor_train.worker_cls"] == "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"


def test_roll_has_no_key_for_cispos_bounds() -> None:
    with pytest.raises(ConfigError, match=r"other than 0\.1 and 0\.1.*dropped") as caught:
        config_for(CATALOGUE["cispo"], "roll")

    assert "verl, trl" in str(caught.value.hint)


def test_roll_says_gspo() -> None:
    assert said("gspo", "roll")["importance_sampling"] == "seq"


def test_a_dual_clip_of_roll_is_1_and_twice_pg_clip() -> None:
    preset = replace(CATALOGUE["token_is"], clip=Clip(0.1, 0.28, 4.0))
    settings = settings_of(config_for(preset, "roll").snippets[0], "roll")

    assert (settings["dual_clip_loss"], settings["pg_clip"]) == (True, 1.5)
    assert (settings["pg_clip_low"], settings["pg_clip_high"]) == (0.1, 0.28)
    assert "no dual clip" not in "".join(config_for(preset, "roll").remarks)


@pytest.mark.parametrize("trainer", ["verl", "skyrl"])
def test_a_dual_clip_that_the_loss_does_not_read_is_refused(trainer: str) -> None:
    preset = replace(CATALOGUE["gspo"], clip=Clip(0.1, 0.28, 4.0))

    with pytest.raises(ConfigError, match="dual clip under the GSPO loss"):
        config_for(preset, trainer)


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ("skyrl", "unless policy_loss_type is dual_clip and clip_ratio_c is 3;"),
        ("roll", "unless dual_clip_loss and use_pg_clip_range are true and pg_clip is 1 "),
        ("trl", "unless delta is 3;"),
    ],
)
def test_a_remark_on_the_dual_clip_says_what_turns_it_on(trainer: str, words: str) -> None:
    assert f"no dual clip here {words}" in remarks("token_is", trainer)


@pytest.mark.parametrize(
    ("name", "trainer"),
    [("swift_opsm", "ms-swift"), ("skyrl_dppo_tv", "skyrl"), ("skyrl_dppo_kl", "skyrl")],
)
def test_a_mask_without_a_clamp_is_not_told_to_have_one(name: str, trainer: str) -> None:
    assert "clamped" not in remarks(name, trainer)


@pytest.mark.parametrize("name", ["vanilla_is", "recompute", "nemo_rl_seq_error_mask"])
def test_nemo_rls_ratio_is_null_where_its_type_is(name: str) -> None:
    settings, start = said(name, "nemo-rl"), "loss_fn.truncated_importance_sampling_"

    assert (settings[start + "type"], settings[start + "ratio"]) == (None, None)


def test_prime_rls_first_losses_have_no_adv_tau() -> None:
    assert "trainer.loss.adv_tau" not in said("prime_rl_v02_token", "prime-rl")
    assert said("prime_rl_ipo", "prime-rl")["trainer.loss.adv_tau"] == 1.0


def test_the_rollouts_log_probs_are_asked_for() -> None:
    assert said("swift_opsm", "ms-swift")["use_vllm"] is True
    assert said("tis", "flash-rl")["actor_rollout_ref.rollout.calculate_log_probs"] is True


def test_icepop_names_the_verl_that_has_it() -> None:
    assert headings("decoupled_token_icepop", "verl")[0] == "verl from 0.8.0"
    assert headings("decoupled_token_is", "verl")[0] == "verl from 0.6.1"


def test_bypass_repeats_the_block_where_verls_actor_reads_it() -> None:
    actor = "actor_rollout_ref.actor.policy_loss."

    assert said("bypass_pg_is", "verl")[actor + "rollout_correction.loss_type"] == "reinforce"
    assert said("bypass_pg_is", "verl")[actor + "loss_mode"] == "bypass_mode"


def test_a_small_number_has_a_dot_so_that_yaml_reads_a_float() -> None:
    snippet = config_for(CATALOGUE["slime_mis_veto"], "slime").snippets[0]

    assert (snippet.file, snippet.language) == ("mis.yaml", "yaml")
    assert "rs_veto_threshold: 1.0e-4" in snippet.text
    assert settings_of(snippet, "slime")["rs_veto_threshold"] == 1e-4


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


def test_openrlhfs_lower_bound_is_made_idle() -> None:
    """Its default, 0.5, is not."""
    key = "algo.advantage.is_correction_threshold"

    assert said("token_is", "openrlhf")[key] == [0.0, 2.0]
    assert said("token_is", "openrlhf", 1)[key] == [0.0, 2.0]
    assert said("openrlhf_tis", "openrlhf")[key] == [0.5, 5.0]


@pytest.mark.parametrize(
    ("name", "level", "mode", "threshold"),
    [
        ("token_is", "token", "clip", [0.0, 2.0]),
        ("openrlhf_tis", "token", "clip", [0.5, 5.0]),
        ("openrlhf_icepop", "token", "mask", [0.5, 5.0]),
        ("openrlhf_seq_mask_tis", "seq", "mask", [0.5, 5.0]),
    ],
)
def test_openrlhfs_newer_keys_are_a_level_a_mode_and_a_gate(name, level, mode, threshold) -> None:
    newest = said(name, "openrlhf")

    found = [
        newest[f"algo.advantage.is_correction_{key}"] for key in ("level", "mode", "gating", "threshold")
    ]
    assert found == [level, mode, "ratio", threshold]


def test_openrlhfs_types_have_had_two_names() -> None:
    *_, after, before = (
        one.text for one in config_for(CATALOGUE["openrlhf_seq_mask_tis"], "openrlhf").snippets
    )

    assert "--vllm_is_correction_type seq-mask-tis" in after
    assert "--vllm_is_correction_type mis" in before


def test_ms_swift_cannot_say_the_product() -> None:
    with pytest.raises(ConfigError, match="product ratio") as caught:
        config_for(CATALOGUE["seq_is"], "ms-swift")

    assert caught.value.hint == "its config can be printed for verl, trl, slime, miles, skyrl, roll"


def test_areals_upper_bound_must_be_above_one() -> None:
    low = replace(CATALOGUE["areal_token_clamp"], weight=Weight(upper=0.9))

    with pytest.raises(ConfigError, match="above 1"):
        config_for(low, "areal")


def test_older_keys_of_areal_stand_beside_the_new_ones() -> None:
    new, old = config_for(CATALOGUE["areal_cap_token_mask"], "areal").snippets

    assert old.versions == "AReaL from 1.0.1, before 1.0.4"
    assert settings_of(old, "areal")["actor.behave_imp_weight_mode"] == "token_mask"
    assert settings_of(new, "areal")["actor.rejection_sampling.action"] == "mask"


def test_a_zero_turns_a_bound_of_open_instruct_off() -> None:
    assert said("open_instruct_rho_mask", "open-instruct")["rho_clamp_upper_bound"] == 0
    assert said("recompute", "open-instruct")["use_rho_correction"] is False


def test_open_instruct_cannot_bound_the_total_variation_usefully() -> None:
    tight = replace(
        CATALOGUE["open_instruct_rho_tv"], reject=(Reject("tv", "mean", upper=0.1, advantage="away"),)
    )

    with pytest.raises(ConfigError, match="above 1"):
        config_for(tight, "open-instruct")


def test_nemo_rls_icepop_has_both_bounds() -> None:
    settings = said("trl_token_mask", "nemo-rl")

    assert settings["loss_fn.truncated_importance_sampling_ratio_min"] == 0.0
    assert settings["loss_fn.truncated_importance_sampling_ratio"] == 3.0


def test_trls_lower_bound_names_the_version_that_has_it() -> None:
    assert headings("trl_token_clip", "trl") == ["TRL from 1.6.0"]
    assert headings("trl_token_truncate", "trl") == ["TRL from 1.6.0", "TRL from 0.26.0, before 1.6.0"]


def test_slimes_veto_comes_with_the_rejection_that_looks_at_it() -> None:
    settings = said("slime_mis_veto", "slime")

    assert settings["use_rs"] is True
    assert (settings["rs_lower_bound"], settings["rs_upper_bound"]) == (1e-9, 1e9)


def test_keys_that_prime_rl_has_dropped_say_so() -> None:
    assert "pin prime-rl" in remarks("prime_rl_v02_token", "prime-rl")
    assert "pin prime-rl" not in remarks("prime_rl_ipo", "prime-rl")


def test_torchforge_has_nothing_to_paste() -> None:
    assert "nothing to paste" in config_for(CATALOGUE["torchforge"], "torchforge").text()


def test_guards_and_denominators_that_differ_are_remarked() -> None:
    assert (
        "the log-ratio of the weight is not clamped here before exp; in the preset clamped to ±20"
        in remarks("token_is", "trl")
    )
    assert "rejected tokens stay" in remarks("verl_2025_11_token_is_rs_veto", "skyrl")
    assert "rejected tokens leave" in remarks("areal_icepop", "roll")
    assert "dual clip" in remarks("token_is", "trl")
    assert "clamped" not in remarks("decoupled_geo_rs_token_tis", "verl")


def test_guards_are_those_of_the_newest_version_that_can_say_it() -> None:
    assert "the clamp of the rejection acts on each token here" in remarks("seq_mis", "verl")
    assert "acts on each token" not in remarks("geo_rs", "verl")
    assert "rejected tokens leave" in remarks("slime_mis_veto", "verl")


def test_a_clip_other_than_the_trainers_is_printed() -> None:
    preset = replace(CATALOGUE["token_is"], clip=Clip(0.1, 0.28, 4.0))

    assert "epsilon_high=0.28" in config_for(preset, "trl").text()
    assert "delta=4.0" in config_for(preset, "trl").text()
    assert "clip_ratio_c: 4.0" in config_for(preset, "verl").text()
    assert "--eps-clip-c 4.0" in config_for(preset, "slime").text()


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


@pytest.mark.parametrize("what", STRANGE)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_part_is_never_dropped_in_silence(what: str, trainer: str) -> None:
    if (what, trainer) == ("a veto on large ratios", "skyrl"):
        return
    with pytest.raises(ConfigError) as caught:
        config_for(STRANGE[what], trainer)

    assert caught.value.message.startswith(f"{trainer} cannot say x: ")
    assert caught.value.hint


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

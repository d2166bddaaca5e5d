"""Printed configurations: their trainers have every key, read them back, and then do what the preset does."""

import json
import math
import random
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.errors import ConfigError, UsageError
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight
from offpol_diag.presets.catalogue import load
from offpol_diag.trainers import TRAINERS, config_for, sayable
from offpol_diag.trainers.translate import inverse
from offpol_diag.trainers.writers import number
from tests import oracles, trainer_settings
from tests.trainers.ours import BUILT_IN
from tests.trainers.padded import padded

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
    "many_rules": Preset("", "", reject=(Reject("k2", "max", upper=2.5), Reject(lower=0.625, upper=1 / 0.6))),
    "dual": replace(CATALOGUE["token_is"], clip=Clip(0.1, 0.28, 4.0)),
    "dual_gspo": replace(CATALOGUE["gspo"], clip=Clip(0.1, 0.28, 4.0)),
    "normalized": replace(CATALOGUE["pure_is"], weight=Weight("sum", upper=2.0, normalize=True)),
    "weighted_gspo": replace(BUILT_IN["nemo_rl_tis"], loss="gspo"),
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
PRESETS = {**BUILT_IN, **{name: replace(one, name=name) for name, one in OWN.items()}}


@cache
def configs(trainer):
    """Return the configuration of every preset that the trainer can express, by preset."""
    return {name: config_for(one, trainer) for name, one in PRESETS.items() if trainer in sayable(one)}


# ---------------------------------------------------------------- readers


def settings_of(snippet, trainer):
    """Read a snippet with its trainer's own reader."""
    readers = {
        "yaml": trainer_settings.read_yaml,
        "hydra": trainer_settings.read_hydra,
        "toml": trainer_settings.read_toml,
        "flags": lambda text: trainer_settings.read_flags(text, command_line(snippet, trainer)),
        "python": trainer_settings.read_dict if trainer == "colossalai" else trainer_settings.read_call,
    }
    return readers[snippet.language](snippet.text) if snippet.text or snippet.language == "flags" else {}


def command_line(snippet, trainer):
    """Return whose flags they are: OpenRLHF has had three spellings."""
    if trainer != "openrlhf" or "from 2026-09" in snippet.versions:
        return "openrlhf of 2026-09" if trainer == "openrlhf" else trainer
    return "openrlhf" if "from 0.10.2" in snippet.versions else "openrlhf before 0.10.2"


def alternatives(config):
    """Return the settings of each way to write a configuration; a file goes with the flags that name it."""
    if any(one.file for one in config.snippets):
        return [{k: v for one in config.snippets for k, v in settings_of(one, config.trainer).items()}]
    return [settings_of(one, config.trainer) for one in config.snippets]


# ---------------------------------------------------------------- what the preset does


@cache
def batch():
    """Make ragged sequences of several turns, with three policies, one advantage each, a few wild tokens."""
    dice = random.Random(8)
    rows = [made_row(dice) for _ in range(160)]
    return tuple(oracles.sequences(rows)), padded(rows)


def made_row(dice):
    """Make a row of three turns at most, with a masked token between two of them."""
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


def step(dice, spread, wild, q):
    """Draw a drift that leaves the probability below 1; a wild one is at most 9.5 nats."""
    far = dice.choice((-9.5, -5.0, -1.5, 1.2, 4.7)) * dice.uniform(0.98, 1.0)  # of equals M2PO drops some
    drift = far if wild else dice.gauss(0, spread)
    return min(drift, -q - 1e-4)


@cache
def expected(preset):
    """Compute what multiplies the loss of each token, by the preset's definition."""
    data = list(batch()[0])
    cuts = oracles.cuts_of(data, preset)[None]
    done = [oracles.apply(s, preset, cuts) for s in data]
    norm = oracles._norms(data, done, preset)[None]
    return [w / norm if k else 0.0 for a in done for w, k in zip(a.weights, a.kept, strict=True)]


# ---------------------------------------------------------------- every trainer, every preset


@pytest.mark.parametrize("trainer", TRAINERS)
def test_printed_configurations_do_what_the_preset_does(trainer):
    p = batch()[1]
    for name, config in configs(trainer).items():
        preset = PRESETS[name]
        clip = (1.0 if preset.clip.low is None else preset.clip.low, preset.clip.high)
        for settings in alternatives(config):
            did = trainer_settings.TRAINERS[trainer](settings, p)

            assert (did.loss, did.anchor) == (preset.loss, "old" if preset.policy == "old" else "rollout"), (
                name
            )
            unclipped = preset.loss in ("reinforce", "surrogate")
            assert unclipped or did.clip == pytest.approx(clip), name
            np.testing.assert_allclose(
                did.verdict.factor[p.mask], expected(preset), rtol=1e-9, atol=1e-300, err_msg=name
            )


@pytest.mark.parametrize("trainer", TRAINERS)
def test_blocks_agree_in_order_and_all_else_is_a_comment(trainer):
    """Overrides say what the YAML says; the newest versions' block comes first."""
    for name, config in configs(trainer).items():
        yaml, hydra = (
            [
                settings_of(one, trainer)
                for one in config.snippets
                if one.language == language and not one.file
            ]
            for language in ("yaml", "hydra")
        )
        assert hydra in ([], yaml), name
        current = [one.current for one in config.snippets]
        assert current == sorted(current, reverse=True), name
        rest = config.text()
        for snippet in config.snippets:
            assert snippet.text in rest
            rest = rest.replace(snippet.text, "", 1)
        assert [line for line in rest.splitlines() if line and not line.startswith("#")] == [], name


PRIME_RL = {
    "ipo": {"eps": (0, 1), "max_importance_ratio": (1, math.inf), "adv_tau": (0, math.inf)},
    "icepop": {"ratio_low": (1e-300, 5), "ratio_high": (1e-300, math.inf), "adv_tau": (0, math.inf)},
    "ppo": {"ratio_low": (1e-300, 1), "ratio_high": (1, math.inf), "adv_tau": (0, math.inf)},
    "cispo": {"ratio_low": (0, 1), "ratio_high": (1, math.inf), "adv_tau": (0, math.inf)},
}
"""Type of prime-rl's loss → its keys and their bounds: an unknown key and a number outside are refused."""


def test_prime_rl_accepts_the_newest_block_of_every_preset_that_it_can_say():
    said = set()
    for name, config in configs("prime-rl").items():
        for snippet in (one for one in config.snippets if one.current):
            settings = settings_of(snippet, "prime-rl")
            kind = settings.pop("trainer.loss.type")
            for key, value in settings.items():
                low, high = PRIME_RL[kind][key.removeprefix("trainer.loss.")]
                assert low <= value <= high, (name, key)
            said.add(kind)
    assert said == set(PRIME_RL)


@pytest.mark.parametrize(
    ("preset", "block"),
    [
        ("ipo", {"type": "ipo", "eps": 0.1}),
        ("ipo@-0.3..0.3", {"type": "ipo", "eps": 0.3}),
        (
            "ipo@weight.action=truncate:weight.upper=20",
            {"type": "ipo", "eps": 0.1, "max_importance_ratio": 20.0},
        ),
        ("bypass_pg_token_icepop@0.2..5", {"type": "icepop", "ratio_low": 0.2, "ratio_high": 5.0}),
        ("bypass_pg_token_is@5", {"type": "cispo", "ratio_low": 0.0, "ratio_high": 5.0}),
        ("ppo_is", {"type": "ppo", "ratio_low": 0.8, "ratio_high": 1.2}),
    ],
)
def test_a_block_for_prime_rl_has_its_own_defaults_where_they_are_meant(preset, block):
    snippet = config_for(CATALOGUE[preset], "prime-rl").snippets[0]

    assert snippet.current
    assert settings_of(snippet, "prime-rl") == {f"trainer.loss.{key}": value for key, value in block.items()}


def test_prime_rl_says_that_its_newest_loss_has_no_mask_by_the_sign_of_the_advantage():
    config = config_for(CATALOGUE["dppo_tv"], "prime-rl")

    assert [one.current for one in config.snippets] == [False]
    assert "cannot say this: a mask that asks for the advantage's sign" in "\n".join(config.remarks)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_block_says_when_its_keys_were_read(trainer):
    for config in configs(trainer).values():
        headings = [line for line in config.text().splitlines() if "keys read at" in line]
        assert [one.read in line for one, line in zip(config.snippets, headings, strict=True)]
        assert all(
            re.search(r"keys read at 20\d\d-\d\d-\d\d, ([0-9a-f]{8,9}|v[\d.]+|commit unknown)$", line)
            for line in headings
        )


def test_the_batch_reaches_every_rule():
    """Else a wrong bound could pass: every preset that rejects rejects some of it and keeps some."""
    rejecting = {name: one for name, one in PRESETS.items() if one.reject or one.veto}
    kept = {name: [w > 0 for w in expected(one)] for name, one in rejecting.items()}
    assert [name for name, flags in kept.items() if all(flags) or not any(flags)] == []


def test_every_correction_is_said_by_someone():
    assert [name for name in OWN if not sayable(PRESETS[name])] == []


# ---------------------------------------------------------------- quirks

SETTINGS = [  # what the functions of trainer_settings do not look at
    ("dual", "verl", 0, {"actor_rollout_ref.actor.clip_ratio_c": 4.0}),
    ("dual", "trl", 0, {"epsilon_high": 0.28, "delta": 4.0}),
    ("dual", "slime", 0, {"eps-clip-c": 4.0}),
    ("seq_mask_tis", "openrlhf", 2, {"vllm_is_correction_type": "seq-mask-tis"}),
    ("seq_mask_tis", "openrlhf", 3, {"vllm_is_correction_type": "mis"}),
]


@pytest.mark.parametrize(("preset", "trainer", "which", "settings"), SETTINGS)
def test_a_block_has_these_settings(preset, trainer, which, settings):
    found = settings_of(configs(trainer)[preset].snippets[which], trainer)

    assert {key: found.get(key) for key in settings} == settings


HEADINGS = {
    ("seq_mis", "verl"): ["verl from 0.7.1"] * 2 + ["verl from 0.6.1, before 0.7.1"] * 2,
    ("token_is", "verl"): ["verl from 0.6.1"] * 2,  # as YAML, as overrides: a newer block covers the older
    ("token_icepop", "verl"): ["verl from 0.8.0"] * 2,
    ("ipo", "prime-rl"): [
        "prime-rl from 2026-09-18 (pull request 3586)",
        "prime-rl from 2026-06-14 (release 0.6.0), before 2026-08-27 (pull request 3418)",
    ],
    ("cispo", "slime"): ["slime from 0.3.1"],
    ("openrlhf_icepop", "openrlhf"): [
        "OpenRLHF from 2026-09 (pull request 1339)",
        "OpenRLHF from 0.10.2, before 2026-09 (pull request 1339)",
        "OpenRLHF from 0.9.1, before 0.10.2",
    ],
}


@pytest.mark.parametrize(("name", "trainer"), HEADINGS)
def test_blocks_carry_the_releases_that_take_them(name, trainer):
    found = [one.versions for one in configs(trainer)[name].snippets]

    assert found[: len(HEADINGS[name, trainer])] == HEADINGS[name, trainer]


REMARKS = [
    ("geo_rs", "verl", "verl from 0.7.1 cannot say this: a veto", True),
    (
        "token_is",
        "skyrl",
        "no dual clip here unless policy_loss_type is dual_clip and clip_ratio_c is 3;",
        True,
    ),
    ("token_is", "trl", "no dual clip here unless delta is 3;", True),
    *((name, name.split("_")[0], "clamped", False) for name in ("skyrl_dppo_tv", "skyrl_dppo_kl")),
    ("token_is", "trl", "the weight is not clamped here before exp; in the preset clamped to ±20", True),
    ("token_is_rs_veto", "skyrl", "rejected tokens stay", True),
    *(("vanilla_is", trainer, "bounds of 1.0e-9 and 1.0e+9 are idle", True) for trainer in ("verl", "skyrl")),
    ("token_is", "verl", "idle", False),
    # guards are those of the newest version that can say it
    ("seq_mis", "verl", "the clamp of the rejection acts on each token here", True),
    ("geo_rs", "verl", "acts on each token", False),
    ("ipo", "prime-rl", "at most 10000 here (max_importance_ratio)", True),
    ("bypass_pg_token_is", "prime-rl", "max_importance_ratio", False),
]


@pytest.mark.parametrize(("preset", "trainer", "words", "there"), REMARKS)
def test_differences_of_a_trainer_are_remarked(preset, trainer, words, there):
    assert (words in "\n".join(configs(trainer)[preset].remarks)) is there


def test_a_small_number_has_a_dot_so_that_yaml_reads_a_float():
    snippet = config_for(CATALOGUE["token_is_veto"], "slime").snippets[0]

    assert (snippet.file, snippet.language) == ("mis.yaml", "yaml")
    assert "rs_veto_threshold: 1.0e-4" in snippet.text


@pytest.mark.parametrize(
    "value", [1e-4, 1e-9, 1e9, 2.0, 0.999, 1.001001001001001, 1 / 3, 1.5e-300, 3e-4, 0.0]
)
def test_a_number_reads_back_as_itself_everywhere(value):
    text = number(value)

    assert float(text) == value
    assert trainer_settings.read_yaml(f"x: {text}") == {"x": value}
    assert trainer_settings.read_toml(f"x = {text}") == {"x": value}


@pytest.mark.parametrize(
    "bound", [0.999, 1.001, 0.6, 1.4, 0.5, 2.0, 1 / 3, 1.001001001001001, 0.7142857142857143]
)
def test_an_inverse_is_short_and_goes_back(bound):
    assert math.isclose(1 / inverse(bound), bound, rel_tol=4.5e-16)
    assert len(str(inverse(1 / 0.999))) == 5


REFUSED = [
    # verl drops the second option of two alike before it matches thresholds
    (Preset("", "", reject=(Reject(upper=2.0), Reject(upper=9.0))), "verl", "beside another of its kind", ""),
    *(
        (replace(CATALOGUE["gspo"], clip=Clip(0.1, 0.28, 4.0)), trainer, "dual clip under the GSPO loss", "")
        for trainer in ("verl", "skyrl")
    ),
    (
        CATALOGUE["seq_is"],
        "ms-swift",
        "product ratio",
        "its config can be printed for verl, trl, slime, miles, skyrl",
    ),
    (replace(CATALOGUE["token_is"], weight=Weight(upper=0.9)), "areal", r"the weight min\(r_t, 0.9\)", ""),
    (CATALOGUE["pure_is"], "prime-rl", r"the weight min\(∏r, 2\)", "verl"),
    (CATALOGUE["ipo@-0.3..0.2"], "prime-rl", "unequal bounds", ""),
    (
        CATALOGUE["decoupled_geo_rs_token_tis"],
        "trl",
        "the rule that keeps sequences with",
        "nearest: token_is; ",
    ),
    (CATALOGUE["geo_rs"], "slime", "rejects only beside use_tis", "its config can be printed for verl"),
]


@pytest.mark.parametrize(("preset", "trainer", "message", "hint"), REFUSED)
def test_a_refusal_names_the_part_and_the_nearest_preset(preset, trainer, message, hint):
    with pytest.raises(ConfigError, match=message) as caught:
        config_for(preset, trainer)

    assert str(caught.value.hint).startswith(hint) or hint == "verl"


# ---------------------------------------------------------------- what cannot be said


STRANGE = {
    "a veto on large ratios": Preset("x", "", weight=Weight(upper=2.0), veto=Veto(1e-4, 100.0)),
    "a smallest token": Preset("x", "", reject=(Reject(over="min", lower=0.1),)),
    "no upper clip": Preset("x", "", clip=Clip(high=None)),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_part_is_never_dropped_in_silence(trainer):
    for what, preset in STRANGE.items():
        if (what, trainer) == ("a veto on large ratios", "skyrl"):
            continue
        with pytest.raises(ConfigError, match=f"^{trainer} cannot say x: ") as caught:
            config_for(preset, trainer)

        assert caught.value.hint, what


# ---------------------------------------------------------------- the command


def run(*args):
    return CliRunner().invoke(app, ["presets", *args])


def refused(*args):
    """Check a refusal: exit code 2, an error and a hint on stderr, nothing on stdout, no traceback."""
    ran = run(*args)
    assert ran.exit_code == 2, ran.output
    assert ran.stdout == ""
    assert re.fullmatch(r"error: .+\n\nhint: .+\n", ran.stderr), ran.stderr
    return ran.stderr


def test_stdout_is_what_is_pasted():
    ran = run("token_is", "--for", "TRL")

    assert ran.exit_code == 0
    assert ran.stdout == config_for(CATALOGUE["token_is"], "trl").text()
    assert ran.stderr == ""


def test_several_presets_are_printed_one_after_the_other():
    ran = run("tis,trl_default", "--for", "trl")

    assert [line.partition(",")[0] for line in ran.stdout.splitlines() if " for trl" in line] == [
        "# token_is for trl",
        "# seq_icepop@inf..3 for trl",
    ]


def test_one_that_cannot_be_said_leaves_nothing_printed():
    error = refused("tis,geo_rs", "--for", "trl")

    assert "trl cannot say geo_rs: " in error
    assert "hint: its config can be printed for verl" in error


def test_an_unknown_trainer_is_answered_with_the_list():
    error = refused("token_is", "--for", "open_rhlf")

    assert 'unknown trainer "open_rhlf"; there are verl, trl, ' in error
    assert "did you mean openrlhf" in error


def test_json_has_the_snippets_apart():
    (one,) = json.loads(run("slime_mis", "--for", "slime", "--json", "-").stdout)["configs"]

    assert [(snippet["language"], snippet["file"]) for snippet in one["snippets"]] == [
        ("yaml", "mis.yaml"),
        ("flags", ""),
    ]
    assert one["remarks"]


def test_without_a_name_a_trainer_lists_what_it_can_say():
    ran = run("--for", "prime-rl", "--json", "-")

    assert list(json.loads(ran.stdout)["presets"]) == [
        name for name, one in CATALOGUE.items() if sayable(one, ["prime-rl"])
    ]
    assert "presets NAME --for prime-rl" in ran.stderr


# ---------------------------------------------------------------- other thresholds


def test_a_tuned_threshold_is_the_one_that_is_printed():
    ran = run("seq_mis@weight.upper=3:reject.lower=0.25:clip.high=0.28", "--for", "verl")

    assert "rollout_is_threshold: 3.0" in ran.stdout
    assert "rollout_rs_threshold_lower: 0.25" in ran.stdout
    assert "clip_ratio_high: 0.28" in ran.stdout
    assert 'rollout_rs_threshold: "0.5_4.0"' in ran.stdout


def test_a_tuned_preset_that_cannot_be_said_is_refused():
    assert "the weight clamp(r_t, 0.5, 2)" in refused("token_is@weight.lower=0.5", "--for", "ms-swift")


def test_an_unknown_trainer_of_a_library_call_is_our_error():
    with pytest.raises(UsageError):
        config_for(CATALOGUE["token_is"], "tlr")

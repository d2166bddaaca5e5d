"""Printed configurations: trainers have every key, read them back, and then do what the preset does."""

import argparse
import ast
import math
import random
import re
import shlex
import tomllib
from functools import cache
from itertools import product

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.errors import ConfigError
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight
from offpol_diag.trainers import TRAINERS, defaults
from offpol_diag.trainers.translate import config_for, trainers_for
from tests import oracles
from tests.trainers import CATALOGUE, EFFECTS, OWN, PRESETS, padded


@cache
def configs(trainer):
    """Return the configuration of every preset that the trainer can express, by preset."""
    return {name: config_for(one, trainer) for name, one in PRESETS.items() if trainer in trainers_for(one)}


# ---------------------------------------------------------------- readers


def flat(tree, prefix=""):
    found = {}
    for key, value in (tree or {}).items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def read_hydra(text):
    """Read overrides after the shell's quotes: ++ may stand before a key, and a quoted value is text."""
    found = {}
    for word in shlex.split(text.replace("\\\n", " ")):
        key, value = re.fullmatch(r"(?:\+\+)?([A-Za-z_.]+)=(\"[^\"]*\"|[\w.+-]+)", word).groups()
        found[key] = value[1:-1] if value[0] == '"' else flat(yaml.safe_load(f"x: {value}"))["x"]
        plain = not isinstance(found[key], str) or re.fullmatch(r"[a-z][a-z0-9_-]*", value)
        assert value[0] == '"' or plain, word
    return found


def read_python(text):
    (one,) = ast.parse(text).body
    if isinstance(one, ast.Assign):
        return dict(ast.literal_eval(one.value))
    assert one.value.func.id == "GRPOConfig"
    return {word.arg: ast.literal_eval(word.value) for word in one.value.keywords}


ACTOR = "policy_loss_type=ppo|gspo eps_clip_low_high:0.2,0.2 dual_clip:"
HIERARCHY = " ".join(f"actor.{word}" for word in ACTOR.split())
IS = "algo.advantage.is_correction_"
SLIME = """use-rollout-logprobs use-tis use-opsm custom-tis-function-path= custom-config-path= tis-clip:2.0
tis-clip-low:0.0 opsm-delta:0.0001 eps-clip:0.2 eps-clip-high: eps-clip-c: advantage-estimator=grpo|gspo"""
FLAGS = {
    "ms-swift": """use_vllm=false|true rollout_importance_sampling_threshold:2.0 epsilon:0.2 epsilon_high:
        delta: rollout_importance_sampling_mode=|token_truncate|token_mask|sequence_truncate|sequence_mask
        loss_type=grpo|cispo importance_sampling_level=token|sequence""",
    "slime": f"{SLIME}|cispo",
    "miles": SLIME,
    "openrlhf": f"""{IS}level=off|token|seq {IS}mode=mask|clip {IS}gating=ratio|binary_kl|tv
        {IS}threshold:0.5,5.0 {HIERARCHY}""",
    "openrlhf before 2026": f"{IS}enable {IS}type=tis|icepop|seq-mask-tis {IS}threshold:0.5,5.0 {HIERARCHY}",
    "openrlhf before 0": f"""enable_vllm_is_correction vllm_is_correction_type=tis|icepop|seq-mask-tis|mis
        vllm_is_truncated_threshold:0.5,5.0 {ACTOR}""",
}
"""Command lines as trainers declare them: a switch, `name=` with texts of which the first is the default, or
`name:` with the default of a number or a pair; without one it is None."""


def read_flags(text, trainer, versions=""):
    """Read flags as a release of the trainer declares them; an unknown flag ends the test."""
    before = re.search(r"before (\d+)", versions)
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for flag in FLAGS[f"{trainer} before {before[1]}" if before else trainer].split():
        name, kind, default = re.fullmatch(r"([^=:]+)([=:]?)(.*)", flag).groups()
        numbers = [float(x) for x in default.split(",") if x] if kind == ":" else []
        how = {"action": "store_true"}
        if kind == "=":
            words = default.split("|")
            how = {"choices": words if default else None, "default": words[0] or None}
        elif kind == ":":
            how = {"type": float, "default": numbers[0] if numbers else None}
        more = {"nargs": 2, "default": numbers} if len(numbers) == 2 else {}
        parser.add_argument(f"--{name}", dest=name, **how | more)
    known, rest = parser.parse_known_args(shlex.split(text.replace("\\\n", " ")))
    assert rest == []
    words = {"true": True, "false": False}
    return {key: words.get(x, x) if isinstance(x, str) else x for key, x in vars(known).items()}


READ = {
    "yaml": lambda text: flat(yaml.safe_load(text)),
    "toml": lambda text: flat(tomllib.loads(text)),
    "hydra": read_hydra,
    "python": read_python,
}


def settings_of(snippet, trainer):
    """Read a snippet with its trainer's own reader."""
    if snippet.language == "flags":
        return read_flags(snippet.text, trainer, snippet.versions)
    return READ[snippet.language](snippet.text) if snippet.text else {}


# ---------------------------------------------------------------- what a configuration does


@cache
def batch():
    """Make ragged sequences of several turns, with three policies and one advantage each."""
    rows = list(beside_bounds(random.Random(8)))
    for sigma in (0.0005, 0.01, 0.3):
        for row in oracles.make_rows(sigma, seed=8, many=50):
            policies = {one: [min(x, -1e-4) for x in row[one]] for one in row if one.endswith("_log_probs")}
            if any(row["response_mask"]):
                one = row["advantages"][:1] * len(row["advantages"])
                rows.append(policies | {"response_mask": row["response_mask"], "advantages": one})
    return tuple(oracles.sequences(rows)), padded(rows)


def beside_bounds(dice):
    """Yield rows whose ratio, product or mean is a hair inside or outside a bound of a preset."""
    parts = [part for one in PRESETS.values() for part in (one.weight, *one.reject, one.veto) if part]
    bounds = {x for part in parts for x in (part.lower, part.upper) if x and x > 0}
    logs = {round(math.log(x), 12) for x in bounds} | bounds | {math.sqrt(2 * x) for x in bounds}
    for x in sorted(sign * log * (1 + hair) for log in logs for hair in (-3e-5, 3e-5) for sign in (-1, 1)):
        for shape, advantage in product(([x / 2, x / 2], [x, 1e-3, -1e-3]), (-1.0, 1.0)):
            rollout = [-max(one, 0.0) - 0.3 for one in shape]
            train = [q + one * dice.uniform(1, 1 + 1e-6) for q, one in zip(rollout, shape, strict=True)]
            policies = {"rollout_log_probs": rollout, "old_log_probs": train, "current_log_probs": train}
            if -9.5 < x < 9.2:  # e^9.2 is below the cap of prime-rl; of equal squares M2PO drops some
                yield policies | {"response_mask": [1] * len(shape), "advantages": [advantage] * len(shape)}


@cache
def expected(preset):
    """Compute what multiplies the loss of each token, by the preset's definition."""
    data = list(batch()[0])
    cuts = oracles.cuts_of(data, preset)[None]
    done = [oracles.apply(s, preset, cuts) for s in data]
    norm = oracles._norms(data, done, preset)[None]
    return [w / norm if k else 0.0 for a in done for w, k in zip(a.weights, a.kept, strict=True)]


def does(trainer, settings, preset):
    """Check that settings do to the batch what the preset does; return what the loss's denominator counts."""
    p = batch()[1]
    did = EFFECTS[trainer](settings, p)
    factor = np.broadcast_to(did.factor, p.mask.shape)[p.mask]
    assert (did.loss, did.anchor) == (preset.loss, {"old": "old", "current": "rollout"}[preset.policy])
    if preset.loss not in ("reinforce", "surrogate"):
        low = 1.0 if preset.clip.low is None else preset.clip.low
        assert did.clip == pytest.approx((low, preset.clip.high))
    np.testing.assert_allclose(factor, expected(preset), rtol=1e-9, atol=1e-300, err_msg=preset.name)
    return did.denominator


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_printed_configuration_does_what_the_preset_does(trainer):
    """Overrides say what the YAML says; the newest block comes first; all else is a comment, with a date."""
    for name, config in configs(trainer).items():
        preset, blocks = PRESETS[name], [(one, settings_of(one, trainer)) for one in config.snippets]
        (first, settings), *others = blocks
        every = [settings | others[0][1]] if first.file else [x for _, x in blocks]  # a file goes with flags
        newest, *_ = [does(trainer, settings, preset) for settings in every]
        differs = bool(preset.reject or preset.veto) and newest not in ("", preset.denominator)
        assert ("the loss's denominator here" in config.text()) is differs, name
        yamls, hydras = (
            [x for one, x in blocks if one.language == word and not one.file] for word in ("yaml", "hydra")
        )
        assert hydras in ([], yamls), name
        closed = ["before" in one.versions for one in config.snippets]
        assert closed == sorted(closed)
        rest = config.text()
        for snippet in config.snippets:
            assert re.search(rf"# .*keys read at {re.escape(snippet.read)}\n", rest)
            assert snippet.text in rest
            rest = rest.replace(snippet.text, "", 1)
        assert [line for line in rest.splitlines() if line and not line.startswith("#")] == [], name


def test_the_batch_reaches_every_rule_and_somebody_says_each_correction():
    """Else a wrong bound could pass: every preset that rejects rejects some of it and keeps some."""
    kept = {name: [w > 0 for w in expected(one)] for name, one in PRESETS.items() if one.reject or one.veto}
    assert [name for name, flags in kept.items() if all(flags) or not any(flags)] == []
    assert [name for name in OWN if not trainers_for(PRESETS[name])] == []


MIS = """use_tis: true, tis_level: token, tis_mode: truncate, tis_lower_bound: 0.5, tis_upper_bound: 2.0,
use_rs: true, rs_level: token, rs_lower_bound: 0.5, rs_upper_bound: 2.0, rs_veto_threshold: 1.0e-4,
tis_batch_normalize: true, custom-config-path: mis.yaml"""
HELPER = read_flags("--use-tis --custom-tis-function-path x.mis.compute_mis_weights_with_cp", "slime")
DPPO = {"generator.sampling_params.logprobs": 1, "trainer.algorithm.policy_loss_type": "dppo"}
SWIFT = read_flags("--use_vllm true --rollout_importance_sampling_mode token_mask", "ms-swift")
DEFAULTS = [  # a trainer's own settings, and the preset that its table names for them
    ("trl", {}, "seq_icepop@inf..3"),
    ("ms-swift", SWIFT, "token_icepop@inf..2"),
    ("slime", HELPER | yaml.safe_load(f"{{{MIS}}}"), "slime_mis"),
    ("slime", read_flags("--use-rollout-logprobs --use-opsm", "slime"), "opsm@0.0001"),
    ("prime-rl", {"trainer.loss.type": "ipo"}, "ipo@-0.3..0.3"),
    ("skyrl", DPPO, "dppo_tv@reject.advantage=against"),
]


@pytest.mark.parametrize(("trainer", "settings", "name"), DEFAULTS)
def test_the_defaults_of_a_trainers_table_are_what_its_own_settings_do(trainer, settings, name):
    assert name in defaults(trainer)
    does(trainer, settings, CATALOGUE[name])


LEAST, INF = 1e-300, math.inf
PRIME_RL = {
    "ipo": {"eps": (0, 1), "max_importance_ratio": (1, INF)},
    "icepop": {"ratio_low": (LEAST, 5), "ratio_high": (LEAST, INF)},
    "ppo": {"ratio_low": (LEAST, 1), "ratio_high": (1, 1e4)},
    "cispo": {"ratio_low": (0, 1), "ratio_high": (1, INF)},
}
"""Its newest losses: their keys and what each takes; it refuses any other key."""


def test_prime_rl_accepts_the_newest_block_of_every_preset_that_it_can_say():
    snippets = [one for config in configs("prime-rl").values() for one in config.snippets]
    found = [tomllib.loads(one.text)["trainer"]["loss"] for one in snippets if "before" not in one.versions]
    for settings in found:
        bounds = PRIME_RL[settings["type"]]
        assert all(bounds[key][0] <= x <= bounds[key][1] for key, x in settings.items() if key != "type")
    assert {one["type"] for one in found} == set(PRIME_RL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trl_takes_every_block_that_is_printed_for_it(tmp_path):
    trl = pytest.importorskip("trl")
    for config in configs("trl").values():
        for snippet in config.snippets:
            settings = settings_of(snippet, "trl")
            made = trl.GRPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, **settings)
            assert {key: getattr(made, key) for key in settings} == settings


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ms_swift_takes_every_block_that_is_printed_for_it():
    reason = "pip install --no-deps ms-swift==4.6.0 json_repair modelscope modelscope_hub"
    module = pytest.importorskip("swift.rlhf_trainers.args_mixin", reason=reason, exc_type=ImportError)
    parser = pytest.importorskip("transformers").HfArgumentParser(module.GRPOArgumentsMixin)
    for config in configs("ms-swift").values():
        words = shlex.split(config.snippets[0].text.replace("\\\n", " ").replace("--loss_type cispo", ""))
        (made,) = parser.parse_args_into_dataclasses(words)  # an argument that it does not know ends the test
        given = settings_of(config.snippets[0], "ms-swift")
        assert all(getattr(made, key) in (value, None) for key, value in given.items() if key != "loss_type")


# ---------------------------------------------------------------- what is said of it

REMARKS = [  # those of guards are of the newest version that can say it
    ("geo_rs", "verl", "verl from 0.7.1 cannot express this: a veto"),
    ("token_is", "trl", "no dual clip here unless delta is 3;"),
    ("token_is", "trl", "the weight is not clamped here before exp; in the preset clamped to ±20"),
    ("token_is_rs_veto", "skyrl", "rejected tokens stay"),
    ("vanilla_is", "verl", "bounds of 1.0e-9 and 1.0e+9 are idle"),
    ("seq_mis", "verl", "the clamp of the rejection acts on each token here"),
    ("token_is", "skyrl", "score_centering.enabled=false below trainer.algorithm turns it off"),
    ("token_is", "nemo-rl", "loss_fn.score_centering=true adds score centering"),
]


@pytest.mark.parametrize(("preset", "trainer", "words"), REMARKS)
def test_differences_of_a_trainer_are_remarked(preset, trainer, words):
    assert words in "\n".join(configs(trainer)[preset].remarks)


def test_blocks_carry_the_releases_that_take_them_and_keys_that_no_effect_shows():
    verl = ["verl from 0.7.1"] * 2 + ["verl from 0.6.1, before 0.7.1"] * 2  # as YAML, as overrides
    assert [one.versions for one in configs("verl")["seq_mis"].snippets] == verl
    own = "token_is@clip.low=0.1:clip.high=0.28:clip.dual=4"
    for trainer, key in (("verl", "actor_rollout_ref.actor.clip_ratio_c"), ("slime", "eps-clip-c")):
        assert settings_of(configs(trainer)[own].snippets[0], trainer)[key] == 4.0
    types = [settings_of(one, "openrlhf") for one in configs("openrlhf")["seq_mask_tis"].snippets[2:]]
    assert [one["vllm_is_correction_type"] for one in types] == ["seq-mask-tis", "mis"]


TWICE = Preset("", "", reject=(Reject(upper=2.0), Reject(upper=9.0)))
MIN, FREE = Preset("x", "", reject=(Reject(over="min", lower=0.1),)), Preset("x", "", clip=Clip(high=None))
VETO = Preset("x", "", weight=Weight(upper=2.0), veto=Veto(1e-4, 100.0))
PRINTED = "its config can be printed for"
REFUSED = [
    # verl drops the second option of two alike before it matches thresholds
    (TWICE, "verl", "beside another of its kind", "nearest: "),
    (CATALOGUE["recompute@loss=gspo:clip.dual=4"], "verl", "dual clip under the GSPO loss", PRINTED),
    (CATALOGUE["seq_is"], "ms-swift", "product ratio", f"{PRINTED} verl, trl, slime, miles, skyrl"),
    (CATALOGUE["token_is@0.9"], "areal", r"the weight min\(r_t, 0.9\)", "nearest: "),
    (CATALOGUE["ipo@-0.3..0.2"], "prime-rl", "unequal bounds", "nearest: ipo; no trainer's config can"),
    (CATALOGUE["decoupled_geo_rs_token_tis"], "trl", "the rule that keeps seq", "nearest: token_is; "),
    (CATALOGUE["geo_rs"], "slime", "rejects only beside use_tis", f"{PRINTED} verl"),
    *((one, trainer, "^{} cannot express x: ", "") for one in (MIN, FREE) for trainer in TRAINERS),
    *((VETO, trainer, "^{} cannot express x: ", "") for trainer in TRAINERS if trainer != "skyrl"),
]


@pytest.mark.parametrize(("preset", "trainer", "message", "hint"), REFUSED)
def test_a_refusal_names_the_part_and_the_nearest_preset(preset, trainer, message, hint):
    with pytest.raises(ConfigError, match=message.format(trainer)) as caught:
        config_for(preset, trainer)
    assert caught.value.hint.startswith(hint)


def run(*args):
    return CliRunner().invoke(app, ["presets", *args])


def test_stdout_is_what_is_pasted_of_one_preset_after_the_other():
    one, two = run("token_is", "--for", "TRL"), run("tis,trl_default", "--for", "trl")
    assert (one.exit_code, one.stdout, one.stderr) == (0, config_for(CATALOGUE["token_is"], "trl").text(), "")
    assert re.findall(r"^# (\S+) for trl$", two.stdout, re.M) == ["token_is", "seq_icepop@inf..3"]


def test_a_refusal_is_an_error_and_a_hint_and_nothing_is_printed():
    ran = run("tis,geo_rs", "--for", "trl")
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert re.fullmatch(r"error: trl cannot express geo_rs: .+\n\nhint: .+\n", ran.stderr), ran.stderr


def test_without_a_name_a_trainer_lists_what_it_can_say():
    lines = run("--for", "prime-rl").stdout.splitlines()
    listed = [name for name in CATALOGUE if any(line.startswith(f"{name} ") for line in lines)]
    assert listed == [name for name, one in CATALOGUE.items() if trainers_for(one, ["prime-rl"])]

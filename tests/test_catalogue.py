"""The preset files: the rows that ship, a user's own, and what is said about a slip."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from offpol_diag.errors import PresetError, UsageError
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight, WeightOver
from offpol_diag.presets.catalogue import Catalogue, load, plain, words
from offpol_diag.presets.formulas import method
from offpol_diag.presets.grammar import LOGS
from offpol_diag.trainers import TRAINERS, defaults, sayable

SHIPPED = load()

GRAMMAR = (Preset, Weight, Reject, Veto, Clip)
UNUSED: dict[type, set[str]] = {
    Preset: {"name"},
    Weight: set(),
    Reject: set(),
    Veto: {"upper"},
    Clip: set(),
}
"""Keys that no shipped row sets: a name with thresholds, or a row of the user, may."""
WORDS = [
    (kind, name, {word for word in get_args(hint) if isinstance(word, str)})
    for kind in GRAMMAR
    for name, hint in get_type_hints(kind).items()
    if get_origin(hint) is Literal
]

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)  # so that messages begin with the bare file name

    def _write(text: str) -> Path:
        path = Path("mine.toml")
        path.write_text(text, encoding="utf-8")
        return path

    return _write


SOURCE = (
    r"\b(?=\w*\d)[0-9a-f]{7,}\b"  # a commit
    r"|\bv\d+\.\d+"  # a release
    r"|pull request \d+ \(\w+ 20\d\d\)|arXiv \d{4}\.\d{5}|JMLR \d+|report \(\d{4}-\d\d\)"  # a paper
)


# ---------------------------------------------------------------- the rows that ship


@pytest.mark.parametrize("preset", SHIPPED.values(), ids=list(SHIPPED))
def test_every_row_says_what_it_is_and_where_it_comes_from(preset: Preset) -> None:
    assert preset.summary.strip() == preset.summary != ""
    assert "\n" not in preset.summary
    assert not preset.summary.endswith(".")
    assert re.search(SOURCE, preset.source), "a commit, a release or a paper stands in the source"
    assert preset.trainers or re.search("No trainer has it|there is no key to set", preset.note)
    assert set(preset.trainers) <= set(TRAINERS)
    assert preset.clip.low is None or 0 <= preset.clip.low <= 1


def test_every_name_and_alias_finds_one_row() -> None:
    found = [*(plain(word) for preset in SHIPPED.values() for word in words(preset)), *SHIPPED.aliases]
    assert len(found) == len(set(found))
    assert all(SHIPPED[word].name == SHIPPED.aliases[word] for word in SHIPPED.aliases)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("none", "recompute"),
        ("disabled", "recompute"),
        ("tis", "token_is"),
        ("token_tis", "token_is"),
        ("decoupled_token_is", "token_is"),
        ("icepop", "token_icepop"),
        ("openrlhf_tis", "token_clip"),
        ("trl_token_truncate", "token_is@3"),
        ("trl_default", "seq_icepop@inf..3"),
        ("nemo_rl_seq_mask_tis", "seq_mask_tis@0.999..1.002"),
        ("decoupled_seq_is_rs", "seq_mis"),
        ("geo_mis", "geo_rs"),
        ("deepseek_v32_mask", "opsm"),
        ("bypass_pg_is", "pure_is"),
        ("bypass_ppo_clip", "ppo_is"),
        ("bypass_pg_geo_rs", "bypass_ppo_clip_geo_rs@loss=reinforce"),
        ("bypass_pg_geo_rs_token_tis", "bypass_pg_geo_rs_seq_tis@weight.over=token"),
        ("dppo", "dppo_tv"),
    ],
)
def test_a_name_that_people_search_for_is_one_of_the_methods(word: str, name: str) -> None:
    assert SHIPPED[word].name == name


def test_every_family_has_rows() -> None:
    families = Path(__file__).parents[1] / "docs" / "families.toml"
    assert {preset.family for preset in SHIPPED.values()} == set(tomllib.loads(families.read_text("utf-8")))


@pytest.mark.parametrize("kind", GRAMMAR, ids=lambda kind: kind.__name__)
def test_every_key_of_the_grammar_is_used_by_some_row(kind: type) -> None:
    usual = {field.name: field.default for field in fields(kind)}
    found = {name for part in parts(kind) for name, value in usual.items() if getattr(part, name) != value}
    assert set(usual) - found <= UNUSED[kind]


def parts(kind: type) -> list[Any]:
    """List every weight, rule, veto or clip of the rows that ship; or the rows."""
    if kind is Preset:
        return list(SHIPPED.values())
    every = [part for row in SHIPPED.values() for part in (row.weight, row.veto, row.clip, *row.reject)]
    return [part for part in every if isinstance(part, kind)]


METHODS = {
    "recompute": "no correction",
    "ppo_is": "no correction",
    "token_is": "weight min(r_t, 2)",
    "token_is_norm": "weight min(r_t, 2) / batch mean",
    "token_clip": "weight clamp(r_t, 0.5, 5)",
    "vanilla_is": "weight r_t",
    "token_icepop": "weight r_t where 0.5 ≤ r_t ≤ 5, else 0",
    "areal_decoupled": "weight r_t; keep tokens with r_t ≤ 5",
    "token_mask": "keep tokens with 0.714286 ≤ r_t ≤ 1.66667",
    "token_mis": "weight r_t; keep tokens with 0.5 ≤ r_t ≤ 2",
    "token_is_veto": "weight min(r_t, 2); veto any r_t < 0.0001",
    "token_is_rs_veto": "weight min(r_t, 2); keep tokens with 0.8 ≤ r_t ≤ 5; veto any r_t < 0.0001",
    "token_k3_mask": "weight r_t; keep tokens with (1/r−1+Δ) ≤ 1",
    "kpop": "weight r_t; keep tokens with max KL₂ of both directions ≤ 2",
    "m2po": "keep the tokens with the smallest values, with batch mean of Δ²/2 < 0.02",
    "seq_is": "weight min(∏r, 2)",
    "seq_is_norm": "weight min(∏r, 2) / batch mean",
    "seq_icepop": "weight ∏r where 0.5 ≤ ∏r ≤ 3, else 0",
    "seq_mis": "weight min(∏r, 2); keep sequences with 0.5 ≤ ∏r ≤ 2",
    "seq_rs": "keep sequences with 0.5 ≤ ∏r ≤ 2",
    "seq_is_veto": "weight min(∏r, 2); veto any r_t < 0.0001",
    "seq_mask_tis": "weight r_t; keep sequences with 0.5 ≤ (∏r)^(1/n) ≤ 5",
    "seq_max_k2_rs": "keep sequences with max Δ²/2 ≤ 2.5",
    "seq_error_mask": "weight r_t; keep sequences with mean e^|Δ| ≤ 2",
    "opsm": "keep sequences with mean −Δ ≤ 0.1 (asked only where A < 0)",
    "geo_is": "weight min((∏r)^(1/n), 2)",
    "geo_mask": "weight (∏r)^(1/n); keep sequences with 0.999 ≤ (∏r)^(1/n) ≤ 1.001",
    "geo_rs": "keep sequences with 0.999001 ≤ (∏r)^(1/n) ≤ 1.001; veto any r_t < 0.0001",
    "decoupled_geo_rs": "keep sequences with 0.999001 ≤ (∏r)^(1/n) ≤ 1.001",
    "decoupled_geo_rs_token_tis": "weight min(r_t, 2); keep sequences with 0.999001 ≤ (∏r)^(1/n) ≤ 1.001",
    "decoupled_geo_rs_seq_tis": "weight min(∏r, 2); keep sequences with 0.999001 ≤ (∏r)^(1/n) ≤ 1.001",
    "decoupled_k3_rs": "keep sequences with mean (r−1−Δ) ≤ 0.01",
    "decoupled_k3_rs_token_tis": "weight min(r_t, 2); keep sequences with mean (r−1−Δ) ≤ 0.01",
    "decoupled_k3_rs_seq_tis": "weight min(∏r, 2); keep sequences with mean (r−1−Δ) ≤ 0.01",
    "pure_is": "weight min(∏r, 2)",
    "bypass_pg_token_is": "weight min(r_t, 2)",
    "bypass_pg_token_icepop": "weight r_t where 0.5 ≤ r_t ≤ 5, else 0",
    "bypass_ppo_clip_geo_rs": "keep sequences with 0.999001 ≤ (∏r)^(1/n) ≤ 1.001",
    "bypass_ppo_clip_k3_rs": "keep sequences with mean (r−1−Δ) ≤ 0.01",
    "bypass_pg_geo_rs_seq_tis": "weight min(∏r, 2); keep sequences with 0.999001 ≤ (∏r)^(1/n) ≤ 1.001",
    "dppo_tv": "weight r_t; keep tokens with -0.2 ≤ (π_train−π_rollout) ≤ 0.2 "
    "(the upper bound asked where A > 0, the lower where A ≤ 0)",
    "dppo_kl": "weight min(r_t, 10000); keep tokens with KL₂(π_rollout‖π_train) ≤ 0.05 "
    "(asked only where A·Δ > 0)",
    "ipo": "weight r_t; keep tokens with -0.1 ≤ (π_train−π_rollout) ≤ 0.1",
    "slime_mis": "weight min(r_t, 2) / batch mean; keep tokens with 0.5 ≤ r_t ≤ 2; veto any r_t < 0.0001",
    "gspo": "no correction",
    "cispo": "no correction",
}
"""What each row does."""


def test_every_row_does_what_its_name_says() -> None:
    assert {name: method(one) for name, one in SHIPPED.items()} == METHODS
    bypass = list(METHODS)[list(METHODS).index("pure_is") : list(METHODS).index("slime_mis")]
    of_current = [name for name, one in SHIPPED.items() if one.policy == "current"]
    assert of_current == ["ppo_is", "opsm", *bypass]
    losses = {name: one.loss for name, one in SHIPPED.items() if one.loss != "ppo_clip"}
    policy_gradient = dict.fromkeys(
        (*(name for name in bypass if "pg" in name), "pure_is", "dppo_kl"), "reinforce"
    )
    own = {"dppo_tv": "surrogate", "ipo": "surrogate", "gspo": "gspo", "cispo": "cispo"}
    assert losses == policy_gradient | own
    for option, over in (("geo", "mean"), ("k3", "mean")):  # verl compares bounds of k1 with -log r
        (rule,) = SHIPPED[f"decoupled_{option}_rs"].reject
        assert (rule.over, rule.safety, rule.safety_at) == (over, 20.0, "token")
    assert SHIPPED["token_mask"].reject[0].upper == 1 / 0.6
    assert SHIPPED["decoupled_geo_rs"].reject[0].lower == 1 / 1.001


# ---------------------------------------------------------------- finding presets


@pytest.mark.parametrize("word", ["seq_mis", "seq_is_rs", "SEQ-MIS", "Seq_Is-rs"])
def test_a_name_is_found_by_alias_in_any_case_and_with_hyphens(word: str) -> None:
    assert SHIPPED[word].name == "seq_mis"
    assert word in SHIPPED


def test_resolve_keeps_the_order_asked_for_and_drops_repeats() -> None:
    found = SHIPPED.resolve(" seq_mis, token-is,,seq_is_rs,TOKEN_TIS ")
    assert [preset.name for preset in found] == ["seq_mis", "token_is"]


def test_all_is_every_row() -> None:
    assert SHIPPED.resolve("all") == tuple(SHIPPED.values())
    assert SHIPPED.resolve("geo_rs,ALL")[0].name == "geo_rs"
    assert len(SHIPPED.resolve("geo_rs,all")) == len(SHIPPED)


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        ("token_is,Seq-Miss", 'unknown preset "Seq-Miss"', 'did you mean "seq_mis"'),
        ("zzzzzzzz", 'unknown preset "zzzzzzzz"', "`offpol-diag presets` lists them"),
        ("", "no preset is named", "name some"),
        (" , ", "no preset is named", "name some"),
    ],
)
def test_a_list_without_presets_is_a_usage_error(spec: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        SHIPPED.resolve(spec)
    assert caught.value.message == message
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("word", ["mis", "MIS@2"])
def test_mis_alone_is_answered_with_what_each_trainer_means(word: str) -> None:
    with pytest.raises(UsageError) as caught:
        SHIPPED.resolve(word)
    assert caught.value.message == f'"{word}" is another method in each trainer'
    named = ("verl", "seq_mis", "TRL", "trl_sequence_mask", "slime", "slime_mis", "OpenRLHF", "seq_mask_tis")
    assert [one for one in named if one not in caught.value.hint] == []


# ---------------------------------------------------------------- thresholds beside a name


@pytest.mark.parametrize(
    ("word", "name", "does"),
    [
        ("token_is@3", "token_is@3", "weight min(r_t, 3)"),
        ("Token-IS@ 2.50", "token_is@2.5", "weight min(r_t, 2.5)"),
        ("tis@3", "token_is@3", "weight min(r_t, 3)"),
        ("trl_token_truncate@5", "token_is@5", "weight min(r_t, 5)"),
        ("token_is@inf", "token_is@inf", "weight r_t"),
        ("token_icepop@0.4..4", "token_icepop@0.4..4", "weight r_t where 0.4 ≤ r_t ≤ 4, else 0"),
        ("token_icepop@4", "token_icepop@4", "weight r_t where 0.25 ≤ r_t ≤ 4, else 0"),
        ("seq_icepop@inf..3", "seq_icepop@inf..3", "weight ∏r where ∏r ≤ 3, else 0"),
        (
            "seq_mis@2..0.4..2.5",
            "seq_mis@2..0.4..2.5",
            "weight min(∏r, 2); keep sequences with 0.4 ≤ ∏r ≤ 2.5",
        ),
        ("seq_mis@3..4", "seq_mis@3..4", "weight min(∏r, 3); keep sequences with 0.25 ≤ ∏r ≤ 4"),
        ("geo_rs@inf", "geo_rs@inf", "veto any r_t < 0.0001"),
        ("ipo@0.3", "ipo@0.3", "weight r_t; keep tokens with -0.3 ≤ (π_train−π_rollout) ≤ 0.3"),
        ("token_is_veto@3..1e-5", "token_is_veto@3..1e-05", "weight min(r_t, 3); veto any r_t < 1e-05"),
        (
            "token_is@3:reject.upper=5:veto.lower=1e-4",
            "token_is@3:reject.upper=5:veto.lower=0.0001",
            "weight min(r_t, 3); keep tokens with r_t ≤ 5; veto any r_t < 0.0001",
        ),
        (
            "token_mask@reject[1].statistic=k3:reject[1].upper=2",
            "token_mask@reject[1].statistic=k3:reject[1].upper=2",
            "keep tokens with 0.714286 ≤ r_t ≤ 1.66667; tokens with (r−1−Δ) ≤ 2",
        ),
        ("recompute@weight.upper=3", "recompute@weight.upper=3", "weight min(r_t, 3)"),
        ("token_is_veto@veto.lower=inf", "token_is_veto@veto.lower=inf", "weight min(r_t, 2)"),
        (
            "token_is@weight.normalize=true",
            "token_is@weight.normalize=true",
            "weight min(r_t, 2) / batch mean",
        ),
    ],
)
def test_thresholds_and_keys_stand_beside_a_name(word: str, name: str, does: str) -> None:
    (found,) = SHIPPED.resolve(word)
    assert (found.name, method(found)) == (name, does)
    assert SHIPPED[name] == found


def test_the_policy_and_the_loss_of_a_method_are_keys_too() -> None:
    found = SHIPPED["geo_rs@policy=current:loss=reinforce"]
    assert (found.policy, found.loss) == ("current", "reinforce")
    assert found.reject == SHIPPED["geo_rs"].reject


POSITIONS = (
    "write seq_mis@weight.upper..reject.lower..reject.upper or seq_mis@weight.upper..C; inf is no bound"
)
KEYS = "write keys like token_is@weight.upper=3, seq_mis@veto.lower=1e-4 or geo_rs@policy=current"


@pytest.mark.parametrize(
    ("word", "message", "hint"),
    [
        ("seq_mis@2", "seq_mis@2: seq_mis takes 3 thresholds by position", POSITIONS),
        (
            "token_is@1..2",
            "token_is@1..2: token_is takes 1 threshold by position",
            "write token_is@weight.upper",
        ),
        ("vanilla_is@3", "vanilla_is@3: vanilla_is takes no thresholds by position", KEYS),
        ("token_is@", 'token_is@: weight.upper = ""; it must be a number', "write token_is@weight.upper"),
        (
            "token_is@-1",
            "token_is@-1: weight.upper = -1.0; it must be above 0",
            "write token_is@weight.upper",
        ),
        (
            "token_icepop@4..1",
            "token_icepop@4..1: weight.lower = 4.0; it must not exceed upper = 1.0",
            "write ",
        ),
        ("geo_rs@0.9", "geo_rs@0.9: one number C for a band must be above 1, for [1/C, C]", "write geo_rs@"),
        ("ipo@0", "ipo@0: one number C for a band must be above 0, for [-C, C]", "write ipo@"),
        (
            "token_is@wieght.upper=3",
            "token_is@wieght.upper=3: wieght: the preset has no such part",
            "did you mean",
        ),
        ("recompute@weight.over=sum", "recompute@weight.over=sum: weight: action truncate needs upper", KEYS),
        (
            "token_is@policy=current",
            "token_is@policy=current: weight: under ppo_clip the ratio holds that of π_θ already: say",
            KEYS,
        ),
    ],
)
def test_what_cannot_stand_beside_a_name_is_answered_with_what_can(
    word: str, message: str, hint: str
) -> None:
    with pytest.raises(PresetError) as caught:
        SHIPPED.resolve(word)
    assert caught.value.message.startswith(message)
    assert caught.value.hint.startswith(hint)


# ---------------------------------------------------------------- presets where none are named

OLD, BYPASS = ("rollout_log_probs", "old_log_probs"), ("rollout_log_probs", "current_log_probs")


def test_twenty_methods_are_evaluated_by_default_and_those_of_the_dumps_trainer() -> None:
    usual = SHIPPED.usual(OLD)
    assert len(usual) == 20
    assert tuple(one.name for one in usual) == SHIPPED.default
    assert "m2po" not in SHIPPED.default
    trls = SHIPPED.usual(OLD, defaults("trl"))
    assert trls == (
        *usual,
        *SHIPPED.resolve("seq_icepop@inf..3,token_is@3,token_icepop@inf..3,seq_is@3"),
    )


def test_without_the_old_policy_the_bypass_methods_stand_in_place_of_those_that_need_it() -> None:
    names = [one.name for one in SHIPPED.usual(BYPASS)]
    bypass = [name for name, one in SHIPPED.items() if one.policy == "current"]
    assert sorted(names) == sorted(bypass)
    assert len(names) == 11


@pytest.mark.parametrize("trainer", [name for name in TRAINERS if defaults(name)])
def test_the_defaults_of_a_trainer_are_its_own_and_at_most_six(trainer: str) -> None:
    rows = SHIPPED.resolve(",".join(defaults(trainer)))
    assert len(rows) == len(defaults(trainer)) <= 6
    assert not {one.name for one in rows} & set(SHIPPED.default)
    assert all(sayable(one, (trainer,)) for one in rows)


# ---------------------------------------------------------------- a user's file

EVERY_KEY = """
[mine]
summary = "all of it"
aliases = ["my_own"]
policy = "current"
veto = { lower = 1e-4, upper = 100 }
loss = "gspo"
clip = { low = inf, high = 4e-4, dual = inf }
denominator = "all"
family = "mine alone"
trainers = ["verl"]
logs = "verl-2026-01"
source = "here"
note = "mind this"

[mine.weight]
over = "segment"
action = "mask"
upper = 5
lower = 0
normalize = true
safety = 10
safety_at = "token"
overflow = "zero"

[[mine.reject]]
statistic = "prob_diff"
over = "min"
lower = -0.2
upper = 0.2
advantage = "against_or_zero"
safety = inf

[[mine.reject]]
statistic = "k2"
over = "batch"
upper = 0.04

[[mine.reject]]
statistic = "mult_prob_error"
over = "mean"
upper = 2
safety = 3
safety_at = "token"
"""


def test_every_key_arrives(write: Write) -> None:
    assert load(write(EVERY_KEY))["my_own"] == Preset(
        name="mine",
        summary="all of it",
        aliases=("my_own",),
        policy="current",
        weight=Weight("segment", "mask", 5.0, 0.0, True, 10.0, "token", "zero"),
        reject=(
            Reject("prob_diff", "min", -0.2, 0.2, "against_or_zero"),
            Reject("k2", "batch", upper=0.04),
            Reject("mult_prob_error", "mean", upper=2.0, safety=3.0, safety_at="token"),
        ),
        veto=Veto(1e-4, 100.0),
        loss="gspo",
        clip=Clip(low=None, high=4e-4, dual=None),
        denominator="all",
        family="mine alone",
        trainers=("verl",),
        logs="verl-2026-01",
        source="here",
        note="mind this",
    )


def test_an_integer_becomes_a_float(write: Write) -> None:
    weight = load(write("[mine]\nweight = { upper = 2 }"))["mine"].weight
    assert weight is not None
    assert type(weight.upper) is float


def test_reject_may_be_one_table_or_several(write: Write) -> None:
    one = load(write("[mine]\nreject = { upper = 2 }"))["mine"].reject
    several = load(write('[mine]\n[[mine.reject]]\nupper = 2\n[[mine.reject]]\nstatistic = "k3"\nupper = 1'))
    assert one == (Reject(upper=2.0),)
    assert several["mine"].reject == (Reject(upper=2.0), Reject("k3", upper=1.0))


def test_own_rows_come_after_the_built_in_ones_and_belong_to_all(write: Write) -> None:
    catalogue = load(write("[mine]\n['mine_1.5']"))
    assert list(catalogue) == [*SHIPPED, "mine", "mine_1.5"]
    assert catalogue.resolve("all")[-1].name == "mine_1.5"
    assert catalogue["mine"].summary == "from mine.toml"
    assert [one.name for one in catalogue.usual(OLD)][-2:] == ["mine", "mine_1.5"]
    assert catalogue.replaced == SHIPPED.replaced == ()


def test_an_own_row_of_a_built_in_name_replaces_it_and_says_so(write: Write) -> None:
    catalogue = load(write("[Seq-MIS]\nweight = { over = 'sum', upper = 7 }"))
    assert catalogue["seq_mis"].weight == Weight("sum", upper=7.0)
    assert catalogue["seq_mis"].reject == ()
    assert len(catalogue) == len(SHIPPED)
    assert list(catalogue).index("Seq-MIS") == list(SHIPPED).index("seq_mis")
    assert catalogue.replaced == ("seq_mis",)


def test_an_own_row_has_thresholds_where_it_says_which(write: Write) -> None:
    catalogue = load(write("[mine]\nweight = { upper = 7 }\nat = ['weight.upper']\n[tis]\n[trl_default]\n"))
    assert catalogue["mine@3"].weight == Weight(upper=3.0)
    assert catalogue["mine@weight.lower=0.5"].weight == Weight(upper=7.0, lower=0.5)
    assert [catalogue[name].name for name in ("tis", "trl_default")] == ["tis", "trl_default"]
    assert catalogue.replaced == ("tis", "trl_default")


def test_an_own_name_takes_a_built_in_alias(write: Write) -> None:
    catalogue = load(write("[geo_mis]\nveto = { lower = 0.1 }"))
    assert catalogue["geo_mis"].veto == Veto(0.1)
    assert catalogue["geo_rs"].aliases == ()
    assert catalogue.replaced == ("geo_mis",)


def test_windows_line_ends_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xef\xbb\xbf[mine]\r\nveto = { lower = 0.1 }\r\n")
    assert load(path)["mine"].veto == Veto(0.1)


# ---------------------------------------------------------------- slips

WEIGHT_OVER = ", ".join(get_args(WeightOver))
WEIGHT_KEYS = "over, action, upper, lower, normalize, safety, safety_at, overflow"
REJECT_KEYS = "statistic, over, lower, upper, advantage, safety, safety_at"
STATISTICS = "ratio, k1, k2, k3, k3_reverse, mult_prob_error, prob_diff, tv, binary_kl, binary_kl_max"
UNSIGNED = "binary_kl, binary_kl_max, k2, k3, k3_reverse, tv"
BATCH = 'statistic = "k2", over = "batch"'

SLIPS = [
    ('weight = { over = "tokens", upper = 2 }', f'weight.over = "tokens"; it must be one of {WEIGHT_OVER}'),
    ('weight = { over = "max", upper = 2 }', f'weight.over = "max"; it must be one of {WEIGHT_OVER}'),
    ("weight = { over = 3 }", f"weight.over = 3; it must be one of {WEIGHT_OVER}"),
    ("weight = { over = [] }", f"weight.over = []; it must be one of {WEIGHT_OVER}"),
    ('weight = { action = "clip" }', 'weight.action = "clip"; it must be one of truncate, mask, none'),
    (
        'weight = { upper = 2, safety_at = "all" }',
        'weight.safety_at = "all"; it must be one of aggregate, token',
    ),
    ("weight = { uper = 2 }", f"weight.uper: no such key; the keys are {WEIGHT_KEYS}"),
    ("weight = 2.0", f"weight = 2.0; it must be a table of {WEIGHT_KEYS}"),
    ("weight = {}", "weight: action truncate needs upper, lower or both"),
    ('weight = { action = "mask" }', "weight: action mask needs upper, lower or both"),
    ("weight = { upper = true }", "weight.upper = true; it must be a number"),
    ('weight = { upper = "2" }', 'weight.upper = "2"; it must be a number'),
    ("weight = { upper = nan }", "weight.upper = nan; it must be finite"),
    ("weight = { upper = inf }", "weight.upper = inf; it must be finite"),
    ("weight = { lower = -inf }", "weight.lower = -inf; it must be finite"),
    ("weight = { upper = 2, safety = -inf }", "weight.safety = -inf; it must be finite"),
    (f"weight = {{ upper = 1{'0' * 400} }}", f"weight.upper = 1{'0' * 56}...; it must be finite"),
    ("weight = { upper = 0 }", "weight.upper = 0; it must be above 0"),
    ("weight = { lower = -0.1 }", "weight.lower = -0.1; it must not be negative"),
    ("weight = { lower = 3, upper = 2 }", "weight.lower = 3; it must not exceed upper = 2.0"),
    ("weight = { upper = 2, safety = 0 }", "weight.safety = 0; it must be above 0"),
    ("weight = { upper = 2, normalize = 1 }", "weight.normalize = 1; it must be true or false"),
    (
        'reject = { over = "seq", upper = 2 }',
        'reject.over = "seq"; it must be one of token, sum, mean, max, min, segment, batch',
    ),
    ('reject = { statistic = "kl", upper = 2 }', f'reject.statistic = "kl"; it must be one of {STATISTICS}'),
    (
        'reject = { upper = 2, advantage = "neg" }',
        'reject.advantage = "neg"; it must be one of any, negative, positive, against, against_or_zero, away',
    ),
    ("reject = {}", "reject: it needs upper, lower or both"),
    ("reject = [{ upper = 2 }, {}]", "reject[1]: it needs upper, lower or both"),
    ("reject = [{ upper = 2 }, { lower = 0 }]", "reject[1].lower = 0; it must be above 0"),
    ("reject = [2]", f"reject[0] = 2; it must be a table of {REJECT_KEYS}"),
    ("reject = { upper = -1 }", "reject.upper = -1; it must be above 0"),
    ('reject = { statistic = "k3", upper = -1 }', "reject.upper = -1; it must not be negative"),
    (
        'reject = { statistic = "k1", lower = 1, upper = -1 }',
        "reject.lower = 1; it must not exceed upper = -1.0",
    ),
    ("reject = { upper = 2, safety = -1 }", "reject.safety = -1; it must be above 0"),
    ("veto = { lower = 0 }", "veto.lower = 0; it must be above 0"),
    ("veto = { upper = -1 }", "veto.upper = -1; it must be above 0"),
    ("veto = { lower = 2, upper = 1 }", "veto.lower = 2; it must not exceed upper = 1.0"),
    ("veto = {}", "veto: it needs upper, lower or both"),
    ("veto = 1e-4", "veto = 0.0001; it must be a table of lower, upper"),
    ('policy = "new"', 'policy = "new"; it must be one of old, current'),
    (
        'policy = "current"\nweight = { upper = 2 }',
        "weight: under ppo_clip the ratio holds that of π_θ already: say loss = reinforce, or no weight",
    ),
    ('at = "weight.upper"', 'at = "weight.upper"; it must be an array of strings'),
    (
        'loss = "ppo"',
        'loss = "ppo"; it must be one of ppo_clip, reinforce, surrogate, gspo, cispo',
    ),
    ('weight = { upper = 2, overflow = "inf" }', 'weight.overflow = "inf"; it must be one of limit, zero'),
    ("reject = { upper = 2, uper = 3 }", f"reject.uper: no such key; the keys are {REJECT_KEYS}"),
    ('reject = { statistic = "mult_prob_error", upper = 0 }', "reject.upper = 0; it must be above 0"),
    ('reject = { statistic = "k3_reverse", upper = -1 }', "reject.upper = -1; it must not be negative"),
    ('reject = { statistic = "binary_kl", lower = -1 }', "reject.lower = -1; it must not be negative"),
    (f"reject = {{ {BATCH} }}", "reject: it needs upper, lower or both"),
    (
        f"reject = {{ {BATCH}, lower = 1, upper = 2 }}",
        "reject: over a batch it needs upper and takes no lower",
    ),
    (f"reject = {{ {BATCH}, lower = 1 }}", "reject: over a batch it needs upper and takes no lower"),
    (
        'reject = { statistic = "ratio", over = "batch", upper = 2 }',
        f'reject.statistic = "ratio"; over a batch it must be one of {UNSIGNED}',
    ),
    (
        'reject = { over = "batch", upper = 0.04 }',  # the slip is a default
        f'reject.statistic = "ratio"; over a batch it must be one of {UNSIGNED}',
    ),
    (
        f'reject = {{ {BATCH}, upper = 2, advantage = "negative" }}',
        'reject.advantage = "negative"; over a batch it must be any',
    ),
    ("clip = 0.2", "clip = 0.2; it must be a table of low, high, dual, safety"),
    ("clip = { eps = 0.2 }", "clip.eps: no such key; the keys are low, high, dual, safety"),
    ("clip = { low = -0.2 }", "clip.low = -0.2; it must not be negative"),
    ("clip = { high = -1 }", "clip.high = -1; it must not be negative"),
    ("clip = { high = nan }", "clip.high = nan; it must be finite"),
    ("clip = { dual = 1 }", "clip.dual = 1; it must be above 1"),
    ("clip = { dual = 0.5 }", "clip.dual = 0.5; it must be above 1"),
    ("clip = { safety = 0 }", "clip.safety = 0; it must be above 0"),
    ('denominator = "left"', 'denominator = "left"; it must be one of kept, all'),
    ("family = 1", "family = 1; it must be a string"),
    ("summary = 1", "summary = 1; it must be a string"),
    ('aliases = "x"', 'aliases = "x"; it must be an array of strings'),
    ("trainers = [1]", "trainers = [1]; it must be an array of strings"),
    ('logs = "verl"', f'logs = "verl"; it must be one of {", ".join(LOGS)}'),
    ("note = 2026-01-14", 'note = "2026-01-14"; it must be a string'),
]


@pytest.mark.parametrize(("line", "said"), SLIPS, ids=[line[:40] for line, _ in SLIPS])
def test_a_slip_names_file_table_key_and_what_is_allowed(write: Write, line: str, said: str) -> None:
    with pytest.raises(PresetError) as caught:
        load(write(f"[mine]\n{line}\n"))
    assert caught.value.message == f"mine.toml: [mine] {said}"


FILES = [
    ("", "mine.toml: holds no preset", "[name]"),
    ("# only a remark\n", "mine.toml: holds no preset", "[name]"),
    ("weight = 2\n", "mine.toml: [weight] = 2; a preset is a table", "[name]"),
    ("[[mine]]\n", "mine.toml: [mine] = [{}]; a preset is a table", ""),
    ("[a]\nweight = {upper = 2\n", "mine.toml: not TOML: Unclosed inline table (at line 2, column 20)", ""),
    ("[a]\n[a]\n", "mine.toml: not TOML: Cannot declare ('a',) twice (at line 2, column 3)", ""),
    ("[all]\n", 'mine.toml: [all]: "all" cannot be a name: letters, digits and _ . + - make one', ""),
    ("['a b']\n", 'mine.toml: ["a b"]: "a b" cannot be a name: letters, digits and _ . + - make one', ""),
    ("['']\n", 'mine.toml: [""]: "" cannot be a name: letters', ""),
    ("[a]\naliases = ['b,c']\n", 'mine.toml: [a]: "b,c" cannot be a name', ""),
    ("[a_b]\n[A-B]\n", 'mine.toml: [A-B]: "A-B" already finds [a_b]', ""),
    ("[a]\n[b]\naliases = ['A']\n", 'mine.toml: [b]: "A" already finds [a]', ""),
    ("[a]\naliases = ['c']\n[b]\naliases = ['c']\n", 'mine.toml: [b]: "c" already finds [a]', ""),
    ("[a]\naliases = ['c', 'c']\n", 'mine.toml: [a]: "c" already finds [a]', ""),
    ("[a]\naliases = ['geo-rs']\n", 'mine.toml: [a] aliases: "geo-rs" is the name of a built-in preset', ""),
    ("[a_1.5]\n", "mine.toml: [a_1] 5: no such key", 'quoted: ["a_1.5"]'),
    ("[a]\nwieght = {}\n", "mine.toml: [a] wieght: no such key; the keys are summary, policy", "mean weight"),
    ("[a]\nname = 'b'\n", "mine.toml: [a] name: no such key; the keys are summary, policy", ""),
    ("[a]\nloss = 'ppo-clip'\n", 'mine.toml: [a] loss = "ppo-clip"', "did you mean ppo_clip?"),
    ("a = " + "[" * 5000, "mine.toml: not TOML: ", ""),
    ("a = 1" + "0" * 5000, "mine.toml: not TOML: ", ""),
]


@pytest.mark.parametrize(("text", "said", "hint"), FILES, ids=[text[:30] for text, *_ in FILES])
def test_a_file_that_holds_no_catalogue(write: Write, text: str, said: str, hint: str) -> None:
    with pytest.raises(PresetError) as caught:
        load(write(text))
    assert caught.value.message.startswith(said)
    assert hint in caught.value.hint
    assert caught.value.hint


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"[mine]\nnote = '\xff'\n")
    for file, message in (
        (Path("nowhere.toml"), r"^nowhere\.toml: no such file$"),
        (tmp_path, r"cannot be read \(Is a directory\)$"),
        (path, r"mine.toml: not UTF-8 \(byte 15\)$"),
    ):
        with pytest.raises(PresetError, match=message):
            load(file)


def test_a_catalogue_is_a_mapping() -> None:
    catalogue = Catalogue((Preset("a", "s", aliases=("b",)),))
    assert dict(catalogue) == {"a": catalogue["B"]}
    assert catalogue.get("c") is None


# ---------------------------------------------------------------- the page

PAGE = (Path(__file__).parents[1] / "docs" / "preset-files.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", GRAMMAR, ids=lambda kind: kind.__name__)
def test_the_page_names_every_key(kind: type) -> None:
    keys = {field.name for field in fields(kind)} - {"name"}
    assert {key for key in keys if f"`{key}`" not in PAGE} == set()


def test_the_page_names_every_word() -> None:
    words = {word for _, _, allowed in WORDS for word in allowed} | set(LOGS)
    assert {word for word in words if f"`{word}`" not in PAGE} == set()

"""Presets: the rows that ship, what stands beside a name, a user's file, and what is said about a mistake."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from offpol_diag.errors import PresetError, UsageError
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight
from offpol_diag.presets.catalogue import load, plain
from offpol_diag.presets.words import KINDS, clipped, loss, method
from offpol_diag.trainers import TRAINERS, defaults
from offpol_diag.trainers.translate import trainers_for

HERE = Path(__file__).parent
SHIPPED = load()
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)  # so that messages begin with the bare file name

    def _write(text: str) -> Path:
        path = Path("mine.toml")
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def refused(ask: Callable[[], object]) -> tuple[str, str]:
    """Return message and hint of the error that a call raises."""
    with pytest.raises((PresetError, UsageError)) as caught:
        ask()
    assert caught.value.hint
    return caught.value.message, caught.value.hint


def table(text: str) -> list[tuple[str, ...]]:
    """Return the rows of a table, whose cells stand between arrows."""
    return [tuple(line.split(" → ")) for line in text.strip().splitlines()]


# ---------------------------------------------------------------- the rows that ship


def test_every_number_of_a_row_is_that_of_its_trainer_as_it_was_first_read() -> None:
    """`golden/presets.json` was made once, from f8bfca2a, whose rows went by other names."""
    golden = json.loads((HERE / "golden" / "presets.json").read_text("utf-8"))
    found = json.loads(json.dumps({name: asdict(one) for name, one in SHIPPED.items()}))
    assert {name: {key: found[name][key] for key in one} for name, one in golden.items()} == golden


@pytest.mark.parametrize("preset", SHIPPED.values(), ids=list(SHIPPED))
def test_every_row_says_what_it_is_and_which_trainer_can_say_it(preset: Preset) -> None:
    assert re.fullmatch(r"\S.*[^\s.]", preset.summary)
    assert preset.source
    assert trainers_for(preset) or "there is no key to set" in preset.note


def test_methods_are_told_apart_by_what_they_do() -> None:
    kinds = {
        "none": "recompute ppo_is",
        "token": "token_icepop slime_mis token_is_veto recompute@weight.upper=3",
        "sequence": "seq_is seq_error_mask",
        "geometric and k3": "geo_is seq_mask_tis decoupled_k3_rs_token_tis",
        "bypass": "opsm pure_is dppo_tv geo_rs@policy=current:loss=reinforce",
        "other": "gspo cispo",
    }
    for kind, names in kinds.items():
        assert {SHIPPED[name].kind for name in names.split()} == {kind}
    assert list(KINDS) == list(kinds)


FORMULAS = """
recompute → no correction
token_is_norm → weight min(r_t, 2) / batch mean
token_clip@0.5..inf → weight max(r_t, 0.5)
token_icepop → weight r_t where 0.5 ≤ r_t ≤ 5, else 0
m2po → keep the tokens with the smallest values, with batch mean of Δ²/2 < 0.02
seq_mis → weight min(∏r, 2); keep sequences with 0.5 ≤ ∏r ≤ 2
opsm → keep sequences with mean −Δ ≤ 0.1 (applies only where A < 0)
geo_rs → keep sequences with 0.999001 ≤ (∏r)^(1/n) ≤ 1.001; veto any r_t < 0.0001
geo_rs@veto.upper=9 → veto any r_t < 0.0001 or any r_t > 9
dppo_tv → -0.2 ≤ (π_train−π_rollout) ≤ 0.2 (the upper bound applies where A > 0, the lower where A ≤ 0)
token_is@3 → weight min(r_t, 3)
seq_mis@2..0.4..2.5 → weight min(∏r, 2); keep sequences with 0.4 ≤ ∏r ≤ 2.5
seq_mis@3 → weight min(∏r, 3); keep sequences with 0.333333 ≤ ∏r ≤ 3
seq_mis@3..4 → weight min(∏r, 3); keep sequences with 0.25 ≤ ∏r ≤ 4
ipo@0.3 → weight r_t; keep tokens with -0.3 ≤ (π_train−π_rollout) ≤ 0.3
token_is@3:reject.upper=5:veto.lower=0.1 → weight min(r_t, 3); keep tokens with r_t ≤ 5; veto any r_t < 0.1
token_mask@reject[1].statistic=k3:reject[1].upper=2 → keep tokens with 0.714286 ≤ r_t ≤ 1.66667; tokens with
token_is@weight.normalize=true → weight min(r_t, 2) / batch mean
"""


@pytest.mark.parametrize(("name", "does"), table(FORMULAS))
def test_a_method_also_at_other_thresholds_or_keys_is_written_as_formulas(name: str, does: str) -> None:
    (found,) = SHIPPED.resolve(name)
    assert found.name == name
    assert does in method(found)


LOSSES = """
recompute → PPO clip on π_θ/π_old to [0.8, 1.2]; where A < 0 the loss is at most −3 A
recompute@clip.low=inf:clip.dual=inf → PPO clip on π_θ/π_old to [−∞, 1.2]
ppo_is → PPO clip on π_θ/π_rollout to [0.8, 1.2]; where A < 0 the loss is at most −3 A
gspo@policy=current → PPO clip on (∏π_θ/π_rollout)^(1/n) to [0.9997, 1.0004]
cispo → REINFORCE times the clipped, constant π_θ/π_old to [0, 5]
pure_is → REINFORCE
"""


@pytest.mark.parametrize(("name", "does"), table(LOSSES))
def test_the_loss_is_written_with_its_anchor_and_its_clip(name: str, does: str) -> None:
    assert f"{loss(SHIPPED[name])} {clipped(SHIPPED[name])}".strip() == does


# ---------------------------------------------------------------- finding presets


def test_every_name_and_alias_finds_one_row() -> None:
    names = [plain(word) for one in SHIPPED.values() for word in (one.name, *one.aliases)]
    elsewhere = [word for word, meant in SHIPPED.aliases.items() if meant not in SHIPPED.rows]
    assert len({*names, *elsewhere}) == len(names) + len(elsewhere)
    assert all(SHIPPED[word].name == meant for word, meant in SHIPPED.aliases.items())


NAMES = """
none → recompute
trl_token_truncate@5 → token_is@5
bypass_pg_geo_rs@1.01 → bypass_ppo_clip_geo_rs@1.01:loss=reinforce
bypass_pg_geo_rs_token_tis → bypass_pg_geo_rs_seq_tis@weight.over=token
Seq_Is-rs → seq_mis
Token-IS@ 2.50 → token_is@2.5
"""


@pytest.mark.parametrize(("word", "name"), table(NAMES))
def test_a_name_that_people_search_for_is_one_of_the_methods(word: str, name: str) -> None:
    assert word in SHIPPED
    assert SHIPPED[word].name == name
    assert SHIPPED[word] == SHIPPED[name]


def test_a_list_of_names_keeps_the_order_asked_for_and_drops_repeats() -> None:
    own = Preset("own", "s")
    assert SHIPPED.resolve(["tis", own]) == (SHIPPED["token_is"], own)
    found = SHIPPED.resolve(" seq_mis, token-is,,seq_is_rs,TOKEN_TIS ")
    assert [preset.name for preset in found] == ["seq_mis", "token_is"]
    first, *others = SHIPPED.resolve("geo_rs,ALL")
    assert (first.name, len(others), SHIPPED.resolve("all")) == ("geo_rs", 45, tuple(SHIPPED.values()))


REFUSED = """
token_is,Seq-Miss → unknown preset "Seq-Miss" → did you mean "seq_mis"
zzzzzzzz → unknown preset "zzzzzzzz" → `offpol-diag presets` lists them
, → no preset is named → name some
mis → "mis" is another method in each trainer → in verl it is seq_mis (sequences outside a band of ∏r
seq_is_veto@2 → seq_is_veto takes 2 thresholds by position → write seq_is_veto@weight.upper..veto
token_is@ → weight.upper = ""; it must be a finite number → write token_is@
token_icepop@4..1 → weight.lower = 4; it must not exceed upper = 1.0 → write token_icepop@
geo_rs@0.9 → one number C for a band must be above 1, for [1/C, C] → write geo_rs@
gspo@0.2 → gspo takes 2 thresholds by position → write gspo@clip.low..clip.high; inf is no bound
recompute@weight.over=sum → weight: it needs upper, lower or both → write keys
token_is_veto@veto.lower=inf → veto: it needs upper, lower or both → write keys
token_is@policy=current → weight: under ppo_clip the ratio holds that of π_θ already → write keys
token_is@wieght.upper=3 → wieght: no such key; the keys are summary, policy → did you mean weight
token_is@weight.upper=big → weight.upper = "big"; it must be a finite number → write keys
token_is@weight=3 → weight = 3; it must be a table of over, action → write keys
token_is@reject[2].lower=1 → reject[2]: the preset has 0 rules → write keys
token_is@clip[0].low=1 → clip[0]: no such key → did you mean clip
"""


@pytest.mark.parametrize(("asked", "message", "hint"), table(REFUSED))
def test_what_names_no_preset_is_answered_with_what_does(asked: str, message: str, hint: str) -> None:
    found = refused(lambda: SHIPPED.resolve(asked))
    assert found[0].startswith(f"{asked}: {message}" if "@" in asked else message)
    assert found[1].startswith(hint)


def test_keys_beside_a_name_are_those_of_a_file(write: Write) -> None:
    found = SHIPPED["geo_rs@veto.lower=1e-6:clip.dual=inf:policy=current:loss=reinforce:note=mine"]
    assert (found.veto, found.clip, found.policy) == (Veto(1e-6), Clip(dual=None), "current")
    assert (found.loss, found.note, found.reject) == ("reinforce", "mine", SHIPPED["geo_rs"].reject)
    two = "[mine]\n[[mine.reject]]\nupper = 2\n[[mine.reject]]\nupper = 9"
    rules = load(write(two))["mine@reject.lower=0.5:reject[1].upper=8"].reject
    assert rules == (Reject(lower=0.5, upper=2.0), Reject(lower=0.5, upper=8.0))


# ---------------------------------------------------------------- presets where none are named

OLD, BYPASS = ("rollout_log_probs", "old_log_probs"), ("rollout_log_probs", "current_log_probs")


def test_twenty_methods_are_evaluated_by_default_and_those_of_the_dumps_trainer() -> None:
    usual = SHIPPED.usual(OLD)
    assert (len(usual), tuple(one.name for one in usual)) == (20, SHIPPED.default)
    further = SHIPPED.resolve("seq_icepop@inf..3,token_is@3,token_icepop@inf..3,seq_is@3")
    assert SHIPPED.usual(OLD, defaults("trl")) == (*usual, *further)


def test_without_the_old_policy_the_methods_of_the_current_one_stand_in_place_of_those_that_need_it() -> None:
    bypass = [name for name, one in SHIPPED.items() if one.kind == "bypass"]
    assert sorted(one.name for one in SHIPPED.usual(BYPASS)) == sorted(["ppo_is", *bypass])


@pytest.mark.parametrize("trainer", [name for name in TRAINERS if defaults(name)])
def test_the_defaults_of_a_trainer_are_its_own_and_at_most_six(trainer: str) -> None:
    rows = SHIPPED.resolve(",".join(defaults(trainer)))
    assert len(rows) == len(defaults(trainer)) <= 6
    assert not {one.name for one in rows} & set(SHIPPED.default)
    assert all(trainers_for(one, (trainer,)) for one in rows)


# ---------------------------------------------------------------- a user's file


def test_keys_arrive_that_no_built_in_row_has(write: Write) -> None:
    lines = """[mine]
    aliases = ["my_own"]
    weight = { over = "segment", action = "none", safety = 10, overflow = "zero" }
    reject = [{ upper = 2 }, { statistic = "k2", over = "min", upper = 2, safety = 3 }]
    veto = { upper = 100 }
    clip = { low = inf, dual = inf }"""
    found = load(write(lines))["my_own"]
    assert found.weight == Weight("segment", "none", safety=10.0, overflow="zero")
    assert found.reject == (Reject(upper=2.0), Reject("k2", "min", upper=2.0, safety=3.0))
    assert (found.veto, found.clip, found.aliases) == (Veto(upper=100.0), Clip(None, dual=None), ("my_own",))


def test_own_rows_come_after_the_built_in_ones_and_belong_to_all(write: Write) -> None:
    catalogue = load(write("\ufeff[mine]\r\n['mine_1.5']\r\n"))
    assert list(catalogue) == [*SHIPPED, "mine", "mine_1.5"]
    assert catalogue.resolve("all")[-1].name == catalogue.usual(OLD)[-1].name == "mine_1.5"
    assert catalogue["mine"].summary == "from mine.toml"


def test_an_own_row_replaces_a_built_in_one_and_takes_aliases(write: Write) -> None:
    rows = "[Seq-MIS]\nweight = { over = 'sum', upper = 7 }\n[geo_mis]\nveto = { lower = 0.1 }\n[tis]\n"
    catalogue = load(write(rows))
    assert (catalogue["seq_mis"].weight, catalogue["seq_mis"].reject) == (Weight("sum", upper=7.0), ())
    assert list(catalogue).index("Seq-MIS") == list(SHIPPED).index("seq_mis")
    assert (catalogue["geo_mis"].veto, catalogue["geo_rs"].aliases) == (Veto(0.1), ())
    assert catalogue["tis"].name == "tis"
    assert len(catalogue) == len(SHIPPED) + 2
    assert "seq_is_rs" not in catalogue


def test_an_own_row_has_the_thresholds_of_its_bounds_or_those_that_it_names(write: Write) -> None:
    catalogue = load(
        write("[mine]\nweight = { upper = 7 }\nveto = { lower = 0.1 }\n[other]\nat = ['clip.low']")
    )
    assert (catalogue["mine@3..0.2"].weight, catalogue["mine@3..0.2"].veto) == (Weight(upper=3.0), Veto(0.2))
    assert catalogue["other@0.5"].clip == Clip(low=0.5)


SLIPS = """
weight = { uper = 2 } → weight.uper: no such key; the keys are over, action, upper, lower, normalize, safety,
weight = 2.0 → weight = 2.0; it must be a table of over, action, upper, lower, normalize, safety, safety_at
weight = { upper = true } → weight.upper = true; it must be a finite number
weight = { lower = -0.1 } → weight.lower = -0.1; it must not be negative
weight = { lower = 3, upper = 2 } → weight.lower = 3; it must not exceed upper = 2.0
reject = [{ upper = 2 }, { lower = 0 }] → reject[1].lower = 0; it must be above 0
reject = { statistic = "k3", upper = -1 } → reject.upper = -1; it must not be negative
reject = { statistic = "k2", over = "batch", lower = 1, upper = 2 } → reject: over a batch it takes upper
reject = { over = "batch", upper = 0.04 } → reject.statistic = "ratio"; over a batch it must be one of
clip = { dual = 1 } → clip.dual = 1; it must be above 1
at = "weight.upper" → at = "weight.upper"; it must be an array of strings
note = 2026-01-14 → note = "2026-01-14"; it must be a string
"""


@pytest.mark.parametrize(("line", "said"), table(SLIPS))
def test_a_mistake_names_file_table_key_and_what_is_allowed(write: Write, line: str, said: str) -> None:
    message, _ = refused(lambda: load(write(f"[mine]\n{line}\n")))
    assert message.startswith(f"mine.toml: [mine] {said}")


def test_a_long_value_is_cut(write: Write) -> None:
    message, _ = refused(lambda: load(write(f"[mine]\nweight = {{ upper = 1{'0' * 400} }}")))
    assert message == f"mine.toml: [mine] weight.upper = 1{'0' * 56}...; it must be a finite number"


FILES = [
    ("", "mine.toml: holds no preset", "[name]"),
    ("[a]\nweight = {upper = 2\n", "mine.toml: not TOML: Unclosed inline table (at line 2, column 20)", ""),
    ("['a b']\n", 'mine.toml: ["a b"]: "a b" cannot be a name: letters, digits and _ . + - make one', ""),
    ("[a]\naliases = ['b,c']\n", 'mine.toml: [a]: "b,c" cannot be a name', ""),
    ("[a_b]\n[A-B]\n", 'mine.toml: [A-B]: "A-B" already finds [a_b]', ""),
    ("[a]\naliases = ['geo-rs']\n", 'mine.toml: "geo_rs" is the name of a built-in preset', ""),
    ("[a]\nloss = 'ppo-clip'\n", 'mine.toml: [a] loss = "ppo-clip"', "did you mean ppo_clip?"),
    ("a = " + "[" * 5000, "mine.toml: not TOML: ", ""),
]


@pytest.mark.parametrize(("text", "said", "hint"), FILES, ids=[text[:30] for text, *_ in FILES])
def test_a_file_that_holds_no_catalogue(write: Write, text: str, said: str, hint: str) -> None:
    found = refused(lambda: load(write(text)))
    assert found[0].startswith(said)
    assert hint in found[1]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"[mine]\nnote = '\xff'\n")
    assert refused(lambda: load(tmp_path))[0].endswith("cannot be read (a directory, a device or a pipe)")
    assert "mine.toml: not TOML: 'utf-8' codec can't decode byte 0xff" in refused(lambda: load(path))[0]


@pytest.mark.parametrize("kind", [Preset, Weight, Reject, Veto, Clip], ids=lambda kind: kind.__name__)
def test_the_page_names_every_key_and_word(kind: type) -> None:
    page = (HERE.parent / "docs" / "preset-files.md").read_text(encoding="utf-8")
    hints = get_type_hints(kind)
    keys = {field.name for field in fields(kind)} - {"name"}
    words = {word for hint in hints.values() if get_origin(hint) is Literal for word in get_args(hint)}
    assert [word for word in (*keys, *words) if f"`{word}`" not in page] == []

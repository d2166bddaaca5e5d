"""The text of tokens in a report, from a tokenizer.json."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from offpol_diag.errors import UsageError
from offpol_diag.report.page import page
from offpol_diag.report.parts import strips, with_texts
from tests import oracles
from tests.reading import analyze

WORDS = ("<s>", "we", "Ġneed", "Ċ", "<blink>", "Ã")


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """Make a byte-level tokenizer: whole words, a line end, markup, and one byte of a longer character."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    rows = oracles.make_rows(0.3, seed=2, many=12)
    for row in rows:
        row["token_ids"] = [(t * 5 + i) % (len(WORDS) + 1) for i, t in enumerate(row["token_ids"])]
    return analyze([oracles.write(rows, tmp_path_factory.mktemp("dump") / "d.parquet")])


def test_every_token_that_is_shown_has_its_text(summary, vocabulary):
    found = with_texts(summary, vocabulary)

    assert found.charts.token_texts == {
        "0": "<s>",
        "1": "we",
        "2": "·need",
        "3": "↵",
        "4": "<blink>",
        "5": "Ã",
    }
    shown = {x.text for one in strips(found) for x in one[1] if not x.look.startswith("mk")}
    assert shown == {"<s>", "we", "·need", "↵", "<blink>", "Ã", "6"}  # 6 is in no vocabulary


def test_the_page_shows_the_text_escaped_and_nothing_else_changes(summary, vocabulary):
    found = with_texts(summary, vocabulary)
    drawn = page(found)

    assert "·need" in drawn
    assert "<blink>" not in drawn
    without = found.model_copy(update={"charts": found.charts.model_copy(update={"token_texts": {}})})
    assert without == summary
    assert "·need" not in page(without)


def test_without_texts_the_worst_responses_are_a_table(summary):
    assert strips(summary) == []
    drawn = page(summary)
    assert 'class="strip"' not in drawn
    assert all(one.sequence_id in drawn for one in summary.worst)


@pytest.mark.parametrize("text", [None, "", "{}", json.dumps({"model": {"type": "no such"}}), "\x00\x1b[2J"])
def test_a_file_that_is_no_tokenizer_is_one_error(summary, tmp_path, text):
    path = tmp_path / "tokenizer.json"
    if text is not None:
        path.write_text(text)

    with pytest.raises(UsageError, match="--tokenizer: cannot read") as caught:
        with_texts(summary, path)
    assert caught.value.hint
    assert caught.value.message.isprintable()

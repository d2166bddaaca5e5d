"""One table of refusals: what is wrong, where, and what to do; exit code 2, no traceback, nothing written."""

import json
import os
import re
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.cli import app
from offpol_diag.printable import CONTROLS
from tests import factory
from tests.factory import make_summary
from tests.reading import opened

EVIL = "x\x1b[31m\x9b2J\x07\u202e\n::error::pwned\r\n  ::stop-commands::t\u2028##[error]y\udcff"
NAN, INF = float("nan"), float("inf")
SAMPLE = Path(__file__).parents[1] / "sample_data" / "healthy.parquet"
ROLLOUT, OLD, MASK = "rollout_log_probs", "old_log_probs", "response_mask"
GOOD = [[-0.5, -1.0], [-2.0], [-0.25], [-0.125, -4.0]]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in [*(x for x in os.environ if x.startswith("OFFPOL_DIAG_")), "COLUMNS", "GITHUB_ACTIONS"]:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def harmless(text):
    """Check that a text has no character that a terminal obeys, and no line that CI runs."""
    assert not [char for char in text if char != "\n" and unicodedata.category(char) in CONTROLS]
    assert not re.search(r"^\s*::|##\[", text, re.MULTILINE)


def refused(words, data=None):
    """Run a command that is refused: one harmless error and hint on stderr, no file; return both."""
    before = {path: path.lstat().st_mtime_ns for path in Path().rglob("*")}
    ran = CliRunner().invoke(app, words.split() if isinstance(words, str) else [*words], input=data)
    assert (ran.exit_code, ran.stdout) == (2, ""), ran.output
    error, hint = ran.stderr.split("\n\n")
    assert (error[:7], hint[:6], hint.count("\n"), len(ran.stderr) < 10_000) == ("error: ", "hint: ", 1, True)
    harmless(ran.stderr)
    assert {path: path.lstat().st_mtime_ns for path in Path().rglob("*")} == before
    return error[7:], hint[6:]


def check(line, *begins):
    """Check how the error and the hint of a refusal begin."""
    said = refused(line)
    assert tuple(x[: len(begin)] for x, begin in zip(said, begins, strict=True)) == begins, said


# ---------------------------------------------------------------- dumps


def write(path="a.parquet", **columns):
    """Write a dump of `columns` on top of good rollout and old log-probs, two rows in a row group."""
    return factory.write(Path(path), None, 2, **{ROLLOUT: GOOD, OLD: GOOD} | columns)


def two(one, other):
    return lambda: [write("a.parquet", **one), write("b.parquet", **other)]


def raw(data):
    return lambda: Path("a.parquet").write_bytes(data)


def jsonl():
    return Path("b.jsonl").write_text('{"logprobs": [-1.0], "old_logprobs": [-1.0]}')


def damaged(change, **options):
    """Return a writer of a damaged file of two row groups; numbers are rounded, for a codec stores noise."""

    def made():
        logs = [*-np.random.default_rng(0).exponential(size=(400, 20)).round(1)]
        how = {"row_group_size": 200, "use_dictionary": False} | options
        pq.write_table(pa.table({ROLLOUT: logs, OLD: logs}), "a.parquet", **how)
        chunk, path = pq.read_metadata("a.parquet").row_group(1).column(1), Path("a.parquet")
        at = chunk.data_page_offset + chunk.total_compressed_size // 2
        path.write_bytes(change(path.read_bytes(), at))

    return made


def torn(data, at):
    return data[:at] + bytes(b ^ 0xFF for b in data[at : at + 64]) + data[at + 64 :]


def twice():
    pq.write_table(pa.Table.from_arrays([pa.array(GOOD)] * 3, names=[ROLLOUT, OLD, OLD]), "a.parquet")


def by_token(**more):
    logs = {"rollout_log_prob": [-1.0, -0.5, -2.0, -0.25], "old_log_prob": [-1.0, -0.5, -2.0, -0.25]}
    return {ROLLOUT: None, OLD: None, "sequence_id": [0, 0, 1, 1]} | logs | more


POSITIVE = {ROLLOUT: [[-1.0]] * 32, OLD: [[0.5]] * 28 + [[-1.0]] * 4}
LONG = pa.ListArray.from_arrays(pa.array([0, 5_000_000], pa.int32()), pa.repeat(pa.scalar(-1.0), 5_000_000))
WITHOUT = {ROLLOUT: None, OLD: None, "prompt": ["p"] * 4}
NOT_UTF8 = pa.array([b"a", b"b", b"a", b"\xff\xfe"])
NOT_TEXT = pa.Array.from_buffers(pa.string(), 4, pa.array([b"a", b"a", b"b", b"\xff"]).buffers())
NO_TYPE = {ROLLOUT: (["-1"],), OLD: ([1], [[-1.0]], "[-1.0]"), MASK: (["1"], 1), "token_ids": ([1.0],)}
NO_TYPE |= {"rewards": ([1.0],), "advantages": ("1",), "weight_versions": (1,), "step": ("one",)}
NO_TYPE |= {"policy_lag": (True,), "finish_reason": (1,), "prompt_ids": ([1.5], 1), "group_id": ({"a": 1},)}
SKIP = "a.parquet --on-bad-row skip"
BROKEN = ", row group 1, from row 200 on: the data cannot be read"
WRITE_AGAIN, IF_NOT = "write the column again in that type", "if such tokens do not count, set their"
DUMPS = [  # columns of a.parquet, or what writes files; what is read; what is said of a.parquet, and to do
    # files
    (lambda: write("step_100.parquet"), "step_10.parquet", "step_10.parquet: no such", "did you mean"),
    (dict, "none*.parquet", "none*.parquet: no file is there that can be read", "a directory is searched"),
    *((lambda: os.mkfifo("pipe.parquet"), one, "pipe.parquet: a device or a pipe", "name a file")
      for one in ("pipe.parquet", "p*.parquet")),
    (raw(b""), "", ": cannot be read as Parquet (Parquet file size is 0 bytes", "check that it may be read"),
    (raw(b"{}\n" * 9), "", ": cannot be read as Parquet (Parquet magic bytes not", "check that it may be"),
    (damaged(lambda data, at: data[:-200] + b"\xff" * 192 + data[-8:]), "", ": cannot be read as", ""),
    (damaged(torn, compression="zstd"), "", BROKEN, "the file is damaged"),
    (damaged(torn, compression="none", write_page_checksum=True), SKIP, BROKEN, "the file is damaged"),
    # forms
    (lambda: [write(), jsonl()], "*.*", "the files are of several forms: a.parquet is parquet;", "name"),
    (jsonl, "b.jsonl --group-by no", "b.jsonl: --group-by: there is no column 'no'", "the columns are"),
    (jsonl, "b.jsonl --columns old=no", "b.jsonl, line 1: --columns: there is no column 'no'", "the columns"),
    # columns
    ({ROLLOUT: None}, "", ": no column holds rollout_log_probs", "name it with --columns rollout=…;"),
    ({OLD: None}, "", ": no column holds old_log_probs or current_log_probs", "name it with --columns"),
    (WITHOUT, "", ": no column holds rollout_log_probs, and none old_log", "name it with --columns"),
    (WITHOUT | {"completion": ["c"] * 4}, "", ": no column holds", "docs/trainers/trl.md has a hook"),
    ({}, "a.parquet --columns old=zzz", ": --columns: there is no column 'zzz'", "the columns are rollout"),
    ({}, "a.parquet --columns rolout=x", "--columns rolout=x: no part is called", "did you mean rollout"),
    ({"logprobs": GOOD}, "", ": rollout_log_probs and logprobs can each be the rollout", "say which:"),
    ({"host": ["x"] * 4}, "a.parquet --group-by hots", ": --group-by: there is no column", "did you mean"),
    ({"pairs": [[1]] * 4}, "a.parquet --group-by pairs", ", row group 0, rows 0 to 1, column 'pairs'", ""),
    (twice, "", ": two columns are called 'old_log_probs'", "write the file again"),
    *(({name: [value] * 4}, "", f": column {name!r} holds ", WRITE_AGAIN)
      for name, each in NO_TYPE.items() for value in each),
    (two({"token_ids": [[1]] * 4}, {}), ".", " and b.parquet differ: column 'token", "read files of one"),
    (two({"log_prob": GOOD}, {"current_log_probs": GOOD}), ".", " and b.parquet differ: col", "read files"),
    # rows: of several bad ones the first is named
    ({OLD: [[-0.5, NAN], [-2.0], [NAN], [NAN, NAN]]}, "", ", row group 0, row 0, column 'old_log", IF_NOT),
    ({ROLLOUT: None, "logprobs": [[-1.0, INF], *GOOD[1:]]}, "", ", row group 0, row 0, column", IF_NOT),
    ({MASK: [[0] * len(row) for row in GOOD]}, "", ": no token is left in 4 rows", ""),
    ({ROLLOUT: [], OLD: []}, "", ": the dump is empty: it has no row", "was its writer closed?"),
    ({ROLLOUT: LONG, OLD: LONG}, "", ", row group 0, row 0, column 'rollout_log_probs': it holds", ""),
    (POSITIVE, "", ", column 'old_log_probs': 28 of 32 tokens are above 0: it has the wrong", "a log-prob"),
    ({OLD: [[NAN] * len(row) for row in GOOD]}, SKIP, ": no token is left in 4 rows; 4 are bad, the fir", ""),
    ({"group_id": NOT_UTF8}, "", ", row group 1, rows 2 to 3, column 'group_id': no label", "write the"),
    ({"host": NOT_UTF8}, "a.parquet --group-by host", ", row group 1, rows 2 to 3, column 'host': no", ""),
    # a row per token
    (by_token(sequence_id=None), "", ": no column holds sequence_id (a row is a token)", "name it"),
    (by_token(sequence_id=[0, 1, 0, 1]), "", ", row 2: the sequence '0' comes back after another", "sort it"),
    (by_token(sequence_id=[0, None, 1, 1]), "", ", row 1, column 'sequence_id': it is null", "give every"),
    (by_token(sequence_id=NOT_TEXT), "", ", from row 3 on, column 'sequence_id': no label", "write the"),
    (by_token(sequence_id=NOT_TEXT.view(pa.binary())), "", ", from row 3 on, column", "write"),
    (by_token(position=[1, 0, 0, 1]), "", ", row 1: positions do not rise within a sequence", "sort it"),
    (two(by_token(), by_token()), ".", "b.parquet, row 0: the sequence '0' comes back", "sort it: polars"),
]  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("made", "line", "error", "hint"), DUMPS, ids=[f"{x[2]} {x[1]}" for x in DUMPS])
def test_a_dump_that_cannot_be_read_is_refused(made, line, error, hint):
    made() if callable(made) else write(**made)
    check(f"doctor {line or 'a.parquet'} -q", "a.parquet" * (error[0] in " :,") + error, hint)


def test_of_a_folder_the_best_form_is_read_and_what_nobody_asked_for_may_be_anything():
    write(other=NOT_UTF8, x=[[1]] * 4)
    os.mkfifo("pipe.parquet")
    jsonl()
    for name in ("r.json", "empty.jsonl"):
        Path(name).touch()
    assert factory.read(".").tokens == 6


# ---------------------------------------------------------------- rows

BAD_ROWS = [  # what row 2 (row group 1) has in place of a good value, and what is said of it
    ({OLD: [-1.0, -1.0]}, "column 'old_log_probs': it holds 2 values and rollout_log_probs holds 1"),
    ({MASK: []}, "column 'response_mask': it holds 0 values"),
    ({ROLLOUT: None}, "'rollout_log_probs': there is null where a list"),
    ({OLD: [None]}, "'old_log_probs': token 0 is nan, and a token that counts needs a finite value"),
    ({ROLLOUT: [0.5]}, "token 0 is 0.5, and a log-probability is at most 0"),
    ({MASK: [None]}, "'response_mask': token 0 is null, and a mask is 0 or 1"),
    ({MASK: [2]}, "column 'response_mask': token 0 is 2, and a mask is 0 or 1"),
    ({"token_ids": [None]}, "'token_ids': token 0 is null"),
    ({"advantages": [NAN]}, "column 'advantages': token 0 is nan"),
    ({"weight_versions": [-2]}, "token 0 is -2, and a version is at least 0"),
    ({"prompt_ids": [1, None]}, "column 'prompt_ids': token 1 is null, and a prompt is token ids"),
    ({"prompt_length": -1}, "column 'prompt_length': it is -1, and a length is needed"),
    ({"rewards": None}, "column 'rewards': it is nan, and a finite number is needed"),
    ({"step": INF}, "column 'step': it is inf, and a number within 64 bits is needed"),
    ({"policy_lag": 2.0**63}, "column 'policy_lag': it is 9.22337e+18, and a number within 64 bits"),
]
FILLED = dict.fromkeys((ROLLOUT, OLD, "current_log_probs", "advantages", "entropy"), GOOD)
FILLED |= {name: [[1] * len(row) for row in GOOD] for name in (MASK, "token_ids", "weight_versions")}
FILLED |= {"prompt_ids": [[1]] * 4, "rewards": [1.0] * 4, "prompt_length": [7.0] * 4}
FILLED |= {"step": [1.0, NAN, 1.0, None], "policy_lag": [1.0] * 4}


def spoilt(change):
    """Return good columns with some values of row 2 changed."""
    return FILLED | {name: [*FILLED[name][:2], value, FILLED[name][3]] for name, value in change.items()}


@pytest.mark.parametrize(("change", "says"), BAD_ROWS, ids=str)
def test_a_bad_row_is_named_by_its_place_or_left_out_and_counted(change, says):
    path = write(**spoilt(change))
    error, _ = refused(f"doctor {path} -q")
    assert error.startswith("a.parquet, row group 1, row 2, column ")
    assert says in error
    for tokens in (1, 1_000_000):
        assert factory.refusal(path, batch_tokens=tokens).message == error
        dump = opened(path, on_bad_row="skip", batch_tokens=tokens)
        batches = [*dump.batches()]
        assert [name for batch in batches for name in batch.scalars["sequence_id"]] == [0, 1, 3]
        assert [x for batch in batches for x in batch.rollout.tolist()] == [-0.5, -1.0, -2.0, -0.125, -4.0]
        assert (dump.seen.skipped, dump.seen.examples) == (1, [error])


@pytest.mark.parametrize("change", [change for change, _ in BAD_ROWS], ids=str)
def test_a_row_that_a_reader_would_refuse_is_refused_by_the_writer(change, tmp_path):
    writer = offpol_diag.DumpWriter(tmp_path)
    writer.write(**FILLED)
    with pytest.raises((ValueError, TypeError)):
        writer.write(**spoilt(change))


def test_the_first_skipped_row_is_described_and_a_row_of_several_faults_is_one():
    old = [[NAN]] * 19 + [[-1.0]]
    path = write(**{ROLLOUT: [[0.5]] * 2 + [[-1.0]] * 18, OLD: old})
    dump = opened(path, on_bad_row="skip", batch_tokens=1)
    assert [batch.sequences for batch in dump.batches()] == [1]
    assert dump.seen.skipped == 19
    assert [", row 0, " in said for said in dump.seen.examples] == [True]


# ---------------------------------------------------------------- commands


@pytest.fixture
def given():
    """Make a dump, results of this and other versions, and files that are cut off."""
    shutil.copy(SAMPLE, "sampled.parquet")
    text = make_summary().to_json()
    older = text.replace('"format":3', '"format":2', 1)
    texts = {"r.json": text, "older.json": older, "cut.json": text[:500]}
    texts |= {"empty.json": "", "empty.jsonl": "", "other.json": '{"a": 1}', "list.json": "[]"}
    for name, words in texts.items():
        Path(name).write_text(words, encoding="utf-8")
    Path("bytes.json").write_bytes(b"\xff")
    os.mkfifo("pipe")


GIVE = "give the file that `offpol-diag analyze --json` wrote"
NO_RESULT = "this is not a result of this version of offpol-diag"
TWICE = "two results cannot both go to one place"
ANALYZE = "analyze sampled.parquet -q "
COMMANDS = [
    # what is read
    *((f"{one} r.json", "r.json: not a form of dump that is known", "`offpol-diag report r.json` draws")
      for one in ("analyze --no-html", "doctor", "convert --to x.parquet")),
    ("gate older.json --max k3=1", f"older.json: {NO_RESULT} (format: Input should be 3)", GIVE),
    ("report older.json", f"older.json: {NO_RESULT} (format: Input should be 3)", GIVE),
    *((f"gate {one} --max k3=1", f"{one}: ", GIVE) for one in ("empty.json", "list.json", "bytes.json")),
    *((f"report {one}.json", f"{one}.json: {NO_RESULT}", GIVE) for one in ("empty", "cut", "other")),
    # what is written
    (ANALYZE + "-o .", ".: no file can be written there", "name a file in a directory that exists"),
    *((f"{ANALYZE}{one} no/r", "no/r: no file can be written there", "name a file in a directory")
      for one in ("-o", "--json", "--md", "--sequences")),
    (ANALYZE + "--sequences rows -o ./rows", TWICE, "give each"),
    (ANALYZE + "--json - --md -", TWICE, "give each"),
    ("report r.json -o r.json", "r.json: is what is read", "write to another file"),
    ("convert sampled.parquet", "missing option '--to'", "see `offpol-diag convert --help`"),
    ("convert sampled.parquet --to sampled.parquet", "sampled.parquet: is what is read", "write to another"),
    ("convert sampled.parquet --to pipe", "pipe: a device, or what is read", "write to another"),
    # values
    ("gate", "missing argument 'DUMP'", "see `offpol-diag gate --help`"),
    *((f"{ANALYZE}{option} x", f"invalid value for '{option}': ", "")
      for option in ("--seed", "--threads", "--engine", "--on-bad-row")),
    (ANALYZE + "--threads 0", "invalid value for '--threads': ", ""),
    (ANALYZE + "--device tpu", "device 'tpu' is not known", "give auto, cpu, cuda"),
    (ANALYZE + "--columns rollout", "sampled.parquet: --columns: there is no column ''", "the columns are"),
    (ANALYZE + "--preset-file none.toml", "none.toml", ""),
    ("gate sampled.parquet --max k3", "--max", "docs/ci.md has the form"),
    ("gate sampled.parquet --gates none.toml", "none.toml", ""),
    ("gate sampled.parquet --baseline none.json", "none.json", ""),
    ("check --for trl sampled.parquet --logged none.jsonl", "none.jsonl", ""),
]  # fmt: skip


@pytest.mark.parametrize(("line", "error", "hint"), COMMANDS, ids=[line for line, *_ in COMMANDS])
def test_a_command_that_cannot_be_meant_is_refused(given, line, error, hint):
    check(line, error, hint)


def test_the_gate_takes_a_result_from_a_pipe_or_in_python_and_no_other_file(given):
    text = Path("r.json").read_text()
    for given in (text, json.dumps(json.loads(text), separators=(",", ":"))):
        assert CliRunner().invoke(app, ["gate", "-", "--max", "k3=100", "-q"], input=given).exit_code == 0
    for name in ("sampled.parquet", "cut.json", "older.json"):
        assert refused("gate - --max k3=100 -q", Path(name).read_bytes())[0].startswith("stdin: ")
    assert [offpol_diag.gate("r.json", max={"k3": most}).passed for most in (100, 1e-9)] == [True, False]


# ---------------------------------------------------------------- hostile texts, numbers and files

DIGITS, NUL, LONG_NAME = "9" * 5000, "a\\u0000b", "n" * 300
FILE, READ, TOML = "offpol-diag.toml", ("analyze", "-q", "--no-html"), ("presets", "--preset-file", "f.toml")
GATES, IN_GATE = ("gate", "r.json", "--gates", "f.toml"), ("gate", "r.json")
ARRAYS, TABLES = f"{'[' * 5000}{']' * 5000}", f"{'{a = ' * 2000}1{'}' * 2000}"
KEY = json.dumps(EVIL.replace("\udcff", "").replace("\u202e", ""))[1:-1]
SETTINGS = {
    "presets = ['seq_miss']": 'unknown preset "seq_miss"',
    "columns = 'rollout'": "--columns: there is no column ''",
    "seed = 'x'": "invalid value for '--seed': ",
    "trainer = 'verll'": "unknown trainer",
    "presests = 'tis'": "{}: there is no setting 'presests'",
    "presets = [": "{}: cannot be read as TOML",
}
PROJECT = "pyproject.toml"
ODD = [  # file, its text, a command, and what its error holds
    # names of everything that a name may be
    *((FILE, "", [word.format(EVIL) for word in words], "") for words in (
        ("report", "{}.json"), ("analyze", "{}.parquet"), ("presets", "{}"), ("{}",), (*IN_GATE, "--{}"),
        ("presets", "token_is", "--for", "{}"), ("presets", "token_is@{}=1"), (*IN_GATE, "--max", "{}"),
        ("presets", "--preset-file", "{}"), (*IN_GATE, "--baseline", "r.json", "--tolerance", "{}"),
        ("report", "r.json", "-o", "no/{}"), (*READ, "--threads", "{}"))),
    (FILE, f'"{KEY}" = 1', ["analyze"], ""),
    (FILE, f'device = "{KEY}"', READ, ""),
    ("f.toml", f'[a]\n"{KEY}" = 1', TOML, ""),
    ("f.toml", f'["{KEY}"]\nx = 1', GATES, ""),
    ("f.json", f'{{"{KEY}": 1}}', ["report", "f.json"], ""),
    # settings
    *((FILE, text, READ, said.format(FILE)) for text, said in SETTINGS.items()),
    *((PROJECT, f"[tool.offpol-diag]\n{text}", READ, x.format(PROJECT)) for text, x in SETTINGS.items()),
    # without bounds
    *((FILE, "", words, "") for words in (
        (*READ, "--seed", str(2**63)), (*READ, "--seed", DIGITS), (*READ, "--threads", DIGITS),
        (*READ, "--threads", "10000"), ("presets", f"token_is@weight.upper={'[' * 5000}"),
        (*IN_GATE, "--max", f"k3={DIGITS}"), ("sweep", "-q", "--preset", "token_is", "--at", DIGITS),
        ("analyze", "-q", f"{LONG_NAME}.parquet"), ("report", "r.json", "-o", f"{LONG_NAME}.html"),
        (*READ, "--sequences", LONG_NAME), (*IN_GATE, "--gates", LONG_NAME))),
    *((FILE, f'{name} = "{NUL}"', READ, "") for name in ("dump", "preset_file", "group_by")),
    (FILE, f'columns = "rollout={NUL}"', READ, ""),
    *((file, f"{before} = {deep}", words, "nest") for deep in (ARRAYS, TABLES) for file, before, words in (
        (FILE, "presets", READ), ("f.toml", "[x]\nweight", TOML), ("f.toml", "[max]\nname", GATES))),
    ("f.json", "[" * 100_000, ["report", "f.json"], ""),
    ("f.json", '{"format": 3, "dump": ' * 900 + "1" + "}" * 900, ["report", "f.json"], ""),
]  # fmt: skip


@pytest.mark.parametrize(("file", "text", "words", "said"), ODD, ids=range(len(ODD)))
def test_what_is_odd_is_refused_in_words_that_are_harmless(file, text, words, said, given):
    Path(file).write_text(text)
    assert said in refused(words)[0]


WHOLE = [("report",), ("gate", "r.json", "--baseline"), ("presets", "--preset-file")]


@pytest.mark.parametrize("words", WHOLE)
@pytest.mark.timeout(20)
def test_devices_and_files_that_are_too_large_are_not_read(words, given, monkeypatch):
    for place in ("/dev/zero", "pipe", "."):
        refused([*words, place])
    for most in ("presets.catalogue.MOST_TOML", "files.MOST_TOML", "result.MOST_RESULT"):
        monkeypatch.setattr(f"offpol_diag.{most}", 4096)
    Path("large").write_bytes(b"x" * 5000)
    assert "MiB" in refused([*words, "large"])[0]
    assert "larger" in refused("report -", b"x" * 5000)[0]

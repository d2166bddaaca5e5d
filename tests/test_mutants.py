"""Damaged dumps of every form: read, or refused by one error; nothing half-written, below 2 GB.

`python -m tests.test_mutants SEED INPUTS` judges inputs, each of which depends on its seed and number alone.
"""

import contextlib
import gzip
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import traceback
from functools import cache, partial
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.errors import OffpolError
from tests import test_forms as forms
from tests.factory import read
from tests.test_read import WAYS
from tests.test_refusals import EVIL, harmless

MEMORY = 2 << 30
"""Bytes of address space beyond those of the process when it begins."""
SLOW = [pytest.param(seed, 4000, marks=pytest.mark.slow) for seed in (1, 2)]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of memory is set as on Linux")
@pytest.mark.parametrize(("seed", "inputs"), [(0, 1000), *SLOW])
def test_a_damaged_input_is_read_or_refused(seed, inputs):
    command = [sys.executable, "-m", "tests.test_mutants", str(seed), str(inputs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bad"] == {}
    assert inputs * 0.2 < found["refused"] < inputs * 0.8, "mutants are neither all harmless nor all broken"


# ---------------------------------------------------------------- whole files


WRITTEN = ("large lists of float32", "fixed-size lists", "a row per token", "JSON lines, compressed")
FORMS = [forms.nemo_rl, forms.prime_rl, forms.slime, partial(forms.ranks, context=2, miles=False)]
FORMS += [partial(forms.ranks, context=2, padded=True), forms.skyrl]
FORMS += [lambda folder, way=way: WAYS[way][1](folder, WAYS[way][0]()[:8]) for way in WRITTEN]


@cache
def files(form):
    """Return the files of a form."""
    with tempfile.TemporaryDirectory() as name:
        FORMS[form](Path(name))
        return contents(Path(name))


def contents(folder):
    return {str(x.relative_to(folder)): x.read_bytes() for x in sorted(folder.rglob("*")) if x.is_file()}


# ---------------------------------------------------------------- damage

ODD = ["", " ", EVIL, "\x00", "\ud800", "</script>", "[/]", "nan", "1e999", "9" * 5000, "é" * 300]
NUMBERS = [0, 1, -1, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**400, -0.0, 0.5, -0.5, 1e-320, 1.7e308]
NUMBERS += [float("nan"), float("inf"), -float("inf")]
VALUES = [None, True, [], {}, [0.5] * 1000, [[1]], {"a": 1}, *ODD, *NUMBERS, *NUMBERS]
PIECES = [b"\x00", b"\xff", b"\xed\xa0\x80", b"\x1b[2J", b"\n", b"[", b"}", b'"', b",", b"=", b"1e999"]


def changed(random, at):
    """Change a value in a tree of lists and dicts, or leave one out, or repeat it."""
    if not isinstance(at, dict | list) or not at or random.random() < 0.02:
        same = [x for x in VALUES if isinstance(x, type(at)) and not isinstance(x, bool)]
        return random.choice(same if same and random.random() < 0.8 else VALUES)
    copy, key = at.copy(), random.choice([*at] if isinstance(at, dict) else range(len(at)))
    change = random.choice(["remove", "repeat", *["go on"] * 8])
    if change == "go on":
        copy[key] = changed(random, copy[key])
    elif change == "remove":
        del copy[key]
    elif isinstance(copy, dict):
        copy[f"{key}x"] = copy[key]
    else:
        copy.insert(key, copy[key])
    return copy


def torn(random, whole):
    """Flip bits, cut, or put something between, a few times."""
    for _ in range(random.choice([1, 1, 2, 4, 16])):
        at = random.randrange(len(whole) or 1)
        bit = bytes([(whole[at] if whole else 0) ^ 1 << random.randrange(8)])
        flipped, put = whole[:at] + bit + whole[at + 1 :], whole[:at] + random.choice(PIECES) + whole[at:]
        end = at + random.choice([1, 8, 64, 1024])
        whole = random.choice([flipped, flipped, flipped, put, whole[:at] + whole[end:], whole[:at]])
    return whole


def damaged(random, name, data):
    """Damage a value of a file, or where that gives no file of the kind, its bytes."""
    stream = io.BytesIO()
    with contextlib.suppress(Exception):  # of any library
        if random.random() < 0.4 or name.endswith(".pkl"):
            return torn(random, data)
        if name.endswith(".parquet"):
            columns = changed(random, pq.read_table(io.BytesIO(data)).to_pydict())
            pq.write_table(pa.table(columns), stream, row_group_size=3)
            return stream.getvalue()
        if name.endswith(".pt"):
            torch.save(changed(random, torch.load(io.BytesIO(data))), stream)
            return stream.getvalue()
        unfold, fold = (gzip.decompress, gzip.compress) if name.endswith(".gz") else (bytes, bytes)
        rows = unfold(data).splitlines()
        at = random.randrange(len(rows))
        rows[at] = json.dumps(changed(random, json.loads(rows[at]))).encode()
        return fold(b"\n".join(rows))
    return torn(random, data)


# ---------------------------------------------------------------- answers


def refused(source):
    """Convert the files of this folder, read what is made, and return whether either was refused."""
    before = contents(Path())
    ran = CliRunner().invoke(app, ["convert", source, "--to", "out.parquet"])
    harmless(ran.stderr)
    if ran.exit_code == 0:
        with contextlib.suppress(OffpolError):
            assert read("out.parquet").tokens > 0
            return False
        return True
    assert ran.exit_code == 2, ran.stderr
    assert "malloc of size" not in ran.stderr, "it takes all the memory there is"
    error, hint = ran.stderr.split("\n\n")
    assert (error[:7], hint[:6], hint.count("\n")) == ("error: ", "hint: ", 1)
    assert contents(Path()) == before
    return True


def main(seed, inputs):
    """Judge inputs, and print how many were refused, and what is wrong with which."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, resource.RLIM_INFINITY))
    count, bad = 0, dict[int, str]()
    for number in range(int(inputs)):
        random = Random(f"{seed}:{number}")
        form = random.randrange(len(FORMS))
        given = dict(files(form))
        name = random.choice([*given])
        given[name] = damaged(random, name, given[name])
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            for file, content in given.items():
                Path(file).parent.mkdir(parents=True, exist_ok=True)
                Path(file).write_bytes(content)
            try:
                count += refused("." if len(given) > 1 else name)
            except Exception:
                bad[number] = f"{form}, {name}: {traceback.format_exc()[-1000:]}"
    sys.stdout.write(json.dumps({"refused": count, "bad": bad}) + "\n")


if __name__ == "__main__":
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    main(*sys.argv[1:])

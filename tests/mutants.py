"""Damaged dumps of every form: `python -m tests.mutants SEED INPUTS`.

A good answer is exit code 0, or 2 with one `error: …` and one `hint: …`, and then no file
is new or changed. No answer holds a traceback or a control character. An input depends on its seed and number
alone; the process may take 2 GB more than at its start.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import resource
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tests.forms import pickled, written

MEMORY = 2 << 30
"""Bytes of address space beyond those of the process when it begins."""
MADE = written.batch()
LISTS = {
    "rollout_log_probs": [x.tolist() for x in MADE.rollout],
    "old_log_probs": [x.tolist() for x in MADE.old],
    "response_mask": [x.tolist() for x in MADE.mask],
    "token_ids": [x.tolist() for x in MADE.responses],
}
ROWS = LISTS | {"rewards": MADE.rewards, "group_id": [f"g{i // 2}" for i in range(8)], "step": [0, 1] * 4}
LONG = {name: [x for row in rows for x in row] for name, rows in LISTS.items()}
LONG |= {"sequence_id": [i for i, row in enumerate(MADE.mask) for _ in row]}
PADDED = {
    name: pa.array([row[:16] for row in rows], pa.list_(pa.float64(), 16)) for name, rows in LISTS.items()
}


def parquet(columns: dict[str, Any], **how: Any) -> bytes:
    """Return a dump of several row groups."""
    pq.write_table(pa.table(columns), stream := io.BytesIO(), row_group_size=3, **how)
    return stream.getvalue()


def lines(folder: Path) -> None:
    """Write a dump as JSON lines, compressed."""
    rows = [dict(zip(ROWS, values, strict=True)) for values in zip(*ROWS.values(), strict=True)]
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))


def of(columns: dict[str, Any], **how: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "a.parquet").write_bytes(parquet(columns, **how))


FORMS: dict[str, Callable[[Path], object]] = {
    "parquet": of(ROWS),
    "parquet with checksums": of(ROWS, write_page_checksum=True, compression="zstd"),
    "parquet, long": of(LONG),
    "parquet, padded": of(PADDED, use_dictionary=False, data_page_version="2.0"),
    "JSON lines": lines,
    "nemo-rl": lambda folder: written.nemo_rl(folder, MADE),
    "prime-rl": lambda folder: written.prime_rl(folder, MADE),
    "slime": lambda folder: pickled.slime(folder, MADE),
    "slime, ranks": lambda folder: pickled.ranks(folder, MADE, 2, False),
    "miles, ranks": lambda folder: pickled.ranks(folder, MADE, 2, True, padded=True),
    "skyrl": lambda folder: pickled.skyrl(folder, MADE),
}


@cache
def files(form: str) -> dict[str, bytes]:
    """Return the files of a form."""
    with tempfile.TemporaryDirectory() as name:
        FORMS[form](Path(name))
        found = [path for path in sorted(Path(name).rglob("*")) if path.is_file()]
        return {str(path.relative_to(name)): path.read_bytes() for path in found}


# ---------------------------------------------------------------- damage

ODD = [
    "",
    " ",
    "a\x1b[2Jb",
    "\x00",
    "\ud800",
    "</script>",
    "::error::x",
    "[/]",
    "nan",
    "1e999",
    "9" * 5000,
    "é" * 300,
]
NUMBERS = [0, 1, -1, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**400, -0.0, 0.5, -0.5, 1e-320, 1.7e308]
NUMBERS += [float("nan"), float("inf"), -float("inf")]
VALUES = [None, True, [], {}, [0.5] * 1000, [[1]], {"a": 1}, *ODD, *NUMBERS, *NUMBERS]
PIECES = [b"\x00", b"\xff", b"\xed\xa0\x80", b"\x1b[2J", b"\n", b"[", b"}", b'"', b",", b"=", b"1e999"]


def tree(random: Random, whole: Any) -> Any:
    """Change a few values of a tree of lists and dicts, or leave them out, or repeat them."""
    for _ in range(random.choice([1, 1, 1, 3])):
        whole = _changed(random, whole)
    return whole


def _changed(random: Random, at: Any) -> Any:
    if not isinstance(at, dict | list) or not at or random.random() < 0.02:
        same = [x for x in VALUES if isinstance(x, type(at)) and not isinstance(x, bool)]
        return random.choice(same if same and random.random() < 0.8 else VALUES)
    copy, key = at.copy(), random.choice([*at] if isinstance(at, dict) else range(len(at)))
    change = random.choice(["remove", "repeat", *["go on"] * 8])
    if change == "go on":
        copy[key] = _changed(random, copy[key])
    elif change == "remove":
        del copy[key]
    elif isinstance(copy, dict):
        copy[f"{key}x"] = copy[key]
    else:
        copy.insert(key, copy[key])
    return copy


def blob(random: Random, whole: bytes) -> bytes:
    """Flip bits, cut, or put something between, a few times."""
    for _ in range(random.choice([1, 1, 2, 4, 16])):
        at = random.randrange(len(whole) or 1)
        end = at + random.choice([1, 8, 64, 1024])
        bit = bytes([(whole[at] if whole else 0) ^ 1 << random.randrange(8)])
        flipped, put = whole[:at] + bit + whole[at + 1 :], whole[:at] + random.choice(PIECES) + whole[at:]
        whole = random.choice([flipped, flipped, flipped, put, whole[:at] + whole[end:], whole[:at]])
    return whole


def damaged(random: Random, name: str, data: bytes) -> bytes:
    """Damage the values of a file, or where that gives no file of the kind, its bytes."""
    stream = io.BytesIO()
    try:
        if random.random() < 0.4:
            raise ValueError
        if name.endswith(".parquet"):
            return parquet(tree(random, pq.read_table(io.BytesIO(data)).to_pydict()))
        if name.endswith(".pt"):
            torch.save(tree(random, torch.load(io.BytesIO(data))), stream)
            return stream.getvalue()
        rows = (gzip.decompress(data) if name.endswith(".gz") else data).splitlines()
        at = random.randrange(len(rows))
        rows[at] = json.dumps(tree(random, json.loads(rows[at]))).encode()
        return gzip.compress(b"\n".join(rows)) if name.endswith(".gz") else b"\n".join(rows)
    except Exception:  # of any library
        return blob(random, data)


def dump(random: Random) -> tuple[tuple[str, ...], dict[str, bytes]]:
    """Draw a form, damage one of its files, and read or convert it."""
    found = dict(files(random.choice([*FORMS])))
    name = random.choice([*found])
    found[name] = damaged(random, name, found[name])
    where = "." if len(found) > 1 else name
    return ("convert", where, "--to", "out.parquet") if random.random() < 0.2 else ("read", where), found


# ---------------------------------------------------------------- answers


def read(*names: str) -> None:
    """Read a dump of any form to its end: what every command does first."""
    from offpol_diag.dump.convert import open_dump

    for batch in open_dump(names).batches():
        assert batch.tokens >= 0


def answer(words: tuple[str, ...], given: dict[str, bytes]) -> tuple[object, str, dict[str, bytes]]:
    """Run one input in a folder of its own: exit code, what is printed, files that are new or changed."""
    from offpol_diag.cli import app
    from offpol_diag.shell import exit_codes

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace") for _ in range(2))
    code: object = 0
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        for file, content in given.items():
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_bytes(content)
        with patch.object(sys, "stdout", out), patch.object(sys, "stderr", err):
            try:
                with exit_codes():
                    if words[0] == "read":
                        read(*words[1:])
                    else:
                        app(args=[*words], prog_name="offpol-diag")
            except SystemExit as end:
                code = end.code
        there = {
            str(path.relative_to(name)): path.read_bytes() for path in Path(name).rglob("*") if path.is_file()
        }
    said = "".join(x.buffer.getvalue().decode() for x in (out, err) if not x.flush())  # type: ignore[attr-defined]
    return code or 0, said, {file: x for file, x in there.items() if given.get(file) != x}


TOLD = re.compile(r"(?:^|\n)error: [^\n]*(?:\n  [^\n]*)*\n\nhint: [^\n]+\n\Z")


def problems(code: object, said: str, changed: dict[str, bytes]) -> Iterator[str]:
    """Yield what is wrong with an answer."""
    errors = len(re.findall(r"^error:", said, re.MULTILINE))
    if "Traceback (most recent call last)" in said:
        yield f"a traceback: {said.strip().splitlines()[-4:]}"
    if code not in (0, 2):
        yield f"exit code {code}"
    if code == 2:
        if errors != 1 or not TOLD.search(said):
            yield f"exit code 2, and {errors} errors with a hint each are printed"
        if "malloc of size" in said:
            yield "it takes all the memory there is"
        if changed:
            yield f"refused, and files are left or changed: {[*changed]}"
    if odd := [
        x for x in said if x not in "\n\t" and unicodedata.category(x) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    ]:
        yield f"a control character is printed: U+{ord(odd[0]):04X}"
    if left := [name for name in changed if name.endswith(".tmp")]:
        yield f"a temporary file is left: {left}"


def main(seed: str, inputs: str) -> None:
    """Judge inputs, and print how many were refused, what is wrong with which, and the peak."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, resource.RLIM_INFINITY))
    refused, bad = 0, dict[int, list[str]]()
    for number in range(int(inputs)):
        words, given = dump(Random(f"{seed}:{number}"))
        found = answer(words, given)
        refused += found[0] == 2
        if wrong := [*problems(*found)]:
            bad[number] = [" ".join(words)[:200], *wrong]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write(json.dumps({"refused": refused, "bad": bad, "peak": peak}) + "\n")


if __name__ == "__main__":
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    main(*sys.argv[1:])

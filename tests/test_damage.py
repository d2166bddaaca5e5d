"""One bit of a dump is flipped: an error that names the file, or the same numbers; never a crash."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

FLIPS = 400
READ = """
import json, resource, sys
from collections import Counter
from pathlib import Path
from offpol_diag.errors import OffpolError
from offpol_diag.dump.convert import open_dump

def numbers(path):
    dump = open_dump([path])
    return [sum(float(b.rollout.sum()) for b in dump.batches()), dump.rows]

given, flips = Path(sys.argv[1]), json.loads(sys.argv[2])
whole, expected, found, wrong = given.read_bytes(), numbers(str(given)), Counter(), []
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
path = given.with_name("flipped.parquet")
for at, bit in flips:
    path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
    try:
        found["same" if numbers(str(path)) == expected else "other"] += 1
    except OffpolError as error:
        found["error"] += 1
        wrong += [] if "flipped.parquet" in error.message and error.hint else [error.message]
    except BaseException as error:
        wrong.append(f"{at} {bit}: {error!r}")
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([found, wrong, grown >> 10]))
"""


def made(path: Path, checksums: bool) -> bytes:
    from tests.factory import DumpFile

    chance = np.random.default_rng(0)
    logs = [-chance.exponential(0.6, n).astype(np.float32) for n in chance.integers(5, 60, 100)]
    with DumpFile(path, group=30) as writer:
        writer.write(
            rollout_log_probs=logs,
            old_log_probs=logs,
            response_mask=[np.ones(len(one), np.int8) for one in logs],
            group_id=[f"g{i // 8}" for i in range(len(logs))],
            step=[i // 50 for i in range(len(logs))],
        )
    if not checksums:
        pq.write_table(pq.read_table(path), path, row_group_size=30)
    return path.read_bytes()


@pytest.mark.parametrize("checksums", [True, False])
def test_a_flipped_bit_is_an_error_or_goes_unnoticed_and_ends_no_process(tmp_path, checksums):
    path = tmp_path / "a.parquet"
    data = made(path, checksums)
    chance = random.Random(1)
    footer = len(data) - int.from_bytes(data[-8:-4], "little") - 8
    ranges = [(0, len(data)), (footer, len(data))] * (FLIPS // 2)
    flips = [(chance.randrange(*one), 1 << chance.randrange(8)) for one in ranges]
    command = [sys.executable, "-c", READ, str(path), json.dumps(flips)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found, wrong, grown = json.loads(done.stdout)
    assert wrong == []
    assert sum(found.values()) == FLIPS
    assert found["error"] > FLIPS // 4
    assert not checksums or found.get("other", 0) <= FLIPS // 50
    assert grown < 1024, "MB"

"""Judge inputs of one kind: `python -m tests.fuzz files --seed 7 --seconds 14400 --keep /tmp/bad`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from random import Random

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

from tests.fuzz import commands, files, runner

KINDS = {"files": files.make, **commands.KINDS}
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("kind", choices=KINDS)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--inputs", type=int, default=sys.maxsize, help="at most so many")
parser.add_argument("--seconds", type=float, default=3600)
parser.add_argument("--keep", type=Path, help="where inputs that are answered badly are written")
given = parser.parse_args()
make = KINDS[given.kind]
result = runner.fuzz(make, given.seed, given.inputs, given.seconds)
sys.stdout.write(json.dumps(result, indent=1) + "\n")
for number in result["bad"] if given.keep else ():
    runner.keep(make(Random(f"{given.seed}:{number}")), given.keep / f"{given.seed}-{number}")
raise SystemExit(bool(result["bad"]))

"""The fuzzers of `tests/fuzz`: each runs for a second here, and finds what is planted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "fuzz"
FUZZERS = sorted(path.stem for path in FUZZ.glob("*.py") if path.stem not in ("runner", "mutations"))
SECONDS = 1
Planted = tuple[subprocess.CompletedProcess[str], Path]
COUNTS = re.compile(r"^(\d+) inputs: (\d+) answered, (\d+) refused, (\d+) badly$", re.M)


def python(
    *arguments: object, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(FUZZ), *filter(None, [os.environ.get("PYTHONPATH")])])
    known = dict(os.environ, PYTHONPATH=path, **environment)
    line = [sys.executable, *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env=known, cwd=cwd)


DIGEST = """
import hashlib, gates, runner
runner.warm()
made = [runner.made(gates.make, 0, number) for number in range(20)]
print("inputs", hashlib.sha256(repr(made).encode()).hexdigest())
"""
EACH = f"""{DIGEST}
import importlib, sys
for name in sys.argv[1].split(","):
    print("fuzzer", name, runner.main(importlib.import_module(name).make, sys.argv[2:]), flush=True)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run the fuzzers in one process; return fuzzer → its output."""
    names, cwd = ",".join(FUZZERS), tmp_path_factory.mktemp("fuzz")
    done = python("-c", EACH, names, "--seconds", SECONDS, "--seed", 0, cwd=cwd, PYTHONHASHSEED="1")
    assert done.returncode == 0, done.stdout + done.stderr
    inputs, _, rest = done.stdout.partition("\n")
    parts = re.split(r"^fuzzer (\w+) (\d+)\n", rest, flags=re.M)
    found = {name: f"{said}exit code {code}" for said, name, code in zip(*[iter(parts)] * 3, strict=False)}
    return found | {"inputs": inputs}


@pytest.mark.parametrize("name", FUZZERS)
def test_no_input_is_answered_badly(name: str, ran: dict[str, str]) -> None:
    found = COUNTS.search(ran[name])
    assert ran[name].endswith("exit code 0"), ran[name]
    assert found, ran[name]
    assert int(found[1]) == int(found[2]) + int(found[3]) > 0


# ---------------------------------------------------------------- they can fail

PLANTED = {
    "a traceback: ValueError in offpol_diag": "raise ValueError('planted')",
    "an input takes all the memory there is": "bytearray(4 << 30)",
    "a control character is printed: U+001B": "sys.stdout.write('\\x1b[2J')",
    "a line of the log is a command of GitHub Actions": "sys.stdout.write('x\\n::error::planted\\n')",
    "exit code 1": "raise SystemExit(1)",
    "exit code 2, and 1 errors with a hint each are printed": "raise UsageError('no hint')",
    "exit code 2, and 0 errors with a hint each are printed": "raise SystemExit(2)",
    "refused, and files are left or changed": "Path('left').touch(); raise UsageError('no', 'do')",
    "an error is printed, and the exit code is 0": "sys.stderr.write('error: x\\n\\nhint: y\\n')",
    "a warning of Python: UserWarning": "warnings.warn('planted')",
    "a temporary file is left": "Path('.x.json.1.tmp').touch()",
    "a damaged .json: JSONDecodeError Expecting value": "Path('x.json').write_text('{\"a\": }')",
    "a damaged .html: ValueError a name is markup": "Path('x.html').write_text('<planted>')",
    "it ends by SIGSEGV": "os.kill(os.getpid(), 11)",
    "it takes more than 1 s of a core": "while True: pass",
    "it takes longer than 3 s": "time.sleep(60)",
}
"""Finding of a fuzzer → the fault planted in `presets`."""
SCRIPT = (
    DIGEST
    + """
import json, os, sys, time, warnings
from pathlib import Path
from offpol_diag.presets import catalogue
from offpol_diag.errors import UsageError

planted, load = json.loads(sys.argv.pop()), catalogue.load
numbers = iter(range(-1, len(planted)))  # the first input is made once more, before the time begins

def spoilt(*given):
    if "PLANTED" in os.environ:
        exec(planted[int(os.environ["PLANTED"])], globals())
    return load(*given)

def make(random):
    return runner.Input(("presets", "token_is"), environment={"PLANTED": str(max(0, next(numbers)))})

runner.CPU_SECONDS, runner.WALL_SECONDS, catalogue.load = 1, 3, spoilt
sys.exit(runner.main(make))
"""
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """Run a fuzzer with as many inputs as there are planted mistakes; return it with its folder."""
    kept = tmp_path_factory.mktemp("kept")
    ways = json.dumps(list(PLANTED.values()))
    given = ("--seconds", 120, "--inputs", len(PLANTED), "--save", kept, ways)
    return python("-c", SCRIPT, *given, PYTHONHASHSEED="2"), kept


@pytest.mark.parametrize("said", PLANTED)
def test_a_bad_answer_is_told_and_kept(said: str, planted: Planted) -> None:
    ran, kept = planted
    number = list(PLANTED).index(said)
    assert f"bad: input {number} of seed 0: {said}" in ran.stdout, ran.stderr
    assert f"see {kept}/0-{number}\n" in ran.stdout
    assert json.loads((kept / f"0-{number}" / "input.json").read_text())["problem"].startswith(said)


def test_bad_answers_are_counted_and_end_in_1(planted: Planted) -> None:
    ran, _ = planted
    found = COUNTS.search(ran.stdout)
    assert found is not None
    assert [int(count) for count in found.groups()] == [len(PLANTED), 0, 0, len(PLANTED)]
    assert ran.returncode == 1


def test_an_input_is_made_again_from_its_seed_and_number(ran: dict[str, str], planted: Planted) -> None:
    """In two processes whose hashes differ."""
    made = re.search(r"^inputs \w{64}$", planted[0].stdout, re.M)
    assert made is not None
    assert ran["inputs"] == made[0]

"""Make runs whose weights arrive or do not, diagnose them, and write docs/doctor-sync.md.

    python benchmarks/doctor/sync.py [--split NAME] [--only ARCHITECTURE …] [--cache DIR] [--write]

Each run has twelve steps of GRPO (`runs.py`). --write keeps the rows and writes the page.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers

from benchmarks.doctor.runs import SAMPLES, STEPS, Held, Path_, Trajectory, normalised
from offpol_diag import DumpWriter
from offpol_diag.analyze import analyze
from offpol_diag.diagnosis.causes import CAUSES

Row = dict[str, Any]
HERE = Path(__file__).parent
CACHE = HERE / ".cache" / "runs"
RESULTS = HERE / "sync.json"
DOCS = HERE.parents[1] / "docs" / "doctor-sync.md"
ROWS = 32
"""Responses of a step."""
SPLITS: dict[str, tuple[Path_, ...]] = {
    "development": (
        Path_("qwen3", "words", 41),
        Path_("llama", "bytes", 42),
        Path_("olmo2", "words", 43),
        Path_("phi", "words", 44),
        Path_("qwen3-moe", "words", 45),
        Path_("gpt-bigcode", "bytes", 46),
    ),
    "later": (Path_("gpt-oss", "words", 47), Path_("gemma3", "words", 48), Path_("mixtral", "bytes", 49)),
    "final": (Path_("gpt-neox", "words", 50),),
}
BF16 = {"rollout_dtype": "bfloat16"}
HELD_BACK = (0, 1, 2, 4)
"""Steps that each host of an asynchronous run is behind."""
WARM = tuple(1.5e-4 * min(1.0, (step + 1) / 8) ** 2 for step in range(STEPS))


@dataclass(frozen=True)
class Case:
    """One dump.

    Attributes:
        name: of the case.
        cause: what is wrong, or empty for an honest run.
        held: (step, host) → weights of the engine.
        lag: (step, host) → recorded policy lag; None where none is recorded.
        hosts: number of hosts, which share the responses of a step.
        steps: first and last step.
        rows: responses of a step that are kept.
        columns: column → (step, host) → value.
        recorded: metadata.
        decidable: whether the dump holds what decides; else a candidate is all that can be asked for.
        warm: whether the learning rate of the run warms up.
        hard: step → how hard the prompts are, as a quantile; 0 for any.
    """

    name: str
    cause: str
    held: Callable[[int, int], Held]
    lag: Callable[[int, int], int] | None = lambda step, host: 0
    hosts: int = 1
    steps: tuple[int, int] = (0, STEPS)
    rows: int = ROWS
    columns: dict[str, Callable[[int, int], Any]] = field(default_factory=dict)
    recorded: dict[str, str] = field(default_factory=dict)
    decidable: bool = True
    warm: bool = False
    hard: Callable[[int], float] = lambda step: 0


def new(version: int, **how: Any) -> Held:
    """Return the weights of a version, and those before the first one as the first."""
    return Held(max(version, 0), **how)


def damaged(step: int) -> Held:
    """Return weights of which a part of one matrix is in another order."""
    return new(step, kind="shuffled", factor=0.3)


def digests(engine: Callable[[int], str]) -> dict[str, Callable[[int, int], Any]]:
    """Return columns of digests."""
    names = ("weight_digest_rollout", "weight_digest_train")
    return dict(zip(names, (lambda s, h: engine(s), lambda s, h: f"w{s}"), strict=True))


CASES = (
    # weights that do not arrive
    Case("never", "sync_stopped", lambda s, h: new(0)),
    Case("never, the dump begins at step 5", "sync_stopped", lambda s, h: new(0), steps=(5, STEPS)),
    Case("never, recorded as two behind", "sync_stopped", lambda s, h: new(0), lambda s, h: min(2, s)),
    Case("never, no lag recorded", "sync_stopped", lambda s, h: new(0), None, decidable=False),
    Case("until step 5", "sync_stopped", lambda s, h: new(min(s, 5))),
    Case(
        "until step 5, with digests",
        "sync_stopped",
        lambda s, h: new(min(s, 5)),
        columns=digests(lambda s: f"w{min(s, 5)}"),
    ),
    Case("every 4 steps", "sync_period", lambda s, h: new(s - s % 4)),
    Case(
        "damaged from step 1 on, bf16 recorded",
        "sync_corrupts",
        lambda s, h: damaged(s) if s else new(0),
        recorded=BF16,
    ),
    Case(
        "damaged from step 4 on, bf16 recorded",
        "sync_corrupts",
        lambda s, h: damaged(s) if s > 3 else new(s),
        recorded=BF16,
    ),
    Case(
        "damaged from step 1 on", "sync_corrupts", lambda s, h: damaged(s) if s else new(0), decidable=False
    ),
    Case("a host never", "replica_stale", lambda s, h: new(0 if h == 3 else s), hosts=4),
    Case("a host until step 5", "replica_stale", lambda s, h: new(min(s, 5) if h == 3 else s), hosts=4),
    Case(
        "prompts of 3 steps before in the prefix cache",
        "stale_prefix_cache",
        lambda s, h: new(s, kind="cache", older=max(0, s - 3)),
    ),
    Case("half of the adapter", "weights_differ", lambda s, h: new(s, kind="scaled", factor=0.5)),
    Case("the adapter twice", "weights_differ", lambda s, h: new(s, kind="scaled", factor=2.0)),
    # honest runs
    Case("in sync", "", lambda s, h: new(s)),
    Case("in sync, no lag recorded", "", lambda s, h: new(s), None),
    Case("in sync, four rows of a prompt a step", "", lambda s, h: new(s), rows=SAMPLES),
    Case("in sync, the first three steps", "", lambda s, h: new(s), steps=(0, 2)),
    Case("two behind", "", lambda s, h: new(s - 2), lambda s, h: min(2, s)),
    Case("two behind at every step", "", lambda s, h: new(s - 2), lambda s, h: 2, steps=(2, STEPS)),
    Case("two behind, no lag recorded", "", lambda s, h: new(s - 2), None),
    Case(
        "two behind, the learning rate warms up",
        "",
        lambda s, h: new(s - 2),
        lambda s, h: 2,
        steps=(2, STEPS),
        warm=True,
    ),
    Case(
        "two behind, with digests",
        "",
        lambda s, h: new(s - 2),
        None,
        columns=digests(lambda s: f"w{max(s - 2, 0)}"),
    ),
    Case("a saw-tooth of four steps, recorded", "", lambda s, h: new(s - s % 4), lambda s, h: s % 4),
    Case("a saw-tooth of four steps, not recorded", "", lambda s, h: new(s - s % 4), None),
    Case(
        "hosts 0, 1, 2 and 4 behind",
        "",
        lambda s, h: new(s - HELD_BACK[h]),
        lambda s, h: min(s, HELD_BACK[h]),
        hosts=4,
    ),
    Case("weights in fp8", "", lambda s, h: new(s, precision="fp8")),
    Case("weights in int4", "", lambda s, h: new(s, precision="int4")),
    Case("fp8 from step 6 on", "", lambda s, h: new(s, precision="fp8" if s > 5 else "bf16")),
    Case("int4 from step 6 on", "", lambda s, h: new(s, precision="int4" if s > 5 else "bf16")),
    Case("int4 at step 5 alone", "", lambda s, h: new(s, precision="int4" if s == 5 else "bf16")),
    Case("int4 at every other step", "", lambda s, h: new(s, precision="int4" if s % 2 else "bf16")),
    Case("bf16, fp8 and int4 by turns", "", lambda s, h: new(s, precision=("bf16", "fp8", "int4")[s % 3])),
    Case("fp8, then int4", "", lambda s, h: new(s, precision="fp8" if s < 6 else "int4")),
    Case(
        "fp8, prompts from easy to hard",
        "",
        lambda s, h: new(s, precision="fp8"),
        hard=lambda s: 0.04 + 0.08 * s,
    ),
    Case(
        "easy prompts in int4 and hard ones in bf16 by turns",
        "",
        lambda s, h: new(s, precision="bf16" if s % 2 else "int4"),
        hard=lambda s: 0.9 if s % 2 else 0.1,
    ),
    Case(
        "one host in int4",
        "group_fault",
        lambda s, h: new(s, precision="int4" if h == 3 else "bf16"),
        hosts=4,
    ),
)


def write(case: Case, run: Trajectory, path: Path) -> None:
    """Write the dump of a case."""
    with DumpWriter(path, provenance={"trainer": "verl"} | case.recorded) as dump:
        for step in range(case.steps[0], case.steps[1] + 1):
            each = case.rows // case.hosts
            for host in range(case.hosts):
                part = slice(each * host, each * (host + 1))
                drawn = run.responses(case.held(step, host), step, step, ROWS, case.hard(step))
                some = {name: value[part] for name, value in drawn.items()}
                columns: Row = {name: [make(step, host)] * each for name, make in case.columns.items()}
                if case.lag is not None:
                    columns["policy_lag"] = [case.lag(step, host)] * each
                group = np.arange(ROWS)[part] // SAMPLES if each >= SAMPLES else np.arange(each)
                dump.write(
                    rollout_log_probs=some["q"],
                    old_log_probs=some["p"],
                    response_mask=some["mask"].astype(np.int8),
                    token_ids=some["tokens"],
                    group_id=group + 1000 * step,
                    step=np.full(each, step),
                    rewards=some["rewards"],
                    advantages=normalised(some["rewards"]) if each >= SAMPLES else np.zeros(each),
                    host=[f"host-{host if case.hosts > 1 else row % 4}" for row in range(each)],
                    **columns,
                )


def diagnosed(case: Case, path: Path) -> Row:
    """Diagnose a dump; return what is known of it with what the diagnosis says."""
    found = analyze([str(path)], presets=(), device="cpu", threads=1).diagnosis
    assert found is not None
    named, fitting = [one.id for one in found.causes], [one.id for one in found.candidates]
    return {
        "case": case.name,
        "cause": case.cause,
        "decidable": case.decidable,
        "verdict": found.verdict,
        "named": named,
        "candidates": fitting,
        "answer": f"`{named[0]}`" if named else found.verdict,
        "said": judged(case.cause, found.verdict, named, fitting),
        "statistic": found.causes[0].statistic if found.causes else found.headline,
    }


def judged(cause: str, verdict: str, named: list[str], fitting: list[str]) -> str:
    """Return whether the answer is right, a candidate, vague, misses the fault, or misleads."""
    if named and (CAUSES[named[0]].kind == "bug") and named[0] != cause:
        return "misleading"
    if not cause:
        wrong = named and named[0] == "quantized_rollout" and CAUSES[named[0]].fix
        return "misleading" if wrong else "cannot tell" if verdict == "cannot_tell" else "right"
    if named and named[0] == cause:
        return "right"
    if named and CAUSES[named[0]].fix:
        return "misleading"
    return "candidate" if cause in fitting else "cannot tell" if verdict == "cannot_tell" else "missed"


def rows(split: str, only: list[str], cache: Path, out: Path) -> Iterator[Row]:
    """Make and diagnose the dumps of a split."""
    for path in SPLITS[split]:
        if only and path.architecture not in only:
            continue
        for case in CASES:
            if (case.warm or case.hard(0)) and path.architecture != "qwen3":
                continue  # they need a training and responses of their own
            course = Path_(path.architecture, path.task, path.seed, WARM) if case.warm else path
            file = out / f"{path.architecture}-{CASES.index(case)}.parquet"
            write(case, Trajectory(course, cache), file)
            row = {"architecture": path.architecture} | diagnosed(case, file)
            said = f"{row['said']:12s} {row['verdict']} {row['named']} {row['candidates']}"
            print(f"{path.architecture:12s} {case.name:45s} {said}", flush=True)
            yield row


def results(file: Path = RESULTS) -> dict[str, list[Row]]:
    """Load the stored rows, by split."""
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def keep(split: str, found: list[Row], file: Path = RESULTS) -> None:
    """Replace the stored rows of the architectures that were made, in one split."""
    made = {row["architecture"] for row in found}
    kept = results(file)
    kept[split] = [row for row in kept.get(split, []) if row["architecture"] not in made] + found
    lines = ",\n".join(
        f'"{name}": [\n' + ",\n".join(json.dumps(row, ensure_ascii=False) for row in some) + "\n]"
        for name, some in kept.items()
    )
    file.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def text(kept: dict[str, list[Row]], page: str = "sync.md.j2", cases: Sequence[Any] = CASES) -> str:
    """Render docs/doctor-sync.md, or the page of other cases with the same tables."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    words = ("right", "candidate", "cannot tell", "missed", "misleading")
    return environment.get_template(page).render(kept=kept, words=words, cases=cases)


def asked(about: str | None, splits: Iterable[str], cache: Path, docs: Path) -> argparse.Namespace:
    """Return the arguments of a script that makes, diagnoses, prints and stores the dumps of a split."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", choices=splits, default="development")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--cache", type=Path, default=cache)
    parser.add_argument("--write", action="store_true", help=f"keep the rows and write docs/{docs.name}")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    return parser.parse_args()


def main() -> None:
    """Make, diagnose, print and store the dumps of a split."""
    given = asked(__doc__, SPLITS, CACHE, DOCS)
    with tempfile.TemporaryDirectory() as out:
        found = list(rows(given.split, given.only, given.cache, Path(out)))
    if given.write:
        keep(given.split, found)
        DOCS.write_text(text(results()), encoding="utf-8")


if __name__ == "__main__":
    main()

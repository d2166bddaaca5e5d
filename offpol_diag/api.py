"""The Python interface: a dump, a table or tensors in, a `Result` out. The command line calls it too.

    import offpol_diag

    result = offpol_diag.analyze("step_100.parquet", presets="token_is,seq_mis")
    result.diagnosis.headline, result.number("k3").interval
    result.to_html("report.html")

The functions are the commands of the same names. What an argument is, and how the command line shows it,
stands once: in its type.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack

from typer import Argument, Option

from offpol_diag.errors import UsageError
from offpol_diag.printable import clean

if TYPE_CHECKING:
    from offpol_diag.check import Checked
    from offpol_diag.core.observe import Examined
    from offpol_diag.dump.convert import Converted
    from offpol_diag.dump.read import Dump
    from offpol_diag.presets import Preset
    from offpol_diag.presets.catalogue import Catalogue
    from offpol_diag.result import Result
else:
    Checked = Converted = Result = Any

LOG = logging.getLogger("offpol_diag")
File = str | Path

# ---------------------------------------------------------------- what arguments are

What = Annotated[Any, Argument(metavar="DUMP", help="Files, folders, globs or URLs; see docs/dumps.md.")]
"""Paths or URLs; or a pyarrow, polars or pandas table, a row per sequence or per token; or a dict from column
to padded tensors [S, L] (with a `response_mask`) or to one list per sequence."""
Presets = Annotated[Any, Option(metavar="PRESET,PRESET", help="Corrections, also as token_is@3; or all.")]
"""Names in one text or several, or objects of `offpol_diag.presets`; None for the usual ones."""
Columns = Annotated[Any, Option(metavar="rollout=NAME,old=NAME", help="Which column is which; or mask=none.")]
"""A mapping from our names to those of the dump, or its text."""
OnBadRow = Annotated[Literal["error", "skip"], Option(help="At a row that cannot be read: stop, or go on.")]
GroupBy = Annotated[Any, Option(metavar="COLUMN,COLUMN", help="Break the numbers down by these columns.")]
Device = Annotated[str, Option(metavar="auto|cpu|cuda[:N]", help="Where to compute.")]
Engine = Annotated[Literal["local", "ray"], Option(help="This machine, or a Ray cluster (docs/scale.md).")]
Threads = Annotated[int | None, Option(min=1, max=9999, help="How many; one for each core by default.")]
Seed = Annotated[int, Option(min=0, max=2**63 - 1, help="Seed of the bootstrap intervals, and of samples.")]
PresetFile = Annotated[File | None, Option(metavar="FILE", help="Your presets (docs/preset-files.md).")]
Trainer = Annotated[str | None, Option("--for", metavar="TRAINER", help="verl, trl, slime, …")]
Sequences = Annotated[File | None, Option(metavar="FILE", help="Write a row per sequence, as Parquet.")]
"""Length, ΣΔ, and what each preset keeps of it."""
Moved = Annotated[Any, Option("--preset", metavar="PRESET", help="Whose threshold moves.")]
Which = Annotated[str | None, Option(metavar="BOUND", help="Which threshold: weight.upper, reject[0].lower.")]
"""reject[0] or weight alone is the window [1/b, b]; by default the one that the preset is about."""
At = Annotated[Any, Option(metavar="1.5,2,3", help="The thresholds; by default where the data change.")]
Keep = Annotated[float | None, Option(metavar="0.95", help="Solve for the bounds that keep this share, too.")]
FailOn = Annotated[Literal["bug", "cannot_tell"] | None, Option(help="The mildest diagnosis that fails.")]
"""With bug, several causes that fit pass as open, and cannot be judged where a bug is among them."""
Max = Annotated[Any, Option(metavar="NAME=NUMBER", help="The largest value that passes: k3=0.002.")]
Min = Annotated[Any, Option(metavar="NAME=NUMBER", help="The smallest: seq_mis.ess_tokens=0.5.")]
Bounds = Annotated[File | None, Option(metavar="FILE", help="Bounds from a file (docs/ci.md).")]
Baseline = Annotated[File | None, Option(metavar="RESULT.json", help="Nothing may be worse than in it …")]
Tolerance = Annotated[float | None, Option(help="… by more than this share of its value, by default 0.1.")]
Logged = Annotated[Any, Option(metavar="FILE", help="Curves of the trainer by step: CSV, JSONL, Parquet.")]
Model = Annotated[Any, Option(metavar="FOLDER|HUB_ID", help="What the run trains; then other checkpoints.")]
"""A folder with config.json and safetensors, of an adapter of peft too, or a name on the hub; further ones
are other checkpoints, tried as hypotheses; or a live causal model of transformers, left as it was."""
To = Annotated[File | None, Option(metavar="FILE.parquet", help="Where the dump that is made goes.")]
Sample = Annotated[int, Option(min=0, help="Prompts that are scored, up to 4,000 tokens and more; 0: all.")]
Tries = Annotated[Any, Option("--try", metavar="NAME,NAME", help="Hypotheses, by name or family; or none.")]
Base = Annotated[str | None, Option(metavar="FOLDER|HUB_ID", help="The base model of an adapter.")]
MaxLength = Annotated[int | None, Option(min=1, help="Leave out longer sequences, prompt included.")]
Dtype = Annotated[Literal["auto", "float32", "bfloat16", "float16"], Option(help="Of the body of the model.")]
"""auto is float32 where it fits, else bfloat16; the head is float32."""
Attention = Annotated[str | None, Option(help="Of transformers: sdpa, eager, flex_attention, …")]
Saved = Annotated[File, Argument(metavar="RESULT.json", help="What --json wrote; - is stdin.")]


class Computes(TypedDict, total=False):
    """How a dump is read, and how numbers are computed; none depends on device, engine, threads or batches.

    `progress` is called with rows done and in all; `batch_tokens` are computed at once.
    """

    columns: Columns
    on_bad_row: OnBadRow
    group_by: GroupBy
    device: Device
    engine: Engine
    threads: Threads
    seed: Seed
    progress: Any
    batch_tokens: int | None


class Evaluates(Computes, total=False):
    """How a dump is read, numbers are computed, and presets are evaluated."""

    preset_file: PresetFile


def words(given: Any) -> tuple[str, ...]:
    """Return names, which may be one text with commas."""
    names = given.split(",") if isinstance(given, str) else given or ()
    return tuple(name.strip() for name in names if name.strip())


def pairs(given: Any) -> dict[str, str]:
    """Return a mapping, which may be a text `ours=theirs,…`.

    Raises:
        UsageError: a part of the text is no pair.
    """
    if not isinstance(given, str):
        return dict(given or {})
    parts = [part.partition("=") for part in words(given)]
    if not all(ours and theirs for ours, _, theirs in parts):
        raise UsageError(f'columns: "{given}" names no column', "give rollout=my_logps,old=my_old_logps")
    return {ours.strip(): theirs.strip() for ours, _, theirs in parts}


# ---------------------------------------------------------------- the commands


def analyze(
    what: What,
    *,
    presets: Presets = None,
    trainer: Trainer = None,
    sequences: Sequences = None,
    **how: Unpack[Evaluates],
) -> Result:
    """How bad is the mismatch, how sure is that, and where is it: every number, the verdict, what to do.

    Raises:
        OffpolError: the input cannot be read, or an argument cannot be used; with a hint.
    """
    from offpol_diag.presets.catalogue import FAMILIES
    from offpol_diag.trainers import trainer_named

    trainer = trainer and trainer_named(trainer)
    known, chosen = _presets(how, presets)
    with _opened(what, how) as dump:
        columns = dump.columns
        chosen = chosen or _usual(dump, known, trainer)
        taken = {preset.name for preset in chosen}
        family = [known[name] for name in FAMILIES["old" if "old_log_probs" in columns else "current"]]
        chosen += tuple(one for one in family if one.name not in taken and not one.lacking(columns))
        rows = Path(sequences) if sequences else None
        return _judged("analyze", _examined(dump, how, chosen, sequences=rows), trainer=trainer)


def doctor(what: What, **how: Unpack[Computes]) -> Result:
    """Is the mismatch a bug, and which one: the verdict, its causes with their evidence, and the fix.

    No correction is evaluated and none is recommended: `analyze` does both.
    """
    with _opened(what, how) as dump:
        return _judged("doctor", _examined(dump, how), advise=False)


def compare(what: What, *others: Any, presets: Presets = None, **how: Unpack[Evaluates]) -> Result:
    """Corrections side by side on one dump, or further runs (B, C, …) against the first (A).

    Of one dump: what each correction keeps, drops and weighs, how it differs from the first, and what each
    drops that the first one keeps. Of runs: what differs from A, by how much, and whether it is real after a
    correction for looking at many numbers. Differences are paired, with intervals of their own.
    """
    from offpol_diag.compare import of_presets, of_runs, reference

    known, asked = _presets(how, presets)
    with ExitStack() as stack:
        dumps = [stack.enter_context(_opened(one, how)) for one in (what, *others)]
        if others:
            runs = [_examined(one, how, asked) for one in dumps]
            results = [_judged("compare", one, advise=False) for one in runs]
            return _of("compare", results[0], against=of_runs(runs, results))
        chosen = asked or _usual(dumps[0], known)
        name = reference(dumps[0].columns, chosen)
        examined = _examined(dumps[0], how, chosen, against=name)
        found = _judged("compare", examined)
        return _of("compare", found, comparison=of_presets(examined, found, name))


def sweep(
    what: What,
    preset: Moved,
    *,
    which: Which = None,
    at: At = None,
    keep: Keep = None,
    **how: Unpack[Evaluates],
) -> Result:
    """One preset at many thresholds: what each keeps, its ESS, bias and variance, in one reading."""
    from offpol_diag.sweep import sweep as swept

    _, found = _presets(how, [preset])
    if len(found) != 1:
        raise UsageError(f"{preset} names {len(found)} presets", "name one")
    with _opened(what, how) as dump:
        text = at if at is None or isinstance(at, str) else ",".join(map(str, at))
        return _of("sweep", swept(dump, found[0], which, text, keep, **_computing(how)))


def gate(
    what: What,
    *,
    fail_on: FailOn = None,
    max: Max = (),
    min: Min = (),
    gates: Bounds = None,
    baseline: Baseline = None,
    tolerance: Tolerance = None,
    presets: Presets = (),
    **how: Unpack[Evaluates],
) -> Result:
    """Hold numbers against bounds, or against an earlier result.

    A bound fails only when the whole 95% interval lies beyond it; an interval with values on both sides
    passes, and is called open. What cannot be judged, such as a name that is no metric, a value that is
    unknown or unreliable, or NaN, has not passed.

    NAME is a metric (k3, drift2.k3), a preset's (seq_mis.ess_tokens), or either at every training step
    (step:NAME). A RESULT.json that --json wrote is judged as it is; in Python also a `Result`.
    """
    from offpol_diag.gate import judged, required
    from offpol_diag.result import Result, load

    asked: dict[str, Any] = {"fail_on": fail_on, "baseline": baseline, "tolerance": tolerance}
    for key, given in (("max", max), ("min", min)):
        asked[key] = [f"{name}={x}" for name, x in given.items()] if isinstance(given, Mapping) else given
    must = required(Path(gates) if gates else None, presets=words(presets), **asked)
    base = load(must.baseline) if must.baseline else None
    if isinstance(what, Result):
        found = what
    elif isinstance(what, str | Path) and (str(what) == "-" or Path(what).suffix.lower() == ".json"):
        found = load(Path(what))
    else:
        chosen, steps = must.to_compute(_presets(how, None)[0])
        with _opened(what, how) as dump:
            found = _judged("gate", _examined(dump, how, chosen, by_step=steps))
    return _of("gate", found, gates=judged(found, must, base))


def check(
    what: What,
    *,
    logged: Logged = (),
    trainer: Trainer = None,
    presets: Presets = None,
    **how: Unpack[Evaluates],
) -> Checked:
    """What does a trainer log of this dump? Step by step, and its own curves beside it.

    Each training step is taken as one batch of the trainer. Every metric is compared with the curve of its
    name: where they are furthest apart, and from which step on they differ by more than float32 rounds.
    """
    from offpol_diag.check import checked as compared
    from offpol_diag.check import curves, numbers, who_logs
    from offpol_diag.presets.catalogue import FAMILIES
    from offpol_diag.trainers import defaults

    logged = [logged] if isinstance(logged, str | Path) else logged
    drawn, (known, asked) = curves([*map(Path, logged)]), _presets(how, presets)
    with _opened(what, how) as dump:
        who, generation = who_logs(trainer, dump.provenance)
        if not asked:
            usual = FAMILIES["old" if "old_log_probs" in dump.columns else "current"][0]
            asked = tuple(known[name] for name in dict.fromkeys((usual, *defaults(who)[:1])))
        found = numbers(dump, asked, who, generation)
    if not found:
        lacks = dict.fromkeys(column for preset in asked for column in preset.lacking(dump.columns))
        missing = f"the dump has no {' and no '.join(lacks) or 'token'}"
        raise UsageError(missing, "log it, or name other presets with --presets")
    name = f"{who}@{generation}" if who == "verl" else who
    read: dict[str, Any] = {"dump": tuple(dump.files), "logged": tuple(map(str, logged))}
    return replace(compared(found, drawn, name), **read)


def rescore(
    what: What,
    model: Model,
    *,
    to: To = None,
    sample: Sample = 16,
    tries: Tries = (),
    base: Base = None,
    max_length: MaxLength = None,
    dtype: Dtype = "auto",
    attention: Attention = None,
    device: Device = "auto",
    seed: Seed = 0,
    columns: Columns = None,
    on_bad_row: OnBadRow = "error",
    progress: Any = None,
) -> Result:
    """Who is wrong, the engine or the trainer? The run's model scores the responses again: a third opinion.

    Says which column that model does not reproduce, and tries the hypotheses instead of guessing them:
    without the adapter, at another scale, with other checkpoints, another temperature or prompt, without the
    window, the soft cap, the sinks or the scaling of RoPE. Needs token_ids and prompt_ids, and the extra
    rescore.
    """
    from offpol_diag.dump.convert import in_files
    from offpol_diag.files import TemporaryFolder
    from offpol_diag.rescore.command import rescored

    with in_files(what) as (paths, label), TemporaryFolder() as folder:
        target = folder.path / "rescored.parquet" if to is None else Path(to)
        reference, read = rescored(
            *(paths, model, target, LOG.info),
            columns=pairs(columns) or None,
            on_bad_row=on_bad_row,
            sample=sample or None,
            tries=words(tries),
            base=base,
            max_length=max_length,
            dtype=dtype,
            attention=attention,
            device=device,
            seed=seed,
            progress=progress,
        )
        again = Computes(seed=seed, device="cpu", columns=read)
        with _opened(str(target), again) as dump:
            dump.files = (label,) if label else dump.files
            found = _judged("rescore", _examined(dump, again), advise=False)
        reference.written = "" if to is None else reference.written
    return _of("rescore", found, reference=reference)


def convert(what: What, to: To, *, columns: Columns = None) -> Converted:
    """What a trainer wrote by itself, as a canonical dump: Parquet, one row per sequence.

    Every function that takes a dump reads the same files by itself; this keeps the result.
    """
    from offpol_diag.dump.convert import convert as converted

    files = [what] if isinstance(what, str | Path) else what
    return converted([*map(str, files)], Path(to or ""), pairs(columns))


def report(result: Saved) -> Result:
    """Draw a report again from the JSON of a result, equal to the one first drawn."""
    from offpol_diag.result import load

    return load(Path(result))


# ---------------------------------------------------------------- what they share


@contextmanager
def _opened(what: What, how: Mapping[str, Any]) -> Iterator[Dump]:
    """Yield what is given as a dump; what lies in memory has its type as the name of its file."""
    from offpol_diag.dump.convert import in_files, open_dump
    from offpol_diag.run.threads import TOKENS

    asked = {"columns": pairs(how.get("columns")) or None, "on_bad_row": how.get("on_bad_row", "error")}
    asked |= {"batch_tokens": how.get("batch_tokens") or TOKENS, "group_by": words(how.get("group_by"))}
    with in_files(what) as (paths, label):
        dump = open_dump(paths, **asked)
        dump.given = () if label else tuple(map(clean, paths))
        yield dump


def _computing(how: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments on computing of every pass over a dump."""
    others = ("columns", "on_bad_row", "batch_tokens", "preset_file")
    given = {name: x for name, x in how.items() if name not in others}
    return given | {"group_by": words(how.get("group_by"))}


def _examined(dump: Dump, how: Mapping[str, Any], presets: Sequence[Preset] = (), **more: Any) -> Examined:
    """Read a dump through, for its numbers and for what is kept of its rows."""
    from offpol_diag.core.observe import examine

    return examine(dump, presets=presets, **_computing(how), **more)


def _judged(command: str, found: Examined, advise: bool = True, trainer: str | None = None) -> Result:
    """Return the numbers with the verdict and, if asked, the recommendation, configured for a trainer."""
    from offpol_diag.advice import advised
    from offpol_diag.diagnosis.decide import diagnosed

    result = _of(command, diagnosed(found))
    return advised(result, trainer) if advise else result


def _of(command: str, result: Result, **beside: Any) -> Result:
    """Return a result as that of a command, with what it found beside the numbers."""
    run = result.run.model_copy(update={"command": command})
    return result.model_copy(update={"run": run, **beside})


def _presets(how: Mapping[str, Any], named: Presets) -> tuple[Catalogue, tuple[Preset, ...]]:
    """Return all presets, and those that are named; warn of a built-in name with another meaning."""
    from offpol_diag.presets import catalogue

    file = how.get("preset_file")
    known = catalogue.load(Path(file) if file else None)
    if known.replaced:
        LOG.warning("%s gives its own meaning to %s", file, ", ".join(known.replaced))
    return known, () if named is None else known.resolve(named)


def _usual(dump: Dump, known: Catalogue, trainer: str | None = None) -> tuple[Preset, ...]:
    """Return the presets that are evaluated of a dump where none are named."""
    from offpol_diag.trainers import defaults, named_in

    return known.usual(dump.columns, defaults(trainer or named_in(dump.provenance)))

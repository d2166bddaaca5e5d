"""The Python interface: a dump, a table or tensors in, a `Result` out. The command line calls it too.

The functions are the commands of the same names. What an argument is, and how the command line shows it,
stands once: in its type. They raise `OffpolError`, with a hint, where the input cannot be read or an argument
cannot be used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack

import typer

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

    Many = Any
else:
    Checked = Converted = Result = Any
    Many = list[str] | None  # which the command line takes several times

# ---------------------------------------------------------------- arguments of several functions


def option(metavar: str | None, help: str, *flags: str, **more: Any) -> Any:
    """Return how the command line shows an argument that is given by its name."""
    return typer.Option(*flags, metavar=metavar, help=help, show_envvar=False, **more)


def trainer_names(incomplete: str) -> list[str]:
    """Complete the name of a trainer."""
    from offpol_diag.trainers import TRAINERS

    return [name for name in TRAINERS if name.startswith(incomplete)]


def preset_names(incomplete: str) -> list[str]:
    """Complete the last of several names of presets."""
    from offpol_diag.presets.catalogue import ALL, load

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in (ALL, *load()) if name.startswith(last)]


What = Annotated[Many, typer.Argument(metavar="DUMP", help="Files, folders, globs or URLs: docs/dumps.md.")]
"""Paths or URLs; or a pyarrow, polars or pandas table, a row per sequence or per token; or a dict from column
to padded tensors [S, L] (with a `response_mask`) or to one list per sequence."""
Presets = Annotated[
    Any, option("PRESET,PRESET", "Corrections: token_is@3; or all.", autocompletion=preset_names)
]
"""Names in one text or several, or objects of `offpol_diag.presets`; None for the usual ones."""
PresetFile = Annotated[Any, option("FILE", "Your presets (docs/preset-files.md).")]
Trainer = Annotated[
    str | None, option("TRAINER", "verl, trl, slime, …", "--for", autocompletion=trainer_names)
]
Columns = Annotated[Any, option("rollout=NAME,old=NAME", "Which column is which; or mask=none.")]
"""A mapping from our names to those of the dump, or its text."""
OnBadRow = Annotated[Literal["error", "skip"], option(None, "At a row that cannot be read: stop, or go on.")]
Device = Annotated[str, option("auto|cpu|cuda[:N]", "Where to compute.")]
Seed = Annotated[int, option(None, "Seed of the bootstrap intervals, and of samples.", min=0, max=2**63 - 1)]


class Reading(TypedDict, total=False):
    """How a dump is read, and how its numbers are computed; none depends on device, engine or threads.

    `progress` is called with rows done and in all.
    """

    columns: Columns
    on_bad_row: OnBadRow
    group_by: Annotated[Any, option("COLUMN,COLUMN", "Break the numbers down by these columns.")]
    device: Device
    engine: Annotated[Literal["local", "ray"], option(None, "This machine, or a Ray cluster: docs/scale.md.")]
    threads: Annotated[int | None, option(None, "How many; one for each core by default.", min=1, max=9999)]
    seed: Seed
    progress: Any


def words(given: Any) -> tuple[str, ...]:
    """Return names, which may be one text with commas."""
    names = given.split(",") if isinstance(given, str) else given or ()
    return tuple(name.strip() for name in names if name.strip())


def pairs(given: Any) -> dict[str, str]:
    """Return a mapping, which may be one text `ours=theirs,…`."""
    if not isinstance(given, str):
        return dict(given or {})
    parts = [part.partition("=") for part in words(given)]
    return {ours.strip(): theirs.strip() for ours, _, theirs in parts}


# ---------------------------------------------------------------- the commands


def analyze(
    what: What,
    *,
    presets: Presets = None,
    preset_file: PresetFile = None,
    trainer: Trainer = None,
    sequences: Annotated[Any, option("FILE", "Write a row per sequence, as Parquet.")] = None,
    **how: Unpack[Reading],
) -> Result:
    """How bad is the mismatch, how sure is that, and where is it: every number, the verdict, what to do."""
    from offpol_diag.trainers import trainer_named

    trainer = trainer and trainer_named(trainer)
    known, chosen = _presets(preset_file, presets)
    with _opened(what, how) as dump:
        chosen = chosen or _usual(dump, known, trainer)
        taken = {preset.name for preset in chosen}
        family = [known[name] for name in _family(dump) if name not in taken]
        chosen += tuple(preset for preset in family if not preset.lacking(dump.columns))
        examined = _examined(dump, how, chosen, sequences=Path(sequences) if sequences else None)
        return _judged("analyze", examined, trainer=trainer)


def doctor(what: What, **how: Unpack[Reading]) -> Result:
    """Is the mismatch a bug, and which one: the verdict, its causes with their evidence, and the fix.

    No correction is evaluated and none is recommended: `analyze` does both.
    """
    with _opened(what, how) as dump:
        return _judged("doctor", _examined(dump, how), advise=False)


def compare(
    what: What, *others: Any, presets: Presets = None, preset_file: PresetFile = None, **how: Unpack[Reading]
) -> Result:
    """Corrections side by side on one dump, or further runs (B, C, …) against the first (A).

    Of one dump: what each correction keeps, drops and weighs, how it differs from the first, and what each
    drops that the first one keeps. Of runs: what differs from A, by how much, and whether it is real after a
    correction for looking at many numbers. Differences are paired, with intervals of their own.
    """
    from offpol_diag.compare import of_presets, of_runs, reference

    known, asked = _presets(preset_file, presets)
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
    preset: Annotated[Any, option("PRESET", "Whose threshold moves.", autocompletion=preset_names)],
    *,
    which: Annotated[str | None, option("BOUND", "Which one: weight.upper, reject[0].lower.")] = None,
    at: Annotated[Any, option("1.5,2,3", "Thresholds; by default where the data change.")] = None,
    keep: Annotated[float | None, option("0.95", "Find the bounds that keep this share, too.")] = None,
    preset_file: PresetFile = None,
    **how: Unpack[Reading],
) -> Result:
    """One preset at many thresholds: what each keeps, its ESS, bias and variance, in one reading.

    As `which`, reject[0] or weight alone is the window [1/b, b]; by default it is what the preset is about.
    """
    from offpol_diag.sweep import sweep as swept

    _, found = _presets(preset_file, [preset])
    if len(found) != 1:
        raise UsageError(f"{preset} names {len(found)} presets", "name one")
    with _opened(what, how) as dump:
        text = at if at is None or isinstance(at, str) else ",".join(map(str, at))
        return _of("sweep", swept(dump, found[0], which, text, keep, **_computing(how)))


def gate(
    what: What,
    *,
    fail_on: Annotated[Literal["bug", "cannot_tell"] | None, option(None, "The mildest that fails.")] = None,
    max: Annotated[Many, option("NAME=NUMBER", "The largest value that passes: k3=0.002.")] = (),
    min: Annotated[Many, option("NAME=NUMBER", "The smallest: seq_mis.ess_tokens=0.5.")] = (),
    gates: Annotated[Any, option("FILE", "Bounds from a file (docs/ci.md).")] = None,
    baseline: Annotated[Any, option("RESULT.json", "Nothing may be worse than in it …")] = None,
    tolerance: Annotated[float | None, option(None, "… by more than this share of it (0.1).")] = None,
    presets: Presets = (),
    preset_file: PresetFile = None,
    **how: Unpack[Reading],
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
        chosen, steps = must.to_compute(_presets(preset_file, None)[0])
        with _opened(what, how) as dump:
            found = _judged("gate", _examined(dump, how, chosen, by_step=steps))
    return _of("gate", found, gates=judged(found, must, base))


def check(
    what: What,
    *,
    logged: Annotated[Many, option("FILE", "Curves by step: CSV, JSONL, Parquet.")] = (),
    trainer: Trainer = None,
    presets: Presets = None,
    preset_file: PresetFile = None,
    columns: Columns = None,
    on_bad_row: OnBadRow = "error",
) -> Checked:
    """What does a trainer log of this dump? Step by step, and its own curves beside it.

    Each training step is taken as one batch of the trainer. Every metric is compared with the curve of its
    name: where they are furthest apart, and from which step on they differ by more than float32 rounds.
    """
    from offpol_diag.check import checked as compared
    from offpol_diag.check import curves, numbers, who_logs
    from offpol_diag.trainers import defaults

    logged = [logged] if isinstance(logged, str | Path) else logged
    drawn, (known, asked) = curves([*map(Path, logged)]), _presets(preset_file, presets)
    with _opened(what, {"columns": columns, "on_bad_row": on_bad_row}) as dump:
        who, generation = who_logs(trainer, dump.provenance)
        usual = dict.fromkeys((_family(dump)[0], *defaults(who)[:1]))
        asked = asked or tuple(known[name] for name in usual)
        found = numbers(dump, asked, who, generation)
    if not found:
        lacks = dict.fromkeys(column for preset in asked for column in preset.lacking(dump.columns))
        missing = f"the dump has no {' and no '.join(lacks) or 'token'}"
        raise UsageError(missing, "log it, or name other presets with --presets")
    name = f"{who}@{generation}" if who == "verl" else who
    return replace(compared(found, drawn, name), dump=tuple(dump.files), logged=tuple(map(str, logged)))


class Rescoring(TypedDict, total=False):
    """How the model computes: `auto` is float32 where it fits, else bfloat16; the head is always float32."""

    sample: Annotated[int, option(None, "Prompts that are scored, 16 by default; 0: all.", min=0)]
    tries: Annotated[Any, option("NAME,NAME", "Hypotheses, by name or family.", "--try")]
    base: Annotated[str | None, option("FOLDER|HUB_ID", "The base model of an adapter.")]
    max_length: Annotated[int | None, option(None, "Leave out longer sequences, prompt included.", min=1)]
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], option(None, "Of the model's body.")]
    attention: Annotated[str | None, option(None, "Of transformers: sdpa, eager, flex_attention, …")]
    device: Device
    progress: Any


def rescore(
    what: What,
    model: Annotated[Many, option("FOLDER|HUB_ID", "What the run trains; then other checkpoints.")],
    *,
    to: Annotated[Any, option("FILE.parquet", "Where the dump that is made goes.")] = None,
    seed: Seed = 0,
    columns: Columns = None,
    on_bad_row: OnBadRow = "error",
    **how: Unpack[Rescoring],
) -> Result:
    """Who is wrong, the engine or the trainer? The run's model scores the responses again: a third opinion.

    Says which column that model does not reproduce, and tries the hypotheses instead of guessing them:
    without the adapter, at another scale, with other checkpoints, another temperature or prompt, without the
    window, the soft cap, the sinks or the scaling of RoPE. Needs token_ids and prompt_ids, and the extra
    rescore. `model` may be a live causal model of transformers, too, which is left as it was.
    """
    from offpol_diag.dump.convert import in_files
    from offpol_diag.files import TemporaryFolder
    from offpol_diag.rescore.command import rescored

    how["tries"] = words(how.get("tries"))
    with in_files(what) as (paths, label), TemporaryFolder() as folder:
        target = folder.path / "rescored.parquet" if to is None else Path(to)
        opening: dict[str, Any] = {"columns": pairs(columns) or None, "on_bad_row": on_bad_row, "seed": seed}
        reference, read = rescored(paths, model, target, **opening, **how)
        again = Reading(seed=seed, device="cpu", columns=read)
        with _opened(str(target), again) as dump:
            dump.files = (label,) if label else dump.files
            found = _judged("rescore", _examined(dump, again), advise=False)
        reference.written = "" if to is None else reference.written
    return _of("rescore", found, reference=reference)


def convert(
    what: What,
    to: Annotated[Any, option("FILE.parquet", "Where the dump that is made goes.")],
    *,
    columns: Columns = None,
) -> Converted:
    """What a trainer wrote by itself, as a canonical dump: Parquet, one row per sequence.

    Every function that takes a dump reads the same files by itself; this keeps the result.
    """
    from offpol_diag.dump.convert import convert as converted

    files = [what] if isinstance(what, str | Path) else what
    return converted([*map(str, files)], Path(to), pairs(columns))


def report(
    result: Annotated[Any, typer.Argument(metavar="RESULT.json", help="What --json wrote; - is stdin.")],
) -> Result:
    """Draw a report again from the JSON of a result, equal to the one first drawn."""
    from offpol_diag.result import load

    return load(Path(result))


# ---------------------------------------------------------------- what they share


@contextmanager
def _opened(what: What, how: Mapping[str, Any]) -> Iterator[Dump]:
    """Yield what is given as a dump; what lies in memory has its type as the name of its file."""
    from offpol_diag.dump.convert import in_files, open_dump

    asked = {"columns": pairs(how.get("columns")) or None, "on_bad_row": how.get("on_bad_row", "error")}
    asked |= {"group_by": words(how.get("group_by"))}
    with in_files(what) as (paths, label):
        dump = open_dump(paths, **asked)
        dump.given = () if label else tuple(map(clean, paths))
        yield dump


def _computing(how: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments on computing of every pass over a dump."""
    given = {name: x for name, x in how.items() if name not in ("columns", "on_bad_row")}
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


def _presets(file: Any, named: Presets) -> tuple[Catalogue, tuple[Preset, ...]]:
    """Return all presets, those of a user's file among them, and the ones that are named."""
    from offpol_diag.presets import catalogue

    known = catalogue.load(Path(file) if file else None)
    return known, () if named is None else known.resolve(named)


def _usual(dump: Dump, known: Catalogue, trainer: str | None = None) -> tuple[Preset, ...]:
    """Return the presets that are evaluated of a dump where none are named."""
    from offpol_diag.trainers import defaults, named_in

    return known.usual(dump.columns, defaults(trainer or named_in(dump.provenance)))


def _family(dump: Dump) -> tuple[str, ...]:
    """Return the presets of all kinds whose numerator the dump has; the first is recommended by default."""
    from offpol_diag.presets.catalogue import FAMILIES

    return FAMILIES["old" if "old_log_probs" in dump.columns else "current"]

"""What each command does: a request in, a result out; the only caller of the engine.

Functions take the paths that are read, the request, and a function that is told remarks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offpol_diag import requests
from offpol_diag.errors import UsageError, did_you_mean
from offpol_diag.options import Request, shown

if TYPE_CHECKING:
    from offpol_diag.check import Checked
    from offpol_diag.core.observe import Examined
    from offpol_diag.dump.read import Dump
    from offpol_diag.gate import Gates
    from offpol_diag.presets import Preset
    from offpol_diag.presets.catalogue import Catalogue
    from offpol_diag.result import Result

Say = Callable[[str], None]


def silent(text: str) -> None:
    """Drop a remark."""


# ---------------------------------------------------------------- commands


def analyze(paths: Sequence[str], request: requests.Analyze, say: Say = silent) -> Result:
    """Analyse and diagnose a dump, and recommend a correction."""
    trainer = trainer_of(request)
    dump = opened(paths, request)
    asked = presets_of(request, say) or usual(dump, request, trainer)
    chosen = with_family(asked, catalogue(request), dump)
    more = {"by_step": summed_by_step(request.by_step, chosen), "sequences": request.sequences}
    found = examined(dump, request, chosen, **more)
    return within(advised(found, "analyze", trainer))


def doctor(paths: Sequence[str], request: requests.Doctor, say: Say = silent) -> Result:
    """Diagnose a dump without any preset."""
    return within(named(examined(opened(paths, request), request, ()).summary(), "doctor"))


def compare(
    paths: Sequence[str], others: Sequence[Sequence[str]], request: requests.Compare, say: Say = silent
) -> Result:
    """Compare presets on one dump, or the runs of other dumps with that of the first."""
    if others:
        return _compare_runs(paths, others, request, say)
    from offpol_diag.compare import of_presets, reference

    asked = presets_of(request, say)
    against = None if request.against is None else one_preset(request, "against")
    dump = opened(paths, request)
    chosen = tuple(dict.fromkeys((*(asked or usual(dump, request)), *([against] if against else []))))
    base = reference(catalogue(request), dump.info.columns, chosen, against)
    found = examined(dump, request, chosen, against=base)
    summary = advised(found, "compare")
    return summary.model_copy(update={"comparison": of_presets(found, summary, base)})


def _compare_runs(
    paths: Sequence[str], others: Sequence[Sequence[str]], request: requests.Compare, say: Say
) -> Result:
    """Analyse all runs alike, one after the other, and compare them with the first."""
    if request.against is not None:
        both = "add --as-one" if request.shell else "give both dumps in one list"
        raise UsageError(
            f"{request.named('against')} names a preset, and runs are compared with run A",
            f"leave it out, or {both} to compare presets on the dumps as one",
        )
    from offpol_diag.compare import of_runs

    chosen = presets_of(request, say)
    runs = [examined(opened(run, request), request, chosen) for run in (paths, *others)]
    results = [one.summary() for one in runs]
    return named(results[0], "compare").model_copy(update={"against": of_runs(runs, results)})


def check(paths: Sequence[str], request: requests.Check, say: Say = silent) -> Checked:
    """Compute what a trainer logs of a dump, and lay its own curves beside it where they are given."""
    from offpol_diag.check import checked, curves, numbers
    from offpol_diag.trainers import defaults

    known, asked, logged = catalogue(request), presets_of(request, say), curves(request.logged or ())
    dump = opened(paths, request)
    trainer, generation = _who_logs(request, dump)
    if not asked:
        usually = usual(dump, request, trainer)
        summary = advised(examined(opened(paths, request), request, usually), "check")
        best = summary.recommendation.method if summary.recommendation else None
        names = dict.fromkeys((best or usually[0].name, *defaults(trainer)[:1]))
        asked = tuple(known[name] for name in names)
    found = numbers(dump, asked, trainer, generation)
    if not found:
        lacks = dict.fromkeys(column for preset in asked for column in preset.lacking(dump.info.columns))
        raise UsageError(
            f"the dump has no {' and no '.join(lacks) or 'token'}",
            "log it, or name other presets with --presets",
        )
    name = f"{trainer}@{generation}" if trainer == "verl" else trainer
    files = {"dump": list(dump.info.files), "logged": [str(one) for one in request.logged or ()]}
    return checked(found, logged, name).model_copy(update=files)


def _who_logs(request: requests.Check, dump: Dump) -> tuple[str, str]:
    """Return the trainer, and a generation of verl: as asked, else the metadata's, else the newest."""
    from offpol_diag.trainers import named_in, trainer_named
    from offpol_diag.trainers.logged import GENERATIONS, TRAINERS

    given, _, generation = (request.trainer or named_in(dump.info.provenance)).partition("@")
    with request.judged("trainer"):
        if not given:
            raise UsageError("who logged is not said", f"name the trainer, {', '.join(TRAINERS)}")
        trainer = trainer_named(given)
        if trainer not in TRAINERS:
            raise UsageError(f"what {trainer} logs is not known", f"name one of {', '.join(TRAINERS)}")
        if generation and (trainer != "verl" or generation not in GENERATIONS):
            known = ", ".join(f"verl@{one}" for one in GENERATIONS)
            raise UsageError(f"{trainer} has no generation {generation!r}", f"there are {known}")
    versions = dump.info.provenance.get("versions")
    ran = versions.get("verl", "") if isinstance(versions, dict) else ""
    parts = tuple(int(part) for part in re.findall(r"\d+", str(ran))[:3]) or (99,)
    return trainer, generation or next(one for one, since in GENERATIONS.items() if parts >= since)


def sweep(paths: Sequence[str], request: requests.Sweep, say: Say = silent) -> Result:
    """Evaluate one preset at many thresholds; options are checked before the dump is read."""
    from offpol_diag.sweep import SweepOptions
    from offpol_diag.sweep import sweep as swept

    preset = one_preset(request, "preset", say)
    asked = SweepOptions.of(preset, request.which, request.at, request.keep, request.trainer)
    return named(swept(opened(paths, request), asked, **_where(request)), "sweep")


def rescore(paths: Sequence[str], request: requests.Rescore, say: Say = silent, model: Any = None) -> Result:
    """Score a dump's responses again, write them with what was computed, and say which side is reproduced.

    Args:
        paths: the dump.
        request: what is asked.
        say: told how long it takes.
        model: a live model, with its tokenizer in `request.tokenizer`; None to load `request.model`.
    """
    from offpol_diag.options import asked
    from offpol_diag.rescore.command import rescored

    found, columns = rescored(paths, request, say, model)
    again = asked(
        requests.Doctor, {"seed": request.seed, "device": "cpu", "columns": columns, "progress": False}
    )
    result = named(examined(opened([found.written], again), again, ()).summary(), "rescore")
    return result.model_copy(update={"reference": found})


def required(request: requests.Gate) -> Gates:
    """Return what must hold, by options and files."""
    from offpol_diag.gate import required as all_of

    names = ("gates", "fail_on", "baseline", "tolerance", "only", "presets")
    return all_of(**{name: getattr(request, name) for name in (*names, "max", "min")})


def gate(given: Sequence[str] | Result, request: requests.Gate, must: Gates, say: Say = silent) -> Result:
    """Judge a result, or a dump with the presets that the bounds name."""
    from offpol_diag.gate import judged, not_compared
    from offpol_diag.result import Result, load

    base = load(Path(must.baseline)) if must.baseline else None
    if isinstance(given, Result):
        found = given
    else:
        known = catalogue(request, say)
        chosen, by_step = must.to_compute(known), must.by_step(known)
        examination = examined(opened(given, request), request, chosen, by_step=by_step)
        found = advised(examination, "gate")
    remark = not_compared(base, must) if base else ""
    return found.model_copy(update={"gates": list(judged(found, must, base)), "not_compared": remark})


def saved(names: Sequence[str]) -> Result | None:
    """Return the result that is given in place of a dump; None where a dump is.

    Raises:
        UsageError: it is at a URL, or not alone.
    """
    results = [name for name in names if name.lower().endswith(".json")]
    if not results:
        return None
    from offpol_diag.printable import is_url

    if any(map(is_url, results)):
        raise UsageError("a result is read from this disk, and a URL is named", "copy it, and name the file")
    if len(names) > 1:
        raise UsageError("a result is judged alone", f"give {results[0]} and nothing else, or only dumps")
    from offpol_diag.result import load

    return load(Path(results[0]))


# ---------------------------------------------------------------- the engine


def opened(paths: Sequence[str], request: requests.ReadDump) -> Dump:
    """Open a dump as a request says that it is read."""
    from offpol_diag.core.observe import opened as open_dump

    more = {name: getattr(request, name) for name in ("group_by", "batch_tokens") if hasattr(request, name)}
    how: dict[str, Any] = {"on_bad_row": request.on_bad_row, **more}
    return open_dump(paths, columns=request.columns or None, **how)


def examined(
    dump: Dump,
    request: requests.Computed,
    presets: Sequence[Preset],
    **more: Any,
) -> Examined:
    """Analyse a dump under presets; `more` goes to `analyze.examine`."""
    from offpol_diag.core.observe import examine

    group_by: tuple[str, ...] = getattr(request, "group_by", ())
    return examine(dump, presets=presets, group_by=group_by, **_where(request), **more)


def _where(request: requests.Computed) -> dict[str, Any]:
    """Return the arguments on computing of every pass over a dump."""
    same = ("device", "seed", "engine", "threads", "progress")
    return {name: getattr(request, name) for name in same}


def advised(found: Examined, command: str, trainer: str | None = None) -> Result:
    """Return the numbers with the recommendation, and its configuration for a trainer."""
    from offpol_diag.advice import advised as with_advice

    return with_advice(named(found.summary(), command), trainer)


def named(summary: Result, command: str) -> Result:
    """Return the result with the name of its command."""
    return summary.model_copy(update={"run": summary.run.model_copy(update={"command": command})})


def within(summary: Result) -> Result:
    """Return the result with the range that K3 is expected in, where the metadata of the dump says enough."""
    from offpol_diag.diagnosis import recorded

    found = recorded.expected(summary.dump.provenance)
    return summary.model_copy(update={"charts": summary.charts.model_copy(update={"expected": found})})


# ---------------------------------------------------------------- names in a request


def catalogue(request: Request, say: Say = silent) -> Catalogue:
    """Return the built-in and the user's presets; names with a changed meaning are a remark."""
    from offpol_diag.presets.catalogue import load

    file: Path | None = getattr(request, "preset_file", None)
    with request.judged("preset_file"):
        found = load(file)
    if found.replaced:
        say(f"{file} gives its own meaning to {', '.join(found.replaced)}")
    return found


def presets_of(request: requests.Analyze | requests.Compare | requests.Check, say: Say) -> tuple[Preset, ...]:
    """Return the presets that a request names; none where it names none."""
    known = catalogue(request, say)
    with request.judged("presets"):
        return () if request.presets is None else known.resolve(request.presets)


def usual(dump: Dump, request: Request, trainer: str | None = None) -> tuple[Preset, ...]:
    """Return the presets that are evaluated of a dump where none are named."""
    from offpol_diag.trainers import defaults, named_in

    further = defaults(trainer or named_in(dump.info.provenance))
    return catalogue(request).usual(dump.info.columns, further)


def with_family(presets: Sequence[Preset], known: Catalogue, dump: Dump) -> tuple[Preset, ...]:
    """Add the presets that a recommendation for a dump shows, as far as the dump has their columns."""
    from offpol_diag.presets.catalogue import FAMILIES

    columns, named = dump.info.columns, {preset.name for preset in presets}
    family = [known[name] for name in FAMILIES["old" if "old_log_probs" in columns else "current"]]
    more = (one for one in family if one.name not in named and not one.lacking(columns))
    return (*presets, *more)


def one_preset(request: Request, field: str, say: Say = silent) -> Preset:
    """Return the one preset that a field names."""
    given = getattr(request, field)
    found = catalogue(request, say).resolve([given])
    if len(found) != 1:
        raise UsageError(f"{request.named(field)}: {shown(given)} names {len(found)} presets", "name one")
    return found[0]


def trainer_of(request: Request) -> str | None:
    """Return the canonical name of the trainer in a request."""
    from offpol_diag.trainers import trainer_named

    given: str | None = getattr(request, "trainer", None)
    with request.judged("trainer"):
        return None if given is None else trainer_named(given)


def summed_by_step(names: Sequence[str], presets: Sequence[Preset]) -> tuple[str, ...]:
    """Return numbers by our names, each of which is summed at every step under these presets."""
    from offpol_diag.core.breakdowns import names_by_step, row_by_step
    from offpol_diag.trainers.ours import ours

    found = tuple(map(ours, names))
    for said, name in zip(names, found, strict=True):
        if row_by_step(name, presets) is None:
            near = did_you_mean(name, names_by_step(presets))
            hint = near or "docs/metrics.md lists the names; those of a preset are PRESET.NAME"
            raise UsageError(f'by_step: "{said}" is no number that is summed by step', hint)
    return found

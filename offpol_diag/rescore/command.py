"""`rescore` from the dump to the dump: the passes over the model, the verdict, and what is written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from offpol_diag.diagnosis import reference as three
from offpol_diag.dump import schema
from offpol_diag.dump.convert import open_dump
from offpol_diag.dump.read import Dump
from offpol_diag.dump.writer import write_tables
from offpol_diag.errors import OffpolError, UsageError, did_you_mean
from offpol_diag.rescore import models, verdict
from offpol_diag.rescore.models import Loaded
from offpol_diag.rescore.rows import Responses, read
from offpol_diag.rescore.score import Head, Row, score
from offpol_diag.rescore.variants import AS_GIVEN, HONEST, Variant, in_bf16, table
from offpol_diag.result import Reference

Floats = NDArray[np.float64]
ROWS, SAMPLE_TOKENS = 4096, 4000
"""Rows of a row group; tokens that are scored at least, where the dump has them."""
OF_BF16 = 3.0
"""What bf16 changes, in what bf16 logits alone change of a model that is computed in bf16 itself."""


def rescored(
    paths: Sequence[str],
    model: Any,
    to: Path,
    *,
    columns: Mapping[str, str] | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
    sample: int = 16,
    tries: Sequence[str] = (),
    base: str | Path | None = None,
    max_length: int | None = None,
    dtype: str = "auto",
    attention: str | None = None,
    device: str = "auto",
    seed: int = 0,
    progress: Any = None,
) -> tuple[Reference, dict[str, str]]:
    """Score the responses of a dump again, write them to `to`, and return the verdict.

    The arguments are those of `offpol_diag.rescore`. With the verdict come the columns to name where what is
    written is read.
    """
    given = dict(columns or {})
    dump = open_dump(paths, columns=given, on_bad_row=on_bad_row)
    responses = read(dump, sample or None, SAMPLE_TOKENS, seed, max_length)
    if isinstance(model, str | Path | list | tuple):
        names = [str(one) for one in ([model] if isinstance(model, str | Path) else model)]
        if not names:
            raise UsageError("rescore needs the model of the run", "name it: --model FOLDER")
        under = None if base is None else str(base)
        loaded = models.load(names, base=under, device=device, dtype=dtype, attention=attention)
    else:
        loaded = models.live(model)
    loaded.require_known(responses.rows, dump.files[0])
    variants, missing = table(loaded.model, responses.rows, loaded.checkpoints)
    passes = Passes(loaded, responses.rows, chosen(variants, tries), progress or None)
    passes.make()
    trainer = schema.OLD if schema.OLD in dump.columns else schema.CURRENT
    both = dump.columns[schema.ROLLOUT], dump.columns[trainer]
    found = judged(responses, passes, both, dump.provenance)
    _write(to, dump, responses, passes.scores[AS_GIVEN.name], found)
    left_out = {name: one for name, one in given.items() if one == schema.NONE}
    return found.model_copy(update={"missing": missing, "written": str(to)}), left_out


def chosen(variants: Sequence[Variant], names: Sequence[str]) -> list[Variant]:
    """Return the hypotheses that are to be tried, by name or family; "as given" and honest ones always.

    Raises:
        UsageError: none is called so.
    """
    if not names or tuple(names) == ("all",):
        return list(variants)
    known = dict.fromkeys(word for one in variants for word in (one.name, one.family))
    for name in names:
        if name not in known and name != "none":
            hint = did_you_mean(name, list(known)) or f"there are all, none, {', '.join(known)}"
            raise UsageError(f"--try {name}: no hypothesis is called so", hint)
    return [one for one in variants if one.family in HONEST or {one.name, one.family} & {*names}]


@dataclass
class Passes:
    """Passes of a model over responses: one for each hypothesis that is not of the head alone.

    Attributes:
        loaded: the model.
        rows: the responses.
        variants: the hypotheses.
        progress: called with tokens done, and in all.
        scores: hypothesis → log-probs, [T].
        noise: what bf16 changes of those of the model as given, [T].
        how: device, type, passes and time.
    """

    loaded: Loaded
    rows: Sequence[Row]
    variants: Sequence[Variant]
    progress: Callable[[int, int], None] | None = None
    scores: dict[str, Floats] = field(default_factory=dict)
    noise: Floats = field(init=False)
    how: str = ""
    _done: int = 0

    @property
    def count(self) -> int:
        """Passes of the body."""
        return 2 + sum(not one.head_only for one in self.variants)

    def make(self) -> None:
        """Score the responses under every hypothesis."""
        begun = time.monotonic()
        heads = [one for one in self.variants if one.head_only]
        found = dict(zip(heads, self._pass(AS_GIVEN, [one.head for one in heads]), strict=True))
        for one in self.variants:
            scores = found[one] if one in found else self._pass(one, [one.head])[0]
            self.scores[one.name] = scores.astype(np.float64)
        self.noise = self.noise_of(AS_GIVEN)
        where = f"on {self.loaded.causal.device} in {self.loaded.dtype}"
        self.how = f"{self.count} passes {where}, {time.monotonic() - begun:,.1f} s"

    def noise_of(self, variant: Variant) -> Floats:
        """Return what bf16 changes of a hypothesis, [T]."""
        head = variant.head._replace(logits=torch.bfloat16)
        if self.loaded.dtype == "float32":
            in_all = self._pass(variant, [head], rough=True)[0]
        else:
            exact, narrow = self._pass(variant, [variant.head, head])
            in_all = exact + OF_BF16 * (narrow - exact)
        return three.gaps(in_all.astype(np.float64), self.scores[variant.name])

    def _pass(
        self, variant: Variant, heads: Sequence[Head], rough: bool = False
    ) -> list[NDArray[np.float32]]:
        """Score under one change of the model; `rough`: computed as in bf16."""
        total = self.count * sum(len(row.ids) for row in self.rows)

        def step(tokens: int) -> None:
            self._done = min(self._done + tokens, total)
            if self.progress:
                self.progress(self._done, total)

        with variant.of(self.loaded.model) as changed, ExitStack() as back:
            if rough:
                in_bf16(changed, back)
            return score(changed, variant.rows(self.rows), heads, done=step)


def judged(
    responses: Responses, passes: Passes, columns: tuple[str, str], provenance: Mapping[str, Any]
) -> Reference:
    """Judge the engine's column and the trainer's by the log-probs of every hypothesis.

    Args:
        responses: the responses.
        passes: the log-probs of a model and its hypotheses.
        columns: names of the engine's column and the trainer's.
        provenance: of the dump.
    """
    loaded, live = passes.loaded, responses.live
    if not np.isfinite(passes.scores[AS_GIVEN.name]).all():
        what = f"{loaded.name} gives log-probs that are not finite"
        raise OffpolError(what, "check its weights, or give --dtype float32")
    owner = np.repeat(np.arange(len(responses.rows)), responses.sizes)[live]
    places = []
    for name, values in responses.labels.items():
        number = {value: i for i, value in enumerate(dict.fromkeys(values))}
        if 2 <= len(number) <= verdict.MOST_VALUES:
            places.append((name, np.array([number[value] for value in values])[owner], list(number)))
    scores = {one.name: passes.scores[one.name][live] for one in passes.variants}
    evidence = verdict.Evidence(scores, passes.noise[live], responses.group[owner], places, passes.variants)
    both = responses.engine[live], responses.trainer[live]
    engine, trainer = (
        verdict.side(name, column, evidence, lambda one: passes.noise_of(one)[live])
        for name, column in zip(columns, both, strict=True)
    )
    between, tokens = three.gaps(*both), len(evidence.noise)
    same = bool(engine.variant) and (engine.variant, engine.state) == (trainer.variant, trainer.state)
    alike = same or not three.beyond(between, evidence.noise, evidence.groups)
    outcome = three.outcome(engine.state != "same", trainer.state != "same", alike)
    outcome = "few" if responses.here < three.LEAST_GROUPS else outcome
    temperatures = {row.temperature for row in responses.rows}
    temperature = (
        f"temperature {min(temperatures):g}" if len(temperatures) == 1 else "each response's temperature"
    )
    writer = provenance.get("trainer")
    origin = f"recorded by {writer}" if isinstance(writer, str) and writer else "as the dump has them"
    rounding = (
        f"The model is computed in {loaded.dtype} (--dtype): what that changes is in the reference too."
    )
    needed, named = verdict.tokens_needed(evidence), {engine.variant, trainer.variant}
    return Reference(
        verdict=outcome,
        headline=three.headline(outcome, engine, trainer, float(between.mean())),
        model=loaded.name,
        rests_on=f"these prompt ids ({origin}), {temperature} and {loaded.name}",
        floor=float(evidence.noise.mean()),
        apart=float(between.mean()),
        engine=engine,
        trainer=trainer,
        tokens=tokens,
        sequences=len(responses.rows),
        groups=responses.here,
        small={name: many for name, many in needed.items() if many > tokens and name not in named},
        how=passes.how,
        notes=[*([] if loaded.dtype == "float32" else [rounding]), *responses.notes],
    )


def _write(target: Path, dump: Dump, responses: Responses, scores: Floats, found: Reference) -> None:
    """Write the responses with the reference's log-probs, under the canonical names of the other columns."""
    roles = {name: role for role, name in dump.columns.items() if role != schema.REFERENCE}
    taken, made = {*roles.values(), schema.REFERENCE}, responses.table
    keep = [name for name in made.column_names if name in roles or name not in taken]
    made = made.select(keep).rename_columns([roles.get(name, name) for name in keep])
    offsets = pa.array(np.concatenate(([0], np.cumsum(responses.sizes))), pa.int32())
    reference = pa.ListArray.from_arrays(offsets, pa.array(scores).cast(pa.float32()))
    made = made.append_column(schema.REFERENCE, reference)
    basis = {"model": found.model, "floor": found.floor, "rests_on": found.rests_on}
    provenance = json.dumps({**dump.provenance, three.KEY: basis}, default=str)
    try:
        write_tables([made], target, provenance.encode(), ROWS)
    except OSError as error:
        what = f"{target}: cannot be written ({error.strerror or error})"
        raise UsageError(what, "choose another place") from error

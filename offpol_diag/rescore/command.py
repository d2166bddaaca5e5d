"""`rescore` from the dump to the dump: the passes over the model, the verdict, and what is written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from offpol_diag.diagnosis import reference as three
from offpol_diag.dump import schema as role
from offpol_diag.dump.convert import open_dump
from offpol_diag.dump.read import Dump
from offpol_diag.dump.writer import KEY as METADATA_KEY
from offpol_diag.errors import OffpolError, UsageError, did_you_mean
from offpol_diag.files import beside
from offpol_diag.numerals import duration
from offpol_diag.rescore import models, verdict
from offpol_diag.rescore.models import Loaded
from offpol_diag.rescore.rows import Responses, read
from offpol_diag.rescore.score import Head, Row, Scores, score
from offpol_diag.rescore.variants import AS_GIVEN, HONEST, Variant, in_bf16, table
from offpol_diag.result import Reference

Floats = NDArray[np.float64]
COLUMNS = {
    "reference_log_probs": pa.float32(),
    "reference_entropy": pa.float32(),
    "reference_rank": pa.int32(),
}
"""The columns that are written."""
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
    live = not isinstance(model, str | Path | list | tuple)
    names = [] if live else [str(one) for one in ([model] if isinstance(model, str | Path) else model)]
    if not names and not live:
        raise UsageError("rescore needs the model of the run", "name it: --model FOLDER")
    overrides = dict(columns or {})
    dump = open_dump(paths, columns=overrides, on_bad_row=on_bad_row)
    responses = read(dump, sample or None, SAMPLE_TOKENS, seed, max_length)
    if live:
        loaded = models.given(model)
    else:
        under = None if base is None else str(base)
        loaded = models.load(names, base=under, device=device, dtype=dtype, attention=attention)
    loaded.judge(responses.rows, dump.files[0])
    variants, missing = table(loaded.model, responses.rows, loaded.checkpoints)
    passes = Passes(loaded, responses.rows, chosen(variants, tries), progress or None)
    passes.make()
    ours = dump.columns
    both = ours[role.ROLLOUT], ours[role.OLD if role.OLD in ours else role.CURRENT]
    found = judged(responses, passes, both, dump.provenance)
    _write(to, dump, responses, passes.reference, found)
    kept = {name: one for name, one in overrides.items() if one == role.NONE}
    return found.model_copy(update={"missing": missing, "written": str(to)}), kept


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
        reference: those of the model as given, with entropy and rank, [T] each.
        noise: what bf16 changes of them, [T].
        how: device, type, passes and time.
    """

    loaded: Loaded
    rows: Sequence[Row]
    variants: Sequence[Variant]
    progress: Callable[[int, int], None] | None = None
    scores: dict[str, Floats] = field(default_factory=dict)
    reference: Scores = field(init=False)
    noise: Floats = field(init=False)
    how: str = ""
    _done: int = 0

    @property
    def many(self) -> int:
        """Passes of the body."""
        return 2 + sum(not one.of_the_head for one in self.variants)

    def make(self) -> None:
        """Score the responses under every hypothesis."""
        begun = time.monotonic()
        heads = [one for one in self.variants if one.of_the_head]
        of_heads = self._pass(AS_GIVEN, [one.head for one in heads], more=True)
        found, self.reference = dict(zip(heads, of_heads, strict=True)), of_heads[0]
        kind = str(self.loaded.causal.dtype).removeprefix("torch.")
        where = f"on {self.loaded.causal.device} in {kind}"
        for one in self.variants:
            scores = found[one] if one in found else self._pass(one, [one.head])[0]
            self.scores[one.name] = scores.log_probs.astype(np.float64)
        self.noise = self.noise_of(AS_GIVEN)
        self.how = f"{self.many} passes {where}, {duration(time.monotonic() - begun)}"

    def noise_of(self, variant: Variant) -> Floats:
        """Return what bf16 changes of a hypothesis, [T]."""
        head = variant.head._replace(logits=torch.bfloat16)
        if self.loaded.causal.dtype == torch.float32:
            in_all = self._pass(variant, [head], rough=True)[0].log_probs
        else:
            exact, narrow = (one.log_probs for one in self._pass(variant, [variant.head, head]))
            in_all = exact + OF_BF16 * (narrow - exact)
        return three.gaps(in_all.astype(np.float64), self.scores[variant.name])

    def _pass(
        self, variant: Variant, heads: Sequence[Head], more: bool = False, rough: bool = False
    ) -> list[Scores]:
        """Score under one change of the model; `rough`: computed as in bf16."""
        total = self.many * sum(len(row.ids) for row in self.rows)

        def step(tokens: int) -> None:
            self._done = min(self._done + tokens, total)
            if self.progress:
                self.progress(self._done, total)

        with variant.of(self.loaded.model) as changed, ExitStack() as back:
            if rough:
                in_bf16(changed, back)
            return score(changed, variant.rows(self.rows), heads, more=more, done=step)


def judged(
    responses: Responses, passes: Passes, columns: tuple[str, str], provenance: Mapping[str, Any]
) -> Reference:
    """Judge the engine's column and the trainer's by what every hypothesis says of the same tokens.

    Args:
        responses: the responses.
        passes: what a model and its hypotheses say of them.
        columns: names of the engine's column and the trainer's.
        provenance: of the dump.
    """
    loaded, live = passes.loaded, responses.live
    if not np.isfinite(passes.scores[AS_GIVEN.name]).all():
        what = f"{loaded.name} gives log-probs that are not finite"
        raise OffpolError(what, "check its weights, or give --dtype float32")
    owner = np.repeat(np.arange(len(responses.rows)), responses.sizes)[live]
    labels = {}
    for name, values in responses.labels.items():
        number = {value: i for i, value in enumerate(dict.fromkeys(values))}
        labels[name] = np.array([number[value] for value in values])[owner], list(number)
    scores = {one.name: passes.scores[one.name][live] for one in passes.variants}
    seen = verdict.Evidence(scores, passes.noise[live], responses.group[owner], labels, passes.variants)
    both = responses.engine[live], responses.trainer[live]
    engine, trainer = (
        verdict.side(name, column, seen, lambda one: passes.noise_of(one)[live])
        for name, column in zip(columns, both, strict=True)
    )
    between = three.gaps(*both)
    same = bool(engine.variant) and (engine.variant, engine.state) == (trainer.variant, trainer.state)
    alike = same or not three.beyond(between, seen.noise, seen.groups)
    outcome = three.outcome(engine.state != "same", trainer.state != "same", alike)
    found = "few" if responses.here < three.LEAST_GROUPS else outcome
    apart, tokens, told_apart = float(between.mean()), len(seen.noise), {engine.variant, trainer.variant}
    needed = verdict.tokens_needed(seen)
    heat = sorted({row.temperature for row in responses.rows})
    said = f"temperature {heat[0]:g}" if len(heat) == 1 else "each response's temperature"
    by = provenance.get("trainer")
    by_whom = f"recorded by {by}" if isinstance(by, str) and by else "as the dump has them"
    kind = str(loaded.causal.dtype).removeprefix("torch.")
    lower = f"The model is computed in {kind} (--dtype): what that changes is in the reference too."
    return Reference(
        verdict=found,
        headline=three.headline(found, engine, trainer, apart),
        model=loaded.name,
        rests_on=f"these prompt ids ({by_whom}), {said} and {loaded.name}",
        floor=float(seen.noise.mean()),
        apart=apart,
        engine=engine,
        trainer=trainer,
        tokens=tokens,
        sequences=len(responses.rows),
        groups=responses.here,
        small={name: many for name, many in needed.items() if many > tokens and name not in told_apart},
        how=passes.how,
        notes=[*([] if kind == "float32" else [lower]), *responses.notes],
    )


def _write(target: Path, dump: Dump, part: Responses, columns: Scores, found: Reference) -> None:
    """Write the responses with the reference's columns, under the canonical names of the others."""
    roles = {name: ours for ours, name in dump.columns.items()}
    taken, held = {*roles.values(), *COLUMNS}, part.table
    names = [roles.get(name, name) for name in held.column_names]
    keep = [i for i, name in enumerate(held.column_names) if name in roles or names[i] not in taken]
    held = held.select(keep).rename_columns([names[i] for i in keep])
    offsets = pa.array(np.concatenate(([0], np.cumsum(part.sizes))), pa.int32())
    for (name, kind), values in zip(COLUMNS.items(), columns, strict=True):
        numbers = pa.array(values.astype(kind.to_pandas_dtype()))
        held = held.append_column(name, pa.ListArray.from_arrays(offsets, numbers))
    said = {"model": found.model, "floor": found.floor, "rests_on": found.rests_on}
    metadata = json.dumps({**dump.provenance, three.KEY: said}, default=str)
    temporary = beside(target.resolve())
    try:
        held = held.replace_schema_metadata({METADATA_KEY: metadata})
        pq.write_table(held, temporary, compression="zstd", row_group_size=ROWS)
        temporary.replace(target.resolve())
    except OSError as error:
        what = f"{target}: cannot be written ({error.strerror or error})"
        raise UsageError(what, "choose another place") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)

"""The passes over the model: one for each hypothesis, kept on disk until the run is over, and the verdict."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offpol_diag.diagnosis import reference as three
from offpol_diag.errors import OffpolError, UsageError, did_you_mean
from offpol_diag.numerals import counted, duration
from offpol_diag.rescore import verdict
from offpol_diag.rescore.models import Loaded
from offpol_diag.rescore.rows import Responses
from offpol_diag.rescore.score import Head, Row, Scores, Size, score
from offpol_diag.rescore.variants import AS_GIVEN, HONEST, Given, Variant, table
from offpol_diag.rescore.variants.rounding import in_bf16
from offpol_diag.result.reference import SAMPLE_TOKENS, Reference, Side

Floats = NDArray[np.float64]

GROWN = 8
"""A sample grows to so many times its prompts at most."""
OF_BF16 = 3.0
"""What bf16 changes, in what bf16 logits alone change of a model that is computed in bf16 itself."""
FLOOR, OWN = "the floor", "the floor of "


@dataclass
class Passes:
    """Scores of responses by hypothesis, computed where they are not kept from an interrupted run.

    Attributes:
        loaded: the model.
        responses: all that may be scored.
        variants: the hypotheses.
        folder: where passes are kept; None to keep none.
        say: told how long it will take.
        progress: called with tokens done, and in all.
        size: how much at once; None for the default of the device.
    """

    loaded: Loaded
    responses: Responses
    variants: Sequence[Variant]
    folder: Path | None = None
    say: Callable[[str], None] = lambda text: None
    progress: Callable[[int, int], None] | None = None
    size: Size | None = None
    seconds: float = 0.0
    made: int = 0
    resumed: int = 0
    reference: Scores | None = None
    scored: int = 0
    _found: dict[str, list[NDArray[np.float32]]] = field(default_factory=dict)
    _more: list[Scores] = field(default_factory=list)
    _all: dict[str, Sequence[Row]] = field(default_factory=dict)
    _done: int = 0
    _total: int = 0

    @property
    def many(self) -> int:
        """Passes of the body for one more response."""
        return 2 + sum(not one.of_the_head for one in self.variants)

    def grow(self, rows: int) -> None:
        """Score responses up to so many under every hypothesis."""
        if rows <= self.scored:
            return
        new = slice(self.scored, rows)
        tokens = sum(len(row.ids) for row in self.responses.rows[new])
        self._done, self._total = 0, tokens * self.many
        begun = time.monotonic()
        heads = [one for one in self.variants if one.of_the_head]
        found = self._pass("heads", new, [one.head for one in heads], AS_GIVEN, more=True)
        self._more.append(found[0])
        for one, scores in zip(heads, found, strict=True):
            self._found.setdefault(one.name, []).append(scores.log_probs)
        if self.many > 2 and not self.resumed:
            took = time.monotonic() - begun
            rest = f"about {duration(took * (self.many - 1))} more"
            self.say(f"1 of {self.many} passes took {duration(took)}: {rest}")
        self._found.setdefault(FLOOR, []).append(self._floor(AS_GIVEN, new))
        for one in self.variants:
            if not one.of_the_head:
                scores = self._pass(one.name, new, [one.head], one)[0]
                self._found.setdefault(one.name, []).append(scores.log_probs)
        self.scored = rows
        self.seconds += time.monotonic() - begun

    def scores(self, name: str) -> Floats:
        """Return the log-probs of a hypothesis, [T] of what is scored."""
        return np.concatenate(self._found[name]).astype(np.float64)

    def columns(self) -> Scores:
        """Return the reference with entropy and rank, [T]."""
        return Scores(*(np.concatenate(parts) for parts in zip(*self._more, strict=True)))

    def noise(self, variant: Variant) -> Floats:
        """Return what bf16 changes of a hypothesis, [T]."""
        if variant.name == AS_GIVEN.name:
            return three.gaps(self.scores(FLOOR), self.scores(AS_GIVEN.name))
        found = self._floor(variant, slice(0, self.scored)).astype(np.float64)
        return three.gaps(found, self.scores(variant.name))

    def _floor(self, variant: Variant, rows: slice) -> NDArray[np.float32]:
        name = FLOOR if variant.name == AS_GIVEN.name else f"{OWN}{variant.name}"
        head = variant.head._replace(logits=torch.bfloat16)
        if self.loaded.dtype == torch.float32:
            return self._pass(name, rows, [head], variant, rough=True)[0].log_probs
        exact, rounded = self._pass(name, rows, [variant.head, head], variant)
        return exact.log_probs + OF_BF16 * (rounded.log_probs - exact.log_probs)

    def _pass(
        self,
        name: str,
        rows: slice,
        heads: Sequence[Head],
        variant: Variant,
        more: bool = False,
        rough: bool = False,
    ) -> list[Scores]:
        """Score under one change of the model, or read what was kept of it."""
        given = self._rows(variant)[rows]
        key = hashlib.blake2b(repr((name, rows.start, rows.stop)).encode(), digest_size=8).hexdigest()
        file = self.folder / f"{key}.npz" if self.folder else None
        if file and file.exists():
            with contextlib.suppress(OSError, ValueError, KeyError), np.load(file) as kept:
                found = [Scores(*(kept[f"{i}-{j}"] for j in range(3))) for i in range(len(heads))]
                self.resumed += 1
                self._step(sum(len(row.ids) for row in given))
                return found
        model = self.loaded.model
        with contextlib.ExitStack() as back:
            changed = back.enter_context(variant.model(model)) or model
            if rough:
                back.enter_context(in_bf16(changed))
            found = score(changed, given, heads, size=self.size, more=more, done=self._step)
        self.made += 1
        if file:
            arrays = {f"{i}-{j}": part for i, one in enumerate(found) for j, part in enumerate(one)}
            part = file.with_suffix(".part")
            with part.open("wb") as out:
                np.savez(out, **arrays)  # type: ignore[arg-type]
            part.rename(file)
        return found

    def _rows(self, variant: Variant) -> Sequence[Row]:
        """Return all responses as a hypothesis has them: what prompts have in common is of all of them."""
        if variant.rows is None:
            return self.responses.rows
        if variant.name not in self._all:
            self._all[variant.name] = variant.rows(self.responses.rows)
        return self._all[variant.name]

    def _step(self, tokens: int) -> None:
        self._done += tokens
        if self.progress:
            self.progress(min(self._done, self._total), self._total)


def chosen(variants: Sequence[Variant], names: Sequence[str]) -> list[Variant]:
    """Return the hypotheses that are to be tried, by name or family; "as given" and honest ones always.

    Raises:
        UsageError: none is called so.
    """
    if not names or names == ("all",):
        return list(variants)
    known = dict.fromkeys(word for one in variants for word in (one.name, one.family))
    for name in names:
        if name not in known and name != "none":
            hint = did_you_mean(name, list(known)) or f"there are all, none, {', '.join(known)}"
            raise UsageError(f"--try {name}: no hypothesis is called so", hint)
    return [one for one in variants if one.family in HONEST or {one.name, one.family} & {*names}]


def rescored(
    responses: Responses,
    loaded: Loaded,
    *,
    groups: int | None,
    names: Sequence[str] = (),
    provenance: Mapping[str, Any],
    columns: tuple[str, str],
    folder: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] | None = None,
    size: Size | None = None,
) -> tuple[Reference, Passes, Responses]:
    """Score responses under every hypothesis, more of them while it is undecided, and judge both columns.

    Args:
        responses: the responses, in the order in which they are taken.
        loaded: the model.
        groups: prompts to begin with; None for all.
        names: hypotheses to try; all where empty.
        provenance: of the dump.
        columns: names of the engine's column and the trainer's.
        folder: where passes are kept for a run that is interrupted; None to keep none.
        say: told how large it is, and how long it takes.
        progress: called with tokens done and in all.
        size: how much is computed at once.

    Returns:
        The verdict, the passes, and the responses that were scored.
    """
    found, left = table(
        Given(loaded.model, responses.rows, loaded.checkpoints, loaded.marks, loaded.pad, provenance)
    )
    passes = Passes(loaded, responses, chosen(found, tuple(names)), folder, say, progress, size)
    many = responses.here if groups is None else responses.enough(groups, SAMPLE_TOKENS)
    peak = loaded.peak(responses.rows, size or Size.of(loaded.device))
    kind = str(loaded.dtype).removeprefix("torch.")
    say(
        f"{passes.many} passes, and one for each hypothesis that is found, over {loaded.name} on "
        f"{loaded.device} in {kind}; peak memory about {peak / 1e9:.2g} GB"
    )
    while True:
        part = responses.first(many)
        passes.grow(len(part.rows))
        seen, judged = _judged(part, passes)
        if many >= responses.here or _decided(judged, seen):
            break
        many = min(2 * many, responses.here)
        say(f"undecided: {counted(many, 'prompt')} in place of {counted(part.here, 'prompt')}")
    if not np.isfinite(seen.reference).all():
        what = f"{loaded.name} gives log-probs that are not finite"
        raise OffpolError(what, "check its weights, or give --dtype float32")
    by_name = {one.name: one for one in passes.variants}
    own = [passes.noise(by_name[one.best])[part.live] if one.named else None for one in judged]
    sides = [verdict.side(*one) for one in zip(columns, judged, [seen] * len(own), own, strict=True)]
    return _reference(part, passes, seen, sides, left, provenance), passes, part


def _judged(part: Responses, passes: Passes) -> tuple[verdict.Evidence, list[verdict.Judged]]:
    """Judge both columns by what is scored."""
    live, owner = part.live, np.repeat(np.arange(len(part.rows)), part.sizes)
    labels = {}
    for name, values in part.labels.items():
        known = list(dict.fromkeys(values))
        number = {value: i for i, value in enumerate(known)}
        labels[name] = np.array([number[value] for value in values])[owner][live], known
    seen = verdict.Evidence(
        {one.name: passes.scores(one.name)[live] for one in passes.variants},
        passes.noise(AS_GIVEN)[live],
        part.group[owner][live],
        labels,
        passes.variants,
    )
    return seen, [verdict.judge(column[live], seen) for column in (part.engine, part.trainer)]


def _decided(judged: Sequence[verdict.Judged], seen: verdict.Evidence) -> bool:
    """Return whether more responses would say no more: all is told, or what is not is too alike for them."""
    needed, tokens = verdict.tokens_needed(seen), len(seen.noise)
    for one in judged:
        if not one.named and one.lead > 1 and needed.get(one.best, 0) < GROWN * tokens:
            return False
        if one.named and any(needed.get(name, 0) < tokens for name in one.alike):
            return False
    return True


def _reference(
    part: Responses,
    passes: Passes,
    seen: verdict.Evidence,
    sides: Sequence[Side],
    left: Mapping[str, str],
    provenance: Mapping[str, Any],
) -> Reference:
    engine, trainer = sides
    columns = part.engine[part.live], part.trainer[part.live]
    between = three.gaps(*columns)
    odd = [one.state != "same" for one in sides]
    same = bool(engine.variant) and engine.variant == trainer.variant and engine.state == trainer.state
    alike = same or not three.beyond(between, seen.noise, seen.groups)
    found = "few" if part.here < three.LEAST_GROUPS else three.outcome(odd[0], odd[1], alike)
    apart = float(between.mean())
    heat = sorted({row.temperature for row in part.rows})
    said = f"temperature {heat[0]:g}" if len(heat) == 1 else "each response's temperature"
    by = provenance.get("trainer")
    by_whom = f"recorded by {by}" if isinstance(by, str) and by else "as the dump has them"
    needed, tokens = verdict.tokens_needed(seen), len(seen.noise)
    named = {engine.variant, trainer.variant}
    lengths = np.add.reduceat(part.live, np.concatenate(([0], np.cumsum(part.sizes)[:-1])))
    ids = np.concatenate([row.ids[row.start :] for row in part.rows])[part.live]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    loaded = passes.loaded
    how = (
        f"{passes.made + passes.resumed} passes on {loaded.device} in "
        f"{str(loaded.dtype).removeprefix('torch.')}, {duration(passes.seconds)}"
    )
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
        sequences=len(part.rows),
        groups=part.here,
        groups_in_dump=part.groups,
        missing=dict(left),
        small={name: many for name, many in needed.items() if many > tokens and name not in named},
        strip=three.strip(ids, *columns, seen.reference, starts),
        how=how,
        notes=[*loaded.notes, *part.notes],
    )


def fingerprint(files: Sequence[str], loaded: Loaded, responses: Responses, names: Sequence[str]) -> str:
    """Return what passes are kept under: the model, the tokens, and what is done with them."""
    state = hashlib.blake2b(digest_size=8)
    state.update(
        repr((files, loaded.identity, loaded.name, str(loaded.dtype), [*loaded.checkpoints], names)).encode()
    )
    for row in responses.rows:
        state.update(row.ids.tobytes() + np.array([row.start, row.temperature]).tobytes())
    return state.hexdigest()

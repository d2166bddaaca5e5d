"""`rescore` from the dump to the dump: what is read, scored, judged and written."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag.diagnosis.reference import KEY
from offpol_diag.dump import schema as role
from offpol_diag.dump.convert import open_dump
from offpol_diag.dump.read import Dump
from offpol_diag.dump.writer import KEY as METADATA_KEY
from offpol_diag.errors import OffpolError, UsageError
from offpol_diag.files import beside
from offpol_diag.rescore import models
from offpol_diag.rescore.rows import REFERENCE, Responses, read
from offpol_diag.rescore.run import GROWN, fingerprint
from offpol_diag.rescore.run import rescored as judged
from offpol_diag.result.reference import SAMPLE_TOKENS, Reference

COLUMNS = {REFERENCE[0]: pa.float32(), REFERENCE[1]: pa.float32(), REFERENCE[2]: pa.int32()}
ROWS = 4096
"""Rows of a row group."""


def rescored(
    paths: Sequence[str],
    model: Any,
    to: Path,
    say: Callable[[str], None],
    *,
    columns: Mapping[str, str] | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
    sample: int | None,
    tries: Sequence[str],
    base: str | Path | None,
    tokenizer: Any,
    max_length: int | None,
    dtype: str,
    attention: str | None,
    device: str,
    seed: int,
    progress: Any,
) -> tuple[Reference, dict[str, str]]:
    """Score the responses of a dump again, and write them.

    Args:
        paths: the dump.
        model: folders or names on the hub, the run's own first; or a live model.
        to: where the scored responses go.
        say: told how long it takes.
        columns: our names → the dump's.
        on_bad_row: whether a row that cannot be read is left out.
        sample: prompts that are scored at first; None for all of them.
        tries: hypotheses to try, by name or family; all where none is named.
        base: the base model of an adapter.
        tokenizer: a folder; with a live model its tokenizer.
        max_length: sequences of more tokens are left out.
        dtype: type of the body.
        attention: which attention of transformers.
        device: where to compute.
        seed: of the sample.
        progress: called with tokens done and in all.

    Returns:
        The verdict, and the columns to name where what is written is read.
    """
    live = not isinstance(model, str | Path | list | tuple)
    names = [] if live else [str(one) for one in ([model] if isinstance(model, str | Path) else model)]
    if not names and not live:
        raise UsageError("rescore needs the model of the run", "name it: --model FOLDER")
    overrides = dict(columns or {})
    dump = open_dump(paths, columns=overrides, on_bad_row=on_bad_row)
    most = None if sample is None else GROWN * sample
    words = None if live or tokenizer is None else Path(str(tokenizer))
    responses = read(dump, most, GROWN * SAMPLE_TOKENS, seed, words, max_length)
    if live:
        loaded = models.given(model, tokenizer)
    else:
        below = None if base is None else str(base)
        loaded = models.load(names, base=below, device=device, dtype=dtype, attention=attention)
    loaded.judge(responses.rows, dump.info.files[0])
    folder = None
    if not live:
        key = fingerprint(dump.info.files, loaded, responses, tries)
        folder = beside(to.resolve()).with_name(f".{to.name}.{key}")
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            say(f"going on where an interrupted run stopped ({folder})")
    train = role.OLD if role.OLD in dump.info.columns else role.CURRENT
    try:
        found, passes, part = judged(
            responses,
            loaded,
            groups=sample,
            names=tries,
            provenance=dump.info.provenance,
            columns=(dump.info.columns[role.ROLLOUT], dump.info.columns[train]),
            folder=folder,
            say=say,
            progress=progress or None,
        )
    except (KeyboardInterrupt, SystemExit, OffpolError):
        if folder and any(folder.glob("*.npz")):
            say(f"what was computed is kept in {folder}: the same command goes on from there")
        elif folder:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    _write(to, dump, part, passes.columns(), found)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    kept = {name: one for name, one in overrides.items() if one == role.NONE}
    return found.model_copy(update={"written": str(to)}), kept


def _write(target: Path, dump: Dump, part: Responses, columns: Any, found: Reference) -> None:
    """Write the responses with the reference's columns, under the canonical names of the others."""
    roles = {name: ours for ours, name in dump.info.columns.items()}
    taken, table = set(roles.values()) | set(REFERENCE), part.table
    names = [roles.get(name, name) for name in table.column_names]
    keep = [i for i, name in enumerate(table.column_names) if name in roles or names[i] not in taken]
    table = table.select(keep).rename_columns([names[i] for i in keep])
    offsets = pa.array(np.concatenate(([0], np.cumsum(part.sizes))), pa.int32())
    for (name, kind), values in zip(COLUMNS.items(), columns, strict=True):
        numbers = pa.array(values.astype(kind.to_pandas_dtype()))
        table = table.append_column(name, pa.ListArray.from_arrays(offsets, numbers))
    said = {"model": found.model, "floor": found.floor, "rests_on": found.rests_on}
    provenance = {**dump.info.provenance, KEY: said}
    table = table.replace_schema_metadata({METADATA_KEY: json.dumps(provenance, default=str)})
    temporary = beside(target.resolve())
    try:
        pq.write_table(table, temporary, compression="zstd", row_group_size=ROWS)
        temporary.replace(target.resolve())
    except OSError as error:
        raise UsageError(
            f"{target}: cannot be written ({error.strerror or error})", "choose another place"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)

"""The forms, one row each, in the order in which they are tried: trainers' own first, guesses last."""

from __future__ import annotations

from collections.abc import Callable

from offpol_diag.forms import generic
from offpol_diag.forms.form import Form, Head
from offpol_diag.readers.columns import CURRENT, LIST, OLD, ROLLOUT

WRITTEN = (".jsonl", ".jsonl.gz", ".parquet", ".arrow", ".feather", ".ipc", ".npz")
"""Endings of files that are looked at in a directory."""
LOG_PROBS = frozenset(
    name for role in LIST.roles if role.name in (ROLLOUT, OLD, CURRENT) for name in role.names
)


def _log_probs(kind: str) -> Callable[[Head], bool]:
    """Return a test for files of a kind in which a column has a name that log-probs have somewhere."""
    return lambda head: head.kind == kind and not LOG_PROBS.isdisjoint(head.fields)


FORMS: tuple[Form, ...] = (
    Form(
        "jsonl",
        "",
        "*.jsonl, *.jsonl.gz",
        "one object per sequence, a list per token column",
        _log_probs("jsonl"),
        generic.jsonl,
        guess=True,
    ),
    Form(
        "arrow",
        "",
        "*.arrow, *.feather, *.ipc",
        "Arrow IPC file or stream: a row per sequence, lists per token",
        _log_probs("arrow"),
        generic.tables,
        guess=True,
    ),
    Form(
        "npz",
        "",
        "*.npz",
        "padded arrays [S, L] with a mask, or flat ones with cu_seqlens",
        _log_probs("npz"),
        generic.npz,
        generic.PADDED,
        guess=True,
    ),
    Form(
        "parquet",
        "",
        "*.parquet",
        "a row per sequence, lists per token; for --join and --align",
        _log_probs("parquet"),
        generic.tables,
        guess=True,
    ),
)
"""To add a form, add a row; `Form` says what its fields are."""
BY_COLUMNS = {one.name: one for one in FORMS if one.name in ("jsonl", "arrow", "npz", "parquet")}
"""Kind of file → the form that reads it by the names that `--columns` gives."""

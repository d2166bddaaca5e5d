"""Lists of the likeliest ids of both sides: what is read of them, and what they tell."""

from __future__ import annotations

from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import PROMPTS, WORDS, Policy, capped, colder
from faults import responses as sampled
from typer.testing import CliRunner

from offpol_diag import DumpWriter
from offpol_diag.analyze import analyze
from offpol_diag.cli import app
from offpol_diag.engine import toplists
from offpol_diag.readers.dump import open_dump

OLD = Policy()
NEW = OLD.moved(0.1)
IDS, LOG_PROBS = ("rollout_top_ids", "train_top_ids"), ("rollout_top_log_probs", "train_top_log_probs")


def of(policy, given, without=()):
    """Return the log-probs of all ids at each token, [length, WORDS] of each sequence."""
    rows = []
    for ids, group in zip(given["token_ids"], given["group_id"], strict=True):
        seen = np.zeros((len(ids), WORDS), bool)
        found = [policy.log_probs(np.array([group]), 0, None, seen[:1])[0]]
        found += [
            policy.log_probs(np.array([group]), t, ids[t - 1 : t], seen[:1])[0] for t in range(1, len(ids))
        ]
        rows.append(np.array(found))
    for row in rows:
        row[:, list(without)] = -np.inf
    return rows


def top(log_probs, k):
    """Return the k likeliest ids of each token, and their log-probs."""
    ids = [np.argsort(-one, 1, kind="stable")[:, :k] for one in log_probs]
    return ids, [np.take_along_axis(one, at, 1) for one, at in zip(log_probs, ids, strict=True)]


def listed(given, q, p, k=(8, 12)):
    """Return a dump with the lists of two policies, given as log-probs of all ids, and all of those."""
    (qi, ql), (pi, pl) = top(q, k[0]), top(p, k[1])
    lists = dict(zip(("rollout_top_ids", "rollout_top_log_probs"), (qi, ql), strict=True))
    lists |= dict(zip(("train_top_ids", "train_top_log_probs"), (pi, pl), strict=True))
    return given | {n: [row.ravel() for row in x] for n, x in lists.items()}


@cache
def dump(engine=1.0, trainer=1.0, logged=None, new=False, cap=0.0):
    """Return a dump of an engine and a trainer at two temperatures, and the policies that log."""
    base = NEW if new else OLD
    scored = colder(trainer, capped(base, cap) if cap else base)
    writes = colder(engine if logged is None else logged, OLD)
    given = sampled(lambda t: colder(engine, OLD), scored, logged=writes)
    return given, of(writes, given), of(scored, given)


def diagnosed(tmp_path, given):
    names = [n for n in given if n not in ("entropy", "sampled")]
    table = pa.table({n: given[n] for n in names})
    pq.write_table(table, tmp_path / "a.parquet")
    return analyze([str(tmp_path / "a.parquet")], presets=(), device="cpu", threads=1).diagnosis


if __name__ == "__main__":
    from pathlib import Path
    import sys
    cases = {"honest": dict(), "new": dict(new=True), "T.7 trainer": dict(engine=.7), "T1.3 trainer": dict(engine=1.3), "raw .7": dict(engine=.7, trainer=.7, logged=1.0), "cap": dict(cap=5.0),"T both": dict(engine=.6, trainer=.6), "T.95": dict(engine=.95, new=True)}
    for n, c in cases.items():
        g = dump(**c)
        d = diagnosed(Path("/tmp"), listed(*g))
        from offpol_diag.diagnosis import toplists as t
        from offpol_diag.diagnosis.rows import Rows
        print(n, d.verdict, [(x.id, x.statement, x.statistic, x.after and x.after.k3) for x in d.causes], [x.id for x in d.candidates])
        d = diagnosed(Path("/tmp"), g[0])
        print("   without", d.verdict, [(x.id, x.after and x.after.k3) for x in d.causes], [x.id for x in d.candidates])

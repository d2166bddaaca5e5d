"""The peer: nine numbers of an analysis as one DuckDB query, and the check that both agree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import part

from offpol_diag.number import Numbers
from offpol_diag.result import Result

TOLERANCE = 1e-6

QUERY = """
WITH token AS (
    SELECT file_row_number AS id, unnest(rollout_log_probs) AS q, unnest(old_log_probs) AS p,
           unnest(response_mask) AS m
    FROM read_parquet(?, file_row_number = true)
), gap AS (
    SELECT id, p::DOUBLE - q::DOUBLE AS d FROM token WHERE m = 1
), ratio AS (
    SELECT id, d, exp(d) AS r, least(exp(d), 2) AS w FROM gap
), sequence AS (
    SELECT id, count(*) AS n, sum(d) AS s, sum(r - 1 - d) AS k3, sum(r * r) AS rr,
           sum(w) AS w, sum(w * w) AS ww, sum((r NOT BETWEEN 0.5 AND 2)::INT) AS outside, min(d) AS least
    FROM ratio GROUP BY id
)
SELECT sum(n) AS tokens,
       sum(k3) / sum(n) AS k3,
       sum(rr) / sum(n) - 1 AS chi2_token,
       avg(exp(2 * s)) - 1 AS chi2_sequence,
       avg(exp(-s / n)) AS ppl_ratio,
       sum(w) * sum(w) / (sum(n) * sum(ww)) AS truncated_ess,
       sum(outside) / sum(n) AS tokens_rejected,
       avg((s NOT BETWEEN ln(0.5) AND ln(2))::INT) AS sequences_dropped,
       avg((least < ln(1e-4))::INT) AS vetoed
FROM sequence
"""
"""The fastest form found: lists are unnested once, and exp is taken in a step of its own."""
GIVEN = ("k3", "chi2_token", "chi2_sequence", "ppl_ratio")
OF_PRESETS = {
    "truncated_ess": ("token_is", "ess_tokens"),
    "tokens_rejected": ("slime_mis_token_mask", "tokens_rejected"),
    "sequences_dropped": ("seq_mis", "sequences_dropped"),
    "vetoed": ("geo_rs", "vetoed"),
}
"""The query's name → the preset whose bounds the query has, and our name."""


class Disagreement(part.Failed):
    """Numbers computed in two ways do not agree, so that a timing would show nothing."""


class Duck:
    """A DuckDB connection limited to some threads."""

    def __init__(self, threads: int) -> None:
        import duckdb

        self.connection = duckdb.connect()
        self.connection.execute(f"SET threads = {threads}")

    def nine(self, path: Path) -> dict[str, float]:
        """Compute the nine numbers of a dump."""
        cursor = self.connection.execute(QUERY, [str(path)])
        names = [column[0] for column in cursor.description]
        (row,) = cursor.fetchall()
        return dict(zip(names, map(float, row), strict=True))


def ours(summary: Result) -> dict[str, float]:
    """Compute the same numbers by an analysis with the presets of `OF_PRESETS`."""
    found = {"tokens": float(summary.dump.tokens)}
    found |= {name: _value(summary.whole, name) for name in GIVEN}
    return found | {
        name: _value(summary.preset(preset), metric) for name, (preset, metric) in OF_PRESETS.items()
    }


def _value(numbers: Numbers, name: str) -> float:
    value = numbers[name].value
    return math.nan if value is None else value


def agree(found: Mapping[str, float], expected: Mapping[str, float], within: float = TOLERANCE) -> None:
    """Compare name by name, relative to the larger; raise `Disagreement`.

    Raises:
        Disagreement: a name is missing, or its numbers differ by more; NaN agrees with nothing.
    """
    off = [
        f"{name}: {found.get(name, math.nan)!r}, not {value!r}"
        for name, value in expected.items()
        if not math.isclose(found.get(name, math.nan), value, rel_tol=within)
    ]
    if off or not expected:
        raise Disagreement("; ".join(off) or "nothing was compared")

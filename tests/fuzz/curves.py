"""Damaged files of curves, compared with a good dump by `check`.

python tests/fuzz/curves.py --seconds 60 --seed 0
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import mutations
import runner

WAYS: tuple[tuple[str, ...], ...] = (
    ("check", "d.parquet", "--logged", "{file}", "--json", "r.json", "--html", "r.html", "--md", "r.md"),
    ("check", "d.parquet", "--logged", "{file}", "--trainer", "verl", "--md", "-"),
    ("check", "d.parquet", "--logged", "{file}", "--preset", "token_is", "-v"),
    ("check", "d.parquet", "--logged", "{file}", "--logged", "good.jsonl", "--quiet"),
)


@cache
def dump() -> bytes:
    """Write a dump of two small steps."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    stream = io.BytesIO()
    parts = [pq.read_table(io.BytesIO(runner.dump(4, step, 6))) for step in (1, 2)]
    pq.write_table(pa.concat_tables(parts, promote_options="permissive"), stream)
    return stream.getvalue()


@cache
def history() -> str:
    """Write roughly what verl logs of those steps."""
    line = ("check", "d.parquet", "--logged", "h.jsonl", "--preset", "token_is", "--json", "r.json")
    names = ("kl", "k3_kl", "rollout_is_mean", "rollout_is_max", "chi2_token", "ppl_ratio")
    wrong = [{"_step": step, **{f"rollout_corr/{name}": 9.0 for name in names}} for step in (1, 2)]
    given = {"d.parquet": dump(), "h.jsonl": "\n".join(map(json.dumps, wrong)).encode()}
    found = json.loads(runner.written(line, given)["r.json"])
    rows: dict[int, dict[str, Any]] = {}
    for metric in found["metrics"]:
        for point in metric["points"]:
            rows.setdefault(point["step"], {"_step": point["step"]})[metric["name"]] = point["expected"]
    return json.dumps(list(rows.values()))


def _jsonl(random: Random, rows: Any) -> bytes:
    return b"\n".join(mutations.as_json(random, row) for row in rows if isinstance(row, dict))


def _csv(random: Random, rows: Any) -> bytes:
    names = list(rows[0]) if rows and isinstance(rows[0], dict) else []
    before = random.choice(("", "run - ", f"{mutations.text(random)} - "))
    lines = [["Step" if name == "_step" else before + name for name in names]]
    lines += [[str(row.get(name)) for name in names] for row in rows if isinstance(row, dict)]
    text = "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
    return text.encode(random.choice(("utf-8", "utf-8", "utf-16", "utf-8-sig")), "surrogatepass")


FORMS: dict[str, Callable[[Random, Any], bytes]] = {
    "h.jsonl": _jsonl,
    "h.csv": _csv,
    "h.parquet": lambda random, rows: dump(),
}


def make(random: Random) -> runner.Input:
    """Draw a damaged history in one of the forms that are read."""
    name = random.choice(list(FORMS))
    rows = json.loads(history())
    if random.random() < 0.8:
        rows = mutations.tree(random, rows)
    bad = FORMS[name](random, rows)
    if random.random() < 0.3:
        bad = mutations.blob(random, bad)
    way = tuple(word.format(file=name) for word in random.choice(WAYS))
    return runner.Input(
        way, {"d.parquet": dump(), name: bad, "good.jsonl": _jsonl(random, json.loads(history()))}
    )


if __name__ == "__main__":
    raise SystemExit(runner.main(make))

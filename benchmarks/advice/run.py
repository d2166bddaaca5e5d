"""Measure the recommended correction where the true gradient is known.

    python benchmarks/advice/run.py --split development --cache /tmp/advice [--limit N] [--jobs 2] [--write]

Draws the dumps of every regime into the cache, with the alignments of every correction beside them, unless
they are there; then reads each dump as a user does, and prints what the recommendation and other policies
reach.
`--write` keeps the results in benchmarks/advice/results.json and writes docs/advice.md from it.
Empty the cache when anything but a rule has changed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.advice import judge, page
from benchmarks.advice.regimes import SPLITS, Regime, Split, regimes
from offpol_diag import Result
from offpol_diag.advice.recommend import advised
from offpol_diag.analyze import analyze
from offpol_diag.presets.candidates import CANDIDATES, DEFAULT
from offpol_diag.result import MARGIN

Row = dict[str, Any]
DUMPS = 2
LACKING = ("token_ids", "advantages", "group_id")
"""Columns that a dump may lack, one at a time."""
EVERY = 3
"""One in this many regimes is also read without these columns."""
TITLES = {candidate.title: candidate.name for candidate in CANDIDATES}


def main() -> None:
    """Draw missing regimes, read every dump, print the tables, and store them if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", choices=list(SPLITS), default="development")
    parser.add_argument("--cache", type=Path, required=True, help="folder of the dumps and their truth")
    parser.add_argument("--limit", type=int, help="so many regimes, from all worlds; nothing is kept")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--draw", action="store_true", help="draw the dumps only")
    parser.add_argument("--write", action="store_true", help="keep the results and write the page")
    given = parser.parse_args()
    chosen = regimes(given.split)
    chosen = chosen[:: -(-len(chosen) // given.limit)] if given.limit else chosen
    folder: Path = given.cache
    folder.mkdir(parents=True, exist_ok=True)
    rows = _spread(_drawn, [(regime.split, regime.name, folder) for regime in chosen], given.jobs)
    (folder / "manifest.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if given.draw:
        return
    rows = _spread(_read, [(row, folder, at % EVERY == 0) for at, row in enumerate(rows)], given.jobs)
    if given.write and not given.limit:
        page.keep(given.split, rows)
        page.write()
    print(page.tables(rows))


def _spread(work: Callable[..., Row], jobs: list[tuple[Any, ...]], processes: int) -> list[Row]:
    """Compute jobs in parallel; results are in their order."""
    found: list[Row] = []
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, threadpool_limits, (1,)) as pool:
        for row in pool.map(work, *zip(*jobs, strict=True)):
            found.append(row)
            words = f"{work.__name__[1:]} {len(found)}/{len(jobs)}, {time.monotonic() - start:.0f} s"
            print(f"\r{words}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


# ---------------------------------------------------------------- dumps and their truth


def _drawn(split: Split, name: str, folder: Path) -> Row:
    """Return a regime's row from the cache; draw, judge and cache it if absent."""
    regime = next(one for one in regimes(split) if one.name == name)
    kept = folder / f"{split}-{regime.seed}.json"
    if not kept.exists():
        kept.write_text(json.dumps(_judged(regime, folder)) + "\n", encoding="utf-8")
    return dict(json.loads(kept.read_text(encoding="utf-8")))


def _judged(regime: Regime, folder: Path) -> Row:
    """Judge a regime: facts, alignments by batch and method, the best by batch, and its dumps' files."""
    start = time.process_time()
    world, rollout = regime.made()
    k3, length = judge.facts(world, rollout)
    found = judge.judge(world, rollout, regime.place.judged, np.random.default_rng(regime.seed + 2))
    alignments, best = judge.table(world, found)
    dumps = [f"{regime.split}-{regime.seed}.{at}.parquet" for at in range(DUMPS)]
    for at, dump in enumerate(dumps):
        rng = np.random.default_rng(regime.seed + 10 + at)
        drawn = judge.sample(world, rollout, regime.place.sequences, rng)
        judge.write(folder / dump, rollout, drawn, world.group)
    return {
        **asdict(regime.place),
        "name": regime.name,
        "split": regime.split,
        "kind": regime.kind.kind,
        "seed": regime.seed,
        "k3": k3,
        "mean_length": length,
        "alignment": alignments,
        "best": best,
        "dumps": dumps,
        "seconds": time.process_time() - start,
    }


# ---------------------------------------------------------------- policies


def _read(row: Row, folder: Path, lacking: bool) -> Row:
    """Add to a row, by dump, the choice of each policy, the text of the recommendation, and what it rests on.

    `healthy`: whether K3 is below the noise floor; `worse`: whether the estimated error of no correction is
    significantly above that of token TIS.
    """
    found: Row = row | {"chosen": {}, "decision": [], "stated": [], "healthy": [], "worse": [], "lacking": {}}
    for dump in row["dumps"]:
        summary = _summary(folder / dump)
        given = summary.recommendation
        assert given is not None
        found["decision"].append(given.title or given.decision)
        assert summary.diagnosis is not None
        share, above = summary.diagnosis.systematic, summary.candidates["none"][f"error_above.{DEFAULT.name}"]
        found["stated"].append(share.interval if share else None)
        found["healthy"].append(summary.diagnosis.verdict == "healthy")
        found["worse"].append(above.interval is not None and above.interval[0] > MARGIN)
        for name, policy in POLICIES.items():
            found["chosen"].setdefault(name, []).append(policy(summary))
    for column in LACKING if lacking else ():
        part = folder / f"without-{column}-{row['dumps'][0]}"
        pq.write_table(pq.read_table(folder / row["dumps"][0]).drop_columns([column]), part)
        found["lacking"][column] = recommended(_summary(part))
        part.unlink()
    return found


def _summary(dump: Path) -> Result:
    """Analyze a dump with the options of a user."""
    try:
        return advised(analyze([str(dump)], presets=(), device="cpu", threads=1))
    except Exception as error:
        error.add_note(f"while reading {dump}")
        raise


def recommended(summary: Result) -> str:
    """Return the recommended candidate; `none` where no correction, a repair or more data is asked for."""
    given = summary.recommendation
    assert given is not None
    return TITLES[given.title] if given.decision == "METHOD at THRESHOLD" and given.title else "none"


def by_severity(summary: Result) -> str:
    """Choose by verl's guide: nothing where the mismatch is negligible, token TIS, sequence TIS where severe.

    Its FAQ calls a mean difference of probabilities below 0.005 normal; it alerts at |KL| 0.1 and χ² 1.
    """
    apart, k1, chi2 = (summary.whole[name].value or 0.0 for name in ("prob_diff_mean", "k1", "chi2_token"))
    if apart < 0.005:
        return "none"
    return "seq_tis_2.0" if abs(k1) > 0.1 or chi2 > 1 else "token_tis_2.0"


def _always(name: str) -> Callable[[Result], str]:
    return lambda summary: name


POLICIES: dict[str, Callable[[Result], str]] = {
    "recommended": recommended,
    "verl's guide, by severity": by_severity,
    "always token TIS 2": _always("token_tis_2.0"),
    "always token TIS 5": _always("token_tis_5.0"),
    "always none": _always("none"),
    "always IcePop 0.5–5": _always("token_icepop_0.5_5.0"),
    "always IcePop 0.5–2": _always("token_icepop_0.5_2.0"),
    "always token mask 0.5–2": _always("token_mask_0.5_2.0"),
    "always sequence TIS 2": _always("seq_tis_2.0"),
    "always sequence MIS 0.5–2": _always("seq_mis_0.5_2.0"),
    "always geometric ±1%": _always("geo_rs_1%"),
    "always geometric ±1% with token TIS 2": _always("geo_rs_1%_token_tis_2.0"),
}


if __name__ == "__main__":
    main()

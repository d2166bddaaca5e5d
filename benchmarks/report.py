"""Store benchmark results and write the pages from them: `python benchmarks/report.py`.

`results.json` holds, by part, the result and the machine it was measured on; docs/benchmarks.md and
docs/scale.md are written from that file alone, by the templates in `pages/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import part
import scale

DOCS = part.HERE.parent / "docs"
SECTIONS = {
    "peers": "Against DuckDB, and against only reading",
    "presets": "What a further preset costs",
    "padded": "Against the way trainers compute it",
    "memory": "Memory",
    "complexity": "Growth",
    "startup": "Start-up",
    "writer": "Writing a dump",
    "page": "The page in a browser",
    "gpu": "On a GPU",
}
"""Part → title."""
SHAPES = {
    "ordinary": "ordinary",
    "collapsed": "a collapsed run",
    "log_normal": "lengths of a large spread",
    "short": "very short rows",
}
"""Shape of dump.py → how the pages call it."""
Results = dict[str, dict[str, Any]]


def keep(name: str, result: part.Result, machine: part.Result, path: Path = part.RESULTS) -> None:
    """Store one part's result in place of its last; write the pages if the file is this repository's."""
    found = results(path) | {name: {"machine": machine, "result": result}}
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if path == part.RESULTS:
        write(found, DOCS)


def results(path: Path = part.RESULTS) -> Results:
    """Load the stored results, by part."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def write(found: Results, folder: Path) -> None:
    """Write both pages."""
    for name, text in pages(found).items():
        (folder / name).write_text(text, encoding="utf-8")


def pages(found: Results) -> dict[str, str]:
    """Render the pages, by file name."""
    sections = [_section(name, found.get(name)) for name in SECTIONS]
    for before, one in reversed([*pairwise(sections)]):
        one["machine"] = None if one["machine"] == before["machine"] else one["machine"]
    return {
        "benchmarks.md": _page("benchmarks", sections=sections),
        "scale.md": _page("scale", c=scale.costs(found)),
    }


def _section(name: str, found: Mapping[str, Any] | None) -> dict[str, Any]:
    missing = f"Not measured yet: `python benchmarks/{name}.py --write`."
    return {
        "name": name,
        "title": SECTIONS[name],
        "body": body(name, found["result"]) if found else missing,
        "machine": found["machine"] if found else None,
    }


def body(name: str, result: part.Result) -> str:
    """Render one part's result as the page has it."""
    return _page(name, r=result).rstrip()


# ---------------------------------------------------------------- how numbers are written


def count(x: float) -> str:
    """Format a count: 16.5 M; 987 k; 12."""
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= size:
            return f"{_digits(x / size)} {letter}"
    return _digits(x)


def bytes_text(x: float | None) -> str:
    """Format bytes: 213 MB; 1.2 TB; – where there is nothing."""
    if x is None:
        return "–"
    return f"{count(x)}B" if x >= 1e3 else f"{_digits(x)} B"


def _digits(x: float) -> str:
    """Format with three digits or all before the point, without an exponent."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def seconds(x: float) -> str:
    """Format seconds with three digits; thousandths below 1."""
    return _digits(x) if x >= 1 else f"{x:.3f}"


def milliseconds(x: float) -> str:
    """Format milliseconds: 310 ms."""
    return f"{x:,.0f} ms"


def hours(x: float) -> str:
    """Format hours with three digits; nothing smaller than a hundredth."""
    return _digits(x) if x >= 0.01 else "< 0.01"


def percent(x: float) -> str:
    """Format a percentage: 12%; 1.3%."""
    return f"{_digits(100 * x)}%"


def number(x: float) -> str:
    """Format a number: 16,405,279; 0.000269015."""
    return f"{x:,.0f}" if x.is_integer() and x >= 1000 else f"{x:.6g}"


def dump(result: Mapping[str, Any]) -> str:
    """Describe the dump of a result."""
    return (
        f"{result['sequences']:,} sequences, {count(result['tokens'])} tokens, "
        f"{bytes_text(result['bytes'])} of Parquet."
    )


def machine(facts: Mapping[str, Any]) -> str:
    """Describe the machine and its versions, in a line."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    gpu = f"{facts['gpu']}, " if facts["gpu"] else ""
    return (
        f"Measured {facts['date']} on {gpu}{facts['cpu']}, {facts['cores']} cores, "
        f"{facts['memory_gib']} GiB, {facts['system']}; {versions}."
    )


def _page(name: str, **values: object) -> str:
    return _ENVIRONMENT.get_template(f"{name}.md.j2").render(**values)


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(part.HERE / "pages"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {
    "count": count,
    "bytes": bytes_text,
    "seconds": seconds,
    "hours": hours,
    "milliseconds": milliseconds,
    "percent": percent,
    "number": number,
    "shape": SHAPES.__getitem__,
    "known": lambda x: "–" if x is None else str(x),
    "dump": dump,
    "machine": machine,
    "zip": zip,
}

if __name__ == "__main__":
    write(results(), DOCS)

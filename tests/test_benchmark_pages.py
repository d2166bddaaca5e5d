"""The pages of the benchmarks: written from what is kept, and from nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import machine
import pytest
import report
import scale

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["benchmarks.md", "scale.md"])
def test_a_page_is_current_with_the_results_that_are_kept(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")

    assert text == report.pages(report.results())[name], "run `python benchmarks/report.py`"


@pytest.mark.parametrize("name", ["benchmarks.md", "scale.md"])
def test_every_link_of_a_page_leads_to_a_file(name: str) -> None:
    links = re.findall(r"\]\(([^)]+)\)", report.pages(report.results())[name])

    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_every_result_that_is_kept_names_its_machine() -> None:
    found = report.results()

    assert found
    for one in found.values():
        assert {"date", "cpu", "cores", "memory_gib", "system", "versions", "gpu"} == set(one["machine"])


def test_a_part_replaces_its_own_result_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "results.json"

    for name, value in (("startup", 1), ("gpu", 2), ("startup", 3)):
        report.keep(name, {"value": value}, {"cpu": "x"}, path)

    assert {name: one["result"]["value"] for name, one in report.results(path).items()} == {
        "startup": 3,
        "gpu": 2,
    }


def test_a_part_that_was_not_measured_says_how_to_measure_it() -> None:
    pages = report.pages({})

    assert pages["benchmarks.md"].count("Not measured yet") == len(report.SECTIONS)
    assert "Not measured yet" in pages["scale.md"]


def test_the_facts_of_a_machine_name_processor_versions_and_day() -> None:
    facts = machine.facts()

    assert re.fullmatch(r"\d{4}-\d\d-\d\d", str(facts["date"]))
    assert facts["cpu"]
    assert {"torch", "duckdb", "pyarrow"} <= set(facts["versions"])  # type: ignore[call-overload]
    assert report.machine(facts).startswith("Measured 20")


MEASURED = {
    "peers": {
        "machine": {"cpu": "a core of ours"},
        "result": {"tokens": 1e6, "bytes": 13e6, "seconds": {"analyze": {"wall": 1.0, "cpu": 2.0}}},
    }
}
GPU = {
    "result": {
        "device": "H1",
        "rows": [{"tokens_per_second": 1e9}, {"tokens_per_second": 2e9}],
        "end_to_end": {"tokens_per_second": 1e8},
    }
}


def test_scale_is_reckoned_from_the_seconds_of_processor() -> None:
    costs = scale.costs(MEASURED)
    row = next(row for row in costs["rows"] if row["name"] == "10¹²")

    assert costs["core"] == 5e5
    assert costs["read_per_core"] == 6.5e6
    assert row["core_hours"] == pytest.approx(1e12 / 5e5 / 3600)
    assert row["machine_hours"] == pytest.approx(1e12 / 5e5 / 3600 / 64)
    assert row["machines"] == 9  # 8.68 of them
    assert row["disk"] == 13e12
    assert row["per_second"] == pytest.approx(13e12 / 3600)
    assert row["pieces"] == 100


def test_the_page_of_scale_says_what_is_known_and_what_was_not_measured() -> None:
    bare = scale.costs(MEASURED)
    tallies = {"result": {"rows": [{"tally_bytes": 2e6}, {"tally_bytes": 3e6}], "merge_seconds": 0.36}}
    full = scale.costs(
        MEASURED | {"gpu": GPU, "tallies": tallies, "memory": {"result": {"rows": [{"peak": 6e8}]}}}
    )

    assert "A GPU has not been measured yet" in report._page("scale", c=bare)
    assert "The size of a tally file has not been measured yet" in report._page("scale", c=bare)
    text = report._page("scale", c=full)
    assert "not been measured" not in text
    assert "One H1 does the work of 4,000 cores" in text
    assert "| 10¹⁴ | 10,000 | 30 GB | 1 |" in text
    assert "| a tally file, packed | 3 MB |" in text
    assert "dump of any size | 600 MB |" in text


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (report.count(16_524_000), "16.5 M"),
        (report.count(987), "987"),
        (report.count(123_456_000_000), "123 G"),
        (report.bytes_text(212_764_386), "213 MB"),
        (report.bytes_text(12), "12 B"),
        (report.bytes_text(None), "–"),
        (report.seconds(0.0123), "0.012"),
        (report.seconds(1234.5), "1,234"),
        (report.hours(0.001), "< 0.01"),
        (report.percent(0.0123), "1.23%"),
        (report.number(16_405_279.0), "16,405,279"),
        (report.number(0.5), "0.5"),
    ],
)
def test_numbers_are_written_in_three_digits(found: str, said: str) -> None:
    assert found == said

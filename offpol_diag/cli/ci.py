"""Write GitHub's job summary and annotations."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from offpol_diag.cli.output import Outputs, note

if TYPE_CHECKING:
    from offpol_diag.summary import Summary


def tell(summary: Summary, files: Outputs) -> None:
    """Add to the job summary where there is one, and annotate the run of GitHub Actions."""
    place = os.environ.get("GITHUB_STEP_SUMMARY")
    if place:
        _add(Path(place), summary)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        _annotate(summary, files)


def _add(place: Path, summary: Summary) -> None:
    """Append to the job summary; failing to write it does not fail a gate."""
    from offpol_diag.report.render.markdown import render_markdown

    try:
        with place.open("a", encoding="utf-8") as file:
            file.write("\n" + render_markdown(summary))
    except OSError as error:
        note(f"GITHUB_STEP_SUMMARY: {place} cannot be written ({error.strerror})")


def _annotate(summary: Summary, files: Outputs) -> None:
    """Print annotations on stdout, or on stderr, which GitHub also reads, if stdout holds a result."""
    from offpol_diag.report.render.annotations import annotated

    lines = "".join(f"{line}\n" for line in annotated(summary.gates)).encode()
    stream = sys.stderr if files.takes_stdout() else sys.stdout
    stream.flush()
    stream.buffer.write(lines)
    stream.buffer.flush()

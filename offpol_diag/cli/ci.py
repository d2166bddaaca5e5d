"""Write GitHub's job summary and annotations."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from offpol_diag.cli.output import emit, note

if TYPE_CHECKING:
    from offpol_diag.summary import Summary


def tell(summary: Summary, aside: bool) -> None:
    """Add to the job summary where there is one, and annotate the run of GitHub Actions.

    Annotations go to stdout, or `aside` to stderr, which GitHub also reads. Failing to write the job summary
    does not fail a gate.
    """
    place = os.environ.get("GITHUB_STEP_SUMMARY")
    if place:
        from offpol_diag.report.render.markdown import render_markdown

        try:
            with Path(place).open("a", encoding="utf-8") as file:
                file.write("\n" + render_markdown(summary))
        except OSError as error:
            note(f"GITHUB_STEP_SUMMARY: {place} cannot be written ({error.strerror})")
    if os.environ.get("GITHUB_ACTIONS") == "true":
        from offpol_diag.report.render.annotations import annotated

        lines = "".join(f"{line}\n" for line in annotated(summary.gates))
        if aside:
            sys.stderr.flush()
            sys.stderr.buffer.write(lines.encode())
            sys.stderr.buffer.flush()
        else:
            emit(lines)

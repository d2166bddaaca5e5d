"""A report and its figures in a real notebook."""

from __future__ import annotations

from pathlib import Path

import pytest

HEALTHY = Path("sample_data/healthy.parquet").resolve()


def executed(code, folder):
    """Run a notebook of one cell."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return book


@pytest.mark.filterwarnings("ignore")  # jupyter's own
def test_a_notebook_shows_the_report(tmp_path):
    code = f"import offpol_diag\noffpol_diag.analyze({str(HEALTHY)!r}, presets='token_is', device='cpu')"
    book = executed(code, tmp_path)

    (shown,) = (one for one in book.cells[0].outputs if one.output_type == "execute_result")
    assert "K3 KL" in shown.data["text/html"]
    assert shown.data["text/plain"].startswith("Result(")


@pytest.mark.filterwarnings("ignore")  # jupyter's own
def test_a_notebook_shows_a_figure(tmp_path):
    code = f"import offpol_diag\noffpol_diag.doctor({str(HEALTHY)!r}, device='cpu').figure('by_step')"
    book = executed(code, tmp_path)

    data = {name: one for cell in book.cells[0].outputs for name, one in cell.get("data", {}).items()}
    assert "K3 lies between" in str(data["application/vnd.plotly.v1+json"]["layout"]["title"])

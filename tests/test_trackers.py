"""`Report.log_to` with the real experiment trackers, and a report in a real notebook."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

import offpol_diag

HEALTHY = Path("sample_data/healthy.parquet").resolve()


@pytest.fixture(scope="module")
def report():
    return offpol_diag.analyze(HEALTHY, presets=(), device="cpu")


def wandb(folder, report):
    tracker = pytest.importorskip("wandb")
    run = tracker.init(project="test", dir=folder, mode="offline", settings=tracker.Settings(silent=True))
    report.log_to(run, step=3)
    run.finish()


def trackio(folder, report):
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        del sys.modules[name]  # its folder is read when it is imported, which trl may have done
    tracker = pytest.importorskip("trackio")
    tracker.init(project="test")
    report.log_to(tracker, step=3)
    tracker.finish()


def mlflow(folder, report):
    tracker = pytest.importorskip("mlflow")
    tracker.set_tracking_uri(folder.as_uri())
    tracker.set_experiment("test")
    with tracker.start_run():
        report.log_to(tracker, step=3)


def tensorboard(folder, report):
    tracker = pytest.importorskip("tensorboardX")
    with tracker.SummaryWriter(str(folder)) as writer:
        report.log_to(writer, step=3)


def held(folder):
    """Return which of the numbers and the figure by step the files of a folder hold."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    texts = [path.read_bytes() for path in files if path.suffix in (".json", ".html")]
    numbers = any("offpol/k" in str(path) or b"offpol/k" in path.read_bytes() for path in files)
    return numbers, any(b"token ratios" in text and b"scatter" in text for text in texts)


@pytest.mark.filterwarnings("ignore")  # the trackers' own
@pytest.mark.parametrize("tracker", [wandb, trackio, mlflow, tensorboard])
def test_the_trackers_store_the_numbers_and_the_charts_as_figures(tracker, report, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")

    tracker(tmp_path, report)

    for _ in range(600):  # a tracker's own process may write after it was told to finish
        if held(tmp_path) == (True, tracker is not tensorboard):
            return
        time.sleep(0.1)
    pytest.fail(f"numbers, figure: {held(tmp_path)}")


def test_those_who_take_no_figures_get_none_and_figures_are_chosen_by_name(report):
    class Taken:
        def __init__(self):
            self.figures = {}

        def log_metrics(self, numbers, step):
            assert all(isinstance(value, float) for value in numbers.values())

        def log_figure(self, figure, name):
            self.figures[name] = figure.layout.title.text

    class Plain:
        def log(self, numbers, step):
            self.numbers = numbers

    class Other(Taken):
        """Figures come after their names, as comet takes them."""

    Taken.__module__ = "mlflow"
    some, none, other, plain = Taken(), Taken(), Other(), Plain()
    report.log_to(some, step=3, figures="by_step")
    report.log_to(none, figures=False)
    report.log_to(other)
    report.log_to(plain)

    assert [*some.figures] == ["offpol/by_step_3.html"]
    assert "K3" in some.figures["offpol/by_step_3.html"]
    assert none.figures == other.figures == {}
    assert plain.numbers.keys() == {f"offpol/{name}" for name in report.values()}


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
    assert shown.data["text/plain"].startswith("Report(")


@pytest.mark.filterwarnings("ignore")  # jupyter's own
def test_a_notebook_shows_a_figure(tmp_path):
    code = f"import offpol_diag\noffpol_diag.doctor({str(HEALTHY)!r}, device='cpu').figure('by_step')"
    book = executed(code, tmp_path)

    data = {name: one for cell in book.cells[0].outputs for name, one in cell.get("data", {}).items()}
    assert "K3 lies between" in str(data["application/vnd.plotly.v1+json"]["layout"]["title"])

"""Dumps behind any filesystem of fsspec: the numbers of the file, patience, and an end to it."""

import io
import pickle
import sys
import time
from types import SimpleNamespace
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import offpol_diag
from offpol_diag.errors import DumpError
from offpol_diag.presets.catalogue import load
from offpol_diag.readers import open_dump, remote
from tests.far_dumps import numbers, refusal, write

pytestmark = pytest.mark.timeout(120)

SECRET = "wJalrXUtnFEMI/K7MDENG"
REGISTRY = sys.modules["fsspec.registry"]


class Named(MemoryFileSystem):
    """fsspec's memory under another scheme."""

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix(f"{cls.protocol}://"))


class Flaky(Named):
    """Memory that fails: `trouble` is asked before every range."""

    protocol = "flaky"
    cachable = False
    trouble = staticmethod(lambda: None)
    store: ClassVar[dict[str, object]] = {}

    def _open(self, path, mode="rb", **options):
        file = super()._open(path, mode, **options)

        def read(size):
            Flaky.trouble()
            return file.read(size)

        return SimpleNamespace(size=file.size, seek=file.seek, read=read) if mode == "rb" else file


class WebError(Exception):
    """As clients of the web raise it: no OSError."""

    def __init__(self, status):
        super().__init__(f"{status}, message='…', url='https://u:{SECRET}@h/x?sig={SECRET}'")
        self.status = status


@pytest.fixture
def flaky(monkeypatch, tmp_path):
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(remote, "SECONDS", 1.0)
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.store.clear()
    Flaky.trouble = staticmethod(lambda: None)
    write(tmp_path / "a.parquet", 400, 20, row_group_size=100)
    Flaky().pipe("/run/a.parquet", (tmp_path / "a.parquet").read_bytes())
    return "flaky://run/a.parquet"


def test_any_filesystem_of_fsspec_gives_the_numbers_of_the_file(flaky, tmp_path):
    presets = load().resolve("token_is")
    far, near = (
        offpol_diag.analyze([source], presets=presets).summary
        for source in (flaky, str(tmp_path / "a.parquet"))
    )
    assert numbers(far) == numbers(near)
    assert pickle.loads(pickle.dumps(open_dump([flaky]).parts)) == open_dump([flaky]).parts


@pytest.mark.parametrize("error", [OSError("reset"), ConnectionError("reset"), WebError(503), WebError(429)])
def test_a_range_that_fails_twice_is_asked_for_again(flaky, error):
    failures = iter([error, error, None] * 1000)

    def trouble():
        found = next(failures)
        if found:
            raise found

    Flaky.trouble = staticmethod(trouble)
    assert sum(batch.tokens for batch in open_dump([flaky]).batches()) == 8000


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError("reset"), "the store does not answer as it should (OSError: reset)"),
        (WebError(503), "the store does not answer as it should"),
        (ConnectionError("reset"), "the store cannot be reached (reset)"),
        (WebError(403), "access is denied"),
        (PermissionError("no"), "access is denied"),
        (FileNotFoundError("gone"), "no such bucket, file or directory"),
    ],
)
def test_a_filesystem_that_goes_on_failing_is_given_up_and_not_called_damaged(flaky, error, says):
    dump = open_dump([flaky])
    asked = []

    def trouble():
        asked.append(1)
        raise error

    Flaky.trouble = staticmethod(trouble)
    with pytest.raises(DumpError) as caught:
        list(dump.batches())
    said = f"{caught.value.message} {caught.value.hint}"
    assert caught.value.message.startswith(f"{flaky}")
    assert says in said
    assert "damaged" not in said
    assert SECRET not in said
    assert len(asked) == (1 if "access" in says or "no such" in says else remote.ATTEMPTS)


def test_a_filesystem_that_never_answers_is_given_up(flaky, monkeypatch):
    dump = open_dump([flaky])
    monkeypatch.setattr(remote, "SECONDS", 0.1)
    monkeypatch.setattr(remote, "ATTEMPTS", 2)
    Flaky.trouble = staticmethod(lambda: time.sleep(3))
    before = time.monotonic()
    with pytest.raises(DumpError, match="no answer within"):
        list(dump.batches())
    assert time.monotonic() - before < 3


def test_a_long_range_is_asked_for_in_pieces(monkeypatch):
    data, sizes = bytes(range(100)), []

    class File(io.BytesIO):
        size = len(data)

        def read(self, size=-1):
            sizes.append(size)
            return super().read(size)

    class Filesystem:
        def open(self, *_, **__):
            return File(data)

    monkeypatch.setattr(remote, "RANGE", 30)
    file = remote.RangedFile(Filesystem(), "x")
    file.seek(-90, io.SEEK_END)
    assert file.read(85) == data[10:95]
    assert sizes == [30, 30, 25]
    assert file.read() == data[95:]
    assert file.read(5) == b""


def test_a_short_answer_of_a_filesystem_is_no_end_of_the_file(monkeypatch):
    class Short:
        size = 10
        answers = iter([b"0123", b"0123456789"])

        def seek(self, at):
            assert at == 0

        def read(self, size):
            return next(self.answers)

    opened = []

    class Filesystem:
        def open(self, *_, **__):
            opened.append(Short())
            return opened[-1]

    monkeypatch.setattr(remote, "FIRST_WAIT", 0.0)
    assert remote.RangedFile(Filesystem(), "x").read() == b"0123456789"
    assert len(opened) == 2, "a stream that failed is used no more"


def test_a_server_that_sends_whole_files_only_is_refused():
    class Filesystem:
        def open(self, *_, **__):
            return SimpleNamespace(size=None)

    with pytest.raises(io.UnsupportedOperation, match="read by ranges"):
        remote.RangedFile(Filesystem(), "x")


def test_a_hub_is_read_through_its_own_filesystem(flaky, monkeypatch, tmp_path):
    """A stand-in for huggingface_hub's: `hf://` asks for it, and its paths begin with the repository."""

    class Hub(Named):
        protocol = "hf"
        store: ClassVar[dict[str, object]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

    monkeypatch.setitem(REGISTRY._registry, "hf", Hub)
    Hub().pipe("/datasets/team/run@v1/step_1.parquet", (tmp_path / "a.parquet").read_bytes())
    for source in ("step_1.parquet", "*.parquet", ""):
        dump = open_dump([f"hf://datasets/team/run@v1/{source}"])
        assert dump.info.files == ("hf://datasets/team/run@v1/step_1.parquet",)
        assert dump.rows == 400


@pytest.mark.parametrize(
    ("source", "module"),
    [("hf://datasets/a/b/x.parquet", "huggingface_hub"), ("https://h/x.parquet", "aiohttp")],
)
def test_a_package_that_is_missing_is_named_by_its_extra(source, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("fsspec.implementations.http", "huggingface_hub.hf_file_system"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(REGISTRY, "_registry", {})
    error = refusal(source)
    assert error.message == f"{source}: a package that reads this kind of URL is not installed"
    assert error.hint == 'pip install "offpol-diag[remote]"'

"""Dumps that are not on this disk: an S3 server, filesystems of fsspec, the web, and what goes wrong."""

import json
import os
import pickle
import re
import socket
import sys
import time
from typing import ClassVar

import boto3
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.cli import app
from offpol_diag.errors import DumpError, install
from offpol_diag.presets.catalogue import load
from offpol_diag.readers import open_dump, parquet, stores
from offpol_diag.readers.sources import find
from tests.factory import refusal, write
from tests.s3server import gated, moto

pytestmark = pytest.mark.timeout(120)

BUCKET = "runs"
SECRET = "wJalrXUtnFEMI/K7MDENG"
TREE = [f"d/{name}.parquet" for name in ("a", "b", ".x", "_y", "_tmp/x", "sub/c", "sub/deep/e")]
TREE += ["d/notes.txt", "d-2/a.parquet", "a[1].parquet"]
TREE += [f"step={step}/env=v%201/p.parquet" for step in (3, 10)]
PAGES = {"use_dictionary": False, "data_page_size": 1 << 14, "write_batch_size": 64}


def noise(rows, length, **more):
    """Make a table of so many sequences of one length."""
    rng = np.random.default_rng(0)

    def lists(values, kind):
        return pa.FixedSizeListArray.from_arrays(pa.array(values), len(values) // rows).cast(pa.list_(kind))

    logs = [lists(-rng.exponential(size=rows * length), pa.float64()) for _ in range(2)]
    more = {name: lists(rng.integers(0, 2**62, rows * many), pa.int64()) for name, many in more.items()}
    return pa.table({"rollout_log_probs": logs[0], "old_log_probs": logs[1]} | more)


def tokens(*sources):
    return sum(batch.tokens for batch in open_dump(sources).batches())


def summaries(*sources):
    """Return the results of some dumps, without what depends on place and time."""
    for source in sources:
        found = json.loads(
            offpol_diag.analyze([source], presets=load().resolve("token_is,seq_mis")).summary.to_json()
        )
        assert [found["dump"].pop(name) for name in ("files", "given")] == [[source], [source]]
        for name in ("seconds", "peak_rss_bytes"):
            found["run"].pop(name)
        yield found


@pytest.fixture(scope="module")
def server():
    with moto() as backend:
        yield backend


@pytest.fixture(scope="module")
def client(server):
    login = {"aws_access_key_id": "key", "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
    made = boto3.client("s3", endpoint_url="http://{}:{}".format(*server), **login)
    made.create_bucket(Bucket=BUCKET)
    yield made
    made.close()


@pytest.fixture
def gate(server, client, monkeypatch, tmp_path):
    """Start a server behind a gate, with an environment that knows both and nothing else."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with gated(server) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        yield found


@pytest.fixture
def memory():
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.rm("/", recursive=True) if filesystem.ls("/") else None


@pytest.fixture
def hasty(monkeypatch):
    """Shorten the waits between retries."""
    for name, value in {"ATTEMPTS": 2, "SECONDS": 0.4, "WAIT": 0.01}.items():
        monkeypatch.setattr(stores, name, value)
    stores._of_arrow.cache_clear()


def put(client, path, key, **options):
    client.upload_file(str(path), BUCKET, key, **options)
    return f"s3://{BUCKET}/{key}"


# --- the same as on the local disk


def test_every_number_of_a_dump_in_a_bucket_is_that_of_the_file(gate, client, tmp_path):
    path = write(tmp_path / "a.parquet", noise(64, 40), 16, PAGES)
    far, near = summaries(put(client, path, "same/a.parquet"), path)
    assert far == near


PATTERNS = ["", "d", "d/", "d/a.parquet", "d/*.parquet", "d/**", "d/**/*.parquet", "**/a.parquet", "d/s*"]
PATTERNS += ["d/*/c.parquet", "*/sub/*.parquet", "d*/?.parquet", "d/[ab].parquet", "d/[!a].parquet"]
PATTERNS += ["d/_tmp/*.parquet", "a[1].parquet", "step=*/*/*.parquet", "d/*.txt", "d/sub/**/*.parquet"]
NOTHING = ["*.parquet.gz", "none*/**", "step=3/*.parquet", "d/.x*", "d/*/none"]


@pytest.fixture(scope="module")
def tree(client, tmp_path_factory):
    root = tmp_path_factory.mktemp("tree")
    for name in TREE:
        put(client, write(root / name), f"tree/{name}")
    return root


@pytest.mark.parametrize("pattern", [*PATTERNS, *NOTHING])
def test_files_directories_and_globs_find_what_they_find_on_the_disk(gate, memory, tree, pattern):
    for name in TREE:
        memory.pipe(f"/tree/{name}", b"")
    roots = (str(tree), f"s3://{BUCKET}/tree", "memory://tree")
    if pattern in NOTHING:
        for root in roots:
            assert refusal(f"{root}/{pattern}").message == f"{root}/{pattern}: no Parquet file is there"
        return
    found = [[str(file).removeprefix(f"{root}/") for file in find([f"{root}/{pattern}"])] for root in roots]
    assert found[0] == found[1] == found[2] != []


def test_the_root_of_a_filesystem_is_a_directory(memory):
    memory.pipe("/a.parquet", b"")
    memory.pipe("/d/b.parquet", b"")
    assert [str(file) for file in find(["memory://"])] == ["memory://a.parquet", "memory://d/b.parquet"]
    assert [str(file) for file in find(["memory://*/*"])] == ["memory://d/b.parquet"]


def test_a_hint_that_cannot_be_had_hides_no_error(gate, hasty, tree):
    """A key that is not there, in a directory that may not be listed."""
    gate.plan = lambda _, path, __: 403 if "prefix=tree%2Fd%2F&" in path + "&" else None
    assert refusal(f"s3://{BUCKET}/tree/d/c.parquet").message.endswith("c.parquet: no such file or directory")


def test_hive_partitions_of_a_bucket_are_columns(gate, tree):
    (batch,) = open_dump([f"s3://{BUCKET}/tree/step=*/**/*.parquet"], group_by=["env"]).batches()
    assert batch.scalars["step"] == [10] * 4 + [3] * 4
    assert batch.scalars["env"] == ["v 1"] * 8


def test_files_here_and_there_are_one_dump_and_each_is_read_once(gate, tree):
    near, far = str(tree / "d" / "a.parquet"), f"s3://{BUCKET}/tree/d"
    dump = open_dump([near, f"{far}/b.parquet", far, near])
    names = [f"{far}/{name}.parquet" for name in ("b", "a", "sub/c", "sub/deep/e")]
    assert list(dump.info.files) == [near, *names]
    assert dump.rows == sum(batch.sequences for batch in dump.batches()) == 20


def test_an_endpoint_in_the_url_goes_before_the_environment(gate, tree, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    host = gate.url.removeprefix("http://")
    for query in (f"endpoint_override={host}&scheme=http&region=eu-west-1", f"endpoint_override={gate.url}"):
        assert open_dump([f"s3://{BUCKET}/tree/d/a.parquet?{query}"]).rows == 4


def test_one_key_on_two_servers_is_two_files(gate, tree):
    with gated(gate.backend) as other:
        url = f"s3://{BUCKET}/tree/d/a.parquet"
        assert open_dump([url, f"{url}?endpoint_override={other.url}"]).rows == 8


def test_the_files_of_a_dump_travel_to_other_processes(gate, tree, monkeypatch):
    parts = open_dump([f"s3://{BUCKET}/tree/d"]).parts
    sent = pickle.dumps(parts)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    stores._of_arrow.cache_clear()
    arrived = pickle.loads(sent)
    assert arrived == parts
    with parquet.open_again(arrived[0]) as opened:
        assert opened.metadata.num_rows == 4


# --- what is fetched


def big(client, tmp_path, key):
    """Write a dump most of which is junk."""
    return put(client, write(tmp_path / key, noise(2000, 100, junk=400), 500, PAGES), key)


def wanted(path):
    """Return the bytes of the columns that are read."""
    metadata = pq.read_metadata(path)
    return sum(
        metadata.row_group(g).column(c).total_compressed_size
        for g in range(metadata.num_row_groups)
        for c in range(metadata.num_columns)
        if metadata.row_group(g).column(c).path_in_schema.startswith(("rollout", "old"))
    )


@pytest.mark.parametrize("pieces", [False, True], ids=["row groups at once", "row groups in pieces"])
def test_only_the_columns_that_are_read_are_fetched_and_once(gate, client, tmp_path, monkeypatch, pieces):
    url = big(client, tmp_path, "big.parquet")
    monkeypatch.setattr(parquet, "FETCHED_WHOLE", 0 if pieces else parquet.FETCHED_WHOLE)
    monkeypatch.setattr(parquet, "REMOTE_BUFFER", 1 << 16)
    need, size = wanted(tmp_path / "big.parquet"), (tmp_path / "big.parquet").stat().st_size
    assert need < 0.4 * size
    dump = open_dump([url])
    opened = gate.fetched()
    assert opened <= 8 << 16
    assert sum(batch.tokens for batch in dump.batches()) == 200_000
    footers = (2 + 4 * pieces) << 16  # and the head of each row group, looked at before it is read
    assert need <= gate.fetched() - opened <= 1.05 * need + footers
    if pieces:
        assert max(size for _, _, span, size in gate.requests if span) <= 1 << 17
    else:
        assert len([r for r in gate.requests if r[2]]) <= 2 * 4 + 4


# --- what goes wrong


@pytest.mark.parametrize(
    ("source", "says", "hint"),
    [
        ("s3://runs/tree/d/note.txt", "no such file or directory", "did you mean notes.txt?"),
        ("s3://runs/none/x.parquet", "no such file or directory", "check the path"),
        ("s3://nowhere/x.parquet", "there is no bucket 'nowhere'", "AWS_ENDPOINT_URL"),
        ("s3://nowhere/*.parquet", "no such bucket, file or directory", "AWS_ENDPOINT_URL"),
        ("s3:///x.parquet", "names no bucket", "s3://bucket/path"),
        ("s3://runs/x?regoin=a", "s3:// has no option 'regoin'", "did you mean region?"),
        ("s3://runs/x?anonymous=maybe", "anonymous=maybe is neither true nor false", "anonymous=true"),
        ("nope://x/y.parquet", "there is no such kind of URL", "s3, gs"),
        ("abfss://account/x.parquet", "names no container", "container@account"),
        ("memory://none/x.parquet", "no such file or directory", "check the path"),
        ("s3://runs/tree/**.parquet", "**.parquet: not a glob", "alone between slashes"),
        ("s3://AKIAKEY:{SECRET}@runs/tree/*.none", "there are credentials in the URL", "AWS_ACCESS_KEY_ID"),
        ("https://me:{SECRET}@host/a.parquet?sig=AKIAKEY", "there are credentials in the URL", ""),
    ],
)
def test_missing_objects_are_named_without_secrets(gate, tree, source, says, hint):
    error = refusal(source.format(SECRET=SECRET))
    assert says in error.message
    assert hint in error.hint
    for part in (SECRET.partition("/")[2], "AKIAKEY"):
        assert part not in error.message + error.hint


def test_a_file_in_a_bucket_that_is_no_parquet_is_refused_as_on_the_disk(gate, client, tmp_path):
    write(tmp_path / "good.parquet")
    good = (tmp_path / "good.parquet").read_bytes()
    for name, data, says in [
        ("empty", b"", "the file is empty (0 bytes)"),
        ("text", b'{"rollout_log_probs": [-1.0]}', "not a Parquet file"),
        ("cut", good[: len(good) // 2], "the file is truncated"),
    ]:
        (tmp_path / name).write_bytes(data)
        url = put(client, tmp_path / name, f"bad/{name}")
        assert refusal(url).message.startswith(f"{url}: {says}")


def test_damage_inside_a_file_in_a_bucket_is_not_blamed_on_the_network(gate, client, tmp_path):
    rounded = list(-np.random.default_rng(0).exponential(size=(400, 20)).round(1))
    path = tmp_path / "a.parquet"
    pages = {"compression": "zstd", "use_dictionary": False}
    write(path, None, None, pages, rollout_log_probs=rounded, old_log_probs=rounded)
    data = bytearray(path.read_bytes())
    chunk = pq.read_metadata(path).row_group(0).column(1)
    middle = chunk.data_page_offset + chunk.total_compressed_size // 2
    data[middle : middle + 64] = bytes(b ^ 0xFF for b in data[middle : middle + 64])
    path.write_bytes(data)
    error = refusal(put(client, path, "damaged.parquet"))
    assert "column 'old_log_probs': the data cannot be read" in error.message


def test_missing_credentials_are_told_from_wrong_ones_and_a_public_bucket_needs_none(
    gate, client, tmp_path, monkeypatch
):
    path = write(tmp_path / "a.parquet")
    public = put(client, path, "public.parquet", ExtraArgs={"ACL": "public-read"})
    private = put(client, path, "private.parquet")
    assert open_dump([f"{public}?anonymous=true"]).rows == 4
    gate.plan = lambda *_: 403
    error = refusal(private)
    assert error.message == f"{private}: access is denied"
    assert "AWS_PROFILE" in error.hint
    gate.plan = lambda *_: None
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    stores._of_arrow.cache_clear()
    assert open_dump([public]).rows == 4
    error = refusal(private)
    assert error.message == f"{private}: access is denied, and there are no credentials"
    assert "AWS_ACCESS_KEY_ID" in error.hint
    assert "?anonymous=true" in error.hint


def test_a_server_that_fails_twice_or_answers_by_half_is_asked_again(gate, client, tmp_path):
    url = put(client, write(tmp_path / "a.parquet"), "flaky.parquet")
    failed = {}

    def twice(method, path, span):
        failed[method, path, span] = failed.get((method, path, span), 0) + 1
        return [503, "hang up", None][min(failed[method, path, span], 3) - 1]

    gate.plan = twice
    assert tokens(url) == 6
    assert min(failed.values()) >= 3
    seen = []

    def once(method, path, span):
        seen.append(span)
        return "half" if span and len([s for s in seen if s]) == 2 else None

    gate.plan = once
    assert tokens(put(client, write(tmp_path / "b.parquet", noise(400, 40)), "short.parquet")) == 400 * 40


def test_a_server_that_dies_in_the_middle_is_an_error_that_says_so(
    gate, client, tmp_path, hasty, monkeypatch
):
    monkeypatch.setattr(parquet, "FETCHED_WHOLE", 0)
    monkeypatch.setattr(parquet, "REMOTE_BUFFER", 1 << 12)
    url = put(client, write(tmp_path / "a.parquet", noise(4000, 20), 1000, PAGES), "dying.parquet")
    batches = open_dump([url], batch_tokens=20_000).batches()
    next(batches)
    gate.plan = lambda *_: "hang up"
    before = time.monotonic()
    with pytest.raises(DumpError) as caught:
        list(batches)
    assert time.monotonic() - before < 30
    says = rf"{url}, row group \d, from row \d+ on: the store cannot be reached"
    assert re.match(says, caught.value.message)
    assert "the file is damaged" not in caught.value.hint


@pytest.mark.parametrize(
    ("status", "says", "hint"),
    [
        (500, "the store does not answer as it should", "try later"),
        (503, "the store does not answer as it should", "try later"),
        (301, "region", ""),
        ("nobody listens", "the store cannot be reached", "AWS_ENDPOINT_URL"),
        ("never answers", "the store cannot be reached", "AWS_ENDPOINT_URL"),
    ],
)
def test_a_server_that_goes_on_failing_is_given_up(gate, tree, hasty, monkeypatch, status, says, hint):
    before = time.monotonic()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        ports = {"nobody listens": 1, "never answers": silent.getsockname()[1]}
        if status in ports:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{ports[status]}")
        gate.plan = lambda *_: status
        error = refusal(f"s3://{BUCKET}/tree/d/a.parquet")
    assert says in error.message
    assert hint in error.hint
    assert time.monotonic() - before < 30


# --- the web


def test_a_file_of_the_web_is_read_by_ranges_and_its_signature_is_shown_nowhere(gate, client, tmp_path):
    url = big(client, tmp_path, "web.parquet")
    client.put_object_acl(Bucket=BUCKET, Key="web.parquet", ACL="public-read")
    web = f"{gate.url}/{BUCKET}/web.parquet"
    assert open_dump([f"{web}?signature={SECRET}"]).info.files == (web,)
    assert tokens(f"{web}?signature={SECRET}") == 200_000
    need = wanted(tmp_path / "web.parquet")
    assert need <= gate.fetched() <= 1.1 * need + 16 * (1 << 16)
    assert open_dump([url]).rows == 2000


@pytest.mark.parametrize(
    ("status", "says"), [(403, "access is denied"), (404, "no such"), (503, "the store does not answer")]
)
def test_refusals_of_the_web_are_shown_without_the_signature(gate, client, tmp_path, hasty, status, says):
    gate.plan = lambda *_: status
    error = refusal(f"{gate.url}/{BUCKET}/web.parquet?signature={SECRET}")
    assert error.message.startswith(f"{gate.url}/{BUCKET}/web.parquet: ")
    assert says in error.message
    assert SECRET not in error.message + error.hint


# --- the command line


def run(*arguments):
    return CliRunner().invoke(app, arguments)


def test_a_secret_in_a_url_is_printed_nowhere(gate, client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(client, write(tmp_path / "a.parquet", noise(64, 40)), "secret/a.parquet")
    client.put_object_acl(Bucket=BUCKET, Key="secret/a.parquet", ACL="public-read")
    url = f"{gate.url}/{BUCKET}/secret/a.parquet?signature={SECRET}"
    ran = run("analyze", url, "--presets", "token_is", "--json", "r.json", "--md", "r.md")
    assert ran.exit_code == 0, ran.stderr
    wrong = run("analyze", f"s3://AKIAKEY:{SECRET}@{BUCKET}/*.parquet?region=us-east-1")
    assert wrong.exit_code == 2
    assert re.fullmatch(r"error: s3://runs/\*.parquet: [^\n]*\n\nhint: [^\n]*\n", wrong.stderr)
    texts = [p.read_text() for p in tmp_path.iterdir() if p.suffix in (".json", ".md", ".html")]
    texts += [ran.stdout, ran.stderr, wrong.stdout, wrong.stderr]
    assert len(texts) == 7
    assert [path.name for path in tmp_path.glob("*.html")] == ["offpol-diag-a.html"]
    for part in (SECRET, SECRET.partition("/")[2], "AKIAKEY"):
        assert [text for text in texts if part in text] == []


@pytest.mark.parametrize("option", ["-o", "--json", "--md", "--sequences"])
def test_no_result_is_written_to_a_url(option):
    ran = run("analyze", option, f"s3://AKIAKEY:{SECRET}@bucket/r.html")
    assert ran.exit_code == 2
    assert "on this disk" in ran.stderr
    assert SECRET not in ran.stderr


# --- fsspec

REGISTRY = sys.modules["fsspec.registry"]


class Named(MemoryFileSystem):
    """fsspec's memory file system under another scheme."""

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix(f"{cls.protocol}://"))


class Flaky(Named):
    """A memory file system that fails: `read` answers for every range, given its bytes."""

    protocol = "flaky"
    cachable = False
    read = staticmethod(lambda data: data)
    ranged = True
    store: ClassVar[dict[str, object]] = {}

    def cat_file(self, path, start=None, end=None, **options):
        return Flaky.read(super().cat_file(path, start, end, **options))

    def info(self, path, **options):
        return super().info(path, **options) | ({} if Flaky.ranged else {"size": None})


class WebError(Exception):
    """An error as HTTP clients raise it: no OSError."""

    def __init__(self, status):
        super().__init__(f"{status}, message='…', url='https://u:{SECRET}@h/x?sig={SECRET}'")
        self.status = status


@pytest.fixture
def flaky(monkeypatch, tmp_path):
    monkeypatch.setattr(stores, "WAIT", 0.01)
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.store.clear()
    for name in ("read", "ranged"):
        monkeypatch.setattr(Flaky, name, Flaky.__dict__[name])
    write(tmp_path / "a.parquet", noise(400, 20), 100, PAGES)
    Flaky().pipe("/run/a.parquet", (tmp_path / "a.parquet").read_bytes())
    return "flaky://run/a.parquet"


def test_any_filesystem_of_fsspec_gives_the_numbers_of_the_file(flaky, tmp_path):
    far, near = summaries(flaky, str(tmp_path / "a.parquet"))
    assert far == near
    assert pickle.loads(pickle.dumps(open_dump([flaky]).parts)) == open_dump([flaky]).parts


ERRORS = [OSError("reset"), ConnectionError("reset"), WebError(503), WebError(429)]


@pytest.mark.parametrize("error", [*ERRORS, "short"])
def test_a_range_that_fails_twice_or_comes_by_half_is_asked_for_again(flaky, error):
    dump, turn = open_dump([flaky]), iter(range(10_000))
    failed = []

    def failing(data):
        if next(turn) % 3 == 2:
            return data
        failed.append(len(data))
        if error == "short":
            return data[: len(data) // 2]
        raise error

    Flaky.read = staticmethod(failing)
    assert sum(batch.tokens for batch in dump.batches()) == 8000
    assert len(failed) >= 2


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

    def failing(*_):
        asked.append(1)
        raise error

    Flaky.read = staticmethod(failing)
    with pytest.raises(DumpError) as caught:
        list(dump.batches())
    said = f"{caught.value.message} {caught.value.hint}"
    assert caught.value.message.startswith(f"{flaky}")
    assert says in said
    assert "damaged" not in said
    assert SECRET not in said
    assert len(asked) == (1 if "access" in says or "no such" in says else stores.ATTEMPTS)


def test_a_server_that_sends_whole_files_only_is_refused(flaky):
    Flaky.ranged = False
    assert "Parquet is read by ranges" in refusal(flaky).message


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
    assert error.hint == install("remote")

"""Dumps that are not on this disk: an S3 server, filesystems of fsspec, the web, and what goes wrong."""

import json
import os
import re

import boto3
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.cli import app
from offpol_diag.dump.read import open_dump
from offpol_diag.dump.sources import find
from offpol_diag.presets.catalogue import load
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
        assert found["dump"].pop("files") == found["dump"].pop("given") == [source]
        for name in ("seconds", "peak_rss_bytes"):
            found["run"].pop(name)
        yield found


PATTERNS = ["", "d", "d/", "d/a.parquet", "d/*.parquet", "d/**", "d/**/*.parquet", "**/a.parquet", "d/s*"]
PATTERNS += ["d/*/c.parquet", "*/sub/*.parquet", "d*/?.parquet", "d/[ab].parquet", "d/[!a].parquet"]
PATTERNS += ["d/_tmp/*.parquet", "a[1].parquet", "step=*/*/*.parquet", "d/*.txt", "d/sub/**/*.parquet"]
NOTHING = ["*.parquet.gz", "none*/**", "step=3/*.parquet", "d/.x*", "d/*/none"]
NOTHING = ["*.parquet.gz", "none*/**", "step=3/*.parquet", "d/.x*", "d/*/none"]


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


def run(*arguments):
    return CliRunner().invoke(app, arguments)


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


def put(client, path, key, **options):
    client.upload_file(str(path), BUCKET, key, **options)
    return f"s3://{BUCKET}/{key}"


def test_every_number_of_a_dump_in_a_bucket_is_that_of_the_file(gate, client, tmp_path):
    path = write(tmp_path / "a.parquet", noise(64, 40), 16, PAGES)
    far, near = summaries(put(client, path, "same/a.parquet"), path)
    assert far == near


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
            assert (
                refusal(f"{root}/{pattern}").message == f"{root}/{pattern}: no file is there that can be read"
            )
        return
    found = [[str(file).removeprefix(f"{root}/") for file in find([f"{root}/{pattern}"])] for root in roots]
    assert found[0] == found[1] == found[2] != []


def test_hive_partitions_of_a_bucket_are_columns(gate, tree):
    (batch,) = open_dump([f"s3://{BUCKET}/tree/step=*/**/*.parquet"], group_by=["env"]).batches()
    assert batch.scalars["step"] == [3] * 4 + [10] * 4
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


def test_a_file_of_the_web_is_read_by_ranges_and_its_signature_is_shown_nowhere(gate, client, tmp_path):
    url = big(client, tmp_path, "web.parquet")
    client.put_object_acl(Bucket=BUCKET, Key="web.parquet", ACL="public-read")
    web = f"{gate.url}/{BUCKET}/web.parquet"
    assert open_dump([f"{web}?signature={SECRET}"]).info.files == (web,)
    assert tokens(f"{web}?signature={SECRET}") == 200_000
    need = wanted(tmp_path / "web.parquet")
    assert need <= gate.fetched() <= 1.1 * need + 16 * (1 << 16)
    assert open_dump([url]).rows == 2000


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


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("s3://runs/tree/d/note.txt", "cannot be read"),
        ("s3://nowhere/x.parquet", "cannot be read"),
        ("s3:///x.parquet", "names no bucket"),
        ("s3://runs/x?regoin=a", "s3:// has no option 'regoin'"),
        ("nope://x/y.parquet", "cannot be read"),
        ("memory://none/x.parquet", "cannot be read"),
        ("s3://AKIAKEY:{SECRET}@runs/tree/*.none", "there are credentials in the URL"),
    ],
)
def test_missing_objects_are_named_without_secrets(gate, tree, source, says):
    error = refusal(source.format(SECRET=SECRET))
    assert says in error.message
    assert error.hint
    for part in (SECRET.partition("/")[2], "AKIAKEY"):
        assert part not in error.message + error.hint


def test_any_filesystem_of_fsspec_gives_the_numbers_of_the_file(memory, tmp_path):
    path = write(tmp_path / "a.parquet", noise(8, 9), 3)
    memory.pipe("/runs/a.parquet", (tmp_path / "a.parquet").read_bytes())
    assert tokens("memory://runs/a.parquet") == tokens("memory://runs/*.parquet") == tokens(path)

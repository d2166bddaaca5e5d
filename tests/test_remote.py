"""Dumps that are not on this disk: an S3 server, filesystems of fsspec, the web, and what goes wrong."""

from __future__ import annotations

import json
import logging
import os
import re
from typing import Any

import boto3
import fsspec
import numpy as np
import pyarrow as pa
import pytest
from moto.server import ThreadedMotoServer
from typer.testing import CliRunner

from offpol_diag.cli import app, default_html
from offpol_diag.dump import sources
from offpol_diag.dump.read import open_dump
from offpol_diag.dump.sources import find
from offpol_diag.printable import clean
from tests.factory import plain, read, refusal, write

pytestmark = pytest.mark.timeout(120)

BUCKET = "runs"
SECRET = "wJalrXUtnFEMI/K7MDENG"
TREE = [f"d/{name}.parquet" for name in ("a", "b", ".x", "_y", "_tmp/x", "sub/c", "sub/deep/e")]
TREE += ["d/notes.txt", "d-2/a.parquet", "a[1].parquet"]
TREE += [f"step={step}/env=v%201/p.parquet" for step in (3, 10)]
PATTERNS = ["", "d", "d/", "d/a.parquet", "d/*.parquet", "d/**", "d/**/*.parquet", "**/a.parquet", "d/s*"]
PATTERNS += ["d/*/c.parquet", "d*/?.parquet", "d/[!a].parquet", "d/_tmp/*.parquet", "a[1].parquet"]
PATTERNS += ["step=*/*/*.parquet", "d/*.txt"]
NOTHING = ["*.parquet.gz", "none*/**", "d/.x*"]


@pytest.fixture(scope="module")
def client():
    """Start an S3 server, and make a bucket there."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    login = {"aws_access_key_id": "key", "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
    made = boto3.client("s3", endpoint_url="http://{}:{}".format(*server.get_host_and_port()), **login)
    made.create_bucket(Bucket=BUCKET)
    yield made
    made.close()
    server.stop()


@pytest.fixture
def s3(client, monkeypatch, tmp_path):
    """An environment that knows the server and nothing else; its address."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    own = {"HOME": str(tmp_path / "home"), "AWS_EC2_METADATA_DISABLED": "true", "AWS_ACCESS_KEY_ID": "key"}
    own |= {"AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": client.meta.endpoint_url}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    return client.meta.endpoint_url


@pytest.fixture
def memory():
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.rm("/", recursive=True) if filesystem.ls("/") else None


@pytest.fixture(scope="module")
def tree(client, tmp_path_factory):
    root = tmp_path_factory.mktemp("tree")
    for name in TREE:
        put(client, write(root / name), f"tree/{name}")
    return root


def put(client: Any, path: str, key: str, public: bool = False) -> str:
    client.upload_file(path, BUCKET, key)
    if public:
        client.put_object_acl(Bucket=BUCKET, Key=key, ACL="public-read")
    return f"s3://{BUCKET}/{key}"


def noise(path) -> str:
    """Write a dump of several row groups and pages."""
    logs = -np.random.default_rng(0).exponential(size=(64, 40)).round(1)
    table = pa.table({"rollout_log_probs": list(logs), "old_log_probs": list(logs * 2)})
    return write(path, table, 16, {"use_dictionary": False, "data_page_size": 1 << 10})


def test_a_dump_of_any_store_is_that_of_the_file(s3, client, memory, tmp_path):
    path = noise(tmp_path / "a.parquet")
    far = put(client, path, "same/a.parquet", public=True)
    memory.pipe("/runs/a.parquet", (tmp_path / "a.parquet").read_bytes())
    web, host = f"{s3}/{BUCKET}/same/a.parquet", s3.removeprefix("http://")
    ways = [far, f"{far}?endpoint_override={host}&scheme=http&region=eu-west-1", f"{far}?anonymous=true"]
    ways += ["memory://runs/*.parquet", f"file://{path}", f"{web}?signature={SECRET}"]
    for source in ways:
        assert plain(read(source)) == plain(read(path)), source
    assert open_dump([ways[-1]]).info.files == (web,)


@pytest.mark.parametrize("pattern", [*PATTERNS, *NOTHING])
def test_files_directories_and_globs_find_what_they_find_on_the_disk(s3, memory, tree, pattern):
    for name in TREE:
        memory.pipe(f"/tree/{name}", b"")
    roots = (str(tree), f"s3://{BUCKET}/tree", "memory://tree")
    if pattern in NOTHING:
        for root in roots:
            said = f"{root}/{pattern}: no file is there that can be read"
            assert refusal(f"{root}/{pattern}").message == said
        return
    found = [[str(file).removeprefix(f"{root}/") for file in find([f"{root}/{pattern}"])] for root in roots]
    assert found[0] == found[1] == found[2] != []


def test_partitions_of_a_bucket_are_columns_and_each_file_is_read_once(s3, tree):
    (batch,) = open_dump([f"s3://{BUCKET}/tree/step=*/**/*.parquet"], group_by=["env"]).batches()
    assert (batch.scalars["step"], batch.scalars["env"]) == ([3] * 4 + [10] * 4, ["v 1"] * 8)
    near, far = str(tree / "d" / "a.parquet"), f"s3://{BUCKET}/tree/d"
    dump = open_dump([near, f"{far}/b.parquet", far, near])
    names = [f"{far}/{name}.parquet" for name in ("b", "a", "sub/c", "sub/deep/e")]
    assert list(dump.info.files) == [near, *names]
    assert dump.rows == sum(batch.sequences for batch in dump.batches()) == 20


def test_a_damaged_file_in_a_bucket_is_refused_as_on_the_disk(s3, client, tmp_path):
    good = (tmp_path / "good").read_bytes() if noise(tmp_path / "good") else b""
    page = bytes(b ^ 0xFF for b in good[3000:3064])
    for name, data, says in [
        ("empty", b"", ": cannot be read as Parquet (Parquet file size is 0 bytes"),
        ("torn", good[:3000] + page + good[3064:], ", row group 0, from row 0 on: the data cannot be read"),
    ]:
        (tmp_path / name).write_bytes(data)
        url = put(client, str(tmp_path / name), f"bad/{name}")
        assert refusal(url).message.startswith(f"{url}{says}")


def test_a_secret_in_a_url_is_printed_nowhere(s3, client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(client, noise(tmp_path / "a.parquet"), "secret/a.parquet", public=True)
    url = f"{s3}/{BUCKET}/secret/a.parquet?signature={SECRET}"
    ran = CliRunner().invoke(
        app, ["analyze", url, "--presets", "token_is", "--json", "r.json", "--md", "r.md"]
    )
    assert ran.exit_code == 0, ran.stderr
    wrong = CliRunner().invoke(app, ["analyze", f"s3://AKIAKEY:{SECRET}@{BUCKET}/*.parquet?region=us-east-1"])
    assert wrong.exit_code == 2
    assert re.fullmatch(r"error: s3://runs/\*.parquet: [^\n]*\n\nhint: [^\n]*\n", wrong.stderr)
    texts = [p.read_text() for p in tmp_path.iterdir() if p.suffix in (".json", ".md", ".html")]
    texts += [ran.stdout, ran.stderr, wrong.stdout, wrong.stderr]
    assert len(texts) == 7
    assert json.loads((tmp_path / "r.json").read_text())["dump"]["files"] == [url.partition("?")[0]]
    for part in (SECRET, SECRET.partition("/")[2], "AKIAKEY"):
        assert [text for text in texts if part in text] == []


MISSING = {
    "s3://runs/tree/d/note.txt": "cannot be read",
    "s3://nowhere/x.parquet": "cannot be read",
    "s3:///x.parquet": "cannot be read",
    "s3://runs/x?regoin=a": "s3:// has no option 'regoin'",
    "nope://x/y.parquet": "cannot be read",
    "memory://none/x.parquet": "cannot be read",
    f"s3://AKIAKEY:{SECRET}@runs/tree/*.none": "there are credentials in the URL",
}


@pytest.mark.parametrize("source", MISSING)
def test_missing_objects_are_named_without_secrets(s3, tree, source):
    error = refusal(source)
    assert MISSING[source] in error.message
    for part in (SECRET.partition("/")[2], "AKIAKEY"):
        assert part not in error.message + error.hint


def test_the_options_of_a_url_reach_the_filesystem(monkeypatch):
    made: dict[str, object] = {}
    monkeypatch.setattr("pyarrow.fs.S3FileSystem", lambda **options: made.update(options))
    monkeypatch.setattr("pyarrow.fs.resolve_s3_region", lambda bucket: f"region of {bucket}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://here:9000")
    here = {"endpoint_override": "here:9000", "scheme": "http", "anonymous": False}
    there = {"endpoint_override": "there", "scheme": "https", "anonymous": True}
    for source, wanted in {
        "s3://b/x?role_arn=r&region=eu": {"role_arn": "r", "region": "eu", **here},
        "s3://b/x?anonymous=true&endpoint_override=https://there": there,
    }.items():
        assert sources.located(source)[1] == "b/x"
        assert {name: made[name] for name in wanted} == wanted
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    sources.located("s3://b/x")
    assert made["region"] == "region of b"
    store, path = sources.located("gs://anonymous@b/x")
    assert (store.type_name, path) == ("gcs", "b/x")


SHOWN = {
    "s3://K:S/T+u@bucket/a?region=x": "s3://bucket/a",
    "s3://bucket/a:b@c/x": "s3://bucket/a:b@c/x",
    "s3://bucket/step_?.parquet": "s3://bucket/step_?.parquet",
    "gs://anonymous@bucket/a": "gs://bucket/a",
    "hdfs://me@host:8020/a@b": "hdfs://host:8020/a@b",
    "https://me:pw@h:81/a?X-Amz-Signature=s": "https://h:81/a",
    "hf://datasets/u/r@v1/a": "hf://datasets/u/r@v1/a",
    "abfss://box@acct.dfs/a": "abfss://box@acct.dfs/a",
    "abfss://box:key@acct.dfs/a": "abfss://acct.dfs/a",
    "simplecache::https://h/a?s=1": "simplecache::https://h/a",
    **{text: text for text in ("a.parquet", "/tmp/x:y@z?a=b", "C://x", "-", "", "a::b", "d/s3://x")},
}


def test_a_source_is_shown_without_what_is_secret_and_a_report_named_after_its_last_part():
    assert {source: clean(source) for source in SHOWN} == SHOWN
    assert str(default_html(["s3://K:S/T@bucket/run/step_*.parquet?region=x"])) == "offpol-diag-step.html"
    assert str(default_html(["https://h/a.parquet?token=b/c.html"])) == "offpol-diag-a.html"

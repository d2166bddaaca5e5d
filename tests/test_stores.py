"""Dumps that are not on this disk: an S3 server, filesystems of fsspec, the web, and what goes wrong."""

import json
import logging
import os

import boto3
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from moto.server import ThreadedMotoServer
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.dump import sources
from offpol_diag.printable import clean
from tests.factory import plain, read, refusal, write
from tests.reading import opened
from tests.test_read import FOUND, TREE, parquet, sequences

pytestmark = pytest.mark.timeout(120)

BUCKET, SECRET = "runs", "wJalrXUtnFEMI/K7MDENG"
PARTS = (SECRET, SECRET.partition("/")[2], "AKIAKEY")
"""What may be printed nowhere."""


class Hub(MemoryFileSystem):
    """Stands for the filesystem of hf://."""

    protocol = "hf"

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.removeprefix("hf:"))


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
    """Know the server and nothing else; its address."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    own = {"HOME": str(tmp_path / "home"), "AWS_EC2_METADATA_DISABLED": "true", "AWS_ACCESS_KEY_ID": "key"}
    own |= {"AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": client.meta.endpoint_url}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    return client.meta.endpoint_url


def put(client, path, key):
    client.upload_file(str(path), BUCKET, key)
    client.put_object_acl(Bucket=BUCKET, Key=key, ACL="public-read")
    return f"s3://{BUCKET}/{key}"


def test_a_dump_of_any_store_is_that_of_the_file(s3, client, tmp_path):
    path = parquet(4)(tmp_path, sequences())
    far, data = put(client, path, "same/a.parquet"), (tmp_path / "a.parquet").read_bytes()
    fsspec.register_implementation("hf", Hub, clobber=True)
    fsspec.filesystem("memory").pipe("/runs/a.parquet", data)  # both have one store
    web, host = f"{s3}/{BUCKET}/same/a.parquet", s3.removeprefix("http://")
    ways = [far, f"{far}?endpoint_override={host}&scheme=http&region=eu-west-1", f"{far}?anonymous=true"]
    ways += ["memory://runs/*.parquet", "hf://runs", f"file://{path}", f"{web}?signature={SECRET}"]
    for source in ways:
        assert plain(read(source)) == plain(read(path)), source
    assert opened(ways[-1]).files == (web,)
    (tmp_path / "torn").write_bytes(data[:3000] + bytes(64) + data[3064:])
    url = put(client, tmp_path / "torn", "torn.parquet")
    assert refusal(url).message.startswith(f"{url}, row group ")


def test_folders_and_globs_stand_for_the_files_that_they_stand_for_on_a_disk(s3, client, tmp_path):
    path = write(tmp_path / "a.parquet")
    for name in TREE:
        put(client, path, f"tree/{name}")
        fsspec.filesystem("memory").pipe(f"/tree/{name}", (tmp_path / "a.parquet").read_bytes())
    for root in (f"s3://{BUCKET}/tree/", "memory://tree/"):
        for pattern, files in FOUND.items():
            assert [*opened(root + pattern).files] == [root + name for name in files]
        batch = read(f"{root}e", group_by=["env"])
        assert (batch.scalars["step"], batch.scalars["env"]) == ([3] * 4 + [10] * 4, ["v 1"] * 8)
    far = f"s3://{BUCKET}/tree/d"
    files = opened([path, f"{far}/b.parquet", far, path]).files
    assert files[:3] == (path, f"{far}/b.parquet", f"{far}/a[1].parquet"), "each is read once"


REFUSED = {
    "s3://runs/none.parquet": "cannot be read",
    "s3://nowhere/x.parquet": "cannot be read",
    "s3:///x.parquet": "cannot be read",
    "s3://runs/x?regoin=a": "cannot be read (__init__() got an unexpected keyword argument 'regoin')",
    "nope://x/y.parquet": "cannot be read",
    "memory://none/x.parquet": "cannot be read",
    f"s3://AKIAKEY:{SECRET}@runs/*.parquet?region=us-east-1": "there are credentials in the URL",
}


def test_what_is_not_there_is_named_without_secrets(s3):
    for source, says in REFUSED.items():
        ran = CliRunner().invoke(app, ["doctor", source])
        assert ran.exit_code == 2
        error, hint = ran.stderr.split("\n\n")
        assert error.startswith(f"error: {clean(source)}: ")
        assert (says in error, hint[:6]) == (True, "hint: ")
        assert [part for part in PARTS if part in ran.stderr] == []


def test_a_secret_in_a_url_is_printed_nowhere(s3, client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(client, parquet()(tmp_path, sequences()), "secret/a.parquet")
    url = f"{s3}/{BUCKET}/secret/a.parquet"
    line = ["analyze", f"{url}?signature={SECRET}", "--presets", "none", "--json", "r.json", "--md", "r.md"]
    ran = CliRunner().invoke(app, line)
    assert ran.exit_code == 0, ran.stderr
    texts = [p.read_text() for p in tmp_path.iterdir() if p.suffix in (".json", ".md", ".html")]
    assert json.loads((tmp_path / "r.json").read_text())["dump"]["files"] == [url]
    assert len(texts) == 3
    assert not [part for part in PARTS for text in (*texts, ran.stdout, ran.stderr) if part in text]


def test_the_options_of_a_url_reach_the_filesystem(monkeypatch):
    made = {}
    monkeypatch.setattr("pyarrow.fs.S3FileSystem", lambda **options: made.update(options))
    monkeypatch.setattr("pyarrow.fs.resolve_s3_region", lambda bucket: f"region of {bucket}")
    here = {"endpoint_override": "http://here:9000", "anonymous": False}
    there = {"endpoint_override": "https://there", "anonymous": True}
    for source, server, wanted in (
        ("s3://b/x?role_arn=r&region=eu", "http://here:9000", {"role_arn": "r", "region": "eu", **here}),
        ("s3://b/x?anonymous=true&endpoint_override=https://there", "http://here:9000", there),
        ("s3://b/x", "", {"region": "region of b"}),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", server)
        assert sources.located(source)[1] == "b/x"
        assert {name: made[name] for name in wanted} == wanted
    store, path = sources.located("gs://anonymous@b/x")
    assert (store.type_name, path) == ("gcs", "b/x")

"""URLs: taken apart, shown without what is secret, and led to the store they are in."""

from pathlib import Path

import pytest

from offpol_diag.cli.output import default_html
from offpol_diag.readers import stores, urls


@pytest.mark.parametrize(
    ("source", "shown", "place", "user", "secret"),
    [
        ("s3://bucket/a.parquet", "s3://bucket/a.parquet", "bucket/a.parquet", "", ""),
        ("s3://K:S@bucket/a", "s3://bucket/a", "bucket/a", "K", "S"),
        ("s3://K:S/T+u@bucket/a?region=x", "s3://bucket/a", "bucket/a", "K", "S/T+u"),
        ("s3://bucket/a:b@c/x", "s3://bucket/a:b@c/x", "bucket/a:b@c/x", "", ""),
        ("s3://bucket/step_?.parquet", "s3://bucket/step_?.parquet", "bucket/step_?.parquet", "", ""),
        ("s3://bucket/s%20p/x", "s3://bucket/s%20p/x", "bucket/s%20p/x", "", ""),
        ("gs://anonymous@bucket/a", "gs://bucket/a", "bucket/a", "anonymous", ""),
        ("hdfs://me@host:8020/a@b", "hdfs://host:8020/a@b", "host:8020/a@b", "me", ""),
        ("hdfs://host:8020/a@b", "hdfs://host:8020/a@b", "host:8020/a@b", "", ""),
        ("https://me:pw@h:81/a?X-Amz-Signature=s", "https://h:81/a", "h:81/a", "me", "pw"),
        ("https://h/a?secret", "https://h/a", "h/a", "", ""),
        ("hf://datasets/u/r@v1/a", "hf://datasets/u/r@v1/a", "datasets/u/r@v1/a", "", ""),
        ("abfss://box@acct.dfs/a", "abfss://box@acct.dfs/a", "acct.dfs/a", "box", ""),
        ("abfss://box:key@acct.dfs/a", "abfss://acct.dfs/a", "acct.dfs/a", "box", "key"),
        ("simplecache::https://h/a?s=1", "simplecache::https://h/a", "h/a", "", ""),
        ("S3://bucket/a", "s3://bucket/a", "bucket/a", "", ""),
    ],
)
def test_a_url_is_taken_apart_and_shown_without_what_is_secret(source, shown, place, user, secret):
    url = urls.split(source)
    assert (url.shown, url.place, url.user, url.secret.removeprefix(":")) == (shown, place, user, secret)
    assert urls.clean(source) == shown
    assert urls.cleaned(f"cannot read '{source}' now") == f"cannot read '{shown}' now"


@pytest.mark.parametrize("source", ["a.parquet", "/tmp/x:y@z?a=b", "C://x", "-", "", "a::b", "d/s3://x"])
def test_other_texts_than_urls_are_unchanged(source):
    assert not urls.is_url(source)
    assert urls.clean(source) == source


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("s3://K:S/T@bucket/run/step_*.parquet?region=x", "offpol-diag-step.html"),
        ("s3://bucket/run/step_100.parquet", "offpol-diag-step_100.html"),
        ("gs://bucket/run/", "offpol-diag-run.html"),
        ("s3://bucket", "offpol-diag-bucket.html"),
        ("https://h/a.parquet?token=b/c.html", "offpol-diag-a.html"),
        ("-", "offpol-diag-stdin.html"),
    ],
)
def test_a_report_is_named_after_the_last_part_of_a_url(source, name):
    assert str(default_html([source])) == name


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("abfss://box@acct.dfs.core.windows.net/run/a.parquet", "box/run/a.parquet"),
        ("gs://bucket/run/a.parquet", "bucket/run/a.parquet"),
    ],
)
def test_the_place_of_a_url_in_its_filesystem(source, path):
    assert stores.locate(source)[1:] == (path, source)


def test_the_options_of_a_url_reach_the_filesystem(monkeypatch):
    monkeypatch.setenv("AWS_CA_BUNDLE", "")
    made = {}
    monkeypatch.setattr("pyarrow.fs.S3FileSystem", lambda **options: made.update(options))
    monkeypatch.setattr("pyarrow.fs.resolve_s3_region", lambda bucket: f"region of {bucket}")
    stores._of_arrow.cache_clear()
    stores.locate("s3://b/x?role_arn=r&force_virtual_addressing=true")
    wanted = {"role_arn": "r", "region": "region of b", "force_virtual_addressing": True}
    assert {name: made[name] for name in wanted} == wanted
    assert made.keys().isdisjoint({"endpoint_override", "anonymous", "access_key"})
    made.clear()
    stores.locate("s3://b/x?region=eu&anonymous=true")
    assert (made["region"], made["anonymous"]) == ("eu", True)
    stores._of_arrow.cache_clear()


def test_the_environment_gives_the_region_where_it_cannot_be_found(monkeypatch):
    def lost(_):
        raise OSError("AWS Error NETWORK_CONNECTION")

    monkeypatch.setattr("pyarrow.fs.resolve_s3_region", lost)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-north-1")
    assert stores._region("b", elsewhere=False) == "eu-north-1"
    assert stores._region("b", elsewhere=True) == "eu-north-1"
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.delenv("AWS_REGION", raising=False)
    assert stores._region("b", elsewhere=True) == "us-east-1"
    with pytest.raises(OSError, match="NETWORK_CONNECTION"):
        stores._region("b", elsewhere=False)


def test_every_scheme_and_option_is_in_the_docs():
    page = (Path(__file__).parents[1] / "docs" / "remote.md").read_text(encoding="utf-8")
    for name, options in stores.OPTIONS.items():
        assert f"`{name}://" in page or name == "abfs"
        assert [word for word in options if f"`{word}=" not in page and f" `{word}=" not in page] == []

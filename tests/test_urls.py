"""URLs: shown without what is secret, and led to the store they are in."""

import pytest

from offpol_diag.cli.output import default_html
from offpol_diag.dump import sources
from offpol_diag.printable import clean


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("s3://bucket/a.parquet", "s3://bucket/a.parquet"),
        ("s3://K:S/T+u@bucket/a?region=x", "s3://bucket/a"),
        ("s3://bucket/a:b@c/x", "s3://bucket/a:b@c/x"),
        ("s3://bucket/step_?.parquet", "s3://bucket/step_?.parquet"),
        ("gs://anonymous@bucket/a", "gs://bucket/a"),
        ("hdfs://me@host:8020/a@b", "hdfs://host:8020/a@b"),
        ("hdfs://host:8020/a@b", "hdfs://host:8020/a@b"),
        ("https://me:pw@h:81/a?X-Amz-Signature=s", "https://h:81/a"),
        ("hf://datasets/u/r@v1/a", "hf://datasets/u/r@v1/a"),
        ("abfss://box@acct.dfs/a", "abfss://box@acct.dfs/a"),
        ("abfss://box:key@acct.dfs/a", "abfss://acct.dfs/a"),
        ("simplecache::https://h/a?s=1", "simplecache::https://h/a"),
        *((text, text) for text in ("a.parquet", "/tmp/x:y@z?a=b", "C://x", "-", "", "a::b", "d/s3://x")),
    ],
)
def test_a_source_is_shown_without_what_is_secret(source: str, shown: str) -> None:
    assert clean(source) == shown


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("s3://K:S/T@bucket/run/step_*.parquet?region=x", "offpol-diag-step.html"),
        ("gs://bucket/run/", "offpol-diag-run.html"),
        ("https://h/a.parquet?token=b/c.html", "offpol-diag-a.html"),
    ],
)
def test_a_report_is_named_after_the_last_part_of_a_url(source: str, name: str) -> None:
    assert str(default_html([source])) == name


def test_the_options_of_a_url_reach_the_filesystem(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, object] = {}
    monkeypatch.setattr("pyarrow.fs.S3FileSystem", lambda **options: made.update(options))
    monkeypatch.setattr("pyarrow.fs.resolve_s3_region", lambda bucket: f"region of {bucket}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://here:9000")
    for source, wanted in {
        "s3://b/x?role_arn=r&region=eu": {"role_arn": "r", "region": "eu", "endpoint_override": "here:9000"},
        "s3://b/x?anonymous=true&endpoint_override=https://there": {
            "anonymous": True,
            "endpoint_override": "there",
        },
    }.items():
        made.clear()
        assert sources.located(source)[1] == "b/x"
        assert {name: made[name] for name in wanted} == wanted
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    sources.located("s3://b/x")
    assert made["region"] == "region of b"

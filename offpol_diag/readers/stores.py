"""A URL → the store it is in. A scheme that Arrow has a filesystem of its own for is a row of `SCHEMES`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pyarrow import fs

from offpol_diag.errors import DumpError, did_you_mean
from offpol_diag.readers.locations import Location, Store
from offpol_diag.readers.urls import Url, split

Options = tuple[tuple[str, str], ...]

ATTEMPTS = 5
"""How often a request is sent before it is given up; the waits between double."""
CONNECT_SECONDS, SILENT_SECONDS = 5.0, 15.0
"""How long an S3 server may take to be reached, and how long it may say nothing."""
RETRY_SECONDS = 20.0
"""How long a request to Google Cloud Storage is sent again."""
YES, NO = frozenset({"true", "1", "yes"}), frozenset({"false", "0", "no", ""})


@dataclass(frozen=True)
class Scheme:
    """How URLs of one scheme are read.

    Attributes:
        opens: options → the filesystem.
        options: the words that may stand after `?`.
        path: where a URL's file is in the filesystem.
        endpoint: environment variables that name the server where the URL does not.
    """

    opens: Callable[[Options], fs.FileSystem]
    options: tuple[str, ...]
    path: Callable[[Url], str]
    endpoint: tuple[str, ...] = ()


def locate(source: str) -> Location:
    """The place that a URL names.

    Raises:
        DumpError: an option that the scheme does not have, or a URL that names no place.
        Exception: what the library raises that opens the store.
    """
    url = split(source)
    scheme = SCHEMES.get(url.scheme)
    return _through_fsspec(source, url) if scheme is None else _native(scheme, url)


def _native(scheme: Scheme, url: Url) -> Location:
    options = dict(url.options)
    for word in options:
        if word not in scheme.options:
            known = f"after ? there may be {', '.join(scheme.options) or 'nothing'}"
            raise DumpError(
                f"{url.shown}: {url.scheme}:// has no option {word!r}",
                did_you_mean(word, list(scheme.options)) or known,
            )
    endpoint = next(filter(None, map(os.environ.get, scheme.endpoint)), None)
    if endpoint:  # settled here, so that other processes read from the same server
        options.setdefault("endpoint_override", endpoint)
    options |= {"user": url.user, "secret": url.secret, "place": url.bucket, "scheme_": url.scheme}
    store = Store(url.scheme, scheme.opens, tuple(sorted(options.items())))
    return Location(store, scheme.path(url), url.shown.rstrip("/"))


def _flag(options: dict[str, str], word: str) -> bool:
    said = options.get(word, "").lower()
    if said not in YES | NO:
        raise DumpError(f"{word}={said} is neither true nor false", f"write {word}=true, or leave it out")
    return said in YES


# ---------------------------------------------------------------- the schemes


def _s3(options: Options) -> fs.FileSystem:
    said = dict(options)
    endpoint = _endpoint(said)
    anonymous = _flag(said, "anonymous")
    login = {"access_key": said["user"], "secret_key": said["secret"]} if said["secret"] else {}
    return fs.S3FileSystem(
        **(login if not anonymous else {}),
        anonymous=anonymous,
        region=said.get("region") or _region(said["place"], bool(endpoint)),
        role_arn=said.get("role_arn"),
        force_virtual_addressing=_flag(said, "force_virtual_addressing"),
        tls_ca_file_path=os.environ.get("AWS_CA_BUNDLE"),
        connect_timeout=CONNECT_SECONDS,
        request_timeout=SILENT_SECONDS,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        **endpoint,
    )


def _endpoint(said: dict[str, str]) -> dict[str, str]:
    """The server that stands in for the provider's own: `host:port`, or a URL."""
    before, sign, after = said.get("endpoint_override", "").partition("://")
    found = {
        "endpoint_override": (after if sign else before).rstrip("/"),
        "scheme": said.get("scheme") or (before if sign else ""),
    }
    return {key: value for key, value in found.items() if value}


def _region(bucket: str, elsewhere: bool) -> str:
    """The region of a bucket: the provider is asked; where it cannot say, the environment's."""
    stated = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if elsewhere:
        return stated or "us-east-1"
    try:
        return str(fs.resolve_s3_region(bucket))
    except OSError:
        if stated:
            return stated
        raise


def _gcs(options: Options) -> fs.FileSystem:
    said = dict(options)
    return fs.GcsFileSystem(
        anonymous=_flag(said, "anonymous") or said["user"] == "anonymous",
        project_id=said.get("project_id"),
        retry_time_limit=timedelta(seconds=RETRY_SECONDS),
        **_endpoint(said),
    )


def _by_uri(options: Options) -> fs.FileSystem:
    """What Arrow opens by its URI alone."""
    said = dict(options)
    login = f"{said['user']}:{said['secret']}@" if said["secret"] else f"{said['user']}@" * bool(said["user"])
    found, _ = fs.FileSystem.from_uri(f"{said['scheme_']}://{login}{said['place']}/")
    return found


def _in_bucket(url: Url) -> str:
    if not url.bucket:
        raise DumpError(f"{url.shown}: names no bucket", f"write {url.scheme}://bucket/path")
    return url.place.rstrip("/")


def _below_host(url: Url) -> str:
    return "/" + url.place.partition("/")[2].strip("/")


def _below_container(url: Url) -> str:
    if not url.user:
        raise DumpError(
            f"{url.shown}: names no container",
            f"write {url.scheme}://container@account.dfs.core.windows.net/path",
        )
    return f"{url.user}{_below_host(url)}".rstrip("/")


S3 = Scheme(
    _s3,
    ("region", "endpoint_override", "scheme", "anonymous", "role_arn", "force_virtual_addressing"),
    _in_bucket,
    ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
)
GCS = Scheme(_gcs, ("anonymous", "endpoint_override", "scheme", "project_id"), _in_bucket)
SCHEMES = {
    "s3": S3,
    "s3a": S3,
    "gs": GCS,
    "gcs": GCS,
    "abfs": Scheme(_by_uri, (), _below_container),
    "abfss": Scheme(_by_uri, (), _below_container),
    "hdfs": Scheme(_by_uri, (), _below_host),
    "viewfs": Scheme(_by_uri, (), _below_host),
}


# ---------------------------------------------------------------- fsspec


def _through_fsspec(source: str, url: Url) -> Location:
    """Any scheme that fsspec knows; its filesystem is what the store is known by."""
    from fsspec.core import url_to_fs

    found, path = url_to_fs(source)
    shown = url.shown.rstrip("/") if url.place.strip("/") else url.shown
    return Location(Store(url.scheme, _adapted, found), path, shown)


def _adapted(found: Any) -> fs.FileSystem:
    from offpol_diag.readers.ranges import Ranged

    return fs.PyFileSystem(Ranged(found))

"""Open the stores that URLs lead to, and explain their failures.

What Arrow has a filesystem for (`OPTIONS`) it reads by itself, with its own retries; every other URL goes
through fsspec, whose requests are tried `ATTEMPTS` times. `CAUSES` says what is made of errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from pyarrow import fs

from offpol_diag.errors import DumpError, OffpolError, did_you_mean, install
from offpol_diag.readers.urls import ABFS, WEB, cleaned, split

if TYPE_CHECKING:
    from offpol_diag.readers.sources import Location

T = TypeVar("T")
ATTEMPTS = 3
"""Attempts per request."""
WAIT = 0.5
"""Seconds before the second attempt through fsspec, doubled before the third."""
SECONDS = 15.0
"""Time that an S3 server may be silent; Google's library tries for so long, too."""


OPTIONS = {
    **dict.fromkeys(("s3", "s3a"), ("region", "endpoint_override", "scheme", "anonymous", "role_arn")),
    **dict.fromkeys(("gs", "gcs"), ("anonymous", "endpoint_override", "scheme", "project_id")),
    **dict.fromkeys((*ABFS, "hdfs", "viewfs"), ()),
}
"""Scheme that Arrow opens → the options that its URLs may have."""
OPTIONS["s3"] = OPTIONS["s3a"] = (*OPTIONS["s3"], "force_virtual_addressing")
FLAGS = {"": False} | dict.fromkeys(("true", "1", "yes"), True) | dict.fromkeys(("false", "0", "no"), False)


def locate(source: str) -> tuple[fs.FileSystem, str, str]:
    """Return the filesystem of a URL, the path in it, and how it is shown."""
    url = split(source)
    if url.secret:
        what = f"{url.shown}: there are credentials in the URL, where everyone on the machine sees them"
        raise DumpError(what, LOGINS.get(url.scheme, LOGIN_OF_OTHERS))
    if url.scheme not in OPTIONS:
        from fsspec.core import url_to_fs

        found, path = url_to_fs(source)
        shown = url.shown.rstrip("/") if url.place.strip("/") else url.shown
        return _of_fsspec(found), path, shown
    words = OPTIONS[url.scheme]
    if odd := [word for word in url.options if word not in words]:
        hint = did_you_mean(odd[0], list(words)) or f"after ? there may be {', '.join(words) or 'nothing'}"
        raise DumpError(f"{url.shown}: {url.scheme}:// has no option {odd[0]!r}", hint)
    host, _, path = url.place.partition("/")
    if url.scheme in ABFS and not url.user:
        hint = f"write {url.scheme}://container@account.dfs.core.windows.net/path"
        raise DumpError(f"{url.shown}: names no container", hint)
    if words and not host:
        raise DumpError(f"{url.shown}: names no bucket", f"write {url.scheme}://bucket/path")
    path = f"{url.user if url.scheme in ABFS else host * bool(words)}/{path}".rstrip("/")
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    store = _of_arrow(url.scheme, url.user, host, named, tuple(sorted(url.options.items())))
    return store, path or "/", url.shown.rstrip("/")


@lru_cache(maxsize=256)
def _of_arrow(
    scheme: str, user: str, host: str, named: str, options: tuple[tuple[str, str], ...]
) -> fs.FileSystem:
    """Open a filesystem of Arrow; `named` is the S3 server that the environment names."""
    given: dict[str, Any] = {"endpoint_override": named if scheme in ("s3", "s3a") else "", **dict(options)}
    for word in ("anonymous", "force_virtual_addressing"):
        if given.get(word, "").lower() not in FLAGS:
            what = f"{word}={given[word]} is neither true nor false"
            raise DumpError(what, f"write {word}=true, or leave it out")
        given[word] = FLAGS[given.get(word, "").lower()]
    before, _, server = given["endpoint_override"].rstrip("/").rpartition("://")
    given |= {"endpoint_override": server, "scheme": given.get("scheme") or before}
    given = {word: value for word, value in given.items() if value}
    if scheme in ("gs", "gcs"):
        given |= {"anonymous": True} if user == "anonymous" else {}
        return fs.GcsFileSystem(retry_time_limit=timedelta(seconds=SECONDS), **given)
    if scheme not in ("s3", "s3a"):
        return fs.FileSystem.from_uri(f"{scheme}://{f'{user}@' * bool(user)}{host}/")[0]
    return fs.S3FileSystem(
        tls_ca_file_path=os.environ.get("AWS_CA_BUNDLE"),
        connect_timeout=SECONDS / 3,
        request_timeout=SECONDS,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        **{"region": given.get("region") or _region(host, bool(server)), **given},
    )


def _region(bucket: str, elsewhere: bool) -> str:
    """Return a bucket's region from the provider, or from the environment as a fallback."""
    stated = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if elsewhere:
        return stated or "us-east-1"
    try:
        return str(fs.resolve_s3_region(bucket))
    except OSError:
        if stated:
            return stated
        raise


VERSIONS = ("ETag", "etag", "generation", "mtime", "LastModified", "Last-Modified", "created")
"""Names under which filesystems of fsspec give the version of an object; Arrow knows `mtime` alone."""


@lru_cache(maxsize=256)
def _of_fsspec(found: Any) -> fs.FileSystem:
    return fs.PyFileSystem(Retried(found))


class Retried(fs.FSSpecHandler):  # type: ignore[misc]  # Arrow has no types
    """Arrow's adapter of an fsspec filesystem, with retries."""

    def get_file_info(self, paths: list[str]) -> Any:
        """Return the file information of paths."""
        return retried(lambda: fs.FSSpecHandler.get_file_info(self, paths))

    def get_file_info_selector(self, selector: fs.FileSelector) -> Any:
        """List a directory."""
        return retried(lambda: fs.FSSpecHandler.get_file_info_selector(self, selector))

    def state(self, path: str) -> tuple[int, str]:
        """Return an object's size, and its version or time by the first of `VERSIONS` that it has."""
        info = retried(lambda: self.fs.info(path))
        if info["size"] is None:
            raise OSError("the server sends whole files only, and Parquet is read by ranges")
        return int(info["size"]), next((str(info[name]) for name in VERSIONS if info.get(name)), "")

    def open_input_file(self, path: str) -> pa.PythonFile:
        """Open a file for random access, by requests of ranges."""
        from fsspec.spec import AbstractBufferedFile

        def fetched(begin: int, end: int) -> bytes:
            found: bytes = self.fs.cat_file(path, start=begin, end=end)
            if len(found) != end - begin:
                raise ConnectionError(f"{len(found)} bytes came where {end - begin} were asked for")
            return found

        file = AbstractBufferedFile(self.fs, path, cache_type="none", size=self.state(path)[0])
        file.cache.fetcher = lambda begin, end: retried(lambda: fetched(begin, end))
        return pa.PythonFile(file, mode="r")


FINAL = (*(FileNotFoundError, PermissionError, ImportError), *(ValueError, TypeError, LookupError))
"""Errors that are not retried."""


def retried(call: Callable[[], T]) -> T:
    """Call a function up to `ATTEMPTS` times, with a short wait; errors of clients become OSErrors."""
    # Imported here because it imports asyncio, which local files do not need.
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

    again, waits = retry_if_exception(_passing), wait_exponential(WAIT)
    try:
        return Retrying(stop=stop_after_attempt(ATTEMPTS), wait=waits, retry=again, reraise=True)(call)
    except (*FINAL, ConnectionError, TimeoutError):
        raise
    except Exception as error:
        raise StoreError(f"{type(error).__name__}: {error}") from error


class StoreError(OSError):
    """A client's error as an OSError, which Arrow passes on."""


def _passing(error: BaseException) -> bool:
    """Return whether an error may be transient."""
    status = http_status(error)
    if status is not None:
        return status >= 500 or status in (408, 429)  # timed out, too many requests
    return isinstance(error, Exception) and not isinstance(error, FINAL)


def http_status(error: BaseException | None) -> int | None:
    """Return the HTTP status of an error, from any client library; None if there is none."""
    if isinstance(error, StoreError):
        return http_status(error.__cause__)
    found = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    return found if isinstance(found, int) else None


# ---------------------------------------------------------------- what went wrong


LOGINS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN if they are temporary), or "
    "AWS_PROFILE; add ?anonymous=true to read a public bucket without them",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS; add "
    "?anonymous=true to read a public bucket without",
    "abfss": "run `az login`, or set AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET",
    "hf": "set HF_TOKEN, or run `hf auth login`; a gated repository wants its terms accepted first",
}
LOGINS |= {"s3a": LOGINS["s3"], "gcs": LOGINS["gs"], "abfs": LOGINS["abfss"]}
LOGIN_OF_OTHERS = "check what this filesystem needs to know you by (its environment variables, its login)"
DENIED = (
    r"ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN_ID|UNRECOGNIZED_CLIENT"
    r"|[Ss]tatus 40[13]|PERMISSION_DENIED|UNAUTHENTICATED|OAuth2 access token|(?:Expired|Invalid)Token"
    r"|^PermissionError"
)
CAUSES = (
    (
        r"^(?:Import|ModuleNotFound)Error",
        "a package that reads this kind of URL is not installed",
        "{package}",
    ),
    (
        r"Protocol not known",
        "there is no such kind of URL",
        "s3, gs, abfss, hdfs, hf and https are known, and what else fsspec knows",
    ),
    (
        r"libjvm|libhdfs",
        "Java or Hadoop's libhdfs is not found",
        "set JAVA_HOME and HADOOP_HOME, and CLASSPATH to what `hadoop classpath --glob` prints",
    ),
    (DENIED, "access is denied", "{login}"),
    (
        r"[Ss]tatus 301|PermanentRedirect|AuthorizationHeaderMalformed",
        "the bucket is in another region",
        "add ?region=… with the region that its owner names, or set AWS_REGION",
    ),
    (
        r"NO_SUCH_BUCKET|NO_SUCH_KEY|NoSuchBucket|Bucket '.*' not found|Path does not exist|NOT_FOUND"
        r"|^FileNotFoundError|status 4(?:04|10)",
        "no such bucket, file or directory",
        "check the name, the path and your login; a store of your own is named by AWS_ENDPOINT_URL",
    ),
    (
        r"NETWORK_CONNECTION|NETWORK_FAILURE|REQUEST_TIMEOUT|curlCode|CURL error|[Cc]onnection refused"
        r"|[Cc]annot connect|[Cc]ould not (?:connect|resolve)|Name or service not known"
        r"|^(?:Connection|Timeout)\w*Error",
        "the store cannot be reached ({words})",
        "check the network, and the endpoint if one is named (AWS_ENDPOINT_URL, endpoint_override=…); "
        "requests were sent again, with waits between them",
    ),
    (
        r"[Ss]tatus (?:429|5\d\d)|SLOW_DOWN|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|UNAVAILABLE|^StoreError",
        "the store does not answer as it should ({words})",
        "requests were sent again, with waits between them; try later",
    ),
    (
        r"AWS Error|google::cloud|Azure",
        "the store refuses ({words})",
        "{login}; or the endpoint or the region is not the bucket's",
    ),
)
"""Pattern of an error (its type, HTTP status and text) → what is said, and the hint; the first one counts."""
OTHER = ("", "cannot be read ({words})", "check the URL")


@contextmanager
def explaining(shown: str, scheme: str) -> Iterator[None]:
    """Convert errors raised within the block into a DumpError that explains them."""
    try:
        yield
    except OffpolError:
        raise
    except Exception as error:
        what, hint = _explained(scheme, error, _cause(error) or OTHER)
        raise DumpError(f"{shown}: {what}", hint) from error


def denied(error: BaseException) -> bool:
    """Return whether a store or a disk refused access."""
    return bool(re.search(DENIED, _said(error)))


def outage(location: Location, error: BaseException, always: bool = False) -> tuple[str, str] | None:
    """Return the message and hint of a store's failure; None if the store works, so the file is damaged."""
    cause = _cause(error) or (OTHER if always else None)
    return _explained(split(location.shown).scheme, error, cause) if location.store and cause else None


def _said(error: BaseException) -> str:
    kind = next(one.__name__ for one in type(error).__mro__ if one.__module__ in ("builtins", __name__))
    status = http_status(error)
    return f"{kind}{f' status {status}' if status else ''}: {error}"


def _cause(error: BaseException) -> tuple[str, str, str] | None:
    return next((cause for cause in CAUSES if re.search(cause[0], _said(error))), None)


def _explained(scheme: str, error: BaseException, cause: tuple[str, str, str]) -> tuple[str, str]:
    words = cleaned(" ".join(str(error).split())) or type(error).__name__
    words = re.sub(r"^When .*?(?=AWS Error)| ?\(Request ID: [^)]*\)", "", words).rstrip(". ")
    words = words if len(words) <= 200 else words[:199] + "…"
    pattern, what, hint = cause
    what = what.replace("{words}", words)
    if pattern is DENIED and scheme in ("s3", "s3a") and _no_aws_credentials():
        what += ", and there are no credentials"
    package = install("remote") if scheme in ("hf", *WEB) else f"install what it needs: {words}"
    return what, hint.format(package=package, login=LOGINS.get(scheme, LOGIN_OF_OTHERS))


def _no_aws_credentials() -> bool:
    """Return whether no AWS credentials are configured; EC2 instance roles cannot be detected."""
    home, login = Path.home() / ".aws", "AWS_CONTAINER_CREDENTIALS_"
    files = {"AWS_SHARED_CREDENTIALS_FILE": home / "credentials", "AWS_CONFIG_FILE": home / "config"}
    variables = "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", f"{login}RELATIVE_URI", f"{login}FULL_URI"
    there = (Path(os.environ.get(name) or usual).is_file() for name, usual in files.items())
    return not any(map(os.environ.get, variables)) and not any(there)

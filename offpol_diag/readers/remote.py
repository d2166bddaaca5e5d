"""Read files and directories behind URLs, and explain failures.

Schemes with an Arrow filesystem are rows of `SCHEMES`; other schemes use fsspec, with byte-range requests and
retries. `ACCESS` holds login hints by scheme, `CAUSES` the known failures and their remedies.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import fs

from offpol_diag.errors import DumpError, OffpolError, did_you_mean, install
from offpol_diag.readers.sources import NO_GLOB, WILDCARDS, Location, Url, clean, cleaned, hidden, split

T = TypeVar("T")
Options = dict[str, str]

ATTEMPTS = 5
"""Maximum attempts per request."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0
"""Seconds before the second attempt, doubled before each further one; a random part is added."""
SECONDS = 30.0
"""Timeout of one attempt through fsspec."""
CONNECT_SECONDS, SILENT_SECONDS = 5.0, 15.0
"""Timeouts for connecting to an S3 server and for its responses."""
RETRY_SECONDS = 20.0
"""Time limit on retrying a request to Google Cloud Storage."""
RANGE = 8 << 20
"""Bytes per request, small enough for slow connections to finish within `SECONDS`."""


# ---------------------------------------------------------------- stores


@dataclass(frozen=True)
class Store:
    """A picklable description of a filesystem; equal descriptions are opened once per process.

    `options` are those of a row of `SCHEMES`, as pairs, or a filesystem of fsspec; they may hold secrets.
    """

    scheme: str
    options: Hashable = field(repr=False)

    @property
    def filesystem(self) -> fs.FileSystem:
        """The filesystem, opened."""
        return _opened(self)


@lru_cache(maxsize=256)
def _opened(store: Store) -> fs.FileSystem:
    if isinstance(store.options, tuple):
        return SCHEMES[store.scheme].opens(dict(store.options))
    return fs.PyFileSystem(Ranged(store.options))


@dataclass(frozen=True)
class Scheme:
    """Access to URLs of one scheme: `options` are query parameters, `path` is a URL's path in the filesystem.

    `endpoint` are environment variables that name the server where the URL does not.
    """

    opens: Callable[[Options], fs.FileSystem]
    options: tuple[str, ...]
    path: Callable[[Url], str]
    endpoint: tuple[str, ...] = ()


def locate(source: str) -> Location:
    """Return the location of a URL."""
    url = split(source)
    scheme = SCHEMES.get(url.scheme)
    if scheme is None:
        from fsspec.core import url_to_fs

        found, path = url_to_fs(source)
        shown = url.shown.rstrip("/") if url.place.strip("/") else url.shown
        return Location(Store(url.scheme, found), path, shown)
    options = dict(url.options)
    for word in options:
        if word not in scheme.options:
            known = f"after ? there may be {', '.join(scheme.options) or 'nothing'}"
            hint = did_you_mean(word, list(scheme.options)) or known
            raise DumpError(f"{url.shown}: {url.scheme}:// has no option {word!r}", hint)
    endpoint = next(filter(None, map(os.environ.get, scheme.endpoint)), None)
    if endpoint:  # stored in the options, so that other processes use the same server
        options.setdefault("endpoint_override", endpoint)
    bucket = url.place.partition("/")[0]
    options |= {"user": url.user, "secret": url.secret, "place": bucket, "scheme_": url.scheme}
    store = Store(url.scheme, tuple(sorted(options.items())))
    return Location(store, scheme.path(url), url.shown.rstrip("/"))


def _s3(given: Options) -> fs.FileSystem:
    endpoint, anonymous = _endpoint(given), _flag(given, "anonymous")
    login = {"access_key": given["user"], "secret_key": given["secret"]} if given["secret"] else {}
    return fs.S3FileSystem(
        **({} if anonymous else login),
        anonymous=anonymous,
        region=given.get("region") or _region(given["place"], bool(endpoint)),
        role_arn=given.get("role_arn"),
        force_virtual_addressing=_flag(given, "force_virtual_addressing"),
        tls_ca_file_path=os.environ.get("AWS_CA_BUNDLE"),
        connect_timeout=CONNECT_SECONDS,
        request_timeout=SILENT_SECONDS,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        **endpoint,
    )


def _gcs(given: Options) -> fs.FileSystem:
    return fs.GcsFileSystem(
        anonymous=_flag(given, "anonymous") or given["user"] == "anonymous",
        project_id=given.get("project_id"),
        retry_time_limit=timedelta(seconds=RETRY_SECONDS),
        **_endpoint(given),
    )


def _by_uri(given: Options) -> fs.FileSystem:
    """Open a filesystem that Arrow creates from a URI."""
    user, secret = given["user"], given["secret"]
    login = f"{user}:{secret}@" if secret else f"{user}@" * bool(user)
    return fs.FileSystem.from_uri(f"{given['scheme_']}://{login}{given['place']}/")[0]


def _flag(given: Options, word: str) -> bool:
    value = given.get(word, "").lower()
    if value not in ("true", "1", "yes", "false", "0", "no", ""):
        raise DumpError(f"{word}={value} is neither true nor false", f"write {word}=true, or leave it out")
    return value in ("true", "1", "yes")


def _endpoint(given: Options) -> Options:
    """Return Arrow's arguments for a custom endpoint, given as `host:port` or as a URL."""
    before, sign, after = given.get("endpoint_override", "").partition("://")
    host, scheme = (after, before) if sign else (before, "")
    found = {"endpoint_override": host.rstrip("/"), "scheme": given.get("scheme") or scheme}
    return {key: value for key, value in found.items() if value}


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


def _in_bucket(url: Url) -> str:
    if not url.place.partition("/")[0]:
        raise DumpError(f"{url.shown}: names no bucket", f"write {url.scheme}://bucket/path")
    return url.place.rstrip("/")


def _below_host(url: Url) -> str:
    return "/" + url.place.partition("/")[2].strip("/")


def _below_container(url: Url) -> str:
    if not url.user:
        hint = f"write {url.scheme}://container@account.dfs.core.windows.net/path"
        raise DumpError(f"{url.shown}: names no container", hint)
    return f"{url.user}{_below_host(url)}".rstrip("/")


S3 = Scheme(
    _s3,
    ("region", "endpoint_override", "scheme", "anonymous", "role_arn", "force_virtual_addressing"),
    _in_bucket,
    ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
)
GCS = Scheme(_gcs, ("anonymous", "endpoint_override", "scheme", "project_id"), _in_bucket)
AZURE_BLOBS, HADOOP = Scheme(_by_uri, (), _below_container), Scheme(_by_uri, (), _below_host)
SCHEMES = dict.fromkeys(("s3", "s3a"), S3) | dict.fromkeys(("gs", "gcs"), GCS)
SCHEMES |= dict.fromkeys(("abfs", "abfss"), AZURE_BLOBS) | dict.fromkeys(("hdfs", "viewfs"), HADOOP)


# ---------------------------------------------------------------- files, directories and globs


def files(source: str) -> Iterator[Location]:
    """Yield the Parquet files at a URL: a file, a directory or a glob."""
    with explaining(clean(source), split(source).scheme):
        place = locate(source)
        kind = _kind(place, place.path)
        if kind == fs.FileType.File:
            yield place
        elif kind == fs.FileType.Directory:
            yield from _in_directory(place)
        elif not WILDCARDS.isdisjoint(place.path):
            yield from _in_glob(place)
        else:
            raise _missing(place)


def _kind(place: Location, path: str) -> fs.FileType:
    return place.filesystem.get_file_info(path).type


def _entries(place: Location, recursive: bool = False) -> list[fs.FileInfo]:
    return list(place.filesystem.get_file_info(fs.FileSelector(place.path, recursive=recursive)))


def _names_below(root: Location, path: str) -> list[str]:
    return path[len(root.path.rstrip("/")) :].strip("/").split("/")


def _in_directory(root: Location) -> Iterator[Location]:
    for info in _entries(root, recursive=True):
        names = _names_below(root, info.path)
        if info.type == fs.FileType.File and names[-1].endswith(".parquet") and not hidden(names):
            yield root.at(info.path)


def _in_glob(pattern: Location) -> Iterator[Location]:
    """Yield what matches below the deepest directory without wildcards."""
    names = pattern.path.split("/")
    first = next(i for i, name in enumerate(names) if not WILDCARDS.isdisjoint(name))
    base = "/".join(names[:first]) or "/" * pattern.path.startswith("/")
    shown = pattern.shown.removesuffix(pattern.path[len(base) :])
    if shown == pattern.shown and pattern.store:
        shown = f"{pattern.store.scheme}://{base.lstrip('/')}"
    root, segments = Location(pattern.store, base, shown), [name for name in names[first:] if name]
    if any("**" in segment and segment != "**" for segment in segments):
        raise DumpError(f"{pattern}: not a glob", NO_GLOB)
    for path, kind in _matches(root, segments):
        found = root.at(path)
        if not hidden(name for name in _names_below(root, path) if name not in segments):
            yield from _in_directory(found) if kind == fs.FileType.Directory else [found]


def _matches(root: Location, segments: list[str]) -> Iterator[tuple[str, fs.FileType]]:
    """Yield the paths below a directory that match the segments of a pattern."""
    head, *rest = segments
    if head == "**":
        below = [info for info in _entries(root, recursive=True) if info.type == fs.FileType.Directory]
        found = [(root.path, fs.FileType.Directory), *((info.path, info.type) for info in below)]
    elif WILDCARDS.isdisjoint(head):
        path = f"{root.path.rstrip('/')}/{head}"
        kind = _kind(root, path)
        found = [] if kind == fs.FileType.NotFound else [(path, kind)]
    else:
        found = [(info.path, info.type) for info in _entries(root) if fnmatchcase(info.base_name, head)]
    for path, kind in found:
        if not rest:
            yield path, kind
        elif kind == fs.FileType.Directory:
            yield from _matches(root.at(path), rest)


def _missing(place: Location) -> DumpError:
    """Explain a missing path: its bucket does not exist, or a similar name does."""
    bucket = place.path.partition("/")[0]
    through_fsspec = isinstance(place.filesystem, fs.PyFileSystem)  # whose paths may begin with anything
    if not through_fsspec and bucket and _kind(place, bucket) == fs.FileType.NotFound:
        hint = "check its name; a store of your own is named by AWS_ENDPOINT_URL"
        return DumpError(f"{place}: there is no bucket {bucket!r}", hint)
    hint = "check the path; keys are taken as written, %20 is no blank"
    with suppress(Exception):  # failing to find a hint must not hide the error
        above, _, name = place.path.rpartition("/")
        folder = Location(place.store, above, place.shown.removesuffix(name))
        if above and _kind(folder, above) == fs.FileType.Directory:
            hint = did_you_mean(name, sorted(info.base_name for info in _entries(folder))) or hint
    return DumpError(f"{place}: no such file or directory", hint)


# ---------------------------------------------------------------- fsspec, with retries


VERSIONS = ("ETag", "etag", "generation", "mtime", "LastModified", "Last-Modified", "created")
"""Names under which filesystems of fsspec give the version of an object; Arrow knows `mtime` alone."""


class Ranged(fs.FSSpecHandler):  # type: ignore[misc]  # Arrow has no types
    """Arrow's adapter of an fsspec filesystem, with retries and timeouts."""

    def get_file_info(self, paths: list[str]) -> Any:
        """Return the file information of paths."""
        return retried(lambda: fs.FSSpecHandler.get_file_info(self, paths))

    def get_file_info_selector(self, selector: fs.FileSelector) -> Any:
        """List a directory."""
        return retried(lambda: fs.FSSpecHandler.get_file_info_selector(self, selector))

    def state(self, path: str) -> tuple[int, str]:
        """Return an object's size, and its version or time by the first of `VERSIONS` that it has."""
        info = retried(lambda: self.fs.info(path))
        return int(info["size"]), next((str(info[name]) for name in VERSIONS if info.get(name)), "")

    def open_input_file(self, path: str) -> pa.PythonFile:
        """Open a file for random access."""
        return pa.PythonFile(RangedFile(self.fs, path), mode="r")


class RangedFile(io.RawIOBase):
    """A file read by byte ranges, with retries of each request."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem, self._path = filesystem, path
        self._at = 0
        self._stream: Any = None
        self._size: int = retried(lambda: self._opened().size)
        if self._size is None:
            raise io.UnsupportedOperation("the server sends whole files only, and Parquet is read by ranges")

    def readable(self) -> bool:
        """Yes."""
        return True

    seekable = readable

    def tell(self) -> int:
        """Return the current offset."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the offset; nothing is fetched."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Read up to `size` bytes from the current offset."""
        rest = max(self._size - self._at, 0)
        end = self._at + (rest if size is None or size < 0 else min(size, rest))
        ranges = []
        while self._at < end:
            ranges.append(retried(lambda: self._fetched(min(RANGE, end - self._at))))
            self._at += len(ranges[-1])
        return b"".join(ranges)

    def _fetched(self, size: int) -> bytes:
        # a stream that failed, or that a timed-out attempt may still read, is not reused
        stream, self._stream = self._opened(), None
        stream.seek(self._at)
        found: bytes = stream.read(size)
        if len(found) != size:
            raise ConnectionError(f"{len(found)} bytes came where {size} were asked for")
        self._stream = stream
        return found

    def _opened(self) -> Any:
        if self._stream is None:
            self._stream = self._filesystem.open(self._path, "rb", cache_type="none")
        return self._stream


FINAL = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError, ValueError),
    *(TypeError, LookupError, AttributeError, NotImplementedError),
)
"""Errors that are not retried."""


class StoreError(OSError):
    """A client's error as an OSError, which Arrow passes on; `status` is the HTTP status."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.status = http_status(error)


def retried(call: Callable[[], T]) -> T:
    """Call a function with up to `ATTEMPTS` attempts of `SECONDS` each and exponential backoff."""
    # Imported here because it imports asyncio, which local files do not need.
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential, wait_random

    attempts = Retrying(
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_exponential(FIRST_WAIT, LONGEST_WAIT) + wait_random(0, FIRST_WAIT),
        retry=retry_if_exception(_passing),
        reraise=True,
    )
    try:
        found: T = attempts(within, SECONDS, call)
        return found
    except (*FINAL, ConnectionError, TimeoutError):
        raise
    except Exception as error:
        raise StoreError(error) from error


def _passing(error: BaseException) -> bool:
    """Return whether an error may be transient."""
    status = http_status(error)
    if status is not None:
        return status >= 500 or status in (408, 429)  # timed out, too many requests
    return isinstance(error, Exception) and not isinstance(error, FINAL)


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status of an error, from any client library; None if there is none."""
    found = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    return found if isinstance(found, int) else None


def within(seconds: float, call: Callable[[], T]) -> T:
    """Call a function in a thread with a timeout; a call that exceeds it is abandoned."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=run, daemon=True, name="offpol-diag-range").start()
    if not wait([answer], seconds).done:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answer.result()


# ---------------------------------------------------------------- what went wrong


@dataclass(frozen=True)
class Access:
    """Hints for a scheme: how to log in; what to check where the store or the path cannot be found."""

    access: str
    network: str = "check the network and the host"
    absent: str = "check the name and the path"


AWS = Access(
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN if they are temporary), or "
    "AWS_PROFILE; add ?anonymous=true to read a public bucket without them",
    "check the network, and the endpoint if one is named (AWS_ENDPOINT_URL, endpoint_override=…)",
    "check the bucket and the path; a store of your own is named by AWS_ENDPOINT_URL",
)
GOOGLE = Access(
    "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS; add ?anonymous=true "
    "to read a public bucket without"
)
AZURE = Access("run `az login`, or set AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET")
HUB = Access(
    "set HF_TOKEN, or run `hf auth login`; a gated repository wants its terms accepted first",
    absent="check the name; a private repository is there only for those who set HF_TOKEN",
)
ANY = Access("check what this filesystem needs to know you by (its environment variables, its login)")
ACCESS = {"s3": AWS, "s3a": AWS, "gs": GOOGLE, "gcs": GOOGLE, "abfs": AZURE, "abfss": AZURE, "hf": HUB}
IN_EXTRA = ("hf", "http", "https")
EXTRA = install("remote")


def _no_aws_credentials() -> bool:
    """Return whether no AWS credentials are configured; EC2 instance roles cannot be detected."""
    home, login = Path.home() / ".aws", "AWS_CONTAINER_CREDENTIALS_"
    files = {"AWS_SHARED_CREDENTIALS_FILE": home / "credentials", "AWS_CONFIG_FILE": home / "config"}
    variables = "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", f"{login}RELATIVE_URI", f"{login}FULL_URI"
    there = (Path(os.environ.get(name) or usual).is_file() for name, usual in files.items())
    return not any(map(os.environ.get, variables)) and not any(there)


@dataclass(frozen=True)
class Cause:
    """A known cause of failure: message, hint, and the errors that indicate it.

    `{words}` is the library's message, `{package}` what to install; the others are fields of `Access`. Errors
    are known by a regular expression in their text, by their type, or by their HTTP status.
    """

    message: str
    hint: str
    pattern: str = r"(?!)"
    types: tuple[type[BaseException], ...] = ()
    statuses: tuple[int, ...] = ()


DENIED = Cause(
    "access is denied",
    "{access}",
    r"AWS Error (?:ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN_ID"
    r"|UNRECOGNIZED_CLIENT)|HTTP status 40[13]|PERMISSION_DENIED|UNAUTHENTICATED|OAuth2 access token"
    r"|ExpiredToken|InvalidToken",
    (PermissionError,),
    (401, 403),
)
CAUSES = (
    Cause("a package that reads this kind of URL is not installed", "{package}", types=(ImportError,)),
    Cause(
        "there is no such kind of URL",
        "s3, gs, abfss, hdfs, hf and https are known, and what else fsspec knows",
        r"Protocol not known",
    ),
    Cause(
        "Java or Hadoop's libhdfs is not found",
        "set JAVA_HOME and HADOOP_HOME, and CLASSPATH to what `hadoop classpath --glob` prints",
        r"libjvm|libhdfs",
    ),
    DENIED,
    Cause(
        "the bucket is in another region",
        "add ?region=… with the region that its owner names, or set AWS_REGION",
        r"HTTP status 301|PermanentRedirect|AuthorizationHeaderMalformed",
    ),
    Cause(
        "no such bucket, file or directory",
        "{absent}",
        r"NO_SUCH_BUCKET|NO_SUCH_KEY|NoSuchBucket|Bucket '.*' not found|Path does not exist|NOT_FOUND",
        (FileNotFoundError,),
        (404, 410),
    ),
    Cause(
        "the store cannot be reached ({words})",
        "{network}; requests were sent again, with waits between them",
        r"NETWORK_CONNECTION|NETWORK_FAILURE|REQUEST_TIMEOUT|curlCode|CURL error|[Cc]onnection refused"
        r"|[Cc]annot connect|[Cc]ould not (?:connect|resolve)|Name or service not known",
        (ConnectionError, TimeoutError),
    ),
    Cause(
        "the store does not answer as it should ({words})",
        "requests were sent again, with waits between them; try later",
        r"HTTP status (?:429|5\d\d)|SLOW_DOWN|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|UNAVAILABLE",
        (StoreError,),
    ),
    Cause(
        "the store refuses ({words})",
        "{access}; or the endpoint or the region is not the bucket's",
        r"AWS Error|google::cloud|Azure",
    ),
)
OTHER = Cause("cannot be read ({words})", "check the URL")


@contextmanager
def explaining(shown: str, scheme: str) -> Iterator[None]:
    """Convert errors raised within the block into a DumpError that explains them."""
    try:
        yield
    except OffpolError:
        raise
    except Exception as error:
        message, hint = _explained(scheme, error, _cause(error) or OTHER)
        raise DumpError(f"{shown}: {message}", hint) from error


def denied(error: BaseException) -> bool:
    """Return whether a store or a disk refused access."""
    return _cause(error) is DENIED


def outage(location: Location, error: BaseException) -> tuple[str, str] | None:
    """Return the message and hint of a store's failure; None if the store works, so the file is damaged."""
    cause = _cause(error)
    return _explained(location.store.scheme, error, cause) if location.store and cause else None


def _cause(error: BaseException) -> Cause | None:
    def indicated(cause: Cause) -> bool:
        known = isinstance(error, cause.types) or http_status(error) in cause.statuses
        return known or bool(re.search(cause.pattern, str(error)))

    return next(filter(indicated, CAUSES), None)


def _explained(scheme: str, error: BaseException, cause: Cause) -> tuple[str, str]:
    access, words = ACCESS.get(scheme, ANY), _quoted(error)
    without = cause is DENIED and access is AWS and _no_aws_credentials()
    message = cause.message.replace("{words}", words) + ", and there are no credentials" * without
    package = EXTRA if scheme in IN_EXTRA else f"install what it needs: {words}"
    return message, cause.hint.format(package=package, **vars(access))


def _quoted(error: BaseException) -> str:
    """Return a library's message on one line, shortened and without credentials."""
    text = cleaned(" ".join(str(error).split())) or type(error).__name__
    text = re.sub(r"^When .*?(?=AWS Error)| ?\(Request ID: [^)]*\)", "", text).rstrip(". ")
    return text if len(text) <= 200 else text[:199] + "…"

"""Why a store does not give what it was asked for, as an error that says what would help."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offpol_diag.errors import DumpError, OffpolError
from offpol_diag.readers.locations import Location
from offpol_diag.readers.ranges import StoreError, Unanswered, http_status
from offpol_diag.readers.urls import cleaned

EXTRA = 'pip install "offpol-diag[remote]"'
LONGEST = 200
"""Characters of a library's message that are quoted."""


@dataclass(frozen=True)
class Access:
    """How a scheme's users say who they are.

    Attributes:
        hint: what to set or to run.
        network: what to look at when nothing answers.
        absent: what to look at when nothing is there.
        known: whether anything of it is set; None where that cannot be told.
    """

    hint: str
    network: str = "check the network and the host"
    absent: str = "check the name and the path"
    known: Callable[[], bool | None] = lambda: None


@dataclass(frozen=True)
class Cause:
    """A reason that a store gives.

    Attributes:
        applies: whether an error is of it; told the error and its text.
        says: what is wrong.
        hint: what to do; `{access}`, `{network}`, `{absent}` are the scheme's.
        quotes: whether the library's own words follow.
    """

    applies: Callable[[BaseException, str], bool]
    says: str
    hint: str
    quotes: bool = False


@contextmanager
def told(location: Location) -> Iterator[None]:
    """Within the block, what a store raises becomes an error of ours.

    Raises:
        DumpError: why `location` cannot be read.
    """
    try:
        yield
    except OffpolError:
        raise
    except Exception as error:
        raise explained(location, error) from error


def explained(location: Location, error: BaseException) -> DumpError:
    """Why a place in a store cannot be read."""
    cause = _cause(error) or OTHER
    return DumpError(f"{location}: {_says(cause, location, error)}", _hint(cause, location, error))


def outage(location: Location, error: BaseException) -> tuple[str, str] | None:
    """What happened to a store and what to do; None where the store did well and the file is damaged."""
    cause = _cause(error) if location.far else None
    return None if cause is None else (_says(cause, location, error), _hint(cause, location, error))


def _cause(error: BaseException) -> Cause | None:
    text = str(error)
    return next((cause for cause in CAUSES if cause.applies(error, text)), None)


def _says(cause: Cause, location: Location, error: BaseException) -> str:
    without = cause is DENIED and _access(location).known() is False
    says = cause.says + (", and there are no credentials" if without else "")
    return f"{says} ({quoted(error)})" if cause.quotes else says


def _hint(cause: Cause, location: Location, error: BaseException) -> str:
    access = _access(location)
    package = _package(location, error)
    return cause.hint.format(
        access=access.hint, network=access.network, absent=access.absent, package=package
    )


def quoted(error: BaseException) -> str:
    """A library's words on one line, of bearable length and without what is secret in URLs."""
    text = cleaned(" ".join(str(error).split())) or type(error).__name__
    text = re.sub(r"^When .*?(?=AWS Error)| ?\(Request ID: [^)]*\)", "", text).rstrip(". ")
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


# ---------------------------------------------------------------- who somebody is


def _aws() -> bool:
    """Whether there is any sign of credentials; those of a machine of AWS leave none."""
    home = Path.home() / ".aws"
    files = [
        Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials"),
        Path(os.environ.get("AWS_CONFIG_FILE") or home / "config"),
    ]
    variables = (
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    )
    return any(map(os.environ.get, variables)) or any(file.is_file() for file in files)


AWS = Access(
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN if they are temporary), or "
    "AWS_PROFILE; add ?anonymous=true to read a public bucket without them",
    "check the network, and the endpoint if one is named (AWS_ENDPOINT_URL, endpoint_override=…)",
    "check the bucket and the path; a store of your own is named by AWS_ENDPOINT_URL",
    _aws,
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
ACCESS = {
    "s3": AWS,
    "s3a": AWS,
    "gs": GOOGLE,
    "gcs": GOOGLE,
    "abfs": AZURE,
    "abfss": AZURE,
    "hf": HUB,
}
IN_EXTRA = frozenset({"hf", "http", "https"})


def _access(location: Location) -> Access:
    return ACCESS.get(location.store.scheme, ANY)


def _package(location: Location, error: BaseException) -> str:
    return EXTRA if location.store.scheme in IN_EXTRA else f"install what it needs: {quoted(error)}"


# ---------------------------------------------------------------- causes


def _matches(
    pattern: str, *types: type[BaseException], statuses: tuple[int, ...] = ()
) -> Callable[[BaseException, str], bool]:
    found = re.compile(pattern)

    def applies(error: BaseException, text: str) -> bool:
        return isinstance(error, types) or http_status(error) in statuses or bool(found.search(text))

    return applies


DENIED = Cause(
    _matches(
        r"AWS Error (?:ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN_ID"
        r"|UNRECOGNIZED_CLIENT)|HTTP status 40[13]|PERMISSION_DENIED|UNAUTHENTICATED|OAuth2 access token"
        r"|ExpiredToken|InvalidToken",
        PermissionError,
        statuses=(401, 403),
    ),
    "access is denied",
    "{access}",
)
CAUSES = (
    Cause(
        _matches(r"(?!)", ImportError),
        "a package that reads this kind of URL is not installed",
        "{package}",
    ),
    Cause(
        _matches(r"Protocol not known"),
        "there is no such kind of URL",
        "s3, gs, abfss, hdfs, hf and https are known, and what else fsspec knows",
    ),
    Cause(
        _matches(r"libjvm|libhdfs"),
        "Java or Hadoop's libhdfs is not found",
        "set JAVA_HOME and HADOOP_HOME, and CLASSPATH to what `hadoop classpath --glob` prints",
    ),
    DENIED,
    Cause(
        _matches(r"HTTP status 301|PermanentRedirect|AuthorizationHeaderMalformed"),
        "the bucket is in another region",
        "add ?region=… with the region that its owner names, or set AWS_REGION",
    ),
    Cause(
        _matches(
            r"NO_SUCH_BUCKET|NO_SUCH_KEY|NoSuchBucket|Bucket '.*' not found|Path does not exist|NOT_FOUND",
            FileNotFoundError,
            statuses=(404, 410),
        ),
        "no such bucket, file or directory",
        "{absent}",
    ),
    Cause(
        _matches(
            r"NETWORK_CONNECTION|NETWORK_FAILURE|REQUEST_TIMEOUT|curlCode|CURL error|[Cc]onnection refused"
            r"|[Cc]annot connect|[Cc]ould not (?:connect|resolve)|Name or service not known",
            ConnectionError,
            TimeoutError,
            Unanswered,
        ),
        "the store cannot be reached",
        "{network}; requests were sent again, with waits between them",
        quotes=True,
    ),
    Cause(
        _matches(
            r"HTTP status (?:429|5\d\d)|SLOW_DOWN|INTERNAL_FAILURE|SERVICE_UNAVAILABLE|UNAVAILABLE",
            StoreError,
        ),
        "the store does not answer as it should",
        "requests were sent again, with waits between them; try later",
        quotes=True,
    ),
    Cause(
        _matches(r"AWS Error|google::cloud|Azure"),
        "the store refuses",
        "{access}; or the endpoint or the region is not the bucket's",
        quotes=True,
    ),
)
OTHER = Cause(lambda *_: True, "cannot be read", "check the URL", quotes=True)

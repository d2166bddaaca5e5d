"""Parse source URLs, and remove credentials from them for display."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

SCHEME = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]+(?:::[A-Za-z][\w+.-]+)*)://(?P<rest>.*)", re.DOTALL)
# A host's port is no password. A secret key may hold unescaped slashes.
CREDENTIALS = re.compile(r"(?P<user>[^/:@]*)(?::(?!\d+(?:/|$))(?P<secret>[^@]*))?@")
# A `?` not followed by a word and `=` is part of a glob, except in http(s) URLs.
OPTIONS = re.compile(r"\?(?=[\w.-]+=)(?P<options>.*)$", re.DOTALL)
WEB_QUERY = re.compile(r"\?(?P<options>.*)$", re.DOTALL)
WEB = frozenset({"http", "https"})
# In these schemes the name before @ is a container, not a user.
CONTAINERS = frozenset({"abfs", "abfss"})
IN_TEXT = re.compile(r"[A-Za-z][\w+.-]+://[^\s'\"<>]*")


@dataclass(frozen=True)
class Url:
    """The parts of a URL.

    Attributes:
        scheme: in lower case.
        place: bucket or host, and path, as written.
        shown: the URL without credentials and options.
        user: the name before `@`, or empty.
        secret: the password after it, or empty.
        options: the query parameters after `?`.
    """

    scheme: str
    place: str = field(repr=False)
    shown: str
    user: str = field(default="", repr=False)
    secret: str = field(default="", repr=False)
    options: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def bucket(self) -> str:
        """The first segment of `place`: bucket or host."""
        return self.place.partition("/")[0]


def is_url(source: str) -> bool:
    """Return whether a source is a URL, such as `s3://…`."""
    return bool(SCHEME.match(source))


def split(source: str) -> Url:
    """Split a URL into its parts; object keys are never unescaped."""
    scheme, rest = _halves(source)
    query = _query(scheme).search(rest)
    place = rest[: query.start()] if query else rest
    login = CREDENTIALS.match(place)
    return Url(
        scheme,
        place[login.end() :] if login else place,
        clean(source),
        unquote(login["user"]) if login else "",
        unquote(login["secret"] or "") if login else "",
        dict(parse_qsl(query["options"], keep_blank_values=True)) if query else {},
    )


def clean(source: str) -> str:
    """Return a source for display: URLs without credentials and options, other sources unchanged."""
    if not is_url(source):
        return source
    scheme, rest = _halves(source)
    rest = _query(scheme).sub("", rest)
    login = CREDENTIALS.match(rest)
    if login and (login["secret"] or scheme not in CONTAINERS):
        rest = rest[login.end() :]
    return f"{scheme}://{rest}"


def cleaned(text: str) -> str:
    """Remove credentials and options from every URL in a message."""
    return IN_TEXT.sub(lambda found: clean(found[0]), text)


def _halves(source: str) -> tuple[str, str]:
    found = SCHEME.fullmatch(source)
    if found is None:
        raise ValueError(f"{source!r} is no URL")
    return found["scheme"].lower(), found["rest"]


def _query(scheme: str) -> re.Pattern[str]:
    return WEB_QUERY if scheme.rpartition("::")[2] in WEB else OPTIONS

"""Take URLs apart, and show them without credentials and options."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl

SCHEME = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]+(?:::[A-Za-z][\w+.-]+)*)://(?P<rest>.*)", re.DOTALL)
LOGIN = re.compile(r"(?P<user>[^/:@]*)(?P<secret>:(?!\d+(?:/|$))[^@]*)?@")
"""A login before a host, whose port is no password; a secret key may hold slashes."""
QUERY = re.compile(r"\?(?=[\w.-]+=)(.*)$", re.DOTALL)
"""A `?` that is not followed by a word and `=` is part of a glob, except in http(s) URLs."""
IN_TEXT = re.compile(r"[A-Za-z][\w+.-]+://[^\s'\"<>]*")
WEB, ABFS = ("http", "https"), ("abfs", "abfss")


class Url(NamedTuple):
    """A URL: scheme in lower case, login, bucket or host and path, options; `shown` is without secrets."""

    scheme: str
    user: str
    secret: str
    place: str
    options: dict[str, str]
    shown: str


def is_url(source: str) -> bool:
    """Return whether a source is a URL, such as `s3://…`."""
    return bool(SCHEME.match(source))


def split(source: str) -> Url:
    """Split a URL into its parts; object keys are never unescaped."""
    found = SCHEME.fullmatch(source)
    if found is None:
        raise ValueError(f"{source!r} is no URL")
    scheme, place = found["scheme"].lower(), found["rest"]
    if scheme.rpartition("::")[2] in WEB:
        place, _, query = place.partition("?")
    else:
        place, query, *_ = (*QUERY.split(place), "")
    shown, user, secret = place, "", ""
    if login := LOGIN.match(place):
        place, user, secret = place[login.end() :], login["user"], login["secret"] or ""
        shown = shown if scheme in ABFS and not secret else place  # there the user is a container
    return Url(scheme, user, secret, place, dict(parse_qsl(query, True)), f"{scheme}://{shown}")


def clean(source: str) -> str:
    """Return a source for display: URLs without credentials and options, other sources unchanged."""
    return split(source).shown if is_url(source) else source


def cleaned(text: str) -> str:
    """Remove credentials and options from every URL in a message."""
    return IN_TEXT.sub(lambda found: clean(found[0]), text)

"""Where origins lie: one reading of each URL, compared and opened as the same value."""

from __future__ import annotations

import unicodedata
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.errors import BadRequest
from quiver.location import SCHEMES, Location, object_path, shown
from quiver_cacheserver.config import allowed

HOSTILE = [
    *("file:///data/.\t./etc/", "file:///data/.\n./etc/", "file:///data/.\r./etc/", "file:///data/link?x/"),
    *(
        "file:///data/link#x/",
        "file:///data\\..\\etc/",
        "file:///data/../etc/",
        "file:///data/./x/",
        "file:///data//x/",
    ),
    *("file:///data/%2e%2e/etc/", "file:///data/%2E./etc/", "file:///data/..%2fetc/", "file:///data/..%5cetc/"),
    *("file:///data/%252e%252e/etc/", "file:///data/..%252Fetc/", "file:///data/%25255c/", "file:///data/x%00/"),
    *("file:///data/x%0a/", "file:///data/x%250a/", "file:///data/%c0%ae%c0%ae/etc/", "file:///data/100%/", "data/"),
    *("file:///data/\x85/", "file:///data/%C2%85/", "file://server/data/", "file:/data/", "ftp://host/x/", "://x/"),
    *(
        "s3:///x/",
        "s3://user@bucket/x/",
        "s3://key:secret@bucket/x/",
        "s3://bucket/../other/",
        "s3://buck et/",
        "s3://",
    ),
    *("http:///x/", "http://u:p@host/x/", "http://host\\@other/x/", "http://host@other/", "http://host:99999/x/"),
    *(
        "http://host:x/",
        "http://host/x?y/",
        "http://ho st/",
        "http://host\t/",
        "http://[::1/x/",
        "https://host/%2F../x/",
    ),
    *(
        "http://host:0/x/",
        "http:/host/x/",
        "http://host/a/%2e/",
        "file:///data/..",
        "file:///data/.%2e",
        "file:///a\0b/",
        "file:///\ud800/",
        "file:///%ed%a0%80/",
        "s3://b\udcff/",
    ),
]


@pytest.mark.fault("S6")
@pytest.mark.parametrize("url", HOSTILE)
def test_a_url_that_could_be_read_in_two_ways_is_refused(url: str) -> None:
    with pytest.raises(BadRequest) as caught:
        Location.parse(url)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("file:///", "file:///"),
        ("file:///data", "file:///data/"),
        ("FILE://localhost/my%20d%C3%A4ta/", "file:///my%20d%C3%A4ta/"),
        ("file:///my däta/%41/50%25 #/".replace("#", "%23"), "file:///my%20d%C3%A4ta/A/50%25%20%23/"),
        ("s3://bucket", "s3://bucket/"),
        ("s3://bucket/a/b%3Fc=1/", "s3://bucket/a/b%3Fc=1/"),
        ("HTTP://Host.Example:80/A", "http://host.example/A/"),
        ("https://host:443/x/", "https://host/x/"),
        ("https://host:080/x/", "https://host:80/x/"),
        ("http://[::1]:8080/~x/", "http://[::1]:8080/~x/"),
        ("az://$web/x/", "az://$web/x/"),
    ],
)
def test_a_url_has_one_normal_form(url: str, normal: str) -> None:
    assert Location.parse(url).url == normal
    assert Location.parse(normal) == Location.parse(url)


NAMES = st.text(st.characters(), min_size=1, max_size=8)


@given(st.sampled_from(sorted(SCHEMES)), st.lists(NAMES, max_size=4))
def test_whatever_is_a_location_reads_the_same_to_everybody(scheme: str, names: list[str]) -> None:
    authority = "" if scheme == "file" else "host"
    try:
        location = Location.parse(f"{scheme}://{authority}/{'/'.join(names)}")
    except BadRequest:
        return
    assert Location.parse(location.url) == location
    parts = urlsplit(location.url)
    assert (parts.scheme, parts.netloc, parts.query, parts.fragment) == (scheme, authority, "", "")
    assert unquote(parts.path) == (location.path + "/" if location.names else "/")
    assert not any(name in ("", ".", "..") or "\\" in name or "/" in name for name in location.names)
    assert not any(unicodedata.category(char) == "Cc" for char in location.path)
    assert location.url.isascii()
    assert location.url.isprintable()


FOLDERS = st.lists(st.text(st.characters(exclude_characters="/"), min_size=1, max_size=8), max_size=3)


@given(FOLDERS, FOLDERS)
def test_a_folder_holds_what_lies_below_it_and_nothing_else(one: list[str], other: list[str]) -> None:
    a, b = Location("s3", "bucket", tuple(one)), Location("s3", "bucket", tuple(other))
    assert a.contains(b) == (b.path.rstrip("/") + "/").startswith(a.path.rstrip("/") + "/")


@pytest.mark.fault("S6")
@pytest.mark.parametrize(
    ("prefix", "inside", "outside"),
    [
        ("s3://bucket/a", "s3://bucket/a/b/", "s3://bucket/ab/"),
        ("s3://bucket/a/", "s3://bucket/a", "s3://bucket2/a/"),
        ("s3://bucket", "s3://bucket/x/", "s3://bucket.evil/x/"),
        ("gs://bucket/a", "gs://bucket/a/", "s3://bucket/a/"),
        ("az://box/a", "az://box/a/", "az://box/"),
        ("http://host/a", "HTTP://HOST:80/a/b", "http://host:8080/a/"),
        ("https://host/a", "https://host:443/%61/", "http://host/a/"),
        ("http://host:81/a", "http://host:81/a/", "http://host:81.evil/a/"),
        ("/data/a/../b//c", "file:///data/b/c/x/", "file:///data/a/"),
        ("/", "file:///data/", "s3://data/"),
    ],
)
def test_a_prefix_allows_at_a_slash_and_of_one_server(prefix: str, inside: str, outside: str) -> None:
    def allows(url: str) -> bool:
        try:
            return any(location.contains(Location.parse(url)) for location in allowed(prefix))
        except BadRequest:
            return False

    assert allows(inside)
    assert not allows(outside)


@pytest.mark.fault("S6")
@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_paths_of_objects_stay_below_their_base(scheme: str) -> None:
    for path in ("", "/etc/passwd", "..", "a/../b", "a//b", "./a", "a/", "a\0b"):
        with pytest.raises(BadRequest):
            object_path(path, scheme)
    for path in ("a", "a b/50%.png", "h#x?y.png", "%41.png", "ü+~[1]{2}.png", "..a/...b"):
        assert object_path(path, scheme) == path
    for path in ("a\nb", "a\tb", "a\x7f"):  # a local name is what it is; of a request it would be more than a name
        if scheme == "file":
            assert object_path(path, scheme) == path
        else:
            with pytest.raises(BadRequest):
                object_path(path, scheme)
    for path in ("..%2fb", "%2e%2e/b", "a%252Fb", "a%0ab", "..\\b"):
        if scheme in ("http", "https"):
            with pytest.raises(BadRequest):
                object_path(path, scheme)
        else:
            assert object_path(path, scheme) == path


@pytest.mark.parametrize(
    "url",
    [
        *("http://user:hush@host/x", "http://user:hush%40@host/x/y@z", "s3://key:hu/sh@bucket/x", "http://hush@host"),
        *("https://user:a@hush@host/", "http://user:hush/@host/x", "gs://u:hush\n@b/"),
    ],
)
def test_credentials_in_a_url_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(BadRequest, match="user or a password") as caught:
        Location.parse(url)
    assert "hu" not in str(caught.value).replace("should", "")
    assert "hu" not in shown(url)


def test_what_is_shown_is_one_line() -> None:
    assert shown("s3://b/a@b/c:d@e") == "s3://b/a@b/c:d@e"
    assert shown("http://[::1]:80/a@b") == "http://[::1]:80/a@b"
    assert shown("a\nb\x1b[31m\u2028") == "a\\nb\\x1b[31m\\u2028"
    assert shown("x" * 1000) == "x" * 200 + "…"

"""What a daemon reads for strangers: below the prefixes that its operator allows, and nothing else.

Hostile manifests name real bytes that lie outside, so that each would be served if the daemon could be led there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.digest import Digest
from quiver.errors import QuiverError
from quiver.manifest import Manifest
from quiver.peer import PeerClient
from quiver.wire import RANGE, RangeStatus, ReadRequest
from quiver_cacheserver.origins.allowed import Origins
from tests.support.daemon import Daemon
from tests.support.data import make_files, rewritten
from tests.support.http_server import Request, http_server, send_head, send_status

SERIAL = itertools.count()
UP = "../../secret/"


class Web:
    """A web server that serves every path; operators allow only what is below ``/allowed/``."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.url = ""
        self.host = ""

    @contextmanager
    def serving(self) -> Iterator[Web]:
        with http_server(self._answer) as self.url:
            self.host = self.url.removeprefix("http://")
            yield self

    def _answer(self, request: Request) -> None:
        self.asked.append(request.path)
        where, _, name = request.path.rpartition("/")
        if where.startswith("/allowed/redirect"):
            location = f"{self.url if where.endswith('far') else ''}/secret/{name}"
            send_status(request, int(where.removeprefix("/allowed/redirect")[:3]), {"Location": location})
        elif data := self.content.get(name):
            request.wfile.write(send_head(request, data))
        else:
            send_status(request, 404)


class World:
    """A folder and a web server that a daemon may read in part, and what lies beside them."""

    def __init__(self, top: Path, web: Web, daemon: Daemon) -> None:
        self.top, self.web, self.daemon = top, web, daemon
        self.allowed = top / "allowed" / "imagenet"
        self.secret = top / "secret"

    def say(self, text: str) -> str:
        return (
            text.replace("<ok>", str(self.allowed))
            .replace("<top>", str(self.top))
            .replace("<web>", self.web.url)
            .replace("<host>", self.web.host)
        )

    def ask(self, base: str, path: str = "###") -> str:
        """Index bytes that nobody has asked for yet, and have the daemon read them from ``path`` below ``base``.

        They lie wherever that may lead, under a number that takes the place of ``###``. Return the status of the range,
        or why the manifest was refused.
        """
        number = f"{next(SERIAL):03}"
        path = path.replace("###", number)
        content = np.random.default_rng(int(number)).bytes(500)
        self.web.content[number] = content
        for folder in (self.secret, self.allowed, self.allowed / "a", self.allowed.parent / "other"):
            (folder / number).write_bytes(content)
        name = number.rjust(len(path), "x")
        made = make_files(self.top / f"made{number}", {name: content})
        manifest = rewritten(
            made.manifest, self.top / f"{number}.quiver", lambda header: header.update(base=self.say(base))
        )
        manifest.write_bytes(manifest.read_bytes().replace(name.encode(), path.encode()))
        return self._read(manifest, made.opened().shard_digest(0), content)

    def _read(self, manifest: Path, shard: Digest, content: bytes) -> str:
        peer = PeerClient(self.daemon.url)
        try:
            digest = Digest.of(manifest.read_bytes())
            peer.put_manifest(digest, manifest.read_bytes())
            ranges = np.zeros(1, RANGE)
            ranges["length"] = len(content)
            statuses, data = peer.read(ReadRequest(digest, (shard,), ranges, 5000))
            if statuses[0] == RangeStatus.PRESENT:
                assert bytes(data) == content
            return RangeStatus(statuses[0]).name
        except QuiverError as error:
            return f"refused: {error}"
        finally:
            peer.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    top = tmp_path_factory.mktemp("world")
    for folder in ("allowed/imagenet/a", "allowed/other", "allowed/imagenet-secret", "secret"):
        (top / folder).mkdir(parents=True)
    ok = top / "allowed" / "imagenet"
    links: dict[str, Any] = {
        "out": "../../secret",
        "out-absolute": top / "secret",
        "inside": "a",
        "inside-absolute": ok / "a",
        "beside": "../other",
    }
    for name, target in links.items():
        (ok / name).symlink_to(target)
    (top / "alias").symlink_to(ok)
    with ExitStack() as stack:
        web = stack.enter_context(Web().serving())
        origins = [ok, f"{web.url}/allowed", top / "alias"]
        daemon = stack.enter_context(Daemon(top / "node", origins=origins))
        yield World(top, web, daemon)
        assert "Traceback" not in daemon.log


@pytest.mark.parametrize(
    "base",
    [
        *(
            "file://<ok>/",
            "file://<ok>",
            "file://localhost<ok>/",
            "FILE://<ok>/a/",
            "file://<ok>/%61/",
            "file://<ok>/inside/",
        ),
        *(
            "file://<ok>/inside-absolute/",
            "file://<top>/alias/",
            "file://<top>/alias/a/",
            "<web>/allowed/",
            "<web>/allowed/a/",
        ),
        "HTTP://<host>/%61llowed/",
    ],
)
def test_what_is_allowed_is_read(world: World, base: str) -> None:
    assert world.ask(base) == "PRESENT"


@pytest.mark.parametrize("path", ["a/###", "inside/###", "inside-absolute/###"])
def test_links_below_what_is_allowed_are_followed(world: World, path: str) -> None:
    assert world.ask("file://<ok>/", path) == "PRESENT"


@pytest.mark.fault("S6")
@pytest.mark.parametrize(
    "base",
    [
        *("file://<ok>/.\t./.\t./secret/", "file://<ok>/.\n./.\r./secret/", "file://<ok>/out?x/", "file://<ok>/out#x/"),
        *("file://<ok>/out/", "file://<ok>/out-absolute/", "file://<ok>/beside/", "file://<ok>/%6Fut/"),
        *("file://<ok>/../../secret/", "file://<ok>/./out/", "file://<ok>//out/", "file://<ok>/a/../out/"),
        *(
            "file://<ok>/%2e%2e/%2e%2e/secret/",
            "file://<ok>/..%2f..%2fsecret/",
            "file://<ok>/%252e%252e/%252e%252e/secret/",
        ),
        *("file://<ok>\\..\\..\\secret/", "file://<ok>/..\\..\\secret/", "file://<ok>/%5c..%5c..%5csecret/"),
        *("file://<ok>/%c0%ae%c0%ae/secret/", "file://<ok>/\uff0e\uff0e/\uff0e\uff0e/secret/", "file://<ok>-secret/"),
        *("file://<top>/secret/", "file:<top>/secret/", "file://x@<ok>/", "file://<ok>/out/.", "file://<ok>/out\0/"),
        *(
            "file:///proc/self/root<top>/secret/",
            "file://<top>/allowed/imagenet/../../secret/",
            "file://<ok>;/../secret/",
        ),
    ],
)
def test_no_base_leads_out_of_a_folder(world: World, base: str) -> None:
    before = world.daemon.metric("quiver_origin_read_bytes_total")
    assert world.ask(base) != "PRESENT"
    assert world.daemon.metric("quiver_origin_read_bytes_total") == before


@pytest.mark.fault("S6")
@pytest.mark.parametrize(
    "path",
    [
        *(
            "../../secret/###",
            "out/###",
            "out-absolute/###",
            "a/../../../secret/###",
            "a//###",
            "./###",
            "a/../out/###",
        ),
        *("..\\..\\secret\\###", "beside/../../../secret/###"),
    ],
)
def test_no_path_of_an_object_leads_out_of_a_folder(world: World, path: str) -> None:
    assert world.ask("file://<ok>/", path) != "PRESENT"


@pytest.mark.fault("S6")
@pytest.mark.parametrize(
    "base",
    [
        *("<web>/secret/", "<web>/allowed/../secret/", "<web>/allowed/%2e%2e/secret/", "<web>/allowed/..%2fsecret/"),
        *(
            "<web>/allowed/%252e%252e/secret/",
            "<web>/allowed\\..\\secret/",
            "<web>/allowed/..\\secret/",
            "<web>/allowed2/",
        ),
        *(
            "<web>/allowed/.\t./secret/",
            "<web>/allowed/.\n./secret/",
            "<web>/allowed/?/../secret/",
            "<web>/allowed#/secret/",
        ),
        *("http://<host>/allowed@<host>/../secret/", "http://user:pw@<host>/allowed/", "http://<host>@<host>/allowed/"),
        *("http://localhost:1/allowed/", "http://<host>.evil.example/allowed/", "https://<host>/allowed/"),
        *(f"<web>/allowed/redirect{status}{how}/" for status in (301, 302, 303, 307, 308) for how in ("near", "far")),
    ],
)
def test_no_base_leads_out_of_a_part_of_a_server(world: World, base: str) -> None:
    assert world.ask(base) != "PRESENT"
    assert not [path for path in world.web.asked if "secret" in path or not path.startswith("/allowed/")]


@pytest.mark.fault("S6")
@pytest.mark.parametrize(
    "path", ["../secret/###", "..%2fsecret/###", "%2e%2e/secret/###", "..\\secret/###", "a\r\nX: y/###"]
)
def test_no_path_of_an_object_leads_out_of_a_part_of_a_server(world: World, path: str) -> None:
    assert world.ask("<web>/allowed/", path) != "PRESENT"
    assert not [path for path in world.web.asked if "secret" in path or not path.startswith("/allowed/")]


def test_of_prefixes_inside_one_another_the_widest_counts(tmp_path: Path) -> None:
    files = make_files(tmp_path / "outer", {"x.png": b"fine"})
    inner = tmp_path / "outer" / "inner"
    inner.mkdir()
    (inner / "link").symlink_to("../data")
    manifest = rewritten(files.manifest, tmp_path / "m", lambda header: header.update(base=f"file://{inner}/link/"))
    origins = Origins([str(inner), str(tmp_path / "outer")], lambda read_bytes: None)
    data = bytearray(4)
    assert origins.of(Manifest.open(manifest)).read([0], memoryview(data)) == 4
    assert data == b"fine"
    origins.close()

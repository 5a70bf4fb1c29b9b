"""A daemon with TLS and tokens: a certificate names a machine, and only that of a node stands for a token."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from quiver.domain import HEADER, domain_named
from quiver.transport.tls import Credentials
from tests.support.daemon import Daemon
from tests.support.data import make_shard
from tests.support.tls import Pki, flags
from tests.support.tokens import Signer, bearer

SHARD, DATA = make_shard([b"sample" * 100])
SIGNER = Signer()
THEIRS, OTHERS = ({HEADER: str(domain_named(name))} for name in ("vision", "audio"))


class Shared(NamedTuple):
    """The daemon, and callers by their certificate."""

    daemon: Daemon
    callers: dict[str, Credentials]

    def ask(self, caller: str, method: str, path: str, headers: dict[str, str]) -> int:
        context = self.callers[caller].client()
        with contextlib.closing(http.client.HTTPSConnection(*self.daemon.address, timeout=30, context=context)) as it:
            it.request(method, path, headers=headers)
            return it.getresponse().status


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    where = tmp_path_factory.mktemp("both")
    pki = Pki(where / "pki")
    SIGNER.publish(where / "keys")
    callers = {
        "nobody": Credentials(pki.anonymous()),
        "client": Credentials(pki.client("alice")),
        "node": Credentials(pki.node("b")),
    }
    own = ("--rack", "r7", "--token-keys", str(where / "keys"), *flags(pki.node("a")))
    with Daemon(where / "data", *own, tls=callers["nobody"], token=SIGNER.token("vision")) as daemon:
        assert daemon.ask("PUT", f"/v1/shards/{SHARD}", DATA)[0] == 201
        yield Shared(daemon, callers)


@pytest.mark.fault("S8")
@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    ("caller", "headers", "status"),
    [
        ("nobody", {}, 401),
        ("nobody", THEIRS, 401),
        ("client", {}, 401),
        ("client", THEIRS, 401),
        ("nobody", bearer(SIGNER.token("vision")), 200),
        ("client", bearer(SIGNER.token("vision")), 200),
        ("client", bearer(SIGNER.token("vision", aud="r8")), 401),
        ("client", bearer(SIGNER.token("audio")) | THEIRS, 404),
        ("client", bearer(SIGNER.token("vision", rights="operate")), 403),
        ("node", {}, 404),
        ("node", THEIRS, 200),
        ("node", OTHERS, 404),
        ("node", {HEADER: "vision"}, 400),
    ],
)
def test_a_shard_is_read_with_a_token_of_its_domain_or_by_a_member_that_acts_for_it(
    shared: Shared, caller: str, headers: dict[str, str], status: int, method: str
) -> None:
    assert shared.ask(caller, method, f"/v1/shards/{SHARD}", headers) == status


@pytest.mark.fault("S8")
@pytest.mark.parametrize("path", ["/v1/ring", "/v1/status", "/metrics", "/%6detrics"])
def test_a_client_s_certificate_alone_sees_nothing_of_a_daemon_that_requires_tokens(shared: Shared, path: str) -> None:
    assert [shared.ask("client", method, path, {}) for method in ("GET", "HEAD")] == [401, 401]
    assert shared.ask("client", "GET", "/healthz", {}) == 200

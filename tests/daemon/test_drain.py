"""Draining: what only a daemon holds goes to its next owners. Real daemons, with etcd and without."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quiver.handover import HandoverAnswer, HandoverRequest, Taken
from quiver.ring import Member, Ring
from quiver.wire import ErrorBody, RingView
from quiver_client.cli.main import run
from tests.daemon.test_rack import origin_bytes, put_manifest, whole_dataset
from tests.support.daemon import Daemon, Patient, rack_of
from tests.support.data import Files, make_files, random_files, rebased, shard_bytes_of
from tests.support.etcd import Etcd, free_ports
from tests.support.servers import CountingOrigin, HostileServer, counting_origin
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("patient_reads")

NODES = "abc"


@pytest.fixture
def local(tmp_path: Path) -> Files:
    return make_files(tmp_path, random_files(120, seed=1), shard_bytes="64KiB")


@contextlib.contextmanager
def rack(etcd: Etcd, where: Path, origin: CountingOrigin, *flags: str) -> Iterator[dict[str, Daemon]]:
    """Run three daemons whose ring etcd keeps."""
    with contextlib.ExitStack() as stack:
        daemons = {}
        for name in NODES:
            ring = ("--etcd", etcd.url, "--rack", where.name, "--node-id", name)
            daemons[name] = Patient(where / name, *ring, *flags, origins=[origin.url])
            stack.callback(daemons[name].kill)
            daemons[name].start()
        for daemon in daemons.values():
            daemon.wait_until_serving()
        for name in NODES:
            until_ring(daemons, name, "up", len(NODES))
        yield daemons


def until_ring(daemons: dict[str, Daemon], name: str, state: str, count: int) -> None:
    """Wait until all daemons see a member in a state, and so many members."""

    def seen(daemon: Daemon) -> bool:
        members = daemon.json("/v1/ring")["members"]
        return len(members) == count and any(it["id"] == name and it["state"] == state for it in members)

    until(lambda: all(map(seen, daemons.values())))


def cache_of(daemons: Sequence[Daemon]) -> str:
    return ",".join(daemon.url for daemon in daemons)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run ``quiver``; return the exit status, and what it printed on both streams."""
    capsys.readouterr()
    code = run(list(arguments))
    told = capsys.readouterr()
    return code, told.out, told.err


def drained(capsys: pytest.CaptureFixture[str], daemons: dict[str, Daemon], *arguments: str) -> dict[str, Any]:
    """Run ``quiver drain`` or ``undrain``; return what it says."""
    code, out, err = command(capsys, *arguments, "--cache", cache_of([*daemons.values()]), "--json")
    assert code == 0, err
    status: dict[str, Any] = json.loads(out)
    return status


@pytest.mark.fault("M9")
def test_what_drained_daemons_held_is_not_read_from_the_origin_again(
    tmp_path: Path, local: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    with Etcd() as etcd, counting_origin(local.folder) as origin, rack(etcd, tmp_path / "r", origin) as daemons:
        remote = rebased(local, origin.url, tmp_path / "remote.quiver")
        whole_dataset(remote, cache_of([*daemons.values()])).close()
        read = origin_bytes([*daemons.values()])

        status = drained(capsys, daemons, "drain", "b", "--deadline", "60s")
        assert status["state"] == "drained"
        assert status["handed_over_bytes"] + status["elsewhere_bytes"] == status["held_bytes"] > 0
        assert status["handed_over_bytes"] > 0
        assert set(status["receivers"]) <= {"a", "c"}
        assert daemons["b"].metric("quiver_handed_over_bytes_total") == status["handed_over_bytes"]
        until_ring(daemons, "b", "draining", 3)
        assert daemons["b"].ask("GET", "/readyz")[0] == 503
        again = drained(capsys, daemons, "drain", "b", "--deadline", "60s")
        assert again["handed_over_bytes"] == status["handed_over_bytes"], "and nothing moved twice:"
        assert daemons["b"].metric("quiver_handed_over_bytes_total") == status["handed_over_bytes"]

        assert drained(capsys, daemons, "undrain", "b")["state"] == "up"
        assert drained(capsys, daemons, "undrain", "b")["state"] == "up"
        until_ring(daemons, "b", "up", 3)

        both = [threading.Thread(target=daemons[name].ask, args=("POST", "/v1/drain", b"{}")) for name in "ac"]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        for name in "ac":
            until(lambda name=name: daemons[name].json("/v1/drain")["state"] == "drained")
            told = daemons[name].json("/v1/drain")
            assert told["left_bytes"] == told["refused_bytes"] == 0, told
            assert set(told["receivers"]) <= {"b"}, "a member that drains receives nothing"
        assert daemons["b"].status()["shards"] == remote.opened().shard_count
        assert origin_bytes([*daemons.values()]) == read
        assert [daemons[name].stop() for name in "ac"] == [0, 0]
        before = origin_bytes([daemons["b"]])
        whole_dataset(remote, daemons["b"].url).close()
        assert origin_bytes([daemons["b"]]) == before


@pytest.mark.fault("M9")
def test_sigterm_hands_over_past_a_silent_member_and_ends(tmp_path: Path, local: Files) -> None:
    with rack_of(3, tmp_path / "rack", "--drain-seconds", "100", origins=[local.folder]) as daemons:
        leaving, silent, taking = daemons
        whole_dataset(local, cache_of(daemons)).close()
        held = leaving.status()["shards"], taking.status()["shards"]
        silent.signal(signal.SIGSTOP)
        assert leaving.stop() == 0
        assert f"in {held[0]} shards to 1 member" in leaving.log, leaving.log
        assert taking.status()["shards"] == sum(held)


@pytest.mark.fault("M9")
def test_a_receiver_that_takes_a_list_and_then_hangs_costs_no_other_its_files(tmp_path: Path, local: Files) -> None:
    offers: list[int] = []

    def answer(connection: socket.socket, request: bytes) -> None:
        head, _, body = request.partition(b"\r\n\r\n")
        packed = b"ok"
        if b" /v1/handover " in head:
            asked = HandoverRequest.decode(body)
            if asked.take:
                offers.append(len(asked.shards))
                server.gone.wait(60)
                return
            absent = bytes([Taken.ABSENT])
            packed = HandoverAnswer(absent * len(asked.shards), absent * len(asked.manifests)).encode()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed)

    ports = free_ports(2)
    with HostileServer(answer) as server:
        peers = ",".join([*(f"http://127.0.0.1:{port}" for port in ports), server.url])
        flags = ("--peers", peers, "--drain-seconds", "100")
        with (
            Daemon(tmp_path / "a", *flags, port=ports[0], origins=[local.folder]) as leaving,
            Daemon(tmp_path / "b", *flags, port=ports[1], origins=[local.folder]) as taking,
        ):
            manifest = local.opened()
            for number in range(manifest.shard_count):
                digest, data = shard_bytes_of(manifest, number)
                assert leaving.ask("PUT", f"/v1/shards/{digest}", data)[0] == 201
            assert leaving.stop() == 0
            assert offers, "it was asked to take its part"
            assert taking.status()["shards"] == manifest.shard_count
            assert f"in {manifest.shard_count} shards to 1 member" in leaving.log


@pytest.mark.fault("M9")
def test_what_is_left_at_the_deadline_is_said_and_the_daemon_ends(tmp_path: Path, local: Files) -> None:
    """Its only receiver says that it fetches, and never does."""

    def answer(connection: socket.socket, request: bytes) -> None:
        head, _, body = request.partition(b"\r\n\r\n")
        packed = b"ok"
        if b" /v1/handover " in head:
            asked = HandoverRequest.decode(body)
            status = bytes([Taken.PENDING if asked.take else Taken.ABSENT])
            packed = HandoverAnswer(status * len(asked.shards), status * len(asked.manifests)).encode()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed)

    [port] = free_ports(1)
    with HostileServer(answer) as server:
        peers = f"http://127.0.0.1:{port},{server.url}"
        with Daemon(tmp_path / "a", "--peers", peers, "--drain-seconds", "1", port=port) as leaving:
            manifest = local.opened()
            digest, data = shard_bytes_of(manifest, 0)
            assert leaving.ask("PUT", f"/v1/shards/{digest}", data)[0] == 201
            assert leaving.stop() == 0
            assert "in 1 shard were not handed over" in leaving.log


@pytest.mark.fault("M9")
def test_a_daemon_alone_has_nobody_to_hand_over_to_and_a_second_signal_ends_it_at_once(
    tmp_path: Path, local: Files
) -> None:
    with counting_origin(local.folder) as origin:
        remote = rebased(local, origin.url, tmp_path / "remote.quiver")
        with Daemon(tmp_path / "d", "--drain-seconds", "100", origins=[origin.url]) as daemon:
            whole_dataset(remote, daemon.url).close()
            with socket.create_connection(daemon.address, 20) as busy:  # an upload that does not come
                busy.sendall(b"PUT /v1/shards/%064x HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n" % 1)
                until(lambda: daemon.metric("quiver_under_way") >= 1)
                daemon.signal(signal.SIGTERM)
                until(lambda: "drains" in daemon.log)
                until(lambda: "hands nothing over: the rack has no other member" in daemon.log)
                daemon.signal(signal.SIGTERM)
                assert daemon.wait() == 0
            assert "told again to end" in daemon.log


@pytest.mark.fault("M9")
def test_a_daemon_that_was_told_to_end_is_not_undrained_and_ends(tmp_path: Path) -> None:
    with Daemon(tmp_path / "d", "--drain-seconds", "100") as daemon:
        with socket.create_connection(daemon.address, 20) as busy:  # an upload that does not come
            busy.sendall(b"PUT /v1/shards/%064x HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n" % 1)
            until(lambda: daemon.metric("quiver_under_way") >= 1)
            daemon.signal(signal.SIGTERM)
            until(lambda: daemon.json("/v1/drain")["state"] == "drained")
            status, body, _ = daemon.ask("DELETE", "/v1/drain")
            assert status == 400
            assert "was told to end" in json.loads(body)["message"]
            assert daemon.json("/v1/drain")["state"] == "drained"
        assert daemon.wait() == 0


@pytest.mark.fault("M9")
def test_an_eviction_notice_begins_a_drain_and_what_has_no_room_elsewhere_is_refused(
    tmp_path: Path, local: Files
) -> None:
    ports = free_ports(2)
    peers = ",".join(f"http://127.0.0.1:{port}" for port in ports)
    flags = ("--peers", peers, "--eviction-notice", str(tmp_path / "evict"))
    room = "256KiB"
    with (
        Daemon(tmp_path / "a", *flags, port=ports[0], origins=[local.folder]) as leaving,
        Daemon(tmp_path / "b", "--peers", peers, port=ports[1], capacity=room, origins=[local.folder]) as small,
    ):
        put_manifest(leaving, local)
        for number in range(local.opened().shard_count):
            digest, data = shard_bytes_of(local.opened(), number)
            assert leaving.ask("PUT", f"/v1/shards/{digest}", data)[0] == 201
        (tmp_path / "evict").touch()
        until(lambda: leaving.json("/v1/drain")["state"] == "drained")
        status = leaving.json("/v1/drain")
        assert "this machine is about to be taken" in leaving.log
        assert 0 < status["handed_over_bytes"] <= 256 << 10
        assert status["refused_bytes"] == status["held_bytes"] - status["handed_over_bytes"]
        assert status["manifests"] == 1, "so that the other one can go on filling"
        assert small.status()["resident_bytes"] <= 256 << 10
        assert leaving.status()["shards"] == local.opened().shard_count, "and it serves on"


# -- the command -------------------------------------------------------------------------------------------------------


def test_an_unknown_node_a_folder_and_a_wrong_time_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Daemon(tmp_path / "d", "--node-id", "n1") as daemon:
        for arguments, code, said in (
            (("drain", "n7", "--cache", daemon.url), 1, "no member 'n7'; there are: n1"),
            (("undrain", "n7", "--cache", daemon.url), 1, "there are: n1"),
            (("drain", "n1", "--cache", f"file://{tmp_path}"), 2, "a folder has no daemons"),
            (("drain", "n1", "--cache", daemon.url, "--deadline", "soon"), 2, "not a time: 'soon'"),
            (("drain", "n1", "--cache", daemon.url, "--deadline", "-1s"), 2, "not a time"),
            (("drain", "n1"), 2, "--cache"),
        ):
            ended, _, err = command(capsys, *arguments)
            assert (ended, err.count("\n")) == (code, 1), err
            assert said in err
        out = command(capsys, "drain", "n1", "--cache", daemon.url, "--deadline", "0")[1]
        assert out == "n1 is drained; nothing was handed over: no time was given for it\n"
        code, out, _ = command(capsys, "drain", "n1", "--cache", daemon.url, "--deadline", "2min")
        assert code == 0
        assert out == "n1 is drained; nothing was handed over: the rack has no other member\n"
        assert command(capsys, "undrain", "n1", "--cache", daemon.url)[1] == "n1 is up\n"
        for body in (b"[]", b'{"deadline_seconds": -1}', b'{"deadline_seconds": "x"}', b"\xff"):
            assert daemon.ask("POST", "/v1/drain", body)[0] == 400
        assert daemon.status()["state"] == "up"


def test_a_daemon_of_an_older_version_is_named_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(connection: socket.socket, request: bytes) -> None:
        ring = RingView.of(Ring.of("r", [Member("old", server.url)]))
        known = b" /v1/ring " in request
        body = msgspec.json.encode(ring if known else ErrorBody("http", "Not Found"))
        head = b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n" % (200 if known else 404, len(body))
        connection.sendall(head + body)

    with HostileServer(answer) as server:
        for verb in ("drain", "undrain"):
            code, _, err = command(capsys, verb, "old", "--cache", server.url)
            assert (code, err.count("\n")) == (1, 1)
            assert "too old" in err

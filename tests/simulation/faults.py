"""What goes wrong in a seed: each kind of fault begins, and ends after its time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from tests.simulation.etcd import junk
from tests.simulation.scenario import Fault

if TYPE_CHECKING:
    from tests.simulation.world import World

SLOWER: Final = 200.0  # a slow daemon's latency: 0.4 s, and a timeout at times
Begin = Callable[["World", Fault], bool | None]


def begin(world: World, fault: Fault) -> bool:
    """Begin a fault; return whether there was something that it could hit."""
    kinds: dict[str, Begin] = {
        "crash": _crash,
        "crash and lose the disk": _crash,
        "suspend a daemon": lambda world, fault: world.daemon(fault).suspend(fault.seconds),
        "suspend a rank": _suspend,
        "suspend a job": _suspend,
        "cut": _cut,
        "isolate a daemon": _cut,
        "slow": _slow,
        "lose messages": lambda world, fault: _for_a_while(world, fault, world.network, "loss", 0.2),
        "deliver twice": lambda world, fault: _for_a_while(world, fault, world.network, "duplicates", 0.3),
        "flip bits": _flip,
        "rot": _rot,
        "kill": _kill,
        "join": lambda world, fault: world.join(),
        "leave": _leave,
        "etcd away": _etcd_away,
        "etcd loses its data": _etcd_away,
        "etcd lease revoked": _revoke,
        "etcd watches stuck": lambda world, fault: _for_a_while(world, fault, world.etcd, "stuck", True),
        "etcd watches replay": lambda world, fault: _for_a_while(world, fault, world.etcd, "replays", True),
        "etcd junk": _junk,
        "origin away": lambda world, fault: _for_a_while(world, fault, world.origin, "up", False),
        "origin slow": lambda world, fault: _for_a_while(world, fault, world.origin, "slowness", 20.0),
        "any rings": lambda world, fault: _for_a_while(world, fault, world, "any_rings", True),
    }
    return kinds[fault.kind](world, fault) is not False


def _for_a_while(world: World, fault: Fault, target: Any, name: str, value: object) -> None:
    usual = {"loss": 0.0, "duplicates": 0.0, "corruption": 0.0, "up": True, "slowness": 1.0}.get(name, False)
    setattr(target, name, value)
    world.clock.after(fault.seconds, lambda: setattr(target, name, usual))


def _crash(world: World, fault: Fault) -> bool:
    daemon = world.daemon(fault)
    if not daemon.alive:
        return False
    daemon.crash(loses_disk=fault.kind != "crash")
    world.clock.after(fault.seconds, lambda: daemon.start() if not daemon.draining else None)
    return True


def _suspend(world: World, fault: Fault) -> bool:
    job = world.job(fault)
    ranks = job.ranks if fault.kind == "suspend a job" else job.ranks[:1]
    for rank in ranks:
        rank.suspend(fault.seconds)
    world.clock.after(fault.seconds, functools.partial(world.clock.after, 0.001, job.step_if_ready))
    return bool(ranks)


def _cut(world: World, fault: Fault) -> None:
    names = [name for name in world.network.processes if world.chance.random() < 0.5]
    cut = frozenset(names if fault.kind == "cut" else [world.daemon(fault).name])
    world.network.cuts.append(cut)
    world.clock.after(fault.seconds, lambda: world.network.cuts.remove(cut))


def _slow(world: World, fault: Fault) -> None:
    slow, name = world.network.slow, world.daemon(fault).name
    slow[name] = SLOWER
    world.clock.after(fault.seconds, lambda: slow.pop(name, None))


def _flip(world: World, fault: Fault) -> None:
    _for_a_while(world, fault, world.network, "corruption", world.chance.choice([0.05, 0.3, 0.9]))


def _rot(world: World, fault: Fault) -> bool:
    """Flip a bit of a shard on disk, verified or not."""
    disk = world.daemon(fault).disk
    if not disk:
        return False
    stored = disk[world.chance.choice(list(disk))]
    at = world.chance.randrange(len(stored.data))
    stored.data = stored.data[:at] + bytes([stored.data[at] ^ 1]) + stored.data[at + 1 :]
    return True


def _kill(world: World, fault: Fault) -> bool:
    job = world.job(fault)
    if not job.running:
        return False
    job.kill()
    return True


def _leave(world: World, fault: Fault) -> bool:
    """Drain, and stop for good."""
    daemon = world.daemon(fault)
    others = [each for each in world.daemons if each.alive and each is not daemon and not each.draining]
    if not daemon.alive or daemon.draining or not others:
        return False
    daemon.drain()

    def stop() -> None:
        if daemon.alive:
            daemon.crash(loses_disk=False)
            if daemon.seat is not None:
                world.etcd.revoke(daemon.seat.state.lease)

    world.clock.after(1.0, stop)
    return True


def _etcd_away(world: World, fault: Fault) -> None:
    world.etcd.stop(loses_data=fault.kind != "etcd away")
    world.clock.after(fault.seconds, world.etcd.start)


def _revoke(world: World, fault: Fault) -> None:
    seat = world.daemon(fault).seat
    if seat is not None:
        world.etcd.revoke(seat.state.lease)


def _junk(world: World, fault: Fault) -> None:
    key, value = junk(world.chance, [daemon.member for daemon in world.daemons])
    world.etcd.write(key, value)
    world.clock.after(fault.seconds, lambda: world.etcd.delete(key))

"""What goes wrong in a soak: each mishap strikes a running rack, and is undone by ``heal`` or by itself.

Which one strikes when, and whom, is drawn from the soak's random numbers. At most one daemon is dead or stopped at a
time; toxics, an absent etcd and a failing origin come on top of that.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.chaos import toxics
from tests.chaos.history import Client
from tests.chaos.origin import Fault, throttle
from tests.chaos.rack import ChaosRack

ORIGIN_FAULTS: Final = (
    throttle("1", chance=0.05),
    throttle("1", 503, chance=0.05),
    Fault("500", 500, chance=0.1),
    Fault("slow", bytes_per_second=64 << 10, chance=0.2),
    Fault("truncated", truncated_at=100, chance=0.1),
    Fault("reset", reset_at=100, chance=0.1),
    Fault("hangs", hangs_at=100, chance=0.01),
)
# Not bits flipped on the way from the origin: a reader cannot tell them from an object that changed, and says so.
ORIGIN_TOXICS: Final[tuple[Callable[[], toxics.Toxic], ...]] = (
    lambda: toxics.Latency(0.02, 0.1),
    lambda: toxics.Bandwidth(2 << 20),
    lambda: toxics.Slices(64),
    lambda: toxics.Reset(20_000, chance=0.1),
)


class Mishaps:
    """Strikes a rack and its clients, and counts what struck."""

    def __init__(self, rack: ChaosRack, rng: random.Random) -> None:
        self.rack, self.rng = rack, rng
        self.struck: Counter[str] = Counter()
        self.clients: list[Client] = []
        self._down: int | None = None  # the daemon that is dead or stopped
        self._away = ""  # how etcd is away
        self._all: dict[str, tuple[int, Callable[[], bool]]] = {
            "kill a daemon": (3, self._kill_daemon),
            "stop a daemon": (3, self._stop_daemon),
            "bring the daemon back": (6, self._bring_back),
            "take etcd away": (2, self._take_etcd),
            "bring etcd back": (4, self._return_etcd),
            "a toxic before a daemon": (6, self._add_toxic),
            "a toxic before the origin": (2, self._add_origin_toxic),
            "no toxics": (3, self._clear),
            "reset all connections of a daemon": (2, self._sever),
            "the origin fails": (3, self._fail_origin),
            "the origin is down": (1, self._origin_down),
            "the origin is well": (4, self._heal_origin),
            "flip a bit in a file": (3, self._flip),
            "delete a file": (2, self._delete),
            "kill a job": (3, self._kill_job),
        }

    def strike(self) -> str:
        """Let something happen; return what."""
        names, weights = list(self._all), [weight for weight, _ in self._all.values()]
        while True:
            name = self.rng.choices(names, weights)[0]
            if self._all[name][1]():
                self.struck[name] += 1
                return name

    def heal(self) -> None:
        """Undo everything that is still wrong."""
        self._bring_back()
        self._return_etcd()
        self._clear()
        self._heal_origin()

    # -- daemons and etcd ---------------------------------------------------------------------------------------------

    def _kill_daemon(self) -> bool:
        if self._down is not None:
            return False
        self._down = self.rng.randrange(len(self.rack.daemons))
        self.rack.kill(self._down)
        return True

    def _stop_daemon(self) -> bool:
        if self._down is not None:
            return False
        self._down = self.rng.randrange(len(self.rack.daemons))
        self.rack.freeze(self._down)
        return True

    def _bring_back(self) -> bool:
        if self._down is None:
            return False
        if self.rack.daemons[self._down] in self.rack.alive():
            self.rack.thaw(self._down)
        else:
            self.rack.restart(self._down)
        self._down = None
        return True

    def _take_etcd(self) -> bool:
        if self._away or self.rack.etcd is None:
            return False
        self._away = self.rng.choice(("killed", "frozen", "cut off"))
        if self._away == "killed":
            self.rack.etcd.kill()
        elif self._away == "frozen":
            self.rack.etcd.freeze()
        else:
            self.rack.etcd_proxy.refuse()
        return True

    def _return_etcd(self) -> bool:
        if not self._away or self.rack.etcd is None:
            return False
        if self._away == "killed":
            self.rack.etcd.start()
        elif self._away == "frozen":
            self.rack.etcd.thaw()
        else:
            self.rack.etcd_proxy.listen()
        self._away = ""
        return True

    # -- the network --------------------------------------------------------------------------------------------------

    def _add_toxic(self) -> bool:
        proxy = self.rng.choice(self.rack.proxies)
        if proxy.active:
            return False
        proxy.add(self.rng.choice(toxics.EVERY)())
        return True

    def _add_origin_toxic(self) -> bool:
        if self.rack.origin_proxy.active:
            return False
        self.rack.origin_proxy.add(self.rng.choice(ORIGIN_TOXICS)())
        return True

    def _clear(self) -> bool:
        busy = [proxy for proxy in self.rack.network.proxies if proxy.active]
        for proxy in busy:
            proxy.clear()
        return bool(busy)

    def _sever(self) -> bool:
        self.rng.choice(self.rack.proxies).sever()
        return True

    # -- the origin ---------------------------------------------------------------------------------------------------

    def _fail_origin(self) -> bool:
        self.rack.origin.all(self.rng.choice(ORIGIN_FAULTS))
        return True

    def _origin_down(self) -> bool:
        self.rack.origin_proxy.refuse()
        return True

    def _heal_origin(self) -> bool:
        self.rack.origin.heal()
        self.rack.origin_proxy.listen()
        return True

    # -- files and jobs -----------------------------------------------------------------------------------------------

    def _file(self) -> Path | None:
        files = self.rng.choice(self.rack.daemons).files()
        return self.rng.choice(files) if files else None

    def _flip(self) -> bool:
        path = self._file()
        try:
            if path is None or not path.stat().st_size:
                return False
            with path.open("r+b") as file:
                at = self.rng.randrange(path.stat().st_size)
                file.seek(at)
                byte = file.read(1)[0] ^ (1 << self.rng.randrange(8))
                file.seek(at)
                file.write(bytes([byte]))
        except FileNotFoundError:  # evicted meanwhile
            return False
        return True

    def _delete(self) -> bool:
        path = self._file()
        if path is None:
            return False
        path.unlink(missing_ok=True)
        return True

    def _kill_job(self) -> bool:
        client = self.rng.choice(self.clients)
        if client.script.ended:
            return False
        client.kill()
        client.resume()
        return True

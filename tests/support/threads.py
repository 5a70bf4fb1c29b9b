"""Which of Quiver's threads run: tests wait for those that they started to end.

A trainer that an earlier file of tests used may hold a loop in a reference cycle, and with it the threads of that loop,
until the garbage collector happens to run. So threads that ran before a file's first test are none of its business.
"""

from __future__ import annotations

import threading
import weakref

_earlier: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def leave_out_earlier() -> None:
    """Leave the threads that run now out of what ``alive`` returns. Called before the first test of each file."""
    _earlier.clear()
    _earlier.update(threading.enumerate())


def alive(prefix: str = "quiver-") -> list[str]:
    """Return the names of Quiver's running threads that this file's tests started."""
    running = [thread.name for thread in threading.enumerate() if thread not in _earlier]
    return sorted(name for name in running if name.startswith(prefix))

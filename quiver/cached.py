"""``cached_property`` without a lock.

Before Python 3.12, ``functools.cached_property`` holds one lock per class while it computes. A process that is forked
while a thread computes inherits the lock held, and its first use of the property blocks for ever. Here, threads that
race compute the value twice, and one of the two values is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):
    """A method that is called once per instance; from then on the attribute is what it returned."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...

    def __get__(self, instance: object | None, owner: type | None = None) -> Self | T:
        if instance is None:
            return self
        value: T = instance.__dict__.setdefault(self._name, self._compute(instance))
        return value

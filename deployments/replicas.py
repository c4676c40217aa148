"""Which engine replicas exist: what Serve's request router knows, made visible to our own router in the same process.

Serve pickles a request router class *by value* with its module, so module globals there would be copies; this module
is imported by reference on both sides and is the meeting point. Serve calls `publish` from its own thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_lock = threading.Lock()
_replicas: dict[str, frozenset[str]] = {}
_listeners: dict[str, list[Callable[[], None]]] = {}


def publish(deployment: str, names: frozenset[str]) -> None:
    """Replace the known replicas of `deployment` and tell the listeners if they changed."""
    with _lock:
        if _replicas.get(deployment) == names:
            return
        _replicas[deployment] = names
        listeners = list(_listeners.get(deployment, ()))
    for listener in listeners:
        listener()


def current(deployment: str) -> frozenset[str]:
    """The replicas of `deployment` that accept requests, as last published."""
    with _lock:
        return _replicas.get(deployment, frozenset())


def subscribe(deployment: str, listener: Callable[[], None]) -> None:
    """Call `listener` after each change, from whatever thread published it."""
    with _lock:
        _listeners.setdefault(deployment, []).append(listener)

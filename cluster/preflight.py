"""What a machine needs before anything is started; each missing thing is one clear line."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import psutil

GIB = 2**30
ENGINE_GIB = 3.2  # one CPU engine: replica, scheduler and detokenizer, about 1 GiB each (docs/log.md)
BASE_GIB = 1.5  # Ray and the router


class NotReady(RuntimeError):
    """Something that the machine lacks; the message says what and what to do."""


def check(host: str, port: int, engines: int) -> None:
    """Raise NotReady for the first thing that is missing.

    Args:
        host, port: where HTTP will listen; must be free.
        engines: CPU engines that will run at the same time.
    """
    if sys.version_info[:2] != (3, 11):
        raise NotReady(f"Python 3.11 is needed; this is {sys.version.split()[0]}. Run: make PYTHON=/path/to/python3.11")
    need = BASE_GIB + ENGINE_GIB * engines
    free = available_bytes() / GIB
    if free < need:
        raise NotReady(
            f"{engines} engines need about {need:.1f} GiB of memory; {free:.1f} GiB are free. "
            "Close something, or lower engine.num_replicas in the config."
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise NotReady(
                f"{host}:{port} cannot be used ({error.strerror}). Stop what listens there "
                f"(ss -ltnp 'sport = :{port}'), or change http_options.port in the config."
            ) from error


def available_bytes() -> int:
    """Free memory, the container's limit included."""
    free = int(psutil.virtual_memory().available)
    limit = Path("/sys/fs/cgroup/memory.max")
    used = Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
        free = min(free, int(text) - int(used.read_text()))
    return free

"""Starting an engine's children and stopping them again, without taking anybody else's process along.

SGLang's Engine kills every child of its process on shutdown, which in a Ray driver or a test session are not all its
own, and when a child fails at start it says "see the error messages above". Here each Engine knows its own processes,
and a child's reason for failing becomes the parent's exception.
"""

import logging
import traceback
from collections.abc import Iterable
from contextvars import ContextVar
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

log = logging.getLogger(__name__)

# The processes of the Engine under construction; a context variable, since SGLang launches them in class methods.
spawned: ContextVar[list[BaseProcess]] = ContextVar("spawned")


class StartupError(RuntimeError):
    """A scheduler process did not come up; the message carries the child's own error."""


def failure(error: BaseException) -> dict[str, str]:
    """What the ready pipe carries in place of the scheduler's init info when the start failed."""
    text = "".join(traceback.format_exception(error))
    return {"status": "failed", "error": f"{type(error).__name__}: {error}", "traceback": text}


def remember(processes: Iterable[BaseProcess]) -> None:
    """Add to the processes of the Engine under construction, if there is one."""
    spawned.get([]).extend(processes)


def wait_for_schedulers(upstream: Any) -> Any:
    """Correction for engine.py's _wait_for_scheduler_ready: whichever rank fails first is heard, with its reason."""

    def _wait_for_scheduler_ready(readers: list[Any], processes: list[BaseProcess]) -> list[dict[str, Any]]:
        infos: list[dict[str, Any] | None] = [None] * len(readers)
        while None in infos:
            waiting = [reader for reader, info in zip(readers, infos, strict=True) if info is None]
            ready = wait([*waiting, *(p.sentinel for p in processes)])
            for rank, reader in enumerate(readers):
                if infos[rank] is None and reader in ready:
                    infos[rank] = _receive(reader, rank, processes)
            for rank, process in enumerate(processes):
                if process.sentinel in ready and not any(reader in ready for reader in waiting):
                    raise _died(rank, process)
        return [info for info in infos if info is not None]

    return _wait_for_scheduler_ready


def _receive(reader: Any, rank: int, processes: list[BaseProcess]) -> dict[str, Any]:
    try:
        info: dict[str, Any] = reader.recv()
    except EOFError as error:
        raise _died(rank, processes[rank]) from error
    if info["status"] != "ready":
        log.error("Scheduler of rank %d:\n%s", rank, info.get("traceback", info))
        raise StartupError(f"the scheduler of rank {rank} did not start: {info.get('error', info)}")
    return info


def _died(rank: int, process: BaseProcess) -> StartupError:
    process.join(timeout=10)
    hint = "; -9 is usually the kernel's out-of-memory killer" if process.exitcode == -9 else ""
    return StartupError(f"the scheduler process of rank {rank} died at start with exit code {process.exitcode}{hint}")


def kill(processes: Iterable[BaseProcess], timeout_s: float = 30.0) -> None:
    """End these processes and their descendants and reap them.

    Raises:
        TimeoutError: some are still there after timeout_s.
    """
    doomed: list[psutil.Process] = []
    owned = list(processes)
    for process in owned:
        try:
            top = psutil.Process(process.pid)
            doomed += [*top.children(recursive=True), top]
        except psutil.NoSuchProcess:
            continue
    for victim in doomed:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue
    for process in owned:
        process.join(timeout_s)
    _, alive = psutil.wait_procs(doomed, timeout=timeout_s)
    if alive:
        raise TimeoutError(f"still running after SIGKILL: {alive}")

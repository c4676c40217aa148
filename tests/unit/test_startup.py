"""A child's reason for not starting becomes the parent's exception; only our own processes are ended."""

import multiprocessing as mp
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from kimi_draft import startup
from kimi_draft.startup import StartupError, failure, kill, wait_for_schedulers

SPAWN = mp.get_context("spawn")
WRITERS: list[Any] = []


def ready(writer: Any) -> None:
    writer.send({"status": "ready", "rank": 0})
    time.sleep(60)


def fails(writer: Any) -> None:
    try:
        raise ValueError("correction 'x' did not take effect")
    except ValueError as error:
        writer.send(failure(error))


def dies(writer: Any) -> None:
    sys.exit(3)


def never_ready(writer: Any) -> None:
    time.sleep(60)


def start(*targets: Any) -> tuple[list[Any], list[Any]]:
    readers, processes = [], []
    for target in targets:  # like SGLang, this process keeps the writing ends open: a dead child makes no end of file
        reader, writer = SPAWN.Pipe(duplex=False)
        process = SPAWN.Process(target=target, args=(writer,))
        process.start()
        WRITERS.append(writer)
        readers.append(reader)
        processes.append(process)
    return readers, processes


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (fails, "rank 1 did not start: ValueError: correction 'x' did not take effect"),
        (dies, "rank 1 died at start with exit code 3"),
    ],
)
def test_the_first_failure_is_heard_whichever_rank_it_is(second: Any, message: str) -> None:
    """Upstream waits for rank 0 alone, which here never gets ready."""
    readers, processes = start(never_ready, second)
    try:
        with pytest.raises(StartupError, match=message):
            wait_for_schedulers(None)(readers, processes)
    finally:
        kill(processes)


def test_all_ready() -> None:
    readers, processes = start(ready, ready)
    try:
        assert [info["status"] for info in wait_for_schedulers(None)(readers, processes)] == ["ready", "ready"]
    finally:
        kill(processes)


def test_kill_takes_descendants_and_nobody_else() -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    _, processes = start(never_ready)
    try:
        kill(processes)
        kill(processes)
        assert not psutil.pid_exists(processes[0].pid)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_processes_are_remembered_only_while_an_engine_is_built() -> None:
    startup.remember([object()])  # type: ignore[list-item]
    mine: list[Any] = []
    token = startup.spawned.set(mine)
    startup.remember(["process"])  # type: ignore[list-item]
    startup.spawned.reset(token)
    startup.remember(["later"])  # type: ignore[list-item]
    assert mine == ["process"]

"""A scheduler dies under load: nothing hangs, nobody is told a lie, the replica is replaced."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil

from kimi_draft.tiny.task import sample
from tests.serve.conftest import Service, until


def scheduler_pids() -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if "sglang::scheduler" in " ".join(p.info["cmdline"] or [])]


def test_a_dead_scheduler_is_noticed_and_its_replica_replaced(service: Service) -> None:
    until(lambda: len(service.state()["replicas"]) == 2, 120, "two replicas before")
    ours = [pid for pid in scheduler_pids() if _belongs_to_serve(pid)]
    assert len(ours) == 2
    old = set(service.state()["replicas"])
    rng = np.random.default_rng(2)
    work = [sample(rng, "read").request(max_tokens=400, ignore_eos=True) for _ in range(12)]
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(service.post, body) for body in work]
        until(lambda: service.state()["in_flight"] >= 8, 20, "the load is on")
        os.kill(ours[0], signal.SIGKILL)
        killed_at = time.monotonic()
        results = [a.result() for a in answers]
    assert time.monotonic() - killed_at < 60
    statuses = sorted({r.status_code for r in results})
    assert set(statuses) <= {200, 503}
    assert sum(r.status_code == 200 for r in results) >= 4, "the other replica answered its own"
    for result in results:
        if result.status_code == 503:
            assert result.json()["error"]["code"] == "replica_failed"
    until(lambda: len(set(service.state()["replicas"]) - old) == 1, 180, "a new replica stands in")
    answer = service.post(sample(rng, "name").request())
    assert answer.status_code == 200


def _belongs_to_serve(pid: int) -> bool:
    return any("ServeReplica" in " ".join(p.cmdline()) for p in psutil.Process(pid).parents())

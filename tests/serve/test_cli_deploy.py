"""What Ray users type, from the repository's root: `ray start --head`, `serve deploy`, `status`, `shutdown`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import yaml

from kimi_draft.tiny.task import grade, sample
from tests.serve.conftest import CONFIG, ROOT, free_port, until

BIN = Path(sys.executable).parent


class Cluster:
    """A Ray head of our own, in the foreground of a child process."""

    def __init__(self, folder: Path) -> None:
        self.gcs, self.dashboard = free_port(), free_port()
        self.env = os.environ | {
            "RAY_ADDRESS": f"127.0.0.1:{self.gcs}",
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{self.dashboard}",
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self.dashboard}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",  # the test asks the REST API without a token
        }
        command = [
            str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=2", "--node-ip-address=127.0.0.1",
            f"--port={self.gcs}", f"--dashboard-port={self.dashboard}", f"--temp-dir={folder}",
        ]  # fmt: skip
        self.log = (folder / "head.log").open("w")
        self.head = subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=self.log, stderr=self.log)

    def up(self) -> bool:
        assert self.head.poll() is None, "ray start ended"
        try:
            return httpx.get(f"http://127.0.0.1:{self.dashboard}/api/version", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def serve(self, *words: str) -> str:
        done = subprocess.run(
            [str(BIN / "serve"), *words], cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def stop(self) -> None:
        head = psutil.Process(self.head.pid)
        family = [head, *head.children(recursive=True)]
        self.head.send_signal(signal.SIGTERM)
        psutil.wait_procs(family, timeout=20)
        for process in family:
            if process.is_running():
                process.kill()
        self.head.wait(10)
        self.log.close()

    def status(self) -> str:
        """Our application's status, from the REST API that `serve status` reads (which takes seconds to start)."""
        document = httpx.get(f"http://127.0.0.1:{self.dashboard}/api/serve/applications/", timeout=30).json()
        return str(document["applications"].get("kimi", {}).get("status"))


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("r")  # short: Ray puts sockets below it, whose paths have a limit
    one = Cluster(folder)
    try:
        until(one.up, 60, "the Ray head is up")
        yield one
    finally:
        one.stop()


def test_serve_deploy_from_the_root(cluster: Cluster, tmp_path: Path) -> None:
    port = free_port()
    document = yaml.safe_load(CONFIG.read_text())
    document["http_options"]["port"] = port
    document["applications"][0]["args"]["engine"]["num_replicas"] = 1
    file = tmp_path / "one.yaml"
    file.write_text(yaml.safe_dump(document))
    before = _sglang_pids()
    cluster.serve("deploy", str(file))
    until(lambda: cluster.status() in ("RUNNING", "DEPLOY_FAILED"), 240, "the application runs", every_s=0.5)
    assert "status: RUNNING" in cluster.serve("status")
    example = sample(np.random.default_rng(4), "name")
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=example.request(), timeout=60).json()
    assert grade(example, answer["choices"][0]["message"]), answer
    assert answer["kimi"]["group_size"] == 1
    assert len(_sglang_pids() - before) == 2  # scheduler and detokenizer
    cluster.serve("shutdown", "-y")
    until(lambda: not _sglang_pids() - before, 60, "no SGLang process is left")


def test_a_bad_config_says_which_field(cluster: Cluster, tmp_path: Path) -> None:
    document = yaml.safe_load(CONFIG.read_text())
    document["http_options"]["port"] = free_port()
    document["applications"][0]["args"]["router"]["max_wait"] = 5
    file = tmp_path / "bad.yaml"
    file.write_text(yaml.safe_dump(document))
    cluster.serve("deploy", str(file))
    until(lambda: cluster.status() == "DEPLOY_FAILED", 120, "the deployment fails", every_s=0.5)
    assert "router.max_wait" in cluster.serve("status")


def _sglang_pids() -> set[int]:
    return {p.pid for p in psutil.process_iter(["cmdline"]) if "sglang::" in " ".join(p.info["cmdline"] or [])}

"""`kimi-serve demo` as a stranger runs it: the report keeps its promises and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil

from cluster.demo import shortcomings
from tests.serve.conftest import ROOT, free_port


def test_the_demo(tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).parent / "kimi-serve"),
        "demo",
        "--out",
        str(tmp_path),
        "--port",
        str(free_port()),
    ]
    before = {p.pid for p in psutil.process_iter()}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "one extend batch" in done.stdout
    document = json.loads((tmp_path / "report.json").read_text())
    assert shortcomings(document) == []
    assert set(document) >= {"requests", "groups", "acceptance", "lossless", "latency", "wall_s", "versions"}
    assert (tmp_path / "report.png").stat().st_size > 10_000
    left = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before and _ours(p)]
    assert left == []


def _ours(process: psutil.Process) -> bool:
    words = " ".join(process.info["cmdline"] or [])
    return any(word in words for word in ("sglang::", "ray::", "raylet", "gcs_server"))

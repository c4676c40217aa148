"""The README's own Python and shell snippets, run as a reader would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from tests.serve.conftest import ROOT, Service

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(python|sh)\n(.*?)^```", README, re.M | re.S)
PYTHON = [code for kind, code in BLOCKS if kind == "python"]
CURL = [code for kind, code in BLOCKS if kind == "sh" and code.startswith("curl")]
COMMANDS = [line for kind, code in BLOCKS if kind == "sh" and not code.startswith("curl") for line in code.splitlines()]


def run(command: list[str], service: Service) -> str:
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=os.environ | {"RAY_ADDRESS": address}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_snippets(service: Service, number: int) -> None:
    code = PYTHON[number].replace("http://127.0.0.1:8000", service.url)
    printed = run([sys.executable, "-c", code], service)
    assert re.search(r"r\dc\d [a-z]+-[a-z]+", printed), printed
    if "get_app_handle" in code:
        assert "acceptance_length" in printed


@pytest.mark.parametrize("number", range(len(CURL)))
def test_curl_snippets(service: Service, number: int) -> None:
    printed = run(["bash", "-c", CURL[number].replace("http://127.0.0.1:8000", service.url)], service)
    assert "red cyan yellow blue white" in printed
    assert '"kimi"' in printed


def test_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert len(targets) <= 12
    assert COMMANDS
    for line in COMMANDS:
        for word in re.findall(r"\bmake ([a-z-]+)", line):
            assert word in targets
        for file in re.findall(r"\S+\.yaml", line):
            assert (ROOT / file).exists()


def test_every_linked_file_exists() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_readme_names_no_absolute_path() -> None:
    assert not re.search(r"(?<![\w.:])/(?:home|root|tmp|work)/", README)
    assert Path(ROOT / "docs" / "demo.png").stat().st_size > 10_000

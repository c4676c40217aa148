"""What people see when something is missing or wrong: one clear line, exit status 1, no traceback."""

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster import local, preflight
from cluster.cli import app

CONFIG = Path(__file__).parents[2] / "cluster" / "local-cpu.yaml"
RUNNER = CliRunner()


def test_a_taken_port_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda: 64 * preflight.GIB)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = RUNNER.invoke(app, ["serve", str(CONFIG), "--port", str(port)])
    assert result.exit_code == 1
    assert f"127.0.0.1:{port}" in result.output
    assert "http_options.port" in result.output
    assert "Traceback" not in result.output


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_bytes", lambda: 4 * preflight.GIB)
    result = RUNNER.invoke(app, ["demo", str(CONFIG)])
    assert result.exit_code == 1
    assert "2 engines need about" in result.output
    assert "engine.num_replicas" in result.output
    assert len(result.output.strip().splitlines()) <= 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("applications: [", "not valid YAML"),
        ("applications: []", "exactly one application"),
        ("{}", "exactly one application"),
        (
            "applications: [{name: kimi, import_path: 'deployments.app:build', args: {router: {max_wait: 5}}}]",
            "args.router.max_wait",
        ),
        (
            "applications: [{name: kimi, import_path: 'deployments.app:build', args: {engine: {tp_size: none}}}]",
            "args.engine.tp_size",
        ),
    ],
)
def test_bad_configs_name_the_file_and_the_field(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    result = RUNNER.invoke(app, ["serve", str(file)])
    assert result.exit_code == 1
    assert says in result.output.replace("\n", "")
    assert "bad.yaml" in result.output.replace("\n", "")


def test_a_missing_config_is_named() -> None:
    with pytest.raises(local.BadConfig, match=r"nowhere\.yaml"):
        local.load(Path("nowhere.yaml"))

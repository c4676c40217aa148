"""Run a config on this machine: start Ray, deploy, wait until it answers, and stop everything again."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cluster import preflight
from deployments.config import AppConfig

Progress = Callable[[str], None]
# Ray talks to nobody; a worker that dies says so in our log, not in a pop-up of its own.
RAY_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_COLOR_PREFIX": "0",
}


class BadConfig(ValueError):
    """A config file that cannot be served; the message names the file and the field."""


class StartFailed(RuntimeError):
    """The application did not start; the message holds what Serve reports of its deployments."""


@dataclass(frozen=True)
class Config:
    """A Serve config file as far as one machine needs it."""

    app: AppConfig
    name: str
    route_prefix: str
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def load(file: Path, port: int | None = None) -> Config:
    """Read a Serve config with our application in it; raises BadConfig."""
    try:
        document = yaml.safe_load(file.read_text())
        (application,) = [a for a in document["applications"] if a["import_path"] == "deployments.app:build"]
        app = AppConfig(**application.get("args", {}))
    except OSError as error:
        raise BadConfig(f"{file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise BadConfig(f"{file}: not valid YAML: {error}") from error
    except ValidationError as error:
        lines = [f"  args.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)]
        raise BadConfig("\n".join([f"{file}: the settings are wrong:", *lines])) from error
    except (KeyError, TypeError, ValueError) as error:
        raise BadConfig(
            f"{file}: exactly one application with import_path deployments.app:build is expected ({error!r})"
        ) from error
    http = document.get("http_options", {})
    return Config(
        app,
        application["name"],
        application.get("route_prefix", "/"),
        http.get("host", "127.0.0.1"),
        port or http.get("port", 8000),
    )


@contextlib.contextmanager
def running(config: Config, progress: Progress = lambda _: None, ready_timeout_s: float = 300.0) -> Iterator[Any]:
    """Start Ray here and the application in it; yields the application's handle. Stops both at the end.

    Raises:
        preflight.NotReady: the machine lacks something.
        TimeoutError: no engine came up in time; the message holds what Serve says.
    """
    preflight.check(config.host, config.port, config.app.engine.num_replicas)
    os.environ.update({key: os.environ.get(key, value) for key, value in RAY_ENV.items()})
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    from deployments.app import build

    # This terminal is ours: Ray's notices (a controller that is gone while we stop, say) go to its log files.
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    progress("starting Ray")
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        configure_logging=False,
        num_cpus=max(2, os.cpu_count() or 2),
    )
    try:
        serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host=config.host, port=config.port))
        progress("deploying")
        handle = _deploy(serve, build(config.app), config, progress, ready_timeout_s)
        yield handle
    finally:
        progress("stopping")
        serve.shutdown()
        ray.shutdown()


def _deploy(serve: Any, app: Any, config: Config, progress: Progress, timeout_s: float) -> Any:
    wanted = config.app.engine.num_replicas
    deadline = time.monotonic() + timeout_s
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # serve.run blocks until the application runs
        deployment = pool.submit(serve.run, app, name=config.name, route_prefix=config.route_prefix)
        while not deployment.done():
            concurrent.futures.wait([deployment], timeout=0.5)
            status = serve.status().applications.get(config.name)
            engine = status.deployments.get("Engine") if status else None
            up = int(engine.replica_states.get("RUNNING", 0)) if engine else 0
            progress(f"engines up: {up} of {wanted}")
            if time.monotonic() > deadline:
                serve.delete(config.name, _blocking=False)
                raise TimeoutError(
                    f"{config.name} was not up within {timeout_s:g} s ({up} of {wanted} engines). "
                    f"Serve says: {_why(status)}. Logs: /tmp/ray/session_latest/logs/serve/"
                )
        try:
            return deployment.result()
        except RuntimeError as error:
            raise StartFailed(f"{error} {_why(status)} Logs: /tmp/ray/session_latest/logs/serve/") from error


def _why(status: Any) -> str:
    if status is None:
        return "nothing"
    parts = [status.message, *(f"{name}: {d.message}" for name, d in status.deployments.items() if d.message)]
    return " | ".join(p.strip() for p in parts if p) or str(status.status)

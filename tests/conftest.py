"""Markers follow the folder: tests/unit -> unit, tests/engine -> engine, tests/serve -> serve."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(ROOT).parts[0]
        if folder in ("unit", "engine", "serve"):
            item.add_marker(getattr(pytest.mark, folder))

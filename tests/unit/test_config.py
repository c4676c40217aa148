"""Settings: strict, and every contradiction names both fields."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from deployments.config import AppConfig

CLUSTER = Path(__file__).parents[2] / "cluster"


def test_the_shipped_configs_are_valid() -> None:
    files = sorted(CLUSTER.glob("*.yaml"))
    assert files
    for file in files:
        for app in yaml.safe_load(file.read_text())["applications"]:
            AppConfig(**app["args"])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"router": {"max_group_request": 4}}, "max_group_request"),
        ({"enigne": {}}, "enigne"),
        ({"router": {"max_group_requests": 99}}, "max_running_requests"),
        ({"router": {"max_group_tokens": 4096}}, "chunked_prefill_size"),
        ({"engine": {"tp_size": 8, "num_gpus": 4}}, "tp_size"),
        ({"router": {"max_wait_ms": -1}}, "max_wait_ms"),
    ],
)
def test_mistakes_are_named(args: dict, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        AppConfig(**args)


def test_the_group_budget_defaults_to_one_extend_batch() -> None:
    assert AppConfig(engine={"chunked_prefill_size": 777, "max_running_requests": 8}).max_group_tokens == 777

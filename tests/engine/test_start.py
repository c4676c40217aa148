"""Starting: what must be refused is refused with its reason, nothing is left behind, and nobody else is harmed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import GREEDY, PLACEHOLDER, picture

ROOT = Path(__file__).parents[2]


def run(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.engine.starts", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT")]
    assert lines, f"killed? {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"
    report: dict[str, Any] = json.loads(lines[0].removeprefix("REPORT"))
    assert report["left"] == [], "processes were left behind"
    assert report["bystander"], "a process that is not the engine's was killed"
    return report


@pytest.mark.parametrize(
    ("name", "error"),
    [
        (
            "sabotaged",
            "StartupError: .*CorrectionError: correction 'draft-rows' did not take effect: .*_draft_extend_for",
        ),
        (
            "unloadable",
            "StartupError: the scheduler of rank 0 did not start: RuntimeError: Cannot find any model weights",
        ),
        (
            "narrow_draft",
            r"StartupError: .*UnsupportedDraft: the draft's hidden_size is \d+ and the target's \d+: image rows",
        ),
        ("pipeline_parallel", r"StartupError: .*UnsupportedDraft: pp_size=2: .* never sees the images' rows"),
        ("rejection_sampling", "ValueError: speculative_use_rejection_sampling needs a GPU"),
        ("wrong_version", "CorrectionError: SGLang 0.5.23 is installed; kimi_draft corrects SGLang 0.5.22"),
    ],
)
def test_refused_with_the_reason(name: str, error: str) -> None:
    import re

    report = run(name)
    assert re.search(error, report.get("error", "")), report


@pytest.fixture(scope="module")
def answers(tiny_engine: Any) -> list[list[int]]:
    prompts = [(f"{PLACEHOLDER}What is in A1?", [picture(1)]), ("Repeat: red blue green.", None)]
    return [tiny_engine.generate(prompt=p, image_data=i, sampling_params=GREEDY)["output_ids"] for p, i in prompts]


@pytest.mark.parametrize("name", ["tree_in_a_thread", "tensor_parallel"])
def test_other_ways_to_run_give_the_same_answers(name: str, answers: list[list[int]]) -> None:
    report = run(name)
    assert report.get("ids") == answers, report
    assert report["rate"] > 1


def test_the_plugin_alone_corrects_sglangs_own_engine(answers: list[list[int]]) -> None:
    assert run("plugin_alone") == {"ids": answers[1], "extend_requests": [1], "bystander": True, "left": []}


def test_a_dead_scheduler_is_noticed_and_does_not_take_its_owner_along() -> None:
    report = run("dead_scheduler")
    assert report["before"] is None
    assert "ended with exit code -9" in report["dead"]


def test_children_of_a_killed_engine_end_too() -> None:
    report = run("killed_while_starting")
    assert report["seen"] == 2 and report["orphans"] == 0, report


def test_one_engine_a_process(tiny_engine: Any) -> None:
    """SGLang keeps settings in process globals: a second engine would silently change the first one's."""
    from kimi_draft.launch import Engine, cpu_engine_kwargs

    with pytest.raises(RuntimeError, match="already runs an Engine"):
        Engine(**cpu_engine_kwargs())
    assert tiny_engine.generate(prompt="x", sampling_params=GREEDY)["output_ids"]

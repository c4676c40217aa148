"""The same questions to an engine without a draft: speculation must not change a single greedy answer.

The target-only engine runs in a process of its own: its logs go to a file, and nothing of SGLang stays behind here.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deployments.config import EngineConfig

ANSWER_TIMEOUT_S = 120.0
TOTAL_TIMEOUT_S = 600.0


class LosslessCheckFailed(RuntimeError):
    """The target-only engine did not answer; the message names its log."""


def target_only(
    bodies: list[dict[str, Any]], config: EngineConfig, log: Path, on_answer: Callable[[], None]
) -> list[str]:
    """Answers of a target-only engine with the same weights, one after the other, as canonical texts.

    Args:
        bodies: OpenAI chat requests.
        log: where the engine's output goes.
        on_answer: called after each.
    """
    task = json.dumps({"bodies": bodies, "engine": config.model_dump()})
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "cluster.lossless"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(task)
            process.stdin.close()
            answers = []
            for line in process.stdout:
                if line.startswith("answer "):
                    answers.append(json.loads(line.removeprefix("answer ")))
                    on_answer()
            process.wait(TOTAL_TIMEOUT_S)
        except BaseException:
            process.terminate()
            raise
    if process.returncode or len(answers) != len(bodies):
        raise LosslessCheckFailed(
            f"The engine without a draft gave {len(answers)} of {len(bodies)} answers "
            f"(exit status {process.returncode}); see {log}"
        )
    return answers


def main() -> None:
    """Child process: the task as JSON on stdin, one line "answer ..." per request on stdout."""
    from deployments.engine import engine_kwargs
    from kimi_draft.launch import Engine

    task = json.loads(sys.stdin.read())
    kwargs = engine_kwargs(EngineConfig(**task["engine"]))
    engine = Engine(**{k: v for k, v in kwargs.items() if not k.startswith("speculative")})
    try:
        engine.loop.run_until_complete(_ask(engine, task["bodies"]))
    finally:
        engine.shutdown()


async def _ask(engine: Any, bodies: list[dict[str, Any]]) -> None:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    from cluster.burst import canonical

    chat = OpenAIServingChat(engine.tokenizer_manager, engine.template_manager)
    for body in bodies:
        answer = await asyncio.wait_for(chat.handle_request(ChatCompletionRequest(**body), None), ANSWER_TIMEOUT_S)
        print("answer " + json.dumps(canonical(answer.model_dump()["choices"][0]["message"])), flush=True)


if __name__ == "__main__":
    main()

"""Real engines on the CPU. One costs about half a minute and 3 GB, so the tests share them.

The shared engine runs kimi_draft's corrections with test hooks around them (hooks.py). It checks the draft's rows at
every extend and can be switched between draft variants.
"""

import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.engine import hooks

PLACEHOLDER = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n"
CHUNK = 256  # tokens; small enough for a test prompt to be cut
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}


def picture(seed: int, width: int = 84, height: int = 84) -> Image.Image:
    """Noise: rows of the vision tower that no other picture has."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@dataclass
class Bench:
    """An engine under test with its controls."""

    engine: Any
    control: Path

    @contextmanager
    def switched(self, **settings: str) -> Iterator[None]:
        """Turn on a variant or the attention check (hooks.py) for the requests made inside.

        The cache is emptied before and after: a wrong draft leaves wrong draft keys for every later request to find.
        """
        self.flush()
        self._write(settings)
        try:
            yield
        finally:
            self._write({})
            self.flush()

    def flush(self) -> None:
        """SGLang refuses while it still does the books of the last request."""
        deadline = time.monotonic() + 5
        while not self.engine.flush_cache().success:
            assert time.monotonic() < deadline, "requests are still running"
            time.sleep(0.05)

    def _write(self, settings: dict[str, str]) -> None:
        new = self.control.with_suffix(".new")
        new.write_text(json.dumps(settings))
        new.replace(self.control)  # the scheduler must never read half of it

    @contextmanager
    def records(self, suffix: str) -> Iterator[list[dict[str, Any]]]:
        """What the scheduler writes to one of its log files ("rows", "attention") meanwhile; filled on leaving."""
        path = Path(f"{self.control}.{suffix}")
        path.write_text("")
        found: list[dict[str, Any]] = []
        yield found
        found += [json.loads(line) for line in path.read_text().splitlines()]

    def together(self, prompts: list[str], images: list[list[Image.Image] | None], params: Any) -> list[dict[str, Any]]:
        """All prompts in one extend batch: preprocessed first, then sent in one message."""
        manager = self.engine.tokenizer_manager
        each = params if isinstance(params, list) else [params] * len(prompts)
        gathered: list[Any] = []

        async def hold(tokenized: Any) -> None:
            gathered.append(tokenized)
            if len(gathered) == len(prompts):
                await manager._send_batch_request(gathered)

        async def run() -> list[dict[str, Any]]:
            manager._send_one_request = hold
            try:
                async with asyncio.TaskGroup() as group:
                    answers = [
                        group.create_task(self.engine.async_generate(prompt=p, image_data=i, sampling_params=s))
                        for p, i, s in zip(prompts, images, each, strict=True)
                    ]
            finally:
                del manager._send_one_request
            return [answer.result() for answer in answers]

        return self.engine.loop.run_until_complete(run())


def in_own_process(function: Any, *args: Any) -> Any:
    """function(*args) in a fresh process; for whatever needs an engine besides the shared one.

    SGLang keeps an engine's settings in globals of its process, so two do not share one.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


class TargetOnly:
    def __call__(self, prompts: list[str], images: list[Any], params: dict[str, Any]) -> list[list[int]]:
        answers: list[list[int]] = in_own_process(_ask_target, prompts, images, params)
        return answers


def _ask_target(prompts: list[str], images: list[Any], params: dict[str, Any]) -> list[list[int]]:
    from kimi_draft.launch import Engine, cpu_engine_kwargs

    engine = Engine(**cpu_engine_kwargs(draft=None, chunked_prefill_size=CHUNK))
    answers = [
        engine.generate(prompt=p, image_data=i, sampling_params=params) for p, i in zip(prompts, images, strict=True)
    ]
    engine.shutdown()
    return [answer["output_ids"] for answer in answers]


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    from kimi_draft.launch import Engine, cpu_engine_kwargs

    class HookedEngine(Engine):
        run_scheduler_process_func = staticmethod(hooks.run_scheduler_process)

    control = tmp_path_factory.mktemp("control") / "control.json"
    control.write_text("{}")
    settings = {hooks.CONTROL: str(control), "KIMI_DRAFT_CHECK_ROWS": f"{control}.rows"}
    os.environ.update(settings)
    try:
        engine = HookedEngine(**cpu_engine_kwargs(chunked_prefill_size=CHUNK))
    finally:
        for name in settings:
            del os.environ[name]
    yield Bench(engine, control)
    engine.shutdown()


@pytest.fixture(scope="session")
def tiny_engine(bench: Bench) -> Any:
    """The tiny Kimi-K2.5 with its draft, corrected."""
    return bench.engine


@pytest.fixture(scope="session")
def target_only() -> TargetOnly:
    """Ask the same target without a draft: (prompts, images, sampling parameters) -> output ids, one at a time."""
    return TargetOnly()

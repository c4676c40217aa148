"""The Engine deployment: one replica is one tensor-parallel SGLang engine with the corrected EAGLE3-MLA draft."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ray import serve

from deployments.config import EngineConfig

logger = logging.getLogger("ray.serve")


CANCELS_REMEMBERED = 1024


class EngineDied(RuntimeError):
    """A scheduler or detokenizer process of this replica is gone; Serve replaces the replica."""


def model_dir(config: EngineConfig) -> Path:
    """Directory of the target checkpoint."""
    if config.model_path == "tiny":
        from kimi_draft.tiny import paths

        return paths.target_dir()
    return Path(config.model_path)


def engine_kwargs(config: EngineConfig) -> dict[str, Any]:
    """SGLang ServerArgs of one replica."""
    common: dict[str, Any] = {
        "served_model_name": config.served_model_name,
        "tp_size": config.tp_size,
        "max_running_requests": config.max_running_requests,
        "context_length": config.context_length,
        "chunked_prefill_size": config.chunked_prefill_size,
        "max_prefill_tokens": max(16_384, config.chunked_prefill_size),
        "schedule_policy": "fcfs",
        "reasoning_parser": "kimi_k2",
        "tool_call_parser": "kimi_k2",
        "log_level": "warning",
    }
    if config.max_total_tokens is not None:
        common["max_total_tokens"] = config.max_total_tokens
    if config.draft_path:
        common["speculative_draft_model_path"] = config.draft_path
    if config.num_gpus == 0:
        from kimi_draft.launch import cpu_engine_kwargs

        kwargs = cpu_engine_kwargs(**common)
        if config.model_path != "tiny":
            kwargs["model_path"] = config.model_path
    else:
        kwargs = {
            "model_path": config.model_path,
            "trust_remote_code": True,
            "speculative_algorithm": "EAGLE3",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
            "mm_enable_dp_encoder": True,
        } | common
    return kwargs | config.sglang


@serve.deployment
class Engine:
    """Answers groups of OpenAI chat requests. Handle methods: `run_group` (stream), `cancel`."""

    def __init__(self, config: EngineConfig) -> None:
        from kimi_draft.launch import Engine as DraftEngine
        from kimi_draft.submit import init_tokenizer_manager

        class GroupEngine(DraftEngine):
            init_tokenizer_manager_func = staticmethod(init_tokenizer_manager)
            dies_with_children = False  # we watch them, and answer our callers first

        self._config = config
        self._name = serve.get_replica_context().replica_id.unique_id
        started = time.monotonic()
        self._engine = GroupEngine(**engine_kwargs(config))
        from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

        self._manager = self._engine.tokenizer_manager
        self._chat = OpenAIServingChat(self._manager, self._engine.template_manager)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: deque[str] = deque(maxlen=CANCELS_REMEMBERED)  # cancels that came before their request
        self._watch: asyncio.Task[None] | None = None
        self._death: str | None = None
        logger.info("engine %s up in %.1f s", self._name, time.monotonic() - started)

    # -- health
    async def check_health(self) -> None:
        """Serve calls this each health_check_period_s; raising replaces the replica."""
        self._death = self._death or self._engine.dead_process()
        if self._death:
            raise EngineDied(f"{self._death}; the replica will be replaced")

    async def _watch_children(self) -> None:
        """SGLang's library mode does not notice a dead scheduler: answers would hang for ever. We look every 0.5 s."""
        while self._death is None:
            await asyncio.sleep(0.5)
            self._death = self._engine.dead_process()
        logger.error("%s: ending %d requests", self._death, len(self._tasks))
        for task in list(self._tasks.values()):
            task.cancel()

    # -- requests
    async def run_group(
        self, group_id: str, members: list[tuple[str, dict[str, Any]]], replica: str
    ) -> AsyncIterator[list[tuple[int, tuple[Any, ...]]]]:
        """Answer the members of one group. Yields lists of (member index, event); see deployments/member.py.

        The first list comes as soon as there is anything to say; later ones are coalesced over flush_interval_ms.
        Each member's last event is ("end",). Closing the generator cancels the members that are not over.

        Args:
            group_id: for the logs.
            members: (request id, OpenAI chat body).
            replica: the replica that was meant; another one answers "misrouted" for each member.
        """
        from deployments.member import run_member

        if replica != self._name:
            yield [(i, ("misrouted",)) for i in range(len(members))]
            return
        if self._death:
            raise EngineDied(self._death)
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._watch_children())
        gate = self._manager.gate(len(members), self._config.gate_timeout_s) if len(members) > 1 else None
        outbox: asyncio.Queue[tuple[int, tuple[Any, ...]]] = asyncio.Queue()
        tasks: list[asyncio.Task[None]] = []
        for i, (rid, body) in enumerate(members):

            def emit(event: tuple[Any, ...], i: int = i) -> None:
                outbox.put_nowait((i, event))

            task = asyncio.create_task(run_member(self._chat, rid, body, gate, emit), name=rid)
            # Not inside run_member: a task that is cancelled before its first step runs nothing, and must end too.
            task.add_done_callback(lambda _, emit=emit: emit(("end",)))  # type: ignore[misc]
            tasks.append(task)
            self._tasks[rid] = task
            if rid in self._cancelled:
                task.cancel()
        try:
            async for events in self._coalesce(outbox, len(members)):
                if self._death:
                    raise EngineDied(self._death)
                yield events
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for rid, _ in members:
                self._tasks.pop(rid, None)

    async def _coalesce(
        self, outbox: asyncio.Queue[tuple[int, tuple[Any, ...]]], members: int
    ) -> AsyncIterator[list[tuple[int, tuple[Any, ...]]]]:
        loop = asyncio.get_running_loop()
        spoken: set[int] = set()
        while members:
            events = [await outbox.get()]
            until = loop.time() + self._config.flush_interval_ms / 1e3
            while True:
                while not outbox.empty():
                    events.append(outbox.get_nowait())
                urgent = any(i not in spoken or event[0] in ("first", "end") for i, event in events)
                remaining = until - loop.time()
                if urgent or remaining <= 0:
                    break
                try:
                    events.append(await asyncio.wait_for(outbox.get(), remaining))
                except TimeoutError:
                    break
            spoken.update(i for i, event in events if event[0] == "data")
            members -= sum(event[0] == "end" for _, event in events)
            yield events

    async def cancel(self, rids: list[str], replica: str) -> None:
        """End these requests; their group goes on. One that is still on its way here ends when it comes."""
        for rid in rids:
            if task := self._tasks.get(rid):
                task.cancel()
            else:
                self._cancelled.append(rid)

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is None:
            return
        if self._watch is not None:
            self._watch.cancel()
        engine.shutdown()

"""SGLang's Engine with the corrected draft, on GPUs or on any CPU.

Import this before anything of SGLang's. `Engine(**cpu_engine_kwargs())` runs the tiny Kimi-K2.5 on a CPU; on GPUs pass
SGLang's own arguments.
"""

import atexit
import logging
import os
from typing import Any, ClassVar

from kimi_draft import cpu
from kimi_draft.corrections import Correction, check_version, install_and_verify

cpu.install()
check_version()

from sglang.srt.entrypoints.engine import Engine as SGLangEngine  # noqa: E402
from sglang.srt.managers.tokenizer_manager import TokenizerManager  # noqa: E402

from kimi_draft import processes, startup  # noqa: E402

log = logging.getLogger(__name__)

PARENT_CORRECTIONS = [
    Correction(
        "startup-reason",
        "sglang.srt.entrypoints.engine:_wait_for_scheduler_ready",
        "engine.py:2013: drops the reason that a child sends, and waits for the ranks one by one",
        startup.wait_for_schedulers,
    )
]


class Engine(SGLangEngine):  # type: ignore[misc]  # SGLang is untyped
    """SGLang's Engine whose scheduler processes run the verified corrections; arguments as SGLang's ServerArgs.

    May be constructed outside the main thread (a Ray Serve replica), but SGLang asks Linux to kill its children when
    the *thread* that started them ends: construct it in a thread that lives as long as the engine.

    Raises:
        StartupError: a scheduler did not come up; the message says why, e.g. which correction failed.
        kimi_draft.cpu.checkpoint.UnsupportedCheckpoint: this CPU cannot run that checkpoint.
        ValueError: an unknown KIMI_DRAFT_VARIANT, or arguments that SGLang refuses.
    """

    run_scheduler_process_func = staticmethod(processes.run_scheduler_process)
    run_detokenizer_process_func = staticmethod(processes.run_detokenizer_process)
    # SGLang's watchdog sends this process SIGQUIT when a child dies. A subclass whose owner polls dead_process(), and
    # would rather answer its callers than die, sets this to False.
    dies_with_children: ClassVar[bool] = True
    _alive: ClassVar["Engine | None"] = None

    def __init__(self, **kwargs: Any) -> None:
        from kimi_draft.variants import current

        current()
        if Engine._alive is not None:
            raise RuntimeError(
                "this process already runs an Engine; SGLang keeps an engine's settings in process globals, so start "
                "another one in another process, or after shutdown()."
            )
        install_and_verify(PARENT_CORRECTIONS)
        if cpu.is_cpu_host():
            _prepare_cpu(kwargs)
        self._processes: list[Any] = []
        Engine._alive = self
        token = startup.spawned.set(self._processes)
        try:
            super().__init__(**kwargs)
        except BaseException:
            self.shutdown()
            raise
        finally:
            startup.spawned.reset(token)
        if not self.dies_with_children:
            self.tokenizer_manager._subprocess_watchdog.stop()

    def dead_process(self) -> str | None:
        """Which of this engine's processes has ended, and how; None while all of them run."""
        for process in self._processes:
            if not process.is_alive():
                return f"{process.name} (pid {process.pid}) ended with exit code {process.exitcode}"
        return None

    @classmethod
    def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
        result, schedulers = super()._launch_scheduler_processes(*args, **kwargs)
        startup.remember(schedulers or [])
        return result, schedulers

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> Any:
        detokenizers, names = super()._launch_detokenizer_subprocesses(*args, **kwargs)
        startup.remember(detokenizers)
        return detokenizers, names

    def shutdown(self) -> None:
        """Stop this engine's processes, and only those; returns when they are gone. Idempotent.

        SGLang's own shutdown kills every child of the calling process.
        """
        atexit.unregister(self.shutdown)
        if Engine._alive is self:
            Engine._alive = None
        manager = getattr(self, "tokenizer_manager", None)
        if manager is not None and manager._subprocess_watchdog is not None:
            manager._subprocess_watchdog.stop()
        socket, self.send_to_rpc = getattr(self, "send_to_rpc", None), None
        if socket is not None:
            socket.close(linger=0)
        owned, self._processes = self._processes, []
        startup.kill(owned)
        if isinstance(manager, TokenizerManager):
            if manager.mm_processor is not None:
                manager.mm_processor.shutdown()
            manager.cuda_vmm_feature_transport.shutdown()


def _prepare_cpu(kwargs: dict[str, Any]) -> None:
    from kimi_draft.cpu.checkpoint import refuse_quantized

    args = kwargs.get("server_args")
    get = kwargs.get if args is None else lambda name, default=None: getattr(args, name, default)
    refuse_quantized(str(get("model_path")))
    if get("speculative_use_rejection_sampling"):
        raise ValueError(
            "speculative_use_rejection_sampling needs a GPU (its sampler is a Triton kernel); leave it off."
        )
    tp = get("tp_size", 1) or 1
    if tp > 1:
        # SGLang wants one NUMA node a rank unless it is told which cores to use; hosts like ours have one node.
        cores = sorted(os.sched_getaffinity(0))
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(cores[r % len(cores)]) for r in range(tp)))


def cpu_engine_kwargs(*, draft: str | None = "", **overrides: Any) -> dict[str, Any]:
    """Arguments of Engine for the tiny Kimi-K2.5 on a CPU; any of SGLang's may be overridden.

    draft: path of the draft model; by default the tiny one from kimi_draft.tiny.paths; None: no speculation.
    """
    from kimi_draft.tiny import paths

    kwargs: dict[str, Any] = {
        "model_path": str(paths.target_dir()),
        "trust_remote_code": True,
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "skip_server_warmup": True,
        "mem_fraction_static": 0.3,
        "max_total_tokens": 16384,
        "max_running_requests": 16,
        "context_length": 2048,
        "chunked_prefill_size": 2048,
        "page_size": 1,
        "random_seed": 0,
        "watchdog_timeout": 300,
        "sleep_on_idle": True,  # or every idle engine keeps a core busy
    }
    if draft is not None:
        kwargs |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": draft or str(paths.draft_dir()),
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
        }
    return kwargs | overrides

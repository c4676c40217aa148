"""SGLang's plugin entry point (group `sglang.srt.plugins`), for those who run `sglang serve` themselves.

SGLang only logs what a plugin raises, so nothing is corrected here and then: registering makes the scheduler's
constructor install and verify the corrections first, and there an exception ends the start. Engine of
kimi_draft.launch does the same by itself, and reports to its parent.

On a CPU host `sglang serve` needs SGLANG_USE_CPU_ENGINE=1 in its environment: SGLang asks before it loads plugins.
"""

import functools
from typing import Any

from kimi_draft import cpu


def register() -> None:
    """Called by SGLang once in every process, before schedulers are built. Idempotent.

    Raises:
        kimi_draft.cpu.InstallError: a CPU host where SGLang has already decided otherwise (SGLang logs it).
    """
    cpu.install()
    from sglang.srt.managers.scheduler import Scheduler

    if not getattr(Scheduler.__init__, "kimi_plugin", False):
        Scheduler.__init__ = _corrected(Scheduler.__init__)


def _corrected(construct: Any) -> Any:
    @functools.wraps(construct)
    def __init__(self: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
        if server_args.speculative_algorithm or cpu.is_cpu_host():
            from kimi_draft.installed import install_in_scheduler

            install_in_scheduler(server_args)
        construct(self, server_args, *args, **kwargs)

    __init__.kimi_plugin = True  # type: ignore[attr-defined]
    return __init__

"""The functions that run in the engine's child processes.

A spawned child unpickles its function first, so it imports this module, and with it the CPU stand-in, before SGLang.
Anything that goes wrong until the scheduler is ready is sent to the parent through SGLang's own ready pipe: upstream
sends the parent SIGQUIT instead, and the parent then kills its whole process tree, itself included.
"""

import logging
import multiprocessing
import os
import sys
from typing import Any

from kimi_draft import cpu
from kimi_draft.startup import failure

cpu.install()

log = logging.getLogger(__name__)


def end_if_orphaned() -> None:
    """Leave if the parent died while this child was still importing.

    SGLang asks Linux to kill a child with its parent, but only once the child runs, which takes some ten seconds.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        sys.exit("the engine's process has ended meanwhile")


def run_scheduler_process(
    server_args: Any,
    port_args: Any,
    gpu_id: int,
    tp_rank: int,
    pp_rank: int,
    dp_rank: int | None,
    pipe_writer: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """SGLang's run_scheduler_process with the corrections in place; same arguments.

    Exits with status 1 after reporting when the corrections or the scheduler cannot be set up.
    """
    end_if_orphaned()
    try:
        from sglang.srt.managers import scheduler
        from sglang.srt.plugins import load_plugins

        from kimi_draft.installed import install_in_scheduler

        load_plugins()
        install_in_scheduler(server_args)
        _report_failures(scheduler.Scheduler, pipe_writer)
    except Exception as error:
        log.exception("The scheduler process could not be prepared")
        pipe_writer.send(failure(error))
        sys.exit(1)
    scheduler.run_scheduler_process(
        server_args, port_args, gpu_id, tp_rank, pp_rank, dp_rank, pipe_writer, *args, **kwargs
    )


def _report_failures(scheduler_class: Any, pipe_writer: Any) -> None:
    """Leave by SystemExit, which upstream's handler lets through, instead of sending the parent SIGQUIT.

    A failing constructor is reported through the pipe; a scheduler that fails later ends with status 1, which the
    parent's watchdog sees. (Upstream's ends with status 0, which its watchdog takes for a normal end.)
    """
    construct, run = scheduler_class.__init__, scheduler_class.run_event_loop

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            construct(self, *args, **kwargs)
        except Exception as error:
            log.exception("The scheduler could not be constructed")
            pipe_writer.send(failure(error))
            sys.exit(1)

    def run_event_loop(self: Any) -> None:
        try:
            run(self)
        except Exception:
            log.exception("The scheduler failed")
            sys.exit(1)

    scheduler_class.__init__ = __init__
    scheduler_class.run_event_loop = run_event_loop


def run_detokenizer_process(server_args: Any, port_args: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's run_detokenizer_process; it only needs the stand-in, which importing this module has installed."""
    end_if_orphaned()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(server_args, port_args, *args, **kwargs)

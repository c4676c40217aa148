"""Ways to start an engine, each run in an interpreter of its own by test_start.py: python -m tests.engine.starts NAME.

Prints one JSON object: the error of the start, or what the engine answered, and the processes left behind.
"""

import atexit
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from tests.engine.conftest import GREEDY, PLACEHOLDER, picture


def no_draft_rows(upstream: Any) -> Any:
    """Loses its mark, as a correction would that another plugin replaced."""
    return lambda *args, **kwargs: upstream(*args, **kwargs)


def sabotaged_scheduler(*args: Any, **kwargs: Any) -> None:
    """A child in which another plugin puts its own function over ours."""
    from kimi_draft import installed, processes
    from kimi_draft.corrections import Correction

    place = "sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker._draft_extend_for_prefill"
    stock = installed.corrections
    installed.corrections = lambda: [*stock(), Correction("intruder", place, "test", no_draft_rows)]
    processes.run_scheduler_process(*args, **kwargs)


def start(**overrides: Any) -> dict[str, Any]:
    from kimi_draft.launch import Engine, cpu_engine_kwargs

    engine = Engine(**cpu_engine_kwargs(**overrides))
    prompt = f"{PLACEHOLDER}What is in A1?"
    try:
        answers = [
            engine.generate(prompt=prompt, image_data=[picture(1)], sampling_params=GREEDY),
            engine.generate(prompt="Repeat: red blue green.", sampling_params=GREEDY),
        ]
    finally:
        engine.shutdown()
    return {"ids": [a["output_ids"] for a in answers], "rate": answers[0]["meta_info"].get("spec_accept_length")}


def sabotaged() -> dict[str, Any]:
    from kimi_draft.launch import Engine

    Engine.run_scheduler_process_func = staticmethod(sabotaged_scheduler)
    return start()


def unloadable() -> dict[str, Any]:
    """The scheduler's own constructor fails: a draft without weights."""
    from kimi_draft.tiny import paths

    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(paths.draft_dir() / "config.json", folder)
        return start(draft=folder)


def narrow_draft() -> dict[str, Any]:
    """A draft of another width than the target's, as SGLang allows for text."""
    from kimi_draft.tiny import paths

    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((paths.draft_dir() / "config.json").read_text())
        config |= {"target_hidden_size": config["hidden_size"], "hidden_size": config["hidden_size"] // 2}
        Path(folder, "config.json").write_text(json.dumps(config))
        return start(draft=folder)


def pipeline_parallel() -> dict[str, Any]:
    """As SGLang lets it through: under the name EAGLE, and with this set. EAGLE3 it refuses by itself."""
    os.environ["SGLANG_ENABLE_PP_SPEC"] = "1"
    return start(pp_size=2, speculative_algorithm="EAGLE")


def tree_in_a_thread() -> dict[str, Any]:
    """A draft tree; and, as in a Ray Serve replica, not in the main thread, where signal handlers cannot be set."""
    result: dict[str, Any] = {}

    def work() -> None:
        result.update(start(speculative_eagle_topk=3, speculative_num_steps=4, speculative_num_draft_tokens=8))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return result


def tensor_parallel() -> dict[str, Any]:
    return start(tp_size=2)


def dead_scheduler() -> dict[str, Any]:
    """The owner of an engine outlives its scheduler and can say what happened."""
    from kimi_draft.launch import Engine, cpu_engine_kwargs

    class Watched(Engine):
        dies_with_children = False

    engine = Watched(**cpu_engine_kwargs(draft=None))
    before = engine.dead_process()
    os.kill(engine._processes[0].pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while engine.dead_process() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(2)  # SGLang's watchdog looks every second
    report = {"before": before, "dead": engine.dead_process()}
    engine.shutdown()
    return report


def plugin_alone() -> dict[str, Any]:
    """SGLang's own Engine and its own scheduler function: only the entry point brings the corrections along."""
    import multiprocessing

    from kimi_draft import cpu, startup
    from kimi_draft.launch import cpu_engine_kwargs

    cpu.install()
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**cpu_engine_kwargs())
    answer = engine.generate(prompt="Repeat: red blue green.", sampling_params=GREEDY)
    engine.tokenizer_manager._subprocess_watchdog.stop()
    atexit.unregister(engine.shutdown)
    startup.kill(multiprocessing.active_children())
    return {"ids": answer["output_ids"], "extend_requests": answer["meta_info"].get("extend_requests")}


def killed_while_starting() -> dict[str, Any]:
    """The process that builds an engine is killed while the engine's children are still importing SGLang."""
    owner = psutil.Popen([sys.executable, "-m", "tests.engine.starts", "dead_scheduler"])
    deadline = time.monotonic() + 120
    children: list[psutil.Process] = []
    while len(children) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        children = [p for p in owner.children() if "spawn_main" in " ".join(p.cmdline())]
    others = [p for p in owner.children() if p not in children]
    owner.kill()
    for process in others:
        process.kill()
    owner.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    for process in alive:
        process.kill()
    return {"seen": len(children), "orphans": len(alive)}


def rejection_sampling() -> dict[str, Any]:
    return start(speculative_use_rejection_sampling=True)


def wrong_version() -> dict[str, Any]:
    from kimi_draft import corrections

    corrections.SGLANG_VERSION = "0.5.22"
    return start()


def main() -> None:
    bystander = psutil.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        report = globals()[sys.argv[1]]()
    except Exception as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    report["bystander"] = bystander.is_running() and bystander.status() != psutil.STATUS_ZOMBIE
    bystander.kill()
    bystander.wait()
    # Python's own resource tracker ends with this process.
    children = psutil.Process(os.getpid()).children(recursive=True)
    report["left"] = [" ".join(p.cmdline()) for p in children if "resource_tracker" not in " ".join(p.cmdline())]
    print("REPORT" + json.dumps(report))


if __name__ == "__main__":
    main()

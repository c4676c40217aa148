"""Run SGLang on any CPU: the switch, the environment, and the stand-in for the `sgl_kernel` wheel.

SGLang 0.5.23 imports nine `sgl_kernel` functions by name as soon as it runs on a CPU, and the only CPU build of that
wheel needs Intel AMX. `install()` puts a pure-torch stand-in in its place. It has to run before SGLang is imported,
because SGLang decides "am I on a CPU?" once, at import.

The stand-in is a directory on `sys.path`, not only an entry in `sys.modules`: multiprocessing hands `sys.path` to every
child it spawns, so a child that unpickles one of SGLang's own functions before it sees any of ours finds it as well.

This module imports neither torch nor SGLang, so that `import kimi_draft` stays cheap.
"""

import importlib
import os
import sys
from functools import lru_cache
from pathlib import Path

STANDIN_DIR = Path(__file__).resolve().parent / "standin"

ENV_DEFAULTS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # No compiler is required on the host, and the tiny model gains nothing from it.
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    # A PyPI torch brings libnccl along; SGLang's wrapper loads it at TP > 1 and crashes without a GPU.
    "SGLANG_NCCL_SO_PATH": str(STANDIN_DIR / "no-nccl-on-a-cpu-host.so"),
}


class InstallError(RuntimeError):
    """The CPU stand-in cannot be installed in this process; the message says what came first."""


@lru_cache(maxsize=1)
def is_cpu_host() -> bool:
    """True when this process runs SGLang on the CPU: no CUDA device, or KIMI_FORCE_CPU=1. Decided once."""
    if os.environ.get("KIMI_FORCE_CPU") == "1":
        return True
    import torch

    return not torch.cuda.is_available()


def install() -> bool:
    """Make `import sglang` work on this CPU; returns whether the stand-in is active. Idempotent; no-op with CUDA.

    Environment variables that are already set win over ENV_DEFAULTS; SGLANG_USE_CPU_ENGINE is the exception, since it
    is what the rest depends on.

    Raises:
        InstallError: SGLang or another `sgl_kernel` was imported earlier in this process.
    """
    if not is_cpu_host():
        return False
    ours = str(STANDIN_DIR)
    loaded = sys.modules.get("sgl_kernel")
    if loaded is not None and not (loaded.__file__ or "").startswith(ours):
        raise InstallError(
            f"sgl_kernel was already imported from {loaded.__file__}; import kimi_draft.launch before sglang."
        )
    if loaded is None and "sglang" in sys.modules and os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        # Too late: SGLang has cached "not a CPU" in module globals and would look for CUDA kernels.
        raise InstallError(
            "sglang was imported before kimi_draft in this process, and it has decided that this is not a CPU host. "
            "Import kimi_draft.launch (or call kimi_draft.cpu.install()) before the first sglang import."
        )
    if os.environ.get("KIMI_FORCE_CPU") == "1":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or SGLang would see both a CPU engine and a GPU
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    for name, value in ENV_DEFAULTS.items():
        os.environ.setdefault(name, value)
    if ours not in sys.path:
        sys.path.insert(1, ours)  # before site-packages, behind the script's own directory
    importlib.import_module("sgl_kernel")
    return True

"""The stand-in for sgl_kernel, in processes of its own: what is imported in what order is the point."""

import os
import subprocess
import sys

import pytest

CPU = {"CUDA_VISIBLE_DEVICES": ""}


def python(code: str, **env: str) -> str:
    """Run code in a fresh interpreter without the settings that this test session may have made."""
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "KIMI_", "OMP_", "TORCHDYNAMO", "HF_"))
    }
    done = subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_is_cheap() -> None:
    print_heavy = "import sys; print(sorted({'torch', 'sglang', 'ray', 'numpy'} & set(sys.modules)))"
    assert python(f"import kimi_draft, kimi_draft.cpu, kimi_draft.corrections; {print_heavy}") == "[]"


def test_the_stand_in_is_a_proper_module() -> None:
    code = """
import importlib.util, os
from kimi_draft import cpu
assert cpu.install() and cpu.install()
spec = importlib.util.find_spec("sgl_kernel")
import sgl_kernel, torch
assert spec is sgl_kernel.__spec__ and spec.origin == sgl_kernel.__file__, spec
assert all(hasattr(sgl_kernel, name) for name in sgl_kernel.__all__) and len(sgl_kernel.__all__) == 9
assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed"), "SGLang would take it for the AMX build"
print(*(os.environ[k] for k in ("SGLANG_USE_CPU_ENGINE", "TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")))
"""
    assert python(code, **CPU) == "1 1 1 1"
    assert python(code, **CPU, OMP_NUM_THREADS="2", HF_HUB_OFFLINE="0") == "1 1 2 0"


def test_nothing_happens_on_a_cuda_host() -> None:
    code = """
import os, sys, torch
torch.cuda.is_available = lambda: True
from kimi_draft import cpu
path = list(sys.path)
print(cpu.is_cpu_host(), cpu.install(), "sgl_kernel" in sys.modules, sys.path == path, "OMP_NUM_THREADS" in os.environ)
"""
    assert python(code) == "False False False True False"
    assert python(code, KIMI_FORCE_CPU="1") == "True True True False True"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sglang; from kimi_draft import cpu; cpu.install()", "sglang was imported before kimi_draft"),
        (
            "import sys, types; fake = types.ModuleType('sgl_kernel'); fake.__file__ = '/their/sgl_kernel.py'\n"
            "sys.modules['sgl_kernel'] = fake; from kimi_draft import cpu; cpu.install()",
            "sgl_kernel was already imported from /their/sgl_kernel.py",
        ),
    ],
)
def test_too_late(code: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        python(code, **CPU)


def test_a_child_finds_it_before_it_has_seen_anything_of_ours() -> None:
    """SGLang spawns some children with its own functions as targets: nothing of ours is unpickled before them."""
    code = """
import importlib
import multiprocessing as mp
from kimi_draft import cpu
if __name__ == "__main__":
    cpu.install()
    child = mp.get_context("spawn").Process(target=importlib.import_module, args=("sgl_kernel",))
    child.start()
    child.join()
    print(child.exitcode)
"""
    assert python(code, **CPU) == "0"
    broken = code.replace("    child =", "    import sys; sys.path.remove(str(cpu.STANDIN_DIR))\n    child =", 1)
    assert python(broken, **CPU) == "1", "without the stand-in on the path the child should have failed"

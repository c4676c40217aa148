"""A CPU host refuses the released checkpoints before it loads anything."""

import json
from pathlib import Path
from typing import Any

import pytest

from kimi_draft.cpu.checkpoint import UnsupportedCheckpoint, refuse_quantized

INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {}}}


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("config.json", {"quantization_config": INT4}, "quantization_config says quant_method = compressed-tensors"),
        ("config.json", {"text_config": {"quantization_config": INT4}}, "text_config.quantization_config.*pack-quant"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "quantization says quant_algo = NVFP4"),
        ("config.json", {"quantization_config": {"quant_method": "fp8"}}, "quant_method = fp8"),
    ],
)
def test_refused(tmp_path: Path, name: str, content: dict[str, Any], found: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(UnsupportedCheckpoint, match=found) as caught:
        refuse_quantized(str(tmp_path))
    assert str(tmp_path / name) in str(caught.value)
    assert "tiny Kimi-K2.5" in str(caught.value), "says what to do instead"


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"text_config": {"hidden_size": 64}}])
def test_accepted(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuse_quantized(str(tmp_path))


def test_a_checkpoint_in_the_hub_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": INT4}))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo, name: str(tmp_path / "config.json"))
    with pytest.raises(UnsupportedCheckpoint, match="pack-quantized"):
        refuse_quantized("moonshotai/Kimi-K2.5")


@pytest.mark.parametrize("path", ["moonshotai/not-in-the-cache", "/no/such/folder", "a/b/c"])
def test_an_unknown_path_is_left_to_sglang(path: str) -> None:
    refuse_quantized(path)

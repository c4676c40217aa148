"""Refuse, before anything is loaded, a checkpoint that a CPU host cannot run."""

import json
from pathlib import Path
from typing import Any


class UnsupportedCheckpoint(ValueError):
    """The checkpoint's weights are quantised in a way that only GPU kernels read."""


def config_file(model_path: str, name: str = "config.json") -> Path | None:
    """The file of a local checkpoint directory or of the local Hugging Face cache; None when it is in neither."""
    local = Path(model_path) / name
    if local.is_file():
        return local
    if Path(model_path).exists():
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model_path, name)
    except HFValidationError:  # not a repository name either: SGLang will say so
        return None
    return Path(found) if isinstance(found, str) else None


def refuse_quantized(model_path: str) -> None:
    """Raises UnsupportedCheckpoint if config.json or hf_quant_config.json declares quantised weights.

    The released Kimi-K2.5 has INT4 experts (compressed-tensors, pack-quantized); its NVFP4 sibling is no better off.
    """
    for name in ("config.json", "hf_quant_config.json"):
        path = config_file(model_path, name)
        if path is None:
            continue
        where, found = _quantization(json.loads(path.read_text()))
        if found:
            raise UnsupportedCheckpoint(
                f"{path}: {where} says {_summary(found)}. SGLang has no CPU kernel for these weights. Serve this "
                "checkpoint on GPUs, or run the tiny Kimi-K2.5 of kimi_draft.tiny on this host."
            )


def _quantization(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    places = {"quantization": config, "quantization_config": config, "text_config": config}
    for key in places:
        value = config.get(key) or {}
        if key == "text_config":
            key, value = "text_config.quantization_config", value.get("quantization_config") or {}
        if value:
            return key, value
    return "", {}


def _summary(found: dict[str, Any]) -> str:
    names = ("quant_method", "format", "quant_algo")
    return ", ".join(f"{name} = {found[name]}" for name in names if name in found) or str(found)

"""Write trained models in the layout of the hub checkpoints, which SGLang and transformers both load."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kimi_draft.tiny import config, processing_tiny_kimi, tokenizer
from kimi_draft.tiny.draft import Draft
from kimi_draft.tiny.model import Target

# What transformers' save_pretrained writes -> what the hub checkpoint calls it.
RENAMES = (
    ("language_model.model.blocks.", "language_model.model.layers."),
    ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
    ("model.mm_projector.", "mm_projector."),
)


def hub_name(name: str) -> str:
    """The hub's name of a tensor as transformers saves it."""
    for old, new in RENAMES:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def export_target(target: Target, folder: Path) -> None:
    """Weights, configs, tokenizer and processor of the target.

    transformers fuses wqkv and undoes its rotary permutation while saving; only the names then differ from the hub's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        target.save_pretrained(scratch)
        saved = load_file(Path(scratch) / "model.safetensors")
    _save({hub_name(name): tensor for name, tensor in saved.items()}, folder)
    _write(folder / "config.json", config.target_config())
    stop = tokenizer.token_id("<|im_end|>")
    pad = tokenizer.token_id("[PAD]")
    _write(folder / "generation_config.json", {"eos_token_id": stop, "pad_token_id": pad, "max_length": 2048})
    tokenizer.save(folder)
    remote = "processing_tiny_kimi."
    _write(
        folder / "preprocessor_config.json",
        {
            "media_proc_cfg": config.MEDIA,
            "image_processor_type": "TinyKimiImageProcessor",
            "processor_class": "TinyKimiProcessor",
            "auto_map": {
                "AutoImageProcessor": remote + "TinyKimiImageProcessor",
                "AutoProcessor": remote + "TinyKimiProcessor",
            },
        },
    )
    shutil.copyfile(processing_tiny_kimi.__file__, folder / "processing_tiny_kimi.py")


def export_draft(draft: Draft, target: Target, folder: Path) -> None:
    """Weights and config of a draft; the embedding is the target's, as in the published drafts."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value for name, value in draft.state_dict().items() if not name.startswith("rotary.")}
    tensors["embed_tokens.weight"] = target.model.language_model.embed_tokens.weight
    if draft.hot is not None:
        vocab = tokenizer.vocab_size()
        tensors["d2t"] = draft.hot - torch.arange(len(draft.hot))  # stored as a difference
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, draft.hot, True)
    _save(tensors, folder)
    hot = None if draft.hot is None else len(draft.hot)
    _write(folder / "config.json", config.draft_config(hot, draft.norm_output))
    tokenizer.save(folder)


def _save(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    copies = {name: tensor.detach().clone().contiguous() for name, tensor in sorted(tensors.items())}
    save_file(copies, folder / "model.safetensors", metadata={"format": "pt"})


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

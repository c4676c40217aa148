"""Where the shipped checkpoints lie: hub-layout folders that SGLang and transformers load as they are."""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"


def target_dir() -> Path:
    """The tiny Kimi-K2.5 itself (config, weights, tokenizer, processor)."""
    return WEIGHTS / "target"


def draft_dir() -> Path:
    """Its EAGLE3-MLA draft: the layout of ``kimi-k2.5-eagle3-mla``, full vocabulary."""
    return WEIGHTS / "draft"


def draft31_dir() -> Path:
    """A smaller-vocabulary draft with the eagle3.1 flags (``fc_norm``, ``norm_output``, ``d2t``)."""
    return WEIGHTS / "draft31"

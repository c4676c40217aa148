"""The target: transformers' `Kimi_K25ForConditionalGeneration` in a tiny size, and the parts of its forward we use."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.kimi_k25 import Kimi_K25Config, Kimi_K25ForConditionalGeneration
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionAttention, apply_rotary_pos_emb_vision

from kimi_draft.tiny.config import AUX_LAYERS, target_config

Target = Any  # Kimi_K25ForConditionalGeneration; transformers is untyped


def build_target(seed: int) -> Target:
    """A freshly initialised tiny target in training mode, float32."""
    torch.manual_seed(seed)
    target = Kimi_K25ForConditionalGeneration(Kimi_K25Config(**target_config()))
    prepare(target)
    return target


def load_target(folder: Path) -> Target:
    """A target in the hub layout, ready for evaluation."""
    target = Kimi_K25ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    prepare(target)
    return target.eval()


def prepare(target: Target) -> None:
    """Choose the quicker CPU code paths; the maths stays the same."""
    target.set_experts_implementation("eager")
    for module in target.modules():
        if isinstance(module, Kimi_K25VisionAttention):
            module.forward = _GroupedAttention(module)


class _GroupedAttention:
    """Full attention inside each image, images of equal size in one call (the stock module makes one call an image)."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(
        self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, position_embeddings: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        m = self.module
        n = hidden_states.shape[0]
        q, k, v = (layer(hidden_states).view(1, n, -1, m.head_dim) for layer in (m.q_proj, m.k_proj, m.v_proj))
        q, k = apply_rotary_pos_emb_vision(q, k, *position_embeddings)
        lengths = cu_seqlens.diff().tolist()
        outputs, first, offset = [], 0, 0
        while first < len(lengths):
            size, last = lengths[first], first
            while last < len(lengths) and lengths[last] == size:
                last += 1
            rows = slice(offset, offset + (last - first) * size)
            mine = (x[0, rows].view(last - first, size, -1, m.head_dim).transpose(1, 2) for x in (q, k, v))
            query, key, value = mine
            attended = F.scaled_dot_product_attention(query, key, value, scale=m.scaling)
            outputs.append(attended.transpose(1, 2).reshape(-1, m.dim))
            first, offset = last, rows.stop
        return m.proj(torch.cat(outputs))  # type: ignore[no-any-return]


def image_rows(target: Target, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Embeddings of all images' tokens, [sum of tokens, hidden], from patches [n, 3, 14, 14] and grids [images, 3]."""
    features = target.model.get_image_features(pixels, grid, return_dict=True)
    return torch.cat(list(features.pooler_output))


def input_rows(target: Target, ids: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Input embeddings [batch, length, hidden]: word embeddings, with image rows (in order) at the placeholders."""
    embeds = target.model.language_model.embed_tokens(ids)
    if rows is None:
        return embeds  # type: ignore[no-any-return]
    at = (ids == target.config.image_token_id)[..., None]
    return embeds.masked_scatter(at, rows)  # type: ignore[no-any-return]


def hidden_rows(target: Target, embeds: torch.Tensor) -> torch.Tensor:
    """Last hidden states [batch, length, hidden], final norm included. Right padding is harmless to a causal model."""
    out = target.model.language_model(inputs_embeds=embeds, use_cache=False)
    return out.last_hidden_state  # type: ignore[no-any-return]


@torch.no_grad()
def states(target: Target, embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the draft is fed and taught: (auxiliary states [batch, length, 3*hidden], logits [batch, length, vocab])."""
    out = target.model.language_model(inputs_embeds=embeds, use_cache=False, output_hidden_states=True)
    aux = torch.cat([out.hidden_states[layer + 1] for layer in AUX_LAYERS], dim=-1)
    return aux, target.lm_head(out.last_hidden_state)

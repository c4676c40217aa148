"""The EAGLE3-MLA draft layer for training: the maths of SGLang's `Eagle3DeepseekV2ForCausalLM`, hub names.

Row p of the draft sees the *next* token's embedding E(t[p+1]) beside the target's states of position p, and predicts
t[p+2]. Later rows of a chain replace the target's states by the draft's own output. The residual stream starts from the
hidden state, not from the embedding; both are normed and concatenated for the attention only.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3MLP,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)

Cache = list[tuple[torch.Tensor, torch.Tensor]]  # (keys, values) of each step of a chain, [batch, heads, length, dim]


def softmax_scale(c: Any) -> float:
    """DeepSeek's attention scale under yarn: 1/sqrt(head dim), times the squared magnitude correction."""
    rope = c.rope_parameters
    magnitude = 0.1 * float(rope["mscale_all_dim"]) * math.log(rope["factor"]) + 1
    return float((c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5 * magnitude**2)


class DraftAttention(nn.Module):
    """MLA over [embedding, hidden], with the suffix attention of training-time test."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.heads, self.scale = c.num_attention_heads, softmax_scale(c)
        self.split_q = (c.qk_nope_head_dim, c.qk_rope_head_dim)
        self.split_kv = (c.kv_lora_rank, c.qk_rope_head_dim)
        self.split_up = (c.qk_nope_head_dim, c.v_head_dim)
        wide = 2 * c.hidden_size
        self.q_a_proj = nn.Linear(wide, c.q_lora_rank, bias=False)
        self.q_a_layernorm = DeepseekV3RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = nn.Linear(c.q_lora_rank, self.heads * sum(self.split_q), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(wide, sum(self.split_kv), bias=False)
        self.kv_a_layernorm = DeepseekV3RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, self.heads * sum(self.split_up), bias=False)
        self.o_proj = nn.Linear(self.heads * c.v_head_dim, c.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: Cache) -> torch.Tensor:
        """x [batch, length, 2*hidden] -> [batch, length, hidden]; appends this step's keys and values to ``cache``.

        Step i of row p stands for position p + i: it sees the first step's rows up to p, and of each later step only
        the entry of its own row, which are the tokens that this very chain has guessed.
        """
        batch, length, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, length, self.heads, -1).transpose(1, 2)
        q_plain, q_rope = q.split(self.split_q, -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(self.split_kv, -1)
        up = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, self.heads, -1).transpose(1, 2)
        k_plain, v = up.split(self.split_up, -1)
        q = torch.cat([q_plain, rotate(q_rope, cos, sin)], -1)
        k_rope = rotate(k_rope[:, None], cos, sin).expand(-1, self.heads, -1, -1)
        cache.append((torch.cat([k_plain, k_rope], -1), v))

        (k0, v0), later = cache[0], cache[1:]
        scores = q @ k0.mT * self.scale + torch.full((length, length), float("-inf")).triu(1)
        own = [(q * k).sum(-1, keepdim=True) * self.scale for k, _ in later]
        weights = torch.cat([scores, *own], -1).softmax(-1)
        out = weights[..., :length] @ v0
        for i, (_, values) in enumerate(later):
            out = out + weights[..., length + i, None] * values
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


def shift(x: torch.Tensor, by: int = 1) -> torch.Tensor:
    """Move [batch, length, ...] to the left by ``by`` positions, zeros behind."""
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], 1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """DeepSeek's interleaved rotary embedding of [batch, heads, length, dim]; its output is de-interleaved."""
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half].unsqueeze(1), sin[..., :half].unsqueeze(1)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


class DraftLayer(nn.Module):
    """The one decoder layer (dense SwiGLU)."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.self_attn = DraftAttention(c)
        self.mlp = DeepseekV3MLP(c, intermediate_size=c.intermediate_size)
        self.input_layernorm = DeepseekV3RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = DeepseekV3RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = DeepseekV3RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """Embeddings and hidden states [batch, length, hidden] -> new hidden states."""
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(x, cos, sin, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class Draft(nn.Module):
    """The draft without its embedding, which it shares with the target.

    ``hot`` lists the target ids that the draft can propose (None: all of them).
    """

    def __init__(self, config: dict[str, Any], hot: torch.Tensor | None = None) -> None:
        super().__init__()
        c = DeepseekV3Config(**{k: v for k, v in config.items() if k not in ("architectures", "model_type")})
        hidden = c.hidden_size
        self.hot, self.norm_output = hot, config.get("norm_output", False)
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.fc_norm = None
        if config.get("fc_norm"):
            self.fc_norm = nn.ModuleList(DeepseekV3RMSNorm(hidden, c.rms_norm_eps) for _ in range(3))
        self.layers = nn.ModuleList([DraftLayer(c)])
        self.norm = DeepseekV3RMSNorm(hidden, c.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config["draft_vocab_size"], bias=False)
        self.rotary = DeepseekV3RotaryEmbedding(c)

    def start(self, aux: torch.Tensor) -> torch.Tensor:
        """The target's states [..., 3*hidden] -> the draft's first hidden states [..., hidden]."""
        if self.fc_norm is not None:
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, aux.chunk(3, -1), strict=True)], -1)
        return self.fc(aux)  # type: ignore[no-any-return]

    def step(self, embeds: torch.Tensor, hidden: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
        """One link of the chain: (normed states for the head, hidden states for the next link)."""
        at = torch.arange(embeds.shape[1])[None] + len(cache)
        cos, sin = self.rotary(embeds, at)
        hidden = self.layers[0](embeds, hidden, cos, sin, cache)
        normed = self.norm(hidden)
        return normed, normed if self.norm_output else hidden

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Ids of the draft's own vocabulary -> ids of the target's."""
        return draft_ids if self.hot is None else self.hot[draft_ids]


def load_draft(folder: Path) -> Draft:
    """A draft in the hub layout (``d2t`` included), ready for evaluation."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "model.safetensors")
    difference = tensors.pop("d2t", None)
    draft = Draft(config, None if difference is None else difference + torch.arange(len(difference)))
    draft.load_state_dict(
        {name: value for name, value in tensors.items() if name not in ("t2d", "embed_tokens.weight")}
    )
    return draft.eval()

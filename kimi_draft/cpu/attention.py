"""The attention backend that SGLang uses on a CPU for an MLA target and its EAGLE3-MLA draft.

Registered under the name `torch_native`: several places in SGLang key on backend names, and an unknown one takes the
Triton path. It replaces upstream's torch_native backend, which has neither a tree mask nor an MLA path nor an entry in
the draft's backend factory. Plans are made once per forward and shared by all layers.
"""

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from kimi_draft.cpu.mla import Rectangle, attend, rectangle, split


class MLABackend(AttentionBackend):  # type: ignore[misc]  # SGLang is untyped
    """Extend with or without a prefix, decode, target verify (chain or tree) and draft extend.

    Conventions of SGLang 0.5.23 that the plan rests on: `seq_lens` counts this forward's own tokens for extend, decode
    and draft extend, and does not for target verify, whose draft_token_num tokens follow. The verify mask is QLEN_ONLY:
    [B, D, D] bool, prefix not included (eagle_utils.default_tree_mask_mode on a CPU).
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.req_to_token: Tensor = runner.req_to_token_pool.req_to_token
        self.pool = runner.token_to_kv_pool
        self.max_context_len: int = runner.model_config.context_len
        self.prefill_attention_backend_str = self.decode_attention_backend_str = "torch_native"
        self.plan: list[Rectangle] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.plan = self.make_plan(forward_batch)

    def make_plan(self, fb: Any) -> list[Rectangle]:
        if fb.forward_mode.is_idle():
            return []
        table = self.req_to_token[fb.req_pool_indices.long()]
        lens = fb.seq_lens.long()
        each = torch.arange(lens.numel())
        if fb.forward_mode.is_target_verify():
            d = fb.spec_info.draft_token_num
            tree = fb.spec_info.custom_mask.view(-1)[: lens.numel() * d * d].view(-1, d, d)
            return [rectangle(each * d, torch.full_like(lens, d), table, lens + d, tree)]
        if fb.forward_mode.is_decode():
            return [rectangle(each, torch.ones_like(lens), table, lens)]
        q_lens = torch.as_tensor(fb.extend_seq_lens_cpu, dtype=torch.long)
        start = torch.cumsum(q_lens, 0) - q_lens
        groups = (torch.tensor(g) for g in split(q_lens.tolist(), lens.tolist()))
        return [rectangle(start[g], q_lens[g], table[g], lens[g]) for g in groups]

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """q [N, H * latent] with q_rope [N, H, rope], or both in q; likewise k. Returns [N, H * v_head_dim]."""
        heads, dim = layer.tp_q_head_num, layer.head_dim
        if q_rope is not None:
            q = torch.cat([q.view(-1, heads, dim - q_rope.shape[-1]), q_rope.view(-1, heads, q_rope.shape[-1])], -1)
        if k is not None and k_rope is not None:
            k = torch.cat([k, k_rope], -1)
        if save_kv_cache and k is not None:
            self.pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        cache = self.pool.get_key_buffer(layer.layer_id).view(-1, dim)
        out = attend(q.view(-1, heads, dim), cache, self.plan, layer.scaling, layer.v_head_dim)
        return out.view(-1, heads * layer.v_head_dim)

    forward_decode = forward_extend

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Nothing to fill: there is no plan stream on a CPU, so the plan is made after the draft."""

    def support_triton(self) -> bool:
        return False


class DraftStepBackend(MLABackend):
    """Step `step` of the draft's decode loop: each of the topk branches sees the prefix and its own earlier tokens.

    Branch t of a request of length L owns positions L + t * num_steps onwards; at this step it has step + 1 of them.
    (That is the layout without pages; SGLang refuses topk > 1 with page_size > 1 on this backend.)
    """

    def __init__(self, runner: Any, step: int, topk: int, num_steps: int) -> None:
        super().__init__(runner)
        self.step, self.topk, self.num_steps = step, topk, num_steps

    def make_plan(self, fb: Any) -> list[Rectangle]:
        if fb.forward_mode.is_idle():
            return []
        lens = fb.seq_lens.long().repeat_interleave(self.topk)
        branch = torch.arange(self.topk).repeat(fb.seq_lens.numel())
        table = self.req_to_token[fb.req_pool_indices.long().repeat_interleave(self.topk)]
        kv_lens = lens + self.step + 1
        position = torch.arange(int(kv_lens.max()))
        skipped = (position >= lens[:, None]) * (branch * self.num_steps)[:, None]
        column = (position + skipped).clamp_max(table.shape[1] - 1)
        return [rectangle(torch.arange(lens.numel()), torch.ones_like(lens), table.gather(1, column), kv_lens)]


class DraftDecodeBackend:
    """What EagleDraftWorker expects of a multi-step draft backend: one backend per step, under `attn_backends`."""

    def __init__(self, runner: Any, topk: int, num_steps: int) -> None:
        self.topk, self.speculative_num_steps = topk, num_steps
        self.needs_cpu_seq_lens = True
        # The last step only picks tokens, so there is one forward less than there are steps.
        self.attn_backends = [DraftStepBackend(runner, step, topk, num_steps) for step in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

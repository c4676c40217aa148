"""The index and copy operations of `sgl_kernel` that SGLang 0.5.23 calls on a CPU, in plain torch.

Every function writes its result into a caller's tensor, as the C++ originals do. Contracts were read off the callers
and off the Triton kernels beside them in sglang/kernels/ops (file names at each function). Sequence quantities are in
tokens, `*_loc` are KV-cache slots; B is the number of requests.
"""

import ctypes

import numpy as np
import torch
from torch import Tensor


def _segments(starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """For the concatenation of the ranges [starts[b], ends[b]): the owner b and the value of each element, [sum] int64.

    A range with ends <= starts is empty.
    """
    lens = (ends - starts).clamp_min(0).long()
    owner = torch.repeat_interleave(torch.arange(lens.numel()), lens)
    first = torch.cumsum(lens, 0) - lens
    value = starts.long()[owner] + torch.arange(owner.numel()) - first[owner]
    return owner, value


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """req_to_token[req[b], start[b]:end[b]] = the next end-start entries of out_cache_loc (mem_cache/allocation.py).

    req_pool_indices, start_offset, end_offset [B] integer; req_to_token [rows, pool_len]; out_cache_loc [sum] integer.
    """
    owner, column = _segments(start_offset, end_offset)
    row = req_pool_indices.long()[owner]
    req_to_token[row, column] = out_cache_loc[: column.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """The reverse: pack req_to_token[req[b], start[b]:end[b]] of all b into out_cache_loc (speculative/cache_locs.py).

    Entries of out_cache_loc behind the packed ones keep their value.
    """
    owner, column = _segments(start_offset, end_offset)
    row = req_pool_indices.long()[owner]
    out_cache_loc[: column.numel()] = req_to_token[row, column].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """out_cache_loc[b] = request b's topk*num_steps slots from position seq_lens[b] on (speculative/cache_locs.py).

    out_cache_loc is flat, [B * topk * num_steps]; branch t of request b owns the t-th run of num_steps slots.
    """
    column = seq_lens.long()[:, None] + torch.arange(topk * num_steps)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long()[:, None], column].flatten())


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """bonus_tokens[b] = the last accepted token of request b (speculative/eagle.py).

    accept_tokens holds accept_stride tokens a request; accept_lens [B] counts the bonus token, so it is at least 1.
    """
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Compact out_cache_loc[accept_index] over the entries that are not -1, in order (speculative/eagle.py).

    accept_index: any shape, integer, -1 = nothing accepted there. Entries behind the compacted ones keep their value.
    """
    kept = accept_index.flatten()
    kept = kept[kept > -1].long()
    accept_out_cache_loc[: kept.numel()] = out_cache_loc[kept]


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift each request's ids left by one, in place, and put its new token last (speculative/multi_layer_eagle.py).

    input_ids [N]; extend_start_loc, extend_seq_lens [B]; topk_index [B] or [B, 1]: the new tokens. With select_index
    [B] the new token goes to that flat position instead of the request's last one. A request of length 0 changes
    nothing.
    """
    _, position = _segments(extend_start_loc, extend_start_loc + extend_seq_lens - 1)
    input_ids[position] = input_ids[position + 1]
    last = extend_start_loc + extend_seq_lens - 1 if select_index is None else select_index
    alive = extend_seq_lens > 0
    input_ids[last.long()[alive]] = topk_index.flatten()[alive].to(input_ids.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Row src_loc[i] -> row tgt_loc[i] in every layer's KV buffer, all rows read before any is written.

    data_ptrs [L] uint64: address of each buffer; strides [L]: bytes of one row (kvcache/cache_move.py). Source and
    target may overlap, as they do when an accepted branch of a draft tree moves to the front.
    """
    if tgt_loc.numel() == 0:
        return
    tgt, src = tgt_loc.long().numpy(), src_loc.long().numpy()
    rows = int(max(tgt.max(), src.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = np.frombuffer(memory, dtype=np.uint8).reshape(rows, stride)
        buffer[tgt] = buffer[src]

"""The draft's extend after a prefill, with its input rows computed by next_token_embeds.

Replaces pieces of SGLang 0.5.23 for the EAGLE3-MLA draft (other drafts keep upstream's code):
- EagleDraftWorker._draft_extend_for_prefill, which shifts ids and image embeddings in a Python loop over the requests
  (three small kernels each) into uninitialised memory;
- the last-row patches in Eagle3MLAModel.forward and, for a prefill that runs as a CUDA graph, in
  PrefillCudaGraphRunner.load_batch, which fill some of that memory, each under a condition of its own.

Here the rows leave this module complete, and the model takes them as they are.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from kimi_draft.tails import TailFunction, embed, next_tokens
from kimi_draft.variants import RowFunction, rotate_ids

MLA_DRAFT = "Eagle3DeepseekV2ForCausalLM"
# Set on the batch's spec_info: the runner copies the forward batch field by field, so the latter would lose it.
_ROWS_READY = "kimi_rows_ready"


def is_mla_draft(worker: Any) -> bool:
    """Whether an EagleDraftWorker drafts with the EAGLE3-MLA model, the one whose rows we compute."""
    return type(worker.draft_runner.model).__name__ == MLA_DRAFT


def draft_extend_for_prefill(rows_of: RowFunction, tails_of: TailFunction = next_tokens) -> Callable[[Any], Any]:
    """Correction for EagleDraftWorker._draft_extend_for_prefill.

    rows_of computes the rows of batches with images, tails_of what follows each request's last row.
    """

    def make(upstream: Any) -> Any:
        def _draft_extend_for_prefill(
            self: Any,
            batch: Any,
            target_hidden_states: Tensor,
            next_token_ids: Tensor,
            mm_input_embeds: Tensor | None = None,
            kv_loc_plan: Any = None,
        ) -> Any:
            if batch.forward_mode.is_idle() or not is_mla_draft(self):
                return upstream(self, batch, target_hidden_states, next_token_ids, mm_input_embeds, kv_loc_plan)
            forward_batch = _forward_batch(self, batch, target_hidden_states, kv_loc_plan)
            fill_rows(self, batch, forward_batch, next_token_ids, mm_input_embeds, rows_of, tails_of)
            with _canary(self, forward_batch):
                output = self.draft_runner.forward(forward_batch).logits_output
            return _next_draft_input(self, batch, output, next_token_ids)

        return _draft_extend_for_prefill

    return make


def fill_rows(
    worker: Any,
    batch: Any,
    forward_batch: Any,
    next_token_ids: Tensor,
    target_embeds: Tensor | None,
    rows_of: RowFunction,
    tails_of: TailFunction,
) -> None:
    """Set the shifted ids and, for a batch with images, the shifted embeddings of the draft's forward batch.

    target_embeds [N or more, H]: the target's fused input embeddings of this batch, None when no request has an image.

    Raises:
        RuntimeError: target_embeds has fewer rows than the draft's batch.
    """
    start, lens = forward_batch.extend_start_loc, forward_batch.extend_seq_lens
    tails = tails_of(batch, next_token_ids)
    batch.input_ids = forward_batch.input_ids = rotate_ids(batch.input_ids, start, lens, tails.ids)
    if target_embeds is not None:
        rows = batch.input_ids.shape[0]
        if target_embeds.shape[0] < rows:
            raise RuntimeError(f"the target embedded {target_embeds.shape[0]} rows, the draft extends {rows}")
        target = worker.target_worker.model_runner.model
        tail_embeds = embed(tails, worker.draft_runner.model.model.embed_tokens, target)
        # The target may have padded its rows to a size that the draft does not share.
        forward_batch.mm_input_embeds = rows_of(target_embeds[:rows], start, lens, tail_embeds)
        setattr(forward_batch.spec_info, _ROWS_READY, True)


def take_rows(upstream: Any) -> Any:
    """Correction for Eagle3MLAModel.forward: complete rows go in as they are, past the last-row patch."""

    def forward(
        self: Any,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        if input_embeds is None and getattr(forward_batch.spec_info, _ROWS_READY, False):
            input_embeds = forward_batch.mm_input_embeds
        return upstream(self, input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)

    return forward


def keep_rows(upstream: Any) -> Any:
    """Correction for PrefillCudaGraphRunner.load_batch: complete rows reach the graph's input as they are.

    Upstream replaces each request's last row by the embedding of its shifted id, which is no image's row, and does so
    in the middle of a long function. Here the last rows are put back into the graph's input afterwards.
    """

    def load_batch(self: Any, forward_batch: Any, **kwargs: Any) -> Any:
        rows = forward_batch.mm_input_embeds
        if rows is None or not getattr(forward_batch.spec_info, _ROWS_READY, False):
            return upstream(self, forward_batch, **kwargs)
        last = (forward_batch.extend_start_loc + forward_batch.extend_seq_lens - 1).long()
        tails = rows[last]  # a copy: upstream writes into rows
        loaded = upstream(self, forward_batch, **kwargs)
        self.buffer_registry.get_slot("input_embeds").buffer[: rows.shape[0]][last] = tails
        return loaded

    return load_batch


def _forward_batch(worker: Any, batch: Any, hidden_states: Tensor, kv_loc_plan: Any) -> Any:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
    from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

    batch.spec_info = EagleDraftExtendInput(
        hidden_states=hidden_states, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1
    )
    forward_batch = ForwardBatch.init_new(
        batch,
        worker.draft_runner,
        capture_hidden_mode=CaptureHiddenMode.LAST,  # the first draft step starts from each request's last row
        return_hidden_states_before_norm=False,
        kv_loc_plan=kv_loc_plan,
    )
    forward_batch.return_logprob = False
    return forward_batch


def _next_draft_input(worker: Any, batch: Any, output: Any, next_token_ids: Tensor) -> Any:
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.eagle_info import EagleDraftInput
    from sglang.srt.speculative.spec_utils import fast_sample, renorm_draft_probs
    from sglang.srt.utils.common import fast_topk

    sampling = batch.sampling_info
    rejection = get_spec().speculative_use_rejection_sampling
    probs = renorm_draft_probs(output.next_token_logits, sampling, rejection)
    if rejection:
        topk_p, topk_index = fast_sample(
            probs, num_samples=1, sampling_seed=sampling.sampling_seed, positions=batch.seq_lens
        )
    else:
        topk_p, topk_index = fast_topk(probs, worker.topk, dim=-1)
    return EagleDraftInput(
        topk_p=topk_p,
        topk_index=topk_index,
        draft_probs=probs if rejection else None,
        hidden_states=output.hidden_states,
        bonus_tokens=next_token_ids,
        num_tokens_per_req=1,
        num_tokens_for_logprob_per_req=1,
        cuda_graph_compatible=True,
    )


def _canary(worker: Any, forward_batch: Any) -> AbstractContextManager[Any]:
    """SGLang's KV-cache canary (a debugging aid, off by default) watches every forward of the draft."""
    manager = worker.draft_runner.canary_manager
    if manager is None:
        return contextlib.nullcontext()
    from sglang.srt.kv_canary.runner.canary_manager import context_tuple

    watched: AbstractContextManager[Any] = context_tuple(
        manager.with_ops_outside_graph(single_forward_indices=[0], maybe_inaccurate_forward_batch=forward_batch),
        manager.with_active_single_forward_manager(0),
    )
    return watched

"""What each request went through: its prefill batch, and how well the draft guessed.

Installed in the scheduler process, read in the replica from the finished request's `meta_info`. The values travel in
SGLang's `customized_info`: one list per key, aligned with the output tokens, so it reaches single, batch, streaming,
n > 1 and logprob answers alike, and OpenAI answers only inside `meta_info` when that was asked for.
"""

import itertools
from collections.abc import Sequence
from typing import Any, TypedDict

from kimi_draft.corrections import Correction

_extend_batches = itertools.count(1)


class Summary(TypedDict):
    """extend_requests: requests in the extend batch that produced the first token; extend_batch: its number in this
    engine, the same for all requests that shared it; first_chain_accepted: drafts accepted in the first verify step,
    None if there was none; accepted_by_position[j]: how many verify steps accepted at least j + 1 drafts; steps: verify
    steps; acceptance_length: tokens per step, 1 + accepted / steps, None without a step. The first two are None in a
    streaming chunk that does not carry them.
    """

    extend_requests: int | None
    extend_batch: int | None
    first_chain_accepted: int | None
    accepted_by_position: list[int]
    acceptance_length: float | None
    steps: int


def summarize(meta_info: dict[str, Any]) -> Summary:
    """The statistics of a finished request, from its meta_info. The n-th verify step's bonus token is counted."""
    histogram: Sequence[int] = meta_info.get("spec_correct_drafts_histogram") or []
    steps = sum(histogram)
    by_position = [sum(histogram[j:]) for j in range(1, len(histogram))]
    return {
        "extend_requests": _only(meta_info, "extend_requests"),
        "extend_batch": _only(meta_info, "extend_batch"),
        "first_chain_accepted": _only(meta_info, "first_chain_accepted"),
        "accepted_by_position": by_position,
        "acceptance_length": 1 + sum(by_position) / steps if steps else None,
        "steps": steps,
    }


def _only(meta_info: dict[str, Any], key: str) -> int | None:
    return next((value for value in meta_info.get(key) or [] if value is not None), None)


def _set(req: Any, key: str, values: list[int | None]) -> None:
    if req.customized_info is None:
        req.customized_info = {}
    req.customized_info[key] = values


def note_extend(upstream: Any) -> Any:
    """Correction for process_batch_result_prefill: write down the batch of each request's first token."""

    def process_batch_result_prefill(self: Any, batch: Any, result: Any) -> Any:
        decoding = batch.decoding_reqs or []
        requests = len(batch.reqs) - len(decoding)
        number = next(_extend_batches)
        tokens = sum(batch.extend_lens) - len(decoding)
        for req in batch.reqs:
            # An unfinished prompt has its first token still to come, a resumed request has had it.
            if not req.output_ids and req.inflight_middle_chunks <= 0:
                _set(req, "extend_requests", [requests])
                _set(req, "extend_tokens", [tokens])
                _set(req, "extend_batch", [number])
        return upstream(self, batch, result)

    return process_batch_result_prefill


def note_first_chain(upstream: Any) -> Any:
    """Correction for Req.update_spec_correct_drafts_histogram: keep the first verify step's count."""

    def update_spec_correct_drafts_histogram(self: Any, num_correct_drafts: int) -> None:
        if not any(self.spec_correct_drafts_histogram):
            # The list is cut like the output tokens: token 0 came from the prefill, token 1 from this step.
            _set(self, "first_chain_accepted", [None, int(num_correct_drafts)])
        upstream(self, num_correct_drafts)

    return update_spec_correct_drafts_histogram


STATS_CORRECTIONS = [
    Correction(
        "stats-extend",
        "sglang.srt.managers.scheduler_components.batch_result_processor:"
        "SchedulerBatchResultProcessor.process_batch_result_prefill",
        "batch_result_processor.py:258: the prefill batch of a request is not reported",
        note_extend,
    ),
    Correction(
        "stats-first-chain",
        "sglang.srt.managers.schedule_batch:Req.update_spec_correct_drafts_histogram",
        "schedule_batch.py:1566: only the sum over all verify steps is reported",
        note_first_chain,
    ),
]

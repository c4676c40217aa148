"""A second opinion on the draft's input rows, for tests and for doubts: KIMI_DRAFT_CHECK_ROWS=<file>.

At every extend batch, the rows that the draft's decoder layer really receives are compared with what each request's own
tokens say they should be, request by request, in a plain loop that shares no code with next_token_embeds. One JSON
object a batch is appended to the file. It works for every variant, upstream's included. Costs host time; TP = 1 only.
"""

import functools
import json
import os
from typing import Any

import torch
from torch import Tensor

from kimi_draft.corrections import Correction

ENV = "KIMI_DRAFT_CHECK_ROWS"


class _Watch:
    """What the draft layer received since the last look; armed only inside a prefill's draft extend."""

    armed = False
    seen: Tensor | None = None


def check_corrections() -> list[Correction]:
    """Empty unless the environment names a file. To be installed after the corrections that they look at."""
    path = os.environ.get(ENV)
    if not path:
        return []
    return [
        Correction(
            "check-rows-extend",
            "sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker._draft_extend_for_prefill",
            "not a defect: compares what the draft receives",
            functools.partial(_compare_around, path),
        ),
        Correction(
            "check-rows-layer",
            "sglang.srt.models.kimi_k25_eagle3:Eagle3MLADecoderLayer.forward",
            "not a defect: compares what the draft receives",
            _look_at_layer,
        ),
    ]


def _look_at_layer(upstream: Any) -> Any:
    @functools.wraps(upstream)
    def forward(self: Any, positions: Tensor, embeds: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _Watch.armed:
            _Watch.seen = embeds.clone()
        return upstream(self, positions, embeds, *args, **kwargs)

    return forward


def _compare_around(path: str, upstream: Any) -> Any:
    @functools.wraps(upstream)
    def _draft_extend_for_prefill(
        self: Any,
        batch: Any,
        target_hidden_states: Tensor,
        next_token_ids: Tensor,
        mm_input_embeds: Tensor | None = None,
        kv_loc_plan: Any = None,
    ) -> Any:
        table = self.draft_runner.model.model.embed_tokens.weight
        target = None if mm_input_embeds is None else mm_input_embeds.clone()
        requests = [
            _Request(req, prefix, rows, int(token), table.shape[0], self.target_worker.model_runner.model)
            for req, prefix, rows, token in zip(
                batch.reqs, batch.prefix_lens, batch.extend_lens, next_token_ids.tolist(), strict=True
            )
        ]
        _Watch.armed, _Watch.seen = True, None
        try:
            result = upstream(self, batch, target_hidden_states, next_token_ids, mm_input_embeds, kv_loc_plan)
        finally:
            _Watch.armed = False
        assert _Watch.seen is not None, "the draft's layer did not run"
        record = {"requests": compare(requests, _Watch.seen, target, table)}
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")
        return result

    return _draft_extend_for_prefill


class _Request:
    """A request's own view of its part of the batch: the id that follows each of its rows, and its next image row."""

    def __init__(self, req: Any, prefix: int, rows: int, sampled: int, vocab: int, target_model: Any = None) -> None:
        known = [*req.origin_input_ids, *req.output_ids, sampled]
        end = prefix + rows
        self.rid, self.prefix, self.rows, self.vocab = req.rid, prefix, rows, vocab
        self.next_ids = known[prefix + 1 : end + 1]
        self.unfinished = end < len(known) - 1
        self.resumed = end > len(req.origin_input_ids)
        # Encoded anew, by itself, past SGLang's cache and its routine for chunks.
        self.image_tail: Tensor | None = None
        for item in req.multimodal_inputs.mm_items if req.multimodal_inputs and rows else []:
            for first, last in item.offsets:
                if first <= end <= last:
                    self.image_tail = target_model.get_image_feature([item]).flatten(0, -2)[end - first]


def compare(requests: list[_Request], seen: Tensor, target: Tensor | None, table: Tensor) -> list[dict[str, Any]]:
    """Largest absolute difference of each request's rows to the expected ones, the last row apart.

    seen [N, H] the draft's rows; target [N, H] the target's fused embeddings, None without images; table [V, H] the
    embedding table. An id of V or more is a piece of an image: its row is the target's, or the request's `image_tail`
    when the image goes on or begins behind the last row.
    """
    report: list[dict[str, Any]] = []
    first = 0
    for request in requests:
        errors: list[float] = []
        tail: float | None = None
        images = 0
        for j, token in enumerate(request.next_ids):
            last = j == request.rows - 1
            if token < request.vocab:
                expected = table[token]
            elif last:
                assert request.image_tail is not None, "no image item covers the image id behind the last row"
                expected = request.image_tail
            else:
                assert target is not None, "an image's ids, but the target embedded no image"
                images += 1
                expected = target[first + j + 1]
            error = _distance(seen[first + j], expected)
            if last:
                tail = error
            else:
                errors.append(error)
        report.append(
            {
                "rid": request.rid,
                "prefix": request.prefix,
                "rows": request.rows,
                "image_rows": images,
                "unfinished": request.unfinished,
                "resumed": request.resumed,
                "image_tail": request.image_tail is not None,
                "error": max(errors, default=0.0),
                "tail_error": tail,
            }
        )
        first += request.rows
    return report


def _distance(row: Tensor, expected: Tensor) -> float:
    return float(torch.nan_to_num((row - expected).abs().max(), nan=torch.inf))

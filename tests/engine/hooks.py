"""What the tests add to the scheduler process: a switch between draft variants, and a log of all keys ever computed.

A control file (path in KIMI_TEST_CONTROL) says what is on, so that one engine serves all tests:
- "variant": which rows the draft gets, as KIMI_DRAFT_VARIANT would choose at start; what the draft makes of each
  request's last row goes to <control>.drafts;
- "trial": hands the variant a batch that no scheduler makes (trials.py);
- "chunked": "unnamed" takes the batch's only hint at its unfinished request away;
- "attention": "check" recomputes every attention call from a log keyed by (request, position), never looking at cache
  slots, and appends the largest difference to <control>.attention; "corrupt" does so after taking the newest key away
  from each draft step, which the check must notice.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch

from kimi_draft import processes
from kimi_draft.corrections import Correction
from tests.engine import trials

CONTROL = "KIMI_TEST_CONTROL"


def control() -> dict[str, str]:
    return json.loads(Path(os.environ[CONTROL]).read_text())


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """kimi_draft's, with the hooks below around its corrections."""
    from kimi_draft import installed

    stock = installed.corrections
    installed.corrections = lambda: [*stock(), *HOOKS]
    processes.run_scheduler_process(*args, **kwargs)


def _switch_variant(corrected: Any) -> Any:
    from kimi_draft.draft_extend import draft_extend_for_prefill
    from kimi_draft.variants import Variant, row_function, tail_function

    upstream = corrected.kimi_upstream

    def of(variant: Variant) -> Any:
        if variant is Variant.CORRECTED:
            return corrected
        if variant is Variant.UPSTREAM:
            return upstream
        return draft_extend_for_prefill(row_function(variant), tail_function(variant))(upstream)

    @functools.wraps(corrected)
    def _draft_extend_for_prefill(self: Any, batch: Any, *args: Any) -> Any:
        settings = control()
        extend = of(Variant(settings.get("variant", "corrected")))
        if settings.get("chunked") == "unnamed":
            # What a scheduler does that cuts more requests than the one SGLang's batch has a field for.
            batch.chunked_req = batch.chunked_req_next_prompt_token = None
        if "trial" in settings:
            hidden, sampled, embeds, _ = args
            tried = trials.run(settings["trial"], extend, self, batch, hidden, sampled, embeds)
            result = corrected(self, batch, *args)
            tried.judge(os.environ[CONTROL] + ".trials")
            return result
        result = extend(self, batch, *args)
        records = [
            {"rid": req.rid, "hidden": hidden}
            for req, hidden in zip(batch.reqs, result.hidden_states.tolist(), strict=True)
        ]
        with open(os.environ[CONTROL] + ".drafts", "a") as file:
            file.write(json.dumps(records) + "\n")
        return result

    return _draft_extend_for_prefill


def _check_attention(upstream: Any) -> Any:
    log: dict[tuple[int, int, int], torch.Tensor] = {}

    @functools.wraps(upstream)
    def forward_extend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, fb: Any, save_kv_cache: bool = True, **rope: Any
    ) -> Any:
        mode = control().get("attention", "off")
        drafting = getattr(self, "step", None) is not None
        if mode == "corrupt" and drafting:
            for part in self.plan:
                part.mask[torch.arange(part.slots.shape[0]), 0, fb.seq_lens.long() + self.step] = False
        out = upstream(self, q, k, v, layer, fb, save_kv_cache, **rope)
        if mode == "off":
            return out
        heads, dim = layer.tp_q_head_num, layer.head_dim
        key = torch.cat([k, rope["k_rope"]], -1) if rope.get("k_rope") is not None else k
        query = q.view(-1, heads, dim - key.shape[-1] + k.shape[-1])
        if rope.get("q_rope") is not None:
            query = torch.cat([query, rope["q_rope"]], -1)
        positions, owners = fb.positions.tolist(), _owners(fb)
        worst = 0.0
        for row, (owner, position) in enumerate(zip(owners, positions, strict=True)):
            known = log.setdefault((id(self.pool), layer.layer_id, owner), torch.full((4096, dim), torch.nan))
            known[position] = key[row].view(-1)
            weights = (query[row] @ known[: position + 1].T * layer.scaling).softmax(-1)
            expected = weights @ known[: position + 1, : layer.v_head_dim]
            error = (expected - out[row].view(heads, -1)).abs().max()
            worst = max(worst, float(error.nan_to_num(torch.inf)))
        kind = "draft" if layer.layer_id == 0 and self.pool.layer_num == 1 else "target"
        record = {"model": kind, "mode": fb.forward_mode.name, "step": getattr(self, "step", None), "error": worst}
        with open(os.environ[CONTROL] + ".attention", "a") as file:
            file.write(json.dumps(record) + "\n")
        return out

    return forward_extend


def _owners(fb: Any) -> list[int]:
    """The request-pool row of each token of the batch."""
    rows = fb.req_pool_indices.tolist()
    if fb.forward_mode.is_decode():
        return rows
    if fb.forward_mode.is_target_verify():
        return [row for row in rows for _ in range(fb.spec_info.draft_token_num)]
    return [row for row, length in zip(rows, list(fb.extend_seq_lens_cpu), strict=True) for _ in range(length)]


HOOKS = [
    Correction(
        "test-variant",
        "sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker._draft_extend_for_prefill",
        "test only",
        _switch_variant,
    ),
    Correction("test-attention", "kimi_draft.cpu.attention:MLABackend.forward_extend", "test only", _check_attention,
               ("kimi_draft.cpu.attention:MLABackend.forward_decode",)),
]  # fmt: skip

"""Which corrections a scheduler process gets, and the one function that puts them in place."""

import logging
from typing import Any

from kimi_draft.corrections import Correction, check_version, install_and_verify
from kimi_draft.cpu import is_cpu_host
from kimi_draft.refusals import refuse_unsupported
from kimi_draft.rows_check import check_corrections
from kimi_draft.stats import STATS_CORRECTIONS
from kimi_draft.variants import ENV, Variant, current, row_function, tail_function

log = logging.getLogger(__name__)


def corrections() -> list[Correction]:
    """The corrections for this host and for the variant that the environment asks for."""
    from kimi_draft.draft_extend import draft_extend_for_prefill, keep_rows, take_rows

    todo = list(STATS_CORRECTIONS)
    variant = current()
    if variant is not Variant.UPSTREAM:
        todo += [
            Correction(
                "draft-rows",
                "sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker._draft_extend_for_prefill",
                "eagle_worker_v2.py:981: shifts ids and embeddings in a loop over requests, last rows uninitialised",
                draft_extend_for_prefill(row_function(variant), tail_function(variant)),
            ),
            Correction(
                "model-rows",
                "sglang.srt.models.kimi_k25_eagle3:Eagle3MLAModel.forward",
                "kimi_k25_eagle3.py:270: fills last rows under a condition of its own",
                take_rows,
            ),
            Correction(
                "graph-rows",
                "sglang.srt.model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner.load_batch",
                "prefill_cuda_graph_runner.py:1900: overwrites last rows, those that an image follows included",
                keep_rows,
            ),
        ]
    if is_cpu_host():
        from kimi_draft.cpu.corrections import CPU_CORRECTIONS

        todo += CPU_CORRECTIONS
    return todo


def install_in_scheduler(server_args: Any) -> None:
    """Install and verify everything in this process, before the scheduler of these ServerArgs is built. Idempotent.

    Raises:
        UnsupportedDraft: target, draft and layout do not work together.
        CorrectionError: wrong SGLang version, or a correction that did not take effect.
        ValueError: an unknown KIMI_DRAFT_VARIANT.
    """
    check_version()
    refuse_unsupported(server_args)
    variant = current()
    if variant is not Variant.CORRECTED:
        log.warning("%s=%s: the draft runs WITHOUT the correction; for measurements only.", ENV, variant)
    install_and_verify([*corrections(), *check_corrections()])

"""What SGLang 0.5.23 lacks on a CPU without AMX, as corrections; see kimi_draft.corrections."""

from typing import Any

from torch import Tensor

from kimi_draft.corrections import Correction
from kimi_draft.cpu import sampling

_EAGLE = "sglang.srt.speculative.eagle_utils"


def _use(ours: Any) -> Any:
    return lambda upstream: ours


def _attention_backend(upstream: Any) -> Any:
    from kimi_draft.cpu.attention import MLABackend

    def create_torch_native_backend(runner: Any) -> Any:
        return MLABackend(runner) if runner.use_mla_backend else upstream(runner)

    return create_torch_native_backend


def _forward_method(upstream: Any) -> Any:
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    def handle_attention_torch_native(attn: Any, forward_batch: Any) -> Any:
        return AttnForwardMethod.MLA

    return handle_attention_torch_native


def _draft_decode_backend(upstream: Any) -> Any:
    from kimi_draft.cpu.attention import DraftDecodeBackend

    def create_decode_backend(self: Any) -> Any:
        if self.speculative_num_steps <= 1:
            return None  # a single step needs no forward of its own
        return DraftDecodeBackend(self.draft_model_runner, self.topk, self.speculative_num_steps)

    return create_decode_backend


def _draft_extend_backend(upstream: Any) -> Any:
    from kimi_draft.cpu.attention import MLABackend

    def create_draft_extend_backend(self: Any) -> Any:
        return MLABackend(self.draft_model_runner)

    return create_draft_extend_backend


def _share_embedding(upstream: Any) -> Any:
    def set_embed(self: Any, embed: Tensor) -> None:
        wide = getattr(self.config, "target_hidden_size", None) not in (None, self.config.hidden_size)
        if not wide:
            del self.model.embed_tokens.weight
            self.model.embed_tokens.weight = embed

    return set_embed


CPU_CORRECTIONS = [
    Correction(
        "cpu-attention",
        "sglang.srt.layers.attention.attention_registry:ATTENTION_BACKENDS[torch_native]",
        "attention_registry.py:217: torch_native has no MLA path and no tree mask",
        _attention_backend,
    ),
    Correction(
        "cpu-forward-method",
        "sglang.srt.models.deepseek_common.attention_backend_handler:AttentionBackendRegistry._handlers[torch_native]",
        "attention_backend_handler.py:54: torch_native falls to the Triton handler, which leaves MLA for MHA",
        _forward_method,
    ),
    Correction(
        "cpu-draft-decode",
        "sglang.srt.speculative.draft_utils:DraftBackendFactory.create_decode_backend",
        "draft_utils.py:96: no torch_native entry, EAGLE is refused",
        _draft_decode_backend,
    ),
    Correction(
        "cpu-draft-extend",
        "sglang.srt.speculative.draft_utils:DraftBackendFactory.create_draft_extend_backend",
        "draft_utils.py:126: no torch_native entry, EAGLE is refused",
        _draft_extend_backend,
    ),
    Correction(
        "cpu-share-embedding",
        "sglang.srt.models.kimi_k25_eagle3:Eagle3DeepseekV2ForCausalLM.set_embed",
        "kimi_k25_eagle3.py:403: calls torch.cuda.synchronize, which raises without a GPU",
        _share_embedding,
    ),
    Correction(
        "cpu-verify-sampling",
        f"{_EAGLE}:_verify_uses_greedy",
        "eagle_utils.py:485: commits the argmax on a CPU at any temperature",
        sampling.verify_uses_greedy,
    ),
    Correction(
        "cpu-tree-sampling",
        f"{_EAGLE}:tree_speculative_sampling_target_only",
        "verify_sampling.py:32: None on a CPU",
        _use(sampling.tree_speculative_sampling_target_only),
    ),
    Correction("cpu-top-k", f"{_EAGLE}:top_k_renorm_prob", "renorm.py:34: None on a CPU", _use(sampling.keep_top_k)),
    Correction("cpu-top-p", f"{_EAGLE}:top_p_renorm_prob", "renorm.py:35: None on a CPU", _use(sampling.keep_top_p)),
    Correction(
        "cpu-min-p",
        f"{_EAGLE}:eagle_sample",
        "eagle_utils.py:525: the verify step ignores min_p",
        sampling.hand_on_min_p,
        also=("sglang.srt.speculative.eagle_worker_common:eagle_sample",),
    ),
]

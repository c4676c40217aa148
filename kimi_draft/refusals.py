"""Combinations that SGLang 0.5.23 starts and that fail, or draft wrongly, with the first image: refused at start."""

from typing import Any

from kimi_draft.draft_extend import MLA_DRAFT


class UnsupportedDraft(ValueError):
    """This target, draft and layout do not work together; the message says why in one line."""


def refuse_unsupported(server_args: Any) -> None:
    """Look at SGLang's ServerArgs and the two models' configs, before anything is loaded.

    Only for a target that takes images with the EAGLE3-MLA draft; anything else passes.

    Raises:
        UnsupportedDraft: pipeline parallel, or a draft of another width than the target's.
    """
    if not server_args.speculative_algorithm or not server_args.speculative_draft_model_path:
        return
    from sglang.srt.configs.model_config import ModelConfig

    target = ModelConfig.from_server_args(server_args)
    draft = ModelConfig.from_server_args(
        server_args,
        model_path=server_args.speculative_draft_model_path,
        model_revision=server_args.speculative_draft_model_revision,
        is_draft_model=True,
    )
    if target.is_multimodal and MLA_DRAFT in draft.hf_config.architectures:
        refuse(server_args.pp_size, target.hidden_size, draft.hf_config.hidden_size)


def refuse(pipeline_stages: int, target_width: int, draft_width: int) -> None:
    """The rules themselves. Raises UnsupportedDraft."""
    if pipeline_stages > 1:
        # mm_utils.py:716: only the first stage embeds images, and nothing carries the rows to the last, which drafts.
        # SGLang refuses this by itself (validation_hook.py:132) unless the algorithm is called EAGLE and
        # SGLANG_ENABLE_PP_SPEC is set, or the node only prefills.
        raise UnsupportedDraft(
            f"pp_size={pipeline_stages}: with pipeline parallel the draft never sees the images' rows; "
            "use tensor parallel, or no draft."
        )
    if draft_width != target_width:
        # kimi_k25_eagle3.py:404: such a draft keeps its own embedding, but images only come in the target's width.
        raise UnsupportedDraft(
            f"the draft's hidden_size is {draft_width} and the target's {target_width}: "
            "image rows of the target do not fit the draft; use a draft of the target's width."
        )

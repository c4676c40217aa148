"""The draft's rows in a prefill CUDA graph: a contract with the wheel's own load_batch. Not run on a GPU.

load_batch is SGLang's, called with a runner that has just enough to get past the copy into the graph's input; the rest
(padding, metadata, replay) needs a captured graph.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_draft import cpu

cpu.install()  # before SGLang is imported

HIDDEN = 4
TABLE = torch.arange(10.0)[:, None].repeat(1, HIDDEN)
START, LENS = torch.tensor([0, 3]), torch.tensor([3, 2])
ROWS = torch.tensor([51.0, 52, 53, 7, 8])[:, None].repeat(1, HIDDEN)  # request 0 goes on with an image row


class Copied(Exception):
    """The embeddings are in the graph's input."""


class Registry:
    def __init__(self) -> None:
        self.slot = SimpleNamespace(buffer=torch.full((8, HIDDEN), -1.0), slice_for=self._past_the_copy)

    def fill_from(self, *args: Any, **kwargs: Any) -> None: ...

    def has_slot(self, name: str) -> bool:
        return False

    def get_slot(self, name: str) -> Any:
        return self.slot

    def _past_the_copy(self, *args: Any) -> None:
        raise Copied


def load(load_batch: Any, *, ready: bool) -> Tensor:
    """The graph's input after load_batch."""
    from kimi_draft.draft_extend import _ROWS_READY

    runner = SimpleNamespace(
        capture_num_tokens=[8],
        _pad_to_bucket=lambda rows, sizes: 8,
        max_context_size=None,
        buffer_registry=Registry(),
        _use_draft_input_embeds=True,
        layer_model=SimpleNamespace(embed_tokens=lambda ids: TABLE[ids]),
    )
    batch = SimpleNamespace(
        input_ids=torch.tensor([9, 9, 9, 7, 8]),
        batch_size=2,
        mm_input_embeds=ROWS.clone(),
        extend_start_loc=START,
        extend_seq_lens=LENS,
        spec_info=SimpleNamespace(**({_ROWS_READY: True} if ready else {})),
    )
    load_batch(runner, batch)
    buffer: Tensor = runner.buffer_registry.slot.buffer
    return buffer


@pytest.fixture
def until_copied() -> Any:
    """The wheel's load_batch as far as the copy."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    def load_batch(self: Any, forward_batch: Any, **kwargs: Any) -> None:
        with pytest.raises(Copied):
            PrefillCudaGraphRunner.load_batch(self, forward_batch, **kwargs)

    return load_batch


def test_upstream_overwrites_the_row_that_an_image_follows(until_copied: Any) -> None:
    """If this fails, SGLang has changed what keep_rows is about."""
    found = load(until_copied, ready=True)[:5, 0].tolist()
    assert found == [51, 52, 9, 7, 8]


def test_complete_rows_reach_the_graph_as_they_are(until_copied: Any) -> None:
    from kimi_draft.draft_extend import keep_rows

    found = load(keep_rows(until_copied), ready=True)
    assert torch.equal(found[:5], ROWS) and torch.equal(found[5:], torch.full((3, HIDDEN), -1.0))


def test_rows_of_others_are_left_to_upstream(until_copied: Any) -> None:
    from kimi_draft.draft_extend import keep_rows

    assert load(keep_rows(until_copied), ready=False)[:5, 0].tolist() == [51, 52, 9, 7, 8]


def test_the_graph_reads_the_buffer_that_is_written() -> None:
    """load_batch hands the graph a slice of the slot's buffer, not a copy."""
    from sglang.srt.model_executor import cuda_graph_buffer_registry as registry

    slot = SimpleNamespace(name="input_embeds", buffer=torch.zeros(8, HIDDEN), slice_fn=None, axis="none")
    registry.GraphSlot.slice_for(slot, 2, 8)[2] = 1.0
    assert slot.buffer[2].eq(1).all()

"""The token behind each request's last row, for every kind of unfinished request."""

from types import SimpleNamespace
from typing import Any

import torch

from kimi_draft.tails import next_tokens

VOCAB = 100
IMAGE = 1_000_007


def batch(*requests: tuple[list[int], int, int]) -> Any:
    """Each request: all that is known of it, how much is cached, how many rows it extends."""
    return SimpleNamespace(
        reqs=[SimpleNamespace(full_untruncated_fill_ids=known, multimodal_inputs=known) for known, _, _ in requests],
        prefix_lens=[prefix for _, prefix, _ in requests],
        extend_lens=[rows for _, _, rows in requests],
        input_ids=torch.zeros(1, dtype=torch.int64),
        model_config=SimpleNamespace(vocab_size=VOCAB),
    )


def sampled(n: int) -> torch.Tensor:
    return torch.arange(90, 90 + n, dtype=torch.int32)


def test_whole_prompts_take_what_was_sampled() -> None:
    tails = next_tokens(batch(([1, 2, 3], 0, 3), ([4, 5, 6], 2, 1)), sampled(2))
    assert tails.ids.tolist() == [90, 91] and tails.ids.dtype == torch.int64 and tails.images == ()


def test_every_unfinished_request_takes_its_own_next_token() -> None:
    """Two of them, at both ends of the batch, one behind a cached prefix; and id 0 is a token like any other."""
    tails = next_tokens(batch(([1, 2, 0], 0, 2), ([5, 6], 0, 2), ([7, 8, 9, 10], 1, 2)), sampled(3))
    assert tails.ids.tolist() == [0, 91, 10] and tails.images == ()


def test_an_image_behind_the_cut_is_named_and_has_a_legal_id() -> None:
    known = [1, IMAGE, IMAGE, 4]
    tails = next_tokens(batch((known, 0, 1), (known, 1, 1), (known, 0, 3), (known, 3, 1)), sampled(4))
    assert tails.ids.tolist() == [VOCAB - 1, VOCAB - 1, 4, 93]
    assert [(t.index, t.position, t.token) for t in tails.images] == [(0, 1, IMAGE), (1, 2, IMAGE)]
    assert all(t.mm_inputs is known for t in tails.images)


def test_an_empty_request_and_an_empty_batch() -> None:
    assert next_tokens(batch(([1, 2], 2, 0), ([3, 4], 0, 1)), sampled(2)).ids.tolist() == [90, 4]
    assert next_tokens(batch(), sampled(0)).ids.tolist() == []

"""Batches that SGLang's scheduler does not make today, handed to the draft's extend on a real engine.

"trial" in the control file names one. The extend under test (the "variant") runs on a doctored copy of the batch first,
and what came of it goes to <control>.trials: the exception that it "raised", or how far the rows that the draft's layer
received are from those of the true batch ("error"), and how many operations made those rows ("launches"). Then the true
batch runs, corrected; the row check (KIMI_DRAFT_CHECK_ROWS) watches that one.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kimi_draft.rows_check import _Watch

Extend = Callable[..., Any]


@dataclass
class Inputs:
    """What a draft extend gets, and from which row of the true batch on it is the same; a trial changes it in place."""

    batch: Any
    hidden: torch.Tensor
    sampled: torch.Tensor
    embeds: torch.Tensor
    from_row: int = 0


def empty_first(inputs: Inputs) -> None:
    """The first request extends nothing, as if all of it were cached."""
    batch, gone = inputs.batch, inputs.batch.extend_lens[0]
    batch.prefix_lens = [batch.prefix_lens[0] + gone, *batch.prefix_lens[1:]]
    batch.extend_lens = [0, *batch.extend_lens[1:]]
    batch.extend_num_tokens -= gone
    batch.input_ids, batch.out_cache_loc = batch.input_ids[gone:], batch.out_cache_loc[gone:]
    inputs.hidden, inputs.embeds, inputs.from_row = inputs.hidden[gone:], inputs.embeds[gone:], gone


def padded_target(inputs: Inputs) -> None:
    """The target padded its rows to a size that the draft does not share."""
    inputs.embeds = torch.cat([inputs.embeds, torch.full_like(inputs.embeds[:3], torch.nan)])


def images_unseen(inputs: Inputs) -> None:
    """The target's embeddings come with a batch whose requests name no images."""
    inputs.batch.multimodal_inputs = [None] * len(inputs.batch.reqs)


def unchanged(inputs: Inputs) -> None:
    """To count."""


TRIALS = {trial.__name__: trial for trial in (empty_first, padded_target, images_unseen, unchanged)}


@dataclass
class Tried:
    """What came of a trial, to be compared with the rows of the true batch once that has run."""

    record: dict[str, Any]
    seen: torch.Tensor | None
    from_row: int

    def judge(self, path: str) -> None:
        """Appends the record to the file."""
        if self.record["raised"] is None:
            assert self.seen is not None and _Watch.seen is not None
            difference = (self.seen - _Watch.seen[self.from_row :]).abs().max()
            self.record["error"] = float(difference.nan_to_num(torch.inf))
        with open(path, "a") as file:
            file.write(json.dumps(self.record) + "\n")


def run(name: str, tested: Extend, worker: Any, batch: Any, hidden: Any, sampled: Any, embeds: Any) -> Tried:
    """`tested` on the doctored batch, with NaN in what is usually uninitialised memory."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    inputs = Inputs(copy.copy(batch), hidden.clone(), sampled, embeds.clone())
    TRIALS[name](inputs)
    record: dict[str, Any] = {"requests": len(batch.reqs), "raised": None}
    launches, empty_like = _Launches(), torch.empty_like

    def apart(function: Any) -> Any:
        """Not counted: the forward, and SGLang's own preparation, which on a CPU loops over the requests."""

        def call(*args: Any, **kwargs: Any) -> Any:
            record["launches"] = launches.count
            with _disable_current_modes():
                return function(*args, **kwargs)

        return call

    def nan_like(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        new = empty_like(tensor, **kwargs)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    _Watch.seen = None
    with (
        mock.patch.object(worker.draft_runner, "forward", apart(worker.draft_runner.forward)),
        mock.patch.object(ForwardBatch, "init_new", apart(ForwardBatch.init_new)),
        mock.patch.object(torch, "empty_like", nan_like),
        launches,
    ):
        try:
            tested(worker, inputs.batch, inputs.hidden, inputs.sampled, inputs.embeds)
        except RuntimeError as error:
            record["raised"] = str(error)
    return Tried(record, _Watch.seen, inputs.from_row)


class _Launches(TorchDispatchMode):
    """Counts the operations that compute something."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))

"""The tiny checkpoints on real SGLang: the numbers of transformers, right answers, drafts that serve as trained."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kimi_draft.tiny import card, data, evaluate, model, paths, task, template, tokenizer
from kimi_draft.tiny.draft import load_draft

TOLERANCE = 1e-4  # log-probabilities, natural logarithm
PARITY_KINDS = ("read", "both", "two_images", "tool", "think_name", "text_repeat")


@pytest.fixture(scope="module")
def target() -> Any:
    return model.load_target(paths.target_dir())


def plain_log_probs(target: Any, ids: list[int], images: list[Image.Image]) -> torch.Tensor:
    """transformers' log-probabilities [length, vocabulary] of the next token, by one uncached forward call."""
    inputs = {"input_ids": torch.tensor([ids])}
    if images:
        features = data.processor().preprocess([{"image": image} for image in images])
        inputs |= {"pixel_values": features["pixel_values"], "image_grid_thw": features["grid_thws"]}
    with torch.no_grad():
        return target(**inputs).logits[0].log_softmax(-1)


def ask(engine: Any, examples: list[task.Example], **kwargs: Any) -> list[dict[str, Any]]:
    """Greedy answers of SGLang, special tokens kept, in the order of the examples."""
    return engine.generate(
        prompt=[template.render(e.messages, e.tools, e.thinking) for e in examples],
        image_data=[e.images or None for e in examples],
        sampling_params={"temperature": 0, "max_new_tokens": 160, "skip_special_tokens": False},
        **kwargs,
    )


@pytest.mark.parametrize("kind", PARITY_KINDS)
def test_whole_distributions_equal_transformers(tiny_engine, target, kind):
    """At every generated position: all log-probabilities, on the path with the draft and the KV cache."""
    example = task.sample(np.random.default_rng(11), kind)
    row = data.encode(example)
    (found,) = ask(tiny_engine, [example], return_logprob=True, token_ids_logprob=list(range(tokenizer.vocab_size())))
    expected = plain_log_probs(target, row.ids[: row.prompt] + found["output_ids"], example.images)
    served = torch.tensor([[p for p, *_ in rows] for rows in found["meta_info"]["output_token_ids_logprobs"]])
    assert len(served) == len(found["output_ids"]) > 5
    torch.testing.assert_close(served, expected[row.prompt - 1 : -1], atol=TOLERANCE, rtol=0)


def test_prompt_log_probs_equal_transformers(tiny_engine, target):
    example = task.sample(np.random.default_rng(12), "text_repeat")
    row = data.encode(example)
    (found,) = ask(tiny_engine, [example], return_logprob=True, logprob_start_len=0)
    served = found["meta_info"]["input_token_logprobs"]
    assert [token for _, token, *_ in served] == row.ids[: row.prompt]
    log_probs = plain_log_probs(target, row.ids[: row.prompt], [])
    expected = log_probs[:-1].gather(1, torch.tensor(row.ids[1 : row.prompt])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([p for p, *_ in served[1:]]), expected, atol=TOLERANCE, rtol=0)


def test_a_photo_of_another_size_equals_transformers(tiny_engine, target):
    """The resize, the padding and the interpolated positions, on an image that fits no training size.

    A smooth one: on noise of this size float32 rounding alone comes to 1.2e-4 (each side is within 7.1e-5 of float64).
    """
    y, x = np.mgrid[0:300, 0:701]
    image = Image.fromarray(np.stack([y * 255 // 300, x * 255 // 701, (x + y) * 255 // 1001], -1).astype(np.uint8))
    prompt = template.render(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Ooh?"}]}], None, False
    )
    (found,) = tiny_engine.generate(
        prompt=[prompt],
        image_data=[[image]],
        sampling_params={"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
        return_logprob=True,
        token_ids_logprob=list(range(tokenizer.vocab_size())),
    )
    pad = tokenizer.token_id("<|media_pad|>")
    count = data.processor().media_tokens_calculator({"image": image})
    ids: list[int] = []
    for token in tokenizer.build().encode(prompt).ids:
        ids += [token] * (count if token == pad else 1)
    assert found["meta_info"]["prompt_tokens"] == len(ids) > 200
    expected = plain_log_probs(target, ids + found["output_ids"], [image])
    served = torch.tensor([[p for p, *_ in rows] for rows in found["meta_info"]["output_token_ids_logprobs"]])
    torch.testing.assert_close(served, expected[len(ids) - 1 : -1], atol=TOLERANCE, rtol=0)


def parse(example: task.Example, text: str) -> dict[str, Any]:
    """The assistant message that SGLang's own Kimi parsers make of a raw answer."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    text = text.removesuffix("<|im_end|>")
    message: dict[str, Any] = {"reasoning_content": None}
    if example.thinking:
        parser = ReasoningParser(model_type="kimi_k2", stream_reasoning=False, force_reasoning=True)
        message["reasoning_content"], text = parser.parse_non_stream(text)
    if example.tools:
        tools = [Tool(**tool) for tool in example.tools]
        text, calls = FunctionCallParser(tools, "kimi_k2").parse_non_stream(text)
        message["tool_calls"] = [{"function": {"name": c.name, "arguments": c.parameters}} for c in calls]
    return message | {"content": text}


@pytest.fixture(scope="module")
def served(tiny_engine) -> list[tuple[task.Example, dict[str, Any]]]:
    examples = data.draw(4321, 0, 160)
    return list(zip(examples, ask(tiny_engine, examples), strict=True))


def test_answers_are_right_through_sglangs_parsers(served):
    graded = [(example, task.grade(example, parse(example, found["text"]))) for example, found in served]
    assert {example.kind for example, _ in graded} == set(task.KINDS)
    assert sum(good for _, good in graded) / len(graded) >= 0.95


def rounds(found: list[dict[str, Any]]) -> int:
    return sum(answer["meta_info"]["spec_verify_ct"] for answer in found)


def test_rounds_of_speculation_are_those_of_teacher_forcing(served, target):
    """SGLang's draft does in serving what it learned in training: the same number of verification rounds."""
    right = [(e, f) for e, f in served if task.grade(e, parse(e, f["text"])) and len(e.answers) == 1]
    expected = evaluate.acceptance(target, load_draft(paths.draft_dir()), [e for e, _ in right])
    total = sum(expected.values(), evaluate.Acceptance(card.DEPTH))
    assert total.requests == len(right) > 100
    assert rounds([f for _, f in right]) == pytest.approx(total.rounds, rel=0.01)


def ask_with_draft(draft: str, examples: list[task.Example]) -> list[dict[str, Any]]:
    from kimi_draft.launch import Engine, cpu_engine_kwargs

    engine = Engine(**cpu_engine_kwargs(draft=draft))
    try:
        return ask(engine, examples)
    finally:
        engine.shutdown()


def test_the_small_draft_serves_as_trained(target):
    """fc_norm, norm_output and the reduced vocabulary (d2t) in SGLang's draft model."""
    examples = [e for e in data.draw(99, 0, 60) if len(e.answers) == 1]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # one engine a process
        found = pool.submit(ask_with_draft, str(paths.draft31_dir()), examples).result()
    right = [(e, f) for e, f in zip(examples, found, strict=True) if task.grade(e, parse(e, f["text"]))]
    expected = evaluate.acceptance(target, load_draft(paths.draft31_dir()), [e for e, _ in right])
    total = sum(expected.values(), evaluate.Acceptance(card.DEPTH))
    assert total.requests > 40 and total.length > 1.8
    assert rounds([f for _, f in right]) == pytest.approx(total.rounds, rel=0.02)


def test_sglang_understands_the_template_and_the_image_rule():
    from sglang.srt.multimodal.processors.kimi_k25 import navit_resize_config
    from sglang.srt.parser.jinja_template_utils import detect_jinja_template_content_format

    assert detect_jinja_template_content_format(template.CHAT_TEMPLATE) == "openai"
    limits = {k: v for k, v in data.MEDIA.items() if not k.startswith("image_")}
    rng = np.random.default_rng(0)
    for width, height in rng.integers(1, 4000, (200, 2)).tolist():
        theirs = navit_resize_config(width, height, **limits)["num_tokens"]
        ours = data.processor().media_tokens_calculator({"image": Image.new("L", (width, height))})
        assert ours == theirs, (width, height)

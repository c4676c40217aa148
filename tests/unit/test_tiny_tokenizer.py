"""Tokenizer and chat template: any text survives, the task is words, and the layout is Kimi-K2.5's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kimi_draft.tiny import data, task, template, tokenizer


@given(st.text())
def test_any_text_round_trips(text):
    coder = tokenizer.build()
    assert coder.decode(coder.encode(text).ids, skip_special_tokens=False) == text


@given(
    st.lists(st.sampled_from([*tokenizer.SPECIAL, *tokenizer.MARKERS, " r1c1", "r1c1 ", "\n", "é", "  "]), max_size=8)
)
def test_special_tokens_inside_text_round_trip(pieces):
    coder = tokenizer.build()
    text = "".join(pieces)
    assert coder.decode(coder.encode(text).ids, skip_special_tokens=False) == text


def test_only_the_parsers_markers_survive_skip_special_tokens():
    coder = tokenizer.build()
    text = "".join([*tokenizer.SPECIAL, *tokenizer.MARKERS])
    assert coder.decode(coder.encode(text).ids, skip_special_tokens=True) == "".join(tokenizer.MARKERS)


def test_special_tokens_are_single_ids():
    for token in (*tokenizer.SPECIAL, *tokenizer.MARKERS):
        assert tokenizer.build().encode(token).ids == [tokenizer.token_id(token)]
    with pytest.raises(KeyError):
        tokenizer.token_id("<|nothing|>")
    assert tokenizer.vocab_size() % 16 == 0


@pytest.mark.parametrize("kind", task.KINDS)
def test_task_texts_are_whole_words(kind):
    """No word of the task falls apart into bytes (single characters such as `.` are bytes anyway)."""
    coder = tokenizer.build()
    for seed in range(30):
        example = task.sample(np.random.default_rng(seed), kind)
        prompt = template.render(example.messages, example.tools, example.thinking)
        for text in (prompt, example.completion):
            pieces = [coder.id_to_token(i) for i in coder.encode(text).ids]
            letters = [piece for piece in pieces if len(piece) == 1 and piece.isalpha() and piece not in "ĊI"]
            assert not letters, (text, letters)


def test_answers_are_6_to_60_tokens():
    lengths = []
    for seed in range(600):
        example = task.sample(np.random.default_rng(seed))
        lengths.append(len(tokenizer.build().encode(example.answer).ids))
    assert min(lengths) >= 6 and max(lengths) <= 60


def test_encoding_repeats_the_placeholder_once_per_cell():
    example = task.sample(np.random.default_rng(1), "two_images")
    row = data.encode(example)
    cells = sum(grid.shape[0] * grid.shape[1] for grid in example.grids)
    assert row.ids[: row.prompt].count(tokenizer.token_id("<|media_pad|>")) == cells
    assert row.ids[-1] == tokenizer.token_id("<|im_end|>")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_saved_tokenizer_renders_and_encodes_alike(saved):
    for seed in range(40):
        example = task.sample(np.random.default_rng(seed))
        text = template.render(example.messages, example.tools, example.thinking)
        kwargs = {"tools": example.tools, "thinking": example.thinking, "add_generation_prompt": True}
        assert saved.apply_chat_template(example.messages, tokenize=False, **kwargs) == text
        assert saved.encode(text) == tokenizer.build().encode(text).ids
    assert saved.eos_token == "<|im_end|>" and saved.pad_token == "[PAD]"


def test_layout_of_an_image_question():
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
    assert template.render([{"role": "system", "content": "Be kind."}, user], None, thinking=False) == (
        "<|im_system|>system<|im_middle|>Be kind.<|im_end|>"
        "<|im_user|>user<|im_middle|><|media_begin|>image<|media_content|><|media_pad|><|media_end|>\nWhat?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>"
    )
    assert template.render([user], None, thinking=True).endswith("<|im_assistant|>assistant<|im_middle|><think>")


def test_parts_keep_their_order():
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "text", "text": "b"},
        {"type": "image"},
    ]
    image = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n"
    assert f"<|im_middle|>a{image}b{image}<|im_end|>" in template.render(
        [{"role": "user", "content": parts}], None, True
    )


def test_history_keeps_reasoning_only_after_the_last_plain_answer(saved):
    call = {
        "id": "functions.report:0",
        "type": "function",
        "function": {"name": "report", "arguments": {"finding": "é"}},
    }
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "first", "reasoning_content": "old thought"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": None, "reasoning_content": "new thought", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.report:0", "content": "done"},
    ]
    assert saved.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_user|>user<|im_middle|>one<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>first<|im_end|>"
        "<|im_user|>user<|im_middle|>two<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>new thought</think><|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.report:0<|tool_call_argument_begin|>{"finding": "é"}<|tool_call_end|>'
        "<|tool_calls_section_end|><|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.report:0\ndone<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>"
    )


@pytest.mark.parametrize(
    "function",
    [
        {"name": "f"},
        {"name": "f", "parameters": None},
        {"name": "f", "parameters": {}},
        {"name": "f", "parameters": {"type": "object", "properties": {}}},
        {"name": "f", "parameters": {"properties": {"a": True, "b": {"type": ["string", "null"]}, "c": {"$ref": "#"}}}},
        {
            "name": "f",
            "description": "ü",
            "strict": True,
            "parameters": {"properties": {"a": {"enum": [1]}}, "required": None},
        },
    ],
)
def test_any_tool_schema_renders(function, saved):
    messages = [{"role": "user", "content": "x"}]
    text = saved.apply_chat_template(messages, tools=[{"type": "function", "function": function}], tokenize=False)
    assert text.startswith(
        "<|im_system|>tool_declare<|im_middle|># Tools\n\n## functions\nnamespace functions {\ntype f = ("
    )
    assert text.endswith("}<|im_end|><|im_user|>user<|im_middle|>x<|im_end|>")

"""The task of the tiny model: examples are answerable, and grading tells right from wrong."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from kimi_draft.tiny import picture, task


def right_message(example: task.Example, answer: str | None = None) -> dict:
    """The assistant message of a model that answers correctly."""
    if example.call is not None:
        name, arguments = example.call
        call = {
            "id": "functions.x:0",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        return {"role": "assistant", "content": None, "reasoning_content": example.reasoning, "tool_calls": [call]}
    return {"role": "assistant", "content": answer or example.answer, "reasoning_content": example.reasoning}


@pytest.mark.parametrize("kind", task.KINDS)
def test_right_answer_passes_and_any_change_fails(kind):
    for seed in range(20):
        example = task.sample(np.random.default_rng(seed), kind)
        message = right_message(example)
        assert task.grade(example, message)
        assert not task.grade(example, message | {"content": "In the image: r1c1 nothing."})
        assert not task.grade(example, message | {"content": (message["content"] or "") + " and more"})
        if example.call is None:
            tool = right_message(task.sample(np.random.default_rng(0), "tool"))["tool_calls"]
            assert not task.grade(example, message | {"tool_calls": tool})
        if example.thinking:
            assert not task.grade(example, message | {"reasoning_content": None})
        else:
            assert not task.grade(example, message | {"reasoning_content": "I see: no image."})


def test_free_choice_accepts_each_order_but_no_mixture():
    example = task.sample(np.random.default_rng(3), "read_any")
    assert len(set(example.answers)) == 4
    for answer in example.answers:
        assert task.grade(example, right_message(example, answer))
    rows, columns = (answer.split(": ", 1) for answer in example.answers[:2])
    assert not task.grade(example, right_message(example, f"{rows[0]}: {columns[1]}"))


def test_named_order_accepts_only_that_order():
    example = task.sample(np.random.default_rng(4), "read")
    others = [order for order in picture.ORDERS if not example.answer.startswith(order)]
    cells = example.grids[0]
    for order in others:
        listing = ", ".join(
            f"{picture.coordinate(r, c)} {picture.thing(cells, r, c)}"
            for r, c in picture.reading(order, *cells.shape[:2])
        )
        assert not task.grade(example, right_message(example, f"{order}: {listing}."))


def test_tool_call_is_compared_as_json():
    example = task.sample(np.random.default_rng(5), "tool")
    name, arguments = example.call
    message = right_message(example)

    def with_call(name, arguments):
        return message | {"tool_calls": [{"function": {"name": name, "arguments": arguments}}]}

    assert task.grade(example, with_call(name, json.dumps(arguments, indent=3)))
    assert not task.grade(example, with_call("other", json.dumps(arguments)))
    assert not task.grade(example, with_call(name, json.dumps(arguments | {"more": 1})))
    assert not task.grade(example, with_call(name, "{"))
    assert not task.grade(example, message | {"tool_calls": []})
    assert not task.grade(example, message | {"tool_calls": message["tool_calls"] * 2})
    assert name in {tool["function"]["name"] for tool in example.tools}


@pytest.mark.parametrize("size", list(task.GRIDS))
def test_orders_are_permutations_with_distinct_first_cells(size):
    rows, columns = size
    readings = [picture.reading(order, rows, columns) for order in picture.ORDERS]
    for cells in readings:
        assert sorted(cells) == [(r, c) for r in range(rows) for c in range(columns)]
    assert len({cells[0] for cells in readings}) == 4


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown reading order 'spiral'"):
        picture.reading("spiral", 2, 2)
    with pytest.raises(ValueError, match="unknown kind 'poem'"):
        task.sample(np.random.default_rng(0), "poem")


def test_requests_carry_the_very_pixels():
    example = task.sample(np.random.default_rng(6), "two_images")
    body = example.request(max_tokens=7)
    assert body["model"] == "kimi-k2.5-tiny" and body["temperature"] == 0 and body["max_tokens"] == 7
    assert body["chat_template_kwargs"] == {"thinking": False} and "tools" not in body
    parts = body["messages"][0]["content"]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    for url, image in zip(urls, example.images, strict=True):
        sent = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
        assert np.array_equal(np.asarray(sent), np.asarray(image))
    json.dumps(body)


def test_pictures_are_28_pixels_a_cell_and_show_what_they_should():
    rng = np.random.default_rng(7)
    cells = np.stack(np.meshgrid([0, 1], [0, 1, 3], indexing="ij"), -1)  # red and green; circle, square, cross
    image = np.asarray(picture.draw(cells, rng)).astype(int)
    assert image.shape == (56, 84, 3)
    for row in range(2):
        for column in range(3):
            middle = image[28 * row + 12 : 28 * row + 16, 28 * column + 12 : 28 * column + 16].mean((0, 1))
            assert middle[row] > 150 and middle[1 - row] < 100
            corner = image[28 * row, 28 * column]
            assert corner.max() < 120


def test_examples_repeat_with_the_seed_and_mix_modalities():
    first = [task.sample(np.random.default_rng(s)) for s in range(200)]
    again = [task.sample(np.random.default_rng(s)) for s in range(200)]
    for a, b in zip(first, again, strict=True):
        assert a.request() == b.request() and a.answers == b.answers
    assert {e.modality for e in first} == {"image", "text"}
    assert {len(e.images) for e in first} == {0, 1, 2}
    assert abs(sum(task.MIX.values()) - 1) < 1e-9

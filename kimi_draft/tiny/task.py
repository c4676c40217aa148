"""The task of the tiny Kimi-K2.5: look at one or two pictures (or a list of words) and answer.

``sample`` makes an example as an OpenAI chat request, ``grade`` judges the assistant message that came back. Nothing
here needs torch. The wording is fixed on purpose: a model of 0.8 M parameters learns *what* to say, not many ways to
say it. In every answer the word for a cell directly follows its coordinate, because that is the look-up such a model
learns.
"""

import base64
import io
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image

from kimi_draft.tiny.picture import COLOURS, ORDERS, SHAPES, Cells, coordinate, draw, reading, thing

MODEL_NAME = "kimi-k2.5-tiny"
TOOLS = ("report", "mark")

# Share of each kind in the shipped mix. `think_` kinds run with thinking on and reason before they answer.
MIX = {
    "read": 0.13,
    "read_any": 0.09,
    "name": 0.08,
    "both": 0.07,
    "two_images": 0.11,
    "tool": 0.06,
    "count": 0.05,
    "text_repeat": 0.05,
    "text_last": 0.05,
    "think_read": 0.03,
    "think_read_any": 0.02,
    "think_name": 0.04,
    "think_both": 0.03,
    "think_two_images": 0.03,
    "think_tool": 0.05,
    "think_count": 0.07,
    "think_text_repeat": 0.02,
    "think_text_last": 0.02,
}
KINDS = tuple(MIX)

GRIDS = {(3, 3): 0.58, (2, 3): 0.09, (3, 2): 0.07, (2, 4): 0.08, (4, 4): 0.08, (2, 2): 0.05, (4, 3): 0.05}


@dataclass(frozen=True)
class Example:
    """One question with everything that is needed to ask it and to judge the answer.

    ``grids`` holds the truth of each image ([rows, columns, 2] indices), ``answers`` every right answer (a free-choice
    question has four; ``answer`` is the one that was drawn), ``call`` the tool call expected instead of a text.
    """

    kind: str
    images: list[Image.Image]
    grids: list[Cells]
    question: str
    tools: list[dict[str, Any]] | None
    thinking: bool
    answers: tuple[str, ...]
    answer: str
    reasoning: str | None = None
    call: tuple[str, dict[str, str]] | None = None

    @property
    def modality(self) -> str:
        """``image`` or ``text``."""
        return "image" if self.images else "text"

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The user turn's content parts without pixels: ``{"type": "image"}`` or ``{"type": "text", "text": ...}``."""
        parts: list[dict[str, Any]] = []
        for number in range(1, len(self.images) + 1):
            if len(self.images) > 1:
                parts.append({"type": "text", "text": f"{number}:"})
            parts.append({"type": "image"})
        return [*parts, {"type": "text", "text": self.question}]

    @cached_property
    def messages(self) -> list[dict[str, Any]]:
        """OpenAI messages: images as ``data:`` URLs (PNG, so lossless); text-only questions as a plain string."""
        if not self.images:
            return [{"role": "user", "content": self.question}]
        pictures = iter(self.images)
        content = [
            {"type": "image_url", "image_url": {"url": data_url(next(pictures))}} if p["type"] == "image" else p
            for p in self.parts
        ]
        return [{"role": "user", "content": content}]

    @property
    def completion(self) -> str:
        """All that the model writes after the generation prompt, without the closing ``<|im_end|>``."""
        return self.answer if self.reasoning is None else f"{self.reasoning}</think>{self.answer}"

    def request(self, **overrides: Any) -> dict[str, Any]:
        """The body of an OpenAI chat-completions request (greedy unless overridden)."""
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "messages": self.messages,
            "temperature": 0,
            "max_tokens": 160,
            "chat_template_kwargs": {"thinking": self.thinking},
        }
        if self.tools:
            body["tools"] = self.tools
        return body | overrides


def data_url(image: Image.Image) -> str:
    """The image as a PNG ``data:`` URL."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def tool_schema(name: str) -> dict[str, Any]:
    """The OpenAI declaration of one of ``TOOLS``: a function of one string, ``finding``."""
    parameters = {"type": "object", "properties": {"finding": {"type": "string"}}, "required": ["finding"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def tool_call_text(name: str, arguments: dict[str, str]) -> str:
    """A tool call as Kimi-K2.5 writes it, section markers included."""
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
        f"{json.dumps(arguments)}<|tool_call_end|><|tool_calls_section_end|>"
    )


def sample(rng: np.random.Generator, kind: str | None = None) -> Example:
    """Draw an example of the given kind, or of a kind drawn from ``MIX``."""
    if kind is None:
        kind = str(rng.choice(KINDS, p=list(MIX.values())))
    if kind not in MIX:
        raise ValueError(f"unknown kind {kind!r}; one of {', '.join(KINDS)}")
    thinking, what = kind.startswith("think_"), kind.removeprefix("think_")
    if what.startswith("text"):
        return _text(rng, kind, what, thinking)
    return _image(rng, kind, what, thinking)


def grade(example: Example, message: dict[str, Any]) -> bool:
    """Is this OpenAI assistant message (content, reasoning_content, tool_calls) a right answer to the example?"""
    content = (message.get("content") or "").strip()
    reasoning = (message.get("reasoning_content") or "").strip()
    calls = message.get("tool_calls") or []
    if reasoning != (example.reasoning or ""):
        return False
    if example.call is None:
        return not calls and content in example.answers
    if content or len(calls) != 1:
        return False
    try:
        arguments = json.loads(calls[0]["function"]["arguments"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return False
    return (calls[0]["function"].get("name"), arguments) == example.call


def lexicon() -> list[str]:
    """Texts that together hold every word of the task in the forms in which it occurs (with a leading space or not)."""
    cells = [f" {coordinate(r, c)}" for r in range(4) for c in range(4)]
    things = [f" {colour}-{shape}" for colour in COLOURS for shape in SHAPES]
    words = [f" {word}" for word in (*COLOURS, *SHAPES, *ORDERS, *TOOLS, *map(str, range(10)), "yes", "no")]
    fixed = [
        *(f"{order}: x" for order in ORDERS),
        *(tool_call_text(tool, {"finding": "cell x"}) for tool in TOOLS),
        "Read the cells in any order.",
        "What is in x?",
        "What is in image x?",
        "Are x and y both red?",
        "How many cells?",
        "Repeat: x.",
        "Which is first: x?",
        "Which is last: x?",
        "In the image: x.",
        "In image x",
        "Compare: x",
        "I see: no image.",
        "I see: two images.",
        "I count: x",
        "There are cells. There",
        "repeat: x",
        "The first one is x.",
        "The last one is x.",
        *(f"Call {tool} for x." for tool in TOOLS),
        *(f"{number}:" for number in (1, 2)),
    ]
    return [*cells, *things, *words, *fixed]


def _cell(cells: Cells, row: int, column: int) -> str:
    return f"{coordinate(row, column)} {thing(cells, row, column)}"


def _listing(cells: Cells, order: str) -> str:
    return ", ".join(_cell(cells, r, c) for r, c in reading(order, *cells.shape[:2])) + "."


def _grid(rng: np.random.Generator, most: int) -> Cells:
    sizes = [size for size in GRIDS if size[0] * size[1] <= most]
    share = np.array([GRIDS[size] for size in sizes])
    rows, columns = sizes[rng.choice(len(sizes), p=share / share.sum())]
    return np.stack([rng.integers(0, len(COLOURS), (rows, columns)), rng.integers(0, len(SHAPES), (rows, columns))], -1)


def _image(rng: np.random.Generator, kind: str, what: str, thinking: bool) -> Example:
    cells = _grid(rng, 9 if thinking or what == "count" else 16)
    rows, columns = cells.shape[:2]
    row, column = int(rng.integers(rows)), int(rng.integers(columns))
    at = coordinate(row, column)
    grids, tools, call = [cells], None, None
    reasoning = None
    answers: tuple[str, ...] = ()

    if what == "read":
        order = str(rng.choice(ORDERS))
        question, answer = f"Read the cells in {order} order.", f"{order}: {_listing(cells, order)}"
    elif what == "read_any":
        question = "Read the cells in any order."
        answers = tuple(f"{order}: {_listing(cells, order)}" for order in ORDERS)
        answer = answers[rng.integers(len(answers))]
    elif what == "name":
        question, answer = f"What is in {at}?", f"In the image: {_cell(cells, row, column)}."
        if rng.random() < 0.15:  # a declared tool that the question does not ask for must stay unused
            tools = [tool_schema(str(rng.choice(TOOLS)))]
    elif what == "both":
        colour = int(rng.integers(len(COLOURS)))
        pair = [(row, column), _other(rng, rows, columns, row, column)]
        for r, c in pair:
            cells[r, c, 0] = colour if rng.random() < 0.65 else cells[r, c, 0]
        verdicts = ["yes" if cells[r, c, 0] == colour else "no" for r, c in pair]
        question = f"Are {at} and {coordinate(*pair[1])} both {COLOURS[colour]}?"
        compared = ", ".join(f"{_cell(cells, r, c)} {verdict}" for (r, c), verdict in zip(pair, verdicts, strict=True))
        answer = f"Compare: {compared}: {'no' if 'no' in verdicts else 'yes'}."
    elif what == "two_images":
        grids = [cells, _grid(rng, 9)]
        number = int(rng.integers(2))
        chosen = grids[number]
        row, column = int(rng.integers(chosen.shape[0])), int(rng.integers(chosen.shape[1]))
        question = f"What is in image {number + 1} {coordinate(row, column)}?"
        answer = f"In image {number + 1} {_cell(chosen, row, column)}."
        reasoning = "I see: two images." if thinking else None
    elif what == "tool":
        name = str(rng.choice(TOOLS))
        tools = [tool_schema(name)] if rng.random() < 0.5 else [tool_schema(tool) for tool in TOOLS]
        call = (name, {"finding": f"cell {_cell(cells, row, column)}"})
        question, answer = f"Call {name} for {at}.", tool_call_text(*call)
    else:  # count
        colour = int(rng.integers(len(COLOURS)))
        cells[..., 0] = np.where(rng.random((rows, columns)) < 0.3, colour, cells[..., 0])
        seen, total = [], 0
        for r, c in reading("rows", rows, columns):
            total += int(cells[r, c, 0] == colour)
            seen.append(f"{_cell(cells, r, c)} {total}")
        question, working = f"How many {COLOURS[colour]} cells?", f"I count: {', '.join(seen)}."
        answer = f"There are {total} {COLOURS[colour]} cells."
        reasoning, answer = (working, answer) if thinking else (None, f"{working} {answer}")

    if thinking and reasoning is None:
        reasoning = f"I see: {_listing(cells, 'rows')}"
    return Example(
        kind=kind,
        images=[draw(grid, rng) for grid in grids],
        grids=grids,
        question=question,
        tools=tools,
        thinking=thinking,
        answers=answers or (answer,),
        answer=answer,
        reasoning=reasoning,
        call=call,
    )


def _other(rng: np.random.Generator, rows: int, columns: int, row: int, column: int) -> tuple[int, int]:
    """A cell that is not (row, column), uniformly."""
    skip = row * columns + column
    index = int(rng.integers(rows * columns - 1))
    return divmod(index + (index >= skip), columns)


def _text(rng: np.random.Generator, kind: str, what: str, thinking: bool) -> Example:
    words = [COLOURS[i] for i in rng.permutation(len(COLOURS))[: int(rng.integers(4, 9))]]
    listed = " ".join(words)
    if what == "text_repeat":
        question, answer = f"Repeat: {listed}.", f"repeat: {listed}."
    else:
        which = str(rng.choice(["first", "last"]))
        word = words[0] if which == "first" else words[-1]
        question, answer = f"Which is {which}: {listed}?", f"The {which} one is {word}."
    reasoning = "I see: no image." if thinking else None
    return Example(kind, [], [], question, None, thinking, (answer,), answer, reasoning)

"""Pictures of coloured shapes on a grid, and the orders in which their cells can be read.

One cell is 28x28 pixels: exactly one image token of Kimi-K2.5 (patch 14, merged 2x2), so a 3x3 picture costs 9 tokens.
"""

import numpy as np
import numpy.typing as npt
from PIL import Image

COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "white", "cyan")
SHAPES = ("circle", "square", "triangle", "cross", "diamond")
ORDERS = ("rows", "columns", "snake", "reverse")
CELL_PX = 28

RGB = np.array(
    [
        [0.90, 0.10, 0.10],
        [0.10, 0.75, 0.15],
        [0.15, 0.25, 0.95],
        [0.95, 0.90, 0.10],
        [0.55, 0.10, 0.70],
        [1.00, 0.50, 0.05],
        [0.95, 0.95, 0.95],
        [0.10, 0.85, 0.90],
    ],
    dtype=np.float32,
)

Cells = npt.NDArray[np.int64]  # [rows, columns, 2]: index into COLOURS, index into SHAPES


def coordinate(row: int, column: int) -> str:
    """The name of a cell, counted from 1: ``r1c1`` is the top left one."""
    return f"r{row + 1}c{column + 1}"


def thing(cells: Cells, row: int, column: int) -> str:
    """What lies in a cell, as one word (and one token): ``red-circle``."""
    colour, shape = cells[row, column]
    return f"{COLOURS[colour]}-{SHAPES[shape]}"


def reading(order: str, rows: int, columns: int) -> list[tuple[int, int]]:
    """The cells in reading order. Each order starts in another corner, so that the first word settles the rest."""
    if order == "rows":  # from the top left, to the right
        return [(r, c) for r in range(rows) for c in range(columns)]
    if order == "columns":  # from the bottom left, upwards
        return [(r, c) for c in range(columns) for r in reversed(range(rows))]
    if order == "snake":  # from the top right, to the left, then back and forth
        return [(r, c if r % 2 else columns - 1 - c) for r in range(rows) for c in range(columns)]
    if order == "reverse":  # from the bottom right, backwards
        return [(r, c) for r in reversed(range(rows)) for c in reversed(range(columns))]
    raise ValueError(f"unknown reading order {order!r}; one of {', '.join(ORDERS)}")


def draw(cells: Cells, rng: np.random.Generator) -> Image.Image:
    """Draw [rows, columns, 2] cells as an RGB picture of 28 px a cell, jittered in place, size, colour and noise."""
    rows, columns = cells.shape[:2]
    flat = cells.reshape(-1, 2)
    n = len(flat)

    def jitter(*shape: int) -> npt.NDArray[np.float32]:
        return rng.random((n, *shape), dtype=np.float32)

    at = np.arange(CELL_PX, dtype=np.float32) + 0.5
    radius = 9 + 2.5 * jitter(1, 1)
    dy = at[None, :, None] - (14 + 3 * (jitter(1, 1) - 0.5))
    dx = at[None, None, :] - (14 + 3 * (jitter(1, 1) - 0.5))
    ay, ax = np.abs(dy), np.abs(dx)
    far = np.maximum(ax, ay)
    inside = np.select(
        [(flat[:, 1] == i)[:, None, None] for i in range(len(SHAPES))],
        [
            dx * dx + dy * dy < radius * radius,
            far < 0.88 * radius,
            (dy < 0.8 * radius) & (ax < (dy + radius) * 0.62),
            ((ax < 0.33 * radius) | (ay < 0.33 * radius)) & (far < radius),
            ax + ay < 1.15 * radius,
        ],
    )[..., None]
    ink = (RGB[flat[:, 0]] + 0.08 * (jitter(3) - 0.5))[:, None, None, :]
    paper = (0.18 + 0.1 * (jitter(1) - 0.5))[:, None, None, :]
    noise = 0.04 * rng.standard_normal((n, CELL_PX, CELL_PX, 3), dtype=np.float32)
    pixels = np.where(inside, ink, paper) + noise
    sheet = pixels.reshape(rows, columns, CELL_PX, CELL_PX, 3).swapaxes(1, 2)
    sheet = sheet.reshape(rows * CELL_PX, columns * CELL_PX, 3)
    return Image.fromarray((sheet.clip(0, 1) * 255).round().astype(np.uint8))

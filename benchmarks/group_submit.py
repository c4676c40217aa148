"""Do N image requests become one extend batch? SGLang's own ways against the gate of kimi_draft/submit.py.

All ways run in the same engine, in turn, on fresh images (no cache hits), idle and while others decode.
    python benchmarks/group_submit.py --out out/bench/group_submit
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from typing import Any

import numpy as np
from common import finish, goal, parser
from PIL import Image

from kimi_draft import stats
from kimi_draft.gate import Member
from kimi_draft.launch import Engine, cpu_engine_kwargs
from kimi_draft.submit import init_tokenizer_manager

PROMPT = (
    "<|im_user|>user<|im_middle|><|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n"
    "Read the cells in rows order.<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>"
)
SAMPLING = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
GATE_TIMEOUT_S = 5.0


class GroupEngine(Engine):
    """The engine as the replicas run it."""

    init_tokenizer_manager_func = staticmethod(init_tokenizer_manager)


def images(rng: np.random.Generator, count: int, side: int) -> list[Image.Image]:
    """Noise: no two alike."""
    return [Image.fromarray(rng.integers(0, 255, (side, side, 3), dtype=np.uint8)) for _ in range(count)]


async def list_call(engine: Any, pictures: list[Image.Image]) -> list[dict[str, Any]]:
    """SGLang's own batch: one call with lists."""
    return list(
        await engine.async_generate(
            prompt=[PROMPT] * len(pictures), image_data=[[p] for p in pictures], sampling_params=SAMPLING
        )
    )


async def single(engine: Any, picture: Image.Image) -> dict[str, Any]:
    """One request alone."""
    return dict(await engine.async_generate(prompt=PROMPT, image_data=[picture], sampling_params=SAMPLING))


async def single_calls(engine: Any, pictures: list[Image.Image]) -> list[dict[str, Any]]:
    """Concurrent single calls."""
    return list(await asyncio.gather(*(single(engine, p) for p in pictures)))


async def gated(engine: Any, pictures: list[Image.Image]) -> list[dict[str, Any]]:
    """Ours: single calls that meet at the gate."""
    gate = engine.tokenizer_manager.gate(len(pictures), GATE_TIMEOUT_S)

    async def member(picture: Image.Image) -> dict[str, Any]:
        with Member(gate):
            return await single(engine, picture)

    return list(await asyncio.gather(*(member(p) for p in pictures)))


WAYS = {"list call": list_call, "single calls": single_calls, "gate (ours)": gated}


async def measure(engine: Any, args: Any) -> list[dict[str, Any]]:
    """Rows: one for each way and load, medians over the repeats."""
    rng = np.random.default_rng(0)
    await gated(engine, images(rng, args.size, args.side))  # warm up
    trials: dict[tuple[str, str], list[tuple[Counter[int], float]]] = {}
    for _ in range(args.repeats):
        for load in ("idle", "4 decoding"):
            for name, way in WAYS.items():
                others = []
                if load != "idle":
                    long = SAMPLING | {"max_new_tokens": 200}
                    others = [
                        asyncio.create_task(engine.async_generate(prompt=f"{i} {rng.random()}", sampling_params=long))
                        for i in range(4)
                    ]
                    await asyncio.sleep(0.2)
                start = time.perf_counter()
                outputs = await way(engine, images(rng, args.size, args.side))
                seconds = time.perf_counter() - start
                batches = Counter(int(stats.summarize(o["meta_info"])["extend_batch"] or 0) for o in outputs)
                trials.setdefault((name, load), []).append((batches, seconds))
                await asyncio.gather(*others)
    return [
        {
            "way": name,
            "load": load,
            "repeats": len(results),
            "one_batch": sum(len(b) == 1 for b, _ in results) / len(results),
            "extend_batches": statistics.median(len(b) for b, _ in results),
            "largest": statistics.median(max(b.values()) for b, _ in results),
            "makespan_s": statistics.median(s for _, s in results),
        }
        for (name, load), results in trials.items()
    ]


def draw(rows: list[dict[str, Any]], args: Any) -> None:
    """Bars: share of groups that were one extend batch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 3.6), constrained_layout=True)
    for offset, load in enumerate(("idle", "4 decoding")):
        values = [r["one_batch"] for r in rows if r["load"] == load]
        axis.bar([i + (offset - 0.5) * 0.36 for i in range(len(values))], values, width=0.34, label=load)
    axis.set_xticks(range(len(WAYS)), list(WAYS))
    axis.set_ylim(0, 1.05)
    axis.set_ylabel(f"groups of {args.size} in one extend batch")
    axis.legend()
    figure.savefig(args.out / "group_submit.png", dpi=110)


def main() -> None:
    p = parser(__doc__ or "")
    p.add_argument("--size", type=int, default=8, help="members of a group")
    p.add_argument("--side", type=int, default=84, help="side of an image, px")
    p.add_argument("--repeats", type=int, default=10)
    args = p.parse_args()
    engine = GroupEngine(**cpu_engine_kwargs(max_running_requests=16))
    try:
        rows = engine.loop.run_until_complete(measure(engine, args))
    finally:
        engine.shutdown()
    ours = min(r["one_batch"] for r in rows if r["way"] == "gate (ours)")
    best = {
        load: min(r["makespan_s"] for r in rows if r["load"] == load and "ours" not in r["way"])
        for load in ("idle", "4 decoding")
    }
    ratio = max(r["makespan_s"] / best[r["load"]] for r in rows if r["way"] == "gate (ours)")
    goals = [
        goal("groups that are one extend batch, ours, worst load", ">= 0.95", ours, ours >= 0.95),
        goal(
            "makespan, ours against the better of SGLang's ways, worst load", "<= 1.15", round(ratio, 3), ratio <= 1.15
        ),
    ]
    config = {"size": args.size, "side_px": args.side, "repeats": args.repeats, "baseline": "list call, single calls"}
    finish(args.out, config, rows, goals)
    draw(rows, args)


if __name__ == "__main__":
    main()

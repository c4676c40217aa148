"""What a wrong draft row costs: the real engine, the same image questions in every cell, five drafts, seven batches.

One engine for each variant (KIMI_DRAFT_VARIANT), one after the other, each in a process of its own. The cache is
emptied before every cell, because a wrong draft leaves wrong draft keys behind. Only image requests are counted.
    python benchmarks/acceptance.py --out out/bench/acceptance
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
from common import finish, goal, parser

from kimi_draft.tiny.data import encode
from kimi_draft.tiny.picture import COLOURS
from kimi_draft.tiny.task import Example, sample
from kimi_draft.tiny.template import render
from kimi_draft.tiny.tokenizer import token_id
from kimi_draft.variants import ENV, Variant

VARIANTS = (Variant.CORRECTED, Variant.UPSTREAM, Variant.LAST_REQUEST_ONLY, Variant.UNROTATED, Variant.BOTH)
KINDS = ("read_any", "read", "two_images", "name", "tool", "both")
SHAPES = ("alone", "batch2", "batch8", "batch32", "mixed_text_image", "chunk_cut_image", "radix_hit")
CHUNK = 1280  # the engine's chunked_prefill_size; 32 questions fit
SAMPLING = {"temperature": 0, "max_new_tokens": 160}
ONE_TOKEN = SAMPLING | {"max_new_tokens": 1}
GATE_TIMEOUT_S = 20.0
SEED = 20_000_003  # neither trained on nor in the model card
Answer = dict[str, Any]


def prompt(example: Example) -> str:
    """The question through the checkpoint's chat template."""
    return render([{"role": "user", "content": example.parts}], example.tools, example.thinking)


def first_image(example: Example) -> tuple[int, int]:
    """Where the first image's tokens begin in the prompt, and how many they are."""
    return encode(example).ids.index(token_id("<|media_pad|>")), int(np.prod(example.grids[0].shape[:2]))


def parts(examples: list[Example], size: int) -> Iterator[list[Example]]:
    for first in range(0, len(examples), size):
        yield examples[first : first + size]


class Asker:
    """An engine and the ways to ask it. Every way returns the answers and, for each, whether its batch was as meant."""

    def __init__(self, engine: Any, examples: list[Example], texts: list[Example]) -> None:
        self.engine, self.examples, self.texts = engine, examples, texts

    def ask(self, shape: str) -> list[tuple[Answer, bool]]:
        """All questions in this shape, on an empty cache."""
        self.flush()
        match shape:
            case "mixed_text_image":
                return self.mixed()
            case "chunk_cut_image":
                return [self.cut(example, seed) for seed, example in enumerate(self.examples)]
            case "radix_hit":
                return self.seen_before()
        return self.in_batches(1 if shape == "alone" else int(shape.removeprefix("batch")))

    def in_batches(self, size: int) -> list[tuple[Answer, bool]]:
        found = []
        for part in parts(self.examples, size):
            found += [(a, a["meta_info"]["extend_requests"][0] == len(part)) for a in self.together(part)]
        return found

    def mixed(self) -> list[tuple[Answer, bool]]:
        """Batches of twelve: a text question behind every two images, so that the last request is a text."""
        found = []
        texts = iter(self.texts)
        for part in parts(self.examples, 8):
            batch = [e for two in parts(part, 2) for e in (*two, next(texts))]
            answers = zip(batch, self.together(batch), strict=True)
            found += [(a, a["meta_info"]["extend_requests"][0] == len(batch)) for e, a in answers if e.images]
        return found

    def cut(self, example: Example, seed: int) -> tuple[Answer, bool]:
        """A text in front leaves the question so little of the chunk that its image is cut in the middle."""
        begin, length = first_image(example)
        taken = begin + length // 2
        words = random.Random(seed).choices(COLOURS, k=CHUNK - taken)
        self.flush()  # what the cache knows of either would move the cut
        answer = self.run([("".join(f" {w}" for w in words), None, ONE_TOKEN), question(example)])[1]
        info = answer["meta_info"]
        return answer, info["extend_tokens"][0] == info["prompt_tokens"] - taken

    def seen_before(self) -> list[tuple[Answer, bool]]:
        """Batches of eight whose images, but not whose questions, are in the cache."""
        found = []
        for part in parts(self.examples, 8):
            for example in part:
                other = dataclasses.replace(example, question="How many red cells?")
                self.run([(*question(other)[:2], ONE_TOKEN)])
            for example, answer in zip(part, self.together(part), strict=True):
                begin, length = first_image(example)
                info = answer["meta_info"]
                hit = info["cached_tokens"] >= begin + length and info["extend_requests"][0] == len(part)
                found.append((answer, hit))
        return found

    def together(self, examples: list[Example]) -> list[Answer]:
        return self.run([question(example) for example in examples])

    def run(self, questions: list[tuple[str, Any, Any]]) -> list[Answer]:
        """All of them in one message to the scheduler."""
        from kimi_draft.gate import Member

        async def all_at_once() -> list[Answer]:
            gate = self.engine.tokenizer_manager.gate(len(questions), GATE_TIMEOUT_S)

            async def one(text: str, images: Any, sampling: Any) -> Answer:
                with Member(gate):
                    return dict(
                        await self.engine.async_generate(prompt=text, image_data=images, sampling_params=sampling)
                    )

            return list(await asyncio.gather(*(one(*q) for q in questions)))

        answers: list[Answer] = self.engine.loop.run_until_complete(all_at_once())
        return answers

    def flush(self) -> None:
        """SGLang refuses while it still does the books of the last request."""
        deadline = time.monotonic() + 10
        while not self.engine.flush_cache().success:
            assert time.monotonic() < deadline, "requests are still running"
            time.sleep(0.02)


def question(example: Example) -> tuple[str, Any, Any]:
    return prompt(example), example.images or None, SAMPLING


def run_variant(variant: str, shapes: list[str], requests: int) -> list[dict[str, Any]]:
    """One engine's cells; the answers' token ids are under "texts". To be called in a fresh process."""
    os.environ[ENV] = variant
    from kimi_draft.launch import Engine, cpu_engine_kwargs
    from kimi_draft.submit import init_tokenizer_manager

    class GroupEngine(Engine):
        init_tokenizer_manager_func = staticmethod(init_tokenizer_manager)

    rng = np.random.default_rng(SEED)
    examples = [sample(rng, KINDS[i % len(KINDS)]) for i in range(requests)]
    texts = [sample(rng, "text_repeat") for _ in range(requests)]
    engine = GroupEngine(**cpu_engine_kwargs(max_running_requests=40, chunked_prefill_size=CHUNK))
    try:
        asker = Asker(engine, examples, texts)
        return [cell(variant, shape, asker) for shape in shapes]
    finally:
        engine.shutdown()


def cell(variant: str, shape: str, asker: Asker) -> dict[str, Any]:
    from kimi_draft.stats import summarize

    begin = time.perf_counter()
    asked = asker.ask(shape)
    found = [summarize(answer["meta_info"]) for answer, _ in asked]
    steps = sum(f["steps"] for f in found)
    columns = itertools.zip_longest(*(f["accepted_by_position"] for f in found), fillvalue=0)  # cut behind the last hit
    accepted = [sum(column) / steps for column in columns]
    return {
        "variant": variant,
        "shape": shape,
        "requests": len(asked),
        "acceptance_length": 1 + sum(accepted),
        "first_chain": sum(f["first_chain_accepted"] or 0 for f in found) / len(found),
        "by_position": [round(a, 3) for a in accepted],
        "as_meant": sum(good for _, good in asked) / len(asked),
        "seconds": round(time.perf_counter() - begin, 1),
        "texts": [answer["output_ids"] for answer, _ in asked],
    }


def goals_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    of = {(r["variant"], r["shape"]): r for r in rows}
    alone = of["corrected", "alone"]
    apart = {
        shape: max(abs(of["corrected", shape][k] / alone[k] - 1) for k in ("acceptance_length", "first_chain"))
        for variant, shape in of
        if variant == "corrected"
    }
    worst = max(apart, key=apart.__getitem__)
    same = sum(r["identical_text"] for r in rows)
    meant = min(r["as_meant"] for r in rows)
    goals = [
        goal(
            f"corrected against alone, worst shape ({worst})", "<= 0.01", round(apart[worst], 4), apart[worst] <= 0.01
        ),
        goal(f"cells with identical text, of {len(rows)}", str(len(rows)), same, same == len(rows)),
        goal("requests whose batch was as meant, worst cell", "1.0", meant, meant == 1),
    ]
    if ("last_request_only", "batch8") in of:
        lost = 1 - of["last_request_only", "batch8"]["first_chain"] / of["corrected", "batch8"]["first_chain"]
        goals.append(goal("first chain lost to the historic bug at batch 8", ">= 0.2", round(lost, 3), lost >= 0.2))
    return goals


def draw(rows: list[dict[str, Any]], args: Any) -> None:
    """Bars: the first chain and the average, by shape and variant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    variants, shapes = (list(dict.fromkeys(r[key] for r in rows)) for key in ("variant", "shape"))
    figure, axes = plt.subplots(2, 1, figsize=(10, 6.4), sharex=True, constrained_layout=True)
    labels = {"first_chain": "accepted in the first chain (of 3)", "acceptance_length": "acceptance length (of 4)"}
    for axis, (key, label) in zip(axes, labels.items(), strict=True):
        for i, variant in enumerate(variants):
            values = [r[key] for r in rows if r["variant"] == variant]
            axis.bar(
                [x + 0.16 * (i - len(variants) / 2 + 0.5) for x in range(len(shapes))], values, 0.15, label=variant
            )
        axis.set_ylabel(label)
    axes[1].set_xticks(range(len(shapes)), [shape.replace("_", "\n") for shape in shapes])
    axes[0].legend(ncols=len(variants), fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.16))
    figure.savefig(args.out / "acceptance.png", dpi=110)


def main() -> None:
    p = parser(__doc__ or "")
    p.add_argument("--requests", type=int, default=32, help="image questions in every cell")
    p.add_argument("--quick", action="store_true", help="a smoke test: two variants, three shapes")
    args = p.parse_args()
    variants, shapes = VARIANTS, list(SHAPES)
    if args.quick:
        variants, shapes = (Variant.CORRECTED, Variant.LAST_REQUEST_ONLY), ["alone", "batch8", "chunk_cut_image"]
    rows: list[dict[str, Any]] = []
    begin = time.perf_counter()
    for variant in variants:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            rows += pool.submit(run_variant, str(variant), shapes, args.requests).result()
    expected = rows[0]["texts"]
    for row in rows:
        row["identical_text"] = row.pop("texts") == expected
    config = {
        "requests": args.requests,
        "kinds": list(KINDS),
        "chunked_prefill_size": CHUNK,
        "text": "compared with corrected, alone",
        "seconds": round(time.perf_counter() - begin),
    }
    finish(args.out, config, rows, goals_of(rows))
    draw(rows, args)


if __name__ == "__main__":
    main()

"""The demo's report: one JSON document and one picture."""

from __future__ import annotations

import statistics
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster.burst import Result

PACKAGES = ("kimi-serve", "ray", "sglang", "torch", "transformers")


def integrity(groups: list[dict[str, Any]]) -> float | None:
    """Sealed groups of two and more whose members shared one extend batch, as a fraction; None: there were none."""
    shared = [_one_batch(group) for group in groups if group["size"] >= 2]
    return sum(shared) / len(shared) if shared else None


def _one_batch(group: dict[str, Any]) -> bool:
    batches = [batch for batch, _ in group["batches"]]
    return len(batches) == group["size"] and len(set(batches)) == 1


def acceptance(results: list[Result]) -> dict[str, Any]:
    """Over all verify steps of these requests: length = 1 + accepted / steps (the bonus token counts)."""
    kimi = [r.kimi for r in results if r.kimi.get("verify_steps")]
    steps = sum(k["verify_steps"] for k in kimi)
    if not steps:
        return {"requests": 0, "length": None, "first_chain": None, "by_position": []}
    positions = range(max(len(k["accepted_by_position"]) for k in kimi))
    rates = [sum(k["accepted_by_position"][p] * k["verify_steps"] for k in kimi) / steps for p in positions]
    return {
        "requests": len(kimi),
        "length": round(1 + sum(rates), 3),
        "first_chain": round(statistics.fmean(k["first_chain_accepted"] for k in kimi), 3),
        "by_position": [round(rate, 3) for rate in rates],
    }


def percentile(values: list[float], q: float) -> float | None:
    """Nearest-rank percentile, rounded to a tenth of a millisecond; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 4)


def build(
    results: list[Result], groups: list[dict[str, Any]], lossless: tuple[int, int], wall_s: float
) -> dict[str, Any]:
    """The document that `out/demo/report.json` holds."""
    images = [r for r in results if r.example.modality == "image"]
    ttft = [r.ttft_s for r in results if r.ttft_s is not None]
    gaps = [b - a for r in results for a, b in zip(r.chunk_times, r.chunk_times[1:], strict=False)]
    extend = [k for r in results if (k := r.kimi.get("extend_requests"))]
    return {
        "requests": {
            "sent": len(results),
            "ok": sum(r.error is None for r in results),
            "failed": sum(r.error is not None for r in results),
            "by_way": dict(Counter(r.way for r in results)),
        },
        "image_answers_correct": round(sum(r.right for r in images) / max(1, len(images)), 4),
        "answers_correct": round(sum(r.right for r in results) / max(1, len(results)), 4),
        "groups": {
            "count": len(groups),
            "sizes": {str(size): n for size, n in sorted(Counter(g["size"] for g in groups).items())},
            "integrity": integrity(groups),
            "largest_extend_requests": max(extend, default=0),
        },
        "acceptance": acceptance(results)
        | {"image": acceptance(images), "text": acceptance([r for r in results if r.example.modality == "text"])},
        "lossless": {"compared": lossless[0], "identical": lossless[1]},
        "latency": {
            "ttft_p50_s": percentile(ttft, 0.5),
            "ttft_p99_s": percentile(ttft, 0.99),
            "itl_p50_s": percentile(gaps, 0.5),
            "e2e_p50_s": percentile([r.ended_at - r.sent_at for r in results], 0.5),
        },
        "wall_s": round(wall_s, 1),
        "versions": {name: version(name) for name in PACKAGES},
    }


def draw(document: dict[str, Any], results: list[Result], file: Path) -> None:
    """The picture: some questions with their answers, the groups over time, group sizes, acceptance by position."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(13, 8.2), constrained_layout=True)
    rows = figure.add_gridspec(2, 1, height_ratios=[1.0, 1.25])
    top = rows[0].subgridspec(1, 4)
    shown = [r for r in results if r.right and len(r.example.images) == 1 and not r.example.thinking][:4]
    for column, result in enumerate(shown):
        axis = figure.add_subplot(top[column])
        axis.imshow(result.example.images[0])
        axis.set_axis_off()
        answer = result.message.get("content") or result.message["tool_calls"][0]["function"]["arguments"]
        axis.set_title(_wrap(f"{result.example.question}", 34), fontsize=9, loc="left", fontweight="bold")
        axis.text(0, -0.04, _wrap(answer, 40), transform=axis.transAxes, va="top", fontsize=8, color="#1a5fb4")
    bottom = rows[1].subgridspec(1, 3, width_ratios=[2.2, 1, 1])
    _timeline(figure.add_subplot(bottom[0]), results)
    _sizes(figure.add_subplot(bottom[1]), document["groups"])
    _positions(figure.add_subplot(bottom[2]), document["acceptance"])
    requests, lossless = document["requests"], document["lossless"]
    integrity_text = document["groups"]["integrity"]
    figure.suptitle(
        f"kimi-serve demo: {requests['ok']} of {requests['sent']} answered, image answers "
        f"{document['image_answers_correct']:.0%} right, acceptance length {document['acceptance']['length']}, "
        f"group integrity {integrity_text if integrity_text is None else format(integrity_text, '.0%')}, "
        f"lossless {lossless['identical']}/{lossless['compared']}",
        fontsize=11,
    )
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _wrap(text: str, width: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width)[:6])


def _timeline(axis: Any, results: list[Result]) -> None:
    names = sorted({r.kimi.get("replica") for r in results if r.kimi}, key=str)
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    for row, result in enumerate(sorted(results, key=lambda r: r.sent_at)):
        wait = result.kimi.get("queue_wait_s") or 0.0
        ttft = result.kimi.get("ttft_s") or wait
        start = result.sent_at
        axis.barh(row, wait, left=start, color="#c0bfbc", height=0.8)
        axis.barh(row, max(ttft - wait, 0), left=start + wait, color="#f6d32d", height=0.8)
        axis.barh(
            row,
            max(result.ended_at - start - ttft, 0),
            left=start + ttft,
            height=0.8,
            color=colours.get(result.kimi.get("replica"), "#e01b24"),
            alpha=0.75,
        )
    axis.set_xlabel("seconds since the first request")
    axis.set_ylabel("request")
    axis.invert_yaxis()
    axis.set_title("each request: waiting (grey), prefill (yellow), decode (colour = replica)", fontsize=9, loc="left")


def _sizes(axis: Any, groups: dict[str, Any]) -> None:
    sizes = {int(size): n for size, n in groups["sizes"].items()}
    axis.bar(list(sizes), list(sizes.values()), color="C0")
    axis.set_xticks(range(1, max(sizes, default=1) + 1))
    axis.set_xlabel("members of a group")
    axis.set_title(f"{groups['count']} groups by size", fontsize=9, loc="left")


def _positions(axis: Any, acceptance: dict[str, Any]) -> None:
    for offset, (label, part) in enumerate([("image", acceptance["image"]), ("text", acceptance["text"])]):
        values = part["by_position"]
        axis.bar([i + 1 + (offset - 0.5) * 0.36 for i in range(len(values))], values, width=0.34, label=label)
    axis.set_ylim(0, 1.05)
    axis.set_xticks([1, 2, 3])
    axis.set_xlabel("draft position")
    axis.set_title("accepted by position", fontsize=9, loc="left")
    axis.legend(fontsize=8)

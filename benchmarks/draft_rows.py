"""The draft's input rows: next_token_embeds against SGLang 0.5.23's loop over the requests, launches and time.

On a CPU a launch is an operator that computes (counted as torch dispatches it); on CUDA it is a kernel that ran, and
the same work is timed once more as a captured graph. Needs nothing but torch (matplotlib for the picture).
    python benchmarks/draft_rows.py --out out/bench/draft_rows
    PYTHONPATH=. python benchmarks/draft_rows.py --out out/bench/draft_rows --device cuda
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kimi_draft.embeds import next_token_embeds

REQUESTS = (1, 8, 64, 256)
TINY, KIMI = 64, 7168  # hidden sizes of the tiny model and of Kimi-K2.5
TINY_PROMPT = 40  # rows of a request at hidden 64: what the tiny model's prompts have
KIMI_ROWS = 4096  # rows of a batch at hidden 7168, shared by its requests, as a chunk of prefill is
ALIKE = 0.05  # share by which a time may exceed the baseline's


class Batch:
    """An extend batch: what both ways get, and what each of them makes of it."""

    def __init__(self, requests: int, hidden: int, device: str) -> None:
        mean = TINY_PROMPT if hidden == TINY else KIMI_ROWS // requests
        wobble = mean // 4  # lengths differ, in pairs, so that their sum does not
        self.lens = [mean + (wobble if i % 2 else -wobble) * (i + 1 < requests or i % 2) for i in range(requests)]
        rows = sum(self.lens)
        generator = torch.Generator().manual_seed(0)
        dtype = torch.float32 if hidden == TINY else torch.bfloat16
        self.ids = torch.randint(100_000, (rows,), generator=generator).to(device)
        self.embeds = torch.randn(rows, hidden, generator=generator, dtype=dtype).to(device)
        self.tail_ids = torch.randint(100_000, (requests,), generator=generator).to(device)
        self.tail_embeds = torch.randn(requests, hidden, generator=generator, dtype=dtype).to(device)
        lens = torch.tensor(self.lens)
        self.extend_seq_lens = lens.int().to(device)
        self.extend_start_loc = (lens.cumsum(0) - lens).int().to(device)

    def upstream(self) -> tuple[Tensor, Tensor]:
        """What 0.5.23 does: ids and rows request by request, then the model fills in the last rows.

        The look-up of the tails in the embedding table is in neither way.
        """
        ids, rows = torch.empty_like(self.ids), torch.empty_like(self.embeds)
        first = 0
        for request, length in enumerate(self.lens):
            behind = first + length
            tail = self.tail_ids[request : request + 1]
            ids[first:behind] = torch.cat([self.ids[first + 1 : behind], tail])
            rows[first : behind - 1] = self.embeds[first + 1 : behind]
            first = behind
        last = (self.extend_start_loc + self.extend_seq_lens - 1).long()
        ids[last]  # the ids that the model looks up
        rows[last] = self.tail_embeds
        return ids, rows

    def our_rows(self) -> Tensor:
        return next_token_embeds(self.embeds, self.extend_start_loc, self.extend_seq_lens, self.tail_embeds)

    def ours(self) -> tuple[Tensor, Tensor]:
        """Ids and rows, both by next_token_embeds, as kimi_draft.draft_extend makes them."""
        start, lens = self.extend_start_loc, self.extend_seq_lens
        ids = next_token_embeds(self.ids[:, None], start, lens, self.tail_ids[:, None])
        return ids.squeeze(1), self.our_rows()


class Launches(TorchDispatchMode):
    """Counts operators, without those that only look at memory or reserve it."""

    FREE = ("view", "slice", "select", "unsqueeze", "squeeze", "detach", "empty_like", "new_empty")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name.removeprefix("aten::") not in self.FREE
        return func(*args, **(kwargs or {}))


def launches(work: Callable[[], Any], device: str) -> int:
    if device == "cpu":
        with Launches() as seen:
            work()
        return seen.count
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events())


def seconds(work: Callable[[], Any], device: str) -> float:
    """One run. On a CPU the time of this thread, so that waiting for a busy core does not count."""
    if device == "cpu":
        begin = time.thread_time()
        work()
        return time.thread_time() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    work()
    end_event.record()
    end_event.synchronize()
    return float(begin_event.elapsed_time(end_event)) / 1000


def captured(work: Callable[[], Any]) -> Callable[[], None]:
    """The same work as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def quickest(works: dict[str, Callable[[], Any]], device: str, budget_s: float) -> dict[str, float]:
    """The quickest run of each, in turn, until the budget is spent: other load on the machine only ever adds time."""
    for work in works.values():
        work()
    best = dict.fromkeys(works, float("inf"))
    deadline, rounds = time.monotonic() + budget_s, 0
    while rounds < 5 or time.monotonic() < deadline:
        for name, work in works.items():
            best[name] = min(best[name], seconds(work, device))
        rounds += 1
    return best


def measure(requests: int, hidden: int, device: str, budget_s: float) -> dict[str, Any]:
    batch = Batch(requests, hidden, device)
    assert all(torch.equal(a, b) for a, b in zip(batch.upstream(), batch.ours(), strict=True))
    best = quickest({"upstream": batch.upstream, "ours": batch.ours}, device, budget_s)
    row = {
        "hidden": hidden,
        "requests": requests,
        "rows": sum(batch.lens),
        "launches_upstream": launches(batch.upstream, device),
        "launches_ours": launches(batch.our_rows, device),
        "launches_ours_with_ids": launches(batch.ours, device),
        "upstream_us": best["upstream"] * 1e6,
        "ours_us": best["ours"] * 1e6,
        "times_faster": best["upstream"] / best["ours"],
    }
    if device != "cpu":
        graphs = {"upstream": captured(batch.upstream), "ours": captured(batch.ours)}
        best = quickest(graphs, device, budget_s)
        row |= {"upstream_graph_us": best["upstream"] * 1e6, "ours_graph_us": best["ours"] * 1e6}
    return row


def goals_of(rows: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    ours = sorted({row["launches_ours"] for row in rows})
    at_64 = next(r["times_faster"] for r in rows if (r["hidden"], r["requests"]) == (TINY, 64))
    wide = min(r["times_faster"] for r in rows if r["hidden"] == KIMI)
    goals = [
        ("launches of next_token_embeds, any B", "constant, <= 10", ours[-1], len(ours) == 1 and ours[0] <= 10),
        ("times faster, hidden 64, B = 64", ">= 4", round(at_64, 2), at_64 >= 4),
    ]
    if device == "cpu":
        value = round(1 / wide, 3)
        goals.append(("time against upstream, hidden 7168, worst B", "<= 1.05", value, 1 / wide <= 1 + ALIKE))
    return [dict(zip(("name", "goal", "value", "met"), g, strict=True)) for g in goals]


def finish(out: Path, config: dict[str, Any], rows: list[dict[str, Any]], goals: list[dict[str, Any]]) -> None:
    """As every benchmark does, or without its packages where there is only torch."""
    if all(find_spec(name) for name in ("rich", "sglang", "ray")):
        import common

        common.finish(out, config, rows, goals)
        return
    machine = {"processor": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    document = {"config": config | machine, "rows": rows, "goals": goals}
    (out / "result.json").write_text(json.dumps(document, indent=1) + "\n")
    for line in (*rows, *goals):
        print(line)


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Launches and time, each over the number of requests."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), constrained_layout=True)
    tiny = [r for r in rows if r["hidden"] == TINY]
    axes[0].plot(REQUESTS, [r["launches_upstream"] for r in tiny], "o-", label="upstream")
    axes[0].plot(REQUESTS, [r["launches_ours_with_ids"] for r in tiny], "o-", label="ours, ids and rows")
    axes[0].plot(REQUESTS, [r["launches_ours"] for r in tiny], "o--", label="ours, rows")
    axes[0].set_title("launches")
    for axis, hidden in zip(axes[1:], (TINY, KIMI), strict=True):
        chosen = [r for r in rows if r["hidden"] == hidden]
        axis.plot(REQUESTS, [r["upstream_us"] for r in chosen], "o-", label="upstream")
        axis.plot(REQUESTS, [r["ours_us"] for r in chosen], "o-", label="ours, ids and rows")
        axis.set_title(f"microseconds, hidden {hidden}")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(REQUESTS, [str(b) for b in REQUESTS])
        axis.set_xlabel("requests in the batch")
        axis.legend(fontsize=8)
    figure.savefig(out / "draft_rows.png", dpi=110)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--out", type=Path, required=True, help="folder for result.json and the picture")
    p.add_argument("--device", default="cpu", help="cpu or cuda")
    p.add_argument("--seconds", type=float, default=6.0, help="time for each size")
    args = p.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rows = [measure(b, hidden, args.device, args.seconds) for hidden in (TINY, KIMI) for b in REQUESTS]
    device = torch.cuda.get_device_name() if args.device != "cpu" else "cpu, 1 thread"
    config = {
        "device": device,
        "baseline": "upstream's loop (0.5.23), ids and rows",
        "time": "quickest run (of the thread, on a CPU)",
    }
    finish(args.out, config, rows, goals_of(rows, args.device))
    if find_spec("matplotlib"):
        draw(rows, args.out)


if __name__ == "__main__":
    main()

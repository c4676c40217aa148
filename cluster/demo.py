"""`kimi-serve demo`: deploy here, send a mixed burst, check what came back, stop everything, write a report."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster import local, report
from cluster.burst import Result, burst, canonical, examples
from cluster.lossless import target_only

SEED = 20_260
GAP_S = 0.02
COMPARED = 20


def run(file: Path, out: Path, requests: int, console: Console, port: int | None = None) -> dict[str, Any]:
    """The whole demo; returns the report. `out` receives report.json and report.png."""
    config = local.load(file, port)
    work = examples(requests, SEED)
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        wanted = config.app.engine.num_replicas
        deploy = progress.add_task("starting Ray and the engines", total=wanted)

        def tell(text: str) -> None:
            done = int(text.split()[2]) if text.startswith("engines up") else None
            progress.update(deploy, description=text, completed=done)

        with local.running(config, tell) as handle:
            progress.update(deploy, description=f"{wanted} engines up at {config.url}", completed=wanted)
            task = progress.add_task(f"{requests} questions by HTTP and by handle", total=requests)
            results = asyncio.run(burst(work, config.url, handle, lambda _: progress.advance(task), GAP_S))
            groups = handle.state.remote().result(timeout_s=30)["groups"]
        progress.update(deploy, description=f"{wanted} engines started and stopped")
        compared = _comparable(results)[:COMPARED]
        task = progress.add_task("the same questions to an engine without a draft", total=len(compared))
        plain = target_only(
            [r.example.request() for r in compared],
            config.app.engine,
            out / "target-only.log",
            lambda: progress.advance(task),
        )
    same = sum(canonical(r.message) == text for r, text in zip(compared, plain, strict=True))
    document = report.build(results, groups, (len(compared), same), time.monotonic() - started)
    (out / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    report.draw(document, results, out / "report.png")
    _show(document, results, groups, out, console)
    return document


def _comparable(results: list[Result]) -> list[Result]:
    """Answers to compare: every kind, images first."""
    ok = [r for r in results if r.error is None]
    return sorted(ok, key=lambda r: r.example.modality)


def shortcomings(document: dict[str, Any]) -> list[str]:
    """What the demo promises and this run did not keep."""
    groups, acceptance, lossless = document["groups"], document["acceptance"], document["lossless"]
    promises = [
        (document["requests"]["sent"] >= 32, "fewer than 32 requests were sent"),
        (document["requests"]["failed"] == 0, f"{document['requests']['failed']} requests failed"),
        (document["image_answers_correct"] >= 0.95, f"image answers right: {document['image_answers_correct']:.1%}"),
        ((groups["integrity"] or 0) >= 0.95, f"group integrity is {groups['integrity']}"),
        (groups["largest_extend_requests"] >= 4, f"largest extend batch: {groups['largest_extend_requests']} requests"),
        (2.2 <= (acceptance["length"] or 0) <= 3.9, f"acceptance length is {acceptance['length']}"),
        (
            lossless["compared"] >= 16 and lossless["compared"] == lossless["identical"],
            f"{lossless['identical']} of {lossless['compared']} greedy answers equal the target-only engine's",
        ),
    ]
    return [text for kept, text in promises if not kept]


def _show(
    document: dict[str, Any], results: list[Result], groups: list[dict[str, Any]], out: Path, console: Console
) -> None:
    answers = Table(title="some questions and answers", title_justify="left", expand=True)
    answers.add_column("kind", no_wrap=True)
    answers.add_column("question", ratio=2)
    answers.add_column("answer", ratio=5)
    answers.add_column("right", no_wrap=True)
    seen: set[str] = set()
    for result in results:
        if result.example.kind not in seen:
            seen.add(result.example.kind)
            answers.add_row(
                result.example.kind,
                result.example.question,
                _answer(result),
                "[green]yes[/]" if result.right else "[red]no[/]",
            )
    console.print(answers)
    table = Table(title="the groups that formed", title_justify="left")
    for column in ("group", "replica", "members", "tokens", "one extend batch", "requests in it"):
        table.add_column(column, justify="right")
    for group in [g for g in groups if g["size"] > 1 or g["images"]][:24]:
        together = "alone" if group["size"] == 1 else "yes" if report.integrity([group]) == 1.0 else "[red]no[/]"
        table.add_row(
            group["group_id"],
            group["replica"],
            str(group["size"]),
            str(group["tokens"]),
            together,
            ", ".join(sorted({str(n) for _, n in group["batches"]})),
        )
    console.print(table)
    acceptance, latency, lossless = document["acceptance"], document["latency"], document["lossless"]
    lines = [
        f"requests        {document['requests']['ok']} of {document['requests']['sent']} answered, "
        f"{document['requests']['failed']} failed",
        f"right answers   {document['image_answers_correct']:.1%} of image questions, "
        f"{document['answers_correct']:.1%} of all",
        f"acceptance      length {acceptance['length']} of 4, first chain {acceptance['first_chain']} of 3, "
        f"by position {acceptance['by_position']}",
        f"latency         TTFT p50 {latency['ttft_p50_s']} s, p99 {latency['ttft_p99_s']} s; "
        f"inter-token p50 {latency['itl_p50_s']} s; whole answer p50 {latency['e2e_p50_s']} s",
        f"lossless        {lossless['identical']} of {lossless['compared']} greedy answers equal those of an engine "
        "without a draft",
        f"report          {out / 'report.json'}, {out / 'report.png'}",
    ]
    console.print(Panel("\n".join(lines), title="kimi-serve demo", title_align="left", expand=False))
    for (way, error), count in Counter((r.way, r.error) for r in results if r.error).items():
        console.print(f"[red]failed[/] {count} by {way}: {error}", highlight=False)


def _answer(result: Result) -> str:
    if result.error:
        return result.error
    message = result.message
    calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls") or []]
    thought = f"({message['reasoning_content'].strip()}) " if message.get("reasoning_content") else ""
    return thought + (message.get("content") or "") + " ".join(calls)

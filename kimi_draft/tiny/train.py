"""Train, export and evaluate the tiny Kimi-K2.5 and its two drafts.

``python -m kimi_draft.tiny.train --out kimi_draft/tiny/weights`` reproduces the committed weights (same seeds, same
number of threads, same library versions; another CPU may round differently and end in slightly other weights).
``--quick`` runs a few steps of everything, to test the pipeline. ``--keep target`` trains only the drafts, for the
target that lies in ``--out``; ``--keep all`` only evaluates and writes the card again.
"""

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kimi_draft.tiny import card, export
from kimi_draft.tiny.draft import load_draft
from kimi_draft.tiny.model import Target, load_target
from kimi_draft.tiny.task import MIX
from kimi_draft.tiny.train_draft import DraftPlan, train_draft
from kimi_draft.tiny.train_target import Phase, Report, TargetPlan, train_target

THREADS = 1  # a second thread gains a fifth on an idle machine and costs a half on a busy one
TARGET = TargetPlan()
DRAFT = DraftPlan()
DRAFT31 = DraftPlan(seed=20, steps=100, eagle31=True)
HELD_OUT = 2000
QUICK_STEPS, QUICK_BATCH, QUICK_HELD_OUT = 3, 8, 40


def bar(progress: Progress, title: str, steps: int) -> Report:
    """A progress bar as a callback for the training loops; without a terminal it prints a line every 100 steps."""
    task = progress.add_task(title, total=steps, numbers="")

    def report(step: int, numbers: dict[str, float]) -> None:
        text = "  ".join(f"{name} {value:.3f}" for name, value in numbers.items())
        progress.update(task, completed=step, numbers=text)
        if not progress.console.is_terminal and (step % 50 == 0 or step == steps):
            progress.console.print(f"{title} {step}/{steps}  {text}", soft_wrap=True)

    return report


def run(out: Path, quick: bool = False, keep: str = "", console: Console | None = None) -> str:
    """Train everything into ``out`` and return the model card, which is also written to ``out/README.md``.

    ``keep``: "target" trains only the drafts for the target that lies in ``out``, "all" only evaluates what lies there.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(THREADS)
    target_plan, draft_plan, draft31_plan, held_out = TARGET, DRAFT, DRAFT31, HELD_OUT
    if quick:
        target_plan = replace(target_plan, phases=(Phase(QUICK_STEPS, MIX),), batch=QUICK_BATCH)
        draft_plan = replace(draft_plan, steps=QUICK_STEPS, batch=QUICK_BATCH)
        draft31_plan = replace(draft31_plan, steps=QUICK_STEPS, batch=QUICK_BATCH)
        held_out = QUICK_HELD_OUT
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    times = out / "seconds.json"  # of each part, so that a card written after --keep can tell all of them
    seconds: dict[str, float] = json.loads(times.read_text()) if keep and times.exists() else {}
    with Progress(*columns, console=console) as progress:
        started = time.perf_counter()
        target: Target
        if keep:
            target = load_target(out / "target")
        else:
            target = train_target(target_plan, bar(progress, "target", target_plan.steps))
            export.export_target(target, out / "target")
            seconds["target"] = time.perf_counter() - started
        drafts = {}
        for name, plan in (("draft", draft_plan), ("draft31", draft31_plan)):
            if keep == "all":
                drafts[name] = load_draft(out / name)
                continue
            started = time.perf_counter()
            drafts[name] = train_draft(target, plan, bar(progress, name, plan.steps))
            export.export_draft(drafts[name], target, out / name)
            seconds[name] = time.perf_counter() - started
    started = time.perf_counter()
    results = card.measure(target, drafts, held_out)
    seconds["evaluation"] = time.perf_counter() - started
    times.write_text(json.dumps({name: round(value, 1) for name, value in seconds.items()}) + "\n")
    plans = {"target": target_plan, "draft": draft_plan, "draft31": draft31_plan}
    text = card.write(results, plans, seconds, {"target": target, **drafts}, THREADS)
    (out / "README.md").write_text(text, encoding="utf-8")
    return text


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for target/, draft/, draft31/ and README.md")
    parser.add_argument(
        "--quick", action="store_true", help="a few steps only: tests the pipeline, the weights are useless"
    )
    parser.add_argument("--keep", choices=["target", "all"], default="", help="do not train what lies in --out already")
    arguments = parser.parse_args()
    console = Console()
    text = run(arguments.out, arguments.quick, arguments.keep, console)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()

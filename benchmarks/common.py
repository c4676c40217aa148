"""What every benchmark shares: the command line, result.json, the table, the machine's description."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = ("kimi-serve", "sglang", "torch", "ray")


def parser(description: str) -> argparse.ArgumentParser:
    """An argument parser with --out."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--out", type=Path, required=True, help="folder for result.json and the picture")
    return p


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def goal(name: str, wanted: str, value: float | None, met: bool) -> dict[str, Any]:
    """One promise and whether this run kept it."""
    return {"name": name, "goal": wanted, "value": value, "met": met}


def finish(out: Path, config: dict[str, Any], rows: list[dict[str, Any]], goals: list[dict[str, Any]]) -> None:
    """Write result.json and print the rows and the goals."""
    out.mkdir(parents=True, exist_ok=True)
    document = {"config": config | machine(), "rows": rows, "goals": goals}
    (out / "result.json").write_text(json.dumps(document, indent=1) + "\n")
    console = Console(width=max(120, Console().width))
    console.print(config)
    table = Table()
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)
    for g in goals:
        console.print(
            f"{'[green]met[/]' if g['met'] else '[red]NOT met[/]'}  {g['name']}: {g['value']} (goal {g['goal']})"
        )
    console.print(f"written: {out / 'result.json'}")

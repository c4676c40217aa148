"""The `kimi-serve` command."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Kimi-K2.5 on Ray Serve, with a corrected EAGLE3-MLA draft and grouped multimodal prefills.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
console = Console()
LOCAL = Path(__file__).parent / "local-cpu.yaml"


@app.callback()
def main() -> None:
    """Keeps sub-commands sub-commands."""


@app.command()
def demo(
    file: Annotated[Path, typer.Argument(help="Serve config to deploy here.")] = LOCAL,
    out: Annotated[Path, typer.Option(help="Folder for report.json and report.png.")] = Path("out/demo"),
    requests: Annotated[int, typer.Option(min=4, help="Questions to send.")] = 60,
    port: Annotated[int | None, typer.Option(help="HTTP port instead of the config's.")] = None,
) -> None:
    """Deploy on this machine, send a mixed burst, check the answers, stop everything, write a report."""
    from cluster import demo as module

    with _clear_errors():
        document = module.run(file, out, requests, console, port)
    if missed := module.shortcomings(document):
        for text in missed:
            console.print(f"[red]not as promised:[/] {text}")
        raise typer.Exit(1)


@app.command()
def serve(
    file: Annotated[Path, typer.Argument(help="Serve config to run here.")] = LOCAL,
    port: Annotated[int | None, typer.Option(help="HTTP port instead of the config's.")] = None,
) -> None:
    """Serve on this machine until Ctrl-C."""
    from cluster import local

    stop = threading.Event()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # while starting, as Ctrl-C: everything is stopped again
    with _clear_errors():
        config = local.load(file, port)
        said = ""

        def tell(text: str) -> None:
            nonlocal said
            if text != said:
                said = text
                console.print(f"[dim]{text}[/]")

        with local.running(config, tell):
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: stop.set())
            console.print(
                f"[bold]ready[/] at {config.url}/v1  (model {config.app.engine.served_model_name}); Ctrl-C stops"
            )
            stop.wait()


class _clear_errors:
    """Expected failures become one clear line and exit status 1 instead of a traceback."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        from cluster.local import BadConfig, StartFailed
        from cluster.preflight import NotReady

        if isinstance(error, BadConfig | NotReady | StartFailed | TimeoutError):
            console.print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None
        if isinstance(error, KeyboardInterrupt):
            console.print("stopped")
            raise typer.Exit(130) from None

"""The command `verl-r3`. Each command imports what it needs when it is called, so that a gateway needs no torch and help is quick."""

from __future__ import annotations

import sys

import typer

from .. import __version__
from ..errors import R3Error
from . import bench
from .demo.command import demo
from .inspect import inspect
from .report import report

app = typer.Typer(
    help="Rollout routing replay (R3) for VERL and Agent Lightning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app.command()(demo)
app.command()(report)
app.command()(inspect)
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command(context_settings=_PASS_ON)
def gateway(context: typer.Context) -> None:
    """agl-server with route capture: takes every argument of agl-server, and r3.memory_limit=, r3.spill_folder=, r3.model=, r3.codec=."""
    from .gateway import run

    run(context.args)


def main() -> None:
    """Entry point: a known fault is one line, not a traceback."""
    try:
        app()
    except R3Error as error:
        sys.exit(f"verl-r3: {error}")
    except ModuleNotFoundError as error:
        extra = "demo" if sys.argv[1:2] == ["demo"] else _EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        sys.exit(f"verl-r3: expected {error.name!r} to be installed, found that it is not; pip install 'verl-r3-plugin[{extra}]'")


_EXTRAS = {
    "agentlightning": "agentlightning",
    "fastapi": "agentlightning",
    "httpx": "agentlightning",
    "hydra": "agentlightning",
    "msgspec": "agentlightning",
    "structlog": "agentlightning",
    "uvicorn": "agentlightning",
    "kubernetes": "swe",
    "matplotlib": "demo",
    "megatron": "megatron",
    "safetensors": "demo",
    "torch": "megatron",
    "verl": "verl",
    "vllm": "vllm",
}

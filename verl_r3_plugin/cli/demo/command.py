"""`verl-r3 demo`: options, progress and tables around `loop.py`."""

from __future__ import annotations

import json
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from ...errors import ConfigError, R3Error

PARTS = ("verl-r3-plugin", "vllm", "verl", "agentlightning", "megatron-core", "torch", "transformers", "tensordict", "numpy")
REPLAY = ("R3", "off", "both")


def demo(
    steps: int = typer.Option(3, min=1, help="Training steps."),
    replay: str = typer.Option("both", help="R3: train with replay; off: with the live router; both: with replay, and measure both."),
    seed: int = typer.Option(0, help="Of the model, the tasks and the probe."),
    out: Path = typer.Option(Path("runs/demo"), help="Folder for metrics.jsonl, report.html and logs."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object as the last line of stdout."),
) -> None:
    """One whole R3 loop on this machine's CPU: vLLM, Agent Lightning, VERL's batch and losses, Megatron-core, all real."""
    if replay not in REPLAY:
        raise ConfigError(f"--replay: expected one of {list(REPLAY)}, found {replay!r}")
    signal.signal(signal.SIGTERM, _interrupt)  # so that servers are stopped on it as on Ctrl-C
    from .loop import Demo, Options

    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    lines = out / "metrics.jsonl"
    lines.write_text("")
    console = Console(stderr=as_json)
    cache = Path(typer.get_app_dir("verl-r3")) / "checkpoints"

    def on_step(figures: dict[str, Any]) -> None:
        with lines.open("a") as file:
            file.write(json.dumps(figures) + "\n")
        console.print(step_table([figures]))

    options = Options(out=out, cache=cache, steps=steps, replay=replay, seed=seed)
    with Progress(*Progress.get_default_columns()[:2], TimeElapsedColumn(), console=console, transient=True) as progress:
        # A fixed number of announcements before the first step, and in each.
        task = progress.add_task("starting", total=3 + 4 * steps)
        result = Demo(options, tell=lambda what: progress.update(task, description=what, advance=1), on_step=on_step).run()
    summary = {"parts": parts(), "steps": result.steps, "routes_equal": result.routes_equal}
    (out / "summary.json").write_text(json.dumps(summary | {"phases": result.phases}, indent=2))
    console.print(step_table(result.steps))
    console.print("seconds: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in result.phases.items()))
    from ..report import write_report

    console.print(f"routes_equal: {result.routes_equal}   report: {write_report(out)}")
    if as_json:
        print(json.dumps(summary))
    if result.routes_equal is False:
        raise R3Error("expected Megatron's routers to emit exactly the experts that vLLM used, found others; this is a fault of the plugin")


def parts() -> dict[str, str]:
    """Versions of what took part."""
    found = {}
    for name in PARTS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


ROWS = (
    ("reward", lambda s: f"{s['reward']:.3f} ± {s['reward_std']:.3f}"),
    ("trained tokens, turns", lambda s: f"{s['tokens']}, {s['turns']}"),
    ("coverage", lambda s: _number(s["coverage"])),
    ("fallback", lambda s: _number(s["fallback"])),
    ("agreement of the live router", lambda s: _number(s["agreement"])),
    ("gradient norm", lambda s: _number(s["grad_norm"])),
    ("|log-prob difference|, live : replay", lambda s: _pair(s["logprob_abs_diff"])),
    ("k3 KL, live : replay", lambda s: _pair(s["k3_kl"])),
    ("tokens with ratio > 2, live : replay", lambda s: _pair(s["extreme_fraction"])),
    ("bytes a token, ours : hosts' padded", lambda s: f"{s['bytes_per_token']:.1f} : {s['host_bytes_per_token']:.1f}"),
    ("|log-prob difference| after the push", lambda s: _number(s["push_logprob_diff"])),
)


def step_table(steps: list[dict[str, Any]]) -> Table:
    """One column a step: it fits a terminal of 80 columns."""
    table = Table(show_edge=False)
    table.add_column("step")
    for step in steps:
        table.add_column(str(step["step"]), justify="right")
    for name, value in ROWS:
        table.add_row(name, *(value(step) for step in steps))
    return table


def _pair(values: dict[str, float | None]) -> str:
    return f"{_number(values['live'])} : {_number(values['replay'])}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}" if 0 < abs(value) < 0.001 else f"{value:.4g}"


def _interrupt(*_: Any) -> None:
    sys.exit(143)

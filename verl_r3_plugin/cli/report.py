"""`verl-r3 report DIR`: one self-contained page from a run's metrics.jsonl, with plots."""

from __future__ import annotations

import html
import io
import json
from pathlib import Path
from typing import Any

import typer

from ..errors import R3Error

PLOTS = (
    ("reward", "Mean reward", ("reward",), False),
    ("k3_kl", "k3 KL between rollout engine and trainer", ("live", "replay"), True),
    ("logprob_abs_diff", "Mean |log-prob difference|", ("live", "replay"), True),
    ("agreement", "Share of experts that the live router would pick too", ("agreement",), False),
)
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}"
    "table{border-collapse:collapse;font-size:.85rem}"
    "td,th{padding:.25rem .6rem;text-align:right;font-weight:normal;border-bottom:1px solid #ddd}"
    "figure{display:inline-block;margin:0 1rem 1rem 0}.ok{color:#176f2c}.bad{color:#b31d28}"
)


def report(folder: Path = typer.Argument(help="Folder of a run: has metrics.jsonl.")) -> None:
    """Make a run's report page again."""
    print(write_report(folder))


def write_report(folder: Path) -> Path:
    """Path of the page; R3Error where the folder holds no run."""
    lines = folder / "metrics.jsonl"
    if not lines.is_file():
        raise R3Error(f"expected a run's metrics.jsonl in {folder}, found none; make one with verl-r3 demo --out {folder}")
    try:
        steps = [json.loads(line) for line in lines.read_text().splitlines() if line.strip()]
    except json.JSONDecodeError as error:
        raise R3Error(f"expected one JSON object a line in {lines}, found a line that is not ({error})") from error
    if not steps:
        raise R3Error(f"expected at least one finished step in {lines}, found none")
    summary_file = folder / "summary.json"
    summary = json.loads(summary_file.read_text()) if summary_file.is_file() else {}
    page = folder / "report.html"
    page.write_text(_page(steps, summary))
    return page


def _page(steps: list[dict[str, Any]], summary: dict[str, Any]) -> str:
    equal = summary.get("routes_equal")
    verdict = {
        True: '<p class="ok">Every trained token was replayed with exactly the experts that vLLM used.</p>',
        False: '<p class="bad">Megatron routed at least one trained token to other experts than vLLM.</p>',
        None: "<p>Routes were not compared (training without replay, or an unfinished run).</p>",
    }[equal]
    plots = "".join(f"<figure>{_plot(steps, *plot)}</figure>" for plot in PLOTS if _has(steps, plot[0], plot[2]))
    parts = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in summary.get("parts", {}).items())
    phases = "".join(f"<tr><td>{html.escape(k)}</td><td>{v:.1f} s</td></tr>" for k, v in summary.get("phases", {}).items())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>verl-r3 run</title><style>{STYLE}</style>'
        f"<h1>R3 run: {len(steps)} steps</h1>{verdict}{plots}<h2>Steps</h2>{_table(steps)}"
        f"<h2>Parts</h2><table>{parts}</table><h2>Time</h2><table>{phases}</table></html>"
    )


def _table(steps: list[dict[str, Any]]) -> str:
    """One column a step, one row a figure: a page is taller than wide."""
    rows = []
    for key, value in steps[0].items():
        for kind in sorted(value) if isinstance(value, dict) else [None]:
            name = html.escape(key if kind is None else f"{key}, {kind}")
            cells = "".join(f"<td>{_cell(step.get(key) if kind is None else step[key][kind])}</td>" for step in steps)
            rows.append(f"<tr><th>{name}</th>{cells}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else html.escape(str(value))


def _has(steps: list[dict[str, Any]], key: str, kinds: tuple[str, ...]) -> bool:
    return any(_value(step, key, kind) is not None for step in steps for kind in kinds)


def _value(step: dict[str, Any], key: str, kind: str) -> float | None:
    found = step.get(key)
    return found.get(kind) if isinstance(found, dict) else found


def _plot(steps: list[dict[str, Any]], key: str, title: str, kinds: tuple[str, ...], logarithmic: bool) -> str:
    """An SVG of one figure over steps."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3))
    for kind in kinds:
        points = [(step["step"], _value(step, key, kind)) for step in steps]
        points = [(x, y) for x, y in points if y is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=kind)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if logarithmic and all((_value(step, key, kind) or 0) > 0 for step in steps for kind in kinds if _value(step, key, kind) is not None):
        axes.set_yscale("log")
    if len(kinds) > 1:
        axes.legend()
    figure.tight_layout()
    stream = io.StringIO()
    figure.savefig(stream, format="svg")
    pyplot.close(figure)
    text = stream.getvalue()
    return text[text.index("<svg") :]

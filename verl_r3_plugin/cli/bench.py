"""`verl-r3 bench`: the same work by a host's own way and by this package's, in one run, as ratios."""

from __future__ import annotations

import base64
import io
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import typer

from .. import codec
from ..routes import RoutedExperts
from ..schema import RouteSchema

app = typer.Typer(help="Measure, side by side with the hosts' own way.", no_args_is_help=True)


@app.callback()
def _several() -> None:
    """A group even while it has one command."""


@app.command(name="codec")
def codec_command(
    tokens: int = typer.Option(24_000, help="Rows of the trajectory."),
    repeats: int = typer.Option(7, min=1, help="Timed runs after one that is not counted; the median is printed."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Bytes and time to encode and decode one trajectory, beside base64 of an .npy file, as vLLM and Agent Lightning carry it."""
    found = [measure(*model, tokens, repeats) for model in ((256, 8, 40), (128, 8, 48), (512, 10, 48))]
    if as_json:
        print(json.dumps(found))
        return
    for one in found:
        size, encode, decode = one["bytes_per_token"], one["encode_ms"], one["decode_ms"]
        print(
            f"top-{one['top_k']} of {one['experts']}, {one['layers']} layers, {tokens} tokens: {size['ours']:.1f} B/token "
            f"({size['ratio']:.2f} of the host's), encode {encode['ours']:.1f} ms, decode {decode['ours']:.1f} ms; "
            f"host {encode['host']:.1f} and {decode['host']:.1f} ms"
        )


def measure(experts: int, top_k: int, layers: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Figures for one model, every layer MoE. Times are of the whole trajectory on one core; the capture's validity check is ours alone."""
    schema = RouteSchema(experts, top_k, layers, tuple(range(layers)))
    random = np.random.default_rng(0)
    some = random.random((1000, layers, experts), np.float32).argsort(axis=2)[..., :top_k].astype(schema.id_dtype)
    array = some[random.integers(0, len(some), tokens)]
    routes = RoutedExperts.from_capture(schema, array)
    blob = codec.encode(routes, token_count=tokens + 1, token_hash=0)
    text = _npy_base64(array)
    times = {
        "check_ms": {"ours": _median_ms(lambda: RoutedExperts.from_capture(schema, array), repeats)},
        "encode_ms": {
            "ours": _median_ms(lambda: codec.encode(routes, token_count=tokens + 1, token_hash=0), repeats),
            "host": _median_ms(lambda: _npy_base64(array), repeats),
        },
        "decode_ms": {
            "ours": _median_ms(lambda: codec.decode(blob), repeats),
            "host": _median_ms(lambda: np.load(io.BytesIO(base64.b64decode(text))), repeats),
        },
    }
    sizes = {"ours": len(blob) / tokens, "host": len(text) / tokens}
    return {
        "experts": experts,
        "top_k": top_k,
        "layers": layers,
        "tokens": tokens,
        "bytes_per_token": sizes | {"ratio": sizes["ours"] / sizes["host"]},
        **times,
    }


def _npy_base64(array: np.ndarray) -> str:
    stream = io.BytesIO()
    np.save(stream, array)
    return base64.b64encode(stream.getvalue()).decode("ascii")


def _median_ms(work: Callable[[], Any], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)

"""`verl-r3 inspect FILE`: what envelopes of routes hold, one or several back to back, or what a gateway answered for a rollout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from .. import codec
from ..errors import CodecError


def inspect(
    file: Path = typer.Argument(help="Envelopes (as `verl-r3 demo` writes in routes.r3), or the body of GET /r3/rollouts/..."),
    rows: int = typer.Option(3, min=0, help="Rows of each envelope to print."),
    as_json: bool = typer.Option(False, "--json", help="One JSON array instead of tables."),
) -> None:
    """Print what an envelope, or a file of several, holds."""
    if not file.is_file():
        raise CodecError(f"expected a file of routes, found none at {file}")
    found = [describe(blob, rows, **extra) for blob, extra in read(file.read_bytes())]
    if as_json:
        print(json.dumps(found))
        return
    console = Console()
    for number, one in enumerate(found):
        table = Table(title=f"envelope {number}", show_header=False, show_edge=False, title_justify="left")
        for name, value in one.items():
            table.add_row(name, "\n".join(map(str, value)) if name == "first rows" else str(value))
        console.print(table)


def read(data: bytes) -> list[tuple[bytes, dict[str, Any]]]:
    """(envelope, what is known about it besides) of each in `data`; CodecError where it is neither kind of file."""
    if data[:4] != codec.MAGIC:
        return _turns(data)
    found, at = [], 0
    while at < len(data):
        size = codec.envelope_bytes(data[at:])
        found.append((data[at : at + size], {}))
        at += size
    return found


def describe(blob: bytes, rows: int, **extra: Any) -> dict[str, Any]:
    """Header, coverage and the first rows of one envelope."""
    if not blob:
        return extra | {"routes": "none"}
    header = codec.read_header(blob)
    routes = codec.decode(blob, rows=slice(0, rows))
    schema = header.schema
    shown = [
        f"token {header.start + row}: " + ("  ".join(map(str, np.sort(ids, axis=1).tolist())) if present else "absent")
        for row, (ids, present) in enumerate(zip(routes.ids, routes.present, strict=True))
    ]
    return extra | {
        "experts": schema.num_experts,
        "top_k": schema.top_k,
        "MoE layers": f"{schema.num_moe_layers} of {schema.num_layers} ({', '.join(map(str, schema.moe_layers))})",
        "rows": f"{header.rows}, of tokens {header.start} to {header.start + header.rows - 1}",
        "present": header.present_rows,
        "coverage": header.present_rows / header.rows if header.rows else 1.0,
        "tokens": header.token_count,
        "token hash": f"{header.token_hash:016x}",
        "encoding": header.encoding,
        "bytes": header.total_bytes,
        "bytes a row": round(header.total_bytes / header.rows, 2) if header.rows else None,
        "first rows": shown,
    }


def _turns(data: bytes) -> list[tuple[bytes, dict[str, Any]]]:
    try:
        from ..hosts.agentlightning.wire import checksum, unpack

        turns = unpack(data, checksum(data))
    except (CodecError, ImportError) as error:
        raise CodecError(f"expected envelopes (beginning with {codec.MAGIC!r}) or a gateway's answer, found neither ({error})") from error
    return [
        (turn.routes, {"turn": index, "continues turn": turn.parent, "model version": turn.version, "reason": turn.reason})
        for index, turn in enumerate(turns)
    ]

"""An independent witness between the gateway and vLLM: it sees full captures, whatever the gateway asked for.

It takes `routed_experts_prompt_start` out of each request, so that vLLM answers with the routes of the whole context, keeps that array
under the context's token ids, and hands the gateway the part that it had asked for. The proof of the demo (`checks.py`) compares what
Megatron's routers emitted with what this witness saw, and so with nothing that went through the plugin's own bytes.

The earliest capture of a row wins here too, since that is the one under which a token was sampled.
"""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from typing import Any

import httpx
import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response

from ...errors import R3Error


class Tap:
    """A loopback proxy in a thread of this process. captures: {token ids: [tokens - 1, layers, top_k]}, one an answer."""

    def __init__(self, upstream: str, port: int) -> None:
        self.upstream = upstream
        self.port = port
        self.captures: list[tuple[list[int], np.ndarray]] = []
        self.bytes_from_vllm = 0
        self._server = uvicorn.Server(uvicorn.Config(self._app(), host="127.0.0.1", port=port, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, name="tap", daemon=True)

    @property
    def url(self) -> str:
        """Base of the OpenAI API, as vLLM's."""
        return f"http://127.0.0.1:{self.port}/v1"

    def rows_of(self, token_ids: list[int]) -> np.ndarray:
        """[tokens - 1, layers, top_k] of a trajectory: each row from the first answer whose context begins as the trajectory does."""
        rows: np.ndarray | None = None
        filled = 0
        for tokens, capture in sorted(self.captures, key=lambda entry: len(entry[0])):
            if len(tokens) <= len(token_ids) and token_ids[: len(tokens)] == tokens and len(capture) > filled:
                rows = capture if rows is None else np.concatenate([rows, capture[filled:]])
                filled = len(rows)
        if rows is None or filled != len(token_ids) - 1:
            raise R3Error(f"expected the tap to have seen all {len(token_ids) - 1} rows of a trajectory, found {filled}")
        return rows

    def __enter__(self) -> Tap:
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise R3Error(f"expected the tap to listen on port {self.port} within 20 s, found that it does not")
            time.sleep(0.02)
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.should_exit = True
        self._thread.join(10)

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/{path:path}")
        async def forward(path: str, request: Request) -> Response:
            body = json.loads(await request.body())
            start = body.pop("routed_experts_prompt_start", 0)
            async with httpx.AsyncClient(timeout=300) as client:
                answer = await client.post(f"{self.upstream}/{path}", json=body)
            if answer.status_code != 200:
                return Response(answer.content, answer.status_code, media_type="application/json")
            content = answer.json()
            for choice in content["choices"]:
                array = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
                self.bytes_from_vllm += len(choice["routed_experts"])
                self.captures.append(([*content["prompt_token_ids"], *choice["token_ids"]], array))
                choice["routed_experts"] = _npy_base64(array[start:])
            return Response(json.dumps(content).encode(), media_type="application/json")

        return app


def _npy_base64(array: np.ndarray) -> str:
    stream = io.BytesIO()
    np.save(stream, array)
    return base64.b64encode(stream.getvalue()).decode()

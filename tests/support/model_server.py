"""A model server that answers like vLLM 0.30's chat completions, with routes that are a function of the tokens.

The same strictness: ids of prompt and answer on request, routes as base64 of an .npy of all layers in uint8 or uint16, without the last
token's row, from `routed_experts_prompt_start` on, which must not lie beyond the prompt. Its `weights` change the routes, as a weight
update does. tests/hosts/agentlightning/test_real_vllm.py holds it against the real one.
"""

from __future__ import annotations

import base64
import io
import zlib
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from verl_r3_plugin.schema import RouteSchema

ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 4}
END = 5


class ModelServer:
    """script: what to do instead of answering, one entry a request: a status, bytes to send as they are, or a function of the answer."""

    def __init__(self, schema: RouteSchema, answer_tokens: int = 6) -> None:
        self.schema = schema
        self.answer_tokens = answer_tokens
        self.weights = 0
        self.knows_start = True
        self.script: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.bytes_sent = 0
        self.app = FastAPI()
        self.app.add_api_route("/v1/chat/completions", self._complete, methods=["POST"])

    def routes(self, tokens: list[int], weights: int | None = None) -> np.ndarray:
        """[tokens - 1, num_layers, top_k]: row t depends on the tokens up to t, and on the weights; dense layers are zero."""
        schema, weights = self.schema, self.weights if weights is None else weights
        prefix = np.array([zlib.crc32(np.asarray(tokens[: t + 1], np.int64).tobytes()) for t in range(len(tokens) - 1)], np.int64)
        layer = np.arange(schema.num_layers)[:, None] * 7919
        first = (prefix[:, None, None] + layer + weights * 104729) % schema.num_experts
        ids = (first + np.arange(schema.top_k)) % schema.num_experts
        dense = [n for n in range(schema.num_layers) if n not in schema.moe_layers]
        ids[:, dense] = 0
        return ids.astype(schema.id_dtype)

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        act = self.script.pop(0) if self.script else None
        if isinstance(act, int):
            return JSONResponse({"error": {"message": "scripted"}}, act)
        prompt = [t for message in body["messages"] for t in encode(message)] + [ROLES["assistant"]]
        start = body.get("routed_experts_prompt_start", 0) if self.knows_start else 0
        if not 0 <= start <= len(prompt):
            return JSONResponse({"error": {"message": f"routed_experts_prompt_start {start} is beyond the prompt"}}, 400)
        count = min(body.get("max_tokens", self.answer_tokens), self.answer_tokens)
        choices = []
        for index in range(body.get("n", 1)):
            seed = zlib.crc32(np.asarray(prompt, np.int64).tobytes()) + index + self.weights
            ids = [100 + (seed * (n + 3)) % 900 for n in range(count)]
            choice = {
                "index": index,
                "message": {"role": "assistant", "content": " ".join(map(str, ids))},
                "finish_reason": "length",
                "token_ids": ids,
                "logprobs": {"content": [{"token": str(i), "logprob": -0.5, "top_logprobs": []} for i in ids]},
                "routed_experts": npy(self.routes(prompt + ids)[start:]),
            }
            choices.append(choice)
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": choices}
        answer["prompt_token_ids"] = prompt
        if callable(act):
            answer = act(answer)
        response = Response(act, media_type="application/json") if isinstance(act, bytes) else JSONResponse(answer)
        self.bytes_sent += len(response.body)
        return response


def encode(message: dict[str, Any]) -> list[int]:
    """Tokens of one message: role, its words (numbers are themselves), end. What the model said is read in as the same tokens."""
    words = str(message["content"]).split()
    return [ROLES[message["role"]], *(int(w) if w.isdigit() else 1000 + zlib.crc32(w.encode()) % 9000 for w in words), END]


def npy(array: np.ndarray) -> str:
    """As vLLM's numpy2base64."""
    stream = io.BytesIO()
    np.save(stream, array)
    return base64.b64encode(stream.getvalue()).decode()

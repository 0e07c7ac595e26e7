"""agl-server with route capture: `create_gateway` takes what agl-server's `create_app` takes, and returns that very app with three things
added from outside, through its public face alone.

- a pure ASGI middleware notes whose request is being forwarded (Starlette's BaseHTTPMiddleware would hide disconnects from agl-server)
- the http client that the app makes in its lifespan is given the transport of `transport.py`
- routes `/r3/...` for the trainer, under the same key as agl-server's API; an agent has no use for them, and an envelope tells it nothing

The route schema comes from the trainer (PUT /r3/schema): it knows the model, and no training request precedes it. `r3.model` names a
model folder instead, for a gateway that must capture without one.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from agentlightning.server.app import create_app
from agentlightning.server.store import _models
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from omegaconf import DictConfig, OmegaConf

from ...errors import HostError, R3Error
from ...schema import RouteSchema
from . import transport as routes_transport
from .store import RouteStore
from .transport import RouteTransport, current_request
from .wire import CHECKSUM_HEADER, pack

_PROXIED = re.compile(r"^/proxy/rollout/([^/]+)/attempt/([^/]+)/mode/([^/]+)/")
_ROLLOUT = re.compile(r"^/api/rollouts/([^/]+)$")
MEMORY_LIMIT = 4 << 30


def create_gateway(config: Mapping[str, Any] | DictConfig) -> FastAPI:
    """The app. Own settings under the key `r3`: memory_limit (bytes), spill_folder, model (a folder with a config.json), codec."""
    raw: dict[str, Any] = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else dict(config)
    settings = dict(raw.pop("r3", None) or {})
    app = create_app(raw)
    store = RouteStore(int(settings.get("memory_limit") or MEMORY_LIMIT), settings.get("spill_folder"))
    transport = RouteTransport(httpx.AsyncHTTPTransport(), store, _version_of, settings.get("codec") or "set")
    if settings.get("model"):
        transport.schema = _schema_of(settings["model"])
    app.state.r3 = transport
    _wrap_client(app, transport)
    _add_routes(app, str(raw.get("key") or ""), transport)
    app.add_middleware(_Middleware, store=store)
    return app


class _Middleware:
    """Notes whose request is forwarded, and frees a rollout's routes when agl-server deletes it."""

    def __init__(self, app: Any, store: RouteStore) -> None:
        self.app = app
        self.store = store

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if match := _PROXIED.match(scope["path"]):
            current_request.set(routes_transport.Request(match[1], match[2], match[3] == "train"))
        await self.app(scope, receive, send)
        if scope["method"] == "DELETE" and (match := _ROLLOUT.match(scope["path"])):
            self.store.free(match[1])


def _wrap_client(app: FastAPI, transport: RouteTransport) -> None:
    original = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(running: FastAPI) -> AsyncIterator[Any]:
        async with original(running) as state:
            client = getattr(running.state, "http_client", None)
            if not isinstance(client, httpx.AsyncClient):
                raise HostError(
                    "expected agl-server to keep its httpx client in app.state.http_client, found "
                    f"{type(client).__name__}; this agentlightning is not one that verl-r3-plugin knows"
                )
            async with httpx.AsyncClient(transport=transport, timeout=client.timeout) as ours:
                running.state.http_client = ours
                try:
                    yield state
                finally:
                    running.state.http_client = client
                    transport.store.close()

    app.router.lifespan_context = lifespan


def _add_routes(app: FastAPI, key: str, transport: RouteTransport) -> None:
    def authorised(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if key and given != f"Bearer {key}" and request.headers.get("x-api-key", "") != key:
            raise HTTPException(401, "Invalid or missing API key")

    guarded = [Depends(authorised)]

    @app.get("/r3/rollouts/{rollout_id}/attempts/{attempt_id}", dependencies=guarded)
    async def rollout_routes(rollout_id: str, attempt_id: str) -> Response:
        body, checksum = pack(transport.store.turns(rollout_id, attempt_id))
        return Response(body, media_type="application/octet-stream", headers={CHECKSUM_HEADER: checksum})

    @app.put("/r3/schema", dependencies=guarded)
    async def set_schema(request: Request) -> dict[str, Any]:
        body = await request.body()
        try:
            transport.schema = RouteSchema(**json.loads(body))
        except (TypeError, ValueError, R3Error) as error:
            raise HTTPException(422, f"expected a route schema, found {body[:200]!r}: {error}") from None
        return asdict(transport.schema)

    @app.get("/r3/status", dependencies=guarded)
    async def status() -> dict[str, Any]:
        counts = transport.status
        state = "waiting" if not counts.training_answers else "capturing" if counts.with_routes else "no routes"
        return {
            "state": state,
            "schema": None if transport.schema is None else asdict(transport.schema),
            **asdict(counts),
            "rollouts": transport.store.rollouts,
            "memory_bytes": transport.store.memory_bytes,
            "spilled_bytes": transport.store.spilled_bytes,
        }


def _version_of(url: httpx.URL) -> int:
    """Model version registered for the endpoint that `url` belongs to, -1 if none is."""
    text = str(url)
    versions = [m.version for endpoints in _models.values() for e, m in endpoints.items() if text.startswith(e.rstrip("/") + "/")]
    return versions[0] if versions else -1


def _schema_of(model: str) -> RouteSchema:
    path = Path(model) / "config.json"
    if not path.is_file():
        raise HostError(f"r3.model: expected a folder with a config.json, found none at {path}")
    return RouteSchema.from_hf_config(json.loads(path.read_text()))

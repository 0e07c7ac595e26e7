"""The gateway's way to the model server: asks for the missing rows only, and cuts the routes out of each answer before it is parsed.

agl-server forwards through an httpx client; this is that client's transport. Bytes of routes never reach agl-server's JSON parser, its
events or the agent. What an answer holds beyond routes is passed on untouched.
"""

from __future__ import annotations

import contextvars
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import msgspec
import numpy as np
import structlog

from ... import codec, plugins
from ...capture import CaptureSource
from ...errors import R3Error, RoutesError
from ...routes import RoutedExperts
from ...schema import RouteSchema
from .store import Continuation, HeldTurn, RouteStore, running_digests

log = structlog.get_logger()

START_FIELD = "routed_experts_prompt_start"
_KEY = b'"routed_experts":'
_NUMBERS = re.compile(rb"[\[\]\d.,\s+-]*")


@dataclass(frozen=True)
class Request:
    """Whose request is being forwarded; set by the middleware, seen by the transport because tasks inherit context variables."""

    rollout: str
    attempt: str
    train: bool


current_request: contextvars.ContextVar[Request | None] = contextvars.ContextVar("verl_r3_request", default=None)


@dataclass
class Status:
    """What `GET /r3/status` tells."""

    training_answers: int = 0
    with_routes: int = 0
    without_routes: int = 0
    refetched_rows: int = 0
    refused_starts: int = 0
    last_reason: str | None = None


class _Question(msgspec.Struct):
    messages: list[msgspec.Raw] = []
    prompt: msgspec.Raw = msgspec.Raw(b"")


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None


class RouteTransport(httpx.AsyncBaseTransport):
    """version: model version that an upstream URL serves now. schema: of the trained model, None until somebody told."""

    def __init__(
        self, inner: httpx.AsyncBaseTransport, store: RouteStore, version: Callable[[httpx.URL], int], encoding: str = "set"
    ) -> None:
        self.inner = inner
        self.store = store
        self.version = version
        self.encoding = encoding
        self.schema: RouteSchema | None = None
        self.source: CaptureSource = plugins.capture_source("vllm")
        self.status = Status()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        whose = current_request.get()
        if whose is None:
            return await self.inner.handle_async_request(request)
        if not whose.train:
            response, data = await self._send(request)
            return _answer(response, cut_routes(data)[0])
        question = await request.aread()
        digests = _digests(question)
        version = self.version(request.url)
        start = self.store.expected_start(whose.rollout, whose.attempt, digests, version)
        response, data = await self._send(_with_start(request, question, start))
        if response.status_code == 400 and start and START_FIELD.encode() in data:
            # The context was cut, so that the guess lies beyond it.
            self.status.refused_starts += 1
            start = 0
            response, data = await self._send(request)
        data, payloads = cut_routes(data)
        if response.status_code == 200:
            try:
                await self._keep(whose, request, question, digests, version, start, data, payloads)
            except R3Error as error:
                self._note(str(error))
        return _answer(response, data)

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def _send(self, request: httpx.Request) -> tuple[httpx.Response, bytes]:
        response = await self.inner.handle_async_request(request)
        try:
            return response, await response.aread()
        finally:
            await response.aclose()

    async def _keep(
        self,
        whose: Request,
        request: httpx.Request,
        question: bytes,
        digests: list[int],
        version: int,
        start: int,
        data: bytes,
        payloads: list[bytes],
    ) -> None:
        """Every choice of one answer becomes a turn."""
        self.status.training_answers += 1
        try:
            answer = msgspec.json.decode(data, type=_Answer)
        except msgspec.DecodeError as error:
            raise RoutesError(f"expected a completion with token ids, found another answer ({error})") from error
        if payloads and len(payloads) != len(answer.choices):
            raise RoutesError(f"expected routes for each of {len(answer.choices)} choices, found {len(payloads)}")
        for index, choice in enumerate(answer.choices):
            prompt_ids = answer.prompt_token_ids or choice.prompt_token_ids
            if not prompt_ids or choice.token_ids is None:
                raise RoutesError("expected prompt_token_ids and token_ids in the answer, found none (vLLM: return_token_ids)")
            prompt = np.asarray(prompt_ids, np.int64)
            tokens = np.concatenate([prompt, np.asarray(choice.token_ids, np.int64)])
            before = self.store.continuation(whose.rollout, whose.attempt, prompt)
            routes, reason = self._routes(payloads[index] if payloads else b"", start, len(tokens))
            if routes is not None and start > before.known and before.version in (version, None):
                start, routes = await self._refetch(request, question, version, before.known, start, prompt, routes)
            whole = self.store.attempt(whose.rollout, whose.attempt)
            whole.appends_only |= before.whole
            self._add(whose, digests, version, start, prompt, tokens, before, routes, reason)

    def _routes(self, payload: bytes, start: int, tokens: int) -> tuple[RoutedExperts | None, str | None]:
        """Rows from `start` on as the answer holds them, or the reason why there are none."""
        if self.schema is None:
            return None, "no route schema: the trainer tells it at its start (PUT /r3/schema), or set r3.model"
        if not payload:
            return None, "the model server returned no routed_experts; start vLLM with --enable-return-routed-experts"
        try:
            routes = self.source.routes(self.schema, payload)
            if len(routes) == tokens - 1 and start:
                routes = routes[start:]  # a server that doesn't know the field returns every row
            elif len(routes) != tokens - 1 - start:
                raise RoutesError(f"expected {tokens - 1 - start} rows (tokens {start} to {tokens - 1}), found {len(routes)}")
        except RoutesError as error:
            return None, str(error)
        if len(routes) and not routes.present.any():
            return None, "zeros throughout a MoE layer: the model server's kernels captured nothing"
        return routes, None

    async def _refetch(
        self, request: httpx.Request, question: bytes, version: int, known: int, start: int, prompt: np.ndarray, routes: RoutedExperts
    ) -> tuple[int, RoutedExperts]:
        """Rows [known, start) that no turn holds, asked for once more with one token to sample; only while the model is the same."""
        missing = RoutedExperts.absent(routes.schema, start - known)
        again = json.loads(question) | {"max_tokens": 1, START_FIELD: known, "n": 1}
        again.pop("max_completion_tokens", None)
        response, data = await self._send(_copy(request, json.dumps(again).encode()))
        data, payloads = cut_routes(data)
        if response.status_code == 200 and payloads and self.version(request.url) == version:
            answer = msgspec.json.decode(data, type=_Answer)
            same = answer.prompt_token_ids or (answer.choices and answer.choices[0].prompt_token_ids)
            found, _ = self._routes(payloads[0], known, len(prompt) + 1)
            if found is not None and same and np.array_equal(same, prompt):
                missing = found[: start - known]
                self.status.refetched_rows += len(missing)
        return known, RoutedExperts.join([missing, routes])

    def _add(
        self,
        whose: Request,
        digests: list[int],
        version: int,
        start: int,
        prompt: np.ndarray,
        tokens: np.ndarray,
        before: Continuation,
        routes: RoutedExperts | None,
        reason: str | None,
    ) -> None:
        """Keep one answer as a turn that continues `before`."""
        hashed = codec.token_hash(tokens)
        if routes is None:
            envelope, start, known = b"", min(start, before.extent), before.known
            self._note(reason)
        else:
            envelope = codec.encode(routes, start=start, token_count=len(tokens), token_hash=hashed, encoding=self.encoding)
            unbroken = len(routes) if routes.present.all() else int(routes.present.argmin())
            known = max(before.known, start + unbroken) if start <= before.known else before.known
            self.status.with_routes += 1
        self.store.add(
            whose.rollout,
            whose.attempt,
            HeldTurn(
                before.parent, before.extent, start, len(prompt), codec.token_hash(prompt), len(tokens), hashed, known, version,
                digests[-1] if digests else 0, envelope, reason,
            ),
        )  # fmt: skip

    def _note(self, reason: str | None) -> None:
        if self.status.with_routes == 0 and self.status.without_routes == 0:
            log.error("R3: the first training answer has no usable routes", reason=reason)
        self.status.without_routes += 1
        self.status.last_reason = reason


def cut_routes(data: bytes) -> tuple[bytes, list[bytes]]:
    """(the answer with null for each choice's routes, the routes' text in order of the choices).

    The key with its quotes cannot occur inside a JSON string, where quotes are escaped, and base64 needs no escapes; so the text is cut
    without parsing what may be tens of megabytes. A choice whose routes are null counts with b"".
    """
    at = data.find(_KEY)
    if at < 0:
        return data, []
    kept, payloads, done = [], [], 0
    while at >= 0:
        value = at + len(_KEY)
        while data[value : value + 1] in (b" ", b"\t", b"\n", b"\r"):
            value += 1
        if data[value : value + 1] == b'"':
            end = data.find(b'"', value + 1) + 1
            if not end:
                return data, []
            payloads.append(data[value + 1 : end - 1])
        else:
            # null, or numbers (vLLM 0.21 sends nested lists of them): nothing that can be used, and nothing to keep in an event.
            end = value + len(_NUMBERS.match(data, value)[0].rstrip(b", \t\n\r"))
            payloads.append(b"")
        kept += [data[done:value], b"null" if end > value else b""]
        done = end
        at = data.find(_KEY, done)
    kept.append(data[done:])
    return b"".join(kept), payloads


def _digests(question: bytes) -> list[int]:
    try:
        parsed = msgspec.json.decode(question, type=_Question)
    except msgspec.DecodeError:
        return []
    parts = [bytes(message) for message in parsed.messages] or ([bytes(parsed.prompt)] if parsed.prompt else [])
    return running_digests(parts)


def _with_start(request: httpx.Request, question: bytes, start: int) -> httpx.Request:
    """The request with the first wanted row added; agl-server wrote it as a JSON object, so it ends with a brace."""
    if not start:
        return request
    body = question.rstrip()
    return _copy(request, body[:-1] + f',"{START_FIELD}":{start}}}'.encode())


def _copy(request: httpx.Request, body: bytes) -> httpx.Request:
    headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"content-length"]
    return httpx.Request(request.method, request.url, headers=headers, content=body, extensions=request.extensions)


def _answer(response: httpx.Response, data: bytes) -> httpx.Response:
    dropped = {b"content-length", b"content-encoding", b"transfer-encoding"}
    headers = [(name, value) for name, value in response.headers.raw if name.lower() not in dropped]
    return httpx.Response(response.status_code, headers=headers, content=data, extensions={"http_version": b"HTTP/1.1"})

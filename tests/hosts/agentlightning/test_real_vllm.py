"""The stand-in model server is as strict as the real vLLM, and the gateway works the same in front of it."""

import base64
import io
from dataclasses import asdict

import httpx
import numpy as np
import pytest

store = pytest.importorskip("agentlightning.server.store")
pytestmark = [pytest.mark.agl, pytest.mark.vllm, pytest.mark.slow]

from support.model_server import ModelServer

from verl_r3_plugin import codec
from verl_r3_plugin.hosts.agentlightning.gateway import create_gateway
from verl_r3_plugin.hosts.agentlightning.manager import TurnRoutes
from verl_r3_plugin.hosts.agentlightning.wire import CHECKSUM_HEADER, unpack
from verl_r3_plugin.routes import RoutedExperts
from verl_r3_plugin.schema import RouteSchema

SCHEMA = RouteSchema(32, 4, 6, (1, 2, 3, 4, 5))
MESSAGES = [{"role": "user", "content": "find a number"}]


def routes_of(choice):
    return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))


@pytest.fixture(params=["the stand-in", "the real vLLM"])
async def server(request):
    """A client of a model server's API."""
    if request.param == "the stand-in":
        app = ModelServer(SCHEMA, answer_tokens=4).app
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://model") as client:
            yield client, "m"
    else:
        port, name, _ = request.getfixturevalue("vllm_server")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client, name


async def ask(server, expect=200, **more):
    client, name = server
    body = {"model": name, "messages": MESSAGES, "max_tokens": 4, "ignore_eos": True, "logprobs": True, "return_token_ids": True, **more}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == expect, answer.text
    return answer.json()


async def test_rows_are_all_tokens_but_the_last_of_all_layers_in_a_narrow_dtype(server):
    answer = await ask(server)
    (choice,) = answer["choices"]
    tokens = len(answer["prompt_token_ids"]) + len(choice["token_ids"])
    routes = routes_of(choice)
    assert routes.shape == (tokens - 1, 6, 4)
    assert routes.dtype == np.uint8
    assert not routes[:, 0].any()
    assert RoutedExperts.from_capture(SCHEMA, routes).present.all()
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == 4


async def test_rows_begin_at_the_start_that_was_asked_for_and_no_further_than_the_prompt(server):
    whole = await ask(server)
    prompt = len(whole["prompt_token_ids"])
    part = await ask(server, routed_experts_prompt_start=prompt)
    assert len(routes_of(part["choices"][0])) == 3
    await ask(server, expect=400, routed_experts_prompt_start=prompt + 1)


async def test_each_choice_has_its_own_routes(server):
    answer = await ask(server, n=2)
    prompt = len(answer["prompt_token_ids"])
    one, two = (routes_of(choice) for choice in answer["choices"])
    assert one.shape == two.shape == (prompt + 3, 6, 4)
    assert (np.sort(one[: prompt - 1]) == np.sort(two[: prompt - 1])).all()


async def test_a_conversation_through_the_gateway_equals_one_full_capture(vllm_server):
    port, name, _ = vllm_server
    for held in (store._rollouts, store._events, store._models, store._terminal_order):
        held.clear()
    proxy = {"model_name": name, "train": {"temperature": 1}, "val": {"temperature": 0}}
    app = create_gateway({"key": "", "default_proxy": proxy})
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway", timeout=60) as client,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as direct,
    ):
        await client.put("/r3/schema", json=asdict(SCHEMA))
        await client.post("/api/models", json=[{"model": name, "endpoint": f"http://127.0.0.1:{port}/v1", "version": 1}])
        await client.post("/api/rollouts", json=[{"input": {}, "rollout_id": "r1"}])
        conversations = [[{"role": "user", "content": text}] for text in ("even please", "odd please")]
        last = {}
        for turn in range(3):
            for number, messages in enumerate(conversations):
                url = "/proxy/rollout/r1/attempt/0/mode/train/openai/v1/chat/completions"
                answer = await client.post(url, json={"messages": messages, "max_tokens": 8, "n": 1 + (turn == 1)})
                assert answer.status_code == 200, answer.text
                last[number] = answer.json()
                messages += [last[number]["choices"][-1]["message"], {"role": "tool", "content": f"no {turn} try again"}]
        fetched = await client.get("/r3/rollouts/r1/attempts/0")
        turns = unpack(fetched.content, fetched.headers[CHECKSUM_HEADER])
        by_tokens = {turn.token_hash: index for index, turn in enumerate(turns)}
        for answer in last.values():
            tokens = answer["prompt_token_ids"] + answer["choices"][-1]["token_ids"]
            ours = TurnRoutes(turns, by_tokens[codec.token_hash(tokens)]).whole(SCHEMA)
            body = {"model": name, "prompt": tokens, "max_tokens": 1}
            full = (await direct.post("/v1/completions", json=body)).json()["choices"][0]
            expected = RoutedExperts.from_capture(SCHEMA, routes_of(full)[: len(tokens) - 1])
            assert ours.equal_rows(expected).all()
        starts = [turn.start for turn in turns]
        assert len(turns) == 8
        assert all(start > 0 for start in starts[2:])

"""The gateway on the real agl-server app, against a model server that is as strict as vLLM: whatever a conversation does, each token's
row is the one under which it was computed first, and what does not fit is absent."""

import asyncio
import json
from dataclasses import asdict

import httpx
import numpy as np
import pytest

store = pytest.importorskip("agentlightning.server.store")
pytestmark = pytest.mark.agl

from support.model_server import ModelServer, npy

from verl_r3_plugin import codec
from verl_r3_plugin.hosts.agentlightning.gateway import create_gateway
from verl_r3_plugin.hosts.agentlightning.manager import TurnRoutes
from verl_r3_plugin.hosts.agentlightning.wire import CHECKSUM_HEADER, unpack
from verl_r3_plugin.routes import RoutedExperts
from verl_r3_plugin.schema import RouteSchema

SCHEMA = RouteSchema(512, 6, 5, (1, 2, 4))
KEY = {"authorization": "Bearer secret"}


class Run:
    """A gateway in this process, its model server behind it, and a client."""

    def __init__(self, client, server, app):
        self.client, self.server, self.transport = client, server, app.state.r3

    async def rollout(self, name="r1"):
        answer = await self.client.post("/api/rollouts", json=[{"input": {}, "rollout_id": name, "config": {"timeout_seconds": 9}}])
        assert answer.status_code < 300, answer.text
        return name

    async def say(self, messages, rollout="r1", attempt="0", mode="train", expect=200, **more):
        url = f"/proxy/rollout/{rollout}/attempt/{attempt}/mode/{mode}/openai/v1/chat/completions"
        answer = await self.client.post(url, json={"messages": messages, **more})
        assert answer.status_code == expect, answer.text
        assert "routed_experts" not in answer.text.replace('"routed_experts":null', "")
        return answer.json() if expect < 500 else None

    async def serve(self, weights):
        self.server.weights = weights
        models = [{"model": "m", "endpoint": "http://model/v1", "version": weights}]
        assert (await self.client.post("/api/models", json=models)).status_code == 201

    async def turns(self, rollout="r1", attempt="0"):
        answer = await self.client.get(f"/r3/rollouts/{rollout}/attempts/{attempt}")
        assert answer.status_code == 200
        return unpack(answer.content, answer.headers[CHECKSUM_HEADER])

    async def rows(self, answer, rollout="r1", attempt="0", choice=0):
        """Routes of one answer's tokens as the trainer would have them."""
        turns = await self.turns(rollout, attempt)
        tokens = tokens_of(answer, choice)
        index = {(t.tokens, t.token_hash): i for i, t in enumerate(turns)}[len(tokens), codec.token_hash(tokens)]
        return TurnRoutes(turns, index).whole(SCHEMA)

    def expected(self, tokens, weights=None):
        return RoutedExperts.from_capture(SCHEMA, self.server.routes(tokens, weights))

    async def status(self):
        return (await self.client.get("/r3/status")).json()


def tokens_of(answer, choice=0):
    return answer["prompt_token_ids"] + answer["choices"][choice]["token_ids"]


def reply(answer, choice=0):
    return answer["choices"][choice]["message"]


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture
async def run(tmp_path):
    for held in (store._rollouts, store._events, store._models, store._terminal_order):  # agl-server keeps its state in the module
        held.clear()
    server = ModelServer(SCHEMA)
    proxy = {"model_name": "m", "train": {"temperature": 1}, "val": {"temperature": 0}}
    app = create_gateway({"key": "secret", "default_proxy": proxy, "r3": {"spill_folder": str(tmp_path)}})
    app.state.r3.inner = httpx.ASGITransport(server.app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://gateway", headers=KEY) as client,
    ):
        run = Run(client, server, app)
        await run.serve(1)
        assert (await client.put("/r3/schema", json=asdict(SCHEMA))).status_code == 200
        await run.rollout()
        yield run


async def converse(run, turns, messages=None, **where):
    messages, answers = list(messages or [user("begin")]), []
    for turn in range(turns):
        answers.append(await run.say(messages, **where))
        messages += [reply(answers[-1]), user(f"go on {turn}")]
    return answers, messages


async def test_one_conversation_has_every_row_and_each_turn_sends_only_its_own(run):
    answers, _ = await converse(run, 5)
    tokens = tokens_of(answers[-1])
    assert (await run.rows(answers[-1])).equal_rows(run.expected(tokens)).all()
    starts = [body.get("routed_experts_prompt_start", 0) for body in run.server.requests]
    lengths = [len(tokens_of(answer)) for answer in answers]
    # The second turn stays within the first prompt, for it is not yet known that this conversation only appends.
    assert starts == [0, len(answers[0]["prompt_token_ids"]) - 1, *(n - 1 for n in lengths[1:-1])]
    turns = await run.turns()
    assert [codec.read_header(turn.routes).rows for turn in turns] == [n - 1 - s for n, s in zip(lengths, starts, strict=True)]


async def test_rows_stay_as_they_were_sampled_when_weights_change_between_turns(run):
    first, messages = await converse(run, 2)
    await run.serve(2)
    second = await run.say(messages)
    rows, tokens, known = await run.rows(second), tokens_of(second), len(tokens_of(first[-1]))
    assert rows.present.all()
    assert rows[: known - 1].equal_rows(run.expected(tokens, weights=1)[: known - 1]).all()
    assert rows[known - 1 :].equal_rows(run.expected(tokens, weights=2)[known - 1 :]).all()


async def test_two_interleaved_conversations_each_have_their_own_rows(run):
    one, two = [user("planner")], [user("coder")]
    for turn in range(4):
        for messages in (one, two):
            answer = await run.say(messages)
            assert (await run.rows(answer)).equal_rows(run.expected(tokens_of(answer))).all()
            messages += [reply(answer), user(f"more {turn}")]
    sent = [body.get("routed_experts_prompt_start", 0) for body in run.server.requests]
    assert sum(start > 0 for start in sent) == 6


async def test_concurrent_sub_agents_do_not_mix(run):
    results = await asyncio.gather(*(converse(run, 4, [user(f"agent {n}")]) for n in range(6)))
    for answers, _ in results:
        for answer in answers:
            assert (await run.rows(answer)).equal_rows(run.expected(tokens_of(answer))).all()


async def test_each_of_several_choices_keeps_its_own_rows_and_can_be_continued(run):
    answer = await run.say([user("pick")], n=3)
    for choice in range(3):
        assert (await run.rows(answer, choice=choice)).equal_rows(run.expected(tokens_of(answer, choice))).all()
    for choice in (2, 0):
        more = await run.say([user("pick"), reply(answer, choice), user("on")])
        assert (await run.rows(more)).equal_rows(run.expected(tokens_of(more))).all()


async def test_a_retry_of_the_same_messages_is_complete(run):
    _, messages = await converse(run, 2)
    again = await run.say(messages[:-2])
    assert (await run.rows(again)).equal_rows(run.expected(tokens_of(again))).all()
    after = await run.say(messages)
    assert (await run.rows(after)).equal_rows(run.expected(tokens_of(after))).all()


async def test_a_context_that_is_cut_and_goes_on_is_complete(run):
    _, messages = await converse(run, 4)
    cut = await run.say([messages[0], *messages[-3:]])
    assert (await run.rows(cut)).equal_rows(run.expected(tokens_of(cut))).all()


async def test_a_start_beyond_a_shorter_context_is_asked_again_from_the_beginning(run, monkeypatch):
    _, messages = await converse(run, 3)
    monkeypatch.setattr(run.transport.store, "expected_start", lambda *_: 10_000)
    answer = await run.say(messages)
    assert (await run.rows(answer)).equal_rows(run.expected(tokens_of(answer))).all()
    assert (await run.status())["refused_starts"] == 1


async def test_rows_that_a_wrong_guess_left_out_are_fetched_again(run, monkeypatch):
    monkeypatch.setattr(run.transport.store, "expected_start", lambda *_: 2)
    answer = await run.say([user("one two three four")])
    assert (await run.rows(answer)).equal_rows(run.expected(tokens_of(answer))).all()
    assert (await run.status())["refetched_rows"] == 2
    assert run.server.requests[-1]["max_tokens"] == 1


async def test_rows_of_an_older_model_are_not_fetched_again_but_stay_absent(run):
    run.server.script = [lambda answer: strip(answer)]
    answer = await run.say([user("begin")])
    messages = [user("begin"), reply(answer), user("next")]
    await run.serve(2)
    later = await run.say(messages)
    rows, known = await run.rows(later), len(tokens_of(answer))
    assert not rows.present[: len(answer["prompt_token_ids"]) - 1].any()
    assert rows.present[known - 1 :].all()
    assert rows[known - 1 :].equal_rows(run.expected(tokens_of(later))[known - 1 :]).all()


async def test_rows_of_the_same_model_that_a_turn_lost_come_with_the_next(run):
    run.server.script = [lambda answer: strip(answer)]
    answer = await run.say([user("begin")])
    later = await run.say([user("begin"), reply(answer), user("next")])
    assert (await run.rows(later)).equal_rows(run.expected(tokens_of(later))).all()


async def test_errors_between_turns_lose_nothing(run):
    _, messages = await converse(run, 2)
    run.server.script = [400]
    await run.say(messages, expect=400)
    answer = await run.say(messages)
    assert (await run.rows(answer)).equal_rows(run.expected(tokens_of(answer))).all()


async def test_an_answer_without_tokens_costs_nothing_but_itself(run):
    _, messages = await converse(run, 2)

    def empty(answer):
        for choice in answer["choices"]:
            choice |= {"token_ids": [], "routed_experts": None}
        return answer

    run.server.script = [empty]
    await run.say(messages)
    answer = await run.say(messages)
    assert (await run.rows(answer)).equal_rows(run.expected(tokens_of(answer))).all()


async def test_a_server_that_ignores_the_start_is_cut_here(run):
    run.server.knows_start = False
    answers, _ = await converse(run, 3)
    assert (await run.rows(answers[-1])).equal_rows(run.expected(tokens_of(answers[-1]))).all()
    assert codec.read_header((await run.turns())[-1].routes).rows < 20


def strip(answer):
    for choice in answer["choices"]:
        del choice["routed_experts"]
    return answer


def with_routes(payload):
    def change(answer):
        for choice in answer["choices"]:
            choice["routed_experts"] = payload
        return answer

    return change


BAD = {
    "none": strip,
    "null": with_routes(None),
    "not base64": with_routes("***"),
    "not npy": with_routes("AAAA"),
    "a number": with_routes(12),
    "nested lists": lambda a: with_routes([[[1, 2], [3, 4]], [[5, 6], [7, 8]]])(a),
    "zeros": lambda a: with_routes(npy(np.zeros((len(tokens_of(a)) - 1, 5, 6), np.uint16)))(a),
    "a row too few": lambda a: with_routes(npy(np.ones((len(tokens_of(a)) - 2, 5, 6), np.uint16)))(a),
    "other layers": lambda a: with_routes(npy(np.ones((len(tokens_of(a)) - 1, 7, 6), np.uint16)))(a),
    "floats": lambda a: with_routes(npy(np.ones((len(tokens_of(a)) - 1, 5, 6))))(a),
    "no prompt ids": lambda a: {k: v for k, v in a.items() if k != "prompt_token_ids"},
}


@pytest.mark.parametrize("kind", BAD)
async def test_unusable_routes_cost_one_answer_its_routes_and_nothing_else(run, kind):
    run.server.script = [BAD[kind]]
    answer = await run.say([user("begin")])
    assert reply(answer)["content"]
    held = await run.turns()
    assert all(not turn.routes for turn in held)
    status = await run.status()
    assert status["state"] == "no routes"
    assert status["last_reason"]
    other = await run.say([user("other")])
    assert (await run.rows(other)).equal_rows(run.expected(tokens_of(other))).all()


async def test_an_answer_that_is_not_json_does_not_take_the_gateway_down(run):
    run.server.script = [b'{"choices": [{"routed_experts": "AAAA']
    await run.say([user("begin")], expect=500)  # agl-server itself cannot parse it
    answer = await run.say([user("begin")])
    assert (await run.rows(answer)).equal_rows(run.expected(tokens_of(answer))).all()


async def test_validation_requests_keep_nothing(run):
    await run.say([user("begin")], mode="val")
    assert await run.turns() == []
    assert "routed_experts_prompt_start" not in run.server.requests[-1]


async def test_events_hold_no_route_and_a_posted_one_is_not_believed(run):
    await converse(run, 2)
    forged = {"event_type": "model_request", "data": {"routed_experts": "AAAA", "response": {"choices": []}}}
    assert (await run.client.post("/api/rollouts/r1/attempt/0/events", json=forged)).status_code == 200
    turns = await run.turns()
    assert len(turns) == 2
    events = (await run.client.get("/api/rollouts/r1/events")).json()
    assert all(event["data"].get("routed_experts") in (None, "AAAA") for event in events)
    assert all(len(json.dumps(event)) < 4000 for event in events)


async def test_attempts_are_kept_apart(run):
    one = await run.say([user("begin")], attempt="0")
    two = await run.say([user("begin")], attempt="1")
    assert len(await run.turns(attempt="0")) == len(await run.turns(attempt="1")) == 1
    assert (await run.rows(two, attempt="1")).equal_rows(run.expected(tokens_of(two))).all()
    assert tokens_of(one) == tokens_of(two)


async def test_a_deleted_rollout_is_freed(run):
    await converse(run, 3)
    assert (await run.status())["memory_bytes"] > 0
    assert (await run.client.delete("/api/rollouts/r1")).status_code == 204
    status = await run.status()
    assert (status["memory_bytes"], status["rollouts"]) == (0, 0)
    assert await run.turns() == []


async def test_above_the_memory_limit_routes_go_to_disk_and_come_back(run, tmp_path):
    run.transport.store.memory_limit = 200
    answers, _ = await converse(run, 6)
    status = await run.status()
    assert status["spilled_bytes"] > 200 >= status["memory_bytes"]
    assert (await run.rows(answers[-1])).equal_rows(run.expected(tokens_of(answers[-1]))).all()
    await run.client.delete("/api/rollouts/r1")
    assert (await run.status())["spilled_bytes"] == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(("method", "path"), [("GET", "/r3/status"), ("GET", "/r3/rollouts/r1/attempts/0"), ("PUT", "/r3/schema")])
async def test_routes_need_the_key(run, method, path):
    answer = await run.client.request(method, path, headers={"authorization": "Bearer wrong"})
    assert answer.status_code == 401


async def test_without_a_schema_the_status_says_what_to_do(run):
    run.transport.schema = None
    await run.say([user("begin")])
    status = await run.status()
    assert status["state"] == "no routes"
    assert "r3.model" in status["last_reason"]


async def test_a_schema_that_is_none_is_refused(run):
    answer = await run.client.put("/r3/schema", json={"num_experts": 4})
    assert answer.status_code == 422
    assert "route schema" in answer.text

"""The question at the trainer's start: is the plugin active in every process that needs it?

VERL hides a plugin's load error, and a node where the package is missing would train without replay and say nothing. So the trainer asks
each Ray actor, before the first update, and refuses with the names of those where it is not. The question must not change the answer:
it is sent by value, because unpickling a function of this package would import the package there and arm it.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

from ...errors import HostError
from .activation import report


def _ask(actor: Any) -> Any:
    import sys

    module = sys.modules.get("verl_r3_plugin.hosts.verl.activation")
    return module.report(actor) if module is not None else None


def question() -> types.FunctionType:
    """`_ask` as a function that cloudpickle sends by value: it belongs to no module that could be imported."""
    asked = types.FunctionType(_ask.__code__, {"__builtins__": __builtins__}, "verl_r3_question")
    asked.__module__ = "__main__"
    asked.__qualname__ = "verl_r3_question"
    return asked


def ask(handles: Iterable[Any], timeout: float = 120.0) -> list[Any]:
    """The `report()` of each Ray actor, None where the plugin is not imported, or the exception where it cannot be asked."""
    import ray

    handles = list(handles)
    function = question()
    answers: list[Any] = []
    pending = []
    for handle in handles:
        call = getattr(handle, "__ray_call__", None)
        pending.append(call.remote(function) if call is not None else None)
    ready = [reference for reference in pending if reference is not None]
    if ready:
        ray.wait(ready, num_returns=len(ready), timeout=timeout)
    for reference in pending:
        try:
            answers.append(ray.get(reference, timeout=1.0) if reference is not None else None)
        except Exception as error:
            answers.append(error)
    return answers


def check(trainer: Any, agent_loops: Any = None) -> dict[str, int]:
    """Ask every process of `trainer`; raise HostError naming those where R3 is not on. Returns how many of each kind are active.

    agent_loops: the agent-loop manager, where the trainer does not hold it yet (V1 hands it to `fit`).
    """
    problems, counts = [], {"trainer": 1}
    mine = report()
    if mine["status"] != "on":
        problems.append(f"trainer (pid {mine['pid']}): {_why(mine, 'on')}")
    for kind, handles, wanted in processes(trainer, agent_loops):
        for index, answer in enumerate(ask(handles)):
            why = _why(answer, wanted)
            if why:
                problems.append(f"{kind} {index}: {why}")
        counts[kind] = len(handles)
    if problems:
        raise HostError(
            "R3 is asked for (router_replay.mode=R3) but verl-r3-plugin is not active everywhere:\n- "
            + "\n- ".join(problems)
            + "\nInstall verl-r3-plugin on every node. With verl 0.9 check that VERL_USE_EXTERNAL_PLUGINS is auto or names 'r3'; with verl "
            "0.8 set actor_rollout_ref.model.external_lib=verl_r3_plugin"
        )
    return counts


def processes(trainer: Any, agent_loops: Any = None) -> list[tuple[str, list[Any], str]]:
    """(kind, Ray actors, what must be true of them) of a v0 or V1 trainer, as far as they exist by now."""
    actors = list(getattr(getattr(trainer, "actor_rollout_wg", None), "workers", None) or [])
    held = (getattr(trainer, name, None) for name in ("async_rollout_manager", "agent_loop_manager"))
    manager = agent_loops or next((manager for manager in held if manager is not None), None)
    loops = list(getattr(manager, "agent_loop_workers", None) or [])
    servers = list(getattr(getattr(trainer, "llm_server_manager", None), "server_handles", None) or [])
    return [("actor worker", actors, "engine"), ("agent-loop worker", loops, "on"), ("rollout server", servers, "loaded")]


def _why(answer: Any, wanted: str) -> str | None:
    """What is wrong with `answer`, or None. wanted: "loaded" (imported at all) < "on" < "engine" (and a replaying engine built)."""
    if isinstance(answer, Exception):
        return f"cannot be asked ({type(answer).__name__}: {answer})"
    if answer is None:
        return "the plugin is not loaded"
    seams = f"; {'; '.join(answer['problems'])}" if answer["problems"] else ""
    if wanted != "loaded" and answer["status"] != "on":
        return f"the plugin is loaded but {answer['status']}, its configuration did not ask for R3 or never came by{seams}"
    if wanted == "engine" and not answer["engines"]:
        return f"the plugin is on, but the engine there is not its own (parts: {', '.join(answer['parts']) or 'none'}){seams}"
    return None

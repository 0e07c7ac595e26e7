"""Switches the plugin on in a process of VERL, before that process builds its engine, and only if its configuration asks for R3.

The order of things. VERL loads the entry point `verl.plugins` (0.9), or the module that `actor_rollout_ref.model.external_lib` names
(0.8), while VERL itself is half imported, and tells it nothing about the configuration. So `arm()` imports nothing of VERL. It waits
for the few modules whose classes are the first to see a configuration, and puts a gate on their constructors. The first configuration
that comes through a gate decides for the process. R3 off: every gate is taken away again, and each function of the host is the object
it was. R3 on: `switch_on` installs the pieces, each from its own file.

This file imports the standard library only: `import verl_r3_plugin` runs it in every process, also where VERL is not installed.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .late import forget, when_imported


@dataclass
class ProcessState:
    """What this process has decided and installed; the answer to the handshake (see `handshake.py`)."""

    status: str = "unarmed"  # unarmed -> armed -> off | on
    settings: Any = None  # R3Config once on
    parts: list[str] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # seams of this verl that are not where they were expected


state = ProcessState()


@dataclass(frozen=True)
class Gate:
    """A method of a host class that is called with, or on an object that holds, the configuration.

    argument: name of the parameter with the configuration, or None where it is `self.config`.
    find: from that configuration (and the caller's frame) to `actor_rollout_ref`, or None where it cannot be told.
    """

    module: str
    owner: str
    method: str
    argument: str | None
    find: Callable[[Any, Any], Any]


def _actor_rollout_ref(config: Any, _frame: Any) -> Any:
    return config.get("actor_rollout_ref") if hasattr(config, "get") else getattr(config, "actor_rollout_ref", None)


def _itself(config: Any, _frame: Any) -> Any:
    return config


def _of_the_caller(_config: Any, frame: Any) -> Any:
    """verl 0.8 imports `external_lib` inside `init_model`, when the worker's constructor is over. The next call that can be seen is the
    construction of its TrainingWorker; that one is given no rollout settings, so they are read from the worker that makes it."""
    caller = frame.f_locals.get("self") if frame is not None else None
    config = getattr(caller, "config", None)
    return config if config is not None and "rollout" in config and "actor" in config else None


_TRAINERS = (
    ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer"),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer"),
    ("verl.trainer.main_ppo_sync", "PPOTrainer"),
)
GATES: tuple[Gate, ...] = (
    Gate("verl.workers.engine_workers", "ActorRolloutRefWorker", "__init__", "config", _itself),
    Gate("verl.workers.engine_workers", "TrainingWorker", "__init__", None, _of_the_caller),
    Gate("verl.experimental.agent_loop.agent_loop", "AgentLoopWorker", "__init__", "config", _actor_rollout_ref),
    Gate("verl.experimental.agent_loop.agent_loop", "AgentLoopWorker", "_run_agent_loop", None, _actor_rollout_ref),
    *(Gate(module, owner, "__init__", "config", _actor_rollout_ref) for module, owner in _TRAINERS),
    *(
        Gate(module, owner, method, None, _actor_rollout_ref)
        for module, owner in _TRAINERS
        for method in ("fit", "_compute_old_log_prob", "_update_actor")
    ),
)


def arm() -> None:
    """Put the gates on, now or as soon as the host imports the module they belong to. Safe to call again."""
    if state.status == "unarmed":
        state.status = "armed"
        _wait_for_the_host()


def _wait_for_the_host() -> None:
    for module in {gate.module for gate in GATES}:
        when_imported(module, _set_gates)


def _set_gates(module: Any) -> None:
    if state.status != "armed":
        return
    for gate in GATES:
        owner = getattr(module, gate.owner, None)
        if gate.module == module.__name__ and inspect.isclass(owner) and gate.method in vars(owner):
            _set_gate(owner, gate)


_placed: list[tuple[type, str, Any]] = []  # (class, method name, the host's function)


def _set_gate(owner: type, gate: Gate) -> None:
    original = vars(owner)[gate.method]
    parameters = inspect.signature(original).parameters
    if gate.argument is not None and gate.argument not in parameters:
        # Not raised: this runs while the host imports itself, and the run may not want R3 at all. The handshake and the doctor tell.
        state.problems.append(f"expected {gate.module}.{gate.owner}.{gate.method} to take {gate.argument!r}, found {list(parameters)}")
        return

    @functools.wraps(original)
    def gated(self: Any, *args: Any, **kwargs: Any) -> Any:
        if state.status == "armed":
            if gate.argument is None:
                config = getattr(self, "config", None)
            else:
                config = inspect.signature(original).bind(self, *args, **kwargs).arguments[gate.argument]
            section = gate.find(config, sys._getframe(1))
            if section is not None:
                decide(section)
        # What is installed by now may have replaced this very method, on the class or on one that it inherits from.
        installed = vars(owner).get(gate.method)
        return (original if installed is gated else installed or original)(self, *args, **kwargs)

    gated.verl_r3_gate = True  # type: ignore[attr-defined]
    _placed.append((owner, gate.method, original))
    setattr(owner, gate.method, gated)


def _remove_gates() -> None:
    while _placed:
        owner, method, original = _placed.pop()
        if getattr(vars(owner).get(method), "verl_r3_gate", False):
            setattr(owner, method, original)


def decide(actor_rollout_ref: Any) -> bool:
    """Read `actor_rollout_ref` and settle whether this process runs R3; installs everything when it does."""
    _remove_gates()
    if not wants_r3(actor_rollout_ref):
        state.status = "off"
        return False
    switch_on(settings_of(actor_rollout_ref))
    return True


def wants_r3(actor_rollout_ref: Any) -> bool:
    """Whether these keys ask for R3 on the Megatron actor: `actor.strategy=megatron`, `actor.megatron.router_replay.mode=R3`."""
    actor = _get(actor_rollout_ref, "actor")
    mode = _get(_get(_get(actor, "megatron"), "router_replay"), "mode")
    return _get(actor, "strategy") == "megatron" and mode == "R3"


def settings_of(actor_rollout_ref: Any) -> Any:
    """The R3Config in `actor_rollout_ref.rollout.custom.r3`; raises ConfigError for a key that does not exist."""
    from ...config import R3Config

    custom = _get(_get(actor_rollout_ref, "rollout"), "custom")
    return R3Config.from_mapping(_plain(_get(custom, "r3") or {}))


def switch_on(settings: Any) -> None:
    """Install every piece in this process. Called by a gate; by hand only where a program builds a VERL worker itself."""
    if state.status == "on":
        return
    _remove_gates()
    state.status, state.settings = "on", settings
    try:
        from . import pieces

        pieces.install(state)
    except BaseException:
        switch_off()
        raise
    print(f"verl-r3-plugin: R3 is on in process {os.getpid()}: {', '.join(state.parts) or 'nothing to install'}", flush=True)


def switch_off() -> None:
    """Take every piece out again and forget the decision; the next configuration decides anew (for tests and notebooks)."""
    from . import pieces

    pieces.uninstall()
    _remove_gates()
    state.parts.clear()
    state.engines.clear()
    state.status, state.settings = "armed", None
    forget(_set_gates)
    _wait_for_the_host()


def report(actor: Any = None) -> dict[str, Any]:
    """What the handshake asks a process: JSON-able, cheap.

    actor: the Ray actor that is asked. With verl 0.8 an agent-loop worker is armed in the middle of its constructor, when no gate is left
    for it before the first rollout; the question is then its occasion to decide.
    """
    if state.status == "armed":
        section = _get(getattr(actor, "config", None), "actor_rollout_ref")
        if section is not None:
            decide(section)
    return {
        "pid": os.getpid(),
        "status": state.status,
        "parts": list(state.parts),
        "engines": list(state.engines),
        "problems": list(state.problems),
    }


def _get(section: Any, key: str) -> Any:
    """`section[key]` of a dict, a DictConfig or a dataclass; None where it is missing."""
    if section is None:
        return None
    if isinstance(section, Mapping) or hasattr(section, "get"):
        return section.get(key)
    return getattr(section, key, None)


def _plain(section: Any) -> dict[str, Any]:
    """A DictConfig as a plain dict; OmegaConf is only asked where it made the object."""
    if type(section).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        return OmegaConf.to_container(section, resolve=True)  # type: ignore[return-value]
    return dict(section)

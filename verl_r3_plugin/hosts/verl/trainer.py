"""In the trainer's process: the handshake before the first update, the checks of the configuration, and `r3/*` among VERL's metrics.

Three methods of each trainer class are wrapped while R3 is on. `fit` and `_compute_old_log_prob` start the handshake (trainers that
bring a `fit` of their own still call the other), `_update_actor` also turns the workers' sums into shares. A Ray actor that is itself a
trainer inherits the wrapped methods, because the class travels by name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .step import SUM_PREFIX, finish

_TRAINERS = ("RayPPOTrainer", "PPOTrainer")
_METHODS = ("fit", "_compute_old_log_prob", "_update_actor")
_CHECKED = "_r3_handshake"
_before: list[tuple[type, str, Any]] = []  # (class, method, the host's function)


def install(host: ModuleType) -> None:
    """host: a module that defines one of VERL's trainer classes."""
    for name in _TRAINERS:
        owner = getattr(host, name, None)
        if inspect.isclass(owner) and owner.__module__ == host.__name__:
            for method in _METHODS:
                if method in vars(owner):
                    _before.append((owner, method, vars(owner)[method]))
                    setattr(owner, method, _wrapped(vars(owner)[method], method == "_update_actor"))


def uninstall() -> None:
    while _before:
        owner, method, original = _before.pop()
        setattr(owner, method, original)


def _wrapped(original: Callable[..., Any], updates: bool) -> Callable[..., Any]:
    parameters = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(self, *args, **kwargs).arguments
        ensure_active(self, given.get("agent_loop_manager"))
        result = original(self, *args, **kwargs)
        if updates:
            # V1 fills the dictionary it was given; v0 returns a DataProto whose lists are averaged later.
            if "metrics" in parameters:
                _share(given["metrics"], wrap=False)
            elif getattr(result, "meta_info", None):
                _share(result.meta_info.get("metrics", {}), wrap=True)
        return result

    return method


def ensure_active(trainer: Any, agent_loops: Any = None) -> None:
    """Run the handshake, once for each trainer; see `handshake.check`."""
    if getattr(trainer, _CHECKED, None) is None:
        from . import handshake

        counts = handshake.check(trainer, agent_loops)
        setattr(trainer, _CHECKED, counts)
        print(f"verl-r3-plugin: active in {', '.join(f'{number} {kind}' for kind, number in counts.items())}", flush=True)


def _share(metrics: dict[str, Any], *, wrap: bool) -> None:
    """Replace `actor/r3_sum/*` in `metrics` by `r3/*`. wrap: values are lists that the trainer still averages."""
    import numpy as np

    sums = {key.split(SUM_PREFIX, 1)[1]: float(np.mean(metrics.pop(key))) for key in list(metrics) if SUM_PREFIX in key}
    metrics.update({key: [value] if wrap else value for key, value in finish(sums).items()})

"""Makes VERL's registry answer with the replaying engine, in the way each version allows.

verl 0.9 looks a class up by (device, vendor) before it looks by device, so the engine is registered for this machine's vendor. verl 0.8
knows no vendor and keeps whatever was registered first, so the entry is replaced. Both are undone by `uninstall`.
"""

from __future__ import annotations

import inspect
import os
from types import ModuleType
from typing import Any

from ...errors import HostError
from .engine import engine_class

_MODEL_TYPE, _BACKEND = "language_model", "megatron"
_before: list[tuple[dict[Any, type], Any, type | None]] = []  # (registry, key, class that was there)


def install(host: ModuleType) -> None:
    """host: `verl.workers.engine.megatron.transformer_impl`, imported."""
    from verl.workers.engine.base import EngineRegistry

    engines = getattr(EngineRegistry, "_engines", {}).get(_MODEL_TYPE, {}).get(_BACKEND)
    device = _device()
    if not engines or device not in engines:
        raise HostError(
            f"expected verl's EngineRegistry to hold a {_BACKEND!r} engine for {_MODEL_TYPE!r} on {device!r}, found {engines}; "
            "routes cannot be replayed with the installed verl"
        )
    if "vendor" in inspect.signature(EngineRegistry.register).parameters:
        key: Any = (device, _vendor())
        current = engines.get(key, engines[device])
        _before.append((engines, key, engines.pop(key, None)))
        EngineRegistry.register(_MODEL_TYPE, _BACKEND, device=device, vendor=key[1])(engine_class(current))
    else:
        _before.append((engines, device, engines[device]))
        engines[device] = engine_class(engines[device])


def uninstall() -> None:
    while _before:
        engines, key, current = _before.pop()
        if current is None:
            engines.pop(key, None)
        else:
            engines[key] = current


def _device() -> str:
    """The device that the host's lookup will use; cuda on a machine without an accelerator, for which VERL registers nothing."""
    from verl.utils.device import get_device_name

    name = os.getenv("VERL_ENGINE_DEVICE") or get_device_name()
    return "cuda" if name == "cpu" and not _has_cpu_engine() else name


def _has_cpu_engine() -> bool:
    from verl.workers.engine.base import EngineRegistry

    return "cpu" in EngineRegistry._engines.get(_MODEL_TYPE, {}).get(_BACKEND, {})


def _vendor() -> str:
    """The vendor that the host's lookup will use; nvidia on a machine without an accelerator, which is the host's own last resort."""
    from verl.utils.device import get_vendor

    return os.getenv("VERL_ENGINE_VENDOR") or get_vendor() or "nvidia"

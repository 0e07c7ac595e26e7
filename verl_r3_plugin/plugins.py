"""The plugin manager: finds what other packages add, and answers by name."""

from __future__ import annotations

import difflib
from functools import lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import pluggy

from . import hookspecs
from .errors import ConfigError

if TYPE_CHECKING:
    from .capture import CaptureSource
    from .codec import Encoding
    from .replay import ReplayMode

ENTRY_POINT_GROUP = "verl_r3_plugin"


@lru_cache(maxsize=1)
def manager() -> pluggy.PluginManager:
    """The process's plugin manager, with every package of the entry-point group registered."""
    plugins = pluggy.PluginManager(hookspecs.PROJECT)
    plugins.add_hookspecs(hookspecs)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            plugins.register(entry.load(), name=entry.name)
        except Exception as error:
            raise ConfigError(
                f"plugin {entry.name!r} ({entry.value}) of entry-point group {ENTRY_POINT_GROUP!r} does not load: {error}"
            ) from error
    # A checkout that was never installed has no entry points; the built-ins must not depend on that.
    if not plugins.has_plugin("builtin"):
        from . import builtins

        plugins.register(builtins, name="builtin")
    plugins.check_pending()
    return plugins


def encoding(name: str) -> Encoding:
    """The encoding registered under `name` (key `custom.r3.codec`)."""
    return _one("r3_encodings", "codec", name)


def capture_source(name: str) -> CaptureSource:
    """The capture source registered under `name` (key `custom.r3.capture`)."""
    return _one("r3_capture_sources", "capture", name)


def replay_mode(name: str) -> ReplayMode:
    """The replay mode registered under `name` (key `custom.r3.replay`)."""
    return _one("r3_replay_modes", "replay", name)


def names(hook: str) -> list[str]:
    """Names that `hook` offers, sorted."""
    return sorted(_offered(hook))


def _one(hook: str, key: str, name: str) -> Any:
    found = _offered(hook)
    if name not in found:
        near = difflib.get_close_matches(name, found, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"custom.r3.{key}: expected one of {sorted(found)}, found {name!r}{hint}")
    return found[name]


def _offered(hook: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    owners: dict[str, str] = {}
    plugins = manager()
    for implementation in getattr(plugins.hook, hook).get_hookimpls():
        for item in implementation.function():
            if item.name in found:
                raise ConfigError(
                    f"{hook}: {item.name!r} is offered by plugins {owners[item.name]!r} and {implementation.plugin_name!r}; "
                    "uninstall one of them"
                )
            found[item.name], owners[item.name] = item, implementation.plugin_name
    return found

"""Runs an action on a module as soon as that module has been imported, without importing it.

VERL loads its plugins while it is half imported itself, and its engine module pulls in Megatron (16 s). Nothing of that may be imported
just because the plugin is installed, so everything that touches a module of the host waits here for the host to import it.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]
_waiting: dict[str, list[Action]] = {}


def when_imported(name: str, action: Action) -> None:
    """Call `action(module)` now if module `name` is imported, else right after its code has run."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        action(module)
        return
    _waiting.setdefault(name, []).append(action)
    if not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


def forget(action: Action) -> None:
    """Drop `action` wherever it is still waiting."""
    for actions in _waiting.values():
        while action in actions:
            actions.remove(action)


class _Watcher:
    """A finder that finds nothing itself: it lets the others find a module that is waited for, and adds the actions to its loading."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not _waiting.get(name):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _run_after(spec.loader, name)
                return spec
        return None


def _run_after(loader: Any, name: str) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module  # an attribute of this one loader object; its class is untouched
        execute(module)
        for action in _waiting.pop(name, []):
            action(module)

    loader.exec_module = exec_module

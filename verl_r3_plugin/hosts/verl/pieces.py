"""What R3 installs in a process of VERL, and takes out again. Each piece is a file of its own with `install()` and `uninstall()`.

No piece imports a module of VERL by itself: it waits for the host to import it (`late.py`), so an agent-loop worker never loads Megatron
and a trainer never loads vLLM because of the plugin.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from .activation import ProcessState
from .late import forget, when_imported

# (module of the host that must be there first, file of this package, what the piece is called in the process's one line)
_PIECES = (
    ("verl.workers.engine.megatron.transformer_impl", "registration", "engine"),
    ("verl.trainer.ppo.ray_trainer", "trainer", "trainer"),
    ("verl.trainer.ppo.v1.trainer_base", "trainer", "trainer (v1)"),
    ("verl.trainer.main_ppo_sync", "trainer", "trainer (sync)"),
)
_waiting: list[Callable[[ModuleType], None]] = []
_installed: list[ModuleType] = []


def install(state: ProcessState) -> None:
    """Install every piece whose host module is imported, and the others as soon as theirs is."""
    for host, piece, label in _PIECES:
        action = _installer(piece, label, state)
        _waiting.append(action)
        when_imported(host, action)


def uninstall() -> None:
    """Take every installed piece out, last one first, and stop waiting for the others."""
    for action in _waiting:
        forget(action)
    _waiting.clear()
    while _installed:
        _installed.pop().uninstall()


def _installer(piece: str, label: str, state: ProcessState) -> Callable[[ModuleType], None]:
    def action(host: ModuleType) -> None:
        module = import_module(f"{__package__}.{piece}")
        module.install(host)
        _installed.append(module)
        state.parts.append(label)

    return action

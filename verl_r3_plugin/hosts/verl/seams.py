"""Which VERL is installed and through which of its seams the plugin works there, read from its source files without running them.

Importing VERL's engine takes many seconds and Megatron; a doctor should answer in one, and also where the import would fail.
"""

from __future__ import annotations

import ast
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .activation import GATES

_TRAINERS = {
    "verl.trainer.ppo.ray_trainer": "RayPPOTrainer (v0)",
    "verl.trainer.ppo.v1.trainer_base": "PPOTrainer (V1)",
    "verl.trainer.main_ppo_sync": "PPOTrainer (sync)",
}
_ENGINE = "verl/workers/engine/megatron/transformer_impl.py"
_OVERRIDDEN = ("_build_tf_config", "_build_megatron_module", "forward_backward_batch", "disable_adapter")


def facts() -> dict[str, Any]:
    """`version` (None where VERL is not installed), the seams in words, and `problems`: those that are not where they were expected."""
    root = _root()
    if root is None:
        return {"version": None, "problems": []}
    problems = [f"{gate.module}.{gate.owner}.{gate.method}({gate.argument})" for gate in GATES if not _gate_fits(root, gate)]
    registry = _functions(root / "verl/workers/engine/base.py", "EngineRegistry")
    engine = _functions(root / _ENGINE, "MegatronEngine")
    problems += [f"{_ENGINE}: MegatronEngine.{name}" for name in _OVERRIDDEN if name not in engine]
    packing = _functions(root / "verl/models/mcore/util.py", None).get("preprocess_thd_engine")
    if packing is None:
        problems.append("verl/models/mcore/util.py: preprocess_thd_engine")
    group = "verl.plugins" in _text(root / "verl/__init__.py")
    return {
        "version": _version(),
        "activation": "entry point verl.plugins" if group else "actor_rollout_ref.model.external_lib=verl_r3_plugin",
        "needs_external_lib": not group,
        "engine": "registered for the vendor" if "vendor" in registry.get("register", ()) else "registry entry replaced",
        "trainers": [label for module, label in _TRAINERS.items() if _file(root, module).exists()],
        "packing": list(packing or ()),
        "pad_to_length": "pad_to_length_bucket" in (packing or ()),
        "problems": problems,
    }


def _root() -> Path | None:
    spec = find_spec("verl")  # finds the package, does not run it
    return Path(spec.origin).parents[1] if spec is not None and spec.origin else None


def _version() -> str:
    try:
        return version("verl")
    except PackageNotFoundError:
        return "unknown (a checkout)"


def _gate_fits(root: Path, gate: Any) -> bool:
    """A module that this VERL does not have is another version's; one that it has must hold the method with the argument."""
    path = _file(root, gate.module)
    if not path.exists():
        return True
    found = _functions(path, gate.owner).get(gate.method)
    if found is None:
        # Trainers differ in which of the late methods they have; every class has its constructor.
        return gate.method != "__init__"
    return gate.argument is None or gate.argument in found


def _file(root: Path, module: str) -> Path:
    return root / (module.replace(".", "/") + ".py")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _functions(path: Path, owner: str | None) -> dict[str, tuple[str, ...]]:
    """{function: its parameters} of class `owner`, or of the module itself."""
    body: list[ast.stmt] = ast.parse(_text(path)).body
    if owner is not None:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner), [])
    functions = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = node.args
            functions[node.name] = tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
    return functions

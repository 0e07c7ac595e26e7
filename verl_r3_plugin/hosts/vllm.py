"""vLLM: what the installed version can do with routes, read from its own classes.

vLLM captures and returns routes natively (`--enable-return-routed-experts`), so with a version whose HTTP protocol knows
`routed_experts_prompt_start` (0.28 and later) nothing has to be added in its processes. The gateway asks for deltas there, and cuts full
arrays itself where a server ignores the field.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

START_FIELD = "routed_experts_prompt_start"
_logger = logging.getLogger(__name__)


def activate() -> None:
    """Entry point `vllm.general_plugins`, called in every process of vLLM before its engine is built; says in one line what it found."""
    _logger.info("R3: verl-r3-plugin is installed; %s", describe(facts()))


def facts() -> dict[str, Any]:
    """installed; captures: the engine has the flag; http_routes, http_deltas: its chat answers carry routes, its chat requests a start."""
    if importlib.util.find_spec("vllm") is None:
        return {"installed": False, "captures": False, "http_routes": False, "http_deltas": False}
    from vllm.engine.arg_utils import EngineArgs

    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponseChoice
    except ImportError:  # the module was one file in earlier versions
        from vllm.entrypoints.openai.protocol import ChatCompletionRequest, ChatCompletionResponseChoice

    return {
        "installed": True,
        "captures": "enable_return_routed_experts" in EngineArgs.__dataclass_fields__,
        "http_routes": "routed_experts" in ChatCompletionResponseChoice.model_fields,
        "http_deltas": START_FIELD in ChatCompletionRequest.model_fields,
    }


def describe(found: dict[str, Any]) -> str:
    """One line on what `facts` found."""
    if not found["captures"]:
        return "this vLLM cannot capture routed experts; install vLLM 0.22 or later"
    if not found["http_routes"]:
        return "this vLLM captures routes but its HTTP answers cannot carry them; install vLLM 0.22 or later"
    return "routes are returned natively" + ("" if found["http_deltas"] else ", whole context each turn (deltas need vLLM 0.28 or later)")

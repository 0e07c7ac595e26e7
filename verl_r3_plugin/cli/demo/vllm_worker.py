"""New weights into a running vLLM server on a CPU, as a worker extension called over `/collective_rpc`.

vLLM's own ways are wrong on its CPU backend, one silently: `reload_weights` answers 200 and leaves the experts of all but one layer wrong,
because the CPU kernels keep repacked copies. So a fresh model is loaded beside the running one, as at start, and its processed tensors
are put into the running modules, which keep their route-capture hooks. The caller has to reset the prefix cache afterwards.
"""

from __future__ import annotations

import copy
from typing import Any


class SwapWeights:
    """Mixed into vLLM's worker (`--worker-extension-cls`)."""

    def r3_swap_weights(self, path: str) -> int:
        """Load the checkpoint at `path` into the running model; the number of tensors that were swapped."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import get_model_loader

        config = copy.copy(self.vllm_config)
        config.model_config = copy.copy(config.model_config)
        config.model_config.model = path
        # Layers register themselves by name at construction; the second copy must not meet the first one's names.
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        with set_current_vllm_config(config):
            fresh = get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)
        running = dict(self.model_runner.get_model().named_modules())
        swapped = 0
        for name, module in fresh.named_modules():
            swapped += _take_over(module, running[name])
        return swapped


def _take_over(fresh: Any, running: Any) -> int:
    """Put `fresh`'s own tensors into `running`, and the closure in which a CPU linear keeps its repacked weight."""
    swapped = 0
    for name, parameter in fresh._parameters.items():
        if parameter is not None:
            running._parameters[name] = parameter
            swapped += 1
    running._buffers.update(fresh._buffers)
    if "cpu_linear" in fresh.__dict__:
        running.__dict__["cpu_linear"] = fresh.__dict__["cpu_linear"]
    return swapped

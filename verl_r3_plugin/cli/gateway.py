"""`verl-r3 gateway`: agl-server with route capture. It takes every argument of agl-server, and `r3.*` for its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def run(arguments: Sequence[str]) -> None:
    """Serve until stopped. arguments: as agl-server takes them; `r3.memory_limit=...` and the like need no plus sign."""
    import agentlightning.config
    import hydra
    import uvicorn
    from omegaconf import DictConfig

    from ..hosts.agentlightning.gateway import create_gateway

    @hydra.main(version_base=None, config_path=str(Path(agentlightning.config.__file__).parent), config_name="server")
    def main(config: DictConfig) -> None:
        app = create_gateway(config)
        uvicorn.run(app, host=str(config.host), port=int(config.port), workers=1, timeout_keep_alive=120)

    # agl-server's configuration declares no `r3`, so Hydra wants new keys marked.
    sys.argv = ["verl-r3 gateway", *("+" + argument if argument.startswith("r3.") else argument for argument in arguments)]
    main()

"""Loaded in a Ray worker through VERL's own `VERL_USE_EXTERNAL_MODULES=support.verl_worker`: puts the local-spec engine where VERL keeps
its Megatron engine, before the plugin (or nobody) wraps what is registered. Nothing is imported until VERL imports its engine."""

from __future__ import annotations

from verl_r3_plugin.hosts.verl.late import when_imported


def _replace_engine(module) -> None:
    import torch
    from support.local_spec_engine import local_spec_host
    from verl.workers.engine.base import EngineRegistry

    from verl_r3_plugin.cli.demo import megatron_cpu

    megatron_cpu.stand_in()
    torch.cuda.get_device_name = lambda *_: "CPU"  # the host looks the device's peak speed up by name
    for name in ("memory_reserved", "memory_allocated", "max_memory_allocated", "max_memory_reserved"):
        if not hasattr(torch.cpu, name):  # verl 0.8 asks torch.cpu what it would ask torch.cuda
            setattr(torch.cpu, name, lambda *_: 0)
    torch.cpu.empty_cache = getattr(torch.cpu, "empty_cache", lambda: None)
    torch.cpu.get_device_name = lambda *_: "CPU"
    engines = EngineRegistry._engines["language_model"]["megatron"]
    engines["cuda"] = engines["cpu"] = local_spec_host()


def _gloo(module) -> None:
    """A process group of gloo alone (verl would also ask for NCCL), and Megatron's generator tracker that needs no CUDA."""

    def initialise(timeout_second=None, backend=None):
        import os

        import torch.distributed

        if not torch.distributed.is_initialized():
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            torch.distributed.init_process_group("gloo", rank=rank, world_size=world, init_method=address)

    module.initialize_global_process_group_ray = initialise


when_imported("verl.utils.distributed", _gloo)
when_imported("verl.workers.engine.megatron.transformer_impl", _replace_engine)

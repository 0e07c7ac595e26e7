"""A real RayWorkerGroup of VERL's ActorRolloutRefWorker on this machine, without a GPU: see `verl_worker.py` for what stands in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

R3_KEYS = (
    "actor_rollout_ref.actor.megatron.router_replay.mode=R3",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
)


def checkpoint(folder: Path) -> Path:
    """Config and tokenizer of the model of `local_spec_engine.HF`, as HFModelConfig wants them on disk; no weights."""
    from support.local_spec_engine import HF

    from verl_r3_plugin.cli.demo.checkpoint import save_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**HF, "model_type": "qwen3_moe", "hidden_act": "silu"}))
    save_tokenizer(folder)
    return folder


def compose(model: Path, *overrides: str, name: str = "ppo_trainer") -> Any:
    """VERL's own configuration for a Megatron actor, with `overrides`."""
    import hydra

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose(
            name,
            overrides=[
                "model_engine=megatron",
                f"actor_rollout_ref.model.path={model}",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
                "actor_rollout_ref.actor.ppo_mini_batch_size=4",
                "actor_rollout_ref.actor.megatron.use_distributed_optimizer=false",
                "actor_rollout_ref.model.use_remove_padding=true",
                "trainer.device=cpu",
                *overrides,
            ],
        )


def start_ray(*modules: str, **environment: str) -> None:
    """A Ray of this machine alone whose workers find `support`, and load `modules` when they import verl."""
    import ray

    tests = str(Path(__file__).parents[1])
    paths = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **environment}
    if modules:
        variables["VERL_USE_EXTERNAL_MODULES"] = ",".join(modules)
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=True,
        runtime_env={"env_vars": variables, "working_dir": None},
        object_store_memory=200_000_000,
    )


def worker_group(config: Any, *, workers: int = 1, role: str = "actor") -> Any:
    """`workers` real ActorRolloutRefWorkers of `config.actor_rollout_ref`, models built."""
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.workers.engine_workers import ActorRolloutRefWorker

    pool = RayResourcePool([workers], use_gpu=False, max_colocate_count=1)
    cls = RayClassWithInitArgs(cls=ray.remote(ActorRolloutRefWorker), config=config.actor_rollout_ref, role=role)
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=cls, device_name="cpu")
    group.init_model()
    return group

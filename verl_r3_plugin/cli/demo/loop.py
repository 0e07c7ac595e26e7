"""The loop: rollouts through the gateway, a VERL batch, replay, one step, new weights into vLLM; and the figures of each step."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from safetensors.torch import load_file

from ... import metrics
from ...field import unpack
from ...schema import RouteSchema
from . import checkpoint
from .agent import KINDS
from .checks import check_push, routes_equal
from .servers import Server, free_port, push_weights, start_vllm, wait_for_vllm
from .tap import Tap
from .trainer import Batch, Trainer

MODEL = "r3-demo"
KEY = "demo-key"
MAX_PROMPT, MAX_RESPONSE = 64, 192


@dataclass(frozen=True)
class Options:
    """replay: "R3" (train with replay), "off" (train with the live router), "both" (train with replay, measure both on the same batch)."""

    out: Path
    cache: Path
    steps: int = 3
    replay: str = "both"
    seed: int = 0
    groups: int = 4
    group_size: int = 4
    turns: int = 3
    learning_rate: float = 1e-3


@dataclass
class Phases:
    """Seconds spent by name of the phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began


@dataclass
class Result:
    """Figures of all steps, and what went into them."""

    steps: list[dict[str, Any]]
    routes_equal: bool | None
    phases: dict[str, float]


class Demo:
    """One run of the demo. tell: called with a line about what is going on; on_step: with each step's figures."""

    def __init__(
        self, options: Options, tell: Callable[[str], None] = lambda _: None, on_step: Callable[[dict[str, Any]], None] = lambda _: None
    ) -> None:
        self.options = options
        self.tell = tell
        self.on_step = on_step
        self.phases = Phases()
        self.schema = RouteSchema(
            checkpoint.HF_CONFIG["num_experts"],
            checkpoint.HF_CONFIG["num_experts_per_tok"],
            checkpoint.HF_CONFIG["num_hidden_layers"],
            tuple(n for n in range(checkpoint.HF_CONFIG["num_hidden_layers"]) if n not in checkpoint.HF_CONFIG["mlp_only_layers"]),
        )
        self._random = np.random.default_rng(options.seed)

    def run(self) -> Result:
        """All steps. Whatever happens, every server is stopped before this returns."""
        options = self.options
        torch.manual_seed(options.seed)
        with contextlib.ExitStack() as stack:
            with self.phases.of("checkpoint"):
                self.tell("making the checkpoint")
                folder = checkpoint.make_checkpoint(options.cache / f"qwen3-moe-seed{options.seed}", options.seed)
            ports = {name: free_port() for name in ("vllm", "tap", "gateway")}
            logs = options.out / "logs"
            vllm = stack.enter_context(start_vllm(folder, MODEL, ports["vllm"], logs / "vllm.log"))
            gateway = stack.enter_context(_start_gateway(ports["gateway"], options.out))
            with self.phases.of("trainer"):
                self.tell("building the Megatron model")
                trainer = Trainer(load_file(folder / "model.safetensors"), self.schema, options.learning_rate)
            with self.phases.of("vllm start"):
                self.tell("waiting for vLLM")
                wait_for_vllm(vllm, ports["vllm"])
            gateway.wait_until(f"http://127.0.0.1:{ports['gateway']}/healthz", 60)
            tap = stack.enter_context(Tap(f"http://127.0.0.1:{ports['vllm']}/v1", ports["tap"]))
            stack.enter_context(_start_controller(ports["gateway"], options.out))
            steps, equal = [], None
            for step in range(1, options.steps + 1):
                figures, same = self._step(step, trainer, tap, ports)
                equal = same if equal is None else equal and same
                steps.append(figures)
                self.on_step(figures)
            return Result(steps, equal, self.phases.seconds)

    def _step(self, step: int, trainer: Trainer, tap: Tap, ports: dict[str, int]) -> tuple[dict[str, Any], bool | None]:
        self.tell(f"step {step}: rollouts")
        tap.captures.clear()
        with self.phases.of("rollouts"):
            rollouts = self._rollouts(step, tap.url, ports["gateway"])
        with self.phases.of("batch"):
            data, data_metrics = self._batch(rollouts, step)
            batch = Batch.of(data)
            (self.options.out / "routes.r3").write_bytes(b"".join(batch.blobs))  # of the newest step, for verl-r3 inspect
        self.tell(f"step {step}: log-probs")
        replays = self.options.replay != "off"
        figures = self._describe(step, rollouts, batch, data_metrics)
        with self.phases.of("log-probs"):
            mismatch, old, same = self._compare(trainer, batch, tap, figures)
        self.tell(f"step {step}: update")
        with self.phases.of("update"):
            advantages = _advantages(data, batch)
            figures["grad_norm"] = trainer.update(batch, advantages, old, _loss_config(), replay=replays)
        figures |= mismatch
        self.tell(f"step {step}: new weights into vLLM")
        with self.phases.of("push"):
            folder = self.options.out / "weights"
            if not folder.exists():
                checkpoint.make_checkpoint(folder, self.options.seed)
            checkpoint.save_weights(trainer.weights(), folder)
            push_weights(ports["vllm"], folder)
        with self.phases.of("probe"):
            figures["push_logprob_diff"] = check_push(trainer, ports["vllm"], MODEL, self.options.seed)
        return figures, same

    def _rollouts(self, step: int, endpoint: str, gateway: int) -> list[Any]:
        from ...hosts.agentlightning.manager import R3RolloutManager

        options = self.options
        base = f"http://127.0.0.1:{gateway}"
        model = {"model": MODEL, "endpoint": endpoint, "version": step}
        httpx.post(f"{base}/api/models", json=[model], headers={"x-api-key": KEY}).raise_for_status()
        manager = R3RolloutManager(
            agl_base_url=base,
            agl_key=KEY,
            model=MODEL,
            step=step,
            train_rollout_n=options.group_size,
            rollout_timeout_seconds=120,
            poll_interval_seconds=0.3,
            local_agent_class="verl_r3_plugin.cli.demo.agent:Agent",
            local_env_map={"KIND": "input.kind", "TURNS": "input.turns"},
        )
        manager.use_routes(self.schema)
        kinds = self._random.choice(list(KINDS), options.groups)
        with contextlib.redirect_stdout(io.StringIO()):
            return manager.enqueue_and_wait_until_completed({"kind": kinds, "turns": np.full(options.groups, options.turns)}, is_train=True)

    def _batch(self, rollouts: list[Any], step: int) -> tuple[Any, dict[str, Any]]:
        from ...hosts.agentlightning.adapter import R3RolloutAdapter

        adapter = R3RolloutAdapter(
            max_prompt_length=MAX_PROMPT,
            max_response_length=MAX_RESPONSE,
            device=torch.device("cpu"),
            pad_token_id=checkpoint.HF_CONFIG["pad_token_id"],
            trace_aggregator_level="trajectory",
        )
        adapter.use_routes(self.schema)
        with contextlib.redirect_stdout(io.StringIO()):
            return adapter.get_train_data_batch(rollouts, global_steps=step)

    def _describe(self, step: int, rollouts: list[Any], batch: Batch, data_metrics: dict[str, Any]) -> dict[str, Any]:
        rewards = np.array([rollout.final_reward or 0.0 for rollout in rollouts])
        replayed = np.concatenate([_present(blob, ids, self.schema) for blob, ids in zip(batch.blobs, batch.tokens, strict=True)])
        return {
            "step": step,
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "tokens": int(sum(trained.sum() for trained in batch.trained)),
            "turns": int(sum(len(rollout.triplets or []) for rollout in rollouts)),
            "coverage": data_metrics.get("r3/coverage", 0.0),
            "fallback": metrics.fallback(np.concatenate(batch.trained), replayed).get("r3/fallback", 0.0),
            "bytes_per_token": data_metrics["r3/bytes_per_token"],
            "host_bytes_per_token": data_metrics["r3/host_bytes_per_token"],
        }

    def _compare(
        self, trainer: Trainer, batch: Batch, tap: Tap, figures: dict[str, Any]
    ) -> tuple[dict[str, Any], list[np.ndarray], bool | None]:
        """(figures of the mismatch, log-probs of the model that is trained, routes_equal)."""
        rollout = _of_trained(batch.rollout_log_probs, batch)
        found: dict[str, list[np.ndarray]] = {}
        same = None
        if self.options.replay in ("off", "both"):
            found["live"] = trainer.log_probs(batch, replay=False)
        if self.options.replay in ("R3", "both"):
            with trainer.record() as records:
                found["replay"] = trainer.log_probs(batch, replay=True, statistics=True)
            tapped = [tap.rows_of(ids.tolist()) for ids in batch.tokens]
            same, _, _ = routes_equal(records, tapped, batch.trained, self.schema)
            counts = trainer.replay.statistics()
            figures |= {"agreement": metrics.agreement(counts["agreed"], counts["compared"]).get("r3/agreement")}
        else:
            figures |= {"agreement": None}
        mismatch: dict[str, Any] = {name: {} for name in ("logprob_abs_diff", "k3_kl", "extreme_fraction")}
        for name in mismatch:
            for kind in ("live", "replay"):
                values = metrics.mismatch(rollout, _of_trained(found[kind], batch)) if kind in found else {}
                mismatch[name][kind] = values.get(metrics.PREFIX + name)
        return mismatch, found["replay" if "replay" in found else "live"], same


def _start_gateway(port: int, out: Path) -> Server:
    command = [
        sys.executable, "-c", "import sys; from verl_r3_plugin.cli.gateway import run; run(sys.argv[1:])",
        "host=127.0.0.1", f"port={port}", f"key={KEY}", f"default_proxy.model_name={MODEL}", f"hydra.run.dir={out / 'hydra' / 'gateway'}",
    ]  # fmt: skip
    return Server("the gateway", command, out / "logs" / "gateway.log")


def _start_controller(gateway: int, out: Path) -> Server:
    command = [
        sys.executable, "-m", "agentlightning.controller", "runner_type=local", f"agl_server.url=http://127.0.0.1:{gateway}",
        f"agl_server.key={KEY}", "local_runner.poll_interval=0.3", "local_runner.maximum_size=8",
        f"hydra.run.dir={out / 'hydra' / 'controller'}",
    ]  # fmt: skip
    return Server("agl-controller", command, out / "logs" / "controller.log")


def _advantages(data: Any, batch: Batch) -> list[np.ndarray]:
    """VERL's group-relative advantages, [tokens] a row, 0 where not trained."""
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    mask = data.batch["response_mask"]
    advantages, _ = compute_grpo_outcome_advantage(
        token_level_rewards=data.batch["token_level_scores"].float(),
        response_mask=mask.float(),
        index=data.non_tensor_batch["data_id_list"],
    )
    placed = []
    for row, trained in enumerate(batch.trained):
        values = np.zeros(len(trained), np.float32)
        values[trained] = advantages[row][mask[row].bool()].numpy()
        placed.append(values)
    return placed


def _loss_config() -> Any:
    from verl.workers.config import ActorConfig

    return ActorConfig(strategy="megatron", rollout_n=1, use_dynamic_bsz=True)


def _of_trained(values: list[np.ndarray], batch: Batch) -> np.ndarray:
    return np.concatenate([row[trained] for row, trained in zip(values, batch.trained, strict=True)])


def _present(blob: bytes, ids: np.ndarray, schema: RouteSchema) -> np.ndarray:
    return unpack(blob, ids, schema=schema, layers=[0])[0].present

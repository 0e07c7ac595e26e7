"""The engine that replays: a subclass of the Megatron engine that VERL would build, made at runtime from whatever class is registered.

VERL's own R3 replaces the router's code for the whole process, which changes its numbers even where nothing is replayed. So the host's
constructor is told `router_replay.mode=disabled`, and the routers get this plugin's replay objects after the model is built.
`compute_log_prob` and `update_actor` replay. The reference policy (also a LoRA reference, which is the actor with its adapter off), the
critic and validation do not. In a call that replays, the field never reaches the device: its place in the batch is taken by a row number,
and each micro-batch loads the rows of its own tokens before the host runs it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import HostError, ReplayError
from ...field import FIELD
from ...plugins import replay_mode
from ...problem import Problem, refuse
from ...replay.local import LocalRoutes
from ...schema import RouteSchema
from . import marker
from . import rows as placement
from .activation import state
from .step import ROW_KEY, SUM_PREFIX, Step, log_prob_sums, read_step, refuse_if_too_few

_ACTOR = "actor_rollout_ref.actor.megatron."


class ReplayEngine:
    """What is put in front of the host's engine class; see `engine_class`."""

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        asked = engine_config.router_replay.mode == "R3"
        self._r3_wanted = asked and not engine_config.forward_only
        self._r3: Any = None  # ReplaySession, once the model is built
        self._r3_schema: Any = None
        self._r3_step: Step | None = None
        self._r3_calls = 0
        self._r3_updates = 0
        self._r3_adapter_off = False
        given = engine_config
        if asked:
            refuse(layout_problems(engine_config) if self._r3_wanted else [])
            router_replay = dataclasses.replace(engine_config.router_replay, mode="disabled")
            given = dataclasses.replace(engine_config, router_replay=router_replay)
        super().__init__(model_config, given, *args, **kwargs)
        # The worker shares its configuration object with the engine and each sees what the other changes in it.
        self.engine_config = engine_config

    def _build_tf_config(self) -> None:
        super()._build_tf_config()  # type: ignore[misc]
        if self._r3_wanted:
            self._r3_schema = RouteSchema.from_hf_config(self.model_config.hf_config)
            # Megatron-Bridge hands out its configuration only with the model; its provider is one as well, and is there before.
            config = self.tf_config if self.tf_config is not None else getattr(self, "provider", None)
            if config is not None:
                refuse(replay_mode(state.settings.replay).check(config, self._r3_schema))

    def _build_megatron_module(self) -> Any:
        module = super()._build_megatron_module()  # type: ignore[misc]
        if self._r3_wanted:
            self._r3 = replay_mode(state.settings.replay).attach(module, self._r3_schema)
            count = sum(len(self._r3.layers(chunk)) for chunk in module)
            state.engines.append(f"{type(self).__name__}: replay of {count} MoE layers")
            print(f"verl-r3-plugin: {state.engines[-1]} of {self._r3_schema} attached", flush=True)
        return module

    @contextmanager
    def disable_adapter(self) -> Iterator[Any]:
        """The host's; what runs inside is a reference policy, so it is not replayed."""
        with super().disable_adapter() as result:  # type: ignore[misc]
            self._r3_adapter_off = True
            try:
                yield result
            finally:
                self._r3_adapter_off = False

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        from verl.utils import tensordict_utils as tu

        asked = bool(tu.get_non_tensor_data(data, key="enable_routing_replay", default=False))
        blobs = _take_field(data)
        if self._r3 is None or not asked or self._r3_adapter_off:
            return super().forward_backward_batch(blobs.rest, loss_function, forward_only=forward_only)  # type: ignore[misc]
        if blobs.values is None:
            raise ReplayError(
                f"expected the field {FIELD!r} in a batch that is to be replayed, found only {sorted(data.keys())}; the process that "
                "made the batch (the trainer, or Agent Lightning's adapter) does not run verl-r3-plugin"
            )
        settings = state.settings
        step = read_step(data, blobs.values, self._r3_schema)
        sums = step.sums()
        refuse_if_too_few(self._over_data_parallel(sums), step, settings.max_fallback, first=self._r3_calls == 0)
        training = loss_function is not None and not forward_only
        sampled = training and settings.stats_interval > 0 and self._r3_updates % settings.stats_interval == 0
        self._r3_calls += 1
        self._r3_updates += training
        # VERL's own switch is turned off: it would set the action of routers that are not its own.
        tu.assign_non_tensor(blobs.rest, enable_routing_replay=False)
        with self._r3.step(statistics=sampled):
            self._r3_step = step
            try:
                output = super().forward_backward_batch(blobs.rest, loss_function, forward_only=forward_only)  # type: ignore[misc]
            finally:
                self._r3_step = None
            if sampled:
                sums |= self._over_the_model(self._r3.statistics())
        if training:
            sums |= log_prob_sums(data, len(step.token_ids))
        if output.get("metrics") is not None:
            output["metrics"].update(_as_metrics(sums) if training else {"r3_loaded": marker.Loaded()} if marker.needed() else {})
        return output

    def forward_step(self, batch_iter: Iterator[Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        if self._r3_step is None:
            return super().forward_step(batch_iter, model, *args, **kwargs)  # type: ignore[misc]
        batch = next(batch_iter)
        self._load(batch, model)
        return super().forward_step(iter([batch]), model, *args, **kwargs)  # type: ignore[misc]

    def _load(self, batch: Any, model: Any) -> None:
        """Give the routers of `model` (one chunk) the rows of this micro-batch's tokens that belong to this rank."""
        from verl.utils import tensordict_utils as tu
        from verl.utils.megatron_utils import unwrap_model

        step = self._r3_step
        assert step is not None
        options = {key: tu.get_non_tensor_data(batch, key=key, default=None) for key in ("local_cp_size", "forced_max_seqlen")}
        fused = bool(tu.get_non_tensor_data(batch, key="use_fused_kernels", default=self.engine_config.use_fused_kernels))
        chunk = unwrap_model(model)
        tokens = placement.local_rows(batch["input_ids"], chunk, self.engine_config, fused=fused, batch_options=options)
        which = batch[ROW_KEY].tolist()
        blobs, token_ids = [step.blobs[i] for i in which], [step.token_ids[i] for i in which]
        self._r3.load(chunk, LocalRoutes.gather(blobs, token_ids, tokens, self._r3.layers(chunk), step.schema))

    def _over_data_parallel(self, sums: dict[str, float]) -> dict[str, float]:
        """`sums` added up over data-parallel ranks: one all-reduce of three numbers a call, next to the one the host makes."""
        return self._all_reduce({key: sums[key] for key in ("fell_back", "trained", "rows_present")}, self.get_data_parallel_group())

    def _over_the_model(self, counts: dict[str, float]) -> dict[str, float]:
        """Agreement counts of all ranks (each has its own layers and tokens), on sampled steps only."""
        return self._all_reduce({key: counts[key] for key in ("agreed", "compared")}, None)

    def _all_reduce(self, sums: dict[str, float], group: Any) -> dict[str, float]:
        import torch
        from verl.utils.device import get_device_id

        values = torch.tensor(list(sums.values()), dtype=torch.float64, device=get_device_id())
        torch.distributed.all_reduce(values, group=group)
        return dict(zip(sums, values.tolist(), strict=True))


def engine_class(host: type) -> type:
    """The replaying engine over `host`, VERL's Megatron engine with a language-model head (or another package's subclass of it)."""
    for method in ("_build_tf_config", "_build_megatron_module", "forward_backward_batch", "forward_step", "disable_adapter"):
        if not callable(getattr(host, method, None)):
            raise HostError(f"expected {host.__module__}.{host.__qualname__} to have {method}(), found none; this verl is not supported")
    return type(f"R3{host.__name__}", (ReplayEngine, host), {"__module__": __name__, "__doc__": ReplayEngine.__doc__})


def layout_problems(engine_config: Any) -> list[Problem]:
    """What cannot be replayed whatever the model is, as VERL's engine configuration has it (the model's own: `ReplayMode.check`)."""
    problems = []
    if getattr(engine_config, "dynamic_context_parallel", False):
        message = "it regroups the ranks for every micro-batch, and no released Megatron-core has it to try"
        problems.append(Problem("error", _ACTOR + "dynamic_context_parallel", message, "set it to false and use context_parallel_size"))
    if getattr(engine_config, "pad_to_length", False) and engine_config.use_remove_padding and not rows_follow_pad_to_length():
        message = "this verl cannot say where it puts the bucket's padding"
        problems.append(Problem("error", _ACTOR + "pad_to_length", message, "set it to false"))
    return problems


def rows_follow_pad_to_length() -> bool:
    """Whether the installed verl's packing function takes the bucket."""
    from verl.models.mcore.util import preprocess_thd_engine

    return "pad_to_length_bucket" in inspect.signature(preprocess_thd_engine).parameters


@dataclasses.dataclass
class _Taken:
    values: list[bytes] | None
    rest: Any


def _take_field(data: Any) -> _Taken:
    """The field's bytes, and the batch with a row number [batch] int64 in its place; the caller's batch keeps its field."""
    import torch

    from .field import read_blobs

    values = read_blobs(data) if FIELD in data else None
    rest = data.exclude(FIELD) if values is not None else data.copy()
    rest[ROW_KEY] = torch.arange(len(data))
    return _Taken(values, rest)


def _as_metrics(sums: dict[str, float]) -> dict[str, Any]:
    from verl.utils.metric import AggregationType, Metric

    return {SUM_PREFIX + name: Metric(AggregationType.SUM, value) for name, value in sums.items()}

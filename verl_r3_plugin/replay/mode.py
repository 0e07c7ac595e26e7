"""What a replay mode is: the way from a batch's routes to a trainer's routers, under a name that `custom.r3.replay` can give."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from ..problem import Problem
from ..schema import RouteSchema

if TYPE_CHECKING:
    from .local import LocalRoutes


class ReplaySession(Protocol):
    """Replay attached to one built model."""

    def step(self, *, statistics: bool = False) -> AbstractContextManager[None]:
        """The time of one forward-backward call; whatever happens, nothing loaded outlives it."""
        ...

    def layers(self, chunk: Any) -> Sequence[int]:
        """Ordinals (positions in `schema.moe_layers`) of the MoE layers in this model chunk."""
        ...

    def load(self, chunk: Any, routes: LocalRoutes) -> None:
        """Routes of the micro-batch that `chunk` is about to run."""
        ...

    def statistics(self) -> dict[str, float]:
        """Sums counted in steps with `statistics=True` since the last call: agreed, compared (experts), equal_rows, rows."""
        ...

    def detach(self) -> None:
        """Give every router back what it had."""
        ...


class ReplayMode(Protocol):
    name: str

    def check(self, model_config: Any, schema: RouteSchema) -> list[Problem]:
        """Settings of a trainer's model that replay cannot work with; asked before the model is built."""
        ...

    def attach(self, chunks: Sequence[Any], schema: RouteSchema) -> ReplaySession:
        """Make the routers of a built model (its chunks on this rank) ask for routes."""
        ...

"""The settings under `actor_rollout_ref.rollout.custom.r3`, each with its default; a key that does not exist is refused."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import ConfigError

PREFIX = "actor_rollout_ref.rollout.custom.r3."


@dataclass(frozen=True)
class R3Config:
    """codec: encoding of the field (`set`, `packed`, `raw`, or a registered one).
    policy: whose row stays where two turns know one (`first`: the one it was sampled under; `last`).
    capture: how a rollout engine's payload becomes routes. replay: how the trainer uses them; both by registered name.
    max_fallback: share of trained tokens, 0 to 1, above which a step is refused.
    stats_interval: agreement with the live router is measured in every so many updates (0: never); it costs about one top-k a layer.
    """

    codec: str = "set"
    policy: str = "first"
    capture: str = "vllm"
    replay: str = "megatron"
    max_fallback: float = 0.5
    stats_interval: int = 10

    def __post_init__(self) -> None:
        if not 0.0 <= float(self.max_fallback) <= 1.0:
            raise ConfigError(f"{PREFIX}max_fallback: expected a share between 0 and 1, found {self.max_fallback!r}")
        if int(self.stats_interval) != self.stats_interval or self.stats_interval < 0:
            raise ConfigError(f"{PREFIX}stats_interval: expected a whole number of updates, 0 or more, found {self.stats_interval!r}")
        if self.policy not in ("first", "last"):
            raise ConfigError(f"{PREFIX}policy: expected 'first' or 'last', found {self.policy!r}")

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> R3Config:
        """From the mapping under `custom.r3`; ConfigError for an unknown key, with the nearest known one."""
        known = [field.name for field in fields(cls)]
        for key in settings:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"{PREFIX}{key}: expected one of {known}, found {key!r}{hint}")
        return cls(**settings)

"""One thing that is wrong with a configuration: what the doctor prints and the trainer's start refuses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """severity `error` stops a run, `warning` does not. key: the setting to change; fix: what to change it to."""

    severity: Literal["error", "warning"]
    key: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}; {self.fix}"


def refuse(problems: Iterable[Problem]) -> None:
    """Raise one ConfigError that names every error among `problems`."""
    errors = [str(problem) for problem in problems if problem.severity == "error"]
    if errors:
        raise ConfigError("R3 cannot run with this configuration:\n" + "\n".join(f"  - {error}" for error in errors))

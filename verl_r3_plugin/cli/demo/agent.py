"""The demo's agent: a game of several turns with a tool and a reward that anybody can check.

The task names a kind of number. Each turn the model writes a few words; the first number among them is handed to a tool, which says
whether it is of that kind. The reward is the share of turns in which it was. A random model writes numbers often enough that some rollouts
of a group earn more than others. Run by agl-controller as a process of its own; it knows nothing of routes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import httpx

KINDS: dict[str, Callable[[int], bool]] = {
    "even": lambda n: n % 2 == 0,
    "odd": lambda n: n % 2 == 1,
    "multiple of three": lambda n: n % 3 == 0,
}
SYSTEM = "find a number that is"
MAX_WORDS = 16


def first_number(text: str) -> int | None:
    """The first word of `text` that is a number."""
    return next((int(word) for word in text.split() if word.isdigit()), None)


def check_number(kind: str, number: int | None) -> str:
    """The tool: what the model reads next."""
    if number is None:
        return "try again a number please"
    return f"yes {number} is {kind}" if KINDS[kind](number) else f"no {number} try again"


class Agent:
    """One rollout, told about by the environment: AGL_OPENAI_BASE_URL, AGL_EVENT_URL, AGL_KEY, and the task's KIND and TURNS."""

    def run(self) -> None:
        kind, turns = os.environ["KIND"], int(os.environ["TURNS"])
        headers = {"Authorization": f"Bearer {os.environ['AGL_KEY']}"}
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{kind} please"}]
        right = 0
        with httpx.Client(headers=headers, timeout=120) as client:
            for _ in range(turns):
                answer = client.post(
                    os.environ["AGL_OPENAI_BASE_URL"] + "/chat/completions", json={"messages": messages, "max_tokens": MAX_WORDS}
                )
                answer.raise_for_status()
                text = answer.json()["choices"][0]["message"]["content"] or ""
                result = check_number(kind, first_number(text))
                right += result.startswith("yes")
                messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": result}]
            reward = {"event_type": "reward", "data": {"value": right / turns}}
            client.post(os.environ["AGL_EVENT_URL"], json=reward).raise_for_status()

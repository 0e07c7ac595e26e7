"""The demo's servers: started on loopback and free ports, and stopped whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import httpx

from ...errors import R3Error


class ServerFailed(R3Error):
    """A server of the demo ended, or did not answer in time."""


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A child process in a process group of its own, so that stopping it stops its children too."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                list(command),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})},
                cwd=cwd,
                start_new_session=True,
            )

    def wait_until(self, url: str, seconds: float) -> None:
        """Until `url` answers 200; ServerFailed with the end of the log if it doesn't."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerFailed(f"{self.name} ended with status {self.process.returncode} before it answered:\n{self.tail()}")
            try:
                if httpx.get(url, timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise ServerFailed(f"expected {self.name} to answer at {url} within {seconds:.0f} s, found that it did not:\n{self.tail()}")

    def tail(self, lines: int = 30) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, seconds: float = 10) -> None:
        """Ask the group to end, then end it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


VLLM_CPU_ENV = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",  # mounts /collective_rpc and /reset_prefix_cache, which the weight push needs
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def start_vllm(model: Path, served_name: str, port: int, log: Path, *, max_model_len: int = 1024, extra: Sequence[str] = ()) -> Server:
    """The real vLLM's HTTP server (CPU build, bfloat16) with route capture."""
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--served-model-name", served_name, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "bfloat16", "--max-model-len", str(max_model_len), "--max-num-seqs", "16", "--seed", "0", "--enforce-eager",
        "--enable-return-routed-experts", "--enable-prefix-caching", "--generation-config", "vllm",
        "--worker-extension-cls", "verl_r3_plugin.cli.demo.vllm_worker.SwapWeights", *extra,
    ]  # fmt: skip
    return Server("vLLM", command, log, VLLM_CPU_ENV)


def wait_for_vllm(server: Server, port: int, seconds: float = 240) -> None:
    """Until vLLM serves."""
    server.wait_until(f"http://127.0.0.1:{port}/health", seconds)


def push_weights(port: int, checkpoint: Path) -> None:
    """The weights of `checkpoint` into the running vLLM, and its prefix cache emptied; ServerFailed if vLLM says no."""
    base = f"http://127.0.0.1:{port}"
    with httpx.Client(timeout=300) as client:
        for path, body in (
            ("/collective_rpc", {"method": "r3_swap_weights", "args": [str(checkpoint)]}),
            ("/reset_prefix_cache", None),
        ):
            answer = client.post(base + path, json=body)
            if answer.status_code != 200:
                raise ServerFailed(f"expected vLLM to take new weights, found status {answer.status_code} at {path}: {answer.text[:500]}")

"""Capture sources: how the routes that a rollout engine returned become `RoutedExperts`."""

from __future__ import annotations

import base64
import binascii
import io
from typing import Protocol

import numpy as np

from .errors import RoutesError
from .routes import RoutedExperts
from .schema import RouteSchema


class CaptureSource(Protocol):
    """Turns the payload of one response into routes."""

    name: str

    def routes(self, schema: RouteSchema, payload: object) -> RoutedExperts:
        """Rows of the tokens from the requested start on; raises RoutesError where the payload is not routes of `schema`."""
        ...


class VllmCapture:
    """vLLM 0.22 and later: base64 of an `.npy` file in `choices[i].routed_experts`, or the array itself in process.

    Format: vllm/utils/serial_utils.py, `numpy2base64`; array [prompt + output - 1 - start, layers, top_k].
    """

    name = "vllm"

    def routes(self, schema: RouteSchema, payload: object) -> RoutedExperts:
        if isinstance(payload, str | bytes):
            payload = _array_from_base64_npy(payload)
        if not isinstance(payload, np.ndarray):
            raise RoutesError(f"expected an array or base64 of an .npy file as routed experts, found {type(payload).__name__}")
        return RoutedExperts.from_capture(schema, payload)


def _array_from_base64_npy(text: str | bytes) -> np.ndarray:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RoutesError(f"expected routed experts as base64, found text that is not ({error})") from error
    stream = io.BytesIO(raw)
    try:
        array = np.lib.format.read_array(stream, allow_pickle=False)
    except Exception as error:  # numpy raises many kinds for a damaged header
        raise RoutesError(f"expected routed experts as an .npy file of integers, found {len(raw)} bytes that are not ({error})") from error
    if stream.read(1):
        raise RoutesError("expected routed experts as one .npy file, found bytes after its end")
    return array

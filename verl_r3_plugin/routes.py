"""Routed experts of consecutive tokens: which experts each MoE layer picked, and whether that was captured at all.

The one in-memory form of routes. Foreign arrays are checked once, in `from_capture`; everything after that may rely on the invariants:
ids are in range and distinct within a row wherever `present` is true, and zero wherever it is false.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .compiled import kernels_for
from .errors import RoutesError
from .schema import RouteSchema


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """Routes of `len(self)` consecutive tokens.

    ids: [tokens, moe_layers, top_k], dtype `schema.id_dtype`; the order within a row is the capture's and carries no meaning.
    present: [tokens] bool; an absent row was not captured (its ids are zero and mean nothing).
    """

    schema: RouteSchema
    ids: np.ndarray
    present: np.ndarray

    def __post_init__(self) -> None:
        expected = (len(self.present), self.schema.num_moe_layers, self.schema.top_k)
        if self.ids.shape != expected or self.ids.dtype != self.schema.id_dtype:
            raise RoutesError(
                f"expected ids of shape {expected} (tokens, moe_layers, top_k) and dtype {self.schema.id_dtype}, "
                f"found {self.ids.shape} and {self.ids.dtype}"
            )
        if self.present.dtype != np.bool_ or self.present.ndim != 1:
            raise RoutesError(f"expected presence of dtype bool and one dimension, found {self.present.dtype} and {self.present.ndim}")

    @classmethod
    def absent(cls, schema: RouteSchema, tokens: int) -> RoutedExperts:
        """`tokens` rows of which none was captured."""
        ids = np.zeros((tokens, schema.num_moe_layers, schema.top_k), schema.id_dtype)
        return cls(schema, ids, np.zeros(tokens, np.bool_))

    @classmethod
    def from_capture(cls, schema: RouteSchema, array: np.ndarray) -> RoutedExperts:
        """Routes as a rollout engine returns them.

        array: [tokens, num_layers, top_k] integers, one column per decoder layer (vLLM; columns of dense layers are filler and
        are dropped), or [tokens, moe_layers, top_k] (vLLM 0.21, and models without dense layers).

        A row with an id out of range or a duplicate id is absent. A MoE layer that is zero in every row means that nothing was
        captured there (some versions and kernels do this silently), so every row of the array is absent; with top-1 routing
        that is indistinguishable from expert 0 and is taken at its word.
        """
        array = np.asarray(array)
        if array.ndim != 3 or array.dtype.kind not in "iu":
            raise RoutesError(
                f"expected integer routes of shape [tokens, layers, {schema.top_k}], found {array.dtype} of shape {array.shape}"
            )
        tokens, layers, top_k = array.shape
        if top_k != schema.top_k or layers not in (schema.num_layers, schema.num_moe_layers):
            raise RoutesError(
                f"expected routes of {schema.num_layers} layers (or {schema.num_moe_layers} MoE layers) and top-{schema.top_k}, "
                f"found {layers} layers and top-{top_k}; is this the model that the rollout engine serves?"
            )
        columns = np.array(schema.moe_layers if layers == schema.num_layers else range(layers), np.int64)
        ids = np.empty((tokens, len(columns), top_k), schema.id_dtype)
        present = np.empty(tokens, np.bool_)
        if kernels := kernels_for(tokens * len(columns)):
            # One layout and byte order, writable: numba compiles the loop anew for every other.
            array = np.require(array, array.dtype.newbyteorder("="), ["C", "W"])
            kernels.take_valid(array, columns, schema.num_experts, ids, present)
        else:
            array = array[:, columns]
            present[:] = valid_rows(array, schema.num_experts)
            ids[:] = array
            ids[~present] = 0
        # No check of its own for layers that are zero in every row: with a top-k of two and more that is a duplicate in each.
        return cls(schema, ids, present)

    @classmethod
    def join(cls, parts: Sequence[RoutedExperts]) -> RoutedExperts:
        """Rows of `parts`, one after another; all must have the same schema."""
        if not parts:
            raise RoutesError("expected at least one part to join, found none")
        schema = parts[0].schema
        for part in parts[1:]:
            if part.schema != schema:
                raise RoutesError(f"expected parts of one schema, found {schema} and {part.schema}")
        return cls(schema, np.concatenate([p.ids for p in parts]), np.concatenate([p.present for p in parts]))

    def __len__(self) -> int:
        return len(self.present)

    def __getitem__(self, rows: slice) -> RoutedExperts:
        return RoutedExperts(self.schema, self.ids[rows], self.present[rows])

    def select_layers(self, ordinals: Sequence[int]) -> RoutedExperts:
        """Only the MoE layers at these positions of `schema.moe_layers`."""
        ordinals = list(ordinals)
        return RoutedExperts(self.schema.select_layers(ordinals), np.ascontiguousarray(self.ids[:, ordinals]), self.present)

    def drop(self, rows: np.ndarray) -> RoutedExperts:
        """The same routes with `rows` (bool mask or indices) absent."""
        present = self.present.copy()
        present[rows] = False
        return RoutedExperts(self.schema, np.where(present[:, None, None], self.ids, 0), present)

    def equal_rows(self, other: RoutedExperts) -> np.ndarray:
        """[tokens] bool: both rows present and equal as sets in every layer."""
        if self.schema != other.schema or len(self) != len(other):
            raise RoutesError(
                f"expected routes of the same schema and length, found {len(self)} rows of {self.schema} "
                f"and {len(other)} rows of {other.schema}"
            )
        same = (np.sort(self.ids, axis=2) == np.sort(other.ids, axis=2)).all(axis=(1, 2))
        return same & self.present & other.present


def valid_rows(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """[tokens] bool: every id of the row within 0..num_experts-1 and no id twice in one layer. ids: [tokens, layers, top_k]."""
    if len(ids) and (kernels := kernels_for(ids.size // ids.shape[2])):
        good = np.empty(len(ids), np.bool_)
        kernels.valid_rows(np.require(ids, requirements=["C", "W"]), num_experts, good)
        return good
    ordered = np.sort(ids, axis=2)
    good = (ordered[..., 1:] != ordered[..., :-1]).all(axis=(1, 2))
    return good & (ordered[..., 0] >= 0).all(axis=1) & (ordered[..., -1] < num_experts).all(axis=1)

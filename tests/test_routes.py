"""Foreign arrays are checked where they come in: what was not captured, or cannot be right, is absent and never an all-zero row."""

import base64
import io

import numpy as np
import pytest

from verl_r3_plugin.capture import VllmCapture
from verl_r3_plugin.errors import RoutesError, SchemaError
from verl_r3_plugin.routes import RoutedExperts
from verl_r3_plugin.schema import RouteSchema

SCHEMA = RouteSchema(16, 3, 4, (1, 3))


def capture(rows=6, dtype=np.uint8):
    array = np.random.default_rng(0).random((rows, 4, 16)).argsort(axis=2)[..., :3].astype(dtype)
    array[:, [0, 2]] = 0
    return array


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return base64.b64encode(stream.getvalue()).decode()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32, np.int64])
def test_dense_columns_are_dropped_and_ids_are_narrow(dtype):
    array = capture(dtype=dtype)
    routes = RoutedExperts.from_capture(SCHEMA, array)
    assert routes.ids.dtype == np.uint8
    assert np.array_equal(routes.ids, array[:, [1, 3]])
    assert routes.present.all()


def test_an_array_of_moe_layers_alone_is_taken_too():
    assert RoutedExperts.from_capture(SCHEMA, capture()[:, [1, 3]]).equal_rows(RoutedExperts.from_capture(SCHEMA, capture())).all()


def test_ids_above_255_and_above_511_survive():
    schema = RouteSchema(600, 2, 1, (0,))
    routes = RoutedExperts.from_capture(schema, np.array([[[300, 599]], [[44, 87]]], np.uint16))
    assert routes.ids.tolist() == [[[300, 599]], [[44, 87]]]


@pytest.mark.parametrize("bad", [[3, 3, 5], [3, 5, 16], [3, 5, -1], [0, 0, 0]])
@pytest.mark.parametrize("rows", [6, 5000])
def test_a_row_that_no_router_can_have_picked_is_absent(bad, rows):
    array = capture(rows, np.int32)
    array[2, 3] = bad
    routes = RoutedExperts.from_capture(SCHEMA, array)
    assert routes.present.tolist() == [row != 2 for row in range(rows)]
    assert not routes.ids[2].any()


def test_a_layer_of_zeros_means_that_nothing_was_captured():
    array = capture()
    array[:, 1] = 0
    assert not RoutedExperts.from_capture(SCHEMA, array).present.any()


def test_with_top_1_expert_zero_is_taken_at_its_word():
    schema = RouteSchema(4, 1, 1, (0,))
    assert RoutedExperts.from_capture(schema, np.zeros((3, 1, 1), np.uint8)).present.all()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 4)), "expected integer routes"),
        (np.zeros((2, 4, 3)), "found float64"),
        (np.zeros((2, 5, 3), np.uint8), "found 5 layers and top-3"),
        (np.zeros((2, 4, 2), np.uint8), "found 4 layers and top-2"),
    ],
)
def test_an_array_of_another_shape_is_refused(array, message):
    with pytest.raises(RoutesError, match=message):
        RoutedExperts.from_capture(SCHEMA, array)


def test_routes_are_equal_as_sets_and_only_where_both_are_present():
    one = RoutedExperts.from_capture(SCHEMA, capture())
    turned = RoutedExperts(SCHEMA, np.ascontiguousarray(one.ids[..., ::-1]), one.present)
    assert one.equal_rows(turned.drop(np.array([4]))).tolist() == [True] * 4 + [False, True]
    other = turned.ids.copy()
    other[0, 1, 0] = next(n for n in range(16) if n not in other[0, 1])
    assert one.equal_rows(RoutedExperts(SCHEMA, other, one.present)).tolist() == [False] + [True] * 5


def test_routes_of_two_schemas_are_not_joined_or_compared():
    one, two = RoutedExperts.absent(SCHEMA, 2), RoutedExperts.absent(RouteSchema(16, 3, 4, (1, 2)), 2)
    with pytest.raises(RoutesError):
        RoutedExperts.join([one, two])
    with pytest.raises(RoutesError):
        one.equal_rows(two)
    with pytest.raises(RoutesError, match="at least one part"):
        RoutedExperts.join([])


def test_ids_of_another_dtype_or_shape_are_no_routes():
    with pytest.raises(RoutesError, match="expected ids of shape"):
        RoutedExperts(SCHEMA, np.zeros((2, 2, 3), np.int64), np.zeros(2, np.bool_))
    with pytest.raises(RoutesError, match="expected presence"):
        RoutedExperts(SCHEMA, np.zeros((2, 2, 3), np.uint8), np.zeros(2, np.int8))


@pytest.mark.parametrize("payload", [npy(capture()), npy(capture()).encode(), capture()])
def test_vllms_payload_is_read(payload):
    assert VllmCapture().routes(SCHEMA, payload).equal_rows(RoutedExperts.from_capture(SCHEMA, capture())).all()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ("***", "base64"),
        (npy(capture())[:-8], "npy"),
        (base64.b64encode(b"not an array").decode(), "npy"),
        (base64.b64encode(base64.b64decode(npy(capture())) + b"x").decode(), "bytes after its end"),
        (base64.b64encode(b"\x93NUMPY\x01\x00").decode(), "npy"),
        (12, "found int"),
        (None, "found NoneType"),
        ([[1]], "found list"),
    ],
)
def test_a_payload_that_is_no_array_is_refused_with_the_reason(payload, message):
    with pytest.raises(RoutesError, match=message):
        VllmCapture().routes(SCHEMA, payload)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 1, (0,)), "experts"),
        ((70_000, 1, 1, (0,)), "experts"),
        ((4, 5, 1, (0,)), "top-k"),
        ((4, 0, 1, (0,)), "top-k"),
        ((4, 2, 3, ()), "dense model has no router"),
        ((4, 2, 3, (2, 1)), "ascending"),
        ((4, 2, 3, (0, 3)), "below 3"),
    ],
)
def test_a_schema_that_no_model_has_is_refused(arguments, message):
    with pytest.raises(SchemaError, match=message):
        RouteSchema(*arguments)

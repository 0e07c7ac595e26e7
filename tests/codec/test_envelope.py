"""Any valid routes survive the way through bytes; any damage is noticed, each kind as an error of its own."""

import struct
from math import comb

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_r3_plugin import codec
from verl_r3_plugin.errors import CodecError
from verl_r3_plugin.routes import RoutedExperts
from verl_r3_plugin.schema import RouteSchema

ENCODINGS = ("set", "packed", "raw")


def random_routes(schema, rows, seed=0, absent=0.0):
    random = np.random.default_rng(seed)
    ids = random.random((rows, schema.num_moe_layers, schema.num_experts)).argsort(axis=2)[..., : schema.top_k]
    present = random.random(rows) >= absent
    return RoutedExperts(schema, np.where(present[:, None, None], ids, 0).astype(schema.id_dtype), present)


@st.composite
def routes(draw):
    experts = draw(st.integers(1, 1024))
    top_k = draw(st.integers(1, min(16, experts)))
    layers = draw(st.integers(1, 6))
    moe = draw(st.sets(st.integers(0, layers - 1), min_size=1))
    schema = RouteSchema(experts, top_k, layers, tuple(sorted(moe)))
    return random_routes(schema, draw(st.integers(0, 12)), draw(st.integers(0, 999)), draw(st.sampled_from([0.0, 0.4, 1.0])))


def encode(given_routes, encoding="set", start=0):
    return codec.encode(given_routes, start=start, token_count=start + len(given_routes) + 1, token_hash=7, encoding=encoding)


def same(one, other, ordered):
    if ordered:
        return np.array_equal(one.ids, other.ids) and np.array_equal(one.present, other.present)
    return np.array_equal(np.sort(one.ids, axis=2), np.sort(other.ids, axis=2)) and np.array_equal(one.present, other.present)


@settings(max_examples=150, deadline=None)
@given(routes=routes(), encoding=st.sampled_from(ENCODINGS))
def test_any_valid_routes_survive(routes, encoding):
    found = codec.decode(encode(routes, encoding), schema=routes.schema)
    assert found.schema == routes.schema
    assert same(found, routes, ordered=encoding != "set")


@settings(max_examples=80, deadline=None)
@given(routes=routes(), encoding=st.sampled_from(ENCODINGS), data=st.data())
def test_decoding_some_rows_and_layers_equals_cutting_the_whole(routes, encoding, data):
    blob = encode(routes, encoding)
    whole = codec.decode(blob)
    rows = np.array(data.draw(st.lists(st.integers(0, max(0, len(routes) - 1)), max_size=8 if len(routes) else 0)), np.int64)
    layers = sorted(data.draw(st.sets(st.integers(0, routes.schema.num_moe_layers - 1), min_size=1)))
    part = codec.decode(blob, rows=rows, layers=layers)
    assert np.array_equal(part.ids, whole.ids[rows][:, layers])
    assert np.array_equal(part.present, whole.present[rows])
    assert part.schema == routes.schema.select_layers(layers)


@settings(max_examples=150, deadline=None)
@given(routes=routes(), encoding=st.sampled_from(ENCODINGS), data=st.data())
def test_any_flipped_byte_is_noticed(routes, encoding, data):
    blob = bytearray(encode(routes, encoding))
    position = data.draw(st.integers(0, len(blob) - 1))
    blob[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CodecError):
        codec.decode(bytes(blob))


@settings(max_examples=60, deadline=None)
@given(routes=routes(), data=st.data())
def test_any_truncation_is_noticed(routes, data):
    blob = encode(routes)
    with pytest.raises(CodecError):
        codec.decode(blob[: data.draw(st.integers(0, len(blob) - 1))])


@pytest.mark.parametrize(
    ("experts", "top_k", "layers", "most"),
    [(256, 8, 40, 250), (128, 8, 48, 255), (512, 10, 48, 1000), (1024, 16, 3, 1000), (64, 6, 27, 1000), (3, 1, 2, 1000), (8, 8, 2, 1000)],
)
def test_a_set_takes_exactly_the_bits_that_tell_it_apart(experts, top_k, layers, most):
    schema = RouteSchema(experts, top_k, layers, tuple(range(layers)))
    bits = (comb(experts, top_k) - 1).bit_length()
    rows = 64
    header = codec.read_header(encode(random_routes(schema, rows)))
    assert header.body_bytes == rows * layers * bits // 8
    assert header.body_bytes / rows <= most


@pytest.mark.parametrize("experts", [8, 128, 256, 257, 512, 1024])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_the_first_and_the_last_set_survive(experts, top_k):
    schema = RouteSchema(experts, top_k, 1, (0,))
    ids = np.stack([np.arange(top_k), np.arange(experts - top_k, experts)])[:, None].astype(schema.id_dtype)
    found = codec.decode(encode(RoutedExperts(schema, ids, np.ones(2, np.bool_))))
    assert np.array_equal(np.sort(found.ids, axis=2), ids)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)])
def test_every_kind_of_bytes_is_taken(kind):
    given_routes = random_routes(RouteSchema(16, 2, 2, (0, 1)), 5)
    assert same(codec.decode(kind(encode(given_routes))), given_routes, ordered=False)


def test_the_header_tells_what_the_envelope_holds():
    schema = RouteSchema(32, 4, 6, (1, 2, 5))
    given_routes = random_routes(schema, 20, absent=0.3)
    blob = codec.encode(given_routes, start=4, token_count=99, token_hash=123)
    header = codec.read_header(blob)
    present = int(given_routes.present.sum())
    assert (header.schema, header.start, header.rows, header.present_rows) == (schema, 4, 20, present)
    assert (header.token_count, header.token_hash, header.encoding, header.total_bytes) == (99, 123, "set", len(blob))


SCHEMA = RouteSchema(12, 3, 4, (0, 2))


def rewritten(change, rows=5, encoding="set", absent=0.0):
    """An envelope with `change` applied to its bytes and the checksum made to fit again."""
    blob = bytearray(encode(random_routes(SCHEMA, rows, absent=absent), encoding))
    blob = bytearray(change(blob) or blob)
    blob[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(blob[:-8])))
    return bytes(blob)


def put(offset, value, form="B"):
    def change(blob):
        struct.pack_into("<" + form, blob, offset, value)

    return change


HEADER = 48


@pytest.mark.parametrize(
    ("fault", "change"),
    [
        (codec.BadMagic, put(0, ord("X"))),
        (codec.UnsupportedVersion, put(4, 2)),
        (codec.BadHeader, put(5, 3)),
        (codec.BadHeader, put(14, 1, "H")),
        (codec.BadHeader, put(7, 13)),
        (codec.BadHeader, put(8, 0, "I")),
        (codec.BadHeader, put(16, 2, "I")),
        (codec.BadHeader, put(20, 6, "I")),
        (codec.BadHeader, put(24, 4, "I")),
        (codec.BadHeader, put(28, 4, "I")),
        (codec.UnknownEncoding, put(HEADER, ord("z"))),
        (codec.BadHeader, put(HEADER, 0xC3)),
        (codec.BadHeader, put(HEADER + 3, 0)),
        (codec.BadHeader, put(HEADER + 3, 0b10101)),
        (codec.TruncatedEnvelope, put(40, 2**40, "Q")),
        (codec.TruncatedEnvelope, put(20, 2**31, "I")),
        (codec.TrailingBytes, put(40, 1, "Q")),
        (codec.RankOutOfRange, put(HEADER + 4, 0xFF)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_kind_of_damage_is_an_error_of_its_own(fault, change):
    # Rows that announce more bytes are only looked for where presence is a bitmap.
    absent = 0.4 if fault is codec.TruncatedEnvelope else 0.0
    with pytest.raises(fault):
        codec.decode(rewritten(change, absent=absent))


def test_a_changed_byte_under_the_old_checksum_is_a_checksum_mismatch():
    blob = bytearray(encode(random_routes(SCHEMA, 5)))
    blob[HEADER + 5] ^= 1
    with pytest.raises(codec.ChecksumMismatch):
        codec.decode(bytes(blob))


def test_trailing_bytes_are_refused():
    with pytest.raises(codec.TrailingBytes):
        codec.decode(encode(random_routes(SCHEMA, 5)) + b"\0")


def test_bits_after_the_last_field_are_refused():
    # 5 rows x 2 layers x 8 bits fill bytes exactly; 3 experts of which 1 take 2 bits, so that 5 rows leave bits over.
    schema = RouteSchema(3, 1, 1, (0,))
    blob = bytearray(encode(random_routes(schema, 5)))
    blob[-9] |= 0x80
    blob[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(blob[:-8])))
    with pytest.raises(codec.NonzeroPadding):
        codec.decode(bytes(blob))


@pytest.mark.parametrize("encoding", ["raw", "packed"])
def test_a_stored_duplicate_is_out_of_range(encoding):
    blob = rewritten(
        lambda b: b.__setitem__(slice(HEADER + len(encoding) + 1, -8), b"\0" * len(b[HEADER + len(encoding) + 1 : -8])), encoding=encoding
    )
    with pytest.raises(codec.RankOutOfRange):
        codec.decode(blob)


def test_routes_of_another_model_are_refused_with_both_named():
    blob = encode(random_routes(SCHEMA, 2))
    with pytest.raises(codec.SchemaMismatch, match=r"top-3 of 12 experts in MoE layers 0,3 of 4, found .* MoE layers 0,2 of 4"):
        codec.decode(blob, schema=RouteSchema(12, 3, 4, (0, 3)))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_row_with_an_id_twice_cannot_be_encoded(encoding):
    ids = np.array([[[1, 2, 3], [4, 4, 5]]], np.uint8)
    with pytest.raises(CodecError, match="must be absent"):
        encode(RoutedExperts(SCHEMA, ids, np.ones(1, np.bool_)), encoding)


@pytest.mark.parametrize("rows", [np.array([5]), np.array([-1]), np.array([0.5]), np.ones(3, np.bool_), np.zeros((1, 1), np.int64)])
def test_rows_that_are_not_there_are_refused(rows):
    with pytest.raises(CodecError):
        codec.decode(encode(random_routes(SCHEMA, 5)), rows=rows)


def test_rows_beyond_the_trajectory_cannot_be_encoded():
    with pytest.raises(CodecError, match="expected rows within a trajectory of 4 tokens, found rows 0 to 5"):
        codec.encode(random_routes(SCHEMA, 5), token_count=4, token_hash=0)


def test_the_token_hash_depends_on_order_and_not_on_the_dtype():
    assert codec.token_hash([1, 2, 3]) == codec.token_hash(np.array([1, 2, 3], np.int32)) != codec.token_hash([1, 3, 2])
    with pytest.raises(CodecError, match="integer token ids"):
        codec.token_hash([1.5])

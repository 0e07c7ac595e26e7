"""The compiled loops and numpy give the same bytes and the same rows, on inputs large enough that the compiled ones are used."""

import os
import subprocess
import sys

import numpy as np
import pytest

from verl_r3_plugin import codec
from verl_r3_plugin.codec.combinations import combinations
from verl_r3_plugin.errors import CodecError
from verl_r3_plugin.routes import RoutedExperts
from verl_r3_plugin.schema import RouteSchema

pytest.importorskip("numba")

CODE = """
import sys, numpy as np
from verl_r3_plugin import codec, compiled
from verl_r3_plugin.routes import RoutedExperts
from verl_r3_plugin.schema import RouteSchema
import os
for experts, top_k in ((8, 2), (64, 6), (256, 8), (512, 10), (1024, 16), (64, 60)):
    schema = RouteSchema(experts, top_k, 5, (0, 1, 2, 4))
    raw = np.random.default_rng(experts).random((1500, 5, experts)).argsort(axis=2)[..., :top_k].astype(schema.id_dtype)
    raw[7, 2] = raw[7, 2, 0]
    routes = RoutedExperts.from_capture(schema, raw)
    assert routes.present.sum() == 1499
    for encoding in ("set", "packed", "raw"):
        blob = codec.encode(routes, token_count=1501, token_hash=0, encoding=encoding)
        found = codec.decode(blob)
        assert found.equal_rows(routes)[routes.present].all()
        sys.stdout.write(blob.hex() + "\\n" + found.ids.tobytes().hex() + "\\n")
assert (compiled.kernels_for(1 << 20) is None) == (os.environ.get("VERL_R3_NUMBA") == "0")
"""


def test_compiled_and_numpy_bytes_are_the_same():
    outputs = []
    for switch in ("0", "1"):
        env = os.environ | {"VERL_R3_NUMBA": switch}
        done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert len(outputs[0]) > 1_000_000
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(("experts", "top_k"), [(10, 3), (40, 2), (7, 7), (9, 1)])
def test_ranks_are_a_bijection(experts, top_k):
    table = combinations(experts, top_k)
    ranks = np.arange(table.count, dtype=np.uint64)
    ids = table.unrank(ranks, None, np.dtype(np.uint8))
    assert len({tuple(row) for row in ids.tolist()}) == table.count
    assert (table.rank(ids[:, ::-1])[0] == ranks).all()


def test_a_duplicate_among_many_rows_is_found_by_the_compiled_loop():
    schema = RouteSchema(256, 8, 4, (0, 1, 2, 3))
    ids = np.random.default_rng(0).random((3000, 4, 256)).argsort(axis=2)[..., :8].astype(np.uint8)
    ids[2999, 3, 7] = ids[2999, 3, 0]
    with pytest.raises(CodecError, match="must be absent"):
        codec.encode(RoutedExperts(schema, ids, np.ones(3000, np.bool_)), token_count=3001, token_hash=0)


def test_more_than_128_bits_a_set_are_refused_with_the_key():
    with pytest.raises(CodecError, match=r"custom\.r3\.codec=packed"):
        combinations(1024, 64)

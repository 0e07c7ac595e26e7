import json

import numpy as np
import pytest
from typer.testing import CliRunner

from verl_r3_plugin import codec
from verl_r3_plugin.cli import app
from verl_r3_plugin.errors import CodecError
from verl_r3_plugin.routes import RoutedExperts
from verl_r3_plugin.schema import RouteSchema

SCHEMA = RouteSchema(16, 2, 3, (0, 2))


def envelope(rows, start=0, absent=()):
    ids = np.array([[[3, 1], [5, 4]]] * rows, np.uint8)
    routes = RoutedExperts(SCHEMA, ids, np.ones(rows, np.bool_)).drop(np.array(absent, np.int64))
    return codec.encode(routes, start=start, token_count=start + rows + 1, token_hash=255)


def run(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)], catch_exceptions=False)


def test_each_envelope_of_a_file_is_described(tmp_path):
    file = tmp_path / "routes.r3"
    file.write_bytes(envelope(4, absent=[1]) + envelope(2, start=7))
    one, two = json.loads(run(file, "--json").stdout)
    assert (one["experts"], one["top_k"], one["MoE layers"], one["encoding"]) == (16, 2, "2 of 3 (0, 2)", "set")
    assert (one["present"], one["coverage"], one["tokens"], one["token hash"]) == (3, 0.75, 5, "00000000000000ff")
    assert one["first rows"] == ["token 0: [1, 3]  [4, 5]", "token 1: absent", "token 2: [1, 3]  [4, 5]"]
    assert two["rows"] == "2, of tokens 7 to 8"
    assert "token 1: absent" in run(file).stdout


def test_a_gateways_answer_is_described(tmp_path):
    wire = pytest.importorskip("verl_r3_plugin.hosts.agentlightning.wire")
    file = tmp_path / "answer"
    turns = [wire.Turn(-1, 0, 0, 4, 9, 3, envelope(3)), wire.Turn(0, 3, 3, 6, 8, 3, b"", "no routes were returned")]
    file.write_bytes(wire.pack(turns)[0])
    one, two = json.loads(run(file, "--json").stdout)
    assert (one["turn"], one["model version"], one["present"]) == (0, 3, 3)
    assert (two["continues turn"], two["routes"], two["reason"]) == (0, "none", "no routes were returned")


@pytest.mark.parametrize("content", [b"hello", envelope(3)[:-1], envelope(3) + b"R3"])
def test_a_file_that_is_none_is_refused(tmp_path, content):
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(CodecError, match="expected"):
        run(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CodecError, match=r"found none at .*nothing"):
        run(tmp_path / "nothing")

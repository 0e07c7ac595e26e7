"""Another package adds an encoding, a capture source and a replay mode, and they are used like the built-in ones."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pluggy
import pytest

from verl_r3_plugin import builtins, hookspecs, plugins
from verl_r3_plugin.errors import ConfigError

ROOT = Path(__file__).parents[1]

PACKAGE = {
    "pyproject.toml": """
        [build-system]
        requires = ["hatchling"]
        build-backend = "hatchling.build"
        [project]
        name = "r3-extra"
        version = "1.0"
        [project.entry-points.verl_r3_plugin]
        extra = "r3_extra"
    """,
    "r3_extra.py": '''
        """An encoding of one byte an id, a source of plain lists, and a replay mode that replays nothing."""
        import contextlib

        import numpy as np

        from verl_r3_plugin.hookspecs import hookimpl
        from verl_r3_plugin.routes import RoutedExperts


        class Bytes:
            name = "bytes"

            def encode(self, ids, schema):
                return ids.astype(np.uint8).tobytes()

            def decode(self, body, rows_total, schema, rows, layers):
                table = np.frombuffer(bytes(body), np.uint8).reshape(rows_total, schema.num_moe_layers, schema.top_k)
                return table[rows[:, None], layers].astype(schema.id_dtype)


        class Lists:
            name = "lists"

            def routes(self, schema, payload):
                return RoutedExperts.from_capture(schema, np.asarray(payload))


        class Session:
            def __init__(self, schema):
                self.schema = schema

            @contextlib.contextmanager
            def step(self, *, statistics=False):
                yield

            def layers(self, chunk):
                return range(self.schema.num_moe_layers)

            def load(self, chunk, routes):
                chunk.append(routes)

            def statistics(self):
                return {}

            def detach(self):
                pass


        class Nothing:
            name = "nothing"

            def check(self, model_config, schema):
                return []

            def attach(self, chunks, schema):
                return Session(schema)


        @hookimpl
        def r3_encodings():
            return [Bytes()]


        @hookimpl
        def r3_capture_sources():
            return [Lists()]


        @hookimpl
        def r3_replay_modes():
            return [Nothing()]
    ''',
}

USE = """
    import json
    import numpy as np
    from verl_r3_plugin import codec, field, plugins
    from verl_r3_plugin.replay.local import LocalRoutes
    from verl_r3_plugin.routes import RoutedExperts
    from verl_r3_plugin.schema import RouteSchema
    from verl_r3_plugin.trajectory import TrajectoryBuilder

    schema = RouteSchema(16, 2, 3, (0, 2))
    payload = [[[1, 2], [0, 0], [3, 4]], [[5, 6], [0, 0], [7, 8]], [[9, 10], [0, 0], [11, 12]]]
    builder = TrajectoryBuilder(schema)
    builder.add_turn([1, 2], [3, 4], plugins.capture_source("lists").routes(schema, payload))
    blob = field.pack(builder.trajectories()[0], encoding="bytes")
    session = plugins.replay_mode("nothing").attach([], schema)
    chunk = []
    with session.step():
        session.load(chunk, LocalRoutes.gather([blob], [np.array([1, 2, 3, 4])], np.arange(4), session.layers(chunk), schema))
    print(json.dumps({
        "encoding": codec.read_header(blob).encoding,
        "ids": chunk[0].ids[:, :3].tolist(),
        "names": [plugins.names(hook) for hook in ("r3_encodings", "r3_capture_sources", "r3_replay_modes")],
    }))
"""


@pytest.mark.megatron
@pytest.mark.slow
def test_an_installed_package_adds_all_three_kinds_and_they_are_used(tmp_path):
    source, target = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name, text in PACKAGE.items():
        (source / name).write_text(textwrap.dedent(text).lstrip())
    uv = ROOT / ".tools" / "bin" / "uv"
    install = [str(uv)] if uv.exists() else [sys.executable, "-m", "uv"]
    options = ["pip", "install", "-q", "--python", sys.executable, "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([*install, *options, str(source)], check=True)
    env = os.environ | {"PYTHONPATH": str(target)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(USE)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["encoding"] == "bytes"
    assert found["ids"] == [[[1, 2], [5, 6], [9, 10]], [[3, 4], [7, 8], [11, 12]]]
    assert found["names"] == [["bytes", "packed", "raw", "set"], ["lists", "vllm"], ["megatron", "nothing"]]


class Another:
    """A plugin that offers what it is told to."""

    def __init__(self, *encodings):
        self.encodings = encodings

    @hookspecs.hookimpl
    def r3_encodings(self):
        return list(self.encodings)


class Named:
    def __init__(self, name):
        self.name = name


@pytest.fixture
def manager(monkeypatch):
    fresh = pluggy.PluginManager(hookspecs.PROJECT)
    fresh.add_hookspecs(hookspecs)
    fresh.register(builtins, name="builtin")
    monkeypatch.setattr(plugins, "manager", lambda: fresh)
    return fresh


def test_an_unknown_name_is_answered_with_the_nearest_one_and_the_key(manager):
    with pytest.raises(ConfigError, match=r"custom\.r3\.codec: expected one of \['packed', 'raw', 'set'\], found 'packd'; .* 'packed'"):
        plugins.encoding("packd")


def test_two_plugins_with_one_name_are_both_named(manager):
    manager.register(Another(Named("set")), name="impostor")
    with pytest.raises(ConfigError, match=r"'set' is offered by plugins '(impostor|builtin)' and '(impostor|builtin)'"):
        plugins.encoding("set")


def test_a_plugin_that_does_not_load_is_named_with_the_reason(monkeypatch):
    class Broken:
        name, value = "broken", "no_such_module:thing"

        def load(self):
            raise ModuleNotFoundError("No module named 'no_such_module'")

    monkeypatch.setattr(plugins, "entry_points", lambda group: [Broken()])
    with pytest.raises(ConfigError, match=r"plugin 'broken' \(no_such_module:thing\) .* No module named 'no_such_module'"):
        plugins.manager.__wrapped__()


def test_a_hook_that_nobody_knows_is_refused(monkeypatch):
    class Misspelt:
        @hookspecs.hookimpl
        def r3_encoding(self):
            return []

    class Entry:
        name, value = "misspelt", "somewhere"

        def load(self):
            return Misspelt()

    monkeypatch.setattr(plugins, "entry_points", lambda group: [Entry()])
    with pytest.raises(pluggy.PluginValidationError, match="r3_encoding"):
        plugins.manager.__wrapped__()

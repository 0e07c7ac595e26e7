"""The wheel as a user gets it: installed in a clean environment, with its few dependencies and nothing of the development set-up."""

import subprocess
import sys
import zipfile
from math import comb
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UV = ROOT / ".tools" / "bin" / "uv"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not UV.exists(), reason="uv comes with scripts/setup.sh, which was not run")]


def run(*command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory):
    """bin folder of an environment with the wheel alone."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    assert run(UV, "venv", "-q", "--python", sys.executable, folder).returncode == 0
    done = run(UV, "pip", "install", "-q", "--python", folder / "bin" / "python", wheel)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"verl_r3_plugin", "verl_r3_plugin-0.1.0.dist-info"}
    assert not [name for name in names if "shim" in name or "override" in name or name.endswith((".nbi", ".nbc", ".pyc"))]


def test_the_wheel_announces_its_entry_points(wheel):
    archive = zipfile.ZipFile(wheel)
    text = archive.read("verl_r3_plugin-0.1.0.dist-info/entry_points.txt").decode()
    for group in ("verl.plugins", "vllm.general_plugins", "verl_r3_plugin", "console_scripts"):
        assert f"[{group}]" in text


def test_a_clean_install_brings_few_packages_and_no_torch(clean):
    found = {line.split("==")[0].lower() for line in run(UV, "pip", "freeze", "--python", clean / "python").stdout.splitlines()}
    assert {"numpy", "pluggy", "xxhash", "typer", "rich"} <= found
    assert not found & {"torch", "verl", "vllm", "ray", "transformers", "numba"}
    assert len(found) < 20


def test_without_numba_or_torch_routes_are_encoded_and_decoded(clean):
    code = """
import sys, numpy as np
from verl_r3_plugin import codec
from verl_r3_plugin.routes import RoutedExperts
from verl_r3_plugin.schema import RouteSchema
schema = RouteSchema(512, 10, 2, (0, 1))
ids = np.random.default_rng(0).random((6000, 2, 512)).argsort(axis=2)[..., :10]
routes = RoutedExperts.from_capture(schema, ids)
blob = codec.encode(routes, token_count=6001, token_hash=0)
assert codec.decode(blob).equal_rows(routes).all()
assert not {'torch', 'numba'} & set(sys.modules)
print(len(blob))
"""
    done = run(clean / "python", "-c", code)
    assert done.returncode == 0, done.stderr
    body = 6000 * 2 * (comb(512, 10) - 1).bit_length() // 8
    assert body <= int(done.stdout) < body + 100


def test_the_command_answers_and_names_the_extra_that_is_missing(clean):
    assert run(clean / "verl-r3", "--version").stdout.strip() == "0.1.0"
    assert "gateway" in run(clean / "verl-r3", "--help").stdout
    for command, extra in (("gateway", "agentlightning"), ("demo", "demo")):
        done = run(clean / "verl-r3", command)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert f"pip install 'verl-r3-plugin[{extra}]'" in done.stderr

"""What the doctor is told about the installed VERL, without importing it."""

import subprocess
import sys

import pytest

from verl_r3_plugin.hosts.verl import facts as facts_of
from verl_r3_plugin.hosts.verl import marker

pytestmark = pytest.mark.verl


def test_every_seam_of_the_installed_verl_is_found():
    found = facts_of()
    assert found["version"] and found["problems"] == []
    assert found["needs_external_lib"] is marker.needed()
    assert found["engine"] == ("registry entry replaced" if marker.needed() else "registered for the vendor")
    assert "RayPPOTrainer (v0)" in found["trainers"]
    assert found["packing"][0] == "input_ids"


def test_reading_them_imports_no_verl():
    code = (
        "import sys\nfrom verl_r3_plugin.hosts.verl import facts\n"
        "facts(), facts()\nprint([m for m in ('verl', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_moved_seam_is_named(monkeypatch, tmp_path):
    from verl_r3_plugin.hosts.verl.seams import facts

    worker = tmp_path / "verl/workers"
    worker.mkdir(parents=True)
    (tmp_path / "verl/__init__.py").write_text("")
    (worker / "engine_workers.py").write_text("class ActorRolloutRefWorker:\n    def __init__(self, settings): ...\n")
    monkeypatch.setattr("verl_r3_plugin.hosts.verl.seams._root", lambda: tmp_path)
    problems = facts()["problems"]
    assert "verl.workers.engine_workers.ActorRolloutRefWorker.__init__(config)" in problems
    assert any("preprocess_thd_engine" in problem for problem in problems)

import json

import pytest

from verl_r3_plugin.cli.report import write_report
from verl_r3_plugin.errors import R3Error

STEP = {"step": 1, "reward": 0.25, "agreement": None, "k3_kl": {"live": 0.002, "replay": None}}


def test_a_page_is_made_of_what_a_run_measured_and_nothing_else(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(STEP | {"step": n}) for n in (1, 2)))
    page = write_report(tmp_path).read_text()
    assert page.count("<svg") == 2  # reward and k3 KL; nothing was measured for the other plots
    assert "<tr><th>k3_kl, live</th><td>0.002</td><td>0.002</td></tr>" in page
    assert "<tr><th>k3_kl, replay</th><td>-</td><td>-</td></tr>" in page
    assert "Routes were not compared" in page


def test_a_run_whose_routes_differ_says_so(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(STEP))
    (tmp_path / "summary.json").write_text(json.dumps({"routes_equal": False}))
    assert "to other experts than vLLM" in write_report(tmp_path).read_text()


@pytest.mark.parametrize(
    ("content", "message"), [(None, "found none"), ("", "at least one finished step"), ("{", "found a line that is not")]
)
def test_a_folder_without_a_run_is_refused_with_what_to_do(tmp_path, content, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(R3Error, match=message):
        write_report(tmp_path)

"""Replay on the real Megatron-core, in every layout that runs on a CPU and on every release that has the seam.

For each case a job of one to four processes (tests/support/replay_layouts.py) shows: given a model's own routes, losses and gradients are
bit-equal to the model without replay; given other routes, every router emits exactly those, and live routes where a row is absent; a
recompute uses what the forward used; nothing is left behind. The same measurements must fail where the slicing is wrong.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
WORKER = ROOT / "tests" / "support" / "replay_layouts.py"
OTHERS = [line.split("==")[1].strip() for line in (ROOT / "requirements/megatron-versions.txt").read_text().splitlines() if "==" in line]

UNIFORM = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
PAIRS = {**UNIFORM, "recompute_num_layers": 2}
BLOCK = {**UNIFORM, "recompute_method": "block"}
MOE = dict(recompute_granularity="selective", recompute_modules=["moe"])
SHARED = dict(moe_shared_expert_intermediate_size=16)
MOE_SHARED = dict(recompute_granularity="selective", recompute_modules=["moe", "shared_experts"], **SHARED)
SIGMOID = dict(moe_router_score_function="sigmoid")
BIAS = dict(SIGMOID, moe_router_enable_expert_bias=True)
ALL_TO_ALL = dict(moe_token_dispatcher_type="alltoall")


def case(name: str, *, wrong: str | None = None, bias: bool = False, order: str | None = None, **options) -> dict:
    layout = {key: options.pop(key) for key in ("tp", "pp", "ep", "vpp", "cp") if key in options}
    extra = {key: value for key, value in dict(wrong=wrong, bias=bias, order=order).items() if value}
    return {"name": name, "options": options, **layout, **extra}


ONE = [
    case("post-softmax"),
    case("pre-softmax", moe_router_pre_softmax=True),
    case("sigmoid", **SIGMOID),
    case("sigmoid with expert bias", bias=True, **BIAS),
    case("sqrtsoftplus", moe_router_score_function="sqrtsoftplus"),
    case("group limit", moe_router_num_groups=4, moe_router_group_topk=2, bias=True, **BIAS),
    case("scaling", moe_router_topk_scaling_factor=2.5, **SIGMOID),
    case("router in fp32", moe_router_dtype="fp32"),
    case("aux loss", moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01),
    case("sequence aux loss", moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.01),
    case("z loss", moe_z_loss_coeff=0.001),
    case("shared experts", **SHARED),
    case("top-1", moe_router_topk=1, moe_router_pre_softmax=True),
    case("all-to-all", **ALL_TO_ALL),
    case("interleaved dense layers", moe_layer_freq=[1, 0, 1, 0]),
    case("all layers MoE", moe_layer_freq=[1, 1, 1, 1]),
    case("full recompute, uniform", **UNIFORM),
    case("full recompute, uniform in pairs", **PAIRS),
    case("full recompute, block", **BLOCK),
    case("selective recompute, moe", **MOE),
    case("selective recompute, moe and shared experts", **MOE_SHARED),
]
TWO = [
    case("pp2", pp=2),
    case("pp2, full recompute", pp=2, **UNIFORM),
    case("pp2, selective recompute", pp=2, **MOE_SHARED),
    case("pp2 vpp2", pp=2, vpp=2),
    case("pp2 vpp2, full recompute", pp=2, vpp=2, **UNIFORM),
    case("pp2 vpp2, block recompute", pp=2, vpp=2, **BLOCK),
    case("pp2 vpp2, interleaved dense layers", pp=2, vpp=2, moe_layer_freq=[1, 0, 1, 0], **SIGMOID),
    case("ep2 allgather", ep=2),
    case("ep2 alltoall", ep=2, **ALL_TO_ALL),
    case("ep2 alltoall, full recompute", ep=2, **ALL_TO_ALL, **UNIFORM),
    case("tp2 sp", tp=2),
    case("tp2 sp ep2 alltoall", tp=2, ep=2, **ALL_TO_ALL),
    case("tp2 sp, selective recompute", tp=2, **MOE),
    case("tp2 sp, sigmoid with bias", tp=2, bias=True, **BIAS),
    case("cp2 zigzag", cp=2),
    case("cp2 contiguous", cp=2, order="contiguous"),
]
FOUR = [
    case("pp2 ep2 alltoall, recompute", pp=2, ep=2, **ALL_TO_ALL, **UNIFORM),
    case("pp2 vpp2 ep2 allgather", pp=2, vpp=2, ep=2),
    case("pp2 tp2 sp, recompute", pp=2, tp=2, **UNIFORM),
    case("pp2 vpp2 tp2 sp ep2 alltoall", pp=2, vpp=2, tp=2, ep=2, **ALL_TO_ALL),
    case("tp2 sp cp2 zigzag", tp=2, cp=2),
    case("tp2 sp ep4 alltoall", tp=2, ep=4, **ALL_TO_ALL),
    case("pp2 cp2 zigzag, recompute", pp=2, cp=2, **MOE),
    case("pp4", pp=4),
]
WRONG = [
    case(f"{layout}, {wrong}", wrong=wrong, **sizes)
    for wrong in ("off by one row", "dense layers counted", "micro-batches swapped", "batch first")
    for layout, sizes in {"pp2": dict(pp=2), "pp2 vpp2": dict(pp=2, vpp=2), "tp2 sp": dict(tp=2), "ep2": dict(ep=2)}.items()
]


def named(cases: list[dict], *names: str) -> list[dict]:
    found = [one for one in cases if one["name"] in names]
    assert len(found) == len(names)
    return found


ELSEWHERE = {
    1: named(
        ONE,
        "post-softmax",
        "pre-softmax",
        "sigmoid with expert bias",
        "full recompute, uniform",
        "selective recompute, moe and shared experts",
    ),
    2: named(TWO, "pp2 vpp2, full recompute", "ep2 allgather", "ep2 alltoall, full recompute", "tp2 sp", "cp2 zigzag"),
}
GROUPS = {("", 1): ONE, ("", 2): TWO + WRONG, ("", 4): FOUR}
GROUPS.update({(version, world): cases for version in OTHERS for world, cases in ELSEWHERE.items()})


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(version, processes, case name) -> one result a rank. Each group of cases runs once, when it is first asked for."""
    done: dict[tuple[str, int], list[dict]] = {}

    def of(version: str, world: int, name: str) -> list[dict]:
        if (version, world) not in done:
            done[version, world] = launch(version, world, GROUPS[version, world], tmp_path_factory.mktemp("layouts"))
        ranks = done[version, world]
        for rank in ranks:
            assert rank["version"].startswith(version)
            assert name in rank, f"did not run, since an earlier case failed: {[k for k, v in rank.items() if 'error' in v]}"
            assert "error" not in rank[name], rank[name]["error"]
        return [rank[name] for rank in ranks]

    return of


def launch(version: str, world: int, cases: list[dict], folder: Path) -> list[dict]:
    (folder / "cases.json").write_text(json.dumps(cases))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    if version:
        subprocess.run([ROOT / "scripts" / "megatron_versions.sh"], check=True, timeout=300)
        paths.insert(0, str(ROOT / ".cache" / "megatron" / version))
    shared = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    shared.update(WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    jobs, logs = [], []
    for rank in range(world):
        logs.append((folder / f"{rank}.log").open("w"))
        command = [sys.executable, str(WORKER), str(folder / "cases.json"), str(folder)]
        jobs.append(subprocess.Popen(command, env={**shared, "RANK": str(rank)}, stdout=logs[-1], stderr=subprocess.STDOUT))
    try:
        for job in jobs:
            job.wait(timeout=300)
    finally:
        for job, log in zip(jobs, logs, strict=True):
            job.kill()
            log.close()
    missing = [rank for rank in range(world) if not (folder / f"{rank}.json").exists()]
    assert not missing, "\n".join((folder / f"{rank}.log").read_text()[-3000:] for rank in missing)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def expect_right(found: list[dict]) -> None:
    for rank, result in enumerate(found):
        where = f"rank {rank}: {result}"
        assert result["own"], f"losses and gradients differ from the model without replay; {where}"
        assert result["agreement"] == 1.0, where
        assert result["given"], f"a router did not emit the given routes; {where}"
        assert result["again_equal"], f"a recompute used other routes than the forward; {where}"
        assert result.get("recompute_equal", True), f"gradients with and without recompute differ; {where}"
        assert result["waiting"] == 0, where
        assert result["cleared"], where
        assert result["other_model_untouched"], where


RIGHT = [(version, world, one["name"]) for (version, world), cases in GROUPS.items() for one in cases if "wrong" not in one]


@pytest.mark.parametrize(("version", "world", "name"), RIGHT, ids=[f"{v or 'current'}-{n}" for v, _, n in RIGHT])
def test_own_routes_are_bit_equal_and_other_routes_are_exact(results, version, world, name):
    expect_right(results(version, world, name))


@pytest.mark.parametrize("name", [one["name"] for one in WRONG])
def test_wrong_slicing_fails(results, name):
    found = results("", 2, name)
    assert not all(result["own"] for result in found)
    assert not all(result["given"] for result in found)
    with pytest.raises(AssertionError):
        expect_right(found)


def test_recompute_ran_the_routers_again(results):
    """Otherwise the cases with recompute would show nothing."""
    for world, name in ((1, "full recompute, uniform"), (1, "selective recompute, moe"), (2, "pp2 vpp2, full recompute")):
        for result in results("", world, name):
            assert set(result["recomputed"].values()) <= {4}
        assert any(result["recomputed"] for result in results("", world, name))

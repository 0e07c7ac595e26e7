"""New weights into a running vLLM: ours are right, and a push that leaves the server wrong is noticed."""

import httpx
import numpy as np
import pytest

from verl_r3_plugin.cli.demo import checkpoint
from verl_r3_plugin.schema import RouteSchema

pytestmark = [pytest.mark.vllm, pytest.mark.megatron, pytest.mark.slow]

SCHEMA = RouteSchema(32, 4, 6, (1, 2, 3, 4, 5))


@pytest.fixture(scope="module")
def trainer_of_other_weights():
    from verl_r3_plugin.cli.demo.trainer import Trainer

    return Trainer(checkpoint.random_weights(1), SCHEMA, 1e-3)


@pytest.fixture
def server(vllm_server):
    """The shared server; its weights are put back afterwards."""
    from verl_r3_plugin.cli.demo.servers import push_weights

    yield vllm_server
    push_weights(vllm_server[0], vllm_server[2])


def test_a_push_is_checked_against_the_trainer_and_a_missing_one_is_noticed(server, trainer_of_other_weights, tmp_path):
    from verl_r3_plugin.cli.demo.checks import PushFailed, check_push
    from verl_r3_plugin.cli.demo.servers import push_weights

    port, name, _ = server
    with pytest.raises(PushFailed, match="expected vLLM to compute with the new weights"):
        check_push(trainer_of_other_weights, port, name, seed=0)
    push_weights(port, checkpoint.make_checkpoint(tmp_path / "new", 1))
    assert check_push(trainer_of_other_weights, port, name, seed=0) < 0.02


def test_one_step_that_was_not_pushed_is_noticed(vllm_server):
    """The smallest wrong push there is: the server still has the weights of the step before."""
    from verl_r3_plugin.cli.demo.checks import PushFailed, check_push, probe_batch
    from verl_r3_plugin.cli.demo.loop import Options, _loss_config
    from verl_r3_plugin.cli.demo.trainer import Batch, Trainer

    port, name, _ = vllm_server
    trainer = Trainer(checkpoint.random_weights(0), SCHEMA, Options.learning_rate)
    assert check_push(trainer, port, name, seed=0) < 0.02
    tokens = probe_batch(5, 128)
    trained = [np.arange(len(ids)) >= 8 for ids in tokens]
    batch = Batch(tokens, trained, [np.zeros(len(ids)) for ids in tokens], [b""] * len(tokens))
    advantages = [np.where(mask, sign, 0.0) for mask, sign in zip(trained, (1.0, -1.0, 1.0, -1.0), strict=True)]
    trainer.update(batch, advantages, trainer.log_probs(batch, replay=False), _loss_config(), replay=False)
    with pytest.raises(PushFailed):
        check_push(trainer, port, name, seed=0)


def test_vllms_own_reload_answers_200_and_is_noticed_to_be_wrong(server, trainer_of_other_weights, tmp_path):
    from verl_r3_plugin.cli.demo.checks import PushFailed, check_push

    port, name, folder = server
    new = checkpoint.make_checkpoint(tmp_path / "new", 1)
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(new)}}
    answer = httpx.post(f"http://127.0.0.1:{port}/collective_rpc", json=call, timeout=120)
    assert answer.status_code == 200
    httpx.post(f"http://127.0.0.1:{port}/reset_prefix_cache", timeout=60).raise_for_status()
    with pytest.raises(PushFailed):
        check_push(trainer_of_other_weights, port, name, seed=0)

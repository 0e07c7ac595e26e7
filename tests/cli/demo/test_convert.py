import pytest
import torch
from safetensors.torch import load_file

from verl_r3_plugin.cli.demo import checkpoint, convert, megatron_cpu

pytestmark = [pytest.mark.megatron, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint.make_checkpoint(tmp_path_factory.mktemp("model"), 3)


@pytest.fixture(scope="module")
def model(folder):
    megatron_cpu.initialise()
    config = megatron_cpu.qwen3_moe_config(checkpoint.HF_CONFIG)
    model = megatron_cpu.build_gpt(config, vocab_size=128, max_sequence_length=64, rotary_base=checkpoint.HF_CONFIG["rope_theta"])
    convert.load_into(model, load_file(folder / "model.safetensors"), checkpoint.HF_CONFIG)
    return model.eval()


def test_the_converted_model_gives_the_logits_of_the_hugging_face_model(folder, model):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(40).expand(2, 40).contiguous()
    causal = torch.triu(torch.ones(40, 40, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids, positions, causal), reference(ids).logits, atol=2e-5, rtol=1e-5)


def test_weights_come_back_as_they_went_in(folder, model):
    before = load_file(folder / "model.safetensors")
    after = convert.weights_of(model, checkpoint.HF_CONFIG)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_missing_tensor_is_named(folder, model):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.mlp.experts.7.up_proj.weight"]
    with pytest.raises(KeyError, match=r"model\.layers\.3\.mlp\.experts\.7\.up_proj\.weight"):
        convert.load_into(model, weights, checkpoint.HF_CONFIG)

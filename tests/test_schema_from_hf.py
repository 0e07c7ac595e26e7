"""Which layers of a Hugging Face config have a router, in each way that configs say it."""

import pytest

from verl_r3_plugin.errors import SchemaError
from verl_r3_plugin.schema import RouteSchema

QWEN = {"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 6}


@pytest.mark.parametrize(
    ("config", "moe_layers"),
    [
        (QWEN, (0, 1, 2, 3, 4, 5)),
        ({**QWEN, "mlp_only_layers": [0, 3]}, (1, 2, 4, 5)),
        ({**QWEN, "decoder_sparse_step": 2}, (1, 3, 5)),
        ({**QWEN, "first_k_dense_replace": 3, "moe_layer_freq": 1}, (3, 4, 5)),
        ({**QWEN, "moe_layer_freq": [0, 1, 0, 1, 1, 1, 1]}, (1, 3, 4, 5)),
        ({**QWEN, "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse", "sparse"]}, (1, 2, 4, 5)),
        ({**QWEN, "moe_layers": [1, 5]}, (1, 5)),
        ({**QWEN, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}, (1, 2, 3, 4, 5)),
        ({**QWEN, "hybrid_override_pattern": "ME*EM-"}, (1, 3)),
    ],
)
def test_moe_layers_of_each_convention(config, moe_layers):
    assert RouteSchema.from_hf_config(config) == RouteSchema(128, 8, 6, moe_layers)


@pytest.mark.parametrize(
    ("experts", "top_k"),
    [("num_local_experts", "num_experts_per_tok"), ("n_routed_experts", "num_experts_per_tok"), ("moe_num_experts", "moe_k")],
)
def test_other_names_for_experts(experts, top_k):
    assert RouteSchema.from_hf_config({experts: 64, top_k: 6, "num_hidden_layers": 2}) == RouteSchema(64, 6, 2, (0, 1))


def test_a_multimodal_config_is_read_in_its_text_config_and_mtp_layers_have_no_row():
    config = {
        "model_type": "vl",
        "num_hidden_layers": 99,
        "text_config": {**QWEN, "mtp_num_hidden_layers": 1, "num_nextn_predict_layers": 1},
    }
    assert RouteSchema.from_hf_config(config) == RouteSchema(128, 8, 6, tuple(range(6)))


def test_a_dense_model_is_refused():
    with pytest.raises(SchemaError, match="dense model has no router"):
        RouteSchema.from_hf_config({"model_type": "llama", "num_hidden_layers": 4})


@pytest.mark.parametrize(
    "name", ["Qwen3MoeConfig", "DeepseekV3Config", "Glm4MoeConfig", "MixtralConfig", "Qwen3VLMoeConfig", "GptOssConfig"]
)
def test_real_config_classes(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name, None)
    if config is None:
        pytest.skip(f"this transformers has no {name}")
    schema = RouteSchema.from_hf_config(config())
    first = {"DeepseekV3Config": 3, "Glm4MoeConfig": 1}.get(name, 0)
    assert schema.moe_layers == tuple(range(first, schema.num_layers))
    assert schema.top_k < schema.num_experts

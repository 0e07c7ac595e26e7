"""A tiny Qwen3-MoE checkpoint from a seed, with a tokenizer and a chat template, in the files that a hub would hold.

Six layers, one of them dense, 32 experts, top-4. The initializer range is large, so that a random model routes decidedly and bfloat16
moves some tokens to other experts: the mismatch that replay removes.

The tokenizer knows whole words only and the template adds words at the end only. So whatever the model sampled, writing it out as text and
reading it in again gives the same tokens, and each turn's prompt begins with all tokens of the turns before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

NUMBERS = [str(n) for n in range(100)]
WORDS = "find a number that is even odd three multiple of yes no try again system user assistant tool the next please".split()
EOS, PAD = "<eos>", "<pad>"
ROLES = {"system": "<system>", "user": "<user>", "assistant": "<assistant>", "tool": "<tool>"}
VOCABULARY = [PAD, EOS, *ROLES.values(), *WORDS, *NUMBERS]
VOCAB_SIZE = 128

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

HF_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": VOCABULARY.index(EOS),
    "pad_token_id": VOCABULARY.index(PAD),
}


def make_checkpoint(folder: Path, seed: int) -> Path:
    """Config, weights, tokenizer and template in `folder`; made once, since the seed decides everything."""
    done = folder / "complete"
    if done.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": HF_CONFIG["eos_token_id"]}))
    save_weights(random_weights(seed), folder)
    save_tokenizer(folder)
    done.write_text("")
    return folder


def random_weights(seed: int, config: dict[str, Any] = HF_CONFIG) -> dict[str, torch.Tensor]:
    """{name in a Qwen3-MoE checkpoint: bfloat16 tensor}, normal with the config's initializer range; norms are one."""
    generator = torch.Generator().manual_seed(seed)
    hidden, heads, kv_heads, head = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * config["initializer_range"]).bfloat16()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    def mlp(prefix: str, size: int) -> dict[str, torch.Tensor]:
        shapes = {"gate_proj": (size, hidden), "up_proj": (size, hidden), "down_proj": (hidden, size)}
        return {f"{prefix}.{name}.weight": normal(*shape) for name, shape in shapes.items()}

    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.input_layernorm.weight": ones(hidden),
            f"{at}.post_attention_layernorm.weight": ones(hidden),
            f"{at}.self_attn.q_proj.weight": normal(heads * head, hidden),
            f"{at}.self_attn.k_proj.weight": normal(kv_heads * head, hidden),
            f"{at}.self_attn.v_proj.weight": normal(kv_heads * head, hidden),
            f"{at}.self_attn.o_proj.weight": normal(hidden, heads * head),
            f"{at}.self_attn.q_norm.weight": ones(head),
            f"{at}.self_attn.k_norm.weight": ones(head),
        }
        if layer in config["mlp_only_layers"]:
            weights |= mlp(f"{at}.mlp", config["intermediate_size"])
            continue
        weights[f"{at}.mlp.gate.weight"] = normal(config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            weights |= mlp(f"{at}.mlp.experts.{expert}", config["moe_intermediate_size"])
    weights["model.norm.weight"] = ones(hidden)
    weights["lm_head.weight"] = normal(config["vocab_size"], hidden)
    return weights


def save_weights(weights: dict[str, torch.Tensor], folder: Path) -> None:
    """`model.safetensors` in `folder`, replaced in one step."""
    from safetensors.torch import save_file

    temporary = folder / "model.safetensors.new"
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary, metadata={"format": "pt"})
    temporary.replace(folder / "model.safetensors")


def save_tokenizer(folder: Path) -> None:
    """A word-level tokenizer as a `tokenizer.json` with its chat template."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    filler = [f"w{n}" for n in range(VOCAB_SIZE - len(VOCABULARY))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate([*VOCABULARY, *filler])}, unk_token=PAD))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    # Role markers are ordinary words: a model that samples one writes it out, and it is read in as the same token.
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)

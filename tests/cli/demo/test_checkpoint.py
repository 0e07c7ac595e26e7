import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_r3_plugin.cli.demo import checkpoint

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    checkpoint.save_tokenizer(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def prompt(tokenizer, messages):
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    return list(found)


# Any token but padding and the end of a turn, which are never part of a message's text.
sampled = st.lists(st.integers(2, checkpoint.VOCAB_SIZE - 1), max_size=12)


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(sampled, st.booleans()), min_size=1, max_size=4))
def test_whatever_is_sampled_each_prompt_begins_with_all_tokens_before_it(tokenizer, turns):
    eos = tokenizer.eos_token_id
    messages = [{"role": "system", "content": "find a number"}, {"role": "user", "content": "even please"}]
    for ids, ended in turns:
        context = prompt(tokenizer, messages) + ids + ([eos] if ended else [])
        messages += [{"role": "assistant", "content": tokenizer.decode(ids)}, {"role": "tool", "content": "no 3 try again"}]
        assert prompt(tokenizer, messages)[: len(context)] == context


def test_the_same_seed_makes_the_same_weights_and_another_seed_others():
    one, same, other = (checkpoint.random_weights(seed)["lm_head.weight"] for seed in (1, 1, 2))
    assert one.equal(same)
    assert not one.equal(other)

"""Prefixes that nobody will train on give their memory back."""

from __future__ import annotations

import pytest

from rollplex.config import DataConfig
from rollplex.errors import StateError
from rollplex.models.policy import Policy
from rollplex.models.prompts import PromptBuilder
from rollplex.tasks.synthetic import Mixed
from rollplex.train.prefix_book import PrefixBook


@pytest.fixture
def prompts(tiny_model):
    loaded = tiny_model("qwen2_5_vl")
    data = DataConfig(task="mixed", image_size=56, num_rows=8)
    task, builder = Mixed(data, "train", 0), PromptBuilder(loaded.processor, loaded.model.config, data)
    return Policy(loaded.model), {number: builder.build(task.example(number)) for number in range(4)}


def test_prompts_that_are_not_kept_are_forgotten_and_released(prompts):
    policy, specs = prompts
    book = PrefixBook(policy, 1)  # one pack each
    book.compute(specs, "graph")
    packs = {number: book.place(number)[0] for number in specs}
    book.keep({1, 3})
    assert {number: pack.graph is None and not pack.keys for number, pack in packs.items()} == {
        0: True,
        1: False,
        2: True,
        3: False,
    }
    assert [book.trainable(number) for number in specs] == [False, True, False, True]
    with pytest.raises(StateError, match="rollout id 0"):
        book.place(0)


def test_a_pack_stays_as_long_as_one_of_its_prompts(prompts):
    policy, specs = prompts
    book = PrefixBook(policy, 10**6)  # all in one pack
    book.compute(specs, "graph")
    pack, _ = book.place(0)
    book.keep({2})
    assert book.trainable(2) and not pack.consumed
    book.keep(())
    assert pack.consumed and pack.graph is None

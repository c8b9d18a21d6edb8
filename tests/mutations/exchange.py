"""Mistakes in what goes to other programs and comes from them."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

HUGGING_FACE = "tests/unit/training/exchange/test_huggingface.py"

EXCHANGE = [
    Mutation(
        "keys-and-values-change-places-both-ways",
        "gptpar/model/families/names.py",
        '"k": of_each_group(queries, queries + 1),\n        "v": of_each_group(queries + 1, queries + 2),',
        '"v": of_each_group(queries, queries + 1),\n        "k": of_each_group(queries + 1, queries + 2),',
        (HUGGING_FACE,),
    ),
    Mutation(
        "gpt2s-heads-keep-our-order",
        "gptpar/model/families/names.py",
        "ours.view(heads, 3, width, *ours.shape[1:]).transpose(0, 1)",
        "ours.view(3, heads, width, *ours.shape[1:])",
        (HUGGING_FACE,),
    ),
    Mutation(
        "padding-rows-are-exported",
        "gptpar/training/exchange/hf_export.py",
        "rows = size if type(size) is int",
        "rows = size if False and type(size) is int",
        ("tests/unit/training/exchange/test_export.py",),
    ),
    Mutation(
        "overlapping-tensors-are-read",
        "gptpar/checkpoint/exchange/safetensors_file.py",
        "if stop != start:",
        "if stop < start:",
        ("tests/unit/checkpoint/test_safetensors_file.py",),
    ),
    Mutation(
        "later-stages-blocks-are-numbered-from-0",
        "gptpar/training/exchange/megatron/names.py",
        "int(layer[1]) + counted",
        "int(layer[1])",
        ("tests/unit/training/exchange/test_megatron.py",),
    ),
    Mutation(
        "foreign-pickles-may-name-anything",
        "gptpar/checkpoint/exchange/safe_pickle.py",
        "if name not in REAL and not name.startswith(LEFT_UNREAD)]",
        "if False]",
        ("tests/unit/training/exchange/test_megatron.py",),
    ),
]

"""Mistakes in what goes to other programs and comes from them."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

HUGGING_FACE = "tests/unit/exchange/test_huggingface.py"
TORCH_DIST = "tests/unit/exchange/test_torch_dist.py"
OPTIMIZER_STATE = "tests/unit/exchange/test_optimizer_state.py"

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
        "attention.by_group(ours).transpose(0, 1)",
        "attention.by_group(ours).reshape(3, -1, *ours.shape[1:]).unflatten(1, (-1, attention.head_width))",
        (HUGGING_FACE,),
    ),
    Mutation(
        "padding-rows-are-exported",
        "gptpar/exchange/hf_export.py",
        "rows = model.softmax_vocab_size",
        "rows = model.padded_vocab_size",
        ("tests/unit/exchange/test_export.py",),
    ),
    Mutation(
        "links-in-a-copy-of-a-tokenizer-are-followed",
        "gptpar/checkpoint/tokenizer_copy.py",
        "if os.path.realpath(file) != os.path.join(os.path.realpath(checkpoint), FOLDER, name):",
        "if False:",
        ("tests/unit/exchange/test_tokenizer_copy.py",),
    ),
    Mutation(
        "files-beside-an-outside-tokenizer-are-exported",
        "gptpar/exchange/hf_export.py",
        ", for_export=True",
        "",
        ("tests/unit/exchange/test_tokenizer_copy.py",),
    ),
    Mutation(
        "overlapping-tensors-are-read",
        "gptpar/exchange/files/safetensors_file.py",
        "if stop != start:",
        "if stop < start:",
        ("tests/unit/exchange/test_safetensors_file.py",),
    ),
    Mutation(
        "later-stages-blocks-are-numbered-from-0",
        "gptpar/exchange/megatron/names.py",
        "int(layer[1]) + counted",
        "int(layer[1])",
        ("tests/unit/exchange/test_megatron.py",),
    ),
    Mutation(
        "foreign-pickles-may-name-anything",
        "gptpar/exchange/files/safe_pickle.py",
        "if name not in REAL and not name.startswith(LEFT_UNREAD)]",
        "if False]",
        ("tests/unit/exchange/test_megatron.py",),
    ),
    Mutation(
        "metadata-of-torch-dist-may-name-anything",
        "gptpar/exchange/files/safe_pickle.py",
        "        raise CheckpointError(_refusal(self._path, [full]))",
        "        return super().find_class(module, name)",
        (TORCH_DIST,),
    ),
    Mutation(
        "boxes-of-a-tensor-may-overlap-or-be-missing",
        "gptpar/exchange/files/distcp.py",
        "if held != prod(shape) or first_overlap(",
        "if False and first_overlap(",
        (TORCH_DIST,),
    ),
    Mutation(
        "moments-change-places",
        "gptpar/exchange/megatron/universal.py",
        "*((moment, moment) for moment in MOMENTS)",
        "*zip(MOMENTS, MOMENTS[::-1])",
        (OPTIMIZER_STATE,),
    ),
    Mutation(
        "a-tied-embedding-is-taken-from-both-stages",
        "gptpar/exchange/megatron/rank_files.py",
        "if first == stage:",
        "if True:",
        (OPTIMIZER_STATE,),
    ),
    Mutation(
        "only-the-first-pass-over-a-source-is-made",
        "gptpar/checkpoint/assembly.py",
        "for first in range(0, len(blocks), most_blocks):",
        "for first in range(0, len(blocks), most_blocks)[:1]:",
        ("tests/unit/checkpoint/test_assembly.py",),
    ),
    Mutation(
        "readings-begin-without-room-for-their-blocks",
        "gptpar/checkpoint/assembly.py",
        "self._in_memory + new <= self._room.blocks",
        "self._in_memory + new <= 3 * self._room.blocks",
        ("tests/unit/checkpoint/test_assembly.py",),
    ),
    Mutation(
        "halves-are-rounded-up",
        "csrc/strided_copy.cpp",
        "(bits + 0x7fff + ((bits >> 16) & 1)) >> 16",
        "(bits + 0x8000) >> 16",
        ("tests/unit/system/test_strided_copy.py",),
    ),
    Mutation(
        "one-index-of-a-view-is-taken-for-none",
        "gptpar/checkpoint/patches.py",
        "if low <= 0 < high:",
        "if low < 0 < high:",
        ("tests/unit/checkpoint/test_patches.py",),
    ),
]

"""Mistakes in tensor parallelism, the pipeline and what layers declare."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

OPERATORS = "gptpar/tensor_parallel/linear_ops.py"
AXIS = "gptpar/tensor_parallel/axis.py"
SCHEDULES = "gptpar/pipeline/schedules.py"
SPLIT_MODEL = "tests/ranks/test_tensor_parallel.py::test_split_models_equal_the_whole_one[2]"
UNEVEN_VOCABULARY = "tests/ranks/test_tensor_parallel.py::test_an_uneven_vocabulary"
STAGES = "tests/ranks/test_pipeline_module.py::test_stages_agree_with_one_process"
MASKS = "tests/ranks/test_tensor_parallel.py::test_dropouts_masks_are_the_whole_models"
CONTEXT, GATHERING = "gptpar/context_parallel.py", ("tests/unit/test_context_parallel.py",)

PARALLEL = [
    Mutation(
        "late-chunks-in-the-order-of-ranks",
        CONTEXT,
        "whole = torch.cat([early, late.flip(2)], 2)",
        "whole = torch.cat([early, late], 2)",
        GATHERING,
    ),
    Mutation(
        "gradient-of-a-chunk-of-keys-lost",
        CONTEXT,
        "whole[number % 2, :, : x.shape[1]] += x",
        "whole[number % 2, :, : x.shape[1]] = x",
        GATHERING,
    ),
    Mutation(
        "dropout-of-the-first-groups-for-all",
        CONTEXT,
        "first_group=dropout.first_group + number * at_once",
        "first_group=dropout.first_group",
        GATHERING,
    ),
    Mutation(
        "gathered-keys-kept",
        CONTEXT,
        "        result = y.detach()\n        saved.forget()\n",
        "        result = y.detach()\n",
        GATHERING,
    ),
    Mutation(
        "gathered-keys-viewed-from-their-start",
        CONTEXT,
        "return number, x.shape, x.stride(), x.storage_offset()",
        "return number, x.shape, x.stride(), 0",
        GATHERING,
    ),
    Mutation(
        "column-layers-input-gradient-not-summed",
        OPERATORS,
        "summing = dist.all_reduce(grad_x, group=ranks, async_op=True)",
        "summing = dist.barrier(group=ranks, async_op=True)",
        (SPLIT_MODEL,),
    ),
    Mutation(
        "row-layers-output-not-summed",
        OPERATORS,
        "    dist.all_reduce(y, group=_group(group))\n",
        "",
        (SPLIT_MODEL,),
    ),
    Mutation(
        "labels-not-counted-from-the-ranks-vocabulary",
        "gptpar/tensor_parallel/cross_entropy.py",
        "own_labels_N = labels_N - first if first else labels_N",
        "own_labels_N = labels_N",
        (SPLIT_MODEL,),
    ),
    Mutation(
        "tokens-of-the-next-ranks-vocabulary-looked-up",
        "gptpar/tensor_parallel/layers.py",
        "(local_N >= self.weight.shape[0])",
        "(local_N > self.weight.shape[0])",
        (SPLIT_MODEL, UNEVEN_VOCABULARY),
    ),
    Mutation(
        "uneven-shares-begin-too-early",
        "gptpar/topology/placement.py",
        "return position * length // size, (position + 1) * length // size",
        "return position * (length // size), (position + 1) * (length // size)",
        ("tests/ranks/test_tensor_parallel.py::test_ranges_are_balanced_and_cover",),
    ),
    Mutation(
        "gradient-of-own-tokens-declared-complete",
        AXIS,
        "return ADDENDS if self.splits_tokens else REPLICATED",
        "return REPLICATED",
        ("tests/unit/topology/test_placement.py::test_gpt_parameters_are_summed_where_ranks_hold_their_own_tokens",),
    ),
    Mutation(
        "gradient-of-own-heads-declared-complete-without-sequence-parallelism",
        AXIS,
        "return ADDENDS if self.size > 1 else REPLICATED",
        "return ADDENDS if self.splits_tokens else REPLICATED",
        ("tests/ranks/test_pipeline_module.py::test_a_replicated_weight_inside_a_split_layer_gets_its_whole_gradient",),
    ),
    Mutation(
        "norm-of-heads-declared-as-if-between-layers",
        "gptpar/model/attention.py",
        "config, width, axis.inside_layers)",
        "config, width, axis.between_layers)",
        ("tests/unit/topology/test_placement.py::test_norms_of_heads_are_summed_with_and_without_split_tokens",),
    ),
    Mutation(
        "auxiliary-loss-whole-on-each-share-of-the-tokens",
        "gptpar/pipeline/auxiliary_losses.py",
        "return grad / self._token_splits if self._token_splits > 1 else grad",
        "return grad",
        ("tests/ranks/test_experts.py",),
    ),
    Mutation(
        "bias-before-dropout-summed-after-it",
        "gptpar/model/linear.py",
        "return self.output_norm or (self.residual_norm and config.hidden_dropout == 0)",
        "return self.output_norm or self.residual_norm",
        ("tests/unit/model/test_linear.py",),
    ),
    Mutation(
        "undeclared-parameter-let-through",
        "gptpar/topology/placement.py",
        '    if problems:\n        raise TypeError("\\n".join(problems))\n',
        "",
        ("tests/unit/topology/test_placement.py",),
    ),
    Mutation(
        "micro-batches-go-back-in-another-order",
        SCHEDULES,
        "        yield Backward(i, 0)\n",
        "        yield Backward(num_micro_batches - 1 - i, 0)\n",
        ("tests/unit/pipeline/test_schedules.py",),
    ),
    Mutation(
        "one-micro-batch-too-few-in-the-warm-up",
        SCHEDULES,
        "warm_up = min(num_stages - stage - 1, num_micro_batches)",
        "warm_up = min(max(num_stages - stage - 2, 0), num_micro_batches)",
        ("tests/unit/pipeline/test_schedules.py::test_steps_end_and_idle_as_the_formula_says",),
    ),
    Mutation(
        "virtual-stages-go-back-in-forward-order",
        SCHEDULES,
        "Backward(i, num_virtual_stages - 1 - virtual_stage)",
        "Backward(i, virtual_stage)",
        ("tests/unit/pipeline/test_schedules.py",),
    ),
    Mutation(
        "arriving-tensor-not-waited-for",
        "gptpar/pipeline/runtime.py",
        "        self._work.wait()\n        return self._tensor",
        "        return self._tensor",
        (f"{STAGES}[2-2-options0]",),
    ),
    Mutation(
        "activation-forgotten-before-it-is-sent",
        "gptpar/pipeline/runtime.py",
        'self._leaving["activation", micro_batch, virtual_stage] = y.detach()',
        "y.data = y.new_empty(1).expand(y.shape)\n"
        '            self._leaving["activation", micro_batch, virtual_stage] = y.detach()',
        (f"{STAGES}[2-2-options0]",),
    ),
    Mutation(
        "repeated-layers-share-a-name",
        "gptpar/adapter/pipeline_module.py",
        "layer = copy.copy(layer)",
        "pass",
        ("tests/unit/pipeline/test_repeated_layers.py",),
    ),
    Mutation(
        "tied-layer-not-summed-over-its-stages",
        "gptpar/adapter/pipeline_module.py",
        "for group in (*self._summed_over[full_name], *(() if tied is None else (tied,))):",
        "for group in self._summed_over[full_name]:",
        (f"{STAGES}[2-2-options0]",),
    ),
    Mutation(
        "dropout-mask-of-the-first-ranks-tokens",
        "gptpar/model/dropout.py",
        "self.rank = axis.rank if axis.splits_tokens else 0",
        "self.rank = 0",
        (MASKS, "tests/unit/model/test_dropout.py::test_a_rank_with_some_tokens_has_their_rows_of_the_mask"),
    ),
]

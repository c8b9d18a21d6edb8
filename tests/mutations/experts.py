"""Mistakes in a mixture of experts that other programs have had."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

UNIT_TESTS = ("tests/unit/model/test_experts.py",)
LAYOUT_TESTS = ("tests/ranks/test_experts.py",)
HUGGING_FACE_TESTS = ("tests/unit/exchange/test_huggingface.py",)
ROUTING, BALANCE = "gptpar/model/experts/routing.py", "gptpar/model/experts/balance.py"
PRODUCTS, LAYER = "gptpar/model/experts/products.py", "gptpar/model/experts/layer.py"

EXPERTS = [
    Mutation(
        "gates-and-values-of-experts-change-places",
        "gptpar/model/families/mixtures.py",
        "halves = {gate: 0, up: 1}",
        "halves = {gate: 1, up: 0}",
        HUGGING_FACE_TESTS,
    ),
    Mutation(
        "weights-over-all-experts-are-divided",
        "gptpar/model/families/mixtures.py",
        '"moe_router_pre_softmax": not normalised',
        '"moe_router_pre_softmax": normalised',
        HUGGING_FACE_TESTS,
    ),
    Mutation(
        "every-process-reads-all-experts-of-a-folder",
        "gptpar/exchange/hf_import.py",
        " if _is_held(part, views[name], weights[name])]",
        "]",
        ("tests/ranks/test_hf_mixtures.py",),
    ),
    Mutation(
        "balance-loss-times-the-tensor-ranks",
        ROUTING,
        "self._loss_parts = 1 if axis.splits_tokens else axis.size",
        "self._loss_parts = 1",
        LAYOUT_TESTS,
    ),
    Mutation(
        "balance-loss-divided-by-the-tensor-ranks-twice",
        ROUTING,
        "self._loss_parts = 1 if axis.splits_tokens else axis.size",
        "self._loss_parts = axis.size",
        LAYOUT_TESTS,
    ),
    Mutation(
        "router-s-gradient-of-one-tensor-rank",
        ROUTING,
        "ParameterSpec(Normal(hidden_std(config)), axis.inside_layers)",
        "ParameterSpec(Normal(hidden_std(config)), axis.between_layers)",
        LAYOUT_TESTS,
    ),
    Mutation(
        "balance-of-a-micro-batch",
        ROUTING,
        "counts_BE = counts_of(chosen_NK.unflatten(0, (-1, seq_length)), self.num_experts)\n"
        "            mean_BE = probabilities_NE.unflatten(0, (-1, seq_length)).mean(1)",
        "counts_BE = counts_of(chosen_NK[None], self.num_experts)\n"
        "            mean_BE = probabilities_NE.mean(0)[None]",
        (*UNIT_TESTS, *LAYOUT_TESTS),
    ),
    Mutation(
        "choices-of-a-recomputed-layer-count-twice",
        ROUTING,
        "counts_of(chosen_NK[None], len(counts_E))[0] * ~is_kept[0]",
        "counts_of(chosen_NK[None], len(counts_E))[0]",
        UNIT_TESTS,
    ),
    Mutation(
        "choice-is-made-again",
        ROUTING,
        "is_kept = choice_NK[:1, :1] != NOT_CHOSEN",
        "is_kept = choice_NK[:1, :1] > len(counts_E)",
        UNIT_TESTS,
    ),
    Mutation(
        "bias-enters-the-weights",
        ROUTING,
        "weights_NK = scores_NE.gather(1, chosen_NK)",
        "weights_NK = (scores_NE if self.bias_E is None else scores_NE + self.bias_E).gather(1, chosen_NK)",
        UNIT_TESTS,
    ),
    Mutation(
        "equal-scores-in-any-order",
        ROUTING,
        "judged_NE.sort(dim=-1, descending=True, stable=True).indices[:, :topk]",
        "(judged_NE.shape[1] - 1 - judged_NE.flip(-1).sort(dim=-1, descending=True, stable=True).indices)[:, :topk]",
        UNIT_TESTS,
    ),
    Mutation(
        "scaling-factor-before-normalisation",
        ROUTING,
        "weights_NK = weights_NK * config.moe_router_topk_scaling_factor",
        "weights_NK = weights_NK * 1",
        UNIT_TESTS,
    ),
    Mutation(
        "counts-of-every-tensor-rank",
        BALANCE,
        "self._here_LE if counts else torch.zeros_like(self._here_LE)",
        "self._here_LE",
        LAYOUT_TESTS,
    ),
    Mutation(
        "bias-moves-in-a-skipped-step",
        BALANCE,
        "self._bias_LE.copy_(torch.where(taken, moved_LE, self._bias_LE))",
        "self._bias_LE.copy_(moved_LE)",
        (*UNIT_TESTS, *LAYOUT_TESTS),
    ),
    Mutation(
        "bias-moves-the-other-way",
        BALANCE,
        "less_LE = self._counts_LE.sum(-1, keepdim=True) - self._config.num_experts * self._counts_LE",
        "less_LE = self._config.num_experts * self._counts_LE - self._counts_LE.sum(-1, keepdim=True)",
        UNIT_TESTS,
    ),
    Mutation(
        "counts-of-the-step-before-stay",
        BALANCE,
        "        self._here_LE.zero_()\n",
        "        pass\n",
        LAYOUT_TESTS,
    ),
    Mutation(
        "bias-lost-at-resume",
        BALANCE,
        "        self._bias_LE.copy_(bias_LE)\n",
        "        pass\n",
        (*UNIT_TESTS, *LAYOUT_TESTS),
    ),
    Mutation(
        "weights-gradients-of-other-tokens",
        PRODUCTS,
        "return grad_MD, of_weights_M[rows_NK], None, None, None",
        "return grad_MD, of_weights_M.view_as(weights_NK), None, None, None",
        UNIT_TESTS,
    ),
    Mutation(
        "outputs-of-tensor-ranks-are-not-summed",
        LAYER,
        "(scatter_sum_tokens if axis.splits_tokens else sum_over)(y_ND, axis)",
        "(scatter_sum_tokens if axis.splits_tokens else copy_to)(y_ND, axis)",
        LAYOUT_TESTS,
    ),
    Mutation(
        "shared-expert-s-gate-of-all-tensor-ranks",
        LAYER,
        '"gate": ParameterSpec(Normal(std), axis.between_layers)',
        '"gate": ParameterSpec(Normal(std), axis.inside_layers)',
        LAYOUT_TESTS,
    ),
]

"""Compiled layers with experts, recomputed in every way, against the same layers uncompiled."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition, nop
from torch._dynamo.backends.common import aot_autograd

from gptpar.cli.check_layouts import SMALL
from gptpar.cli.check_layouts.compare import difference, step_difference
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.model.experts import layer, routing
from gptpar.model.experts.products import _parts_of
from tests.ranks.layout_cases import TOLERANCE, Family, run_alone

MICRO_BATCHES = 2
EXPERTS = (
    f"--num-layers 2 --global-batch-size {2 * MICRO_BATCHES} --micro-batch-size 2 --swiglu "
    "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --num-experts 4 "
    "--moe-ffn-hidden-size 16 --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 --fp64 "
)
SELECTIVE = "--recompute-granularity selective --recompute-modules "
CASES = [
    SELECTIVE + "mlp layernorm core_attn --moe-shared-expert-intermediate-size 8 --moe-shared-expert-gate "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01",
    SELECTIVE + "mlp --moe-expert-capacity-factor 0.75 --moe-router-load-balancing-type global_aux_loss "
    "--moe-aux-loss-coeff 0.1 --moe-layer-freq 2",
    "--num-layers 3 --recompute-granularity full --recompute-method uniform --recompute-num-layers 2 "
    "--moe-expert-capacity-factor 0.75",
    "",
]


@torch.library.custom_op("tests::grouped_product", mutates_args=())
def grouped_product(x_MI: torch.Tensor, weight_EOI: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """As experts' own in fp64, but one operator to a compiler, as the GPU's kernel is."""
    *parts, rest = _parts_of(x_MI, counts_E)
    found = [part @ weight_OI.t() for part, weight_OI in zip(parts, weight_EOI, strict=True)]
    return torch.cat([*found, rest.new_zeros(len(rest), weight_EOI.shape[1])])


@torch.library.custom_op("tests::grouped_gradients", mutates_args=())
def grouped_gradients(
    grad_MO: torch.Tensor, x_MI: torch.Tensor, weight_EOI: torch.Tensor, counts_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = zip(_parts_of(grad_MO, counts_E)[:-1], _parts_of(x_MI, counts_E)[:-1], strict=True)
    of_x_MI: torch.Tensor = grouped_product(grad_MO, weight_EOI.transpose(1, 2), counts_E)
    return of_x_MI, torch.stack([grad_mO.t() @ x_mI for grad_mO, x_mI in parts])


grouped_product.register_fake(lambda x_MI, weight_EOI, _: x_MI.new_empty(len(x_MI), weight_EOI.shape[1]))
grouped_gradients.register_fake(lambda _, x_MI, weight_EOI, __: (torch.empty_like(x_MI), torch.empty_like(weight_EOI)))
grouped_product.register_autograd(
    lambda ctx, grad_MO: (*grouped_gradients(grad_MO.contiguous(), *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Of each call of the choice, whether experts were chosen before; the layer is one graph to a compiler."""
    found: list[bool] = []
    chosen_experts = routing.chosen_experts

    def noted(judged_NE: torch.Tensor, choice_NK: torch.Tensor, *args: Any) -> torch.Tensor:
        found.append(choice_NK[0, 0].item() != routing.NOT_CHOSEN)
        return chosen_experts(judged_NE, choice_NK, *args)

    monkeypatch.setattr(layer, "grouped_product", grouped_product)
    monkeypatch.setattr(routing, "chosen_experts", noted)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


class Compiled(CaseRun):
    """Its blocks are compiled as torch's own compiler does, but for the code of their kernels."""

    def train(self, first: int, last: int) -> None:
        how: Any = {"partition_fn": min_cut_rematerialization_partition, "keep_inference_input_mutations": True}
        backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, **how)
        for stage in self.trainer.pipeline.stages_here:
            for name, block in stage.layers_by_name().items():
                if name.startswith("layers."):
                    block.compile(backend=backend, fullgraph=True)
        super().train(first, last)


@pytest.mark.slow
@pytest.mark.parametrize("flags", CASES)
def test_compiled_layers_compute_what_others_do(flags: str, choices: list[bool]) -> None:
    """A block that is computed again takes the experts that it took, and none of its inputs has changed meanwhile."""
    words = [*SMALL.split(), *EXPERTS.split(), *flags.split()]
    alone, run = run_alone(Family(words, ())), run_alone(Family(words, (), Compiled))
    alone.train(0, 2)
    choices.clear()
    run.train(0, 2)
    found, wanted = run.outcome, alone.outcome
    assert step_difference(found.steps, wanted.steps) <= TOLERANCE
    assert difference(zip(found.gradients, wanted.gradients, strict=True)) <= TOLERANCE
    for name in ("expert bias", "choices of experts"):
        assert torch.equal(found.weights[-1][name], wanted.weights[-1][name])
    calls = 2 * MICRO_BATCHES * len(run.trainer.experts.names)
    assert (choices.count(False), choices.count(True)) == (calls, calls if "recompute" in flags else 0)

"""What a layer may return beside its output, and what becomes of it where nobody trains."""

from typing import Any

import pytest
import torch
from torch import nn

from gptpar.adapter.pipeline_module import PipelineModule
from gptpar.model.layer_spec import LayerSpec
from gptpar.pipeline.stage import Stage

NAMES = ("size",)


class Returns(nn.Module):
    """A linear layer that returns what it is told beside its output."""

    def __init__(self, make: Any):
        super().__init__()
        self.weight, self.make = nn.Parameter(torch.arange(9.0).view(3, 3) / 10), make

    def forward(self, x: torch.Tensor) -> Any:
        y = x @ self.weight.t()
        return self.make(y)


def size_of(y: torch.Tensor) -> Any:
    return y, {"size": y.square().mean()}


def loss_of(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (y - labels).square().mean()


def test_train_batch_adds_their_gradients_and_not_their_values() -> None:
    spec = LayerSpec(Returns, size_of, auxiliary_losses=NAMES)
    pipeline = PipelineModule([spec, nn.Identity()], num_stages=1, loss_fn=loss_of)
    x, labels = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    loss = pipeline.train_batch(zip(x, labels, strict=True))
    (weight,) = pipeline.parameters()
    twin = weight.detach().clone().requires_grad_()
    y = x @ twin.t()
    main, size = (y - labels).square().mean(), y.square().mean()
    assert loss.item() == pytest.approx(main.item())
    torch.testing.assert_close(weight.grad, torch.autograd.grad(main + size, twin)[0])
    assert [mean.item() for mean in pipeline.auxiliary.means(x.device)] == pytest.approx([size.item()])
    pipeline.evaluate([(x[0], {"labels": labels[0]})])  # values without gradients, and without those from before
    expected = (x[0] @ weight.t()).square().mean().item()
    assert [mean.item() for mean in pipeline.auxiliary.means(x.device)] == pytest.approx([expected])


def test_a_stage_may_free_an_output_that_carries_losses() -> None:
    spec = LayerSpec(Returns, size_of, auxiliary_losses=NAMES, name="a")
    output = Stage([spec], build=LayerSpec.build)(torch.ones(2, 3), {})
    assert output._base is None and output.requires_grad

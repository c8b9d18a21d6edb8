"""A list of layers may have one specification several times: each is a layer of its own."""

import torch
from torch import nn

import gptpar
import gptpar.deepspeed as deepspeed


def test_a_specification_that_is_repeated_builds_layers_with_names_and_values_of_their_own() -> None:
    spec = gptpar.LayerSpec(nn.Linear, 3, 3)
    for _ in range(2):  # the specification itself is not changed
        model = gptpar.PipelineModule([spec] * 2, num_stages=1)
        assert [one.name for one in model.specs] == ["layers.0", "layers.1"] and not spec.name
        first, second = (parameter for parameter in model.parameters() if parameter.dim() == 2)
        assert not torch.equal(first, second)


def test_deepspeeds_pipeline_gives_repeated_specifications_the_values_of_a_plain_construction() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    torch.manual_seed(0)
    model = deepspeed.pipe.PipelineModule([deepspeed.pipe.LayerSpec(nn.Linear, 3, 3)] * 3, num_stages=1)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)

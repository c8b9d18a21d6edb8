"""Parameters of units of any sizes."""

from collections.abc import Mapping

import torch

from gptpar.topology.initial_values import Constant
from gptpar.topology.placement import ParameterInfo


def infos(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ParameterInfo]:
    return {name: ParameterInfo(torch.Size(shape), Constant(0.0)) for name, shape in shapes.items()}

"""``--moe-use-upcycling``: the MLPs of a dense Hugging Face model become experts (Komatsuzaki et al. 2023).

Each expert of a block begins with the weights of the block's MLP, and the router with its initial values. Where the
weights of a token's experts sum to 1, the mixture computes what the dense model does, until training tells them apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from gptpar.config import ModelConfig, ModelFlags
from gptpar.config.flags import ParsedFlags
from gptpar.config.sections.mlp import ExpertOptions
from gptpar.exchange.hf_folder import HfModel
from gptpar.model.families import HfTensor
from gptpar.model.families.names import Within


def with_experts(parsed: ParsedFlags, theirs: ModelFlags) -> ModelFlags:
    """The flags of a dense model with the command line's experts in place of MLPs; notes what cannot be made."""
    parsed.problems += _problems(parsed.flags.model, theirs)
    given = {spec.name: getattr(parsed.flags.model, spec.name) for spec in dataclasses.fields(ExpertOptions)}
    return dataclasses.replace(theirs, add_bias_linear=False, **given)


def _problems(given: ModelFlags, theirs: ModelFlags) -> Iterator[str]:
    flag, width = "--moe-use-upcycling makes experts of the MLPs of --load-hf", theirs.ffn_hidden_size
    if not given.has_experts:
        yield f"{flag}: give their number, --num-experts, too."
    if theirs.has_experts:
        yield f"{flag}, and that model has experts already: leave the flag out."
    if theirs.add_bias_linear:
        yield f"{flag}, and these have biases, which are not copied yet: take a model without."
    if given.moe_ffn_hidden_size not in (None, width):
        yield f"{flag}, which have a width of {width}: leave out --moe-ffn-hidden-size {given.moe_ffn_hidden_size}."
    if given.moe_shared_expert_intermediate_size is not None:
        yield f"{flag}, and a shared expert would begin without weights: drop --moe-shared-expert-intermediate-size."


def upcycled(model: HfModel, wanted: ModelConfig) -> HfModel:
    """A dense model's folder as that of a mixture, whose routers no tensor fills.

    Args:
        wanted: the mixture.
    """
    parameters = dict(model.parameters)
    for layer, has_experts in enumerate(wanted.blocks_with_experts(wanted.num_layers)):
        for name in (f"layers.{layer}.mlp.up", f"layers.{layer}.mlp.down") if has_experts else ():
            dense = parameters.pop(f"{name}.weight")
            parameters[name] = [
                (_of_expert(tensor, name, number), source)
                for number in range(wanted.num_experts)
                for tensor, source in dense
            ]
    return dataclasses.replace(model, model=wanted, parameters=parameters)


def _of_expert(tensor: HfTensor, name: str, number: int) -> HfTensor:
    """A dense MLP's tensor as one expert's."""
    place = Within(lambda ours: tensor.view(ours[number]), tensor.place.merged)
    return dataclasses.replace(tensor, name=f"{tensor.name} of expert {number}", ours=name, place=place)

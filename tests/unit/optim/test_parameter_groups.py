"""Factors of learning rate and weight decay by a parameter's name, and muP's."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from gptpar.data.loader import MicroBatch
from gptpar.errors import ConfigError
from gptpar.model.gpt import gpt_model
from gptpar.optim.adamw import ADAMW
from gptpar.optim.group_ranges import GPT_FAMILIES
from gptpar.optim.muon import MUON, Muon, coefficients
from gptpar.optim.parameter_groups import GroupFactors, ParameterGroups
from gptpar.pipeline import Stage
from tests.flat_parts import whole_tensors
from tests.helpers import make_trainer, random_tokens, tiny_config

RUN = "--fp64 --micro-batch-size 2 --weight-decay 0.1 --clip-grad 0 --lr-decay-style constant"
OVERRIDES = "--weight-decay-override embedding*=0 *norm.weight=2 --lr-override layers.*=0.5 layers.0.mlp.*=0.25"

MUP = "--mup --mup-base-hidden-size 8"


def groups_of(flags: str) -> tuple[ParameterGroups, dict[str, GroupFactors]]:
    """The groups, and each parameter's factors."""
    config = tiny_config(flags)
    model = gpt_model(config.model)
    groups, infos = ParameterGroups(config.optimizer, config.model, model), Stage(model.specs).infos()
    return groups, {name: groups.factors[groups.group_of(name, info)] for name, info in infos.items()}


def test_without_overrides_matrices_decay() -> None:
    groups, factors = groups_of("")
    assert groups.families == GPT_FAMILIES and groups.factors == [GroupFactors(1, 1), GroupFactors(1, 0)]
    assert factors["layers.0.mlp.up.weight"].weight_decay == factors["embedding.weight"].weight_decay == 1
    assert factors["layers.0.mlp.up.bias"].weight_decay == factors["final_norm.weight"].weight_decay == 0


def test_the_last_pattern_that_matches_counts() -> None:
    groups, factors = groups_of(OVERRIDES)
    factors = {name: one[:2] for name, one in factors.items()}  # type: ignore[misc]
    assert factors["embedding.weight"] == (1, 0)
    assert factors["final_norm.weight"] == (1, 2) and factors["layers.1.mlp_norm.weight"] == (0.5, 2)
    assert factors["layers.0.mlp.up.weight"] == (0.25, 1) and factors["layers.1.mlp.up.weight"] == (0.5, 1)
    assert factors["layers.0.mlp.up.bias"] == (0.25, 0)
    assert sorted(group for family in groups.families for group in family) == list(range(len(groups.factors)))
    for first, *others in groups.families:
        assert all(groups.factors[other] == GroupFactors(groups.factors[first].lr, 0) for other in others)


@pytest.mark.parametrize("untied", ["", "--untie-embeddings-and-output-weights"])
def test_the_ends_have_a_rate_of_their_own(untied: str) -> None:
    """Token embedding and output layer, not learned positions; with a decay and without, in launches of their own."""
    groups, factors = groups_of(f"--decoupled-lr 5e-2 --weight-decay-override *norm.weight=1 {untied}")
    ends = {name for name, one in factors.items() if one.is_decoupled}
    assert ends == {"embedding.weight"} | ({"output.weight"} if untied else set())
    config = tiny_config("")
    rates = groups.hyperparameters(config.optimizer, 1e-2, 0.1, 5e-2)
    for name, factor in factors.items():
        assert rates[groups.factors.index(factor)].lr == (5e-2 if name in ends else 1e-2), name
    for family in groups.families:
        assert len({rates[group].lr for group in family}) == 1


def test_muon_updates_the_blocks_matrices_and_adamw_the_others() -> None:
    groups, factors = groups_of(f"--optimizer muon --swiglu --qk-layernorm {OVERRIDES} --decoupled-lr 5e-2")
    by_matrix = {name for name, one in factors.items() if one.by_matrix}
    ends = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    assert by_matrix == {f"layers.{layer}.{end}.weight" for layer in range(2) for end in ends}
    updates = {name: groups.updates[groups.factors.index(one)] for name, one in factors.items()}
    assert all(isinstance(updates[name], Muon if name in by_matrix else type(ADAMW)) for name in updates)
    for family in groups.families:
        assert len({groups.updates[group] for group in family}) == 1
        assert len({groups.factors[group].lr for group in family}) == 1
    assert sorted(group for family in groups.families for group in family) == list(range(len(groups.factors)))


def test_muons_settings_are_the_runs() -> None:
    groups, _ = groups_of(
        "--optimizer muon --muon-no-nesterov --muon-num-ns-steps 8 --muon-coefficient-type polar_express "
        "--muon-scale-mode unit_rms_norm --muon-extra-scale-factor 2 --muon-qkv heads --muon-momentum 0.8"
    )
    (muon,) = {update for update in groups.updates if isinstance(update, Muon)}
    iterations = coefficients("polar_express", 8)
    expected = replace(MUON, nesterov=False, iterations=iterations, scale_mode="unit_rms_norm", factor=2.0, qkv="heads")
    assert muon == expected
    flags = tiny_config("--muon-momentum 0.8 --adam-beta1 0.7").optimizer
    for update, how in zip(groups.updates, groups.hyperparameters(flags, 1e-2, 0.1, None, (0.5, 0.6)), strict=True):
        assert how[2:] == (0.8,) if update is muon else how[1:3] == (0.5, 0.6)


@pytest.mark.parametrize(
    ("mode", "of_blocks", "of_router"),
    [("spectral", 1 / 2, 1 / 4), ("unit_rms_norm", 1, 1), ("shape_scaling", 1, 1 / 2)],
)
def test_mup_scales_muons_rates_by_the_growth_of_its_updates(mode: str, of_blocks: float, of_router: float) -> None:
    """A router's logits change by as much at every width: an update for one token, whose inputs are about 1."""
    experts = "--num-experts 4 --moe-shared-expert-intermediate-size 8 --moe-shared-expert-gate"
    _, of_muon = groups_of(f"--optimizer muon --muon-scale-mode {mode} {experts} {MUP}")
    _, of_adam = groups_of(MUP)
    assert of_adam["layers.0.mlp.up.weight"].lr == 0.25 and of_muon["layers.0.attention.out.weight"].lr == of_blocks
    assert of_muon["embedding.weight"].lr == 1
    assert of_muon["layers.0.mlp.router.weight"].lr == of_muon["layers.0.mlp.gate"].lr == of_router
    changes = []
    for width, lr in ((8, 1.0), (32, of_router)):  # the base model's, and this one's
        muon, x_D = replace(MUON, scale_mode=mode), torch.ones(width, dtype=torch.float64)
        gradient_ED = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64)[:, None] * x_D
        changes.append(lr * (muon.orthogonalize(gradient_ED[None])[0] @ x_D))
    assert torch.allclose(*changes, rtol=1e-6)


def test_a_pattern_without_a_parameter_is_told() -> None:
    with pytest.raises(ConfigError, match=r"--lr-override block\*=2 matches no parameter; names are like embedding.we"):
        groups_of("--lr-override block*=2")


@pytest.mark.parametrize("more", [f"{MUP} {OVERRIDES}", "--decoupled-lr 5e-2"])
@pytest.mark.parametrize("offload", ["", "--no-pipeline-parallel --cpu-optimizer --cpu-optimizer-ratio 0.6"])
def test_steps_equal_torchs_with_a_group_for_each_parameter(more: str, offload: str) -> None:
    config = tiny_config(f"{RUN} {more} {offload}")
    trainer = make_trainer(config)
    stage = Stage(gpt_model(config.model).specs)
    weights = {name: value.clone() for name, value in whole_tensors(trainer.engine.optimizer.parts("weights")).items()}
    stage.place(weights)
    _, factors = groups_of(f"{RUN} {more}")
    groups: list[dict[str, Any]] = [
        {
            "params": [p],
            "lr": (5e-2 if factors[name].is_decoupled else 1e-2) * factors[name].lr,
            "weight_decay": 0.1 * factors[name].weight_decay,
        }
        for name, p in stage.global_parameters().items()
    ]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
    for step in range(3):
        tokens = random_tokens(2, 16, 60, seed=step)
        batch = MicroBatch(tokens[:, :-1], tokens[:, 1:])
        loss = trainer.forward_backward([batch], step)
        trainer.update(loss, iteration=step + 1, samples=2, progress=float(2 * step + 2), stop=False)
        reference.zero_grad()
        stage(batch.tokens_BS, {"labels": batch.labels_BS, "seq_length": 16}).backward()
        reference.step()
    found = whole_tensors(trainer.engine.optimizer.parts("weights"))
    trainer.close()
    for name, value in stage.global_parameters().items():
        torch.testing.assert_close(found[name], value.data, rtol=1e-9, atol=1e-12, msg=name)

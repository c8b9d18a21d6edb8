"""Optimizer and schedule of DeepSpeed's JSON, its Muon among them."""

import math
from pathlib import Path
from typing import Any

import pytest

from gptpar.config import OptimizerConfig
from gptpar.optim.schedule import make_schedule
from tests.unit.config.deepspeed_files import BATCH, RATE, parsed_with, problems, resolved


def test_an_optimizer_without_weight_decay_has_none_as_in_deepspeed(folder: Path) -> None:
    config, derived = resolved({**BATCH, **RATE})
    assert config.optimizer.weight_decay == 0.0
    assert derived["weight decay"].reason.endswith("absent, so DeepSpeed's default")
    assert derived["clip grad"].value == 1.0
    assert "default since its 0.19.3" in derived["clip grad"].reason and "write 0.0" in derived["clip grad"].reason
    config, derived = resolved({**BATCH, **RATE}, "--weight-decay 0.2 --clip-grad 0.5")
    assert (config.optimizer.weight_decay, config.optimizer.clip_grad) == (0.2, 0.5)
    assert "weight decay" not in derived


def test_flags_make_the_optimizer_where_they_give_its_rate(folder: Path) -> None:
    """As in Megatron-DeepSpeed, which hands DeepSpeed an optimizer made from flags: the file's is not read."""
    for kind in ("AdamW", "Lion", "OneBitAdam"):
        params = {"lr": 6e-4, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.3, "max_grad_norm": 0.5}
        file = {**BATCH, "optimizer": {"type": kind, "params": params}}
        config, derived = resolved(file, "--lr 1e-4 --adam-beta2 0.95")
        ours = config.optimizer
        assert (ours.optimizer, ours.lr, ours.adam_beta1, ours.adam_beta2) == ("adam", 1e-4, 0.9, 0.95)
        assert (ours.adam_eps, ours.weight_decay, ours.clip_grad) == (1e-8, 0.01, 1.0)
        assert "weight decay" not in derived
        (told,) = parsed_with(file, "--lr 1e-4").without_effect
        assert told.startswith("optimizer: --lr 0.0001 is given") and "so flags make the optimizer" in told


def linear(kind: str, **params: object) -> dict[str, Any]:
    params = {"warmup_type": "linear", "warmup_num_steps": 100, **params}
    return {**BATCH, **RATE, "scheduler": {"type": kind, "params": params}}


def rates(file: dict[str, Any], *steps: int) -> list[float]:
    config, _ = resolved(file)
    schedule = make_schedule(config, 5000 * 32)
    return [schedule.learning_rate(step * 32) for step in steps]


def test_warmup_then_constant(folder: Path) -> None:
    assert rates(linear("WarmupLR"), 0, 1, 51, 101, 4999) == pytest.approx([0, 0, 3e-4, 6e-4, 6e-4])
    file = linear("WarmupLR", warmup_min_lr=1e-4, warmup_max_lr=5e-4)
    assert rates(file, 0, 51, 4999) == pytest.approx([1e-4, 3e-4, 5e-4])
    assert "optimizer.params.lr: scheduler.params.warmup_max_lr is the peak" in parsed_with(file).without_effect


def test_warmup_then_linear_decay_to_where_it_began(folder: Path) -> None:
    file = linear("WarmupDecayLR", warmup_min_lr=1e-4, warmup_max_lr=5e-4, total_num_steps=1100)
    assert rates(file, 0, 101, 601, 1101, 2000) == pytest.approx([1e-4, 5e-4, 3e-4, 1e-4, 1e-4])


def test_warmup_then_cosine_in_shares_of_the_peak(folder: Path) -> None:
    file = linear("WarmupCosineLR", warmup_min_ratio=0.5, cos_min_ratio=0.1, total_num_steps=1100)
    quarter = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    found = rates(file, 0, 1, 350, 600, 1100)
    assert found == pytest.approx([0, 3e-4, quarter * 6e-4, 0.55 * 6e-4, 6e-5])
    _, derived = resolved(file)
    assert (derived["cos min ratio"].value, derived["cos min ratio"].reason) == (
        0.1,
        "ds.json: scheduler.params.cos_min_ratio",
    )
    assert rates(linear("WarmupCosineLR", total_num_steps=1100), 1100) == pytest.approx([6e-8])


def optimizer(kind: str, **params: object) -> dict[str, Any]:
    return {**BATCH, "optimizer": {"type": kind, "params": {"lr": 1e-3, **params}}}


@pytest.mark.parametrize(
    ("file", "flags", "told"),
    [
        (
            optimizer("Lamb", max_coeff=0.3),
            "",
            'type is "Lamb", and gptpar\'s optimizers are AdamW, Lion and Muon: set',
        ),
        (
            optimizer("Adam", adam_w_mode=False, weight_decay=0.1),
            "",
            "adam_w_mode is false: Adam would add the weight d",
        ),
        (
            linear("WarmupDecayLR", total_num_steps=9),
            "",
            "warmup_max_lr is absent, so DeepSpeed would train at 0.001 and",
        ),
        (linear("WarmupLR"), "--lr-decay-style cosine", "--lr-decay-style cosine is given, too, and DeepSpeed follows"),
    ],
)
def test_what_gptpars_optimizer_and_schedule_cannot_be(
    folder: Path, file: dict[str, Any], flags: str, told: str
) -> None:
    (problem,) = problems(file, flags)
    assert problem.startswith("ds.json: ") and told in problem


# --- DeepSpeed's Muon in a configuration of ``gptpar pretrain`` -----------------------------------------------------


def muon(params: dict[str, Any]) -> OptimizerConfig:
    """The optimizer of a run with this Muon."""
    return resolved({**BATCH, "optimizer": {"type": "Muon", "params": params}})[0].optimizer


def test_it_has_deepspeeds_settings(folder: Path) -> None:
    o = muon({"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "ns_method": "gram"})
    assert (o.optimizer, o.lr, o.muon_lr, o.weight_decay, o.muon_momentum) == ("muon", 0.02, 0.02, 0.1, 0.9)
    assert (o.muon_coefficient_type, o.muon_num_ns_steps, o.muon_scale_mode) == ("simple", 5, "shape_scaling")
    assert (o.muon_extra_scale_factor, o.muon_nesterov, o.muon_qkv) == (1.0, True, "split")
    assert (o.adam_beta1, o.adam_beta2, o.adam_eps) == (0.9, 0.95, 1e-10)


@pytest.mark.parametrize(
    ("params", "rates"),
    [
        ({"lr": 1e-3}, (1e-3, 1e-3)),
        ({"lr": 1.0, "adam_lr": 3e-4, "muon_lr": 0.02}, (3e-4, 0.02)),
        ({"adam_lr": 3e-4, "muon_lr": 0.02, "per_head_muon": True}, (3e-4, 0.02)),
    ],
)
def test_rates_of_one_kind_overrule_the_rate_of_both(
    folder: Path, params: dict[str, Any], rates: tuple[float, float]
) -> None:
    o = muon(params)
    assert (o.lr, o.muon_lr) == rates
    assert o.muon_qkv == ("heads" if "per_head_muon" in params else "split")

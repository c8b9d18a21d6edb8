"""Muon of ``gptpar.initialize``: DeepSpeed's type, and torch's own optimizer, beside torch without its cast."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gptpar
from gptpar.errors import ConfigError
from tests.unit.adapter.beside_torch import CLIP, assert_close, make_config

STEPS = 6
PARAMS = {"lr": 0.02, "adam_lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1, "eps": 1e-6}


class Network(nn.Module):
    """Two matrices in one parameter, an embedding, and names that are an embedding's alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(7, 5), nn.Linear(5, 9), nn.Linear(9, 3)
        self.experts = nn.Parameter(torch.randn(2, 5, 5) / 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + sum(x @ expert for expert in self.experts)
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y


@pytest.fixture(autouse=True)
def uncast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's Muon without its cast to bf16."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)


def network(dtype: torch.dtype = torch.float64) -> Network:
    torch.manual_seed(0)
    return Network().to(dtype)


def loss_of(model: Any, step: int) -> Tensor:
    tokens = torch.randint(0, 7, (4, 3), generator=torch.Generator().manual_seed(step))
    loss: Tensor = model(tokens).square().mean()
    return loss


def muons(name: str, parameter: Tensor) -> bool:
    return parameter.dim() > 1 and "embed" not in name


def in_plain_torch() -> list[Tensor]:
    """Each matrix of three-dimensional parameters is a parameter of torch's Muon by itself."""
    model = network()
    experts = nn.ParameterList([*model.experts.detach()])
    del model.experts
    model.experts = experts  # type: ignore[assignment]
    matrices = [p for name, p in model.named_parameters() if muons(name, p)]
    others = [p for name, p in model.named_parameters() if not muons(name, p)]
    muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.9, weight_decay=0.1)
    adam = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        muon.step()
        adam.step()
    del model.experts
    return [torch.stack([*experts]), *model.parameters()]


def make(ratio: float, **more: Any) -> Any:
    config = make_config(ratio, optimizer={"type": "Muon", "params": PARAMS})
    return gptpar.initialize(**{"model": network(), "config": config, **more})[0]


def train(engine: Any, start: int = 0, stop: int = STEPS) -> list[Tensor]:
    for step in range(start, stop):
        engine.backward(loss_of(engine, step))
        engine.step()
    return [p.detach() for p in engine.module.parameters()]


@pytest.mark.parametrize(("first", "second"), [(0.0, 0.3), (0.3, 1.0)])
def test_deepspeeds_muon_trains_as_torchs(tmp_path: Path, first: float, second: float) -> None:
    """Half of the steps at one ratio, the others by an engine of another, from the first one's checkpoint."""
    engine, other = make(first), make(second)
    train(engine, 0, STEPS // 2)
    engine.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    ends = train(other, STEPS // 2)
    engine.close()
    other.close()
    assert_close(ends, in_plain_torch())


def test_groups_are_deepspeeds_and_a_parameter_says_itself_whether_it_is_muons() -> None:
    model = network()
    model.embed.weight.use_muon, model.up.weight.use_muon = True, False  # type: ignore[attr-defined]
    engine = make(0.0, model=model)
    muon, adam = engine.optimizer.param_groups
    assert {id(p) for p in muon["params"]} == {id(p) for p in (model.embed.weight, model.down.weight, model.experts)}
    assert (muon["use_muon"], muon["lr"], muon["momentum"]) == (True, 0.02, 0.9)
    assert (adam["use_muon"], adam["lr"], adam["betas"], adam["eps"]) == (False, 1e-3, (0.9, 0.95), 1e-6)
    assert engine.get_mom() == [0.9, (0.9, 0.95)]
    engine.close()


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_torchs_muon_is_taken_over(adjust: str | None) -> None:
    """It has two-dimensional parameters alone; a warning names those that nobody trains."""

    def made(model: Network) -> torch.optim.Muon:
        matrices = [model.up.weight, model.down.weight]
        return torch.optim.Muon(matrices, lr=0.02, momentum=0.9, nesterov=False, ns_steps=4, adjust_lr_fn=adjust)

    model = network()
    torchs = made(model)
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, step).backward()
        nn.utils.clip_grad_norm_([model.up.weight, model.down.weight], CLIP)
        torchs.step()
    other = network()
    with pytest.warns(UserWarning, match="in no group and will not be trained"):
        engine = make(0.5, model=other, optimizer=made(other))
    assert_close(train(engine), model.parameters())
    engine.close()


def test_what_cannot_be_is_told() -> None:
    model = network()
    model.up.bias.use_muon = True  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"up.bias has the shape \(9,\) and use_muon.*set use_muon to False"):
        make(0.0, model=model)
    model = network()
    with pytest.raises(ConfigError, match="eps=0.001 in group 0, and gptpar's Muon has 1e-07: leave it out"):
        make(0.0, model=model, optimizer=torch.optim.Muon([model.up.weight], eps=1e-3))
    groups = [{"params": [model.up.weight]}, {"params": [model.down.weight], "nesterov": False}]
    with pytest.raises(ConfigError, match="nesterov True, False in its groups, which share one update"):
        make(0.0, model=model, optimizer=torch.optim.Muon(groups))


@pytest.mark.parametrize(("ratio", "place"), [(0.0, "optimizer"), (1.0, "host_optimizer")])
def test_memory_is_that_of_each_groups_states(ratio: float, place: str) -> None:
    adam, muon = (
        gptpar.estimate_memory(network(torch.float32), make_config(ratio, optimizer={"type": kind}), device_type="cpu")
        for kind in ("AdamW", "Muon")
    )
    matrices = sum(p.numel() for name, p in network().named_parameters() if muons(name, p))
    assert getattr(adam, place) - getattr(muon, place) == pytest.approx(4 * matrices, abs=4 * 64 * 8)

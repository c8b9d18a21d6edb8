"""A dense model's MLPs become experts: the mixture begins with the dense model's numbers."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gptpar.config.flags import ParsedFlags, parse_flags
from gptpar.config.validate import resolve
from gptpar.data.loader import make_micro_batch
from gptpar.exchange.start_from_hf import start_from_hf, take_model_of_hf
from gptpar.model.families import config_of
from tests.helpers import make_trainer
from tests.unit.exchange.hf_models import TOKENS, save_theirs

pytest.importorskip("transformers")

RUN = "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --eval-iters 0 --fp64 --moe-use-upcycling "


def parsed_flags(folder: Path, flags: str) -> ParsedFlags:
    parsed = parse_flags(f"--load-hf {folder} {RUN} {flags}".split())
    take_model_of_hf(parsed, str(folder))
    return parsed


@pytest.mark.parametrize("blocks", ["[0,1,1]", "1"])
def test_the_mixture_begins_with_the_dense_models_loss(blocks: str, tmp_path: Path) -> None:
    reference = save_theirs(tmp_path, "Llama")
    flags = f"--num-experts 4 --moe-router-topk 3 --moe-layer-freq {blocks} "
    config, _ = resolve(parsed_flags(tmp_path, flags + "--moe-z-loss-coeff 1e-3"), 1)
    trainer = make_trainer(config)
    held = trainer.engine.optimizer.state_tensors()["weights"]
    assert start_from_hf(tmp_path, held, None, config.model) == "llama"
    trainer.engine.publish()
    loss = trainer.evaluate([make_micro_batch(one.numpy(), eod=0) for one in TOKENS.split(1)]).item()
    weights = {name: parts.parts[0][1] for name, parts in held.items()}
    with torch.no_grad():
        wanted = F.cross_entropy(reference(TOKENS[:, :-1]).logits.flatten(0, 1), TOKENS[:, 1:].flatten()).item()
    # transformers forms the angles of rotary positions in fp32.
    assert loss == pytest.approx(wanted, rel=1e-6)
    theirs = reference.state_dict()
    for expert in range(4):
        prefix = "model.layers.2.mlp"
        gate_and_up = torch.stack([theirs[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up")])
        assert torch.equal(weights["layers.2.mlp.up"][expert], gate_and_up)
        assert torch.equal(weights["layers.2.mlp.down"][expert], theirs[f"{prefix}.down_proj.weight"])
    assert 0 < weights["layers.2.mlp.router.weight"].std() < 0.1
    if blocks == "1":
        assert config_of(config.model, 61)["model_type"] == "mixtral"
    trainer.close()

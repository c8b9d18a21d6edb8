"""Lightning's DeepSpeedStrategy trains, saves and resumes under ``gptpar as-deepspeed``, with Lightning's own numbers.

Tried with lightning 2.6. PYTHONPATH may name a folder that has it. The strategy accepts GPUs alone: on a CPU the
program pretends to have one.
"""

import importlib.util
from pathlib import Path

import pytest

from tests.e2e.test_libraries import AS_DEEPSPEED, losses

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="not installed: lightning")

PROGRAM = """
import json, sys, torch
import lightning
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy


class Pretended(CUDAAccelerator):
    setup_device = setup = teardown = lambda self, *_: None
    parse_devices, is_available = staticmethod(lambda devices: [0]), staticmethod(lambda: True)
    get_parallel_devices = staticmethod(lambda devices: [torch.device("cpu", 0)])


class Module(lightning.LightningModule):
    def configure_model(self):
        torch.manual_seed(1)
        self.losses = []
        with torch.device("cpu"):  # on a GPU, Lightning alone would draw other initial values there
            self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))

    def training_step(self, batch, number):
        loss = torch.nn.functional.mse_loss(self.net(batch), batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


folder, stage, resume = sys.argv[1:]
accelerator = "gpu" if torch.cuda.is_available() else Pretended() if stage else CPUAccelerator()
strategy = DeepSpeedStrategy(stage=int(stage), offload_optimizer=True) if stage else "auto"
rows = torch.randn(16, 16, generator=torch.Generator().manual_seed(5))
trainer = lightning.Trainer(
    strategy=strategy, accelerator=accelerator, devices=1, max_steps=4, precision="32-true", accumulate_grad_batches=2,
    gradient_clip_val=0.1, default_root_dir=folder, logger=False, use_distributed_sampler=False,
    callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)],
)
module = Module()
trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2), ckpt_path=resume or None)
print(json.dumps(module.losses))
"""


@pytest.mark.parametrize("device", ["", pytest.param("0", marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
def test_lightning_trains_with_deepspeeds_strategy(tmp_path: Path, device: str) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    where = {"CUDA_VISIBLE_DEVICES": device}
    plain = tmp_path / "plain"
    expected = losses(program, plain, "", "", **where)
    resumed = losses(program, plain / "again", "", plain / "step=2.ckpt", **where)
    for stage in (2, 3):
        folder = tmp_path / f"stage{stage}"
        command = *AS_DEEPSPEED, program
        assert losses(*command, folder, stage, "", **where) == pytest.approx(expected, rel=1e-6)
        again = losses(*command, folder / "again", stage, folder / "step=2.ckpt", **where)
        assert again == pytest.approx(resumed, rel=1e-6) and again[0] != expected[0]

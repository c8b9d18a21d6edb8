"""Pipelines that were pickled whole while their classes were in ``any_module``."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gptpar.adapter.pipeline_module import PipelineModule

PROGRAM = """
import pickle, sys
model = pickle.loads(open(sys.argv[1], "rb").read())
print(type(model).__module__, [one.tolist() for one in model.parameters()])
"""


@pytest.mark.slow
def test_a_pipeline_of_the_former_name_loads_in_a_new_process(tmp_path: Path) -> None:
    model = PipelineModule([torch.nn.Linear(3, 2), torch.tanh], num_stages=1)
    written = pickle.dumps(model, protocol=2)  # torch.save's protocol: names are text
    assert written.count(b"gptpar.adapter.") >= 3
    (tmp_path / "model.pkl").write_bytes(written.replace(b"gptpar.adapter.", b"gptpar.any_module."))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "model.pkl")]
    read = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert read.strip() == f"gptpar.adapter.pipeline_module {[one.tolist() for one in model.parameters()]}"

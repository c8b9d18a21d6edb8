"""Pipelines that were pickled whole while their classes were in ``any_module``."""

import pickle

import torch

from gptpar.adapter.pipeline_module import PipelineModule


def test_a_pipeline_of_the_former_name_loads() -> None:
    model = PipelineModule([torch.nn.Linear(3, 2), torch.tanh], num_stages=1)
    written = pickle.dumps(model, protocol=2)  # torch.save's protocol: names are text
    assert written.count(b"gptpar.adapter.") >= 3
    read = pickle.loads(written.replace(b"gptpar.adapter.", b"gptpar.any_module."))
    assert type(read) is PipelineModule
    assert all(map(torch.equal, read.parameters(), model.parameters()))

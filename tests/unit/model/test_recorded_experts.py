"""Steps with experts, recorded and replayed, against the same steps launched: the same bits, and no host waits."""

from functools import partial
from typing import Any

import pytest
import torch

from gptpar.config.sections.precision import graph_obstacles, wants_graph
from gptpar.data.loader import make_micro_batch
from gptpar.engine.step_graph import LAUNCHED_STEPS, StepGraph
from gptpar.model.experts import products, routing
from tests.helpers import make_trainer, random_tokens, tiny_config
from tests.python_recorder import PythonRecorder

STEPS = 6
EXPERTS = (
    "--position-embedding-type rope --swiglu --disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 16 "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 --moe-router-load-balancing-type "
    "global_aux_loss --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 --bf16 --global-batch-size 4 "
)


def opened(
    judged_NE: torch.Tensor,
    choice_NK: torch.Tensor,
    groups: list[int],
    seq_length: int,
    capacity: int,
    by_position: bool,
) -> torch.Tensor:
    """The choice of experts without the operator around it, so that a recorder sees what is inside."""
    drop = partial(routing.without_surplus, seq_length=seq_length, capacity=capacity, by_position=by_position)
    return routing.chosen_experts(judged_NE, choice_NK, groups, drop if capacity else None)


def trained(flags: str, recorder: PythonRecorder | None) -> dict[str, Any]:
    trainer = make_trainer(tiny_config(EXPERTS + flags))
    if recorder is not None:
        engine = trainer.engine
        before = engine.gatherer.wait_for_all
        how = (trainer._forward_backward, before, engine.finish, engine.graph_breaks)
        trainer._graph = StepGraph(*how, recorder=recorder)
    found: dict[str, Any] = {}
    for step in range(STEPS):
        batches = [make_micro_batch(part.numpy(), eod=0) for part in random_tokens(4, 16, 60, seed=step).split(2)]
        loss = trainer.forward_backward(batches, step)
        launched = trainer.update(loss, iteration=step + 1, samples=4, progress=4.0 * step, stop=False)
        found[f"numbers of step {step}"] = torch.tensor(launched.readings.read())
    return found | {"weights": trainer.engine.optimizer.master.clone(), **trainer.experts.tensors()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--moe-expert-capacity-factor 0.75 --recompute-granularity selective --recompute-modules mlp",
        "--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-pre-softmax --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
    ],
    ids=["capacity", "groups"],
)
def test_a_recorded_step_has_the_launched_one_s_bits(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_has_kernel", lambda *_: True)  # that of the CPU takes bf16, too
    monkeypatch.setattr(routing, "choose_experts", opened)
    wanted, recorder = trained(flags, None), PythonRecorder()
    found = trained(flags, recorder)
    assert recorder.recordings == 1 and recorder.replays == STEPS - LAUNCHED_STEPS
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
    assert wanted["choices of experts"].sum(1).tolist() == [4 * 16 * 2] * 2


def test_a_step_whose_loads_the_host_reads_is_not_recorded() -> None:
    assert not list(graph_obstacles(tiny_config(EXPERTS), 1)) and not wants_graph(tiny_config(EXPERTS), 1)
    assert wants_graph(tiny_config(EXPERTS + "--cuda-graph on"), 1)
    (found,) = graph_obstacles(tiny_config(EXPERTS + "--moe-ffn-hidden-size 20"), 1)
    assert found.startswith("experts of width 20 in bf16, in a model of width 32, are multiplied")
    (found,) = graph_obstacles(tiny_config(EXPERTS.replace("--bf16", "") + "--fp64"), 1)
    assert found.startswith("experts of width 16 in fp64, in a model of width 32, are multiplied")
    assert not list(graph_obstacles(tiny_config(EXPERTS + "--expert-model-parallel-size 2", 2), 2))
    (found,) = graph_obstacles(tiny_config(EXPERTS + "--expert-model-parallel-size 4 --global-batch-size 8", 4), 4)
    assert found.startswith("--expert-model-parallel-size 4 with --moe-router-topk 2 sends tokens by counts that the h")

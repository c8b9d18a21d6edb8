"""Arguments of the public API that have the wrong type are told in sentences that name them."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import gptpar
from gptpar.errors import ConfigError, GptparError, is_whole

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
NUMBERS = [1, 2, 3, 4]


class WithoutLength(Dataset[int]):
    def __getitem__(self, place: int) -> int:
        return place


class Named(dict[int, int], Dataset[int]):
    """A data set that is a mapping, too."""


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([7, 7])


def make(**arguments: Any) -> Any:
    return gptpar.initialize(model=nn.Linear(4, 1), config=CONFIG, **arguments)[0]


DATA = [
    (iter(NUMBERS), "list_iterator: a torch.utils.data.Dataset or a list is needed"),
    ({"train": NUMBERS}, "dict: samples are read by their numbers, 0, 1 and so on; pass one of its"),
    ("train.bin", "str: its characters would be the samples; pass the data set itself."),
    (WithoutLength(), "WithoutLength: it has no __len__, so that its samples cannot be divided"),
    ({1, 2}, "set: a torch.utils.data.Dataset or a list is needed; an iterator is for engine.train_b"),
    (DataLoader(NUMBERS), "DataLoader: pass its data set, of which"),
]
OTHERS = {
    "model_parameters": (5, "int: parameters, (name, parameter) pairs or groups are"),
    "loss_fn": ("mse", "str: a function of outputs is needed."),
    "collate_fn": (5, "int: a function of a list of samples is needed."),
    "mesh_param": (5, "int: the sizes (data-parallel, sequence-parallel) are needed."),
    "recording": (5, "int: what `with gptpar.deferred_init() as recording:` gives is needed."),
}
"""Arguments of ``initialize``, and wrong values of theirs."""


def problems(**arguments: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        make(**arguments)
    return caught.value.problems


@pytest.mark.parametrize(("data", "said"), DATA)
def test_training_data(data: object, said: str) -> None:
    (problem,) = problems(training_data=data)
    assert problem.startswith(f"training_data is of type {said}")


def test_all_wrong_types_are_told_at_once() -> None:
    found = problems(**{name: value for name, (value, _) in OTHERS.items()})
    for name, (_, said) in OTHERS.items():
        assert len([problem for problem in found if problem.startswith(f"{name} is of type {said}")]) == 1, found
    assert len(found) == len(OTHERS)
    assert problems(distributed_port="a") == ["distributed_port is of type str: the number of a port is needed."]


@pytest.mark.parametrize(
    "data", [Named({0: 7, 1: 7}), torch.full((2,), 7), Stream()], ids=["mapping", "tensor", "stream"]
)
def test_data_that_can_be_read(data: Any) -> None:
    made, _, loader, _ = gptpar.initialize(model=nn.Linear(4, 1), config=CONFIG, training_data=data)
    assert next(iter(loader)).tolist() == [7, 7]
    made.close()


METHODS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda e: e.save_checkpoint(None), "engine.save_checkpoint: save_dir is of type NoneType: the path of"),
    (lambda e: e.save_checkpoint(""), "engine.save_checkpoint: save_dir is empty: the path of a folder is needed"),
    (lambda e: e.load_checkpoint(5), "engine.load_checkpoint: load_dir is of type int: the path of"),
    (lambda e: e.set_train_batch_size(8.0), "train_batch_size is of type float: a whole number of samples is needed."),
    (lambda e: e.gathered("x").__enter__(), "engine.gathered(modifier_rank='x'): it is the number of a"),
    (lambda e: e.gathered(1).__enter__(), "engine.gathered(modifier_rank=1): it is the number of a process, 0 to 0"),
    (lambda e: e.optimizer.load_state_dict("moments.pt"), "state_dict is of type str: what state_dict() of an optim"),
]


def test_methods_of_an_engine(tmp_path: Path) -> None:
    """A path is a text or a path."""
    engine = make()
    for act, said in METHODS:
        with pytest.raises(GptparError, match=f"^{re.escape(said)}"):
            act(engine)
    for folder in (tmp_path / "path", str(tmp_path / "text")):
        engine.save_checkpoint(folder)
        assert engine.load_checkpoint(folder)[0] is not None
    engine.close()


def pipeline(*arguments: Any, **named: Any) -> Callable[[], Any]:
    return lambda: gptpar.PipelineModule(*arguments, **named)


FUNCTIONS: list[tuple[Callable[[], Any], str]] = [
    (lambda: gptpar.estimate_memory(5, CONFIG), "model is of type int: a torch.nn.Module is needed."),
    (lambda: gptpar.estimate_memory(nn.Linear(2, 2), CONFIG, "x"), "world is 'x': it is the number of data-parallel"),
    (lambda: gptpar.estimate_zero2_model_states_mem_needs_all_live(5), "model is of type int: a torch.nn.Module is"),
    (lambda: gptpar.estimate_zero3_model_states_mem_needs_all_live(None), "model is of type NoneType: a torch.nn.M"),
    (lambda: gptpar.estimate_zero2_model_states_mem_needs_all_cold("1B"), "total_params is of type str: a number is"),
    (lambda: gptpar.estimate_zero3_model_states_mem_needs_all_cold(10, 5, 0), "num_gpus_per_node is 0: it is at lea"),
    (lambda: gptpar.add_config_arguments(5), "parser is of type int: an argparse.ArgumentParser is needed."),  # type: ignore[arg-type]
    (pipeline(5, 1), "PipelineModule: layers is of type int: a list of LayerSpecs, modules or"),
    (pipeline([], "2"), "PipelineModule: num_stages is of type str: a whole number is needed."),
    (pipeline([nn.Linear(2, 2)], 1, loss_fn=5), "PipelineModule: loss_fn is of type int: a function of output and"),
    (pipeline([nn.Linear(2, 2)], 1, partition_method=5), "PipelineModule: partition_method is of type int: a text"),
    (pipeline([nn.Linear(2, 2)], topology=5), "PipelineModule: topology is of type int: leave it out, and give num"),
]


@pytest.mark.parametrize(("act", "said"), FUNCTIONS)
def test_functions(act: Callable[[], Any], said: str) -> None:
    with pytest.raises(GptparError, match=re.escape(said)):
        act()


def test_numbers_of_other_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    """What has numpy's type counts as Python's; products do not overflow in 32 bits."""
    whole = np.int32
    printed = []
    for kind in (int, np.int32, np.float64):
        gptpar.estimate_zero2_model_states_mem_needs_all_cold(kind(1_300_000_000), np.int64(8), whole(2))
        gptpar.estimate_zero3_model_states_mem_needs_all_cold(kind(1_300_000_000), kind(10**8), 8, whole(2))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2]
    engine = make()
    assert gptpar.estimate_memory(engine.module, CONFIG, whole(2)) == gptpar.estimate_memory(engine.module, CONFIG, 2)
    with engine.gathered(np.int64(0)):
        engine.set_train_batch_size(whole(12))
    assert type(engine.train_batch_size()) is int and engine.gradient_accumulation_steps() == 6
    engine.close()
    assert gptpar.PipelineModule([nn.Linear(2, 2)], whole(1)).num_stages == 1
    assert [is_whole(value) for value in (1, whole(1), True, np.bool_(True), 1.0)] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"params": 5}, "params is of type int: parameters or groups are needed, such as"),
        ({"lr": "fast"}, "lr is 'fast', not at least 0"),
        ({"betas": (0.9,), "eps": None}, "eps is None, not at least 0; betas is [0.9], not two numbers"),
        ({"betas": ("a", 1)}, "beta 'a' is not in [0, 1); beta 1 is not in [0, 1)"),
        ({"offload_ratio": "all", "threads": "many"}, "offload_ratio is 'all', not between 0 and 1; threads is 'm"),
    ],
)
def test_the_optimizer_alone(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^TwinFlowAdamW: {re.escape(said)}"):
        gptpar.TwinFlowAdamW(**({"params": nn.Linear(2, 2).parameters()} | arguments))

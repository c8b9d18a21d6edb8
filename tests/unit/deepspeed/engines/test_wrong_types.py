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


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(20.0).view(5, 4))


def make(**arguments: Any) -> Any:
    return gptpar.initialize(model=nn.Linear(4, 1), config=CONFIG, **arguments)[0]


INITIALIZE = [
    ("training_data", 5, "int: a torch.utils.data.Dataset or a list is needed"),
    ("training_data", iter(NUMBERS), "list_iterator: a torch.utils.data.Dataset"),
    ("training_data", {"train": NUMBERS}, "dict: samples are read by their numbers, 0, 1 and so on; pass one of its"),
    ("training_data", "train.bin", "str: its characters would be the samples; pass the data set itself."),
    ("training_data", WithoutLength(), "WithoutLength: it has no __len__, so that its samples cannot be divided"),
    ("training_data", {1, 2}, "set: a torch.utils.data.Dataset or a list is needed; an iterator is for engine.train_b"),
    ("training_data", DataLoader(NUMBERS), "DataLoader: pass its data set, of which"),
    ("model_parameters", 5, "int: parameters, (name, parameter) pairs or groups are"),
    ("collate_fn", 5, "int: a function of a list of samples is needed."),
    ("loss_fn", "mse", "str: a function of outputs is needed."),
    ("recording", 5, "int: what `with gptpar.deferred_init() as recording:` gives is needed."),
    ("mesh_param", 5, "int: the sizes (data-parallel, sequence-parallel) are needed."),
    ("distributed_port", "a", "str: the number of a port is needed."),
]


@pytest.mark.parametrize(("name", "value", "said"), INITIALIZE)
def test_initialize(name: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**{name: value})
    assert len(caught.value.problems) == 1 and caught.value.problems[0].startswith(f"{name} is of type {said}")


def test_all_wrong_types_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        make(training_data=5, loss_fn="mse", mesh_param=5)
    assert [problem.split()[0] for problem in caught.value.problems] == ["training_data", "loss_fn", "mesh_param"]


@pytest.mark.parametrize(
    ("data", "samples"),
    [(Named({0: 7, 1: 7}), [7, 7]), (torch.full((2,), 7), [7, 7]), (Stream(), [[0, 1, 2, 3], [4, 5, 6, 7]])],
    ids=["mapping", "tensor", "stream"],
)
def test_data_that_can_be_read(data: Any, samples: list[Any]) -> None:
    made, _, loader, _ = gptpar.initialize(model=nn.Linear(4, 1), config=CONFIG, training_data=data)
    assert next(iter(loader)).tolist() == samples
    made.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    made = make()
    yield made
    made.close()


METHODS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda e: e.save_checkpoint(None), "engine.save_checkpoint: save_dir is of type NoneType: the path of"),
    (lambda e: e.save_checkpoint(""), "engine.save_checkpoint: save_dir is empty: the path of a folder is needed"),
    (lambda e: e.load_checkpoint(5), "engine.load_checkpoint: load_dir is of type int: the path of"),
    (lambda e: e.set_train_batch_size("8"), "train_batch_size is of type str: a whole number of samples is needed."),
    (lambda e: e.set_train_batch_size(8.0), "train_batch_size is of type float: a whole number of samples is needed."),
    (lambda e: e.gathered("x").__enter__(), "engine.gathered(modifier_rank='x'): it is the number of a"),
    (lambda e: e.gathered(1).__enter__(), "engine.gathered(modifier_rank=1): it is the number of a process, 0 to 0"),
    (lambda e: e.optimizer.load_state_dict("moments.pt"), "state_dict is of type str: what state_dict() of an optim"),
]


@pytest.mark.parametrize(("act", "said"), METHODS)
def test_methods_of_an_engine(engine: Any, act: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(GptparError) as caught:
        act(engine)
    assert str(caught.value).startswith(said)


def test_a_path_is_a_text_or_a_path(engine: Any, tmp_path: Path) -> None:
    for folder in (tmp_path / "path", str(tmp_path / "text")):
        engine.save_checkpoint(folder)
        assert engine.load_checkpoint(folder)[0] is not None


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
    whole, module = np.int32, nn.Linear(2, 2)
    assert gptpar.estimate_memory(module, CONFIG, whole(2)) == gptpar.estimate_memory(module, CONFIG, 2)
    printed = []
    for kind in (int, np.int32, np.float64):
        gptpar.estimate_zero2_model_states_mem_needs_all_cold(kind(1_300_000_000), np.int64(8), whole(2))
        gptpar.estimate_zero3_model_states_mem_needs_all_cold(kind(1_300_000_000), kind(10**8), 8, whole(2))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2]
    engine = gptpar.initialize(model=nn.Linear(2, 2), config=CONFIG)[0]
    with engine.gathered(np.int64(0)):
        pass
    engine.set_train_batch_size(whole(6) * engine.train_micro_batch_size_per_gpu())
    assert type(engine.train_batch_size()) is int and engine.gradient_accumulation_steps() == 6
    engine.close()
    assert gptpar.PipelineModule([module], whole(1)).num_stages == 1
    assert [is_whole(value) for value in (1, whole(1), True, np.bool_(True), 1.0)] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"params": 5}, "TwinFlowAdamW: params is of type int: parameters or groups are needed, such as"),
        ({"lr": "fast"}, "TwinFlowAdamW: lr is 'fast', not at least 0"),
        ({"eps": None}, "TwinFlowAdamW: eps is None, not at least 0"),
        ({"betas": 5}, "TwinFlowAdamW: betas is 5, not two numbers"),
        ({"betas": (0.9,)}, "TwinFlowAdamW: betas is [0.9], not two numbers"),
        ({"betas": ("a", 1)}, "TwinFlowAdamW: beta 'a' is not in [0, 1); beta 1 is not in [0, 1)"),
        (
            {"offload_ratio": "all", "threads": "many"},
            "TwinFlowAdamW: offload_ratio is 'all', not between 0 and 1; threads is 'many', not at least 1",
        ),
    ],
)
def test_the_optimizer_alone(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        gptpar.TwinFlowAdamW(**({"params": nn.Linear(2, 2).parameters()} | arguments))

"""Tells of arguments of ``gptpar.initialize`` that have the wrong type, before anything is built of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from gptpar.adapter.deferred import Recording
from gptpar.errors import ConfigError, wrong_type


def require_types(
    model_parameters: Any, training_data: Any, collate_fn: Any, recording: Any, loss_fn: Any, mesh_param: Any
) -> None:
    """Check arguments whose type would be found out much later, or by an error that names none of them.

    Raises:
        ConfigError: it names all that are wrong.
    """
    problems = list(_data_problems(training_data))
    if model_parameters is not None and not isinstance(model_parameters, Iterable):
        needed = "parameters, (name, parameter) pairs or groups are needed, such as model.parameters()"
        problems.append(wrong_type("model_parameters", model_parameters, needed))
    for name, function, example in (("collate_fn", collate_fn, "a list of samples"), ("loss_fn", loss_fn, "outputs")):
        if function is not None and not callable(function):
            problems.append(wrong_type(name, function, f"a function of {example} is needed"))
    if recording is not None and not isinstance(recording, Recording):
        needed = "what `with gptpar.deferred_init() as recording:` gives is needed"
        problems.append(wrong_type("recording", recording, needed))
    if mesh_param is not None and not isinstance(mesh_param, list | tuple):
        needed = "the sizes (data-parallel, sequence-parallel) are needed"
        problems.append(wrong_type("mesh_param", mesh_param, needed))
    if problems:
        raise ConfigError(problems)


def _data_problems(data: Any) -> Iterator[str]:
    if isinstance(data, DataLoader):
        yield (
            "training_data is of type DataLoader: pass its data set, of which gptpar.initialize makes a loader for "
            "each process, or pass iter(loader) to engine.train_batch."
        )
    elif isinstance(data, Mapping) and not isinstance(data, Dataset):
        needed = "samples are read by their numbers, 0, 1 and so on; pass one of its values if these are the data sets"
        yield wrong_type("training_data", data, needed)
    elif isinstance(data, str | bytes | bytearray):
        yield wrong_type("training_data", data, "its characters would be the samples; pass the data set itself")
    elif data is None or isinstance(data, IterableDataset):
        return
    elif not hasattr(data, "__getitem__"):
        needed = "a torch.utils.data.Dataset or a list is needed; an iterator is for engine.train_batch"
        yield wrong_type("training_data", data, needed)
    elif not hasattr(data, "__len__"):
        needed = "it has no __len__, so that its samples cannot be divided among processes; add the method"
        yield wrong_type("training_data", data, needed)

"""Loads a user's model and batches, named on the command line: ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``.

The function takes no arguments and returns ``model, make_batch``, or ``model, make_batch, loss_fn``:

- ``make_batch(number)`` returns a micro-batch, another one for each number: a dictionary is passed to the model by
  keywords, a tuple or list by position, anything else as the only argument.
- The loss is ``loss_fn(output, batch)``; without it the model's output itself, or its ``loss``, as in transformers.

Before the function, and before each batch, torch's random numbers are seeded: both may draw from them.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from gptpar.engine.tensors import mapped
from gptpar.errors import GptparError

SEED = 1234


@dataclass(frozen=True)
class UserModule:
    """The result of a user's function.

    Attributes:
        name: of the function, for messages.
        module: the model.
        make_batch: number -> a micro-batch; ``None``: the function returned the model alone.
        loss_fn: (output, batch) -> the loss; ``None``: the output is the loss, or has it as ``loss``.
    """

    name: str
    module: nn.Module
    make_batch: Callable[[int], Any] | None
    loss_fn: Callable[[Any, Any], torch.Tensor] | None

    def batch(self, number: int, device: torch.device, dtype: torch.dtype | None = None) -> Any:
        """A micro-batch.

        Args:
            dtype: of its floating-point numbers; ``None``: as they are.

        Raises:
            GptparError: the user's function failed, or there is none.
        """
        if self.make_batch is None:
            raise GptparError(f"{self.name} returns a model alone: here it has to return model, make_batch.")
        torch.manual_seed(SEED + number)
        with _told(f"{self.name}: make_batch({number})"):
            batch = self.make_batch(number)
        if isinstance(batch, Mapping):  # a tokenizer's answer is one, too
            batch = dict(batch)
        return mapped(batch, lambda one: one.to(device, dtype if one.is_floating_point() else None))

    def loss(self, model: Callable[..., Any], batch: Any) -> torch.Tensor:
        """The loss of a micro-batch.

        Args:
            model: the user's, or an engine with it.

        Raises:
            GptparError: the user's code failed, or it gave no scalar.
        """
        with _told(f"{self.name}: the model"):
            if isinstance(batch, Mapping):
                output = model(**batch)
            elif isinstance(batch, tuple | list):
                output = model(*batch)
            else:
                output = model(batch)
        if self.loss_fn is not None:
            with _told(f"{self.name}: loss_fn"):
                return self._checked(self.loss_fn(output, batch), "loss_fn")
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        return self._checked(loss, "the model")

    def _checked(self, loss: Any, source: str) -> torch.Tensor:
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
            return loss
        what = f"a {type(loss).__name__}"
        if isinstance(loss, torch.Tensor):
            without = "" if loss.requires_grad else " without gradient"
            what = f"a tensor of shape {tuple(loss.shape)}{without}"
        raise GptparError(
            f"{self.name}: {source} gave {what}, not a scalar loss with a gradient: let the model return its loss (or "
            "an object with .loss), or return model, make_batch, loss_fn with a loss_fn(output, batch)."
        )


def is_named_in(argv: Sequence[str]) -> bool:
    """Whether a command line names a user's module, and thus has other flags."""
    return any(word.split("=", 1)[0] == "--module" for word in argv)


def load_user_function(spec: str) -> Callable[[], UserModule]:
    """The function with that name; each call makes a new model, with the same random numbers.

    Raises:
        GptparError: there is no such file or function, or it cannot be imported.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise GptparError(f"--module {spec}: name a function as FILE.py:FUNCTION or package.module:FUNCTION.")
    module = _import(spec, where)
    function = getattr(module, name, None)
    if not callable(function):
        known = [one for one, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise GptparError(f"--module {spec}: {where} has no function {name}{hint}.")
    return lambda: _make(spec, function)


def _import(spec: str, where: str) -> ModuleType:
    """The user's file or module, imported; a file can import others from its own folder."""
    if not where.endswith(".py"):
        try:
            with _told(f"--module {spec}: importing {where}", allowed=(ModuleNotFoundError,)):
                return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise GptparError(f"--module {spec}: {error}: give a file's path, or set PYTHONPATH.") from error
    path = Path(where).resolve()
    if not path.is_file():
        raise GptparError(f"--module {spec}: there is no file {where} (looked for in {Path.cwd()}).")
    for name in (path.stem, str(path)):  # another module, such as Python's random, may have the first name
        known = sys.modules.get(name)
        if known is None:
            break
        if getattr(known, "__file__", None) == str(path):
            return known
    description = importlib.util.spec_from_file_location(name, path)
    assert description is not None and description.loader is not None
    module = importlib.util.module_from_spec(description)
    sys.modules[name] = module  # dataclasses look for themselves there
    sys.path.insert(0, str(path.parent))
    try:
        with _told(f"--module {spec}: importing {where}"):
            description.loader.exec_module(module)
    except BaseException:  # what was imported in part is not found again
        del sys.modules[name]
        sys.path.remove(str(path.parent))
        raise
    return module


def _make(spec: str, function: Callable[[], Any]) -> UserModule:
    torch.manual_seed(SEED)
    with _told(f"{spec}()"):
        made = function()
    values = made if isinstance(made, tuple | list) else (made,)
    if not 1 <= len(values) <= 3 or not isinstance(values[0], nn.Module) or not all(map(callable, values[1:])):
        kinds = ", ".join(type(value).__name__ for value in values)
        raise GptparError(
            f"{spec}() returned ({kinds}): it has to return model, make_batch or model, make_batch, loss_fn."
        )
    return UserModule(spec, *(*values, None, None)[:3])


@contextlib.contextmanager
def _told(what: str, allowed: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn an exception in the user's code into one sentence, with the line where it happened."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (GptparError, *allowed)):
            raise
        *_, last = traceback.extract_tb(error.__traceback__)
        text = str(error).strip() or "no message"
        place = f"{Path(last.filename).name}, line {last.lineno}"
        raise GptparError(f"{what} failed: {type(error).__name__}: {text} ({place}).") from error

"""Refuses copies and pickles of objects that hold an engine's memory, threads or connections."""

from __future__ import annotations

from typing import Any, NoReturn, SupportsIndex

from gptpar.errors import GptparError


class NotCopied:
    """Base of classes whose objects, and objects that contain them, cannot be copied, pickled or ``torch.save``d."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise GptparError(
            "an engine of gptpar.initialize, and a module while an engine has its weights, cannot be copied or "
            "pickled: keep its state with engine.save_checkpoint(folder) or the model's state_dict(); for a copy of "
            "the module, load that into a new one, or call engine.close() first."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__reduce_ex__(4)

"""Writes and reads bundles of outliers (``SAVE/spikes/iter_0001234/``), and limits their number.

``spike.json`` holds the step's loss and norm, the window before the step, the origin of its samples, each layer's norms
and the configuration. ``tokens.npy`` holds the batch's tokens, [samples, S + 1] (-1 is padding). The first
``MAX_BUNDLES`` outliers leave bundles. A bundle appears whole or not at all, and an error here does not end the run.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from gptpar.config import Config
from gptpar.data.loader import BatchLoader
from gptpar.errors import GptparError, printable
from gptpar.system.files import MAX_SMALL_BYTES, read_regular, sync_directory, sync_file, temporary_name, write_synced

FOLDER, FILE, TOKENS = "spikes", "spike.json", "tokens.npy"
MAX_BUNDLES = 10
MAX_TOKENS = 16 << 20
"""Most tokens of a bundle, 4 bytes each; of a larger batch the bundle holds the first samples."""


@dataclass(frozen=True)
class Spike:
    """A skipped outlier.

    Attributes:
        first_sample, samples: the position of its batch in the run's samples, and the size of the batch.
        losses, norms: the window before it, the oldest first.
        layers: kind of norm -> layer -> norm.
    """

    iteration: int
    loss: float
    grad_norm: float
    first_sample: int
    samples: int
    losses: Sequence[float]
    norms: Sequence[float]
    layers: Mapping[str, Mapping[str, float]]

    def sentence(self) -> str:
        """The sentence that the run prints."""
        last = self.first_sample + self.samples - 1
        return (
            f"iteration {self.iteration} was skipped as an outlier: loss {_against(self.loss, self.losses)}, gradient "
            f"norm {_against(self.grad_norm, self.norms)} of the last {len(self.losses)} steps; its batch is samples "
            f"{self.first_sample} to {last} of the run"
        )


def _against(value: float, window: Sequence[float]) -> str:
    mean = math.fsum(window) / len(window)
    std = math.sqrt(math.fsum((one - mean) ** 2 for one in window) / (len(window) - 1))
    return f"{value:.6g} is {(value - mean) / std if std else math.inf:+.1f} sigma from the mean {mean:.6g}"


class SpikeBundles:
    """Writes bundles into the run folder; only the main process has one.

    Args:
        folder: the run's.
        loader: of the training data, to read a batch again.
        say: takes a sentence.
    """

    def __init__(self, folder: Path, loader: BatchLoader, config: Config, say: Callable[[str], None]):
        self._folder, self._loader, self._config, self._say = folder / FOLDER, loader, config, say

    def keep(self, spike: Spike) -> None:
        """Write a bundle, unless there are enough, or this one was written before a resume."""
        path = self._folder / f"iter_{spike.iteration:07d}"
        temporary = temporary_name(path)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if path.exists() or sum(one.name.startswith("iter_") for one in bundles_in(self._folder)) >= MAX_BUNDLES:
                return
            temporary.mkdir()
            self._write(temporary, spike)
            sync_directory(temporary)
            os.rename(temporary, path)
            sync_directory(self._folder)
            self._say(f" > its tokens and norms are in {path} (gptpar inspect prints them)")
        except (OSError, GptparError) as error:
            self._say(f" > nothing is kept of the outlier of iteration {spike.iteration}: {printable(str(error))}")
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _write(self, folder: Path, spike: Spike) -> None:
        kept = max(1, min(spike.samples, MAX_TOKENS // (self._config.model.seq_length + 1)))
        tokens, sources = self._loader.whole_batch(spike.first_sample, spike.samples)
        with open(folder / TOKENS, "wb") as file:
            np.save(file, tokens[:kept].astype(np.int32), allow_pickle=False)
            sync_file(file)
        values = {
            "iteration": spike.iteration,
            "loss": spike.loss,
            "grad_norm": spike.grad_norm,
            "first_sample": spike.first_sample,
            "samples": spike.samples,
            "samples_kept": kept,
            "sources": sources[:kept],
            "window": {"losses": list(spike.losses), "norms": list(spike.norms)},
            "layers": {kind: dict(norms) for kind, norms in spike.layers.items()},
            "config": self._config.to_dict(),
        }
        write_synced(folder / FILE, json.dumps(values, indent=1))


def bundles_in(folder: Path) -> list[Path]:
    """The whole bundles of a ``spikes`` folder, the oldest first."""
    return sorted(path for path in folder.glob("iter_*") if (path / FILE).is_file() and path.suffix != ".tmp")


def read_bundle(path: Path) -> dict[str, Any]:
    """The contents of a bundle's ``spike.json``, with shape and dtype of its tokens.

    Raises:
        GptparError: it cannot be read.
    """
    try:
        values = json.loads(read_regular(path / FILE, MAX_SMALL_BYTES))
        list(_lines(path, values))
        tokens = np.load(path / TOKENS, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise GptparError(f"{path} is no readable bundle of an outlier: {printable(repr(error))}") from None
    return {**values, "tokens": {"shape": list(tokens.shape), "dtype": str(tokens.dtype)}}


def _lines(path: Path, values: Mapping[str, Any]) -> Iterator[str]:
    yield printable(f"{path}: {spike_of(values).sentence()}")
    kinds = list(values["layers"])
    layers = dict.fromkeys(layer for kind in kinds for layer in values["layers"][kind])
    rows = {layer: [values["layers"][kind].get(layer) for kind in kinds] for layer in layers}
    width = max(map(len, rows), default=5)
    yield printable(" ".join([f"{'layer':<{width}}", *(f"{kind:>14}" for kind in kinds)]))
    for layer, norms in rows.items():
        yield printable(" ".join([f"{layer:<{width}}", *(f"{'-' if n is None else f'{n:.6g}':>14}" for n in norms)]))
    for number, source in enumerate(values["sources"]):
        yield printable(f"sample {values['first_sample'] + number} of the run: {source}")


def spike_of(values: Mapping[str, Any]) -> Spike:
    """The outlier of a bundle's JSON."""
    kept = {one.name: values[one.name] for one in fields(Spike) if one.name not in ("losses", "norms")}
    return Spike(**kept, losses=values["window"]["losses"], norms=values["window"]["norms"])


def describe_bundle(path: Path) -> Iterator[str]:
    """The lines that ``gptpar inspect`` prints about a bundle.

    Raises:
        GptparError: it cannot be read.
    """
    values = read_bundle(path)
    first, *others = _lines(path, values)
    yield first
    yield printable(f"tokens {values['tokens']['shape']} of {values['samples']} samples, {values['tokens']['dtype']}")
    yield from others

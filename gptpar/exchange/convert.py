"""``import_model``: another program's model becomes a checkpoint, tensor by tensor."""

from __future__ import annotations

from pathlib import Path

from gptpar.checkpoint.streamed import write_checkpoint
from gptpar.errors import CheckpointError
from gptpar.exchange.files.new_folder import new_folder, why_not_new
from gptpar.exchange.foreign import ForeignReader, foreign_checkpoint
from gptpar.exchange.hf_import import hf_model
from gptpar.exchange.megatron.convert import megatron_model

OPEN = {ForeignReader.HUGGING_FACE: hf_model, ForeignReader.MEGATRON: megatron_model}
"""Opens a folder of each kind, or says everything that is wrong with it."""


def import_model(source: Path, target: Path) -> Path:
    """Make a checkpoint of another program's model; the source stays as it is.

    With an optimizer's state the checkpoint has the iteration of the run, which can go on from it. With weights alone
    it has iteration 0.

    Args:
        source: a Hugging Face folder, or a checkpoint or a folder of checkpoints of Megatron.
        target: a new folder of checkpoints.

    Returns:
        The checkpoint's path.

    Raises:
        CheckpointError: with all problems.
    """
    reader, problem = _reader(source, target), why_not_new(target)
    try:
        model = OPEN[reader](source)
    except CheckpointError as error:
        raise CheckpointError("\n".join(filter(None, [problem, str(error)]))) from None
    if problem:
        raise CheckpointError(problem)
    iteration = model.meta.get("progress", {"iteration": 0})["iteration"]
    with new_folder(target) as folder:
        model.keep(folder)
        path = write_checkpoint(folder, iteration, model.write, model.meta, model.tokenizer)
    return target / path.name


def _reader(source: Path, target: Path) -> ForeignReader:
    """The reader for the format of the source.

    Raises:
        CheckpointError: there is none, or the target would change the source.
    """
    if not source.exists():
        raise CheckpointError(f"{source} does not exist")
    if source.resolve() in target.resolve().parents:
        raise CheckpointError(f"{target} lies in {source}, which stays as it is: choose another folder")
    found = foreign_checkpoint(source)
    if found and found.inside:
        raise CheckpointError(f"{source} holds {found}: give {source / found.inside}")
    if found and found.reader:
        return found.reader
    if found is None and (source / "config.json").exists():  # its reader says what is missing there, or wrong
        return ForeignReader.HUGGING_FACE
    raise CheckpointError(
        f"{source} holds {found or 'no checkpoint'}, which gptpar cannot convert"
        f"{found.their_way if found else ''}: give a checkpoint of gptpar or Megatron, or a Hugging Face folder with "
        "config.json and its weights"
    )

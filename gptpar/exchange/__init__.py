"""Other programs' models and checkpoints behind one door: no other room imports a module of this one.

    foreign_checkpoint      whose checkpoint a folder holds; why_not_to_load, _save, _show: what it means for a verb
    import_model            another program's model becomes a checkpoint
    prepare_export          a checkpoint becomes a Hugging Face folder; Exports does so while a run goes on
    take_model_of_hf        a run takes its model from a Hugging Face folder, and start_from_hf its weights
    tokenizer_of_checkpoint which tokenizer files a checkpoint may use; anybody may have written it

A format is a row of ``foreign.py``, which recognises it by names of files, and a function in ``convert.OPEN`` if it can
be read. ``files`` knows the programs' files. Nothing in them is run.
"""

from gptpar.exchange.checkpoint_tokenizer import tokenizer_of_checkpoint
from gptpar.exchange.convert import import_model
from gptpar.exchange.exports import Exports
from gptpar.exchange.foreign import foreign_checkpoint, holds_ours, why_not_to_load, why_not_to_save, why_not_to_show
from gptpar.exchange.foreign_model import CONVERTED
from gptpar.exchange.hf_export import DTYPES, ExportOptions, prepare_export, shards_of
from gptpar.exchange.start_from_hf import start_from_hf, take_model_of_hf, take_shape_of_hf
from gptpar.exchange.tokenizer_files import missing_package

__all__ = [
    "CONVERTED",
    "DTYPES",
    "ExportOptions",
    "Exports",
    "foreign_checkpoint",
    "holds_ours",
    "import_model",
    "missing_package",
    "prepare_export",
    "shards_of",
    "start_from_hf",
    "take_model_of_hf",
    "take_shape_of_hf",
    "tokenizer_of_checkpoint",
    "why_not_to_load",
    "why_not_to_save",
    "why_not_to_show",
]

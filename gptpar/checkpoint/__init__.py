"""The checkpoint format, saving, loading and verification: whole files or none, CRC-32, any layout, no pickle."""

from gptpar.checkpoint.folders import HINT_NAME, edited_hint, find_checkpoints, latest
from gptpar.checkpoint.load import (
    LoadedCheckpoint,
    checkpoints_in,
    first_usable,
    load_checkpoint,
    load_meta,
    newest_whole,
    read_tensors,
)
from gptpar.checkpoint.manifest import DamagedCheckpoint, Manifest, read_manifest
from gptpar.checkpoint.save import save_checkpoint
from gptpar.checkpoint.verify import verify_checkpoint

__all__ = [
    "HINT_NAME",
    "DamagedCheckpoint",
    "LoadedCheckpoint",
    "Manifest",
    "checkpoints_in",
    "edited_hint",
    "find_checkpoints",
    "first_usable",
    "latest",
    "load_checkpoint",
    "load_meta",
    "newest_whole",
    "read_manifest",
    "read_tensors",
    "save_checkpoint",
    "verify_checkpoint",
]

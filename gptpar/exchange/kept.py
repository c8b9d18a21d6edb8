"""Keeps the files beside the weights of an imported Hugging Face folder, for a later export.

    SAVE/huggingface/config.json, generation_config.json, tokenizer.json, ...   byte for byte
    SAVE/huggingface/safetensors_headers.json                                   the headers of its weight files

So an export gives back the same files: the same configuration and tokenizer, and tensors of the same names, formats and
order in files of the same names.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from gptpar.errors import CheckpointError, printable
from gptpar.exchange.files.safetensors_file import SafetensorsFile, StoredTensor, tensors_of_header
from gptpar.exchange.hf_folder import CONFIG, INDEX, OLD_INDEX, HfModel, is_packed, is_weight_file, read_json
from gptpar.system.files import lies_in, read_regular

FOLDER, HEADERS = "huggingface", "safetensors_headers.json"
PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.md", "LICENSE*")
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Kept:
    """The kept files.

    Attributes:
        fields: the fields of ``config.json``.
        headers: file name -> the header of a weight file.
        tensors: name -> what the headers say of it.
    """

    folder: Path
    fields: dict[str, Any]
    headers: dict[str, str]
    tensors: dict[str, StoredTensor]

    def damaged(self, reason: str) -> CheckpointError:
        """The error for headers that cannot be used."""
        return CheckpointError(
            f"{self.folder / HEADERS} is damaged ({reason}): delete it, and weight files are laid out anew"
        )

    def files(self) -> Iterator[Path]:
        """All files but the headers and the index of weight files; links that lead out of the folder are left out."""
        there = (path for path in sorted(self.folder.iterdir()) if path.name not in (HEADERS, INDEX))
        return (path for path in there if path.is_file() and lies_in(path, self.folder))

    def index(self) -> dict[str, bytes]:
        """The index of weight files by its name, where there is one in the folder; no link that leads out of it."""
        path = self.folder / INDEX
        return {INDEX: read_regular(path)} if path.is_file() and lies_in(path, self.folder) else {}

    def has_tokenizer(self, identity: dict[str, Any]) -> bool:
        """Whether the files hold a run's tokenizer; also true for a run without a tokenizer."""
        wanted = set(identity["sha256"].values()) if isinstance(identity.get("sha256"), dict) else set()
        return wanted <= {hashlib.sha256(read_regular(path)).hexdigest() for path in self.files()}


def kept_folder(root: Path) -> Path | None:
    """Where the files are kept; ``None``: nothing was imported, or a link leads out of the run folder."""
    places = [root, *([root.parent.parent] if root.parent.name == "branches" else [])]
    found = ((place, place / FOLDER) for place in places if (place / FOLDER / CONFIG).is_file())
    return next((folder for place, folder in found if lies_in(folder, place)), None)


def kept_in(root: Path) -> Kept | None:
    """The kept files for the checkpoints of a folder, which may be a branch of a run; ``None``: nothing was imported.

    Raises:
        CheckpointError: the files cannot be read.
    """
    folder = kept_folder(root)
    if folder is None:
        return None
    headers = read_json(folder / HEADERS) if (folder / HEADERS).is_file() else {}
    kept = Kept(folder, read_json(folder / CONFIG), headers, {})
    for name, text in headers.items():
        try:
            if not is_weight_file(name) or not isinstance(text, str):
                raise ValueError("it is no header of a weight file")
            kept.tensors.update(tensors_of_header(text))
        except ValueError as error:
            raise kept.damaged(f"{printable(name[:80])}: {error}") from None
    return kept


def keep(model: HfModel, root: Path) -> None:
    """Copy the files beside the weights of a Hugging Face folder into a folder of checkpoints, once."""
    if (root / FOLDER).exists():
        return
    temporary = root / f".{FOLDER}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for path in files_to_keep(model.folder):
        shutil.copyfile(path, temporary / path.name)
    files = {source.file.path.name: source.file for parts in model.parameters.values() for _, source in parts}
    headers = {name: file.header for name, file in sorted(files.items()) if isinstance(file, SafetensorsFile)}
    if is_packed(model.fields):  # an export writes these weights in the format that they were read in
        plain = {name: value for name, value in model.fields.items() if name != "quantization_config"}
        if not (plain.get("dtype") or plain.get("torch_dtype")):
            plain["torch_dtype"] = "bfloat16"
        (temporary / CONFIG).write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
        headers = {}
    (temporary / HEADERS).write_text(json.dumps(headers), encoding="utf-8")
    temporary.rename(root / FOLDER)


def files_to_keep(folder: Path) -> list[Path]:
    """The files beside the weights of a Hugging Face folder.

    Raises:
        CheckpointError: a link leads out of the folder; the file may be private, and an export would copy it.
    """
    wanted = [path for path in sorted(folder.iterdir()) if any(fnmatchcase(path.name, pattern) for pattern in PATTERNS)]
    found = [path for path in wanted if path.name != OLD_INDEX and path.is_file() and path.stat().st_size <= MAX_BYTES]
    if outside := [path.name for path in found if not lies_in(path, folder)]:
        names = ", ".join(map(printable, outside))
        raise CheckpointError(f"{folder} has links to files outside of it: put the files in their places: {names}")
    return found

"""What strangers may have written: edited metas, malicious pickles, other programs' folders, lines that forge."""

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.faults.fault import Failed, Kind, Measured, kind
from tests.faults.place import Place

KINDS: list[Kind] = []

FORGED = "\x1b]0;owned\x07\x1b[2J\r\n error: all is well\u202e\x9b31m\u2028 and\x08 more"
"""Control characters, terminal escapes, line ends and changes of direction."""

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, -(2**63), 10**30, 1e308, -1e-300, 0.5),
    *("", "x", FORGED, [], [1], {}, {"a": FORGED}, [[[[]]]], "9" * 5000),
)
READERS = (
    "inspect run",
    "inspect run --verify",
    "inspect run/iter_0000022",
    "runs run",
    "runs run --verify",
    "generate --load run --prompt abc --num-tokens 4 --temperature 0 --device cpu",
)


class Executed:
    """Unpickling it makes the marker file."""

    def __init__(self, marker: Path):
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._marker,))


@kind(KINDS, one=9)
def edited_meta(place: Place) -> Measured:
    """Values in a manifest are replaced, removed or added, and its SHA-256 fits again: no verb ends in a traceback."""
    place.with_stopped_run()
    newest = place.newest_checkpoint()
    body = read_manifest(newest)
    part = body if place.random.random() < 0.3 else body["meta"]
    for _ in range(place.random.randint(1, 3)):
        _edit(place, part)
    write_manifest(newest, body)
    place.say(place.random.choice(READERS))
    place.say(place.random.choice(READERS))
    place.train_to_end()
    return Measured()


@kind(KINDS, one=4)
def forged_strings(place: Place) -> Measured:
    """Strings and keys of all metas hold control characters; the verbs that read checkpoints escape them."""
    place.with_stopped_run()
    everywhere = place.random.random() < 0.5

    def chosen() -> bool:
        return everywhere or place.random.random() < 0.2

    for checkpoint in place.run_folder.glob("iter_*"):
        body = read_manifest(checkpoint)
        body["meta"] = forge(body["meta"], chosen, lambda: chosen() and chosen())
        if place.random.random() < 0.3:
            body["tensors"] = {
                (name + FORGED if place.random.random() < 0.2 else name): entry
                for name, entry in body["tensors"].items()
            }
        write_manifest(checkpoint, body)
    for words in READERS:
        place.say(words)
    place.train_to_end()
    return Measured()


@kind(KINDS, one=3)
def forged_logs(place: Place) -> Measured:
    """Control characters in the strings, keys and lines of logs, hints, proofs and owners' files."""
    place.with_stopped_run()
    run = place.run_folder
    line = json.dumps({"iteration": 3, "lm_loss": FORGED, FORGED: 1}, ensure_ascii=place.random.random() < 0.5)
    choice = place.random.randrange(4)
    if choice == 0:
        with (run / "metrics.jsonl").open("a", newline="") as file:
            file.write(place.random.choice((line, FORGED, "{" + FORGED)) + "\n")
    elif choice == 1:
        (run / "latest_checkpointed_iteration.txt").write_text(place.random.choice((FORGED, "22" + FORGED, "9" * 5000)))
    elif choice == 2:
        owner = {"token": FORGED, "since": FORGED, "process": {"host": FORGED, "pid": 1, "started": FORGED}}
        (run / "owner-1.json").write_text(json.dumps(owner))
    else:
        for proof in (run / ".verified").iterdir():
            proof.write_text(json.dumps(forge(json.loads(proof.read_text()))))
    for words in ("runs run", "summary run", "plot run"):
        place.say(words)
    if choice != 2:  # a live owner on another machine is waited for
        place.train_to_end()
    return Measured()


@kind(KINDS, one=4)
def malicious_pickles(place: Place) -> Measured:
    """A pickle that runs code when opened, in place of a random file or as files that other programs unpickle."""
    place.with_stopped_run()
    kind, rng = place.random.randrange(3), place.random
    if kind == 0:
        path = rng.choice([path for path in sorted(place.folder.rglob("*")) if path.is_file()])
        if rng.random() < 0.5:
            _save_executed(place, path)
        else:
            path.write_bytes(pickle.dumps(Executed(place.marker), protocol=rng.choice((0, 2, 4))))
    else:
        newest = place.newest_checkpoint()
        names = ("model_optim_rng.pt", ".metadata", "__0_0.distcp", "common.pt", "pytorch_model.bin", "state.pkl")
        folder = newest if kind == 1 else place.run_folder
        for name in names:
            _save_executed(place, folder / name)
    place.say(rng.choice((*READERS, "summary run", "plot run")))
    place.train_to_end()
    return Measured()


@kind(KINDS, one=2)
def foreign_folders(place: Place) -> Measured:
    """--load and --save at what looks like another program's checkpoint: nothing is opened, nothing is written."""
    place.with_data()
    layouts = (
        ("iter_0000005/mp_rank_00/model_optim_rng.pt", "latest_checkpointed_iteration.txt"),
        ("iter_0000005/.metadata", "iter_0000005/common.pt", "iter_0000005/__0_0.distcp"),
        ("global_step5/mp_rank_00_model_states.pt", "latest"),
        ("global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt",),
        ("config.json", "model.safetensors", "tokenizer.json"),
        ("config.json", "pytorch_model.bin"),
        ("step-5/.metadata", "step-5/__0_0.distcp"),
        ("ckpt.pt",),
    )
    files = [place.run_folder / name for name in place.random.choice(layouts)]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.name.startswith("latest"):
            file.write_text(place.random.choice(("5", "global_step5", FORGED)))
        else:
            _save_executed(place, file)
    before = contents(place.run_folder)
    for words in ("inspect run", "runs run", "generate --load run --device cpu"):
        place.say(words)
    running = place.train_to_end()
    if running.status == 0:
        raise Failed("wrong continuation", f"a run began beside another program's checkpoint: {running.text()[-300:]}")
    if contents(place.run_folder) != before:
        raise Failed("not whole", "another program's folder was changed")
    return Measured()


@kind(KINDS, one=1)
def changed_world(place: Place) -> Measured:
    """A stopped run goes on with two processes, data-parallel or tensor-parallel: losses change by rounding alone."""
    place.with_stopped_run()
    layout = place.random.choice(("--nproc-per-node 2", "--nproc-per-node 2 --tensor-model-parallel-size 2"))
    place.finishes_nearly(*layout.split())
    return Measured()


def _edit(place: Place, part: Any) -> None:
    """Change one value somewhere below ``part``."""
    rng = place.random
    while isinstance(part, dict | list) and part:
        key = rng.choice(list(part)) if isinstance(part, dict) else rng.randrange(len(part))
        if isinstance(part[key], dict | list) and part[key] and rng.random() < 0.75:
            part = part[key]
            continue
        change = rng.random()
        if change < 0.15:
            del part[key]
        elif change < 0.25 and isinstance(part, dict):
            part[rng.choice(("unknown", FORGED))] = rng.choice(VALUES)
        else:
            part[key] = rng.choice(VALUES)
        return


def forge(values: Any, strings: Callable[[], bool] = lambda: True, keys: Callable[[], bool] = lambda: True) -> Any:
    """Escapes behind strings and keys, where the one and the other is to be changed."""
    if isinstance(values, dict):
        return {(key + FORGED if keys() else key): forge(value, strings, keys) for key, value in values.items()}
    if isinstance(values, list):
        return [forge(value, strings, keys) for value in values]
    return values + FORGED if isinstance(values, str) and strings() else values


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "manifest.json").read_text())["manifest"]


def write_manifest(checkpoint: Path, body: dict[str, Any]) -> None:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps({"sha256": digest, "manifest": body}))
    shutil.rmtree(checkpoint.parent / ".verified", ignore_errors=True)


def _save_executed(place: Place, path: Path) -> None:
    """Renamed, because torch gives the archive the file's name, which not every name is fit for."""
    torch.save(Executed(place.marker), place.folder / "pickle")
    (place.folder / "pickle").rename(path)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

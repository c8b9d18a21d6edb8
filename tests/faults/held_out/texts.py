"""Texts and sizes that no program writes: absurd JSON, later versions, files of a terabyte."""

import json
import os
from collections.abc import Callable

from tests.faults.damage import READERS, goes_on_or_says_why, one_file
from tests.faults.fault import Failed, Kind, Measured, kind
from tests.faults.place import Place
from tests.faults.strangers import read_manifest, write_manifest

KINDS: list[Kind] = []

HUGE_BYTES = 1 << 40
TEXTS: tuple[Callable[[bytes], bytes], ...] = (
    lambda text: b"[" * 200_000,
    lambda text: b'{"a":' * 200_000,
    lambda text: b"9" * 100_000,
    lambda text: b'{"iteration": ' + b"9" * 100_000 + b"}",
    lambda text: b"1e400",
    lambda text: b"-Infinity",
    lambda text: b"\xef\xbb\xbf" + text,
    lambda text: text.decode(errors="replace").encode("utf-16"),
    lambda text: text.replace(b'":', b'": NaN, "x":', 1),
    lambda text: text.replace(b"{", b'{"sha256": "0", "iteration": 1, "iteration": 2, "manifest": {},', 1),
    lambda text: text.replace(b"{", b'{"\\ud800": "\\udfff\\u0000",', 1),
    lambda text: b" " * 30_000_000 + text,
    lambda text: text + text,
    lambda text: text.replace(b"\n", b"\r\n"),
    lambda text: text[: len(text) // 2] + b"\x00" * 4096 + text[len(text) // 2 :],
)


@kind(KINDS, one=8)
def absurd_texts(place: Place) -> Measured:
    """A text file of the run holds JSON that is deep, huge, doubled, not a number, or in another encoding."""
    place.with_stopped_run()
    run = place.run_folder
    paths = [*run.glob("iter_*/manifest.json"), *run.glob(".verified/*"), *run.glob("*.txt"), *run.glob("*.jsonl")]
    paths += (place.folder / "cache").rglob("*.json")
    path = place.random.choice(sorted(paths))
    index = place.random.randrange(len(TEXTS))
    path.write_bytes(TEXTS[index](path.read_bytes()))
    place.note(f"{path.relative_to(place.folder)} is text {index}")
    for words in place.random.sample(READERS, 2):
        place.say(words)
    return goes_on_or_says_why(place, path)


@kind(KINDS, one=4)
def later_versions(place: Place) -> Measured:
    """Checkpoints of a later version of the program: new fields, other version numbers, new kinds of tensors."""
    place.with_stopped_run()
    newest, rng = place.newest_checkpoint(), place.random
    body = read_manifest(newest)
    case = rng.randrange(4)
    if case == 0:
        body["version"] = rng.choice((2, 1.5, "1", 10**30, None))
    elif case == 1:
        body["meta"]["progress"][rng.choice(("later", "iteration_of_day"))] = rng.choice((1, None, "x", {"a": []}))
    elif case == 2:
        rng.choice(list(body["tensors"].values()))["dtype"] = rng.choice(("float4_e2m1", "complex64", "str", ""))
    else:
        body["meta"]["config"]["model"]["later"] = {"kind": "later"}
        body["later"] = [1, 2, 3]
    write_manifest(newest, body)
    place.say(rng.choice(READERS))
    running = place.train_to_end()
    if running.status == 0 and place.resumed_at(running) > 22:
        raise Failed("silent loss", running.text()[:500])
    return Measured()


@kind(KINDS, one=5)
def huge_files(place: Place) -> Measured:
    """A file of the run is a terabyte long, with a hole for most of it: it is not read into memory."""
    path = one_file(place)
    if place.random.random() < 0.5:
        path.write_bytes(b"")
    os.truncate(path, HUGE_BYTES)
    place.note(f"{path.relative_to(place.folder)} is huge")
    words = place.random.choice(READERS[2:] if path.suffix == ".bin" else READERS)
    place.expect(place.say(words), (0, 1), "traceback")
    return goes_on_or_says_why(place, path)


@kind(KINDS, one=2)
def foreign_bombs(place: Place) -> Measured:
    """convert is given another program's folder whose files claim terabytes, or unpack to them."""
    import zipfile

    place.with_data()
    source, rng = place.folder / "foreign", place.random
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": rng.choice(("gpt2", "llama")), "n_layer": 10**12}))
    case = rng.randrange(4)
    if case == 0:
        (source / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    elif case == 1:
        header = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
        (source / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(source / "model.safetensors", 8 + len(header) + 2**42)
    else:
        name = ("pytorch_model.bin", "iter_0000005/mp_rank_00/model_optim_rng.pt")[case - 2]
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(source / name, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("archive/data.pkl", b"\x80\x02" + b"(" * 20_000_000)
            file.writestr("archive/version", "3")
    place.note(f"bomb {case}")
    running = place.say("convert foreign out")
    place.expect(running, (1, 2))
    if (place.folder / "out").exists():
        raise Failed("not whole", f"something was written: {running.text()[-300:]}")
    return Measured()

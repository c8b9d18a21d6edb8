"""What a run reads changes under it: corpora, tokenizers, flags, the number of processes."""

import json
import os
import shutil
import signal

from tests.faults.fault import Failed, Kind, Measured, kind
from tests.faults.place import RUN_LIMIT, Place
from tests.faults.prepared import STEPS, STOPPED_AT, losses, training
from tests.faults.strangers import contents

KINDS: list[Kind] = []

REFUSED = (
    *("--hidden-size 32", "--num-layers 3", "--num-attention-heads 1", "--seq-length 8", "--normalization RMSNorm"),
    *("--tokenizer-type NullTokenizer --vocab-size 300", "--optimizer lion", "--make-vocab-size-divisible-by 128"),
    *("--lr 3e-3", "--seed 5", "--split 50,50,0", "--train-iters 80"),
    *("--swiglu", "--untie-embeddings-and-output-weights"),
)
TAKEN = (
    *("--bf16", "--zero-stage 3", "--micro-batch-size 1", "--log-interval 3", "--save-interval 4", "--eval-interval 7"),
    *("--recompute-granularity full --recompute-method uniform", "--nproc-per-node 2 --pipeline-model-parallel-size 2"),
    *("--nproc-per-node 2", "--cpu-offload --zero-stage 3", "--keep-checkpoints 1", "--clip-grad 0.5"),
)
PREPROCESS = (
    "preprocess --input data/corpus.jsonl --output-prefix data/again --tokenizer-type SentencePieceTokenizer "
    "--tokenizer-model data/words.model --append-eod --workers 1"
)


@kind(KINDS, one=6)
def other_flags(place: Place) -> Measured:
    """A stopped run is given flags that change the model, the data or the schedule: refused, and nothing is changed."""
    place.with_stopped_run()
    flags = place.random.choice(REFUSED)
    place.note(flags)
    before = _checkpoints(place)
    running = place.train_to_end(*flags.split())
    if running.status == 0:
        raise Failed("wrong continuation", f"{flags} was taken: {running.text()[:700]}")
    if _checkpoints(place) != before:
        raise Failed("not whole", f"checkpoints were changed by a command that was refused: {running.text()[-300:]}")
    return place.goes_on()


@kind(KINDS, one=4)
def other_layouts(place: Place) -> Measured:
    """A stopped run is given another precision, layout or interval: it goes on, or says why not."""
    place.with_stopped_run()
    flags = place.random.choice(TAKEN)
    place.note(flags)
    running = place.train_to_end(*flags.split(), limit=RUN_LIMIT[4])
    if running.status != 0:
        return place.goes_on()
    found, wanted = losses(place.run_folder), place.reference.losses
    if far := [i for i in found if abs(found[i] - wanted[i]) > 0.1] or STEPS not in found:
        raise Failed("wrong continuation", f"{flags}: other losses at {far}: {running.text()[-300:]}")
    return Measured()


def _checkpoints(place: Place) -> dict[str, bytes]:
    return {path: data for path, data in contents(place.run_folder).items() if "/iter_" in path}


@kind(KINDS, one=4)
def replaced_between(place: Place) -> Measured:
    """Between two starts the corpus or the tokenizer becomes another valid one of the same name: refused, or told."""
    place.with_stopped_run()
    data = place.folder / "data"
    corpus, model = place.random.random() < 0.6, place.random.randint(280, 320)
    lines = [json.loads(line)["text"].split() for line in (data / "corpus.jsonl").read_text().splitlines()]
    for words in lines:
        place.random.shuffle(words)
    (data / "other.jsonl").write_text("".join(json.dumps({"text": " ".join(words)}) + "\n" for words in lines))
    if corpus:
        words = PREPROCESS.replace("corpus.jsonl", "other.jsonl").replace("again", "corpus")
    else:
        words = f"train-tokenizer --input data/other.jsonl --output data/words.model --vocab-size {model}"
        (data / "words.model").unlink()
    place.note(words)
    place.expect(place.say(words))
    if place.random.random() < 0.5:
        shutil.rmtree(place.folder / "cache", ignore_errors=True)
    running = place.train_to_end()
    text = running.text()
    if running.status == 0 and losses(place.run_folder) != place.reference.losses and "differs" not in text:
        raise Failed("wrong continuation", f"other data was taken without a word: {text[:900]}")
    return Measured()


@kind(KINDS, one=6, four=2)
def changed_meanwhile(place: Place) -> Measured:
    """The corpus is emptied, cut, overwritten, removed or replaced while the run reads it."""
    place.with_own_data()
    running = place.train()
    place.moment(running)
    path = place.folder / "data" / f"corpus_text_document.{place.random.choice(('bin', 'bin', 'idx'))}"
    size, case = path.stat().st_size, place.random.randrange(4)
    place.note(f"{path.name}: {('emptied', 'cut', 'removed', 'replaced')[case]}")
    if case < 2:
        os.truncate(path, 0 if case == 0 else place.random.randrange(size))
    elif case == 2:
        path.unlink()
    else:
        (place.folder / "new").write_bytes(place.random.randbytes(size))
        (place.folder / "new").replace(path)
    seconds = place.ended(running)
    if running.status == 0:
        place.equals_undisturbed()
        return Measured()
    shutil.rmtree(place.folder / "data")
    place.with_own_data()
    return place.goes_on([running], seconds=seconds)


@kind(KINDS, one=4)
def preparation_killed(place: Place) -> Measured:
    """kill -9 of preprocess at a random file operation, perhaps over an older data set: whole, older, or not there."""
    data = place.with_own_data().folder / "data"
    names = [data / f"again_text_document.{end}" for end in ("bin", "idx")]
    if older := place.random.random() < 0.5:
        place.say(PREPROCESS.replace("--append-eod ", ""))
    before = [path.read_bytes() if older else None for path in names]
    number = place.random.randint(1, 14)
    running = place.start(PREPROCESS, disturbed={"under": str(data), "kill_at": number})
    place.ended(running, killed=True)
    whole = [data / f"corpus_text_document.{end}" for end in ("bin", "idx")]
    found = [path.read_bytes() if path.exists() else None for path in names]
    # The index makes a data set: without it, there is none.
    if found[1] is not None and found not in (before, [path.read_bytes() for path in whole]):
        raise Failed("silent loss", f"killed at operation {number}: a data set of two halves")
    place.expect(place.say(PREPROCESS))
    if [path.read_bytes() for path in names] != [path.read_bytes() for path in whole]:
        raise Failed("not whole", place.logs()[-500:])
    if left := [path.name for path in data.iterdir() if path.name.endswith(".tmp")]:
        raise Failed("not whole", f"{left} is left")
    return Measured()


@kind(KINDS, four=1)
def more_processes(place: Place) -> Measured:
    """A killed run goes on with fewer processes, then with as many as before: losses change by rounding."""
    running = place.with_data().train()
    running.until(lambda: "successfully saved" in running.text(), RUN_LIMIT[place.workers])
    running.sleep(place.random.uniform(0, place.reference.train_seconds / 2))
    running.send(signal.SIGKILL)
    place.ended(running, killed=True)
    fewer = place.start([*training(1), "--exit-interval", str(STOPPED_AT + 8)])
    place.ended(fewer, RUN_LIMIT[1])
    place.expect(fewer)
    place.finishes_nearly()
    return Measured()

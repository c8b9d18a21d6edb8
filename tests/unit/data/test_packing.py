"""Documents packed into samples: best fit, nothing lost, the same files each time, and what is told."""

from pathlib import Path

import numpy as np
import pytest

from gptpar.cli import main
from gptpar.data.gpt_dataset import GPTDataset
from gptpar.data.indexed import IndexedDataset
from gptpar.data.packing import PackSpec, best_fit, pack
from tests.unit.data.corpora import write_corpus

EOD = 9999


def written(prefix: Path, lengths: list[int]) -> list[np.ndarray]:
    """A corpus whose tokens are all different, each document ending with EOD."""
    documents = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    for document in documents:
        document[-1:] = EOD
    write_corpus(prefix, documents)
    return documents


def one_by_one(sizes: np.ndarray, length: int) -> list[int]:
    """Best-fit decreasing as a loop over pieces and packs."""
    rooms, found = list[int](), [0] * len(sizes)
    for piece in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= sizes[piece]]
        if not fitting:
            fitting = [(length, len(rooms))]
            rooms.append(length)
        number = min(fitting)[1]
        rooms[number] -= int(sizes[piece])
        found[piece] = number
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("length", "number"), [(1, 5), (7, 60), (64, 300)])
def test_best_fit_is_that_of_the_loop(seed: int, length: int, number: int) -> None:
    random = np.random.RandomState(seed)
    sizes = np.minimum(random.geometric(0.1 if seed % 2 else 0.03, number), length)
    packs, leaders = best_fit(sizes, length)
    assert packs.tolist() == one_by_one(sizes, length)
    assert (np.bincount(packs, sizes) <= length).all()
    for number, leader in enumerate(leaders.tolist()):
        assert packs[leader] == number and sizes[leader] == sizes[packs == number].max()


@pytest.mark.parametrize("length", [4, 16, 33])
def test_every_token_is_packed_once_and_short_documents_are_whole(tmp_path: Path, length: int) -> None:
    random = np.random.RandomState(1)
    lengths = [0, 1, length, length + 1, 3 * length, *random.geometric(0.08, 200).tolist(), 0]
    documents = written(tmp_path / "corpus", lengths)
    told = pack(str(tmp_path / "corpus"), str(tmp_path / "packed"), PackSpec(length, length), EOD)
    packed = IndexedDataset(tmp_path / "packed")
    assert set(packed.lengths.tolist()) == {length}
    tokens = packed.tokens[0 : packed.num_tokens]
    words = tokens[tokens != EOD]
    assert sorted(words.tolist()) == sorted(int(t) for document in documents for t in document if t != EOD)
    place = {int(token): at for at, token in enumerate(tokens) if token != EOD}
    for document in documents:
        if 1 < len(document) <= length:
            at = place[int(document[0])]
            assert at // length == (at + len(document) - 1) // length
            assert np.array_equal(tokens[at : at + len(document)], document)
    cut = sum(one > length for one in lengths)
    padding = 100 * (1 - sum(lengths) / packed.num_tokens)
    there = sum(one > 0 for one in lengths)
    assert f"packed {there:,} documents into {len(packed):,} samples of {length} tokens: {padding:.2f} % pad" in told
    assert f"{cut:,} documents ({100 * cut / there:.2f} %) cut" in told
    assert padding < 10
    dataset = GPTDataset(packed, (0, len(packed)), None, length, seed=3)  # whose samples are the packs
    packs = {packed.get(number).tobytes() for number in range(len(packed))}
    assert all(dataset[k][:length].astype(np.int32).tobytes() in packs for k in range(len(dataset)))
    assert len(dataset) == len(packed) - 1  # the last one has no following token
    pack(str(tmp_path / "corpus"), str(tmp_path / "again"), PackSpec(length, length), EOD)
    for end in (".bin", ".idx"):
        assert (tmp_path / f"again{end}").read_bytes() == (tmp_path / f"packed{end}").read_bytes()


@pytest.mark.parametrize(("factor", "wanted"), [(1.0, [1, 1, 1, 1]), (3.0, [3, 3, 3, 3]), (2.5, [2, 3, 2, 3])])
def test_long_documents_are_packed_more_often(tmp_path: Path, factor: float, wanted: list[int]) -> None:
    documents = written(tmp_path / "corpus", [8, 3, 10, 2, 40, 7, 8])
    told = pack(str(tmp_path / "corpus"), str(tmp_path / "packed"), PackSpec(16, 8, factor), EOD)
    tokens = IndexedDataset(tmp_path / "packed").tokens
    counts = np.bincount(tokens[0 : len(tokens)], minlength=100)
    long = [documents[i] for i in (0, 2, 4, 6)]
    assert [set(counts[document[:-1]].tolist()) for document in long] == [{count} for count in wanted]
    assert {int(counts[token]) for i in (1, 3, 5) for token in documents[i][:-1]} == {1}
    again = sum(wanted) - 4
    assert (f", {again} of them again ({factor:g} x from 8 tokens)" in told) == bool(again)


def test_the_verb_packs_each_key_with_ends_of_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"text": "{"x" * n}", "title": "t"}}\n' for n in (3, 20, 5, 1)))
    words = f"--input {tmp_path}/in.jsonl --output-prefix {tmp_path}/c --json-keys text title --workers 1"
    command = ["preprocess", *words.split(), "--tokenizer-type", "ByteLevelTokenizer"]
    assert main([*command, "--append-eod", "--pack-length", "8", "--upsample-long", "2", "--long-from", "6"]) == 0
    told = capsys.readouterr().out
    assert "packed 6 documents, 2 of them again (2 x from 6 tokens) into 9 samples of 8 tokens" in told
    packed = IndexedDataset(tmp_path / "c_text_packed")
    assert set(packed.lengths.tolist()) == {8} and len(IndexedDataset(tmp_path / "c_title_packed")) == 1
    assert IndexedDataset(tmp_path / "c_title_packed").get(0).tolist() == [ord("t"), 256] * 4
    assert len(IndexedDataset(tmp_path / "c_text_document")) == 4
    assert main([*command, "--append-eod", "--pack-length", "8", "--upsample-long", "0.5"]) == 1
    assert "--upsample-long is 0.5; it must be at least 1" in capsys.readouterr().err
    assert main([*command, "--pack-length", "8"]) == 1
    assert "--pack-length lays documents end to end: add --append-eod" in capsys.readouterr().err
    assert main([*command, "--append-eod", "--upsample-long", "2"]) == 1
    assert "--upsample-long and --long-from change what --pack-length packs: give it, too." in capsys.readouterr().err

"""Train a SentencePiece tokenizer: see `python tools/train_tokenizer.py --help`."""

from gptpar.command import run
from gptpar.tokenizer.train import main

if __name__ == "__main__":
    run(main)

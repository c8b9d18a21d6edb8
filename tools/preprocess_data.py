"""Tokenize a corpus: see `python tools/preprocess_data.py --help`."""

from gptpar.command import run
from gptpar.data.preprocess import main

if __name__ == "__main__":
    run(main)

"""Make a corpus from Python's standard library: see `python tools/make_corpus.py --help`."""

from gptpar.command import run
from gptpar.data.corpus import main

if __name__ == "__main__":
    run(main)

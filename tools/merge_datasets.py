"""Join tokenized corpora: see `python tools/merge_datasets.py --help`."""

from gptpar.command import run
from gptpar.data.merge import main

if __name__ == "__main__":
    run(main)

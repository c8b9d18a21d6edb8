"""Make a corpus from Python's own library: the same as ``gptpar make-corpus``, run from a checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gptpar.cli import main

if __name__ == "__main__":
    sys.exit(main(["make-corpus", *sys.argv[1:]]))

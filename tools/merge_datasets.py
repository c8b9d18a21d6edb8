"""Join .bin/.idx data sets: the same as ``gptpar merge``, run from a checkout."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gptpar.cli import main

if __name__ == "__main__":
    sys.exit(main(["merge", *sys.argv[1:]]))

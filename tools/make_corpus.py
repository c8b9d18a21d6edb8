"""Make a corpus from Python's own library: the same as ``gptpar make-corpus``, run from a checkout."""

from verb import run

if __name__ == "__main__":
    run("make-corpus")

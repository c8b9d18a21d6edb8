"""Draw runs to a PNG: the same as ``gptpar plot``, run from a checkout."""

from verb import run

if __name__ == "__main__":
    run("plot")

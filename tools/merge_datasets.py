"""Join .bin/.idx data sets: the same as ``gptpar merge``, run from a checkout."""

from verb import run

if __name__ == "__main__":
    run("merge")

"""Turn text into .bin/.idx data sets: the same as ``gptpar preprocess``, run from a checkout."""

from verb import run

if __name__ == "__main__":
    run("preprocess")

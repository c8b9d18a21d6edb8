"""Train a SentencePiece tokenizer: the same as ``gptpar train-tokenizer``, run from a checkout."""

from verb import run

if __name__ == "__main__":
    run("train-tokenizer")

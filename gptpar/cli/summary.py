"""``gptpar summary``: a run's losses, compared with the entropy of token frequencies."""

from __future__ import annotations

import sys
from pathlib import Path

from gptpar.cli.flags import parser_of
from gptpar.data.build import unigram_entropy
from gptpar.data.identity import corpus_identity
from gptpar.data.indexed import IndexedDataset
from gptpar.errors import CheckpointError, GptparError
from gptpar.reporting.metrics_file import FILE_NAME, read_metrics
from gptpar.reporting.series import last_tenth, series


def main(argv: list[str]) -> int:
    """Print first and last losses and, with a data set, how far the last are below its unigram entropy."""
    args = parser_of("summary").parse_args(argv)
    entropy = unigram_entropy(IndexedDataset(args.data_path)) if args.data_path else None
    file = args.run if args.run.is_file() else args.run / FILE_NAME
    losses = [loss for loss in series(file, read_metrics(file), "lm_loss") if loss is not None]
    if not losses:
        raise GptparError(f"{file} holds no finished step")
    reached = last_tenth(losses)
    print(f"loss: {losses[0]:.3f} at the start, {reached:.3f} on average over the last tenth of {len(losses)} steps")
    if entropy is not None:
        side, learnt = "below", "it has learnt something of the order of tokens"
        if reached > entropy:
            side, learnt = "above", "it has not even learnt how often each token occurs, and needs more steps"
        print(
            f"token frequencies alone would give {entropy:.4f} (the corpus's unigram entropy): "
            f"the model is {abs(entropy - reached):.3f} nats {side} that; {learnt}"
        )
        if _is_another_corpus(file.parent, args.data_path):
            print(
                f"WARNING: {args.data_path} is not the corpus that the run was trained on, or it was damaged since.",
                file=sys.stderr,
            )
    return 0


def _is_another_corpus(run: Path, prefix: str) -> bool:
    """Whether the run's newest checkpoint knows a corpus of this name, and none with these contents."""
    from gptpar.checkpoint import load_meta  # brings torch: a second, which other uses need not pay

    try:
        corpora = load_meta(run)["corpora"].values()
        named = [one for corpus in corpora for one in corpus if Path(one["prefix"]).name == Path(prefix).name]
        known = [one["sha256"] for one in named]
    except (CheckpointError, LookupError, TypeError, AttributeError):
        return False  # the checkpoint says nothing of its corpora
    return bool(known) and corpus_identity(prefix)["sha256"] not in known

#!/usr/bin/env bash
# Pretrains a GPT of 350M parameters from raw text on whatever this machine has, and sets everything up first.
#
#   bash examples/pretrain_gpt_350M.sh                        text found on this machine (Python's library), no download
#   DATA=my.jsonl bash examples/pretrain_gpt_350M.sh          your text (.jsonl with a "text" key, .jsonl.gz, .txt, a folder)
#   bash examples/pretrain_gpt_350M.sh --data-path PREFIX --tokenizer-type ... [any other flag of gptpar pretrain]
#
# Other settings: RUN=folder of the run, PRESET=124M for another model, MINUTES=training time to aim at on this machine.
# Run it again to go on from the last checkpoint. Flags given here win over those chosen below.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
trap 'echo "interrupted; run the same command again to go on" >&2; exit 130' INT
source tools/setup_env.sh run

PRESET="${PRESET:-350M}"
RUN="${RUN:-runs/gpt-$PRESET}"
MINUTES="${MINUTES:-5.5}"
gptpar() { "$PYTHON" -m gptpar "$@"; }

# What is chosen for this machine is kept with the run, because a resumed run must go on with the same schedule.
mkdir -p "$RUN"
data_flags=()
case " $* " in
*" --data-path "* | *" --train-data-path "* | *" --mock-data "*) vocab_flag=() ;;
*)
    work="$RUN/data"
    mkdir -p "$work"
    [[ -s "$work/vocab_size" ]] || gptpar fit --only-vocab-size >"$work/vocab_size"
    vocab_size="$(<"$work/vocab_size")"
    if [[ -z "${DATA:-}" && ! -s "$work/corpus.jsonl" ]]; then
        gptpar make-corpus --output "$work/corpus.jsonl"
    fi
    input="${DATA:-$work/corpus.jsonl}"
    if [[ ! -s "$work/tokenizer.model" ]]; then
        gptpar train-tokenizer --input "$input" --vocab-size "$vocab_size" --output "$work/tokenizer.model"
    fi
    tokenizer=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$work/tokenizer.model")
    if [[ ! -s "$work/corpus_text_document.idx" ]]; then
        gptpar preprocess --input "$input" --output-prefix "$work/corpus" "${tokenizer[@]}" --append-eod \
            --workers "$(nproc 2>/dev/null || echo 2)"
    fi
    data_flags=(--data-path "$work/corpus_text_document" "${tokenizer[@]}" --split 98,2,0)
    vocab_flag=(--vocab-size "$vocab_size")
    ;;
esac
[[ -s "$RUN/fitted_flags" ]] || {
    gptpar fit --preset "$PRESET" --minutes "$MINUTES" "${vocab_flag[@]}" >"$RUN/fitted_flags.tmp"
    mv "$RUN/fitted_flags.tmp" "$RUN/fitted_flags"
}
mapfile -t fitted <"$RUN/fitted_flags"

gptpar pretrain \
    --preset "$PRESET" --attention-dropout 0 --hidden-dropout 0 \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine \
    --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 \
    --eval-interval 100 --eval-iters 4 --save-interval 100 --keep-checkpoints 2 \
    --log-throughput --log-timers-to-tensorboard \
    "${data_flags[@]}" "${fitted[@]}" --save "$RUN" --load "$RUN" "$@"

echo
reference=()
if [[ ${#data_flags[@]} -gt 0 ]]; then
    entropy="$(gptpar summary "$RUN" --data-path "${data_flags[1]}" --entropy-only)"
    reference=(--reference-loss "$entropy" --reference-label "unigram entropy")
    gptpar summary "$RUN" --data-path "${data_flags[1]}"
    echo "--- a sample -------------------------------------------------------------------------------"
    gptpar generate --load "$RUN" --prompt "def" --num-tokens 60
    echo "--------------------------------------------------------------------------------------------"
else
    gptpar summary "$RUN"
fi
gptpar plot "$RUN" --output "$RUN/loss.png" "${reference[@]}"
echo "TensorBoard:  $PYTHON -m tensorboard.main --logdir $RUN/tensorboard"
echo "Generate:     $PYTHON -m gptpar generate --load $RUN --prompt '...'"

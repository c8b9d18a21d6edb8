#!/usr/bin/env bash
# Pretrains a GPT of 350M parameters from raw text on whatever this machine has, and sets everything up first. A CPU that
# is too slow, or too busy, to teach that model anything in the time gets the largest model that it can teach.
#
#   bash examples/pretrain_gpt_350M.sh                        text found on this machine (Python's library), no download
#   DATA=my.jsonl RUN=mine bash examples/pretrain_gpt_350M.sh     your text (.jsonl with a "text" key, .jsonl.gz, .txt, a folder)
#   bash examples/pretrain_gpt_350M.sh --data-path PREFIX --tokenizer-type ... [any other flag of gptpar pretrain]
#
# Other settings: RUN=folder of the run, PRESET=124M for another model, MINUTES=training time (on a CPU the whole command
# takes about twelve minutes without it). Paths are relative to the folder you are in.
# Run it again to go on from the last checkpoint. Flags given here win over those chosen below.
set -euo pipefail
unset CDPATH
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd)"
trap 'echo "interrupted; run the same command again to go on" >&2; exit 130' INT
source "$root/tools/setup_env.sh" run

if [[ -z "${RUN:-}" ]]; then
    RUN="runs/gpt-${PRESET:-350M}"
    [[ "$PWD" -ef "$root" ]] || RUN="$root/$RUN"
fi
work="$RUN/data"
# Without a GPU: a thread that waits gives its core away soon, for beside other programs a spinning one stops its own team.
compgen -G "/dev/nvidia[0-9]*" >/dev/null || export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-10000}"
export PYTHONSAFEPATH=1 # the folder you are in may hold a random.py
gptpar() { "$PYTHON" -m gptpar "$@"; }

echo "run folder: $RUN; looking at this machine ..." >&2
# What is chosen for this machine is kept with the run, because a resumed run must go on with the same schedule; another
# text, model or length in the same folder is refused.
# A finished run gets no flags: nothing is left to train.
chosen="$(gptpar fit --run "$RUN" ${PRESET:+--preset "$PRESET"} --began "$(($(date +%s) - SECONDS))" \
    ${MINUTES:+--minutes "$MINUTES"} ${DATA:+--data "$DATA"} -- "$@")"
mapfile -t fitted <<<"$chosen"
vocab_size="${fitted[1]:-}"
fitted=("${fitted[@]:2}")

# Each file takes its name when it is whole, and what was made from an older one goes first.
data_flags=()
case " $* " in
*" --data-path"[\ =]* | *" --train-data-path"[\ =]* | *" --mock-data "*) ;;
*)
    mkdir -p "$work"
    if [[ -z "${DATA:-}" && ! -s "$work/corpus.jsonl" ]]; then
        rm -f "$work/tokenizer.model"
        gptpar make-corpus --output "$work/corpus.jsonl"
    fi
    input="${DATA:-$work/corpus.jsonl}"
    if [[ ! -s "$work/tokenizer.model" ]]; then
        rm -f "$work/corpus_text_document.idx"
        gptpar train-tokenizer --input "$input" --vocab-size "$vocab_size" --output "$work/tokenizer.model"
    fi
    tokenizer=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$work/tokenizer.model")
    if [[ ! -s "$work/corpus_text_document.idx" ]]; then
        gptpar preprocess --input "$input" --output-prefix "$work/corpus" "${tokenizer[@]}" --append-eod \
            --workers "$(nproc 2>/dev/null || echo 2)"
    fi
    data_flags=(--data-path "$work/corpus_text_document" "${tokenizer[@]}" --split 98,2,0)
    ;;
esac

[[ -z "$chosen" ]] || gptpar pretrain \
    --attention-dropout 0 --hidden-dropout 0 --lr-decay-style cosine \
    --weight-decay 0.1 --clip-grad 1.0 \
    --eval-interval 100 --eval-iters 4 --keep-checkpoints 2 \
    --log-timers-to-tensorboard \
    "${data_flags[@]}" "${fitted[@]}" --save "$RUN" --load "$RUN" "$@"

echo
reference=()
if [[ ${#data_flags[@]} -gt 0 ]]; then
    learnt="$(gptpar summary "$RUN" --data-path "${data_flags[1]}")"
    echo "$learnt"
    entropy="$(sed -n 's/.*alone would give \([0-9.]*\).*/\1/p' <<<"$learnt")"
    reference=(--reference-loss "$entropy" --reference-label "unigram entropy")
    echo "--- a sample -------------------------------------------------------------------------------"
    gptpar generate --load "$RUN" --prompt "def" --num-tokens 60
    echo "--------------------------------------------------------------------------------------------"
else
    gptpar summary "$RUN"
fi
gptpar plot "$RUN" --output "$RUN/loss.png" "${reference[@]}"
printf 'TensorBoard:  %q -m tensorboard.main --logdir_spec %q\n' "$PYTHON" "$(basename "$RUN"):$RUN/tensorboard"
printf "Generate:     PYTHONPATH=%q %q -m gptpar generate --load %q --prompt '...'\n" "$root" "$PYTHON" "$RUN"

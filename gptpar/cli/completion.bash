_gptpar() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""
    if [[ $COMP_CWORD -eq 1 ]]; then
        words="@VERBS@"
    else
        case "${COMP_WORDS[1]} $before" in
@VALUES@
        esac
        [[ $word == -* ]] && case "${COMP_WORDS[1]}" in
@FLAGS@
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _gptpar gptpar

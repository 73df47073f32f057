#compdef paceline
# Completion of paceline for zsh: source <(paceline completion zsh)
_paceline() {
    local -a found
    found=("${(@f)$(${~words[1]} --complete zsh "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)}")
    compadd -S '' -- ${(M)found:#*[=/]}
    compadd -- ${found:#*[=/]}
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _paceline "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
    compdef _paceline paceline
fi

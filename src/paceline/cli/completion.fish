# Completion of paceline for fish: paceline completion fish > ~/.config/fish/completions/paceline.fish
function __paceline_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    set -l program $before[1]
    set -e before[1]
    $program --complete fish $before "$current" 2>/dev/null
end
complete -c paceline -f -a '(__paceline_complete)'

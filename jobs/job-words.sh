#!/bin/bash
# What slurm.sbatch, elastic.sbatch and pbs.sh start, by the words that they get; they source this file.
#   key=value ...   --config FILE ...   train.py ...   python train.py ...   -m package.module ...   PROGRAM ...
# read_words NAME WORDS: sets words, those of `hvdtrain launch`, with run=$RUN where they are hvdtrain's own, and command, those of a rank.
# NAME: of the job script, for messages. check_words says what is wrong before ranks start; it is all of --dry-run but the printed line.

is_hvdtrain= words=() command=() script_name= # of the job

refuse() {
    echo "$script_name: $1" >&2
    exit 2
}

read_words() {
    script_name=$1
    shift
    case "${1:-} ${2:-} ${3:-}" in
        "hvdtrain "*) shift && is_hvdtrain=yes ;;
        "-m hvdtrain "*) shift 2 && is_hvdtrain=yes ;;
        "python -m hvdtrain" | "python3 -m hvdtrain" | "python3."*" -m hvdtrain") shift 3 && is_hvdtrain=yes ;;
    esac
    case ${1:-} in
        "" | train | check | *=* | --*) is_hvdtrain=yes ;;
    esac
    if [[ -n $is_hvdtrain && (${1:-} == train || ${1:-} == check) ]]; then
        words=("$1" run="$RUN" "${@:2}")
    elif [[ -n $is_hvdtrain ]]; then
        words=(run="$RUN" "$@")
    else
        words=("$@")
    fi
    if [[ -n $is_hvdtrain ]]; then
        command=("$PYTHON" -m hvdtrain "${words[@]}")
        return
    fi
    case $1 in
        python | python3 | python3.*) command=("$PYTHON" "${@:2}") ;;
        -m | *.py) command=("$PYTHON" "$@") ;;
        *) command=("$@") ;;
    esac
}

check_words() {
    local -a found=("${command[@]}")
    if [[ -n $is_hvdtrain ]]; then
        return
    elif [[ ${found[0]} != "$PYTHON" ]]; then
        [[ -n ${CONTAINER:-} ]] || command -v "${found[0]}" >/dev/null || refuse "there is no program ${found[0]} on $(hostname)"
    elif [[ ${found[1]:-} == *.py ]]; then
        [[ -f ${found[1]} ]] || refuse "there is no script ${found[1]} in $PWD"
    elif [[ ${found[1]:-} == -m && -z ${CONTAINER:-} ]]; then
        "$PYTHON" -c 'import importlib.util, sys; sys.path.insert(0, ""); sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "${found[2]:-}" ||
            refuse "$PYTHON in $PWD finds no module ${found[2]:-}"
    fi
}

# Prints the command that the job would start, and ends. Words of hvdtrain are read as it reads them, but in a container.
dry_run() {
    if [[ -n $is_hvdtrain && -z ${CONTAINER:-} ]]; then
        local -a keys=("${words[@]}")
        [[ ${keys[0]} != check ]] || keys=("${keys[@]:1}")
        "$PYTHON" -m hvdtrain "${keys[@]}" --print-config >/dev/null || exit 2
    fi
    printf '%q ' "$@"
    echo
    exit 0
}

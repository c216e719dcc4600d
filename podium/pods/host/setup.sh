#!/bin/sh
# Unpacks and installs on a worker what `podium pod run` (podium/pods/push.py) has sent.
#   setup.sh unpack KEY PYTHON            PYTHON: a path; - for any from 3.11 to 3.13
#   setup.sh setup KEY ENVIRONMENT EXTRAS DEMO
#                                         ENVIRONMENT: - installs nothing; EXTRAS: comma-separated; DEMO: - or one more package
set -eu
what=$1 key=$2
cd "$(dirname "$0")"
sent=$PWD
home=${sent%/in/*}
code=$home/code/$key
fits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'

uv() {  # brings a Python where the system has none that is new enough
    command -v uv >/dev/null || PATH=$HOME/.local/bin:$PATH
    command -v uv >/dev/null || python3 -m pip install --quiet --user uv >&2 ||
        python3 -m pip install --quiet --user --break-system-packages uv >&2
    command uv "$@"
}

find_python() {
    for each in python3.13 python3.12 python3.11 python3; do
        if path=$(command -v "$each") && "$path" -c "$fits"; then echo "$path"; return; fi
    done
    uv python install --quiet 3.12 >&2
    uv python find 3.12
}

unpack() {
    if [ ! -d "$code" ]; then
        mkdir -p "$home/code"
        new=$code.$$
        rm -rf "$new"
        if [ -f code.bundle ]; then
            git clone --quiet --branch podium code.bundle "$new"
            if [ -f changes.patch ]; then git -C "$new" apply --binary "$sent/changes.patch"; fi
        fi
        for wheel in *.whl; do
            if [ -f "$wheel" ]; then mkdir -p "$new"; "$1" -m zipfile -e "$wheel" "$new"; fi
        done
        mv -T "$new" "$code" 2>/dev/null || rm -rf "$new"   # another one of us was faster
    fi
    printf '#!/bin/sh\ncd "%s" && exec "%s" -m podium.pods.host.agent --home "%s" "$@"\n' \
        "$code" "$1" "$home" > "$home/agent.$$"
    chmod 700 "$home/agent.$$"
    mv "$home/agent.$$" "$home/agent"
}

install() {
    venv=$home/venvs/$1
    if [ -f "$venv/installed" ]; then echo "installed before"; return; fi
    python=$(find_python)
    rm -rf "$venv"
    mkdir -p "$home/venvs"
    "$python" -m venv "$venv" || { rm -rf "$venv"; uv venv --quiet --seed --python "$python" "$venv"; }
    constraints=$code/constraints.txt
    if [ -f constraints.txt ]; then constraints=$sent/constraints.txt; fi
    package=$code
    for wheel in *.whl; do if [ -f "$wheel" ]; then package=$sent/$wheel; fi; done
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$constraints" "$package${2:+[$2]}"
    if [ "$3" != - ]; then "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$3"; fi
    touch "$venv/installed"
}

case $what in
unpack)
    python=$3
    if [ "$python" = - ]; then python=$(find_python); fi
    unpack "$python"
    ;;
setup)
    trap 'rm -f "$sent/prepare.sh"' EXIT   # it may hold a password
    if [ -f prepare.sh ]; then sh prepare.sh; fi
    if [ "$3" != - ]; then install "$3" "$4" "$5"; fi
    ;;
esac

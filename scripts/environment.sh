# Sourced by the scripts beside it: makes the virtual environment when it is missing or out of date, then sets $python.
#   MINITE_ENV     where the environment lies; default .venv in the repository
#   MINITE_PYTHON  interpreter to make it with; default the first of python3, python3.12, python3.11 that fits
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
env=${MINITE_ENV:-$root/.venv}
[[ $env = /* ]] || env=$PWD/$env
python=$env/bin/python
stamp=$env/.minite-installed

die() {
    echo "minite: error: $*" >&2
    exit 2
}

find_python() {
    local candidate candidates=(python3 python3.12 python3.11)
    [ -z "${MINITE_PYTHON:-}" ] || candidates=("$MINITE_PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11 or 3.12 among: ${candidates[*]}; name one with MINITE_PYTHON"
}

make_environment() {
    local base
    base=$(find_python)
    if [ -e "$env" ] && [ ! -e "$env/pyvenv.cfg" ] && [ -n "$(ls -A "$env")" ]; then
        die "$env is not a virtual environment; empty it or name another directory with MINITE_ENV"
    fi
    # Some distributions ship Python and pip without ensurepip: then the outer pip puts a pip inside.
    "$base" -m venv --clear "$env" >/dev/null 2>&1 || {
        "$base" -m venv --clear --without-pip "$env"
        "$base" -m pip --python "$python" install -qq --disable-pip-version-check pip
    }
}

# What an environment was made from. A half-finished install leaves no stamp, so the next call takes it up again.
wanted=$(cd "$root" && cat setup.py constraints.txt scripts/environment.sh | cksum)" $root"
up_to_date() { [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$python" -c '' 2>/dev/null; }

if ! up_to_date; then
    exec 9<"$root"
    if command -v flock >/dev/null; then flock 9; fi # two scripts started together: the second waits, then finds it made
    if ! up_to_date; then
        echo "minite: preparing $env (the first time takes a few minutes)" >&2
        rm -f "$stamp"
        "$python" -m pip --version >/dev/null 2>&1 || make_environment
        "$python" -m pip install -qq --disable-pip-version-check -c "$root/constraints.txt" -e "$root[dev]" ||
            die "installing into $env failed (see above); run the command again to continue"
        echo "$wanted" >"$stamp"
    fi
    exec 9<&-
fi

# To be sourced by the launch files beside it. Sets PYTHON, unless it is given, to the interpreter of the environment that
# they belong to: of this checkout, of the installation that they are a part of, or of the `birthmark` in PATH.
if [ -z "${PYTHON:-}" ]; then
    found="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
    for bin in "$found/../.venv/bin" "$found/../../../../../bin" "$(dirname "$(command -v birthmark || echo none/none)")"; do
        [ ! -x "$bin/birthmark" ] || [ ! -x "$bin/python" ] || { PYTHON="$bin/python"; break; }
    done
fi
[ -n "${PYTHON:-}" ] || {
    echo "$(basename "$0"): no birthmark beside this file, nor in PATH: activate its environment, or give PYTHON" >&2
    exit 2
}

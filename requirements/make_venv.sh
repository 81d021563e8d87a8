#!/bin/sh
# Make the virtual environment $1, unless it is there, with Python $2 or the first 3.11 or 3.12 found.
set -eu
venv=$1
usable='import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'

if [ -x "$venv/bin/python" ] && "$venv/bin/python" -c "$usable" 2>/dev/null && [ -x "$venv/bin/pip" ]; then
    exit 0
fi
for python in ${2:-python3.11 python3.12 python3 python}; do
    if "$python" -c "$usable" >/dev/null 2>&1; then
        echo "making $venv with $("$python" -c 'import sys; print(sys.executable, sys.version.split()[0])')"
        exec "$python" -m venv --clear "$venv"
    fi
done
echo "no Python 3.11 or 3.12 with venv and ensurepip found; name one: make PYTHON=/path/to/python3.11" >&2
exit 1

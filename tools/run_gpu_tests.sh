#!/bin/sh
# Run every test marked gpu on the machine's first GPU: kernels and small parts side by side, then the engine.
#
#   tools/run_gpu_tests.sh [kernels|engine|all] [pytest flags]     default: all
#
# PYTHON names the interpreter (default python3), which needs torch, triton, pytest and pytest-xdist; WORKERS the
# processes that share the GPU (default 14). The package is installed editable where it is not installed yet.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
workers=${WORKERS:-14}
part=${1:-all}
[ $# -gt 0 ] && shift
export PYTHONSAFEPATH=1 OMP_NUM_THREADS=1

"$python" -c 'import moe_runtime.kernels' 2>/dev/null ||
    "$python" -m pip install --quiet --no-deps --no-build-isolation --no-index -e . || exit 1
"$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || {
    echo "torch sees no GPU" >&2
    exit 1
}

# pytest-benchmark, where it is installed, warns under xdist, and warnings are errors here.
run() {
    start=$(date +%s)
    "$python" -m pytest -q -p no:benchmark -p no:cacheprovider -m gpu --timeout 600 --durations 10 "$@"
    code=$?
    echo "== $code after $(($(date +%s) - start)) s: $* =="
    [ $code -eq 0 ] || failed=1
}

failed=0
case $part in
kernels | all) run -n "$workers" tests/kernels tests/moe_runtime "$@" ;;
esac
case $part in
engine | all) run -n 5 --dist loadgroup tests/e2e/test_gpu_engine.py "$@" ;;
esac
exit $failed

#!/bin/sh
# compute-sanitizer over kernel tests at small shapes: memcheck on all of them, racecheck on kernels that use neither
# wgmma nor TMA, whose asynchronous copies it cannot follow.
#
#   tools/sanitize_gpu.sh [memcheck|racecheck|all]     default: all
#
# These are the tests that also run in the interpreter, compiled. Groups run side by side, each once plainly, to fill
# Triton's cache, then under the tool; PYTHON names the interpreter, LIMIT_S the seconds a group may take under the tool
# (default 300). Needs a machine that lets tools attach to the device. The exit status is not 0 where a tool reports an
# error, a test fails or a group takes too long.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
limit_s=${LIMIT_S:-300}
part=${1:-all}
export PYTHONSAFEPATH=1 OMP_NUM_THREADS=1

command -v compute-sanitizer >/dev/null || {
    echo "compute-sanitizer is not on the PATH; it comes with the CUDA toolkit" >&2
    exit 2
}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

test_flags="-q -x -p no:benchmark -p no:cacheprovider -p no:xdist --timeout 0"
groups=0

# check TOOL TEST...: start a group.
check() {
    groups=$((groups + 1))
    run_group "$groups" "$@" >"$logs/$groups" 2>&1 &
}

run_group() {
    number=$1
    tool=$2
    shift 2
    start=$(date +%s)
    # shellcheck disable=SC2086  # flags are words
    "$python" -m pytest $test_flags -m "not gpu" "$@" >/dev/null
    # One allocation per tensor, so that a read past its end is seen.
    # shellcheck disable=SC2086
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "$limit_s" compute-sanitizer --tool "$tool" --error-exitcode 9 \
        --kernel-name-exclude kns=at:: --print-limit 20 \
        "$python" -m pytest $test_flags -m "not gpu" "$@"
    code=$?
    echo "== $tool: $code after $(($(date +%s) - start)) s: $* =="
    [ $code -eq 0 ] || touch "$logs/failed"
}

k=tests/kernels
case $part in
memcheck | all)
    check memcheck $k/test_tokens_triton.py $k/test_triton_launch.py $k/test_expert_tile_triton.py
    check memcheck $k/test_topk_triton.py -k "order or tiles or inert or zero or cpu_op or sigmoid"
    check memcheck $k/test_norm_triton.py -k "reference or alone or inert"
    check memcheck $k/test_rope_write_triton.py -k "reference or alone or inert"
    check memcheck $k/test_gemm_triton.py -k "reference or alone"
    check memcheck $k/test_router_triton.py -k "reference or alone"
    check memcheck $k/test_experts_triton.py -k "reference or alone or inert"
    check memcheck $k/test_grouped_experts_triton.py -k "reference or alone or inert"
    check memcheck $k/test_attention_triton.py -k "reference or alone or inert"
    check memcheck $k/test_prefill_attention_triton.py -k "reference or alone or inert"
    check memcheck $k/test_softmax_triton.py $k/test_sampling_triton.py -k "reference or alone or itself or nan"
    ;;
esac
case $part in
racecheck | all)
    check racecheck $k/test_tokens_triton.py
    check racecheck $k/test_topk_triton.py -k "order or tiles or inert or zero or cpu_op or sigmoid"
    check racecheck $k/test_norm_triton.py -k "reference or alone or inert"
    check racecheck $k/test_rope_write_triton.py -k "reference or alone or inert"
    check racecheck $k/test_softmax_triton.py -k "reference or alone"
    ;;
esac
wait
for number in $(seq "$groups"); do tail -n 12 "$logs/$number"; done
[ ! -e "$logs/failed" ]

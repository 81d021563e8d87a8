#!/bin/sh
# compute-sanitizer over kernel tests at small shapes: memcheck on all of them, racecheck on kernels that use neither
# wgmma nor TMA, whose asynchronous copies it cannot follow.
#
#   tools/sanitize_gpu.sh [memcheck|racecheck|all]     default: all
#
# These are the tests that also run in the interpreter, compiled; PYTHON names the interpreter. Needs a machine that
# lets tools attach to the device. The exit status is not 0 where a tool reports an error or a test fails.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
part=${1:-all}
export PYTHONSAFEPATH=1 OMP_NUM_THREADS=1
# One allocation per tensor, so that a read past its end is seen; no cache of compiled kernels is needed.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

command -v compute-sanitizer >/dev/null || {
    echo "compute-sanitizer is not on the PATH; it comes with the CUDA toolkit" >&2
    exit 2
}

# check TOOL LIMIT_S TEST...
check() {
    tool=$1
    limit_s=$2
    shift 2
    start=$(date +%s)
    timeout "$limit_s" compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
        --kernel-name-exclude kns=at:: --print-limit 20 \
        "$python" -m pytest -q -x -p no:benchmark -p no:cacheprovider -p no:xdist -m "not gpu" --timeout 0 "$@"
    code=$?
    echo "== $tool: $code after $(($(date +%s) - start)) s: $* =="
    [ $code -eq 0 ] || failed=1
}

k=tests/kernels
failed=0
case $part in
memcheck | all)
    check memcheck 240 $k/test_tokens_triton.py $k/test_triton_launch.py $k/test_expert_tile_triton.py
    check memcheck 240 $k/test_topk_triton.py -k "order or tiles or inert or zero or cpu_op"
    check memcheck 240 $k/test_norm_triton.py $k/test_rope_write_triton.py -k "reference or alone or inert"
    check memcheck 240 $k/test_gemm_triton.py $k/test_router_triton.py -k "reference or alone"
    check memcheck 240 $k/test_experts_triton.py $k/test_grouped_experts_triton.py -k "reference or alone or inert"
    check memcheck 240 $k/test_attention_triton.py $k/test_prefill_attention_triton.py -k "reference or alone or inert"
    check memcheck 240 $k/test_softmax_triton.py $k/test_sampling_triton.py -k "reference or alone or itself or nan"
    ;;
esac
case $part in
racecheck | all)
    check racecheck 240 $k/test_tokens_triton.py
    check racecheck 240 $k/test_topk_triton.py -k "order or tiles or inert or zero or cpu_op"
    check racecheck 240 $k/test_norm_triton.py -k "reference or alone or inert"
    check racecheck 240 $k/test_softmax_triton.py -k "reference or alone"
    ;;
esac
exit $failed

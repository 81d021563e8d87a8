#!/bin/sh
# Moves of experts on two GPUs of one host: that they work, what they cost, what balance brings. About five minutes.
#   sh benchmarks/rearrange_x2.sh FOLDER     writes rearrange_h200_x2.json and balance_h200_x2.json there
set -e
out=$1
export OMP_NUM_THREADS=1
run="torchrun --nproc-per-node 2"
timeout 90 pytest -q -m multigpu tests/e2e/test_multi_gpu_rearrangement.py
timeout 100 $run benchmarks/bench_rearrange.py --device cuda --num-seqs 32 --output "$out/rearrange_h200_x2.json"
timeout 160 $run benchmarks/bench_balance.py --device cuda --output "$out/balance_h200_x2.json"

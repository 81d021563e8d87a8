"""Batch-invariant ops: one file per op with kernel, launcher and reference. Imports nothing of ours."""

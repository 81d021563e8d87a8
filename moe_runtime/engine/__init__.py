"""Requests, scheduling, KV cache, sampling and the step loop."""

"""Capacity planning: what a model needs and what fits."""

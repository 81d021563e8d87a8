"""Layers shared by the architectures."""

"""Expert placement: numpy only, pure functions."""

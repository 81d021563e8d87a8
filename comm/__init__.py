"""Expert-parallel dispatch and combine, tree-pinned all-reduce, process groups."""

"""Parts of ``tools/train_builtin.py``, each with one decision."""

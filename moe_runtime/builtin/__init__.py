"""The built-in model's files; see README.md beside this file."""

"""OpenAI-compatible HTTP front end, a process of its own."""

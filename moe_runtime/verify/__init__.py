"""Checks that a request's bits depend on nothing but the request."""

"""Stored keys and values, written into a cache where a prompt has them, and passes over the tokens between."""

"""Bytes that outlive a process. Nothing here knows of models."""

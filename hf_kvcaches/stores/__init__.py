"""Bytes, vectors and signatures that outlive a process. Nothing here knows of models."""

"""Bytes, vectors and signatures; nothing here knows of models."""

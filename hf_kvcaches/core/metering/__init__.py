"""Measuring a model on texts, for codecs."""

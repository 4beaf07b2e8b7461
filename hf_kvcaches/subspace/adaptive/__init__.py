"""Bases that follow the text."""

"""Slow, obvious caches that prune by shifting, gathering and appending: what EquipCache is compared with, and timed against."""

"""One model's cache for another model's weights."""

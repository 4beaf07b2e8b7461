"""`TranslatedCache`: what one model has read, for another model with other weights."""

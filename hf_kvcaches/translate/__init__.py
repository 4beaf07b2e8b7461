"""TranslatedCache: the cache of one model, rebuilt from compact codes for another model of the same tokenizer."""

"""EquipCache: token pruning as replacement in place."""

"""`EquipCache`: token pruning as in-place replacement."""

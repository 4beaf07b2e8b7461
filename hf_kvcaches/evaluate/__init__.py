"""What a cache changes, measured beside the full cache; running models with a clock; what calibrations share."""

"""What every cache shares: positions, masks, attention, fingerprints, artifacts."""

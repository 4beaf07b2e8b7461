"""The parts of the paper that the product does without: near-identical segments, and probes."""

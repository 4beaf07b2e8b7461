"""The parts of the paper that the product does without: summaries of prompts in a few slots, and what moves them to another prompt."""

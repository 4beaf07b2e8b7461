"""What a cache loses on a real model: prompts with known answers, and measures of logits and answers."""

"""A prompt that resembles an earlier one starts from what that one had."""

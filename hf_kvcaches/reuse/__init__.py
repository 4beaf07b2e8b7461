"""Write stored keys and values into a cache at the indices where a prompt has them, and run the tokens between."""

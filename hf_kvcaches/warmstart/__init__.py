"""WarmStartCache: the first token of a prompt from the summary of another one."""

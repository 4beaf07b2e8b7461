"""`WarmStartCache`: the first token of a prompt from the state of a similar one."""

"""The summaries of the paper: slots that stand for a prompt, and the maps that bring them to another one."""

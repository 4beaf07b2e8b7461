"""`SegmentReuseCache`: repeated segments of prompts are computed once, wherever they stand.

Paper: Cross-Query KV Reuse with RoPE Reindexing for Template-Heavy Agent Prompts.
"""

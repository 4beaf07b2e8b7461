"""`SegmentReuseCache`: segments that prompts share are computed once, at whatever index they are.

Paper: Cross-Query KV Reuse with RoPE Reindexing for Template-Heavy Agent Prompts.
"""

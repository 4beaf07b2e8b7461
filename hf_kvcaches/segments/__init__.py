"""`SegmentReuseCache`: segments that prompts share are computed once, at whatever index they are."""

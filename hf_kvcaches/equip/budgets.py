from hf_kvcaches.errors import ConfigError
def resolve_budgets(b, n):
    return tuple(b) if isinstance(b, (list, tuple)) else (b,)*n
def slots_for(b, t):
    return b if isinstance(b, int) else int(b*t)
def check_budget(b, s, r):
    if b < s + r: raise ConfigError.of("budget", f"{s+r}", b)

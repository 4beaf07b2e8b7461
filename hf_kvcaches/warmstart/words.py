"""The English words that `changes` recognises, in lower case."""

from __future__ import annotations

import re
from collections import defaultdict


def stem(word: str) -> str:
    """Cut off a word's inflection, as far as the lists need it."""
    return re.sub(r"(.)\1$", r"\1", re.sub(r"(?<=...)(?:ies|ied|ing|ed|es|s|e|y)$", "", word))


# Dates are numbers that have names.
NUMBERS = frozenset(
    (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen "
        "twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion half quarter third fourth fifth sixth "
        "seventh eighth ninth tenth first second last next previous once twice single double triple "
        "january february march april may june july august september october november december monday tuesday wednesday thursday friday "
        "saturday sunday spring summer autumn winter today tomorrow yesterday noon midnight am pm"
    ).split()
)
# Those that are verbs, in any form.
NEGATIONS = frozenset(
    stem(word)
    for word in (
        "not no never none nobody nothing nowhere neither nor without cannot hardly scarcely barely rarely seldom unless except exclude "
        "lack fail refuse deny avoid forbid false wrong untrue instead rather non absent stop cease "
        # Without the apostrophe.
        "dont doesnt didnt cant couldnt wont wouldnt shouldnt isnt arent wasnt werent hasnt havent hadnt aint"
    ).split()
)
# Also with an s.
UNITS = frozenset(
    (
        "minute hour day week month year kg kgs km cm mm mg ml kb mb gb tb hz mph percent percentage gram kilogram ton meter metre "
        "kilometer kilometre mile yard foot feet inch inche liter litre gallon pound ounce acre celsius fahrenheit degree watt volt byte "
        "usd eur gbp dollar euro yen franc cent"
    ).split()
)
# Units only behind a number.
SHORT_UNITS = frozenset("m g l h s d w v a k c f b t min in M G L H S D W V A K C F B T".split())

# Any of these more or fewer makes another claim or another question.
LOGIC = frozenset(
    (
        "and or but if else although though because since until till while when where who whom whose which what why how all some any "
        "every each both either only few fewer many most much more less least must should shall may might can could will would ought "
        "always often sometimes usually yet about almost nearly exactly approximately ?"
    ).split()
)
# One of these may come or go, but not replace another of its kind.
_PRONOUNS = frozenset(
    (
        "i me my mine myself you your yours yourself yourselves he him his himself she her hers herself it its itself we us our ours "
        "ourselves they them their theirs themselves this these those"
    ).split()
)
_PREPOSITIONS = frozenset(
    (
        "of to from in into out on onto off at by for with within over under above below before after behind between among against "
        "through across along around near beside besides beyond during upon toward towards up down inside outside via per like as"
    ).split()
)
_AUXILIARIES = frozenset("am is are was were be been being do does did done have has had having".split())
SWAPPED = (_PRONOUNS, _PREPOSITIONS, _AUXILIARIES)

_FILLERS = frozenset(
    (
        "a an the that there here please kindly thanks so very quite really too then thus indeed well simply also just even still already "
        "again such own same oh hello hi dear not no nor neither never none without cannot than"
    ).split()
)
SMALL = frozenset.union(_FILLERS, LOGIC, *SWAPPED)
# Behind an apostrophe, and before one.
ENDINGS = frozenset("s t re ve ll d m don doesn didn won wouldn couldn shouldn isn aren wasn weren hasn haven hadn".split())

PREFIXES = "un in im il ir dis non mis anti de".split()
_PAIRS = (
    "increase decrease, increase reduce, raise lower, rise fall, rose fell, grow shrink, allow deny, allow forbid, permit prohibit, accept "
    "reject, before after, more less, more fewer, most least, on off, open close, open shut, in out, to from, up down, over under, above "
    "below, inside outside, with without, for against, and or, all none, all some, every no, always never, start stop, start end, begin "
    "end, buy sell, lend borrow, give take, send receive, push pull, win lose, love hate, remember forget, keep delete, create delete, add "
    "remove, include exclude, enable disable, lock unlock, encode decode, import export, read write, arrive leave, true false, right "
    "wrong, right left, yes no, good bad, better worse, best worst, big small, large small, long short, high low, higher lower, highest "
    "lowest, maximum minimum, upper lower, top bottom, first last, next previous, early late, new old, fast slow, hot cold, light dark, "
    "black white, full empty, strong weak, hard easy, cheap expensive, safe dangerous, public private, he she, him her, day night, north "
    "south, east west, positive negative, profit loss, same different, forward backward, success failure, agree disagree, ascending "
    "descending, must may, required optional, here there, now then"
)


# By stem, the stems of the opposites.
OPPOSITES: dict[str, set[str]] = defaultdict(set)
for _first, _second in (map(stem, pair.split(" ")) for pair in _PAIRS.split(", ")):
    OPPOSITES[_first].add(_second)
    OPPOSITES[_second].add(_first)

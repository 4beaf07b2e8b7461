"""The English words that `changes` recognises, in lower case. A word that no list has is content."""

from __future__ import annotations

NUMBERS = frozenset(
    (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fifteen twenty thirty forty fifty sixty seventy "
        "eighty ninety hundred thousand million billion half quarter third fifth first second last next previous once twice double"
    ).split()
)
NEGATIONS = frozenset("not no none never neither nor without cannot nobody nothing nowhere hardly barely rarely unless except".split())
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
        "again such own same oh hello hi dear than"
    ).split()
)
SMALL = frozenset.union(_FILLERS, LOGIC, *SWAPPED)

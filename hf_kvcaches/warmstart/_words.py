"""The words that `gate` knows, in small letters: English ones."""

from __future__ import annotations

from collections import defaultdict

_UNITS_OF_TIME = "second seconds minute minutes hour hours day days week weeks fortnight month months year years decade decades century"

NUMBERS = frozenset(
    (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
        "nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred hundreds thousand thousands million millions billion "
        "billions trillion dozen dozens score pair couple half halves quarter quarters third thirds fourth fifth sixth seventh eighth "
        "ninth tenth eleventh twelfth thirteenth twentieth thirtieth hundredth thousandth first second last next previous once twice "
        "thrice single double triple quadruple "
        # Dates are numbers that have names.
        "january february march april may june july august september october november december jan feb mar apr jun jul aug sep sept oct "
        "nov dec monday tuesday wednesday thursday friday saturday sunday mon tue tues wed thu thur thurs fri sat sun mondays tuesdays "
        "wednesdays thursdays fridays saturdays sundays today tomorrow yesterday tonight noon midnight morning afternoon evening night am "
        "pm spring summer autumn winter"
    ).split()
)

NEGATIONS = frozenset(
    (
        "not no never none nobody nothing nowhere neither nor without cannot hardly scarcely barely rarely seldom unless except excluding "
        "excludes exclude lack lacks lacked lacking fail fails failed failing refuse refuses refused deny denies denied avoid avoids "
        "avoided forbid forbids forbidden false falsely wrong untrue instead rather nay nope non absent absence stop stops stopped cease "
        # As they are typed in haste.
        "dont doesnt didnt cant couldnt wont wouldnt shouldnt isnt arent wasnt werent hasnt havent hadnt mustnt neednt aint"
    ).split()
)

UNITS = frozenset(
    (
        f"{_UNITS_OF_TIME} kg kgs km kms cm mm mg ml kb mb gb tb kwh hz khz mhz ghz lb lbs oz ft mph kph mi ms percent percentage gram "
        "grams kilogram kilograms kilo kilos ton tons tonne tonnes meter meters metre metres kilometer kilometers kilometre kilometres "
        "centimeter centimeters centimetre centimetres millimeter millimeters millimetre millimetres mile miles yard yards foot feet inch "
        "inches liter liters litre litres gallon gallons pint pints ounce ounces pound pounds acre acres hectare hectares celsius "
        "fahrenheit kelvin degree degrees watt watts volt volts byte bytes bit bits usd eur gbp jpy chf cny dollar dollars euro euros yen "
        "yuan rupee rupees franc francs cent cents penny pence shilling shillings"
    ).split()
)
# Units only behind a number.
SHORT_UNITS = frozenset("m g l h s d w v a k c f b j n t min in".split()) | frozenset("M G L H S D W V A K C F B J N T".split())

# What words do to one another; any of them more or fewer makes another claim or another question.
LOGIC = frozenset(
    (
        "and or but if else although though because since until till while when where who whom whose which what why how all some any "
        "every each both either only few fewer many most much more less least must should shall may might can could will would ought "
        "always often sometimes usually yet about almost nearly exactly approximately ?"
    ).split()
)

# Of these, one may come or go, but not stand for another.
PRONOUNS = frozenset(
    (
        "i me my mine myself you your yours yourself yourselves he him his himself she her hers herself it its itself we us our ours "
        "ourselves they them their theirs themselves this these those"
    ).split()
)
PREPOSITIONS = frozenset(
    (
        "of to from in into out on onto off at by for with within over under above below before after behind between among against "
        "through across along around near beside besides beyond during upon toward towards up down inside outside via per like as"
    ).split()
)
AUXILIARIES = frozenset("am is are was were be been being do does did done have has had having".split())
SWAPPED = (PRONOUNS, PREPOSITIONS, AUXILIARIES)

_FILLERS = frozenset(
    (
        "a an the that there here please kindly thanks so very quite really too then thus indeed well simply also just even still already "
        "again such own same oh hello hi dear"
    ).split()
)
SMALL = _FILLERS | LOGIC | PRONOUNS | PREPOSITIONS | AUXILIARIES | frozenset("not no nor neither never none without cannot than".split())
# Behind an apostrophe.
ENDINGS = frozenset("s t re ve ll d m".split()) | frozenset(
    "don doesn didn won wouldn couldn shouldn isn aren wasn weren hasn haven hadn".split()
)

PREFIXES = "un in im il ir dis non mis anti de".split()
_PAIRS = (
    "increase decrease, increase reduce, raise lower, rise fall, grow shrink, allow deny, allow forbid, permit forbid, permit "
    "prohibit, accept reject, accept refuse, accept decline, approve reject, grant deny, before after, more less, more fewer, most "
    "least, on off, open close, open shut, in out, into from, to from, up down, over under, above below, inside outside, with "
    "without, for against, and or, all none, all some, every no, any all, always never, often seldom, start stop, start finish, start "
    "end, begin end, begin finish, buy sell, lend borrow, give take, give receive, send receive, push pull, win lose, pass fail, love "
    "hate, like dislike, remember forget, find lose, keep discard, keep delete, save delete, create delete, create destroy, build "
    "destroy, add remove, add subtract, add delete, insert remove, include exclude, multiply divide, enable disable, activate "
    "deactivate, install uninstall, lock unlock, connect disconnect, attach detach, encrypt decrypt, encode decode, compress expand, "
    "import export, upload download, read write, load unload, arrive leave, arrive depart, enter leave, enter exit, enter quit, come "
    "go, ascend descend, advance retreat, attack defend, hire fire, true false, right wrong, right left, correct incorrect, yes no, "
    "good bad, better worse, best worst, big small, large small, great small, long short, tall short, high low, higher lower, highest "
    "lowest, maximum minimum, max min, maximize minimize, maximise minimise, upper lower, top bottom, first last, first second, next "
    "previous, early late, earlier later, earliest latest, new old, newer older, newest oldest, young old, fast slow, quick slow, "
    "faster slower, hot cold, warm cool, wet dry, light dark, light heavy, bright dark, black white, full empty, rich poor, strong "
    "weak, hard soft, hard easy, difficult easy, simple complex, cheap expensive, safe dangerous, clean dirty, public private, male "
    "female, man woman, men women, boy girl, he she, him her, his her, father mother, son daughter, brother sister, husband wife, "
    "king queen, day night, north south, east west, positive negative, pro con, gain loss, profit loss, income expense, credit debit, "
    "asset liability, guilty innocent, alive dead, live die, asleep awake, present absent, present past, past future, same different, "
    "similar different, equal unequal, near far, deep shallow, wide narrow, thick thin, front back, forward backward, forwards "
    "backwards, horizontal vertical, internal external, major minor, majority minority, ally enemy, friend enemy, friend foe, victory "
    "defeat, success failure, succeed fail, agree disagree, confirm deny, confirm cancel, support oppose, encourage discourage, "
    "improve worsen, strengthen weaken, tighten loosen, widen narrow, lengthen shorten, fill empty, hide show, expose conceal, even "
    "odd, inclusive exclusive, ascending descending, synchronous asynchronous, must may, can cannot, mandatory optional, required "
    "optional, here there, now then, now later, today tomorrow, today yesterday"
)


def _forms(word: str) -> set[str]:
    """The word as it is bent."""
    forms = {word, f"{word}s", f"{word}es", f"{word}d", f"{word}ed", f"{word}ing", f"{word}{word[-1]}ed", f"{word}{word[-1]}ing"}
    if word.endswith("e"):
        forms.add(f"{word[:-1]}ing")
    if word.endswith("y"):
        forms |= {f"{word[:-1]}ies", f"{word[:-1]}ied"}
    return forms


_opposites: dict[str, set[str]] = defaultdict(set)
for _pair in _PAIRS.split(", "):
    _one, _other = _pair.split(" ")
    _opposites[_one].add(_other)
    _opposites[_other].add(_one)

# word -> its opposites, and bent form -> word
OPPOSITES: dict[str, frozenset[str]] = {word: frozenset(others) for word, others in _opposites.items()}
BASES: dict[str, str] = {form: word for word in OPPOSITES if len(word) > 2 for form in sorted(_forms(word)) if form not in OPPOSITES}
_IRREGULAR = (
    "rose rise, risen rise, fell fall, fallen fall, grew grow, grown grow, shrank shrink, shrunk shrink, forbade forbid, forbidden "
    "forbid, began begin, begun begin, bought buy, sold sell, lent lend, gave give, given give, took take, taken take, sent send, won "
    "win, lost lose, forgot forget, forgotten forget, found find, kept keep, built build, wrote write, written write, came come, went "
    "go, gone go, hid hide, hidden hide, shown show"
)
BASES |= {form: word for form, _, word in (entry.partition(" ") for entry in _IRREGULAR.split(", "))}

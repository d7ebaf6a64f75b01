"""What the demo's prompts are made of: pools of words, and templates of five small tasks.

The wording was chosen with SmolLM2-135M-Instruct at hand. Asked to reason in steps it loops, and loops flatter a drafter;
asked for one or two sentences it stops. Words that its tokenizer splits in pieces were left out where others would do:
a drafter of this size learns what surrounds a rare word long before it learns to copy the word itself.

A template names its slots: `{name}` is a word of the pool `name`, `{name_b}` another word of the same pool, `{a:12-60}` a
number from that range.
"""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(phrase.strip() for phrase in text.split(","))


POOLS: dict[str, tuple[str, ...]] = {
    "name": _words(
        """
        Adam Alan Alex Alice Amy Andrew Anna Anne Anthony Arthur Barbara Ben Betty Bill Bob Brian Bruce Carl Carol
        Charles Chris Claire Dan Daniel David Dennis Diana Donald Dorothy Edward Elizabeth Ellen Emily Emma Eric Eva
        Frank Fred George Grace Greg Harold Harry Helen Henry Howard Hugh Ian Jack James Jane Jason Jean Jennifer Jim
        Joe John Joseph Joyce Judy Julia Karen Kate Keith Kelly Kevin Larry Laura Leo Lewis Lily Linda Lisa Louis Lucy
        Luke Maria Mark Martha Martin Mary Matthew Max Michael Mike Nancy Nick Oliver Oscar Patrick Paul Peter Philip
        Rachel Ralph Ray Rebecca Richard Robert Roger Rose Roy Ruth Ryan Sally Sam Samuel Sarah Scott Simon Stephen
        Steve Susan Ted Thomas Tim Tom Tony Victor Victoria Vincent Walter Wayne William
        """
    ),
    "city": _words(
        """
        London Paris Berlin Rome Madrid Vienna Boston Chicago Denver Dallas Houston Seattle Detroit Toronto Montreal
        Sydney Melbourne Tokyo Moscow Dublin Oxford Cambridge Manchester Liverpool Birmingham Glasgow Edinburgh Athens
        Prague Stockholm Copenhagen Amsterdam Brussels Geneva Milan Florence Venice Naples Cairo Delhi Mumbai Shanghai
        Singapore Portland Austin Phoenix Atlanta Miami Baltimore Philadelphia Pittsburgh Hamburg Jerusalem
        """
    ),
    "item": _words(
        """
        apples books flowers eggs tickets stones oranges cards bottles boxes toys shells coins letters lemons plants
        candles cakes potatoes seeds bananas shirts shoes stars stamps
        """
    ),
    "job": _words(
        """
        nurse teacher farmer driver doctor cook lawyer singer baker pilot writer dentist painter sailor judge banker
        chemist manager guard clerk
        """
    ),
    "object": _words(
        """
        report letter contract photo map budget menu form book ticket poster survey key drawing manual
        """
    ),
    "event": ("meeting", "party", "concert", "dinner", "lesson", "trip", "lecture", "game", "wedding", "class"),
    "kind": ("Book", "Car", "Student", "Movie", "House", "Song", "Player", "Ticket", "Device", "Product"),
    "field": _words(
        """
        title price color size weight year label age height speed city number email score date rating length owner
        width code
        """
    ),
    "function": _phrases(
        """
        counts the vowels in a string, checks whether a string is a palindrome, reverses a string,
        counts the words in a sentence, removes all spaces from a string, returns the longest word in a sentence,
        converts a string to upper case, counts how often a letter occurs in a string,
        returns the first letter of every word, removes duplicates from a list,
        checks whether two strings are anagrams, replaces every vowel with a star, counts the digits in a string,
        joins a list of words with commas, swaps the case of every letter, returns the shortest word in a list,
        checks whether a string starts with a capital letter, repeats a string n times,
        converts Celsius to Fahrenheit, computes the area of a circle, computes the factorial of n,
        returns the nth Fibonacci number, checks whether a number is prime, raises a number to a power,
        returns the last element of a list, converts hours to minutes, swaps the keys and values of a dictionary,
        flattens a list of lists, merges two sorted lists, computes the perimeter of a rectangle
        """
    ),
}
"""Words that a drafter could memorise. The index of a word decides its split; no word stands in two pools."""

COMMON: dict[str, tuple[str, ...]] = {
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    "color": ("red", "blue", "green", "yellow", "white", "black", "brown"),
    "place": ("library", "market", "museum", "station", "garden", "school", "theater", "hospital", "hotel", "office"),
    "relation": ("greater than", "less than", "divisible by"),
}
"""Words that belong to the wording: every split uses all of them."""

ARITH = (
    "{name} drives from {city} to {city_b} at {a:30-90} miles per hour for {b:2-14} hours. How far does {name} drive?",
    "The garden of {name} is {a:15-60} meters long and {b:3-40} meters wide. What is the area of the garden?",
    "{name} has {a:20-90} {item} and gives {b:2-14} {item} to {name_b}. How many {item} does {name} have left?",
    "{name} earns {a:11-60} dollars an hour and works for {b:2-14} hours. How much does {name} earn?",
    "One box holds {a:4-24} {item}. {name} fills {b:3-14} boxes. How many {item} does {name} need?",
)
ARITH_ENDINGS = ("Answer in one short sentence.", "Answer in two short sentences.")

REWRITE = (
    "Rewrite this sentence in the past tense: "
    "{name} walks to the {place} every {day} and meets {name_b} at the {place_b}.",
    "Rewrite this sentence in the past tense: "
    "Every {day}, {name} takes the train to {city} and brings {a:2-20} {item} to the {place}.",
    "Correct the mistakes in this sentence: "
    "{name} go to the {place} in {city} on {day} and buy {a:2-30} {item} for {name_b}.",
    "Rewrite this message in a formal tone: Hi {name}, I can't come to the {event} on {day}. Sorry! {name_b}",
    "Rewrite this message in a formal tone: Hi {name}, please bring the {object} to the {event}. Thanks! {name_b}",
)

EXTRACT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("{name} is a {a:21-70} year old {job} who lives in {city}.", ("name", "age", "job", "city")),
    (
        "{name} ordered {a:2-40} {color} {item} for {b:3-90} dollars.",
        ("customer", "item", "color", "quantity", "price"),
    ),
    ("{name} sent a {object} to {name_b} in {city} on {day}.", ("sender", "receiver", "object", "city", "day")),
    ("{name} works as a {job} at the {place} of {city} since {a:1980-2019}.", ("name", "job", "place", "city", "year")),
)

CODE = (
    "Write a Python function that {function}. Write only the code.",
    "Write a Python class {kind} with the fields {field}, {field_b} and {field_c}. Write only the code.",
    "Write a one-line Python function that returns the numbers in a list that are {relation} {a:2-99}.",
    "Write a Python function that counts how many numbers in a list are {relation} {a:2-99}. Write only the code.",
    "Write a Python function that returns the sum of the numbers in a list that are {relation} {a:2-99}.",
)

ANSWER: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "The {place} of {city} was built in {a:1900-1999} by {name}. It has {b:11-95} rooms.",
        (
            "When was the {place} built, and how many rooms does it have?",
            "Who built the {place} of {city}, and when?",
        ),
    ),
    (
        "A ticket for the {place} of {city} costs {a:15-60} dollars for adults and {b:2-14} dollars for children. "
        "{name}, a {job}, sells the tickets.",
        (
            "How much does a ticket cost for adults and for children?",
            "Who sells the tickets for the {place} of {city}?",
        ),
    ),
    (
        "{name} is a {job} and works at the {place} in {city}. {name_b} is a {job_b} and works at the {place_b}.",
        ("What is the job of {name}, and where does {name} work?", "Where does {name_b} work?"),
    ),
    (
        "On {day}, {name} bought {a:12-95} {item} at the {place} of {city}. {name_b} bought only {b:2-11} {item}.",
        ("How many {item} did {name} buy, and where?", "When did {name} buy the {item}?"),
    ),
)

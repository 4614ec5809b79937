"""The tiny task: seeded word problems with step-by-step equations and a last line `#### answer`.

Answers are ambiguous on purpose (commuted operands, sums in random order, optional connectors, subjects and nouns), so
revealing several tokens at once costs accuracy, as it does in natural text. Problems of the training stream and of the
held-out stream come from seeds that never meet: a stream's seed is hashed with its name.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .words import ADJECTIVES, CONNECTORS, CONTAINERS, GAINS, LOSSES, MALE_NAMES, NAMES, NOUNS

MAX_RESULT = 99
_MALE = frozenset(MALE_NAMES)
_ANSWER = re.compile(r"####\s*(-?\d+)")


@dataclass(frozen=True)
class Problem:
    """A question, one of its many correct worked solutions, and the number that it ends with."""

    question: str
    solution: str
    answer: int


@dataclass
class _Story:
    """What the solution's lines may mention."""

    rng: random.Random
    name: str
    pronoun: str
    noun: str

    def line(self, equation: str, result: int) -> str:
        rng = self.rng
        lead = rng.choice([*CONNECTORS, "", "", ""])
        subject = rng.choice([self.name, self.pronoun, ""])
        words = [lead] if lead else []
        if subject:
            words.append(f"{subject} has")
        words.append(f"{equation} = {result}")
        if subject and rng.random() < 0.7:
            words.append(self.noun)
        return " ".join(words)


def problems(stream: str, seed: int) -> Iterator[Problem]:
    """An endless stream of problems; `stream` is `train` or `held-out`, each with its own seeds."""
    rng = random.Random(f"{stream}/{seed}")
    while True:
        yield _TEMPLATES[rng.randrange(len(_TEMPLATES))](rng)


def drills(seed: int) -> Iterator[Problem]:
    """Three bare expressions each, for arithmetic early in training."""
    rng = random.Random(f"drill/{seed}")
    while True:
        expressions = [_expression(rng) for _ in range(3)]
        lines = [f"{left} = {result}" for left, result in expressions]
        question = "; ".join(left for left, _ in expressions)
        yield _finish([question], lines, expressions[-1][1])


def _expression(rng: random.Random) -> tuple[str, int]:
    kind = rng.random()
    if kind < 0.4:
        a = rng.randint(2, 97)
        b = rng.randint(1, min(30, MAX_RESULT - a))
        return _sum(rng, a, b), a + b
    if kind < 0.75:
        a = rng.randint(3, MAX_RESULT)
        b = rng.randint(1, min(30, a - 1))
        return f"{a} - {b}", a - b
    a = rng.randint(2, 20)
    b = rng.randint(2, min(20, MAX_RESULT // a))
    return _product(rng, a, b), a * b


def extract_answer(text: str) -> int | None:
    """The number behind the last `####`, or `None`."""
    found = _ANSWER.findall(text)
    return int(found[-1]) if found else None


def is_correct(text: str, problem: Problem) -> bool:
    """Whether a generated text ends with the problem's answer."""
    return extract_answer(text) == problem.answer


def _sum(rng: random.Random, a: int, b: int) -> str:
    return f"{a} + {b}" if rng.random() < 0.5 else f"{b} + {a}"


def _product(rng: random.Random, a: int, b: int) -> str:
    return f"{a} * {b}" if rng.random() < 0.5 else f"{b} * {a}"


def _story(rng: random.Random) -> _Story:
    name = rng.choice(NAMES)
    return _Story(rng, name, "He" if name in _MALE else "She", rng.choice(NOUNS))


def _described(story: _Story) -> str:
    return f"{story.rng.choice(ADJECTIVES)} {story.noun}" if story.rng.random() < 0.5 else story.noun


def _finish(question: list[str], lines: list[str], answer: int) -> Problem:
    return Problem(" ".join(question), "\n".join([*lines, f"#### {answer}"]), answer)


def _event(story: _Story, amount: int) -> tuple[str, str, int]:
    """One event: its sentence, its equation, and the new amount."""
    rng = story.rng
    kinds = []
    if amount <= MAX_RESULT - 2:
        kinds.append("gain")
    if amount >= 4:
        kinds.append("loss")
    if 2 <= amount <= MAX_RESULT // 2:
        kinds.append("double")
    kind = rng.choices(kinds, weights=[1 if k == "double" else 3 for k in kinds])[0]
    who = rng.choice([story.name, story.pronoun])
    lead = "Then " if rng.random() < 0.3 else ""
    if kind == "gain":
        b = rng.randint(2, min(20, MAX_RESULT - amount))
        return f"{lead}{who} {rng.choice(GAINS)} {b} more.", _sum(rng, amount, b), amount + b
    if kind == "loss":
        b = rng.randint(2, min(20, amount - 1))
        return f"{lead}{who} {rng.choice(LOSSES)} {b}.", f"{amount} - {b}", amount - b
    return f"{lead}{who} doubles the number.", _product(rng, amount, 2), amount * 2


def _chain(rng: random.Random) -> Problem:
    """A chain of gains, losses and doublings."""
    story = _story(rng)
    amount = rng.randint(2, 20)
    question = [f"{story.name} has {amount} {_described(story)}."]
    lines = []
    for _ in range(rng.choice([2, 2, 3])):
        sentence, equation, amount = _event(story, amount)
        question.append(sentence)
        lines.append(story.line(equation, amount))
    question.append(f"How many {story.noun} does {story.name} have now?")
    return _finish(question, lines, amount)


def _total(rng: random.Random) -> Problem:
    """The total of three groups, added in random order."""
    story = _story(rng)
    groups = [rng.randint(2, 20) for _ in range(3)]
    colours = rng.sample(ADJECTIVES, 3)
    listed = [f"{n} {colour}" for n, colour in zip(groups, colours, strict=True)]
    question = [f"{story.name} has {listed[0]}, {listed[1]} and {listed[2]} {story.noun}."]
    rng.shuffle(groups)
    total, lines = groups[0], []
    for number in groups[1:]:
        lines.append(story.line(_sum(rng, total, number), total + number))
        total += number
    question.append(f"How many {story.noun} in all?")
    return _finish(question, lines, total)


def _boxes(rng: random.Random) -> Problem:
    """Boxes times items, then one event."""
    story = _story(rng)
    boxes = rng.randint(2, 9)
    each = rng.randint(2, min(20, (MAX_RESULT - 2) // boxes))
    amount = boxes * each
    question = [f"{story.name} has {boxes} {rng.choice(CONTAINERS)} of {each} {story.noun} each."]
    lines = [story.line(_product(rng, boxes, each), amount)]
    sentence, equation, amount = _event(story, amount)
    question.append(sentence)
    lines.append(story.line(equation, amount))
    question.append(f"How many {story.noun} does {story.name} have now?")
    return _finish(question, lines, amount)


_TEMPLATES = (_chain, _total, _boxes)

"""GSM8K: the number that a chain of thought ends with."""

import re
from decimal import Decimal, InvalidOperation

# A minus after a digit is a subtraction, not a sign.
_NUMBER = r"(?:(?<![\d.])-)?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_STATED = re.compile(rf"(?:####|[Aa]nswer(?:\s+is)?\s*:?)[\s*$]*({_NUMBER})")
_ANY = re.compile(_NUMBER)


def process_results(doc: dict, results: list[str]) -> dict[str, int]:
    """Metrics of one problem.

    Args:
        doc: a row of `openai/gsm8k` (`question`, `answer`).
        results: one generated text.

    Returns:
        `exact_match`: 1 if the number found equals the gold number; `answered`: 1 if the text *states* an answer
        (boxed, after `####` or "answer is"), 0 if the last number had to be taken (as the public evaluation does).
    """
    stated = stated_answer(results[0])
    found = stated if stated is not None else last_number(results[0])
    gold = last_number(doc["answer"].split("####")[-1])
    return {"exact_match": int(found is not None and found == gold), "answered": int(stated is not None)}


def stated_answer(text: str) -> Decimal | None:
    """The last boxed number, else the last one after `####` or "answer is"; `None` where no answer is stated."""
    for boxed in reversed(_BOXED.findall(text)):
        number = last_number(boxed)
        if number is not None:
            return number
    stated = _STATED.findall(text)
    return _decimal(stated[-1]) if stated else None


def last_number(text: str) -> Decimal | None:
    """The last number in a text; `1,200`, `$3.50` and `-4` are numbers."""
    found = [number for number in map(_decimal, _ANY.findall(text.replace("\\$", "$"))) if number is not None]
    return found[-1] if found else None


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(re.sub(r"[$,]", "", text))
    except InvalidOperation:
        return None

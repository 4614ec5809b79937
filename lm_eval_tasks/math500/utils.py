"""MATH-500: the stated answer, compared by the `math-verify` library (`pip install math-verify`)."""

import re

try:
    from math_verify import LatexExtractionConfig, parse, verify
except ImportError as error:
    raise ImportError("the task mrp_math500 checks answers with math-verify: pip install math-verify") from error

_STATED = re.compile(r"[Aa]nswer(?:\s+is)?\s*:?\s*(.+)")
_EXTRACTION = [LatexExtractionConfig(boxed_match_priority=0)]
_SECONDS = 30  # of wall time; the library's 5 turn right answers into wrong ones on a busy machine


def process_results(doc: dict, results: list[str]) -> dict[str, int]:
    """Metrics of one problem.

    Args:
        doc: a row of `HuggingFaceH4/MATH-500` (`problem`, `answer`, ...).
        results: one generated text.

    Returns:
        `math_verify`: 1 if the stated answer equals the gold answer as mathematics; `answered`: 1 if the text states
        an answer at all (in `\\boxed{}`, or after "answer is"). A chain that was cut off states none and is wrong.
    """
    answer = stated_answer(results[0])
    correct = answer is not None and is_equal(answer, doc["answer"])
    return {"math_verify": int(correct), "answered": int(answer is not None)}


def stated_answer(text: str) -> str | None:
    """The content of the last complete `\\boxed{...}`, else what follows the last "answer is"."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        content = _braced(text, start + len("\\boxed"))
        if content is not None:
            return content
        start = text.rfind("\\boxed{", 0, start)
    stated = _STATED.findall(text)
    if not stated:
        return None
    return stated[-1].strip().rstrip(".").strip("*$ ") or None


def is_equal(answer: str, gold: str) -> bool:
    """Whether two LaTeX answers denote the same thing."""
    return bool(verify(_parse(gold), _parse(answer), timeout_seconds=_SECONDS))


def _parse(answer: str) -> list:
    return parse(f"$\\boxed{{{answer}}}$", extraction_config=_EXTRACTION, parsing_timeout=_SECONDS)


def _braced(text: str, start: int) -> str | None:
    """The text between the brace at `start` and its partner; `None` if there is no partner."""
    depth, index = 0, start
    while index < len(text):
        if text[index] == "\\":
            index += 2  # an escaped brace is no brace
            continue
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return text[start + 1 : index]
        index += 1
    return None

"""HumanEval and sanitized MBPP: find the code in a chat answer, run it against the problem's tests.

The harness loads each file of a task folder by its path, so this one stands alone. Importing it runs nothing; code is
run only from `process_results`, which the harness reaches only with `--confirm_run_unsafe_code`.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile

TIME_LIMIT = 10.0  # seconds a program may run; the problems' own solutions need well under one
MEMORY_LIMIT = 4 * 2**30  # bytes of address space
_CLOSED = re.compile(r"```[ \t]*(?:[Pp]ython3?|py)?[ \t]*\r?\n(.*?)```", re.DOTALL)
_OPEN = re.compile(r"```[ \t]*(?:[Pp]ython3?|py)?[ \t]*\r?\n(.*)\Z", re.DOTALL)
_DEFINED = re.compile(r"^(?:async )?def\s+(\w+)\s*\(|^class\s+(\w+)", re.MULTILINE)
_CALLED = re.compile(r"\b([A-Za-z_]\w*)\s*\(")
_NOT_THE_SUBJECT = {"assert", "set", "sorted", "round", "abs", "len", "list", "tuple", "isclose", "str", "not", "int"}
# Last line of every program: a program that exits early, whatever its status, has not passed.
_PASSED = "all tests passed 5d41402a"


def humaneval_results(doc: dict, results: list[str]) -> dict[str, int]:
    """`pass@1` of one chat answer to a row of `openai/openai_humaneval`."""
    code = humaneval_program(doc, results[0])
    return {"pass@1": int(passes(f"{code}\n{doc['test']}\ncheck({doc['entry_point']})\n"))}


def mbpp_results(doc: dict, results: list[str]) -> dict[str, int]:
    """`pass@1` of one chat answer to a row of the sanitized MBPP."""
    code = extract_code(results[0], _tested_name(doc["test_list"]))
    tests = "\n".join([*doc["test_imports"], *doc["test_list"]])
    return {"pass@1": int(passes(f"{code}\n{tests}\n"))}


def humaneval_program(doc: dict, answer: str) -> str:
    """The answer's code as a whole module: what stands before the function in the prompt, then the function.

    An answer that holds only the body (with or without a fence) continues the prompt instead.
    """
    code = extract_code(answer, doc["entry_point"])
    if doc["entry_point"] not in defined_names(code):
        return doc["prompt"] + code
    head = re.split(rf"^def {re.escape(doc['entry_point'])}\b", doc["prompt"], flags=re.MULTILINE)[0]
    return f"{head}\n{code}"


def extract_code(answer: str, name: str | None) -> str:
    """The code in a chat answer.

    Args:
        answer: the generated text.
        name: what the code must define, if known.

    Returns:
        The first fenced block that defines `name`, else the first fenced block, else (a cut-off answer) what follows
        an open fence, else the text from the first line that looks like code, else the whole text.
    """
    blocks = _CLOSED.findall(answer)
    wanted = [block for block in blocks if name in defined_names(block)]
    if wanted or blocks:
        rest = _OPEN.search(_CLOSED.sub("", answer))
        if not wanted and rest and name in defined_names(rest.group(1)):
            return rest.group(1)
        return (wanted or blocks)[0]
    rest = _OPEN.search(answer)
    if rest:
        return rest.group(1)
    start = re.search(r"^(?:from |import |def |class |@)", answer, re.MULTILINE)
    return answer[start.start() :] if start else answer


def defined_names(code: str) -> set[str]:
    """Functions and classes that a module text defines at its top level."""
    return {function or cls for function, cls in _DEFINED.findall(code)}


def passes(program: str, time_limit: float = TIME_LIMIT) -> bool:
    """Runs a program in an interpreter of its own, with limits; True if it reaches its end.

    The guard is against accidents (endless loops, memory, stray files), not against malice: run strangers' models in
    a container.
    """
    source = f"{program}\nprint({_PASSED!r})\n"
    with tempfile.TemporaryDirectory(prefix="mrp-eval-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.environ.get("PATH", ""), "HOME": folder, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=_limit if os.name == "posix" else None,
        )
        try:
            output, _ = process.communicate(source.encode("utf-8", "surrogatepass"), timeout=time_limit)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _kill(process)
    return process.returncode == 0 and output.decode("utf-8", "replace").rstrip().endswith(_PASSED)


def _limit() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**26, 2**26))


def _kill(process: subprocess.Popen) -> None:
    """Ends the program and what it started; afterwards nothing of it runs."""
    try:
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except ProcessLookupError:
        pass
    process.wait()


def _tested_name(tests: list[str]) -> str | None:
    """The function that the assertions call."""
    for test in tests:
        for name in _CALLED.findall(test):
            if name not in _NOT_THE_SUBJECT:
                return name
    return None

"""Adds decoding figures to the harness's results: per task, per sample, and where they were measured."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lm_eval import evaluator
from lm_eval.evaluator_utils import get_sample_size

from .figures import FigureBook, Figures, environment, summarize

# What appears in the harness's own table, beside its metrics, under the filter name "decoding".
_IN_TABLE = ("tokens_per_forward", "backbone_forwards", "new_tokens", "tokens_per_second")
_Records = dict[str, dict[int, list[Figures]]]


@contextmanager
def figures_in_results() -> Iterator[None]:
    """Within this context, results of `simple_evaluate` with the model class `mrp` carry decoding figures.

    The harness's command line builds model and tasks inside `simple_evaluate` and offers no hook behind it, so its
    inner function `evaluate` is wrapped; the results then flow through the harness's own table, JSON and samples.
    """
    original = evaluator.evaluate

    @functools.wraps(original)
    def evaluate(lm: Any, task_dict: Any, *args: Any, **kwargs: Any) -> Any:
        check_every_process_has_documents(lm, task_dict, kwargs.get("limit"), kwargs.get("samples"))
        results = original(*args, lm=lm, task_dict=task_dict, **kwargs)
        book = getattr(lm, "figures", None)
        if isinstance(book, FigureBook) and "tasks" in task_dict:
            attach(results, lm, task_dict["tasks"], kwargs.get("samples"))
        return results

    evaluator.evaluate = evaluate
    try:
        yield
    finally:
        evaluator.evaluate = original


def check_every_process_has_documents(lm: Any, task_dict: Any, limit: Any = None, chosen: Any = None) -> None:
    """Refuses tasks with fewer documents than processes: the harness would wait for ever for the idle ones.

    Raises:
        ValueError: on every process, before anything is decoded.
    """
    for name, task in task_dict.get("tasks", {}).items() if lm.world_size > 1 else ():
        there = len(task.eval_docs)
        if chosen is not None and name in chosen:
            there = len(chosen[name])
        elif limit is not None:
            there = min(there, get_sample_size(task, limit))
        if there < lm.world_size:
            raise ValueError(
                f"{name} has {there} document(s) here for {lm.world_size} processes; allowed: at least one for each. "
                "Start fewer processes, or raise --limit."
            )


def attach(results: dict[str, Any] | None, lm: Any, tasks: dict[str, Any], chosen: Any = None) -> None:
    """Collects the figures of all processes and writes them into `results` (of rank 0; `None` elsewhere).

    Adds `results["decoding"]` (`tasks`: sums per task; `environment`), some of the sums to the task's row of the
    harness's table, and `decoding` (a list, one record per request) to every logged sample.

    Args:
        results: what `evaluate` returned.
        lm: the model, possibly inside the harness's cache wrapper.
        tasks: task objects by name, after evaluation.
        chosen: the harness's `samples` argument: document numbers by task.
    """
    own: _Records = {}
    for name, task in tasks.items():
        documents: dict[int, list[Figures]] = {}
        for request in sorted(task.instances, key=lambda request: (request.doc_id, request.idx)):
            documents.setdefault(request.doc_id, []).extend(lm.recorded_figures(request))
        own[name] = documents
    gathered = lm.gather_object(own, dst=0)
    if results is None or gathered is None:
        return
    summaries = {}
    for name in tasks:
        documents = {}
        for part in gathered:
            documents.update(part[name])
        summary = summarize(record for records in documents.values() for record in records)
        summary["documents"] = len(documents)
        summary["documents_without_figures"] = sum(not records for records in documents.values())
        summaries[name] = summary
        row = results["results"].get(name, {})
        row.update({f"{figure},decoding": summary[figure] for figure in _IN_TABLE if figure in summary})
        numbers = chosen[name] if chosen and name in chosen else None
        for sample in (results.get("samples") or {}).get(name, []):
            number = numbers.index(sample["doc_id"]) if numbers else sample["doc_id"]
            sample["decoding"] = documents.get(number, [])
    results["decoding"] = {"tasks": summaries, "environment": environment(lm.model, lm.world_size)}

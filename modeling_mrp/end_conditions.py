"""Where a row ends: as if its tokens had been produced one by one from the left.

End tokens and the length limit are looked for in the revealed prefix of every row. Stop strings and custom criteria
are called on growing prefixes, one token at a time; custom criteria see all rows at the same number of new tokens,
because transformers' protocol may answer once for the whole batch.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

# A stop string may begin in the prompt; the criterion itself looks only at as many tokens as it needs.
_STOP_STRING_CONTEXT = 64


class RowText:
    """What one row has produced, and where it ended.

    Attributes:
        tokens: new tokens revealed from the left without a gap, up to the end.
        limit: new tokens allowed.
        ended: whether nothing further will be added.
    """

    def __init__(self, prompt: list[int], limit: int):
        self.prompt, self.limit = prompt, limit
        self.tokens: list[int] = []
        self.checked = 0
        self.ended = False

    def cut(self, length: int) -> None:
        """Ends the row after `length` new tokens."""
        del self.tokens[length:]
        self.ended = True


class EndConditions:
    """Decides after every forward which rows have ended.

    Args:
        prompts: `[rows, columns]` int64, the prompts as the user gave them (padded).
        rows: one `RowText` per row.
        eos_token_ids: end tokens; the first one ends a row and is returned.
        pad_token_id: stands for a row that has no token where a custom criterion is called.
        stop_strings: transformers' `StopStringCriteria`, called on one row at a time, or `None`.
        criteria: the user's `StoppingCriteria`.
    """

    def __init__(
        self,
        prompts: Tensor,
        rows: list[RowText],
        eos_token_ids: tuple[int, ...],
        pad_token_id: int,
        stop_strings: Any = None,
        criteria: list[Any] | None = None,
    ):
        self.prompts, self.rows = prompts, rows
        self.eos = frozenset(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.stop_strings, self.criteria = stop_strings, list(criteria or [])
        self.frontier = 0  # new tokens up to which the custom criteria have been asked

    def extend(self, index: int, revealed: np.ndarray) -> None:
        """Adds newly revealed tokens `[n]` of a row, in order, up to its end."""
        row = self.rows[index]
        for token in revealed.tolist():
            if row.ended:
                return
            row.tokens.append(token)
            if token in self.eos or len(row.tokens) >= row.limit or self._stops(index):
                row.ended = True

    def ask_criteria(self) -> None:
        """Calls the custom criteria for every length that all running rows have reached."""
        if not self.criteria:
            return
        while True:
            running = [len(row.tokens) for row in self.rows if not row.ended]
            reached = min(running) if running else max((len(row.tokens) for row in self.rows), default=0)
            if self.frontier >= reached:
                return
            self.frontier += 1
            answer = self._answers()
            for row, stop in zip(self.rows, answer, strict=True):
                if stop and len(row.tokens) >= self.frontier:
                    row.cut(self.frontier)

    def _answers(self) -> list[bool]:
        new = torch.full((len(self.rows), self.frontier), self.pad_token_id, dtype=torch.int64)
        for index, row in enumerate(self.rows):
            tokens = row.tokens[: self.frontier]
            new[index, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        ids = torch.cat([self.prompts, new.to(self.prompts.device)], dim=1)
        stop = torch.zeros(len(self.rows), dtype=torch.bool)
        for criterion in self.criteria:
            answer = criterion(ids, None)
            stop |= torch.as_tensor(answer, dtype=torch.bool).cpu().expand(len(self.rows))
        return stop.tolist()

    def _stops(self, index: int) -> bool:
        if self.stop_strings is None:
            return False
        row = self.rows[index]
        ids = torch.tensor([row.prompt[-_STOP_STRING_CONTEXT:] + row.tokens], device=self.prompts.device)
        return bool(torch.as_tensor(self.stop_strings(ids, None)).any())

"""Text up to the first stop string, from pieces."""

from typing import Any


class StopText:
    """Hands text on piece by piece, up to and without the first stop string.

    What might be the beginning of a stop string is held back until it is known not to be one.
    """

    def __init__(self, stops: list[str]):
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self._stopped = False

    def push(self, piece: str) -> str:
        """Takes the next `piece` and returns what can be shown."""
        if self._stopped or not self._stops:
            return "" if self._stopped else piece
        text = self._held + piece
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self._stopped, self._held = True, ""
            return text[: min(found)]
        keep = max(self._open_end(text, stop) for stop in self._stops)
        shown, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return shown

    def rest(self) -> str:
        """What was held back, when no more text comes."""
        rest, self._held = self._held, ""
        return rest

    def cut(self, text: str) -> str:
        """The whole `text` up to the first stop string."""
        return self.push(text) + self.rest()

    @staticmethod
    def _open_end(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if stop.startswith(text[-length:]):
                return length
        return 0


class StoppingQueue:
    """A queue of text pieces and other items (`None` ends it) that ends the text at the first stop string."""

    def __init__(self, queue: Any, stops: list[str]):
        self._queue, self._text = queue, StopText(stops)

    def put_nowait(self, item: Any) -> None:
        """Passes `item` on; of text, what may be shown. Subclasses of `str` are no part of the answer."""
        if type(item) is str:
            item = self._text.push(item)
            if not item:
                return
        elif item is None and (rest := self._text.rest()):
            self._queue.put_nowait(rest)
        self._queue.put_nowait(item)

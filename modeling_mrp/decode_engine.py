"""The decode engine: every mode as one loop of packed forwards and walks over ragged rows.

One round: plan the segments (the certain next state, drafts, the next block's first state beside a finished one), run
one packed backbone forward, walk, commit finished blocks from the very forward that evaluated them, and let the mode
say what is certain next. No forward stores a block, seeds a draft or advances a row that has ended. The device is
asked once a round, for the ids that decide where rows end.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .advance import ADVANCES, KnownState
from .decode_state import Counters, DecodeState, select_segment
from .draft_budget import draft_budget
from .draft_lattice import DraftCalibration, LatticePlanner
from .drafters import Drafter
from .end_conditions import EndConditions
from .generation_config_mrp import DecodingOptions
from .head_runner import HeadRunner
from .packed_attention import prefer_packed_attention
from .packed_cache import PackedCache
from .packed_forward import MASKED, PackedStack, Segments, fill_masked
from .prefill import prefill
from .prefix_handle import PrefixHandle
from .reveal_policies import make_policy
from .token_statistics import BrokenLogitsError, DrawKey, TokenStatistics, token_statistics
from .walk import walk_states


class DecodeEngine:
    """Decodes a batch of prompts under one set of options.

    Args:
        model: an `MRPForCausalLM`.
        options: resolved options.
        prompts: one `[n]` int64 tensor per row, without padding, each of at least one token.
        ends: end conditions, with one `RowText` per row.
        seed: base seed of the sampling noise.
        row_keys: `[rows]` int64, the row part of the noise's key.
        streamer: a transformers streamer (one row only), or `None`.
        caches: `(backbone, head)` stacks of an earlier call that hold `reused` positions of every row, or `None`.
    """

    def __init__(
        self,
        model: Any,
        options: DecodingOptions,
        prompts: list[Tensor],
        ends: EndConditions,
        seed: int,
        row_keys: Tensor,
        streamer: Any = None,
        caches: tuple[PackedStack, HeadRunner | None] | None = None,
        reused: int = 0,
    ):
        self.model, self.options, self.ends, self.seed, self.streamer = model, options, ends, seed, streamer
        self.device = prompts[0].device
        block = options.block_length
        longest = max(len(p) + row.limit for p, row in zip(prompts, ends.rows, strict=True))
        budget = options.draft_states if isinstance(options.draft_states, int) else 8
        capacity = -(-longest // block) * block + (max(budget, options.steps + 2) + 1) * block
        self.policy = make_policy(options)
        needs_head = options.mode in ("direct", "remask", "speculative") and options.drafter == "head"
        prefer_packed_attention(model.config, options.kernels, self.device)
        if caches is None:
            self.stack = PackedStack(model, block, capacity, options.kernels)
            self.runner = HeadRunner(model, options, capacity) if needs_head else None
        else:
            self.stack, self.runner = caches
        advances = ADVANCES[options.mode]
        self.advance = advances(model, options, self.policy, self.runner, seed)
        calibration = DraftCalibration.from_config(model.config.draft_calibration)
        self.planner = LatticePlanner(self.policy, calibration, block, self.device)
        self.drafter = Drafter(model, options, self.policy, self.runner, seed, calibration.head_weights)
        # The step is part of a state's identity only where something reads it.
        self.compare_steps = options.temperature > 0 or self.policy.uniform_count is None
        self.speculative = options.mode == "speculative"
        self.state = DecodeState.start_of(prompts, row_keys, block)
        self.counters = Counters.for_batch(len(prompts), options, longest, self.device)
        self.prompts, self.reused = prompts, reused

    @torch.no_grad()
    def run(self) -> Counters:
        """Decodes until every row has ended; the tokens are in `ends.rows`."""
        self.counters.prefill_forwards = prefill(
            self.model, self.prompts, self.stack, self.runner, self.options.block_length, self.reused
        )
        if self.runner is not None:
            self.runner.passes = 0
        while self.state.rows:
            segments = self._plan()
            hidden, logits, statistics = self._forward(segments)
            self._settle(segments, hidden, logits, statistics)
        return self.counters

    def _plan(self) -> Segments:
        """The segments of the next forward."""
        state = self.state
        trajectories, drafted, budget = None, None, 1
        if self.speculative and state.any_basis:
            budget = self._budget()
            if budget > 1:
                trajectories, drafted = self._draft(budget)
        companion = bool((state.first_host >= 0).all(axis=1).any())
        return self.planner.segments(state.first, state.start, state.step, budget, companion, trajectories, drafted)

    def _budget(self) -> int:
        """Segments worth packing: never more than the rows' masked positions can give states for."""
        options, masked = self.options, int((self.state.first_host < 0).sum(axis=1).max())
        if masked == 0:
            return 1
        if options.draft_shape == "chain":
            return options.steps + 1
        budget = options.draft_states
        if not isinstance(budget, int):
            budget = draft_budget(self.model, self.state.rows, options.block_length, self.runner is not None)
        return min(budget, 2 ** min(masked, 16) + 1)

    def _draft(self, budget: int) -> tuple[Tensor, Tensor]:
        """Trajectories `[rows, trajectories, depth, block]` from the certain states, and which rows have any."""
        state = self.state
        assert state.basis is not None
        depth = min(int((state.first_host < 0).sum(axis=1).max()), budget - 1)
        before = self.drafter.passes
        drafts = self.drafter.predict(state.basis, state.first, state.step, depth)
        self.counters.head_passes[state.index] += self.drafter.passes - before
        make = self.planner.chain if self.options.draft_shape == "chain" else self.planner.lattice
        return make(state.first, state.step, drafts, depth), state.has_basis

    def _forward(self, segments: Segments) -> tuple[Tensor, Tensor, TokenStatistics]:
        """Evaluates the segments: hidden `[rows, segments, block, hidden]`, logits, and their statistics."""
        state = self.state
        rows, count, block = segments.ids.shape
        arguments = self.stack.arguments(segments.visible, state.start, state.longest, state.ragged)
        filled = fill_masked(segments.ids, self.options.mask_token_id).flatten(1)
        positions = self.stack.positions(segments.start)
        hidden = self.model.backbone(filled, positions, **arguments)
        hidden = hidden.view(rows, count, block, -1)
        logits = self.model.lm_head(hidden)
        self.counters.count_forward(state.index, segments.alive)
        positions = positions.view(rows, count, block)
        key = DrawKey(self.seed, state.row_key[:, None, None], positions, segments.step[..., None])
        return hidden, logits, token_statistics(logits, self.options, key, entropy=self.policy.uses_entropy)

    def _settle(self, segments: Segments, hidden: Tensor, logits: Tensor, statistics: TokenStatistics) -> None:
        """Walks, commits, advances, and lets ended rows leave."""
        state = self.state
        choice = statistics.choice
        reveal = self.policy.select(choice, segments.ids == MASKED, segments.step)
        following = torch.where(reveal, choice.token, segments.ids)
        walk = walk_states(segments, following, self.compare_steps)
        if self.speculative:
            self.counters.count_walk(state.index, segments, walk)

        row = torch.arange(state.rows, device=self.device)
        committed = walk.finished >= 0
        at = walk.finished.clamp(min=0)
        finished_ids = segments.ids[row, at]
        last = walk.last
        stopped_finished = committed & (last == walk.finished)
        known = KnownState(
            ids=segments.ids[row, last],
            start=segments.start[row, last],
            step=segments.step[row, last],
            hidden=hidden[row, last],
            logits=logits[row, last],
            statistics=select_segment(statistics, row, last),
            row_key=state.row_key,
            longest=0,  # set once finished blocks are committed
            ragged=False,
        )
        broken = ~torch.isfinite(known.statistics.log_sum_exp).all(dim=1)
        finite = torch.isfinite(statistics.log_sum_exp).all(dim=2) | ~segments.alive
        broken |= ~finite.all(dim=1)
        sync = torch.stack([committed.long(), stopped_finished.long(), broken.long(), at], dim=1).cpu().numpy()
        self._commit(sync, at, finished_ids, hidden[row, at], committed)
        # Rows that stopped at a finished block have moved on; the head must see every row's own prefix.
        known.start, known.longest, known.ragged = state.start, state.longest, state.ragged

        before = self.runner.passes if self.runner is not None else 0
        following_state = self.advance(known)
        if self.runner is not None:
            self.counters.head_passes[state.index] += self.runner.passes - before
        self.counters.count_taken_back(state.index, following_state)
        # A row that stopped at a finished block begins the next one; nothing of it is known yet.
        fresh = stopped_finished
        first = torch.where(fresh[:, None], MASKED, following_state.ids)
        step = torch.where(fresh, 0, known.step + 1)
        self.counters.trace(state, finished_ids, committed, first, following_state.source, fresh)
        state.first, state.step, state.basis, state.has_basis = first, step, known, ~fresh
        state.any_basis = not sync[:, 1].all()
        self._end_rows(*self._to_host(first, finished_ids), sync)

    def _to_host(self, first: Tensor, finished: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Both `[rows, block]` in one copy, with the head's flag; nothing that a broken head chose is handed out."""
        flag = torch.zeros_like(first[:, :1])
        if self.runner is not None and self.runner.broken is not None:
            flag = flag + self.runner.broken
        host = torch.cat([first, finished, flag], dim=1).cpu().numpy()
        if host[0, -1]:
            raise BrokenLogitsError(
                "the MRP head produced NaN or infinite values; allowed: finite numbers. Check the head's weights "
                "(train or load it again), use drafter='zero' or mrp_mode='none', or a wider dtype."
            )
        block = first.shape[1]
        return host[:, :block], host[:, block:-1]

    def _commit(self, sync: np.ndarray, at: Tensor, ids: Tensor, hidden: Tensor, committed: Tensor) -> None:
        """Makes finished blocks part of their rows' prefixes, for backbone and head."""
        state, block = self.state, self.options.block_length
        if sync[:, 2].any():
            raise BrokenLogitsError(
                f"the model produced NaN or infinite logits in row {int(state.index[int(sync[:, 2].argmax())])}; "
                "allowed: finite numbers. Check the weights (backbone and MRP head), and use dtype=torch.bfloat16 or "
                "float32 if float16 overflows."
            )
        if not sync[:, 0].any():
            return
        finished = sync[:, 0].astype(bool)
        rows = torch.from_numpy(np.flatnonzero(finished)).to(self.device)
        scratch = self.stack.cache.scratch
        in_place = (sync[:, 3] == 0) & (state.start_host == scratch)
        if not in_place[sync[:, 0] == 1].all():
            self.stack.cache.commit(scratch + at[rows] * block, state.start[rows], rows, block)
        if self.runner is not None:
            self.runner.remember(committed, finished, ids, hidden, state.start, state.start_host)
        state.add_block(committed, finished)

    def _end_rows(self, first: np.ndarray, finished: np.ndarray, sync: np.ndarray) -> None:
        """Hands newly revealed tokens to the end conditions and drops the rows that have ended."""
        state, block = self.state, self.options.block_length
        state.first_host = first
        for place, index in enumerate(state.index.tolist()):
            row, start = self.ends.rows[index], int(state.start_host[place])
            if sync[place, 0]:
                self.ends.extend(index, finished[place][len(row.prompt) + len(row.tokens) - start + block :])
            if row.ended:
                continue
            rest = first[place][len(row.prompt) + len(row.tokens) - start :]
            masked = np.flatnonzero(rest < 0)
            self.ends.extend(index, rest[: int(masked[0])] if masked.size else rest)
        self.ends.ask_criteria()
        self._stream()
        keep = [place for place, index in enumerate(state.index.tolist()) if not self.ends.rows[index].ended]
        if len(keep) < state.rows:
            self._drop_rows(keep)

    def _drop_rows(self, keep: list[int]) -> None:
        """Moves the surviving rows to the front of the caches; ended rows take no further part."""
        state = self.state
        order = list(range(state.rows))
        caches = self._caches()
        for target, source in enumerate(keep):
            at = order.index(source)
            if at != target:
                for cache in caches:
                    cache.swap(target, at, state.longest)
                order[target], order[at] = order[at], order[target]
                state.places[[target, at]] = state.places[[at, target]]
        state.committed[state.index] = state.start_host
        kept = torch.tensor(order[: len(keep)], device=self.device, dtype=torch.int64)
        if self.runner is not None:
            self.runner.keep_rows(kept, order[: len(keep)])
        state.keep(kept, order[: len(keep)])

    def _stream(self) -> None:
        if self.streamer is None:
            return
        tokens = self.ends.rows[0].tokens
        for token in tokens[self.counters.streamed :]:
            self.streamer.put(torch.tensor([token]))
        self.counters.streamed = len(tokens)
        row = self.ends.rows[0]
        if hasattr(self.streamer, "put_draft") and not row.ended:
            # What stands behind the confirmed text, which the streamer has already.
            confirmed = len(row.prompt) + len(row.tokens) - int(self.state.start_host[0])
            rest = torch.from_numpy(self.state.first_host[0][confirmed:])
            self.streamer.put_draft(fill_masked(rest, self.options.mask_token_id))

    def prefix_handle(self) -> PrefixHandle:
        """The caches of this call, with the tokens that they hold, for a later call that continues it."""
        block, runner = self.options.block_length, self.runner
        caches = self._caches()
        # The head stores a block one call later than the backbone.
        behind = block * (len(caches) - 1)
        tokens = []
        for row, length in zip(self.ends.rows, self.state.committed.tolist(), strict=True):
            tokens.append((row.prompt + row.tokens)[: max(0, length - behind)])
        for cache in caches:
            cache.reorder(torch.from_numpy(np.argsort(self.state.places)).to(self.device))
        return PrefixHandle(self.stack, runner, tokens, block, self.options.context)

    def _caches(self) -> list[PackedCache]:
        head = [] if self.runner is None or self.runner.stack is None else [self.runner.stack.cache]
        return [self.stack.cache, *head]

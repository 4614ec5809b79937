"""The decode engine: every mode as one loop of packed forwards and walks over ragged rows.

One round: plan the segments (the certain next state, drafts, the next block's first state beside a finished one), run
one packed backbone forward, walk, commit finished blocks from the very forward that evaluated them, and let the mode
say what is certain next. No forward stores a block, seeds a draft or advances a row that has ended. The device is
asked once a round, for what was verified; a second time where the mode makes something else of it.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .advance import ADVANCES, KnownState, NextState
from .decode_state import Counters, DecodeState
from .draft_budget import draft_budget
from .draft_lattice import DraftCalibration, LatticePlanner
from .drafters import Drafter
from .end_conditions import EndConditions
from .generation_config_mrp import DecodingOptions
from .head_runner import HeadRunner
from .lattice_states_torch import DraftStatistics
from .packed_attention import prefer_packed_attention
from .packed_cache import PackedCache
from .packed_forward import PackedStack, Segments, fill_masked, select_segment
from .prefill import prefill
from .prefix_handle import PrefixHandle
from .reveal_policies import make_policy
from .reveal_rule import MASKED
from .token_statistics import BrokenLogitsError, DrawKey, TokenStatistics, token_statistics
from .verify_states import verify_states
from .verify_states_torch import HostStates, VerifiedStates, split_host


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
            self.stack = PackedStack(model, block, capacity, options.kernels, model.config.num_hidden_layers)
            self.runner = HeadRunner(model, options, capacity) if needs_head else None
        else:
            self.stack, self.runner = caches
        advance = ADVANCES.get(options.mode)
        self.advance = None if advance is None else advance(model, options, self.policy, self.runner, seed)
        calibration = DraftCalibration.from_config(model.config.draft_calibration)
        chain = options.draft_shape == "chain"
        self.planner = LatticePlanner(self.policy, calibration, block, self.device, chain, options.kernels)
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
        states = (state.first, state.start, state.step, bool((state.first_host >= 0).all(axis=1).any()))
        budget = self._budget() if self.speculative and state.any_basis else 1
        if budget == 1:
            return self.planner.segments(*states)
        depth = min(self._most_masked(), budget - 1)
        return self.planner.segments(*states, budget, self._draft(depth), depth, state.has_basis)

    def _most_masked(self) -> int:
        return int((self.state.first_host < 0).sum(axis=1).max())

    def _budget(self) -> int:
        """Segments worth packing: never more than the rows' masked positions can give states for."""
        options, masked = self.options, self._most_masked()
        if masked == 0:
            return 1
        if options.draft_shape == "chain":
            return options.steps + 1
        budget = options.draft_states
        if not isinstance(budget, int):
            budget = draft_budget(self.model, self.state.rows, options.block_length, self.runner is not None)
        return min(budget, 2 ** min(masked, 16) + 1)

    def _draft(self, depth: int) -> DraftStatistics:
        """Predicted statistics of the next `depth` states."""
        state = self.state
        assert state.basis is not None
        before = self.drafter.passes
        drafts = self.drafter.predict(state.basis, state.first, state.step, depth)
        self.counters.head_passes[state.index] += self.drafter.passes - before
        return drafts

    def _forward(self, segments: Segments) -> tuple[Tensor, Tensor, TokenStatistics]:
        """Evaluates the segments: hidden `[rows, segments, block, hidden]`, logits, and their statistics."""
        state = self.state
        arguments = self.stack.arguments(segments.visible, state.start, state.longest, state.ragged)
        filled = fill_masked(segments.ids, self.options.mask_token_id).flatten(1)
        positions = self.stack.positions(segments.start)
        hidden = self.model.backbone(filled, positions, **arguments).view(*segments.ids.shape, -1)
        logits = self.model.lm_head(hidden)
        self.counters.count_forward(state.index)
        key = DrawKey(
            self.seed, state.row_key[:, None, None], positions.view_as(segments.ids), segments.step[..., None]
        )
        return hidden, logits, token_statistics(logits, self.options, key, entropy=self.policy.uses_entropy)

    def _settle(self, segments: Segments, hidden: Tensor, logits: Tensor, statistics: TokenStatistics) -> None:
        """Walks, commits, advances, and lets ended rows leave."""
        state = self.state
        found = verify_states(
            segments.ids, segments.step, segments.parent, segments.alive, statistics.choice, statistics.log_sum_exp,
            self.policy, compare_steps=self.compare_steps, kernels=self.options.kernels,
        )  # fmt: skip
        host = split_host(self._to_host(found.host), state.block)
        self.counters.count_states(state.index, host)
        self._commit(found, host, hidden)

        known = None if self.options.mode == "none" else self._known(found, hidden, logits)
        following, first_host = self._advance(known, found, host)
        first, fresh = following.ids, host.stopped_finished.astype(bool)
        if fresh.any():
            # A row that stopped at a finished block begins the next one; nothing of it is known yet.
            first = torch.where(found.continues[:, None], first, MASKED)
            first_host = np.where(fresh[:, None], MASKED, first_host)
        self.counters.trace(state, found.finished, found.finished_ids, first, following.source)
        state.first, state.step, state.basis, state.has_basis = first, found.following_step, known, found.continues
        state.any_basis = not fresh.all()
        self._end_rows(first_host, host)

    def _known(self, found: VerifiedStates, hidden: Tensor, logits: Tensor) -> KnownState:
        """The state at which the walk stopped, over the rows' prefixes after the commit."""
        state = self.state
        return KnownState(
            ids=found.ids,
            # Rows that stopped at a finished block have moved on; the head must see every row's own prefix.
            start=state.start,
            step=found.step,
            hidden=select_segment(hidden, state.row, found.last),
            logits=select_segment(logits, state.row, found.last),
            choice=found.choice,
            following=found.following,
            row_key=state.row_key,
            longest=state.longest,
            ragged=state.ragged,
        )

    def _advance(
        self, known: KnownState | None, found: VerifiedStates, host: HostStates
    ) -> tuple[NextState, np.ndarray]:
        """The next certain state, and its ids on the host: the policy's, or what the mode makes of it."""
        if self.advance is None or known is None:
            return NextState(found.following), host.following
        before = self.drafter.passes
        following = self.advance(known)
        self.counters.head_passes[self.state.index] += self.drafter.passes - before
        ids = self._to_host(following.ids).numpy()
        self.counters.count_taken_back(self.state.index, host.following, ids)
        return following, ids

    def _to_host(self, columns: Tensor) -> Tensor:
        """`columns` `[rows, n]` int64 on the CPU, in one copy with the head's flag.

        Nothing that a broken head chose is handed out.
        """
        broken = None if self.runner is None else self.runner.take_broken()
        if broken is None:
            return columns.cpu()
        host = torch.cat([columns, broken.expand(len(columns), 1)], dim=1).cpu()
        if host.numpy()[0, -1]:  # no question to the device, nor an operation
            raise BrokenLogitsError(
                "the MRP head produced NaN or infinite values; allowed: finite numbers. Check the head's weights "
                "(train or load it again), use drafter='zero' or mrp_mode='none', or a wider dtype."
            )
        return host[:, :-1]

    def _commit(self, found: VerifiedStates, host: HostStates, hidden: Tensor) -> None:
        """Makes finished blocks part of their rows' prefixes, for backbone and head."""
        state, block = self.state, self.options.block_length
        if host.broken.any():
            raise BrokenLogitsError(
                f"the model produced NaN or infinite logits in row {int(state.index[int(host.broken.argmax())])}; "
                "allowed: finite numbers. Check the weights (backbone and MRP head), and use dtype=torch.bfloat16 or "
                "float32 if float16 overflows."
            )
        committed_host = host.committed.astype(bool)
        if not committed_host.any():
            return
        committed, at = found.finished >= 0, found.finished.clamp(min=0)
        scratch = self.stack.cache.scratch
        in_place = (host.finished_at == 0) & (state.start_host == scratch)
        if not in_place[committed_host].all():
            rows = torch.from_numpy(np.flatnonzero(committed_host)).to(self.device)
            self.stack.cache.commit(scratch + at[rows] * block, state.start[rows], rows, block)
        if self.runner is not None:
            finished = select_segment(hidden, state.row, at)
            self.runner.remember(
                committed, committed_host, found.finished_ids, finished, state.start, state.start_host
            )
        state.add_block(committed, committed_host)

    def _end_rows(self, first: np.ndarray, host: HostStates) -> None:
        """Hands newly revealed tokens to the end conditions and drops the rows that have ended."""
        state, block = self.state, self.options.block_length
        state.first_host = first
        for place, index in enumerate(state.index.tolist()):
            row, start = self.ends.rows[index], int(state.start_host[place])
            if host.committed[place]:
                self.ends.extend(index, host.finished_ids[place][len(row.prompt) + len(row.tokens) - start + block :])
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

"""Executables in NumPy that keep the contract of `Role` and check that the runtime keeps it too.

The fake target folds each token into a number that depends on the whole prefix, stores it in its
cache row as a key/value cache would, and chooses the next token by hashing it: a wrong length, a
stale row or a wrong token changes everything that follows. Its features carry position, token and
that number, so the fake draft can tell whether it gets the features of each committed position
once, in order, and never those of a rejected row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from edgecc.backends.base import Array, Executable, GreedyRound, Role
from edgecc.backends.runtime import DraftInfo, ModelInfo, Session
from edgecc.backends.runtime.proposer import PROPOSERS, Proposer

MODULUS = 1_000_003  # below 2**24: exact in float32

Chooser = Callable[[int, int], int]
"""`choose(state, position)`: the token that follows a prefix, which ends at `position`."""


def fold(state: int, token: int) -> int:
    """The state of a prefix with one more token."""
    return (state * 7919 + token * 104_729 + 12_345) % MODULUS


def by_hash(num_tokens: int) -> Chooser:
    """A token that depends on all of the prefix."""
    return lambda state, position: state * 48_271 // 7 % num_tokens


def confidence_after(state: int) -> float:
    """What the fake draft says about the proposal after a prefix, before the sigmoid."""
    return state % 101 / 10 - 5


def by_script(prompt_length: int, script: Sequence[int], then: int = 0) -> Chooser:
    """The tokens of a script after a prompt, whatever they are; then always the same one."""

    def choose(state: int, position: int) -> int:
        place = position + 1 - prompt_length
        return script[place] if 0 <= place < len(script) else then

    return choose


def random_logits(num_tokens: int, spread: float = 1.5) -> Callable[[int], Array]:
    """Logits f32 `[num_tokens]` that depend on all of the prefix."""

    @cache
    def logits(state: int) -> Array:
        rng = np.random.default_rng([state, num_tokens])
        return rng.normal(0, spread, num_tokens).astype(np.float32)

    return logits


def by_logits(logits: Callable[[int], Array]) -> Chooser:
    """The best token of rows that follow from the state."""
    return lambda state, position: int(logits(state).argmax())


def continue_greedily(prompt: Sequence[int], count: int, choose: Chooser) -> list[int]:
    """What greedy decoding must produce, without caches, chunks or drafts."""
    state = 0
    for token in prompt:
        state = fold(state, token)
    made: list[int] = []
    for position in range(len(prompt) - 1, len(prompt) - 1 + count):
        made.append(choose(state, position))
        state = fold(state, made[-1])
    return made


@dataclass
class Outputs:
    """Arrays handed out. The contract lets the next call reuse them, so here it always does."""

    arrays: list[Array] = field(default_factory=list)

    def spoil(self) -> None:
        for array in self.arrays:
            array[...] = -1 if array.dtype.kind == "i" else np.nan
        self.arrays.clear()

    def hand_out(self, wanted: Sequence[Role], made: Mapping[Role, Array]) -> dict[Role, Array]:
        results = {role: made[role].copy() for role in wanted}
        self.arrays += results.values()
        return results


@dataclass
class RecurrentState:
    """What a target without a cache knows: a state that cannot go back, and a log of open rows."""

    log_rows: int
    state: int = 0
    rows: int = 0
    log: list[int] = field(default_factory=list)
    replayed: int = 0

    def call(self, start: int, ids: Sequence[int], replay: int, commit: int) -> int:
        """One call; the state that its first row starts from."""
        if start == 0:
            self.state = self.rows = 0
        assert 0 <= replay <= len(self.log), "rows that were not logged are replayed"
        for token in self.log[:replay]:
            self.state = fold(self.state, token)
        self.rows += replay
        self.replayed += replay
        assert self.rows == start, "accepted rows are missing from the state, or rejected in it"
        before = self.state
        assert 0 <= commit <= len(ids), "rows that are not there are committed"
        if not commit:
            assert len(ids) <= self.log_rows, "open rows that the log does not hold"
        for token in ids[:commit]:
            self.state = fold(self.state, token)
        self.rows += commit
        self.log = [] if commit else list(ids)
        return before


@dataclass
class FakeTarget:
    choose: Chooser
    vocab_size: int
    num_tokens: int
    capacity: int
    max_rows: int
    outputs: Outputs
    tokens: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    calls: list[tuple[int, int, tuple[Role, ...]]] = field(default_factory=list)
    log_rows: int = 0
    recurrent: RecurrentState | None = None
    logits: Callable[[int], Array] | None = None  # of the tokens, by the state of a prefix
    slots: int = 1
    batch_size: int = 1

    def __post_init__(self) -> None:
        self.recurrent = RecurrentState(self.log_rows) if self.log_rows else None

    def run(
        self, inputs: Mapping[Role, Array], outputs: Sequence[Role], *, slot: int = 0
    ) -> dict[Role, Array]:
        assert slot == 0
        counts = {Role.REPLAY_LENGTH, Role.COMMIT_LENGTH} if self.log_rows else set()
        assert set(inputs) == {Role.TOKEN_IDS, Role.CACHE_LENGTH, Role.LOGIT_ROWS} | counts
        assert all(array.dtype == np.int64 for array in inputs.values())
        (ids,) = inputs[Role.TOKEN_IDS].tolist()
        (start,) = inputs[Role.CACHE_LENGTH].tolist()
        rows = inputs[Role.LOGIT_ROWS].tolist()
        assert 1 <= len(ids) <= self.max_rows
        assert 0 <= start <= len(self.tokens), "rows that were never written are counted as valid"
        assert start + len(ids) <= self.capacity
        assert rows
        assert all(0 <= row < len(ids) for row in rows)
        assert all(0 <= token < self.vocab_size for token in ids), "a gather out of range"
        self.outputs.spoil()
        self.calls.append((start, len(ids), tuple(outputs)))
        state = self.states[start - 1] if start else 0
        if self.recurrent is not None:
            (replay,), (commit,) = (inputs[role].tolist() for role in sorted(counts)[::-1])
            assert self.recurrent.call(start, ids, replay, commit) == state
        for place, token in enumerate(ids, start):
            state = fold(state, token)
            self.tokens[place : place + 1] = [token]
            self.states[place : place + 1] = [state]
        made: dict[Role, Array] = {}
        if Role.LOGITS in outputs:
            made[Role.LOGITS] = np.stack([self._logits(start + row) for row in rows])[None]
        if Role.HIDDEN_TAP in outputs:
            span = range(start, start + len(ids))
            tap = [(place, self.tokens[place], self.states[place]) for place in span]
            made[Role.HIDDEN_TAP] = np.array([tap], dtype=np.float32)
        return self.outputs.hand_out(outputs, made)

    def _logits(self, place: int) -> Array:
        """The chosen token first among equals, and padding rows that would win."""
        state = self.states[place]
        if self.logits is not None:
            padding = np.full(self.vocab_size - self.num_tokens, 50.0, dtype=np.float32)
            return np.concatenate([self.logits(state), padding])
        token = self.choose(state, place)
        row = np.full(self.vocab_size, -2.0, dtype=np.float32)
        row[token] = 3.0
        if state % 3 == 0:
            row[token : self.num_tokens] = 3.0
        row[self.num_tokens :] = 9.0
        return row


@dataclass
class FakeDraft:
    """Proposes what the target will choose, up to an error that the plan puts into each block."""

    choose: Chooser
    plan: Sequence[int]  # right proposals in each block, repeated
    proposals: int
    num_tokens: int
    capacity: int
    max_position: int
    max_features: int
    outputs: Outputs
    truth: Sequence[int] | None = None  # all tokens that will be committed, when known
    junk: bool = False  # propose ids without a token after the error
    recorded: Sequence[Sequence[int]] = ()  # proposals of each block, instead of a plan
    log_rows: int = 0
    chain: bool = False  # wants the token after each row of features
    expected: int | None = None  # the token of the next row, once a call has told it
    slots: int = 1
    batch_size: int = 1
    tokens: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    blocks: int = 0
    calls: list[tuple[int, int, tuple[Role, ...]]] = field(default_factory=list)

    def run(
        self, inputs: Mapping[Role, Array], outputs: Sequence[Role], *, slot: int = 0
    ) -> dict[Role, Array]:
        assert slot == 0
        role = Role.NEXT_TOKEN_IDS if self.chain else Role.ANCHOR
        assert set(inputs) == {Role.FEATURES, role, Role.CACHE_LENGTH}
        features = inputs[Role.FEATURES]
        assert features.dtype == np.float32
        assert features.ndim == 3
        assert features.flags.c_contiguous
        assert inputs[role].dtype == inputs[Role.CACHE_LENGTH].dtype == np.int64
        (length,) = inputs[Role.CACHE_LENGTH].tolist()
        rows = features[0].tolist()
        assert 1 <= len(rows) <= self.max_features
        assert length <= len(self.tokens), "features are missing"
        assert length + len(rows) + self.proposals <= self.capacity, "no rows for the block"
        self.outputs.spoil()
        self.calls.append((length, len(rows), tuple(outputs)))
        following = inputs[role][0].tolist() if self.chain else inputs[role].tolist()
        anchor = following[-1]
        own = [int(token) for _, token, _ in rows]
        if length:
            again = self.tokens[length:]
            assert len(own) > len(again), "features come twice, and none is new"
            assert own[: len(again)] == again, "features that come twice are not the same"
        if self.chain:
            assert following[:-1] == own[1:], "a feature with a token that is not the next one"
            first = own[len(self.tokens) - length] if length else None
            assert first in (None, self.expected), "not the token that was said to follow"
            self.expected = anchor
        del self.tokens[length:], self.states[length:]
        for position, token, state in rows:
            before = self.states[-1] if self.states else 0
            assert position == len(self.tokens), "a feature of another position"
            assert state == fold(before, int(token)), "a feature that does not follow the last one"
            self.tokens.append(int(token))
            self.states.append(int(state))
        if self.truth is not None:
            known = [*self.tokens, anchor]
            assert known == list(self.truth[: len(known)]), "not what was committed"
        return self.outputs.hand_out(outputs, self._block(anchor) if outputs else {})

    def _block(self, anchor: int) -> dict[Role, Array]:
        start = len(self.tokens)
        assert start + self.proposals <= self.max_position, "a slot past the draft's last position"
        right = self.plan[self.blocks % len(self.plan)]
        self.blocks += 1
        if self.recorded:
            return {Role.PROPOSALS: np.array([self.recorded[self.blocks - 1]], dtype=np.int64)}
        state = fold(self.states[-1], anchor)
        made: list[int] = []
        confidence: list[float] = []
        for slot in range(self.proposals):
            confidence.append(confidence_after(state))
            token = self.choose(state, start + slot)
            if slot == right:
                wrong = (token + 1) % self.num_tokens
                token = (self.num_tokens, -1)[self.blocks % 2] if self.junk else wrong
            elif slot > right and self.junk:
                token = self.num_tokens
            made.append(token)
            state = fold(state, token)
        return {
            Role.PROPOSALS: np.array([made], dtype=np.int64),
            Role.CONFIDENCE: np.array([confidence], dtype=np.float32),
        }


@dataclass
class FakeTokenDraft:
    """A language model that proposes token by token, like `FakeDraft` by its plan.

    A call begins a round unless it goes on with the proposal of the call before.
    """

    choose: Chooser
    plan: Sequence[int]
    proposals: int
    num_tokens: int
    capacity: int
    max_position: int
    max_rows: int
    outputs: Outputs
    truth: Sequence[int] | None = None
    junk: bool = False
    log_rows: int = 0
    slots: int = 1
    batch_size: int = 1
    tokens: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    rounds: int = 0
    made: list[int] = field(default_factory=list)  # by the round so far
    calls: list[tuple[int, int, tuple[Role, ...]]] = field(default_factory=list)

    def run(
        self, inputs: Mapping[Role, Array], outputs: Sequence[Role], *, slot: int = 0
    ) -> dict[Role, Array]:
        assert slot == 0
        assert set(inputs) == {Role.TOKEN_IDS, Role.CACHE_LENGTH, Role.LOGIT_ROWS}
        assert all(array.dtype == np.int64 for array in inputs.values())
        (ids,) = inputs[Role.TOKEN_IDS].tolist()
        (length,) = inputs[Role.CACHE_LENGTH].tolist()
        rows = inputs[Role.LOGIT_ROWS].tolist()
        assert rows
        assert all(0 <= row < len(ids) for row in rows)
        assert 1 <= len(ids) <= self.max_rows
        assert 0 <= length <= len(self.tokens), "rows that were never written are counted as valid"
        assert length + len(ids) <= self.capacity
        goes_on = length == len(self.tokens) and ids == self.made[-1:]
        self.outputs.spoil()
        self.calls.append((length, len(ids), tuple(outputs)))
        del self.tokens[length:], self.states[length:]
        for token in ids:
            self.tokens.append(token)
            self.states.append(fold(self.states[-1] if self.states else 0, token))
        if not goes_on:
            self.made = []
            if self.truth is not None:
                known = list(self.truth[: len(self.tokens)])
                assert self.tokens == known, "not what was committed"
        if not outputs:
            return {}
        assert rows == list(range(len(ids)))
        found = np.zeros((1, len(ids)), dtype=np.int64)
        found[0, -1] = self._next()
        return self.outputs.hand_out(outputs, {Role.PROPOSALS: found})

    def _next(self) -> int:
        place = len(self.tokens) - 1
        if not self.made:
            assert place + self.proposals <= self.max_position, "past the draft's last position"
            self.rounds += 1
        right = self.plan[(self.rounds - 1) % len(self.plan)]
        token = self.choose(self.states[-1], place)
        if len(self.made) == right:
            wrong = (token + 1) % self.num_tokens
            token = (self.num_tokens, -1)[self.rounds % 2] if self.junk else wrong
        elif len(self.made) > right and self.junk:
            token = self.num_tokens
        self.made.append(token)
        return token


class Slots:
    """Several fakes of one kind as one executable: a call is taken apart, each slot gets its part.

    What a slot without a call of its own is given is left to chance, so it is checked by what the
    fakes find in their rows later.
    """

    def __init__(self, fakes: Sequence[FakeTarget | FakeDraft], batch_size: int) -> None:
        self.fakes = fakes
        self.slots, self.batch_size = len(fakes), batch_size
        self.capacity, self.log_rows = fakes[0].capacity, fakes[0].log_rows
        self.outputs = Outputs()
        self.sizes: list[int] = []
        self.used: set[int] = set()

    def run(
        self, inputs: Mapping[Role, Array], outputs: Sequence[Role], *, slot: int = 0
    ) -> dict[Role, Array]:
        count = len(inputs[Role.CACHE_LENGTH])
        assert 1 <= count <= self.batch_size
        assert 0 <= slot <= self.slots - count
        self.outputs.spoil()
        self.sizes.append(count)
        self.used |= set(range(slot, slot + count))
        parts = []
        for index in range(count):
            own = {
                role: array if role is Role.LOGIT_ROWS else array[index : index + 1]
                for role, array in inputs.items()
            }
            fake = self.fakes[slot + index]
            idle = Role.FEATURES in own and not own[Role.FEATURES].any()
            if idle:
                (length,) = own[Role.CACHE_LENGTH].tolist()
                assert length <= len(fake.tokens)
                rows = own[Role.FEATURES].shape[1] + fake.proposals
                assert length + rows <= fake.capacity, "no room for rows that nobody reads"
                del fake.tokens[length:], fake.states[length:]  # garbage from here on
                made = {
                    Role.PROPOSALS: np.zeros((1, fake.proposals), np.int64),
                    Role.CONFIDENCE: np.full((1, fake.proposals), np.nan, np.float32),
                }
            else:
                made = fake.run(own, outputs)
            parts.append({role: array.copy() for role, array in made.items()})
        made = {role: np.concatenate([part[role] for part in parts]) for role in outputs}
        return self.outputs.hand_out(outputs, made)


class ExecutableRounds:
    """Greedy rounds over any two executables: every round verifies all of the block.

    As on a device, the draft reads the rows that the target's last call left, and calls are padded
    to the rows of a round. `target` is watched to know which rows those are.
    """

    def __init__(
        self,
        target: Executable,
        draft: Executable | None,
        proposals: int,
        num_tokens: int,
        proposer: Proposer = PROPOSERS["dspark"],
        confidence: bool = False,
    ) -> None:
        self.target, self.draft, self.proposer = target, draft, proposer
        self.confidence = confidence
        self.proposals, self.num_tokens = proposals, num_tokens
        self.taps: Array | None = None
        self.ran: list[int] = []

    def run(
        self, following: Array, start: int, features: int, draft_length: int, replay: int = 0
    ) -> GreedyRound:
        assert following.dtype == np.int64
        assert following.shape == (max(features, 1),)
        self.ran.append(features)
        anchor = following[-1]
        made, scores = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        if features:
            assert self.draft is not None
            made, scores = self._draft(following, features, draft_length)
        rest = np.zeros(self.proposals - len(made), dtype=np.int64)
        valid = np.clip(made, 0, self.num_tokens - 1)
        ids = np.concatenate([[anchor], valid, rest])
        if self.target.log_rows and not features:
            ids = ids[:1]  # the engine pads: of a target with states, only final rows are told
        tapped = features and self.proposer.reads_states
        outputs = (Role.LOGITS, *((Role.HIDDEN_TAP,) if tapped else ()))
        inputs = {
            Role.TOKEN_IDS: ids[None],
            Role.CACHE_LENGTH: np.array([start]),
            Role.LOGIT_ROWS: np.arange(len(ids)),
        }
        if self.target.log_rows:
            inputs[Role.REPLAY_LENGTH] = np.array([replay])
            inputs[Role.COMMIT_LENGTH] = np.array([0 if features else 1])
        else:
            assert not replay, "there is nothing to replay"
        results = self.target.run(inputs, outputs)
        chosen = results[Role.LOGITS][0, :, : self.num_tokens].argmax(axis=-1)
        return GreedyRound(made, chosen, scores)

    def _draft(self, following: Array, features: int, length: int) -> tuple[Array, Array]:
        """All proposals of the draft, and how sure it is of them."""
        assert self.draft is not None
        if self.proposer.reads_states:
            asked = (Role.PROPOSALS, *((Role.CONFIDENCE,) if self.confidence else ()))
            found = self.draft.run(
                {
                    Role.FEATURES: self.features(features),
                    self.proposer.role: self.proposer.tokens(following.tolist()),
                    Role.CACHE_LENGTH: np.array([length]),
                },
                asked,
            )
            none = np.empty(0, dtype=np.float32)
            scores = found[Role.CONFIDENCE][0].copy() if self.confidence else none
            return found[Role.PROPOSALS][0].copy(), scores
        assert features <= 2, "more new tokens than the anchor and a last proposal"
        made: list[int] = []
        tokens = following.tolist()
        if isinstance(self.draft, FakeTokenDraft):
            self.draft.made = []  # the last proposal was read: an anchor like it begins a round
        while len(made) < self.proposals:
            found = self.draft.run(
                {
                    self.proposer.role: self.proposer.tokens(tokens),
                    Role.CACHE_LENGTH: np.array([length]),
                    Role.LOGIT_ROWS: np.arange(len(tokens)),
                },
                (Role.PROPOSALS,),
            )
            length += len(tokens)
            tokens = found[Role.PROPOSALS][0, -1:].tolist()
            made += tokens
        return np.array(made, dtype=np.int64), np.empty(0, dtype=np.float32)

    def features(self, rows: int) -> Array:
        assert self.taps is not None
        return self.taps[:, :rows].copy()


class Watched:
    """A target whose taps rounds can read after each call, with room for padding."""

    def __init__(self, target: Executable, rounds: ExecutableRounds, padding: int) -> None:
        self.inner, self.rounds = target, rounds
        self.capacity = target.capacity - padding
        self.log_rows = target.log_rows
        rounds.target = self

    def run(self, inputs: Mapping[Role, Array], outputs: Sequence[Role]) -> dict[Role, Array]:
        results = self.inner.run(inputs, outputs)
        taps = results.get(Role.HIDDEN_TAP)
        self.rounds.taps = None if taps is None else taps.copy()
        return results


class FakeEngine:
    """A target, and perhaps a draft, as an engine."""

    def __init__(self, target: FakeTarget, draft: FakeDraft | FakeTokenDraft | None) -> None:
        self.target, self.draft = target, draft
        self.closed = 0

    def entry(self, name: str) -> FakeTarget | FakeDraft | FakeTokenDraft:
        found = {"target": self.target, "draft": self.draft}[name]
        assert found is not None
        return found

    def close(self) -> None:
        self.closed += 1


@dataclass
class Pair:
    """A fake pair with what the runtime needs around it."""

    engine: FakeEngine
    model: ModelInfo
    session: Session

    @property
    def target(self) -> FakeTarget:
        return self.engine.target

    @property
    def draft(self) -> FakeDraft | FakeTokenDraft:
        assert self.engine.draft is not None
        return self.engine.draft


def make_pair(
    *,
    choose: Chooser | None = None,
    vocab_size: int = 40,
    num_tokens: int = 37,
    capacity: int = 64,
    max_model_len: int | None = None,
    max_input_len: int | None = None,
    prefill_chunk: int = 8,
    eos_token_ids: Sequence[int] = (),
    plan: Sequence[int] | None = (7,),
    proposals: int = 7,
    draft_positions: int = 10_000,
    draft_capacity: int | None = None,
    truth: Sequence[int] | None = None,
    junk: bool = False,
    log_rows: int = 0,
    method: str = "dspark",
    logits: Callable[[int], Array] | None = None,
    confidence: bool = False,
) -> Pair:
    """A fake pair; `plan=None` leaves the draft out, ``logits` replace `choose`."""
    if logits is not None:
        choose = by_logits(logits)
    choose = choose if choose is not None else by_hash(num_tokens)
    outputs = Outputs()
    target = FakeTarget(
        choose,
        vocab_size,
        num_tokens,
        capacity,
        prefill_chunk,
        outputs,
        log_rows=log_rows,
        logits=logits,
    )
    draft: FakeDraft | FakeTokenDraft | None = None
    info = None
    if plan is not None:
        info = DraftInfo(proposals, proposals, draft_positions, method, confidence)
        common = (
            choose,
            plan,
            proposals,
            num_tokens,
            capacity + proposals if draft_capacity is None else draft_capacity,
            draft_positions,
            max(prefill_chunk, proposals + 1),
            outputs,
            truth,
            junk,
        )
        if PROPOSERS[method].reads_states:
            is_chain = PROPOSERS[method].role is Role.NEXT_TOKEN_IDS
            draft = FakeDraft(*common, chain=is_chain)
        else:
            draft = FakeTokenDraft(*common)
    length = capacity if max_model_len is None else max_model_len
    model = ModelInfo(
        vocab_size=vocab_size,
        num_tokens=num_tokens,
        eos_token_ids=frozenset(eos_token_ids),
        max_model_len=length,
        max_input_len=length if max_input_len is None else max_input_len,
        prefill_chunk=prefill_chunk,
        draft=info,
    )
    session = Session(target, draft, prefill_chunk=prefill_chunk, proposer=PROPOSERS[method])
    return Pair(FakeEngine(target, draft), model, session)


def on_device(pair: Pair) -> tuple[Pair, ExecutableRounds]:
    """The same pair with rounds on the device."""
    info = pair.model.draft
    proposals = info.num_speculative_tokens if info else 0
    target, draft = pair.engine.target, pair.engine.draft
    proposer = PROPOSERS[info.method if info else "dspark"]
    tells = info is not None and info.tells_confidence
    rounds = ExecutableRounds(target, draft, proposals, pair.model.num_tokens, proposer, tells)
    watched = Watched(target, rounds, proposals)
    chunk = pair.model.prefill_chunk
    session = Session(watched, draft, prefill_chunk=chunk, rounds=rounds, proposer=proposer)
    return Pair(pair.engine, pair.model, session), rounds

"""Roles of graph inputs and outputs: the contract between the IR and the runtime.

Standard library only: the compiler and the runtime both use it.
"""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a graph input or output means to the runtime.

    Shapes use `b` sequences, `t` new tokens, `r` selected rows, `V` vocabulary rows, `N` proposals,
    `n` tapped layers, `H` hidden size, `c` committed tokens whose features are new to the draft.

    Inputs of the target: TOKEN_IDS i64 `[b, t]`, CACHE_LENGTH i64 `[b]` (valid rows in the caches
    before the call; rows beyond are garbage and get overwritten), LOGIT_ROWS i64 `[r]` (which of
    the t rows need logits), KV_CACHE.
    Outputs of the target: LOGITS f32 `[b, r, V]`, HIDDEN_TAP f32 `[b, t, n*H]`, KV_CACHE, and where
    the device chooses CHOSEN_TOKENS i64 `[b, r]` (the best token of each row of logits).
    Targets with recurrent layers also have STATE inputs `[b, ...]` and outputs that alias them: all
    rows before the call, summed up. A state is zero where CACHE_LENGTH is zero, and its output is
    the state after the last of the t rows; unlike a cache it cannot be cut back to fewer rows.
    After `add-state-replay` they also have a STATE_LOG input `[b, R, w]` for each recurrent layer,
    with an output that aliases it, and REPLAY_LENGTH and COMMIT_LENGTH i64 `[b]`. Rows whose fate
    is not known yet go to the log only: a call first replays the REPLAY_LENGTH leading rows of the
    log, which have been accepted since, then computes its own rows. The states it leaves are those
    after COMMIT_LENGTH of these: 0 leaves them where the replay ended, and the first R rows go to
    the log. Unless it is 0, rows from COMMIT_LENGTH on are padding, and have no valid outputs.
    Inputs of a block draft: FEATURES f32 `[b, c, n*H]` (tap rows of committed tokens that the draft
    has not seen), ANCHOR i64 `[b]` (newest committed token), CACHE_LENGTH i64 `[b]`, KV_CACHE.
    Outputs of a block draft: PROPOSALS i64 `[b, N]`, optionally BASE_LOGITS (before the Markov
    bias) and DRAFT_LOGITS f32 `[b, N, V]`, CONFIDENCE f32 `[b, N]` (before the sigmoid), KV_CACHE.
    Inputs of an EAGLE3 draft: FEATURES as above, NEXT_TOKEN_IDS i64 `[b, c]` (for each of them the
    committed token after it, so that the last is the newest one), CACHE_LENGTH i64 `[b]`, KV_CACHE.
    Outputs of an EAGLE3 draft: PROPOSALS i64 `[b, N]` (ids of the target), optionally DRAFT_LOGITS
    f32 `[b, N, Vd]` (over the draft's own vocabulary), KV_CACHE.
    Inputs of a draft that is a language model of its own: TOKEN_IDS i64 `[b, c]`, CACHE_LENGTH,
    LOGIT_ROWS i64 `[r]`, KV_CACHE, all as of a target. Outputs: PROPOSALS i64 `[b, r]` (the best
    token after each of these rows), optionally DRAFT_LOGITS f32 `[b, r, V]`, KV_CACHE.
    Targets that read images also have the inputs POSITIONS i64 `[3, b, t]` (time, row and column of
    each token, three times its number in text), IMAGE_FEATURES f32 `[1, n, H]` and IMAGE_ROWS i64
    `[b, t]` (for each token the row of IMAGE_FEATURES that takes the place of its embedding, or
    -1).
    Inputs of a vision tower, for one image that becomes m tokens of four patches: PIXEL_VALUES f32
    `[1, 4*m, P]`, POSITIONS i64 `[2, 1, 4*m]` (row and column of each patch), INTERPOLATION_IDS i64
    and INTERPOLATION_WEIGHTS f32 `[1, 4*m, 4]` (which learned position embeddings are added up).
    Output of a vision tower: IMAGE_FEATURES f32 `[1, m, H]`.
    """

    TOKEN_IDS = "token_ids"
    CACHE_LENGTH = "cache_length"
    LOGIT_ROWS = "logit_rows"
    KV_CACHE = "kv_cache"
    STATE = "state"
    STATE_LOG = "state_log"
    REPLAY_LENGTH = "replay_length"
    COMMIT_LENGTH = "commit_length"
    LOGITS = "logits"
    CHOSEN_TOKENS = "chosen_tokens"
    HIDDEN = "hidden"
    HIDDEN_TAP = "hidden_tap"
    FEATURES = "features"
    ANCHOR = "anchor"
    NEXT_TOKEN_IDS = "next_token_ids"
    PROPOSALS = "proposals"
    BASE_LOGITS = "base_logits"
    DRAFT_LOGITS = "draft_logits"
    CONFIDENCE = "confidence"
    POSITIONS = "positions"
    PIXEL_VALUES = "pixel_values"
    INTERPOLATION_IDS = "interpolation_ids"
    INTERPOLATION_WEIGHTS = "interpolation_weights"
    IMAGE_FEATURES = "image_features"
    IMAGE_ROWS = "image_rows"
    ACTIVATION = "activation"


ADDED = frozenset({Role.CHOSEN_TOKENS})
"""Roles of outputs that a pass may add to a graph: their values follow from other outputs."""

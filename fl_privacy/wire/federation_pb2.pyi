from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Chunk(_message.Message):
    __slots__ = ("vector", "round", "release", "data", "share")
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    vector: VectorHeader
    round: RoundHeader
    release: ReleaseHeader
    data: bytes
    share: ShareHeader
    def __init__(self, vector: _Optional[_Union[VectorHeader, _Mapping]] = ..., round: _Optional[_Union[RoundHeader, _Mapping]] = ..., release: _Optional[_Union[ReleaseHeader, _Mapping]] = ..., data: _Optional[bytes] = ..., share: _Optional[_Union[ShareHeader, _Mapping]] = ...) -> None: ...

class VectorHeader(_message.Message):
    __slots__ = ("run", "round", "attempt", "layout", "dtype", "length", "tier", "digest", "floor", "counts", "ledger", "records", "root", "signature", "path", "head", "statement")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    attempt: str
    layout: str
    dtype: str
    length: int
    tier: str
    digest: bytes
    floor: int
    counts: bytes
    ledger: bytes
    records: int
    root: bytes
    signature: bytes
    path: _containers.RepeatedScalarFieldContainer[bytes]
    head: bytes
    statement: bytes
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[str] = ..., layout: _Optional[str] = ..., dtype: _Optional[str] = ..., length: _Optional[int] = ..., tier: _Optional[str] = ..., digest: _Optional[bytes] = ..., floor: _Optional[int] = ..., counts: _Optional[bytes] = ..., ledger: _Optional[bytes] = ..., records: _Optional[int] = ..., root: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., path: _Optional[_Iterable[bytes]] = ..., head: _Optional[bytes] = ..., statement: _Optional[bytes] = ...) -> None: ...

class RoundHeader(_message.Message):
    __slots__ = ("run", "round", "attempt", "cohort", "quorum", "deadline", "layout", "length", "seed", "model", "finished", "layers", "sites", "parameters", "counts", "farewell", "best", "nonce", "number", "federation", "roster", "root", "organisations", "recipient", "shards", "salt", "index", "path", "signature", "key", "void", "journal", "witness", "held", "digest", "duty", "members", "senders", "sealed", "hop", "last", "last_key", "last_signature")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    COHORT_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    ORGANISATIONS_FIELD_NUMBER: _ClassVar[int]
    RECIPIENT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VOID_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    WITNESS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DUTY_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    LAST_KEY_FIELD_NUMBER: _ClassVar[int]
    LAST_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    attempt: str
    cohort: int
    quorum: int
    deadline: float
    layout: str
    length: int
    seed: int
    model: bytes
    finished: bool
    layers: _containers.RepeatedScalarFieldContainer[int]
    sites: _containers.RepeatedScalarFieldContainer[str]
    parameters: int
    counts: int
    farewell: int
    best: int
    nonce: bytes
    number: int
    federation: str
    roster: str
    root: bytes
    organisations: int
    recipient: str
    shards: _containers.RepeatedScalarFieldContainer[bytes]
    salt: bytes
    index: int
    path: _containers.RepeatedScalarFieldContainer[bytes]
    signature: bytes
    key: bytes
    void: _containers.RepeatedCompositeFieldContainer[Statement]
    journal: str
    witness: _containers.RepeatedScalarFieldContainer[bytes]
    held: bytes
    digest: bytes
    duty: str
    members: bytes
    senders: bytes
    sealed: _containers.RepeatedCompositeFieldContainer[SealedShard]
    hop: bytes
    last: bytes
    last_key: bytes
    last_signature: bytes
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[str] = ..., cohort: _Optional[int] = ..., quorum: _Optional[int] = ..., deadline: _Optional[float] = ..., layout: _Optional[str] = ..., length: _Optional[int] = ..., seed: _Optional[int] = ..., model: _Optional[bytes] = ..., finished: _Optional[bool] = ..., layers: _Optional[_Iterable[int]] = ..., sites: _Optional[_Iterable[str]] = ..., parameters: _Optional[int] = ..., counts: _Optional[int] = ..., farewell: _Optional[int] = ..., best: _Optional[int] = ..., nonce: _Optional[bytes] = ..., number: _Optional[int] = ..., federation: _Optional[str] = ..., roster: _Optional[str] = ..., root: _Optional[bytes] = ..., organisations: _Optional[int] = ..., recipient: _Optional[str] = ..., shards: _Optional[_Iterable[bytes]] = ..., salt: _Optional[bytes] = ..., index: _Optional[int] = ..., path: _Optional[_Iterable[bytes]] = ..., signature: _Optional[bytes] = ..., key: _Optional[bytes] = ..., void: _Optional[_Iterable[_Union[Statement, _Mapping]]] = ..., journal: _Optional[str] = ..., witness: _Optional[_Iterable[bytes]] = ..., held: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., duty: _Optional[str] = ..., members: _Optional[bytes] = ..., senders: _Optional[bytes] = ..., sealed: _Optional[_Iterable[_Union[SealedShard, _Mapping]]] = ..., hop: _Optional[bytes] = ..., last: _Optional[bytes] = ..., last_key: _Optional[bytes] = ..., last_signature: _Optional[bytes] = ...) -> None: ...

class ShardStatement(_message.Message):
    __slots__ = ("attempt", "index", "members", "senders", "digest", "signature", "round")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    index: int
    members: bytes
    senders: bytes
    digest: bytes
    signature: bytes
    round: int
    def __init__(self, attempt: _Optional[str] = ..., index: _Optional[int] = ..., members: _Optional[bytes] = ..., senders: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., round: _Optional[int] = ...) -> None: ...

class ShardStatements(_message.Message):
    __slots__ = ("said",)
    SAID_FIELD_NUMBER: _ClassVar[int]
    said: _containers.RepeatedCompositeFieldContainer[ShardStatement]
    def __init__(self, said: _Optional[_Iterable[_Union[ShardStatement, _Mapping]]] = ...) -> None: ...

class SealedShard(_message.Message):
    __slots__ = ("said", "envelope", "length")
    SAID_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    said: ShardStatement
    envelope: bytes
    length: int
    def __init__(self, said: _Optional[_Union[ShardStatement, _Mapping]] = ..., envelope: _Optional[bytes] = ..., length: _Optional[int] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("site", "sealed")
    SITE_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    site: str
    sealed: bytes
    def __init__(self, site: _Optional[str] = ..., sealed: _Optional[bytes] = ...) -> None: ...

class ShareHeader(_message.Message):
    __slots__ = ("run", "round", "said", "counts", "envelopes", "length", "digest")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SAID_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ENVELOPES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    said: ShardStatement
    counts: bytes
    envelopes: _containers.RepeatedCompositeFieldContainer[Envelope]
    length: int
    digest: bytes
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., said: _Optional[_Union[ShardStatement, _Mapping]] = ..., counts: _Optional[bytes] = ..., envelopes: _Optional[_Iterable[_Union[Envelope, _Mapping]]] = ..., length: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("run", "round", "attempt", "members", "senders", "problem", "floor")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    attempt: str
    members: bytes
    senders: bytes
    problem: str
    floor: int
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[str] = ..., members: _Optional[bytes] = ..., senders: _Optional[bytes] = ..., problem: _Optional[str] = ..., floor: _Optional[int] = ...) -> None: ...

class Statement(_message.Message):
    __slots__ = ("attempt", "signature")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    signature: bytes
    def __init__(self, attempt: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ReleaseHeader(_message.Message):
    __slots__ = ("phase", "reason", "count", "tiers", "length", "members", "counts", "counted", "senders", "statement")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    phase: str
    reason: str
    count: int
    tiers: _containers.RepeatedScalarFieldContainer[str]
    length: int
    members: bytes
    counts: bytes
    counted: int
    senders: bytes
    statement: bytes
    def __init__(self, phase: _Optional[str] = ..., reason: _Optional[str] = ..., count: _Optional[int] = ..., tiers: _Optional[_Iterable[str]] = ..., length: _Optional[int] = ..., members: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., counted: _Optional[int] = ..., senders: _Optional[bytes] = ..., statement: _Optional[bytes] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("duplicate",)
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    duplicate: bool
    def __init__(self, duplicate: _Optional[bool] = ...) -> None: ...

class CollectRequest(_message.Message):
    __slots__ = ("run", "round", "attempt")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    attempt: str
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("run", "after_round", "after_attempt", "wait", "newest", "holds")
    RUN_FIELD_NUMBER: _ClassVar[int]
    AFTER_ROUND_FIELD_NUMBER: _ClassVar[int]
    AFTER_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    run: str
    after_round: int
    after_attempt: str
    wait: float
    newest: bool
    holds: str
    def __init__(self, run: _Optional[str] = ..., after_round: _Optional[int] = ..., after_attempt: _Optional[str] = ..., wait: _Optional[float] = ..., newest: _Optional[bool] = ..., holds: _Optional[str] = ...) -> None: ...

class SettleRequest(_message.Message):
    __slots__ = ("run", "round", "attempt", "commit", "members", "senders")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    attempt: str
    commit: bool
    members: bytes
    senders: bytes
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[str] = ..., commit: _Optional[bool] = ..., members: _Optional[bytes] = ..., senders: _Optional[bytes] = ...) -> None: ...

class SettleReply(_message.Message):
    __slots__ = ("counts", "counted")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    counts: bytes
    counted: int
    def __init__(self, counts: _Optional[bytes] = ..., counted: _Optional[int] = ...) -> None: ...

class AbstainRequest(_message.Message):
    __slots__ = ("run", "round", "attempt")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    attempt: str
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[str] = ...) -> None: ...

class CheckRequest(_message.Message):
    __slots__ = ("run", "round", "attempt", "stage", "said", "wait", "after")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SAID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    attempt: str
    stage: str
    said: _containers.RepeatedScalarFieldContainer[bytes]
    wait: float
    after: int
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[str] = ..., stage: _Optional[str] = ..., said: _Optional[_Iterable[bytes]] = ..., wait: _Optional[float] = ..., after: _Optional[int] = ...) -> None: ...

class CheckReply(_message.Message):
    __slots__ = ("said", "complete")
    SAID_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    said: _containers.RepeatedScalarFieldContainer[bytes]
    complete: bool
    def __init__(self, said: _Optional[_Iterable[bytes]] = ..., complete: _Optional[bool] = ...) -> None: ...

class ShardRequest(_message.Message):
    __slots__ = ("run", "round")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ...) -> None: ...

class ShardReply(_message.Message):
    __slots__ = ("digest", "shards")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    shards: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, digest: _Optional[bytes] = ..., shards: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FinishRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class FinishReply(_message.Message):
    __slots__ = ("heads",)
    HEADS_FIELD_NUMBER: _ClassVar[int]
    heads: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, heads: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Letter(_message.Message):
    __slots__ = ("run", "sender", "recipient", "topic", "content")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    RECIPIENT_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    run: str
    sender: str
    recipient: str
    topic: str
    content: bytes
    def __init__(self, run: _Optional[str] = ..., sender: _Optional[str] = ..., recipient: _Optional[str] = ..., topic: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class PickupRequest(_message.Message):
    __slots__ = ("run", "topic", "after")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    run: str
    topic: str
    after: int
    def __init__(self, run: _Optional[str] = ..., topic: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class Letters(_message.Message):
    __slots__ = ("letters", "last")
    LETTERS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    letters: _containers.RepeatedCompositeFieldContainer[Letter]
    last: int
    def __init__(self, letters: _Optional[_Iterable[_Union[Letter, _Mapping]]] = ..., last: _Optional[int] = ...) -> None: ...

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EvaluateRequest(_message.Message):
    __slots__ = ("run", "round")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ...) -> None: ...

class EvaluateReply(_message.Message):
    __slots__ = ("accuracy", "loss", "rmse", "head")
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    RMSE_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    accuracy: float
    loss: float
    rmse: float
    head: bytes
    def __init__(self, accuracy: _Optional[float] = ..., loss: _Optional[float] = ..., rmse: _Optional[float] = ..., head: _Optional[bytes] = ...) -> None: ...

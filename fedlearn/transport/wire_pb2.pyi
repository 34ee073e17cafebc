from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TaskKey(_message.Message):
    __slots__ = ("run_id", "kind", "round_num", "attempt", "exchange")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ROUND_NUM_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    kind: str
    round_num: int
    attempt: int
    exchange: int
    def __init__(self, run_id: _Optional[str] = ..., kind: _Optional[str] = ..., round_num: _Optional[int] = ..., attempt: _Optional[int] = ..., exchange: _Optional[int] = ...) -> None: ...

class Eligibility(_message.Message):
    __slots__ = ("num_examples", "device", "on_power", "idle", "unmetered", "takes_ahead", "studies", "bundles", "runs_only_bundles", "max_concurrent_runs")
    NUM_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ON_POWER_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    UNMETERED_FIELD_NUMBER: _ClassVar[int]
    TAKES_AHEAD_FIELD_NUMBER: _ClassVar[int]
    STUDIES_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    RUNS_ONLY_BUNDLES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENT_RUNS_FIELD_NUMBER: _ClassVar[int]
    num_examples: int
    device: str
    on_power: bool
    idle: bool
    unmetered: bool
    takes_ahead: bool
    studies: _containers.RepeatedScalarFieldContainer[str]
    bundles: _containers.RepeatedCompositeFieldContainer[BundleReport]
    runs_only_bundles: bool
    max_concurrent_runs: int
    def __init__(self, num_examples: _Optional[int] = ..., device: _Optional[str] = ..., on_power: bool = ..., idle: bool = ..., unmetered: bool = ..., takes_ahead: bool = ..., studies: _Optional[_Iterable[str]] = ..., bundles: _Optional[_Iterable[_Union[BundleReport, _Mapping]]] = ..., runs_only_bundles: bool = ..., max_concurrent_runs: _Optional[int] = ...) -> None: ...

class BundleReport(_message.Message):
    __slots__ = ("sha256", "runs", "reason")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    runs: bool
    reason: str
    def __init__(self, sha256: _Optional[bytes] = ..., runs: bool = ..., reason: _Optional[str] = ...) -> None: ...

class BundleNotice(_message.Message):
    __slots__ = ("run_id", "sha256", "digest", "num_bytes")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    sha256: bytes
    digest: bytes
    num_bytes: int
    def __init__(self, run_id: _Optional[str] = ..., sha256: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "software", "eligibility", "held", "only_looks", "takes_many_runs", "takes_bundles")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    ELIGIBILITY_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ONLY_LOOKS_FIELD_NUMBER: _ClassVar[int]
    TAKES_MANY_RUNS_FIELD_NUMBER: _ClassVar[int]
    TAKES_BUNDLES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    software: str
    eligibility: Eligibility
    held: _containers.RepeatedCompositeFieldContainer[TaskKey]
    only_looks: bool
    takes_many_runs: bool
    takes_bundles: bool
    def __init__(self, protocol: _Optional[int] = ..., software: _Optional[str] = ..., eligibility: _Optional[_Union[Eligibility, _Mapping]] = ..., held: _Optional[_Iterable[_Union[TaskKey, _Mapping]]] = ..., only_looks: bool = ..., takes_many_runs: bool = ..., takes_bundles: bool = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("key", "phase")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[Progress.Phase]
        DOWNLOADING: _ClassVar[Progress.Phase]
        TRAINING: _ClassVar[Progress.Phase]
        UPLOADING: _ClassVar[Progress.Phase]
    UNKNOWN: Progress.Phase
    DOWNLOADING: Progress.Phase
    TRAINING: Progress.Phase
    UPLOADING: Progress.Phase
    KEY_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    key: TaskKey
    phase: Progress.Phase
    def __init__(self, key: _Optional[_Union[TaskKey, _Mapping]] = ..., phase: _Optional[_Union[Progress.Phase, str]] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("key", "digest", "num_bytes", "signature", "trainer")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    key: TaskKey
    digest: bytes
    num_bytes: int
    signature: bytes
    trainer: str
    def __init__(self, key: _Optional[_Union[TaskKey, _Mapping]] = ..., digest: _Optional[bytes] = ..., num_bytes: _Optional[int] = ..., signature: _Optional[bytes] = ..., trainer: _Optional[str] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("envelope", "data")
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    envelope: Envelope
    data: bytes
    def __init__(self, envelope: _Optional[_Union[Envelope, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class FromClient(_message.Message):
    __slots__ = ("hello", "eligibility", "progress", "result")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ELIGIBILITY_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    eligibility: Eligibility
    progress: Progress
    result: Result
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., eligibility: _Optional[_Union[Eligibility, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "software", "client_id", "run_id", "unix_s", "beat_s", "addresses", "run_ids", "records_trainers")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    BEAT_S_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    RUN_IDS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_TRAINERS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    software: str
    client_id: int
    run_id: str
    unix_s: float
    beat_s: float
    addresses: _containers.RepeatedScalarFieldContainer[str]
    run_ids: _containers.RepeatedScalarFieldContainer[str]
    records_trainers: bool
    def __init__(self, protocol: _Optional[int] = ..., software: _Optional[str] = ..., client_id: _Optional[int] = ..., run_id: _Optional[str] = ..., unix_s: _Optional[float] = ..., beat_s: _Optional[float] = ..., addresses: _Optional[_Iterable[str]] = ..., run_ids: _Optional[_Iterable[str]] = ..., records_trainers: bool = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("key", "digest", "num_bytes", "data", "remaining_s", "max_reply_bytes", "max_inline_bytes", "personal", "last_round_num", "constants_digest", "constants_bytes", "study", "traceparent", "bundle")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    REMAINING_S_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_INLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PERSONAL_FIELD_NUMBER: _ClassVar[int]
    LAST_ROUND_NUM_FIELD_NUMBER: _ClassVar[int]
    CONSTANTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONSTANTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    STUDY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    key: TaskKey
    digest: bytes
    num_bytes: int
    data: bytes
    remaining_s: float
    max_reply_bytes: int
    max_inline_bytes: int
    personal: bytes
    last_round_num: int
    constants_digest: bytes
    constants_bytes: int
    study: str
    traceparent: str
    bundle: bytes
    def __init__(self, key: _Optional[_Union[TaskKey, _Mapping]] = ..., digest: _Optional[bytes] = ..., num_bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., remaining_s: _Optional[float] = ..., max_reply_bytes: _Optional[int] = ..., max_inline_bytes: _Optional[int] = ..., personal: _Optional[bytes] = ..., last_round_num: _Optional[int] = ..., constants_digest: _Optional[bytes] = ..., constants_bytes: _Optional[int] = ..., study: _Optional[str] = ..., traceparent: _Optional[str] = ..., bundle: _Optional[bytes] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: TaskKey
    reason: str
    def __init__(self, key: _Optional[_Union[TaskKey, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class ComeBack(_message.Message):
    __slots__ = ("after_s", "reason")
    AFTER_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    after_s: float
    reason: str
    def __init__(self, after_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("key", "verdict", "reason")
    class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[Receipt.Verdict]
        ACCEPTED: _ClassVar[Receipt.Verdict]
        LATE: _ClassVar[Receipt.Verdict]
        REFUSED: _ClassVar[Receipt.Verdict]
    UNKNOWN: Receipt.Verdict
    ACCEPTED: Receipt.Verdict
    LATE: Receipt.Verdict
    REFUSED: Receipt.Verdict
    KEY_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: TaskKey
    verdict: Receipt.Verdict
    reason: str
    def __init__(self, key: _Optional[_Union[TaskKey, _Mapping]] = ..., verdict: _Optional[_Union[Receipt.Verdict, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class FromCoordinator(_message.Message):
    __slots__ = ("welcome", "task", "cancel", "come_back", "receipt", "ahead", "beat", "bundle")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    COME_BACK_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    task: Task
    cancel: Cancel
    come_back: ComeBack
    receipt: Receipt
    ahead: Task
    beat: Beat
    bundle: BundleNotice
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., come_back: _Optional[_Union[ComeBack, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., ahead: _Optional[_Union[Task, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., bundle: _Optional[_Union[BundleNotice, _Mapping]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("digest", "offset")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    offset: int
    def __init__(self, digest: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class UploadPart(_message.Message):
    __slots__ = ("envelope", "data")
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    envelope: Envelope
    data: bytes
    def __init__(self, envelope: _Optional[_Union[Envelope, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadStatus(_message.Message):
    __slots__ = ("offset", "receipt")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    offset: int
    receipt: Receipt
    def __init__(self, offset: _Optional[int] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ...) -> None: ...

class EnrolRequest(_message.Message):
    __slots__ = ("name", "token", "csr_pem", "identity_key", "identity_signature", "lineage")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CSR_PEM_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_KEY_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    token: bytes
    csr_pem: bytes
    identity_key: bytes
    identity_signature: bytes
    lineage: bytes
    def __init__(self, name: _Optional[str] = ..., token: _Optional[bytes] = ..., csr_pem: _Optional[bytes] = ..., identity_key: _Optional[bytes] = ..., identity_signature: _Optional[bytes] = ..., lineage: _Optional[bytes] = ...) -> None: ...

class LookRequest(_message.Message):
    __slots__ = ("name", "token", "num_connections")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    token: bytes
    num_connections: int
    def __init__(self, name: _Optional[str] = ..., token: _Optional[bytes] = ..., num_connections: _Optional[int] = ...) -> None: ...

class LookReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("certificate_pem", "client_id")
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: bytes
    client_id: int
    def __init__(self, certificate_pem: _Optional[bytes] = ..., client_id: _Optional[int] = ...) -> None: ...

class OperatorCommand(_message.Message):
    __slots__ = ("version", "order", "file_bytes", "data")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    version: int
    order: bytes
    file_bytes: int
    data: bytes
    def __init__(self, version: _Optional[int] = ..., order: _Optional[bytes] = ..., file_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class OperatorAnswer(_message.Message):
    __slots__ = ("data", "ending", "file")
    DATA_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    ending: CommandEnding
    file: bytes
    def __init__(self, data: _Optional[bytes] = ..., ending: _Optional[_Union[CommandEnding, _Mapping]] = ..., file: _Optional[bytes] = ...) -> None: ...

class CommandEnding(_message.Message):
    __slots__ = ("error", "message")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    error: str
    message: str
    def __init__(self, error: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class OperatorJoinRequest(_message.Message):
    __slots__ = ("name", "token", "csr_pem")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CSR_PEM_FIELD_NUMBER: _ClassVar[int]
    name: str
    token: bytes
    csr_pem: bytes
    def __init__(self, name: _Optional[str] = ..., token: _Optional[bytes] = ..., csr_pem: _Optional[bytes] = ...) -> None: ...

class OperatorJoinReply(_message.Message):
    __slots__ = ("certificate_pem",)
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: bytes
    def __init__(self, certificate_pem: _Optional[bytes] = ...) -> None: ...

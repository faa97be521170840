"""The one data model: frozen values with units in their names, JSON in and out, content hashes.

A tool's outcome, a failed compile included, is one of these values. An exception means that the machinery itself
broke. Which fields exist depends on ``status``; validators say so, so that no reader has to guess.

Shapes: a task's ``dims`` are named positive integers (``M``, ``N``, ``K`` for HGEMM). Times are microseconds.
"""

from __future__ import annotations

import hashlib
import json
import re
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tools.source_text import without_comments

#: Bumped whenever the meaning of a recorded number changes (inputs, statistic, cache state, order).
PROTOCOL_VERSION = 2
#: Recordings of these can still be replayed; rows say which they are of. 1: replays of different lengths for candidate
#: and references (records/README.md).
READABLE_PROTOCOLS = (1, 2)

Expr = int | str
BLayout = Literal["kn", "nk"]
Mode = Literal["offline", "rotating", "server"]
Budget = Literal["screen", "final", "certify"]
Depth = Literal["quick", "full"]
MODES: tuple[Mode, ...] = ("offline", "rotating", "server")
BUDGETS: tuple[Budget, ...] = ("screen", "final", "certify")

#: What a candidate is compared with. ``_max`` is the better of NN and TN in the same run; the others have the
#: candidate's own layout of B. "Speedup" without a name is against ``HEADLINE_REFERENCE``.
REFERENCES: tuple[str, ...] = (
    "torch",
    "cublas",
    "cublaslt_heuristic",
    "cublaslt_auto",
    "torch_max",
    "cublas_max",
    "cublaslt_heuristic_max",
    "cublaslt_auto_max",
)
HEADLINE_REFERENCE = "cublaslt_auto_max"


class Record(BaseModel):
    """Base of all records: immutable, strict about unknown fields, JSON round trip."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    def to_json(self) -> str:
        return self.model_dump_json(exclude_none=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls.model_validate_json(text)


def content_hash(value: Any) -> str:
    """16 hex digits of SHA-256 over canonical JSON (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- outcome -----------------------------------------------------------------------------------------------------


class Status(StrEnum):
    OK = "ok"
    FAILED = "failed"  # the candidate is at fault; `reason` says of what
    REFUSED = "refused"  # the gate's order was not kept (time before verify, ...)
    NOT_RECORDED = "not_recorded"  # a replay device never invents a number
    UNAVAILABLE = "unavailable"  # this machine lacks the tool (no nvcc, no counter permission, no GPU)


class Reason(StrEnum):
    """Why a candidate was rejected; tests and reports use these names."""

    # source and build
    FORBIDDEN_INCLUDE = "forbidden_include"
    HOST_CODE = "host_code"
    COMPILE_ERROR = "compile_error"
    COMPILE_TIMEOUT = "compile_timeout"
    COMPILE_MEMORY = "compile_memory"
    MISSING_ENTRY = "missing_entry"
    MUTABLE_GLOBAL = "mutable_global"
    UNRESOLVED_SYMBOL = "unresolved_symbol"
    PTXAS_WARNING = "ptxas_warning"
    REGISTER_SPILL = "register_spill"
    FP16_ACCUMULATE = "fp16_accumulate"
    PRECISION_DOWNGRADE = "precision_downgrade"  # tensor-core inputs of another type than FP16
    # launch
    BAD_LAUNCH_SPEC = "bad_launch_spec"
    NOT_ACCEPTED = "not_accepted"  # the family's manifest does not accept this shape
    TOO_MUCH_SHARED_MEMORY = "too_much_shared_memory"
    NOT_CO_RESIDENT = "not_co_resident"
    OUT_OF_MEMORY = "out_of_memory"
    LAUNCH_FAILED = "launch_failed"
    ILLEGAL_ACCESS = "illegal_access"
    HANG = "hang"
    CRASH = "crash"
    # correctness
    WRONG_RESULT = "wrong_result"
    UNWRITTEN_OUTPUT = "unwritten_output"
    WROTE_OUT_OF_BOUNDS = "wrote_out_of_bounds"
    MODIFIED_INPUT = "modified_input"
    NOT_DETERMINISTIC = "not_deterministic"
    WORKSPACE_STATE = "workspace_state"  # the declared state was not left as it was found
    # sanitizer
    MEMCHECK = "memcheck"
    RACE = "race"
    UNINITIALISED_READ = "uninitialised_read"
    SYNC_ERROR = "sync_error"
    # timing
    SKIPPED_LAUNCH = "skipped_launch"  # a timed launch left its own output unwritten or stale


#: A slow or small machine can cause these: another run may answer otherwise, so they are shown and not kept.
NOT_LASTING = frozenset({Reason.COMPILE_TIMEOUT, Reason.COMPILE_MEMORY})


class Outcome(Record):
    """What every tool returns. ``reason`` exists iff ``status`` is FAILED; ``detail`` is one plain sentence, empty
    only when all is well."""

    status: Status
    reason: Reason | None = None
    detail: str = ""
    elapsed_s: float = 0.0

    @model_validator(mode="after")
    def _reason_iff_failed(self) -> Self:
        if (self.status is Status.FAILED) != (self.reason is not None):
            raise ValueError(f"status {self.status} and reason {self.reason} do not go together")
        if self.status is not Status.OK and not self.detail:
            raise ValueError("an outcome that is not ok needs a detail sentence")
        return self

    @property
    def ok(self) -> bool:
        return self.status is Status.OK

    @property
    def lasting(self) -> bool:
        """Whether this is a verdict on the candidate that another run would repeat."""
        return self.ok or (self.status is Status.FAILED and self.reason not in NOT_LASTING)


# --- task --------------------------------------------------------------------------------------------------------


class TensorSpec(Record):
    """One operand: its role (``A``), dtype, the names of its dims outermost first, and the layouts it may have."""

    role: str
    dtype: Literal["float16", "float32"]
    dims: tuple[str, ...]
    layouts: tuple[str, ...] = ("row",)
    output: bool = False


class Task(Record):
    """An operation at one shape: what a kernel must compute, and how it is judged."""

    op: str
    dims: dict[str, int]
    tensors: tuple[TensorSpec, ...]
    accumulate: Literal["float32", "float16"] = "float32"

    @field_validator("dims")
    @classmethod
    def _positive(cls, dims: dict[str, int]) -> dict[str, int]:
        for name, value in dims.items():
            if value < 1:
                raise ValueError(f"dimension {name} must be a positive integer, not {value}")
        return dims

    @model_validator(mode="after")
    def _dims_known(self) -> Self:
        for tensor in self.tensors:
            if unknown := [d for d in tensor.dims if d not in self.dims]:
                raise ValueError(f"tensor {tensor.role} has dimension {unknown[0]}, which the task does not have")
        return self

    @property
    def task_id(self) -> str:
        """Readable and unique: ``hgemm-f32acc/M=64,N=64,K=64``."""
        accumulate = {"float32": "f32acc", "float16": "f16acc"}[self.accumulate]
        return f"{self.op}-{accumulate}/" + ",".join(f"{k}={v}" for k, v in self.dims.items())

    @property
    def label(self) -> str:
        return "x".join(str(v) for v in self.dims.values())


# --- launch spec -------------------------------------------------------------------------------------------------


class TensorMapSpec(Record):
    """A TMA descriptor (cuTensorMapEncodeTiled). ``dims`` and ``box`` are innermost first, in elements; ``strides``
    (elements, for dims[1:]) default to densely packed. ``swizzle`` is 0, 32, 64 or 128 (bytes), or an expression
    that must come to one of these."""

    tensor: str
    dims: tuple[Expr, ...]
    box: tuple[Expr, ...]
    strides: tuple[Expr, ...] | None = None
    swizzle: Expr = 128
    l2_promotion: Literal[0, 64, 128, 256] = 128
    oob_fill: Literal["zero", "nan"] = "zero"

    @model_validator(mode="after")
    def _ranks(self) -> Self:
        rank = len(self.dims)
        if not 1 <= rank <= 5:
            raise ValueError(f"a tensor map has 1 to 5 dims, not {rank}")
        if len(self.box) != rank or (self.strides is not None and len(self.strides) != rank - 1):
            raise ValueError(f"a rank-{rank} tensor map needs {rank} box sizes and {rank - 1} strides")
        if isinstance(self.swizzle, int) and self.swizzle not in (0, 32, 64, 128):
            raise ValueError(f"a tensor map's swizzle is 0, 32, 64 or 128 bytes, not {self.swizzle}")
        return self


class ArgSpec(Record):
    """One kernel argument: exactly one of the fields. In JSON a bare string names a tensor or ``workspace``."""

    tensor: str | None = None
    workspace: Literal[True] | None = None
    i32: Expr | None = None
    i64: Expr | None = None
    tensor_map: TensorMapSpec | None = None

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"workspace": True} if value == "workspace" else {"tensor": value}
        return value

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [f for f in type(self).model_fields if getattr(self, f) is not None]
        if len(given) != 1:
            raise ValueError(f"an argument is exactly one of tensor, workspace, i32, i64, tensor_map; got {given}")
        return self


class KernelLaunch(Record):
    entry: str
    grid: tuple[Expr, Expr, Expr]
    block: tuple[Expr, Expr, Expr]
    cluster: tuple[Expr, Expr, Expr] = (1, 1, 1)
    smem_bytes: Expr = 0  # dynamic shared memory
    args: tuple[ArgSpec, ...]

    @field_validator("entry")
    @classmethod
    def _a_symbol(cls, entry: str) -> str:
        if not re.fullmatch(r"[A-Za-z_$][A-Za-z0-9_$]{0,1023}", entry):
            raise ValueError(f"{entry[:80]!a} is not the name of a kernel: letters, digits and _")
        return entry


class WorkspaceState(Record):
    """The leading ``bytes`` of the workspace that hold ``fill`` before the first call and after every call."""

    bytes: Expr = 0
    fill: Literal[0, 255] = 0


class LaunchSpec(Record):
    """How a cubin is launched. Expressions range over the task's dims, ``constants`` (in order), ``sm_count``,
    ``ctas_per_sm`` and ``max_active_clusters``; see tools/expr.py."""

    launches: tuple[KernelLaunch, ...] = Field(min_length=1)
    constants: dict[str, Expr] = {}
    workspace_bytes: Expr = 0
    workspace_state: WorkspaceState = WorkspaceState()
    cooperative: bool = False
    deterministic: bool = True


# --- variant, plan, family -----------------------------------------------------------------------------------------


class Plan(Record):
    """A point in a family's knob space."""

    family: str
    revision: int
    b_layout: BLayout
    knobs: dict[str, int]

    @property
    def plan_id(self) -> str:
        return _plan_id(self.family, self.revision, self.b_layout, tuple(self.knobs.items()))

    @property
    def label(self) -> str:
        return f"{self.family}/{self.b_layout}[" + " ".join(f"{k}={v}" for k, v in self.knobs.items()) + "]"

    def knob(self, name: str) -> int:
        """Its value: 0 where the plan does not name it (``Knob.optional``)."""
        return self.knobs.get(name, 0)


@lru_cache(maxsize=1 << 16)
def _plan_id(family: str, revision: int, b_layout: str, knobs: tuple[tuple[str, int], ...]) -> str:
    """Kept: what is read of a record file asks for the same few thousand a million times."""
    return content_hash([family, revision, b_layout, dict(knobs)])


class Variant(Record):
    """Device code and how to launch it. ``plan`` is set when it was rendered from a family."""

    source: str
    launch: LaunchSpec
    b_layout: BLayout = "nk"
    flags: tuple[str, ...] = ()
    plan: Plan | None = None
    #: Boolean expressions over the dims that must hold for this variant to be launched at a shape.
    accepts: tuple[str, ...] = ()

    @property
    def variant_id(self) -> str:
        return content_hash([self.source, self.launch.model_dump(mode="json"), self.b_layout, list(self.flags)])

    @property
    def content_id(self) -> str:
        """As ``variant_id``, but comments and the width of gaps do not count. A measurement that is kept under a plan's
        ``key`` holds only for the content that it was taken of."""
        launch = self.launch.model_dump(mode="json", exclude_defaults=True)  # a field of the future changes nothing
        return content_hash([without_comments(self.source), launch, self.b_layout, list(self.flags)])

    @property
    def key(self) -> str:
        """What measurements are keyed on: the plan where there is one, the content otherwise."""
        return self.plan.plan_id if self.plan else self.variant_id

    @property
    def label(self) -> str:
        return self.plan.label if self.plan else f"source {self.variant_id} ({self.b_layout})"


class Knob(Record):
    values: tuple[int, ...] = Field(min_length=1)
    doc: str
    #: A run-time knob only changes launch arguments: it is no macro, so plans that differ in it share one cubin.
    runtime: bool = False
    #: A plan in which it is 0 does not name it: plans from before the knob was added stay what they were.
    optional: bool = False

    @model_validator(mode="after")
    def _may_be_zero(self) -> Self:
        if self.optional and 0 not in self.values:
            raise ValueError("an optional knob has 0 among its values, for plans that do not name it")
        return self


class Family(Record):
    """A manifest: a source with knobs. ``source`` has local includes already inlined."""

    name: str
    revision: int
    summary: str
    op: str
    b_layouts: tuple[BLayout, ...]
    knobs: dict[str, Knob]
    constraints: tuple[str, ...] = ()
    accepts: tuple[str, ...] = ()
    launch: LaunchSpec
    flags: tuple[str, ...] = ()
    source: str
    #: Shapes (task dims) at which sanitize runs: a small one and one with tails in every dimension.
    sanitize_dims: tuple[dict[str, int], ...] = ()


# --- device --------------------------------------------------------------------------------------------------------


class DeviceInfo(Record):
    """A GPU as measured or as recorded. ``label`` is what every output shows."""

    name: str
    label: str
    kind: Literal["cuda", "replay", "fake"]
    sm_count: int
    compute_capability: str
    memory_bytes: int
    l2_bytes: int
    smem_per_block_bytes: int
    driver: str
    cuda_runtime: str
    recorded_on: str | None = None
    library: str | None = None  # cuBLASLt and torch, which the references come from; None where it is not known
    #: What its timings are taken under: of a replay, what the file was recorded under.
    protocol_version: int = PROTOCOL_VERSION

    @property
    def protocol_remark(self) -> str:
        """Belongs beside its numbers; empty where they were taken as this program takes them."""
        if self.protocol_version == PROTOCOL_VERSION:
            return ""
        return f"recorded under protocol {self.protocol_version}; see records/README.md"


# --- tool results --------------------------------------------------------------------------------------------------


class CompileResult(Outcome):
    """``registers`` … exist iff the compile was ok. ``cubin_sha256`` names the file in the compile cache."""

    variant_id: str
    build_id: str | None = None
    compiler: str | None = None
    cubin_sha256: str | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    smem_static_bytes: int | None = None
    mma: dict[str, int] = {}  # SASS tensor-core instructions and how often each occurs
    warnings: tuple[str, ...] = ()
    log: str = ""

    @model_validator(mode="after")
    def _built(self) -> Self:
        if self.ok and (self.registers is None or self.build_id is None or self.cubin_sha256 is None):
            raise ValueError("a successful compile has build_id, cubin_sha256 and registers")
        return self


class TierResult(Record):
    """One tier of verify. ``checked`` counts outputs, ``mismatches`` those outside the tier's bound."""

    tier: str
    ok: bool
    checked: int
    mismatches: int = 0
    max_abs_error: float | None = None  # against FP64, finite entries only
    detail: str = ""


class VerifyResult(Outcome):
    """``accuracy`` compares with FP64 on normal inputs: the candidate's largest error beside cuBLAS's own."""

    variant_key: str
    task_id: str
    depth: Depth
    tiers: tuple[TierResult, ...] = ()
    bitwise_repeatable: bool | None = None
    max_abs_error: float | None = None
    cublas_max_abs_error: float | None = None
    peak_memory_bytes: int | None = None

    @model_validator(mode="after")
    def _tiers(self) -> Self:
        if self.ok and (not self.tiers or not all(t.ok for t in self.tiers)):
            raise ValueError("a verify that is ok has tiers and all of them passed")
        return self


class SanitizeCheck(Record):
    tool: Literal["memcheck", "racecheck", "initcheck", "synccheck"]
    dims: dict[str, int]
    ok: bool
    errors: int
    detail: str = ""


class SanitizeResult(Outcome):
    """``task_id`` is set by the gate where the result counts for that task alone; a family's plans are sanitized once
    for all shapes."""

    variant_key: str
    task_id: str | None = None
    checks: tuple[SanitizeCheck, ...] = ()

    @model_validator(mode="after")
    def _checks(self) -> Self:
        if self.ok and (not self.checks or not all(c.ok for c in self.checks)):
            raise ValueError("a sanitize that is ok has checks and all of them passed")
        return self

    @property
    def lasting(self) -> bool:
        """A deadline under tools that slow a kernel a hundredfold proves no hang; verify would see one."""
        return super().lasting and self.reason is not Reason.HANG


class Clocks(Record):
    """NVML over the timed part."""

    sm_mhz_min: int
    sm_mhz_median: int
    sm_mhz_max: int
    sm_mhz_limit: int | None = None  # the highest clock this GPU may run at
    power_w_max: float
    temperature_c_max: int
    throttle_reasons: tuple[str, ...] = ()


class ClockTrace(Record):
    """NVML over the time of one run, a column a quantity; ``throttle`` joins the reasons of a moment with +."""

    t_s: tuple[float, ...]
    sm_mhz: tuple[int, ...]
    power_w: tuple[float, ...]
    temperature_c: tuple[int, ...]
    throttle: tuple[str, ...]


class TimingRow(Record):
    """One row everywhere: records, JSON, report. ``ratio`` = ref_us / time_us, with a 95 % bootstrap interval of the
    paired ratio of medians (2,000 resamples). ``key`` is a plan_id, or a variant_id for a raw source."""

    task_id: str
    dims: dict[str, int]
    b_layout: BLayout
    mode: Mode
    budget: Budget
    reference: str
    ratio: float
    ratio_lo: float
    ratio_hi: float
    time_us: float
    ref_us: float
    samples: int
    key: str
    device: str
    driver: str
    protocol_version: int = PROTOCOL_VERSION
    measured_at: str  # UTC, ISO 8601

    @field_validator("ratio", "ratio_lo", "ratio_hi", "time_us", "ref_us")
    @classmethod
    def _finite_positive(cls, value: float) -> float:
        if not 0 < value < float("inf"):
            raise ValueError(f"a time or ratio must be positive and finite, not {value}")
        return value

    @property
    def speedup(self) -> float:
        return self.ratio - 1.0


class TimingResult(Outcome):
    """Rows against each reference that ran in the same interleaved run."""

    variant_key: str
    task_id: str
    mode: Mode
    budget: Budget
    rows: tuple[TimingRow, ...] = ()
    spread: float | None = None  # (p75 - p25) / median of the candidate's samples
    empty_kernel_us: float | None = None  # server mode: what the same graph measures around an empty kernel
    clocks: Clocks | None = None
    noisy: bool = False
    throttled: bool = False

    @model_validator(mode="after")
    def _rows(self) -> Self:
        if self.ok and not self.rows:
            raise ValueError("a timing that is ok has rows")
        return self

    def row(self, reference: str = HEADLINE_REFERENCE) -> TimingRow | None:
        return next((r for r in self.rows if r.reference == reference), None)

    @property
    def time_us(self) -> float | None:
        return self.rows[0].time_us if self.rows else None


class ProfileResult(Outcome):
    """ncu's fixed metric set (tools/profiling.py names them) and three sentences on what limits the kernel."""

    variant_key: str
    task_id: str
    metrics: dict[str, float] = {}
    stalls: dict[str, float] = {}  # top stall reasons, warps per issue-active cycle
    sentences: tuple[str, ...] = ()


class BaselineTime(Record):
    reference: str  # torch, cublas, cublaslt_heuristic, cublaslt_auto
    b_layout: BLayout
    time_us: float
    algorithm: str = ""  # for cublaslt_*: which candidate of how many, workspace bytes


class BaselineResult(Outcome):
    task_id: str
    mode: Mode
    budget: Budget
    times: tuple[BaselineTime, ...] = ()
    library: str = ""  # cuBLAS and torch versions

    def best_us(self, reference: str = "cublaslt_auto") -> float | None:
        return min((t.time_us for t in self.times if t.reference == reference), default=None)


class Evaluation(Outcome):
    """compile → verify quick → time at screen budget, stopping at the first that fails."""

    variant_key: str
    task_id: str
    compile: CompileResult | None = None
    verify: VerifyResult | None = None
    timing: TimingResult | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.ok and (self.compile is None or self.verify is None or self.timing is None):
            raise ValueError("an evaluation that is ok has compile, verify and timing")
        return self

    @property
    def ratio(self) -> float | None:
        row = self.timing.row() if self.timing else None
        return row.ratio if row else None


class Tally(Record):
    """How many results of one tool had one outcome, with one of them as an example (``task_id`` and ``variant_key``
    belong together). ``setting`` is verify's depth or time's mode/budget."""

    stage: Literal["compile", "verify", "sanitize", "time"]
    setting: str = ""
    status: Status
    reason: Reason | None = None
    count: int
    tasks: int = 0  # distinct shapes; 0 for stages that have none
    task_id: str | None = None
    variant_key: str | None = None
    detail: str = ""


# --- conversation --------------------------------------------------------------------------------------------------


class ToolCall(Record):
    call_id: str
    name: str
    arguments: dict[str, Any]
    #: Set when the model's call could not be parsed; the loop answers it with this sentence instead of running it.
    malformed: str | None = None


class Usage(Record):
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            cost_usd=self.cost_usd + other.cost_usd,
        )


class SampledTokens(Record):
    """What a policy that samples tokens itself knows of one turn: what reinforcement learning needs of it later.

    ``logprobs`` are the model's own at ``temperature``, over its whole vocabulary: a grammar that the sampler was held
    to does not count. ``mask`` is 0 where that grammar left no choice; empty means that all tokens were chosen.
    """

    model: str  # fingerprint of base and adapter
    tokenizer: str  # fingerprint: ids mean nothing to another one
    context_ids: tuple[int, ...]  # all that the turn was sampled from
    token_ids: tuple[int, ...]  # the turn itself, its end token included
    logprobs: tuple[float, ...]
    mask: tuple[Literal[0, 1], ...] = ()
    temperature: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if len(self.logprobs) != len(self.token_ids) or len(self.mask) not in (0, len(self.token_ids)):
            raise ValueError("a turn has one log-probability and one mask for each of its tokens")
        return self


class Step(Record):
    """One message of a rollout: the prompt, the policy's turn, or a tool's result."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None  # role tool: which call this answers
    tool: str | None = None
    result_id: str | None = None  # role tool: key of the stored result
    usage: Usage | None = None
    stop: Literal["tool_calls", "end", "length", "refusal"] | None = None  # role assistant: why the turn ended
    raw: list[dict[str, Any]] | None = None  # provider blocks that must go back unchanged (signed thinking)
    sampled: SampledTokens | None = None  # role assistant: where the policy gives its tokens


class Trajectory(Record):
    """One rollout, from prompt to submit or the budget's end."""

    trajectory_id: str
    session_id: str
    task: Task
    policy: str
    device: str
    round: int
    index_in_group: int
    steps: tuple[Step, ...]
    submitted_key: str | None = None
    reward: float | None = None
    reward_parts: dict[str, float] = {}
    usage: Usage = Usage()
    quota: int | None = None  # evaluations that it was granted, as its prompt says; None in older ones
    #: ``repairs``: too many failed in a row. ``floor``: a candidate was as fast as can be.
    ended_by: Literal["submit", "budget", "error", "policy", "repairs", "floor"] = "submit"

"""What a report holds: the JSON document, and all that the page and the Markdown are rendered from.

Words: ``ratio`` = t_ref / t, ``speedup`` = ratio - 1; both are fractions, not per cent. None means "not measured".
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tools.records import BLayout, Budget, Mode, Record

#: Bumped when a field changes its meaning.
REPORT_VERSION = 2
#: Which side of the comparison: kernels and references with B as stored (NN, TN), or the better of both on each side.
Layout = Literal["NN", "TN", "max"]
LAYOUTS: tuple[Layout, ...] = ("NN", "TN", "max")
LAYOUT_OF: dict[BLayout, Layout] = {"kn": "NN", "nk": "TN"}


class Stats(Record):
    """Ratios of one kernel a shape against one reference, each shape counted once."""

    shapes: int
    mean_speedup: float
    std_speedup: float | None  # of the shapes, n - 1 in the denominator; None for one shape
    mean_lo: float | None  # 95 % percentile bootstrap over the shapes, of mean_speedup
    mean_hi: float | None
    geo_mean_ratio: float
    wins: int  # ratio > 1
    clear_wins: int  # the shape's own 95 % interval lies above 1
    clear_losses: int  # ... below 1
    worst_ratio: float
    worst_shape: str
    best_ratio: float
    best_shape: str
    total_time_ratio: float  # sum of the reference's times over sum of the kernels': weighs large shapes
    wilcoxon_p: float | None  # two-sided signed-rank test of log ratio against 0; None where it is not defined


class MaxStats(Record):
    """``max(custom, reference)`` a shape: what a deployment that keeps the reference as a fallback gets."""

    shapes: int
    mean_speedup: float
    std_speedup: float | None
    mean_lo: float | None
    mean_hi: float | None
    geo_mean_ratio: float
    custom_used: int  # shapes at which the custom kernel is the faster one
    mean_speedup_if_clear: float  # the custom kernel only where its own 95 % interval lies above 1


class Comparison(Record):
    """One cell of Tables 1 and 2."""

    reference: str  # as in tools.records.REFERENCES
    layout: Layout
    mode: Mode
    stats: Stats | None
    with_fallback: MaxStats | None


class SizeBin(Record):
    """One cell of Table 3: shapes with 2^lo <= MNK < 2^hi (None: no bound) against the headline reference."""

    label: str
    log2_lo: int | None
    log2_hi: int | None
    shapes_known: int  # in the database, measured or not
    mode: Mode
    stats: Stats | None


class NetOfLaunch(Record):
    """Server mode with the empty kernel's time taken off both sides, headline reference."""

    shapes: int
    empty_kernel_us_median: float
    gross: Stats
    net: Stats
    not_above_empty: tuple[str, ...]  # shapes left out: a side is too close to the empty kernel to tell apart


class Band(Record):
    """Mean and standard deviation of the speedup of the shapes around one x."""

    x: float
    shapes: int
    mean_speedup: float
    std_speedup: float | None


class Panel(Record):
    """A panel of Figure 3: speedup over the headline reference against the base-2 logarithm of a size."""

    x: Literal["log2_mnk", "log2_mean_dim", "log2_max_dim"]
    mode: Mode
    bands: tuple[Band, ...]


class RatioRow(Record):
    reference: str
    ratio: float
    ratio_lo: float
    ratio_hi: float
    ref_us: float


class ModeTiming(Record):
    """The kernel and every reference of one interleaved run."""

    budget: Budget
    time_us: float
    samples: int
    spread: float | None
    empty_kernel_us: float | None
    noisy: bool
    throttled: bool
    sm_mhz_median: int | None
    measured_at: str
    rows: tuple[RatioRow, ...]

    def row(self, reference: str) -> RatioRow | None:
        return next((r for r in self.rows if r.reference == reference), None)


class Accuracy(Record):
    """Largest absolute error against FP64 on normal(0,1) inputs, from verify at full depth."""

    max_abs_error: float
    cublas_max_abs_error: float | None


class Choice(Record):
    """A kernel's times and errors at a shape."""

    timings: dict[Mode, ModeTiming]
    accuracy: Accuracy | None
    profiled: bool


class ShapeReport(Record):
    """``best`` is the headline's kernel, ``by_layout`` the best of each layout against its own layout's reference;
    both are keys of ``choices``."""

    m: int
    n: int
    k: int
    task_id: str
    best: str | None
    why_none: str = ""
    by_layout: dict[Layout, str] = Field(default_factory=dict)
    choices: dict[str, Choice] = Field(default_factory=dict)
    certified: dict[Mode, ModeTiming] = Field(default_factory=dict)  # the best kernel again, at the certify budget

    @property
    def label(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def mnk(self) -> int:
        return self.m * self.n * self.k

    def choice(self, layout: Layout = "max") -> Choice | None:
        """With ``max`` the better of both layouts."""
        key = self.best if layout == "max" else self.by_layout.get(layout)
        return self.choices[key] if key else None

    def timing(self, mode: Mode, layout: Layout = "max") -> ModeTiming | None:
        choice = self.choice(layout)
        return choice.timings.get(mode) if choice else None


class Kernel(Record):
    """A kernel that is the best somewhere. ``source`` is the id of a Source."""

    key: str
    label: str
    b_layout: BLayout
    family: str | None
    revision: int | None
    knobs: dict[str, int]
    defines: str  # the lines that, put before the source, make this kernel of it
    source: str | None
    source_note: str = ""  # why there is no source, or what to know of it
    registers: int | None
    spill_bytes: int | None
    mma: dict[str, int]
    sanitize_checks: int
    best_at: tuple[str, ...]


class Source(Record):
    source_id: str
    title: str
    text: str


class Profiled(Record):
    """The ncu record of the best kernel at a shape."""

    shape: str
    kernel: str
    metrics: dict[str, float]
    stalls: dict[str, float]
    sentences: tuple[str, ...]


class AccuracyBin(Record):
    label: str
    shapes: int
    median_error: float
    max_error: float
    cublas_shapes: int
    cublas_median_error: float | None
    cublas_max_error: float | None
    no_worse: int  # shapes at which the kernel's error is at most cuBLAS's own


class Rejection(Record):
    """Candidates that one stage rejected for one reason; the example is one of them."""

    stage: str
    setting: str
    reason: str
    count: int
    shapes: int
    example_kernel: str
    example_shape: str
    detail: str


class StageCount(Record):
    stage: str
    setting: str
    passed: int
    rejected: int
    not_recorded: int


class Peaks(Record):
    """Limits of a device, for the roofline. ``reached_*`` is what the best kernels of any kind come to."""

    device: str
    tensor_tflops: float
    dram_tb_per_s: float
    reached_tflops: float | None = None
    reached_dram_tb_per_s: float | None = None
    l2_tb_per_s: float | None = None
    source: str


class KnownPeaks(Record):
    devices: tuple[Peaks, ...]


class Published(Record):
    """One measured set of other people's: mean speedups as fractions by reference and layout, offline and server."""

    hardware: str
    accumulate: str
    origin: str  # printed in the paper, or recomputed from its repository
    table1: tuple[PublishedMean, ...]
    bins: tuple[PublishedBins, ...] = ()


class PublishedMean(Record):
    reference: str
    layout: Layout
    offline: float | None = None
    server: float | None = None
    offline_with_fallback: float | None = None
    server_with_fallback: float | None = None


class PublishedBins(Record):
    """Against cuBLASLt-AutoTuning-max; one speedup a bin of SIZE_BINS, and the counts of shapes."""

    mode: Mode
    speedups: tuple[float, ...]
    shapes: tuple[int, ...]
    mean_speedup: float
    geo_mean_ratio: float
    win_rate: float


class PublishedWork(Record):
    title: str
    source: str
    remark: str
    bins_origin: str
    sets: tuple[Published, ...]


class Fact(Record):
    name: str
    value: str


class OffGrid(Record):
    """Shapes off the grid, of one M or, where it is None, all: against auto-tuned cuBLASLt, the better layout on both
    sides."""

    m: int | None
    mode: Mode
    stats: Stats | None


class Report(Record):
    """Where half of the shapes are of the grid, statistics are of these alone, and those of the others are in
    ``off_grid``."""

    report_version: int = REPORT_VERSION
    device: str
    driver: str
    protocol_version: int
    reference: str  # the headline's
    shapes_known: int
    shapes_with_kernel: int
    comparisons: tuple[Comparison, ...]
    sizes: tuple[SizeBin, ...]
    #: Mean speedup by mode, each size of Table 3 counted as often as the grid has it; None where a size lacks.
    grid_weighted: dict[Mode, float | None]
    server_net: NetOfLaunch | None
    off_grid: tuple[OffGrid, ...]
    panels: tuple[Panel, ...]
    shapes: tuple[ShapeReport, ...]
    kernels: tuple[Kernel, ...]
    sources: tuple[Source, ...]
    profiles: tuple[Profiled, ...]
    accuracy: tuple[AccuracyBin, ...]
    stages: tuple[StageCount, ...]
    rejections: tuple[Rejection, ...]
    peaks: Peaks | None
    published: PublishedWork
    provenance: tuple[Fact, ...]

    def comparison(self, mode: Mode, reference: str = "cublaslt_auto", layout: Layout = "max") -> Comparison | None:
        wanted = (mode, reference, layout)
        return next((c for c in self.comparisons if (c.mode, c.reference, c.layout) == wanted), None)

    def headline(self, mode: Mode) -> Stats | None:
        found = self.comparison(mode)
        return found.stats if found else None

    def document(self) -> str:
        """JSON. Unlike records, it keeps nulls: what was not measured is there and says so."""
        return self.model_dump_json() + "\n"

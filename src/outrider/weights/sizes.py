"""The size in bytes of a checkpoint's weights, as stored and in a GPU's memory, before they are downloaded.

It is computed from the configuration alone; for a GGUF file, from its header.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from ..models.block_config import BlockConfig
from ..models.config import ModelConfig, text_part
from ..models.names import Config, TensorPlan, only_looked_up, roundable, tensor_plan
from ..ops.formats import Float8Format, Format, IntegerFormat, NvFp4Format, rounded_to, stays_dense
from .files import Files, already_quantised, open_source
from .mapped import TensorEntry
from .quant_reader import Shape
from .quant_scheme import QuantScheme, recipe
from .source import factor_of

ITEM = {"float32": 4.0, "float64": 8.0}  # every other dtype of a checkpoint has two bytes


@dataclass(frozen=True)
class Layout:
    """The layout of a quantised matrix on a GPU (ops/triton/repack.py, which needs Triton)."""

    bits: int  # of a code
    group: int  # columns that share a 16-bit scale; 0: one per row
    has_zero_point: bool = False  # each group has a zero-point as well

    def nbytes(self, n: int, k: int) -> int:
        """Bytes with rows padded to 64 and columns to whole chunks; scales come in pairs."""
        columns = (8 if self.bits < 8 else 4) * (16 if self.group == 16 else 32)
        rows = -(-n // 64) * 64
        chunks = -(-k // columns)
        group = columns if self.group == 0 and self.has_zero_point else min(self.group, columns)
        numbers = 0 if group == 0 else -(-columns // group // 2) * 2 * chunks * (1 + self.has_zero_point)
        return rows * (chunks * columns * self.bits // 8 + 2 * numbers + (4 if numbers == 0 else 0))


SCALED_NVFP4 = "NVFP4 with a factor"  # a matrix with a float32 factor in a tensor of its own
LAYOUTS = {
    "Q1_0": Layout(4, 128),
    "Q2_0": Layout(4, 64),
    "Q2_K": Layout(4, 16, True),
    "Q3_K": Layout(4, 16),
    "Q4_0": Layout(4, 32),
    "Q4_1": Layout(4, 32, True),
    "Q5_0": Layout(5, 32),
    "Q5_1": Layout(5, 32, True),
    "Q8_0": Layout(8, 32),
    "Q4_K": Layout(4, 32, True),
    "Q5_K": Layout(5, 32, True),
    "Q6_K": Layout(6, 16),
    "IQ1_S": Layout(5, 32),
    "IQ1_M": Layout(6, 16),
    "IQ2_XXS": Layout(8, 32),
    "IQ2_XS": Layout(8, 16),
    "IQ2_S": Layout(8, 16),
    "IQ3_XXS": Layout(6, 16),
    "IQ3_S": Layout(5, 32),
    "IQ4_NL": Layout(8, 32),
    "IQ4_XS": Layout(8, 32),
    "TQ1_0": Layout(4, 256),
    "TQ2_0": Layout(4, 256),
    "MXFP4": Layout(4, 16),
    "NVFP4": Layout(4, 16),
    SCALED_NVFP4: Layout(4, 16),
}


@dataclass(frozen=True)
class CpuLayout:
    """The layout of a GGUF format in the memory of the CPU kernels (ops/cpu/formats.h)."""

    about: str
    bits: float  # a weight, scales included


CODES_OF_2 = CpuLayout("2-bit codes", 2.625)
CODES_OF_3 = CpuLayout("3-bit codes, a scale for 32 columns", 3.3125)
CODES_OF_3_BY_16 = CpuLayout("3-bit codes, a scale for 16 columns", 3.5625)
CODES_OF_4 = CpuLayout("4-bit codes", 4.3125)
WIDENED = CpuLayout("4-bit codes", 4.5)
OWN_BITS = "its own bits"
CONVERTED = ("Q1_0", "Q2_0", "NVFP4", SCALED_NVFP4)  # not looked up in the file
CPU_LAYOUTS = {
    "Q1_0": WIDENED,
    "Q2_0": WIDENED,
    "Q2_K": CpuLayout(OWN_BITS, 2.625),
    "Q3_K": CODES_OF_3_BY_16,
    "Q4_0": CpuLayout(OWN_BITS, 4.5),
    "Q4_1": CpuLayout(OWN_BITS, 5.0),
    "Q5_0": CpuLayout(OWN_BITS, 5.5),
    "Q5_1": CpuLayout(OWN_BITS, 6.0),
    "Q8_0": CpuLayout(OWN_BITS, 8.5),
    "Q4_K": CpuLayout(OWN_BITS, 4.625),
    "Q5_K": CpuLayout(OWN_BITS, 5.625),
    "Q6_K": CpuLayout(OWN_BITS, 6.5625),
    "IQ1_S": CODES_OF_3,
    "IQ1_M": CODES_OF_3_BY_16,
    "IQ2_XXS": CODES_OF_3,
    "IQ2_XS": CODES_OF_3_BY_16,
    "IQ2_S": CODES_OF_3_BY_16,
    "IQ3_XXS": CODES_OF_4,
    "IQ3_S": CODES_OF_4,
    "IQ4_NL": CpuLayout(OWN_BITS, 4.5),
    "IQ4_XS": CpuLayout(OWN_BITS, 4.3125),
    "TQ1_0": CODES_OF_2,
    "TQ2_0": CODES_OF_2,
    "MXFP4": CpuLayout(OWN_BITS, 4.5),
    "NVFP4": CpuLayout("bf16", 16.0),
    SCALED_NVFP4: CpuLayout("float32", 32.0),
}


def layout_of(format: Format, experts: bool = False) -> Layout | None:
    """Layout on a GPU; None: the matrix is dense there, as are experts with a column order each."""
    if isinstance(format, IntegerFormat):
        if format.ordered and experts:
            return None
        return Layout(format.bits, format.group, format.has_zero_point)
    if isinstance(format, Float8Format):
        return Layout(8, format.group)
    return Layout(4, 16) if isinstance(format, NvFp4Format) else None


@dataclass(frozen=True)
class HeldFormat:
    """Tensors of one format that are stored in one way."""

    format: str
    cpu: str
    gpu: str


@dataclass
class HeldBytes:
    tensors: int = 0
    stored: float = 0.0
    cpu: float = 0.0
    gpu: float = 0.0

    def add(self, source: SourceSize) -> None:
        self.tensors += 1
        self.stored += source.stored
        self.cpu += source.cpu
        self.gpu += source.gpu


@dataclass(frozen=True)
class StoredSize:
    total: float  # bytes
    token: float  # bytes that one token reads: one row of tables, and the chosen experts
    parameters: int
    gpu: float = 0.0  # bytes in a GPU's memory
    gpu_token: float = 0.0  # bytes of them that one token reads
    formats: Mapping[str, float] = field(default_factory=dict)  # bytes by format
    cpu: float = 0.0  # bytes in the memory of the CPU kernels, tables that stay in the file included
    cpu_token: float = 0.0
    layouts: Mapping[HeldFormat, HeldBytes] = field(default_factory=dict)  # GGUF's quantised tensors


def item_bytes(config: Mapping[str, object]) -> float:
    named = [c.get(key) for c in (config, text_part(config)) for key in ("dtype", "torch_dtype")]
    return ITEM.get(next((name for name in named if isinstance(name, str)), ""), 2.0)


@dataclass(frozen=True)
class SourceSize:
    """One tensor of a checkpoint: bytes on disk, in a GPU's memory and in the memory of the CPU kernels."""

    kind: str  # its format
    parameters: int
    share: float  # part that one token reads
    stored: float
    gpu: float
    cpu: float
    storage: HeldFormat | None  # GGUF's quantised tensors: how either side stores them


def stored_size(files: Files, config: Config, quantize: str | None = None) -> StoredSize:
    """quantize: the format to which dense matrices are quantised when loaded on a GPU."""
    entries: Mapping[str, TensorEntry] = open_source(files).entries if files.gguf is not None else {}
    sizer = Sizer(files, config, quantize, scheme=recipe(files.config, files.name), entries=entries)
    sources = list(sizer.sources())
    formats: dict[str, float] = {}
    layouts: dict[HeldFormat, HeldBytes] = {}
    for source in sources:
        formats[source.kind] = formats.get(source.kind, 0.0) + source.stored
        if source.storage is not None:
            layouts.setdefault(source.storage, HeldBytes()).add(source)
    return StoredSize(
        total=sum(source.stored for source in sources),
        token=sum(source.stored * source.share for source in sources),
        parameters=sum(source.parameters for source in sources),
        gpu=sum(source.gpu for source in sources),
        gpu_token=sum(source.gpu * source.share for source in sources),
        formats=formats,
        cpu=sum(source.cpu for source in sources),
        cpu_token=sum(source.cpu * source.share for source in sources),
        layouts=layouts,
    )


@dataclass(frozen=True)
class Sizer:
    """Sizes of a checkpoint's tensors, one by one."""

    files: Files
    config: Config
    quantize: str | None
    scheme: QuantScheme | None
    entries: Mapping[str, TensorEntry]  # of a GGUF file

    def sources(self) -> Iterator[SourceSize]:
        for name, plan in tensor_plan(self.config, self.entries).items():
            if plan.role != "index":
                for source, shape in zip(plan.sources, plan.source_shapes, strict=True):
                    yield self._source(name, plan, source=source, shape=shape)

    def _source(self, name: str, plan: TensorPlan, source: str, shape: Shape) -> SourceSize:
        format = self._format(plan, source)
        entry = self.entries.get(source)
        if entry is not None:
            kind = SCALED_NVFP4 if factor_of(self.entries, source) is not None else entry.kind
            stored = float(entry.nbytes)
        elif format is not None:
            kind = format.name
            stored = float(format.nbytes(shape))
        else:
            kind = "dense"
            stored = prod(shape) * item_bytes(self.files.config)
        layout = LAYOUTS.get(kind) if format is None else layout_of(format, len(shape) == 3)
        padded = shape  # the shape whose rows are padded to 64
        if self.quantize is not None and roundable(self.config, name, plan):
            if format is not None or kind in LAYOUTS:
                raise already_quantised(self.files, kind)
            padded = plan.shape  # fused parts are rounded as one
            rounded = rounded_to(self.quantize, plan.shape)
            layout = None if rounded is None else layout_of(rounded)
        if plan.role != "matrix" or stays_dense(plan.shape):
            layout = None
        if layout is not None:
            gpu = layout.nbytes(prod(padded[:-1]), padded[-1]) * prod(shape) / prod(padded)
        else:  # tables, small matrices and dense checkpoints
            gpu = prod(shape) * (2.0 if plan.role in ("matrix", "embedding") else 4.0)
        looked_up = only_looked_up(self.config, name) and kind not in CONVERTED
        in_file = looked_up or kind not in CPU_LAYOUTS
        storage = None
        if kind in CPU_LAYOUTS:
            on_cpu = "rows in the file" if in_file else CPU_LAYOUTS[kind].about
            storage = HeldFormat(kind, on_cpu, "bf16" if layout is None else f"{layout.bits}-bit codes")
        return SourceSize(
            kind=kind,
            parameters=prod(shape),
            share=share(name, plan, self.config),
            stored=stored,
            gpu=gpu,
            cpu=stored if in_file else prod(shape) * CPU_LAYOUTS[kind].bits / 8,
            storage=storage,
        )

    def _format(self, plan: TensorPlan, source: str) -> Format | None:
        """Format of a quantised matrix by the checkpoint's scheme."""
        if self.scheme is None or plan.role != "matrix":
            return None
        reader = self.scheme(source.removesuffix(".weight"))
        return None if reader is None else reader.format


def share(name: str, plan: TensorPlan, config: Config) -> float:
    if only_looked_up(config, name) or (name == "embed" and isinstance(config, BlockConfig)):
        return 1.0 / plan.shape[0]
    if isinstance(config, ModelConfig) and config.moe is not None and ".experts_" in name:
        return config.moe.top_k / config.moe.experts
    return 1.0

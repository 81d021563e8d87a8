"""The audit of a GPU: which schedules give the bits of the canonical one on this device, and how fast they are.

The long form compares every candidate schedule of every op of a model, at row counts that reach every tile, with the
canonical schedule on normal, heavy-tailed and cancelling data, launched eagerly and from a CUDA graph with dependent
launch. The canonical run is longer: rows of M = 1 must equal rows among thousands. A control whose order of additions
is changed must differ, or the data could not have shown a difference. The short form, at every start of the engine,
compares the schedules in use at a few row counts.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_runtime.errors import InvarianceError
from moe_runtime.kernels.audit_inputs import KINDS, AuditInputs
from moe_runtime.kernels.audit_report import AuditRow, GpuAuditReport
from moe_runtime.kernels.experts_triton import MAX_CAPACITY
from moe_runtime.kernels.gemm import PARTS
from moe_runtime.kernels.golden_digests import digest
from moe_runtime.kernels.gpu_audit_attention import AttentionOp, GreedyOp, RopeOp, RowsOp, SampleOp, StatsOp
from moe_runtime.kernels.gpu_audit_ops import (
    AuditOp,
    DenseOp,
    ExpertOp,
    ModelShapes,
    NormOp,
    RouterOp,
    Tensors,
    TopkOp,
)
from moe_runtime.kernels.gpu_schedules import GpuSchedules, VendorGemm, schedule_label

__all__ = ["audit_model", "audit_short", "compile_share", "golden_of_model", "model_ops", "schedules_in_use"]

logger = logging.getLogger(__name__)

GRAPH_KIND = "heavy_tailed"
GOLDEN_ROWS = 21
GOLDEN_KINDS = ("heavy_tailed", "cancelling")
SHORT_KIND = "heavy_tailed"
SHORT_MAX_ROWS = 1024
MAX_VENDOR_ROWS = 16384
REPLAYS = 7
COLD_BYTES = 256 << 20  # several times an L2
MAX_COPIES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A schedule to try at M rows."""

    op: AuditOp
    m: int
    schedule: Any


def model_ops(shapes: ModelShapes) -> list[AuditOp]:
    """Every op of a model that has weights, an order of additions, or more than one schedule."""
    s = shapes
    query = s.num_query_heads * s.head_dim
    ops: list[AuditOp] = [
        DenseOp(s, "qkv", s.qkv_columns, s.hidden, 1, split=False, float32_out=False),
        DenseOp(
            s, "o_proj", *(s.o_proj_share or (s.hidden, query, PARTS["row"])), split=False, float32_out=True
        ),
        DenseOp(s, "lm_head", s.vocab_share or s.vocab_size, s.hidden, 1, split=False, float32_out=True),
        RouterOp(s),
        TopkOp(s),
        ExpertOp(s, "gate_up"),
        ExpertOp(s, "down"),
        NormOp(s),
    ]
    if s.o_proj_share is None:
        ops.append(DenseOp(s, "o_proj", s.hidden, query, PARTS["row"], split=True, float32_out=True))
    for window in s.windows:
        ops += [AttentionOp(s, window), RowsOp(s, window)]
    return [*ops, RopeOp(s, None), StatsOp(s), GreedyOp(s), SampleOp(s)]


def schedules_in_use(op: AuditOp, schedules: GpuSchedules, m: int) -> list[Any]:
    """What the engine would run for this op and M rows."""
    if isinstance(op, DenseOp):
        if op.name == "dense_parts":
            return [schedules.dense_parts(m, op.n, op.k, op.parts)]
        vendor = schedules.vendor(m, op.n, op.k, op.parts, float32_out=op.float32_out, max_rows=m)
        return [schedules.dense(m, op.n, op.k, op.parts), *([vendor] if vendor else [])]
    if isinstance(op, RouterOp):
        return [schedules.router(m, op.shapes.hidden)]
    if isinstance(op, TopkOp):
        return [schedules.topk(m)]
    if isinstance(op, ExpertOp):
        s = op.shapes
        grouped = schedules.grouped_experts(m * s.num_topk, s.num_experts, s.hidden, s.width)
        few = schedules.experts(m, s.hidden, s.width)
        both: list[tuple[Any, Any]] = [(grouped.gate_up, grouped.down)]
        if m <= MAX_CAPACITY:
            both.append((few.gate_up, few.down))
        return [pair[0 if op.is_gate_up else 1] for pair in both]
    if isinstance(op, RopeOp):
        return [schedules.rope()]
    if isinstance(op, RowsOp):
        return [schedules.attention_rows(few=few) for few in (False, True)]
    if isinstance(op, AttentionOp):
        decode = [schedules.decode_attention(split=split) for split in (False, True)]
        return [*decode, schedules.attention_rows(few=True)]
    return list(op.candidates(m)) if isinstance(op, NormOp) else [op.canonical]


def audit_model(
    shapes: ModelShapes,
    schedules: GpuSchedules,
    device: torch.device,
    *,
    timed: bool = False,
    max_rows: int = 4096,
    on_progress: Callable[[int, int], None] | None = None,
) -> GpuAuditReport:
    """The long form.

    Args:
        shapes: The model.
        schedules: The table in force, to mark what is in use.
        device: A GPU; under the interpreter a CPU, where nothing is timed.
        timed: Also measure each schedule that agrees: medians of graph replays.
        max_rows: Largest row count.
        on_progress: Told (ops done, in total).
    """
    report = GpuAuditReport()
    ops = model_ops(shapes)
    for done, op in enumerate(ops):
        if on_progress is not None:
            on_progress(done, len(ops))
        _audit_op(op, schedules, device, report, timed, max_rows)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return report


def audit_short(
    shapes: ModelShapes,
    schedules: GpuSchedules,
    device: torch.device,
    weights: Mapping[str, torch.Tensor] | None = None,
    *,
    max_rows: int = SHORT_MAX_ROWS,
    pdl: bool = True,
) -> int:
    """The short form: the schedules in use against the canonical ones. Returns the number of comparisons.

    A schedule that disagrees is taken out of ``schedules``, with a warning, and the next choice is tried.

    Args:
        shapes: The model.
        schedules: The table in force; may lose entries.
        device: Where it runs.
        weights: Of a loaded layer, by ``qkv``, ``o_proj``, ``lm_head``, ``router``, ``w13`` and ``w2``; made up where
            missing.
        max_rows: Largest row count.
        pdl: Launch dependent, as the engine does.

    Raises:
        InvarianceError: a canonical schedule, or an op without another one, gives a row other bits in other company.
    """
    count = 0
    for op in model_ops(shapes):
        rows = [m for m in op.rows if m <= min(max_rows, op.short_max_rows)] or [min(op.rows)]
        inputs = op.inputs(AuditInputs(op.label, device, given=weights), SHORT_KIND, rows[-1])
        canonical = op.run(inputs, rows[-1], op.canonical, pdl)
        control = op.control(inputs) if isinstance(op, DenseOp | RouterOp) else None
        if control is not None and _equal(control, canonical):
            raise InvarianceError(f"{op.label}: the control in another order does not differ")
        tried: set[object] = set()
        for m in rows:
            pending = [*schedules_in_use(op, schedules, m), *([op.canonical] if m == rows[0] else [])]
            while pending:
                schedule = pending.pop()
                if schedule in tried and schedule == op.canonical:
                    continue
                tried.add(schedule)
                count += 1
                if _equal(op.run(inputs, m, schedule, pdl), _first_rows(canonical, m, op, schedule)):
                    continue
                _drop(op, schedules, schedule, m)
                pending = schedules_in_use(op, schedules, m)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return count


def compile_share(
    shapes: ModelShapes, schedules: GpuSchedules, device: torch.device, worker: int, num_workers: int
) -> None:
    """Launch one worker's share of everything ``audit_model`` will launch, on zeros, to fill Triton's cache."""
    position = 0
    for op in model_ops(shapes):
        inputs: Tensors | None = None
        for item in [*_items(op, schedules, max(op.rows)), None]:
            position += 1
            if position % num_workers != worker:
                continue
            if inputs is None:
                inputs = op.inputs(AuditInputs(op.label, device, zeros=True), KINDS[0], max(op.rows))
            try:
                if item is None:
                    op.control(inputs)
                else:
                    for pdl in (False, True):
                        op.run(inputs, item.m, item.schedule, pdl)
            except Exception as error:  # the audit itself will report it
                logger.info("%s: %s", op.label, error)
    if device.type == "cuda":
        torch.cuda.synchronize()


def golden_of_model(shapes: ModelShapes, device: torch.device) -> dict[str, str]:
    """Digests of the canonical outputs of a model's ops on fixed inputs, by op, shape and dtype."""
    found = {}
    for op in model_ops(shapes):
        make = AuditInputs(op.label, device)
        outputs: list[torch.Tensor] = []
        for kind in GOLDEN_KINDS:
            outputs += op.run(op.inputs(make, kind, GOLDEN_ROWS), GOLDEN_ROWS, op.canonical)
        found[op.label] = digest(outputs)
    return found


def _items(op: AuditOp, schedules: GpuSchedules, max_rows: int) -> Iterator[_Item]:
    for m in op.rows:
        if m <= max_rows:
            in_use = (s for s in schedules_in_use(op, schedules, m) if not isinstance(s, VendorGemm))
            for schedule in dict.fromkeys([*op.candidates(m), *in_use]):
                yield _Item(op=op, m=m, schedule=schedule)


def _audit_op(
    op: AuditOp,
    schedules: GpuSchedules,
    device: torch.device,
    report: GpuAuditReport,
    timed: bool,
    max_rows: int,
) -> None:
    on_gpu = device.type == "cuda"
    items = list(_items(op, schedules, max_rows))
    vendor = op.vendor_candidates(MAX_VENDOR_ROWS) if isinstance(op, DenseOp) and on_gpu else ()
    items += [_Item(op=op, m=schedule.rows, schedule=schedule) for schedule in vendor]
    num_rows = max(item.m for item in items)
    make = AuditInputs(op.label, device)
    faults: dict[_Item, str] = {}
    control_differs: bool | None = None
    inputs: Tensors = {}
    for kind in KINDS:
        inputs = op.inputs(make, kind, num_rows)
        canonical = op.run(inputs, num_rows, op.canonical)
        control = op.control(inputs)
        if control is not None:
            control_differs = bool(control_differs) or not _equal(control, canonical)
        del control
        for item in items:
            if item in faults:
                continue
            expected = _first_rows(canonical, item.m, op, item.schedule)
            try:
                if not _equal(op.run(inputs, item.m, item.schedule), expected):
                    faults[item] = f"differs on {kind} data"
                elif on_gpu and kind == GRAPH_KIND and not _equal(_run_in_graph(item, inputs), expected):
                    faults[item] = f"differs in a CUDA graph on {kind} data"
            except Exception as error:  # a schedule that the device refuses is a result, too
                faults[item] = f"{type(error).__name__}: {str(error)[:160]}"
        del canonical
    if control_differs is False:
        report.failures.append(f"{op.label}: the control with its order changed does not differ")
    copies = _weight_copies(op, inputs) if timed and on_gpu else []
    for item in items:
        us = _time_us(item, inputs, copies) if copies and item not in faults else None
        in_use = item.schedule in schedules_in_use(op, schedules, item.m)
        is_vendor = isinstance(item.schedule, VendorGemm)
        report.rows.append(
            AuditRow(
                op=op.op_of(item.schedule),
                shape=op.shape,
                dtype=str(op.dtype).removeprefix("torch."),
                m=item.m,
                schedule=schedule_label(item.schedule),
                equal=item not in faults,
                fault=faults.get(item, ""),
                us=us,
                in_use=in_use,
                vendor=is_vendor,
            )
        )
        if item in faults and item.schedule == op.canonical:
            report.failures.append(f"{op.label}, M={item.m}: the canonical schedule {faults[item]}")
    if isinstance(op, DenseOp):
        _note_vendor(op, report)


def _note_vendor(op: DenseOp, report: GpuAuditReport) -> None:
    """Keep the vendor's row counts that agree and beat the own schedule in use at the next row count above, or at the
    largest one, in proportion."""
    mine = [row for row in report.rows if (row.op, row.shape) == (op.name, op.shape) and row.us is not None]
    rows = []
    for row in mine:
        own = sorted((r for r in mine if r.in_use and not r.vendor), key=lambda r: r.m)
        if not row.vendor or not row.equal or row.us is None or not own:
            continue
        nearest = next((r for r in own if r.m >= row.m), own[-1])
        if nearest.us is not None and row.us < nearest.us * row.m / nearest.m:
            rows.append(row.m)
    if rows:
        report.vendor_rows[op.n, op.k, op.parts, op.float32_out] = tuple(rows)


def _drop(op: AuditOp, schedules: GpuSchedules, schedule: Any, m: int) -> None:
    label = schedule_label(schedule)
    has_others = isinstance(schedule, VendorGemm) or schedules.may_use(op.op_of(schedule), schedule)
    if schedule == op.canonical or isinstance(op, NormOp) or not has_others:
        raise InvarianceError(
            f"{op.label}, {m} rows: schedule {label} does not give the canonical bits on this device, so requests "
            "could change each other's bits"
        )
    logger.warning(
        "%s, %d rows: schedule %s does not give the canonical bits on this device and is not used; run `moe-runtime "
        "audit` to see which do",
        op.label,
        m,
        label,
    )
    schedules.refuse(op.op_of(schedule), schedule)


def _first_rows(
    outputs: Iterable[torch.Tensor], m: int, op: AuditOp, schedule: Any
) -> tuple[torch.Tensor, ...]:
    """The canonical outputs of M rows, rounded where the schedule can only give rounded ones."""
    rounds = isinstance(schedule, VendorGemm) and not schedule.float32_out
    return tuple(out[:m].to(op.dtype) if rounds else out[:m] for out in outputs)


def _equal(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(actual, expected, strict=True))


def _bits(x: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        return x
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def _run_in_graph(item: _Item, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    """Outputs of a replay in which the kernel before writes the op's input, launched dependent."""
    op = item.op
    live = torch.zeros_like(inputs[op.live])
    fed = {**inputs, op.live: live}
    state = op.prepare(fed, item.m, item.schedule)
    op.launch(fed, state, item.m, item.schedule, True)  # compiles

    def run() -> None:
        live.copy_(inputs[op.live])
        op.launch(fed, state, item.m, item.schedule, True)

    graph = _captured(run)
    live.zero_()
    out = state.get("out")
    if out is not None:
        out.fill_(-77 if out.dtype in (torch.int32, torch.int64) else float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return tuple(part.clone() for part in op.read(state, item.m, item.schedule))


def _weight_copies(op: AuditOp, inputs: Tensors) -> list[Tensors]:
    """Inputs with distinct weights, so that a chain of launches reads them from memory."""
    num_bytes = sum(inputs[name].numel() * inputs[name].element_size() for name in op.weights)
    count = 4 if num_bytes == 0 else max(1, min(MAX_COPIES, COLD_BYTES // num_bytes))
    return [
        {**inputs, **({name: inputs[name].clone() for name in op.weights} if i else {})} for i in range(count)
    ]


def _captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Like ``torch.cuda.graph``, which would also collect garbage and empty the cache each time."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            run()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph


def _time_us(item: _Item, inputs: Tensors, copies: list[Tensors]) -> float:
    """Median over graph replays of one launch."""
    state = item.op.prepare(inputs, item.m, item.schedule)

    def run() -> None:
        for copy in copies:
            item.op.launch(copy, state, item.m, item.schedule, True)

    graph = _captured(run)
    graph.replay()
    times_ms = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_ms.append(start.elapsed_time(end))
    return round(1000 * float(statistics.median(times_ms)) / len(copies), 2)

"""One NVIDIA GPU as a device: its kernels, the division of its memory, decode graphs. Knows the order in which they are made."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from common.cpu_cores import usable_cores
from common.degraded import DegradedPaths
from common.errors import StartupError
from common.ids import BlockId, SeqId
from executor_svc.core.plan import BatchLimits, Chunk, NewSequence, StepPlan
from executor_svc.core.sampling import SamplingParams
from executor_svc.cuda.blocks import CudaBlocks
from executor_svc.cuda.graph_shapes import NUM_CHUNKS, GraphShapes
from executor_svc.cuda.graphs import StepGraphs
from executor_svc.cuda.memory import MemoryPlan
from executor_svc.cuda.pinned_slabs import PinnedSlabs
from executor_svc.cuda.registrar import CudaRegistrar
from executor_svc.cuda.runner import CudaRunner
from executor_svc.cuda.sampler import Draw, TokenEnds, TorchTokens, draw_on_host
from executor_svc.cuda.stored_blocks import StoredBlocks, StoredSlots, most_slots
from executor_svc.cuda.stream import CudaStream
from executor_svc.device import Phases, Started, run_steps, warm_up
from executor_svc.kernels.backend import Backend
from executor_svc.kernels.e4m3 import E4M3
from executor_svc.kernels.layout import ROWS_OF_E4M3, layout_of
from executor_svc.kernels.torch_backend import TorchBackend
from executor_svc.kvcache.cuda_pool import CudaKvPool
from executor_svc.kvcache.pool import KvShape, block_bytes
from executor_svc.kvcache.stored_form import FORMS, stored_layout
from executor_svc.model.cuda_pieces import LayerPieces, buffer_bytes, most_tokens_worth, sizes
from executor_svc.model.cuda_rewrite import StackedModel, rewrite_for_cuda
from executor_svc.model.cuda_stack import DecoderStack
from executor_svc.model.load import LoadedModel, Rewrites, no_rewrites
from executor_svc.settings import ExecutorSettings
from executor_svc.transfer import BlockMemory

log = logging.getLogger(__name__)
DEFAULT_BATCHED_TOKENS = 8192
_DEFAULT_NUM_SEQS = {0: 256, 64 << 30: 1024}
"""By the memory that a GPU has at least, bytes: graphs of many sequences hold many logits."""
_FP8_CAPABILITY = 8, 9
"""The first architecture that converts e4m3 in hardware."""
_SWITCH_INTERVAL_S = 2e-4
_MAX_CHECKSUM_THREADS = 12
"""One does about 10 GB/s; together they must keep up with the link."""
_SHORTEST_LONG_CHUNK = 1024
_CHUNKS_AT_ONCE = (3, 20, 150)
"""Numbers of chunks of the kinds that kernels tell apart, each with few tokens and with many."""
_FEW_TOKENS, _MANY_TOKENS = 2, 4200
_DECODES_BESIDE = (1, 2, 3, 5, 9, 17, 33, 65, 129)
_ODD_CHUNK = 1031
"""More than graphs take, and divisible by nothing that kernels care about."""
_GRAPH_OVERHEAD_BYTES = 1 << 30
"""What graphs take beside logits and the activations of the largest: their launches, and memory cut up between shapes."""


class CudaDevice:
    """See executor_svc.device.Device."""

    def __init__(self, settings: ExecutorSettings):
        if settings.quantization != "none":
            raise StartupError(f"quantization: {settings.quantization} is for CPUs; use --device cpu or --quantization none")
        if settings.backend == "cpu":
            raise StartupError("backend: cpu does not run on a GPU; use --device cpu or another backend")
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        check_kv_form(settings, torch.cuda.get_device_capability(self.torch_device))
        self._max_num_seqs = settings.max_num_seqs or _default_num_seqs(torch.cuda.mem_get_info(self.torch_device)[1])
        self.backend, self._tokens, self._draw = _kernels(settings, self._max_num_seqs, self.torch_device)
        self.rewrites: Rewrites = rewrite_for_cuda if settings.rewrites else no_rewrites
        self._settings = settings
        self._degraded = DegradedPaths()

    def start(self, model: LoadedModel, phases: Phases, progress: Callable[[str], None]) -> Started:
        """See Device."""
        settings = self._settings
        stream = CudaStream(self.torch_device)
        bytes_per_block = block_bytes(model.layer_specs, settings.block_size, self._kv_dtype(model))
        with phases.timed("dry_run"):
            memory = self._dry_run(model, stream)
        with phases.timed("kv_pool"):
            num_blocks = memory.num_blocks(
                bytes_per_block,
                settings.gpu_memory_utilization,
                asked_blocks=settings.num_blocks,
                asked_bytes=settings.kv_memory_bytes,
            )
            pool = self._pool(model, num_blocks)
        limits = self._limits(model, num_blocks)
        runner = self._runner(model, pool, limits, stream)
        # Results are read on a thread of their own, which must not wait long for the interpreter.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        with phases.timed("warm_up"):
            warm_up(runner, limits)
            for steps in chunk_steps(limits):
                run_steps(runner, steps)
        reserved = torch.cuda.memory_reserved(self.torch_device)
        if self._captures and not model.has_length_dependent_rope:  # such a rope reads lengths on the host
            with phases.timed("graphs"):
                self._capture(runner, model, limits, stream, progress)
                self._capture_pieces(runner, model, limits, stream, progress)
        graph_bytes = torch.cuda.memory_reserved(self.torch_device) - reserved
        description = torch.cuda.get_device_name(self.torch_device)
        progress(
            f"{description}: {memory.total >> 20:,} MiB; weights and others {memory.used >> 20:,}, scratch of a step up to "
            f"{memory.scratch >> 20:,}, graphs {graph_bytes >> 20:,} of {memory.graphs >> 20:,} set aside, blocks in stored "
            f"form {memory.slots >> 20:,}, KV pool {pool.num_bytes >> 20:,}"
        )
        return Started(
            runner=runner,
            pool=pool,
            blocks=self._blocks(model, pool, stream),
            limits=limits,
            memory_bytes={
                "kv_pool": pool.num_bytes,
                "scratch": memory.scratch,
                "graphs": graph_bytes,
                "stored_form": memory.slots,
            },
            description=description,
        )

    @property
    def _captures(self) -> bool:
        """Whether decode steps become graphs: the torch backend reads numbers on the host, so its steps cannot."""
        return self._settings.cuda_graphs and not isinstance(self.backend, TorchBackend)

    def _limits(self, model: LoadedModel, num_blocks: int) -> BatchLimits:
        return BatchLimits(
            num_blocks=num_blocks,
            block_size=self._settings.block_size,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._settings.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
        )

    def _pool(self, model: LoadedModel, num_blocks: int) -> CudaKvPool:
        dtype = self._kv_dtype(model)
        layout = ROWS_OF_E4M3 if dtype == E4M3 else layout_of(self.backend.kv_layout_version)
        return CudaKvPool(model.layer_specs, num_blocks, self._settings.block_size, dtype, layout, self.torch_device)

    def _kv_dtype(self, model: LoadedModel) -> torch.dtype:
        return E4M3 if self._settings.kv_dtype == "fp8_e4m3" else model.dtype

    def _blocks(self, model: LoadedModel, pool: CudaKvPool, steps: CudaStream) -> BlockMemory:
        slabs = PinnedSlabs(CudaRegistrar(self.torch_device), self._degraded)
        num_threads = max(1, min(_MAX_CHECKSUM_THREADS, 3 * usable_cores() // 4))
        form = FORMS.get(self._settings.kv_stored_form)
        if form is None:
            return CudaBlocks(pool, steps, CudaStream(self.torch_device), slabs, num_threads=num_threads)
        from executor_svc.kernels.triton.stored_form import StoredFormKernels

        layout = stored_layout(model.layer_specs, pool.block_size, pool.dtype)
        slots = StoredSlots(min(pool.num_blocks, most_slots(layout.stored_bytes)), layout.stored_bytes, self.torch_device)
        kernels = StoredFormKernels(form, layout, self.torch_device)
        kernels.compile(pool.blocks, slots.blocks)
        copies = CudaStream(self.torch_device)  # waits for all that was queued before
        memory = CudaBlocks(slots, steps, copies, slabs, num_threads=num_threads)
        return StoredBlocks(pool, slots, memory, copies, kernels)

    def _runner(self, model: LoadedModel, pool: CudaKvPool, limits: BatchLimits, stream: CudaStream) -> CudaRunner:
        layer_indices = [spec.layer_idx for spec in model.layer_specs]
        return CudaRunner(
            model, pool, layer_indices, backend=self.backend, tokens=self._tokens, draw=self._draw, limits=limits, stream=stream
        )

    def _capture(
        self,
        runner: CudaRunner,
        model: LoadedModel,
        limits: BatchLimits,
        stream: CudaStream,
        progress: Callable[[str], None],
    ) -> None:
        """Gives the runner graphs, if the model can be captured; some models read numbers on the host as they go."""
        graphs = StepGraphs(
            model.forward,
            self.backend,
            runner.layer_caches,
            limits,
            runner.last_tokens,
            tokens=self._tokens,
            stream=stream,
            uploads=runner.uploads,
        )
        try:
            graphs.capture(progress)
        except Exception as error:
            log.debug("capture failed", exc_info=error)
            reason = str(error).splitlines()[0] if str(error) else repr(error)
            self._degraded.note("cuda_graphs_missing", reason)
            progress(f"only {graphs.num_graphs} steps have CUDA graphs: {reason}")
        runner.graphs = graphs

    def _capture_pieces(
        self,
        runner: CudaRunner,
        model: LoadedModel,
        limits: BatchLimits,
        stream: CudaStream,
        progress: Callable[[str], None],
    ) -> None:
        """Gives a small model's stack the pieces of steps of many tokens."""
        stack, all_sizes = _stack(model), _piece_sizes(model, limits)
        if stack is None or not all_sizes:
            return
        started = time.monotonic()
        try:
            with stream.use(), torch.inference_mode():
                pieces = LayerPieces(stack, runner.layer_caches, all_sizes[-1])
                pieces.capture(stream, all_sizes)
                stream.check()
        except Exception as error:
            log.debug("capture of pieces failed", exc_info=error)
            self._degraded.note("cuda_graphs_missing", f"pieces: {error}")
            return
        stack.pieces = pieces
        progress(
            f"captured {pieces.num_pieces} pieces of steps of up to {all_sizes[-1]} tokens in {time.monotonic() - started:.2f} s"
        )

    def _dry_run(self, model: LoadedModel, stream: CudaStream) -> MemoryPlan:
        """Runs the largest steps over a small pool to see what they take."""
        device = self.torch_device
        limits = self._limits(model, num_blocks=0)
        chunk_lens = _largest_prefill(limits)
        num_blocks = sum(-(-length // limits.block_size) + 1 for length in chunk_lens) + 1
        limits = self._limits(model, max(num_blocks, limits.max_num_seqs + 1))
        pool = self._pool(model, limits.num_blocks)
        runner = self._runner(model, pool, limits, stream)
        decode_bytes = self._peak(runner, _full_batch(limits))
        reads_long_contexts = not isinstance(self.backend, TorchBackend)  # which would hold every score in memory
        prefill_bytes = self._peak(runner, _full_prefill(limits, chunk_lens, reads_long_contexts))
        runner.close()
        del runner, pool
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        graphs = 0
        if self._captures:
            shapes = GraphShapes(limits.max_num_seqs, limits.max_num_batched_tokens).shapes
            logits_bytes = sum(shape.num_rows for shape in shapes) * model.vocab_size * model.dtype.itemsize
            graphs = decode_bytes + logits_bytes + _GRAPH_OVERHEAD_BYTES
            stack, all_sizes = _stack(model), _piece_sizes(model, limits)
            if stack is not None and all_sizes:
                graphs += buffer_bytes(stack.layers[0], all_sizes[-1])
        slots = slots_bytes(self._settings, model.layer_specs, model.dtype)
        return MemoryPlan(total=total, used=total - free, scratch=max(decode_bytes, prefill_bytes), graphs=graphs, slots=slots)

    def _peak(self, runner: CudaRunner, step: StepPlan[SamplingParams]) -> int:
        """Most memory that a step takes beside what is taken before it, bytes."""
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        run_steps(runner, [step])
        return max(0, torch.cuda.max_memory_reserved(self.torch_device) - before)


def check_kv_form(settings: ExecutorSettings, capability: tuple[int, int]) -> None:
    """Raises StartupError when the settings ask for blocks that this device, or its kernels, cannot make or read."""
    if settings.kv_stored_form != "native" and settings.backend == "torch":
        raise StartupError(f"kv_stored_form: the torch backend does not make {settings.kv_stored_form}; use --backend triton")
    if settings.kv_stored_form != "native" and settings.kv_dtype != "auto":
        raise StartupError(f"kv_stored_form: blocks in {settings.kv_dtype} are small as they are; use --kv-stored-form native")
    if settings.kv_dtype == "auto":
        return
    if settings.backend == "torch":
        raise StartupError(
            f"kv_dtype: the torch backend does not read {settings.kv_dtype}; use --backend triton or --kv-dtype auto"
        )
    if capability < _FP8_CAPABILITY:
        raise StartupError(
            f"kv_dtype: {settings.kv_dtype} needs a GPU of compute capability {_FP8_CAPABILITY[0]}.{_FP8_CAPABILITY[1]} or more, "
            f"this one has {capability[0]}.{capability[1]}; use --kv-dtype auto"
        )


def slots_bytes(settings: ExecutorSettings, layers: Sequence[KvShape], dtype: torch.dtype) -> int:
    """Device memory of blocks of a pool of dtype on their way in their stored form, where they have one of their own."""
    if settings.kv_stored_form == "native":
        return 0
    stored_bytes = stored_layout(layers, settings.block_size, dtype).stored_bytes
    return most_slots(stored_bytes) * stored_bytes


def _default_num_seqs(total_bytes: int) -> int:
    return max(num for least_bytes, num in _DEFAULT_NUM_SEQS.items() if total_bytes >= least_bytes)


def _kernels(settings: ExecutorSettings, max_num_seqs: int, device: torch.device) -> tuple[Backend, TokenEnds, Draw]:
    """Attention, the ends of a step, and draws from logits."""
    if settings.backend == "torch":
        return TorchBackend(), TorchTokens(), draw_on_host
    from executor_svc.kernels.triton.backend import TritonBackend
    from executor_svc.kernels.triton.configs import TUNED_FILE, open_cache
    from executor_svc.kernels.triton.draw import draw
    from executor_svc.kernels.triton.tokens import TritonTokens

    open_cache(settings.cache_dir / TUNED_FILE)
    return TritonBackend(max_num_seqs), TritonTokens(max_num_seqs + NUM_CHUNKS, device), draw


def _stack(model: LoadedModel) -> DecoderStack | None:
    """The model's layers, if it was rewritten."""
    forward = model.module.forward
    return forward.stack if isinstance(forward, StackedModel) else None


def _piece_sizes(model: LoadedModel, limits: BatchLimits) -> list[int]:
    """Numbers of tokens that the model's layers are captured for in pieces."""
    stack = _stack(model)
    if stack is None:
        return []
    return sizes(stack.trimmed_tokens - 1, min(limits.max_num_batched_tokens, most_tokens_worth(stack.layers)))


def _largest_prefill(limits: BatchLimits) -> list[int]:
    """Lengths of chunks that fill a step's tokens, as few as there can be."""
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    count = min(limits.max_num_batched_tokens // longest, limits.max_num_seqs)
    return [longest] * count


def _full_prefill(limits: BatchLimits, chunk_lens: list[int], with_context: bool) -> StepPlan[SamplingParams]:
    """A step of those chunks, each behind as long a context as the model allows; contexts share one block."""
    news, chunks, first_free = [], [], 1
    for number, length in enumerate(chunk_lens, start=1):
        num_blocks_before = (limits.max_model_len - length) // limits.block_size if with_context else 0
        num_computed = num_blocks_before * limits.block_size
        num_own = -(-length // limits.block_size)
        block_ids = [BlockId(0)] * num_blocks_before + [BlockId(first_free + i) for i in range(num_own)]
        first_free += num_own
        num_tokens = num_computed + length
        sampling = SamplingParams(temperature=0.0)
        news.append(NewSequence(SeqId(number), [1] * num_tokens, num_tokens, num_computed, block_ids, sampling))
        chunks.append(Chunk(SeqId(number), length))
    return StepPlan(step_id=1, new_sequences=news, chunks=chunks)


def _full_batch(limits: BatchLimits) -> StepPlan[SamplingParams]:
    """As many sequences as there may be, each drawing a token from all that there are, with log probabilities."""
    count = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    sampling = SamplingParams(temperature=1.0, num_logprobs=1)
    news = [NewSequence(SeqId(i), [1], 1, 0, [BlockId(i)], sampling) for i in range(1, count + 1)]
    return StepPlan(step_id=1, new_sequences=news, chunks=[Chunk(SeqId(i), 1) for i in range(1, count + 1)])


def chunk_steps(limits: BatchLimits) -> Iterator[list[StepPlan[SamplingParams]]]:
    """Sessions that run what a request would otherwise be the first to need: libraries plan by length, kernels compile by count.

    Long chunks, fresh and then behind a context as long; several chunks at once; decodes beside a long chunk.
    """
    greedy = SamplingParams(temperature=0.0)
    num_slots = limits.num_blocks * limits.block_size
    length = _SHORTEST_LONG_CHUNK
    while length <= limits.max_num_batched_tokens and 2 * length <= min(limits.max_model_len, num_slots):
        blocks = [BlockId(i) for i in range(-(-2 * length // limits.block_size))]
        new = NewSequence(SeqId(1), [1] * (2 * length), 2 * length, 0, blocks, greedy)
        chunk = Chunk(SeqId(1), length)
        yield [StepPlan(1, new_sequences=[new], chunks=[chunk]), StepPlan(2, chunks=[chunk])]
        length *= 2
    for count in _CHUNKS_AT_ONCE:
        for length in (_FEW_TOKENS, -(-_MANY_TOKENS // count)):
            width = -(-length // limits.block_size)
            fits = count <= limits.max_num_seqs and count * length <= limits.max_num_batched_tokens
            if fits and length <= limits.max_model_len and (count + 1) * width <= limits.num_blocks:
                tables = [[BlockId(i * width + at) for at in range(width)] for i in range(1, count + 1)]
                news = [NewSequence(SeqId(i), [1] * length, length, 0, table, greedy) for i, table in enumerate(tables)]
                yield [StepPlan(1, new_sequences=news, chunks=[Chunk(SeqId(i), length) for i in range(count)])]
    num_blocks = -(-(_ODD_CHUNK + 1) // limits.block_size)
    for count in _DECODES_BESIDE:
        fits = count < limits.max_num_seqs and _ODD_CHUNK + count <= limits.max_num_batched_tokens
        if fits and limits.max_model_len > _ODD_CHUNK and num_blocks + count <= limits.num_blocks:
            blocks = [BlockId(i) for i in range(num_blocks)]
            news = [NewSequence(SeqId(i), [1], 1, 0, [BlockId(num_blocks + i)], greedy) for i in range(count)]
            news.append(NewSequence(SeqId(count), [1] * (_ODD_CHUNK + 1), _ODD_CHUNK + 1, 0, blocks, greedy))
            chunks = [*(Chunk(SeqId(i), 1) for i in range(count)), Chunk(SeqId(count), _ODD_CHUNK)]
            yield [StepPlan(1, new_sequences=news, chunks=chunks)]

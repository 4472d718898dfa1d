"""The attention backend of CUDA devices. Knows which kernel a part of a batch goes to, and owns their workspaces."""

from torch import Tensor

from executor_svc.kernels.batch import AttentionBatch, LayerCache, Rotary
from executor_svc.kernels.reference import rotate
from executor_svc.kernels.triton.decode import MAX_PROGRAMS_PER_SM, DecodeWorkspace, num_sms, paged_decode
from executor_svc.kernels.triton.decode_shared import SharedWorkspace, attend_shared
from executor_svc.kernels.triton.kv_write import write_kv
from executor_svc.kernels.triton.library import Cudnn, Library, allow_library
from executor_svc.kernels.triton.prefill import paged_prefill, sole_chunk


class TritonBackend:
    """Paged attention by Triton kernels, with library kernels for prefill where those are faster.

    Batches of decodes alone are free of host synchronisation, and their launches depend on shapes only: they can be
    captured in a CUDA graph, after one run outside of it with the same shapes.
    """

    name = "triton"
    kv_layout_version = "k-hsd.v-hsd/1"

    def __init__(self, max_num_seqs: int = 1024, library: Library | None = None) -> None:
        """Workspaces come with the first use of a shape of heads.

        Args:
            max_num_seqs: the most decodes of a batch.
            library: for long chunks of prompts; None: cuDNN.
        """
        allow_library()
        self._library = Cudnn() if library is None else library
        self.max_num_seqs = max_num_seqs
        self._workspaces: dict[tuple[int, int, int], DecodeWorkspace] = {}
        self._shared_workspaces: dict[tuple[int, int, int], SharedWorkspace] = {}

    def paged_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer_cache: LayerCache,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        rotary: Rotary | None = None,
    ) -> Tensor:
        """See Backend.paged_attention."""
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        write_kv(key, value, batch.slot_mapping, layer_cache)
        return self.attend_written(
            query, key, value, layer_cache, batch, scale=scale, window=window, softcap=softcap, sinks=sinks
        )

    def attend_written(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer_cache: LayerCache,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """As paged_attention, for rotated queries and keys when the new KV is in the cache already.

        Batches of decodes alone do not touch key and value, which may then be of any shape that says the heads' sizes. The
        result goes to out [num_rows of query, num_heads, head_dim_v], if that is given.
        """
        sole = sole_chunk(
            self._library, query, key, value, layer_cache, batch, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
        if sole is not None:
            return sole if out is None else out[: sole.shape[0]].copy_(sole)
        num_tokens, num_heads, _ = query.shape
        head_dim_v = layer_cache.value.shape[3]
        if out is None:
            out = query.new_empty(num_tokens, num_heads, head_dim_v)
        decodes = batch.num_decodes
        if decodes:
            tables = batch.block_tables[:decodes]
            shared = None
            # A window hides shared keys from some members, and leaves little to read.
            if batch.shared is not None and window is None:
                shared = attend_shared(
                    query[:decodes],
                    layer_cache,
                    tables,
                    batch.shared,
                    scale=scale,
                    softcap=softcap,
                    workspace=self.shared_workspace(num_heads, layer_cache),
                )
            paged_decode(
                query[:decodes],
                layer_cache,
                tables,
                batch.seq_lens[:decodes],
                out[:decodes],
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                workspace=self.workspace(num_heads, layer_cache),
                shared=shared,
            )
        if decodes < batch.num_seqs:
            paged_prefill(
                self._library,
                query,
                key,
                value,
                layer_cache,
                batch,
                out,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )
        return out

    def workspace(self, num_heads: int, layer_cache: LayerCache) -> DecodeWorkspace:
        """The decode workspace for layers of these heads; made at the first call, shared by all layers alike."""
        _, num_kv_heads, _, head_dim_v = layer_cache.value.shape
        shape = (num_heads, num_kv_heads, head_dim_v)
        if shape not in self._workspaces:
            device = layer_cache.value.device
            max_splits = max(1, num_sms(device) * MAX_PROGRAMS_PER_SM // num_kv_heads)
            self._workspaces[shape] = DecodeWorkspace(self.max_num_seqs, num_heads, head_dim_v, max_splits, device)
        return self._workspaces[shape]

    def shared_workspace(self, num_heads: int, layer_cache: LayerCache) -> SharedWorkspace:
        """As workspace, for what decodes share."""
        _, num_kv_heads, _, head_dim_v = layer_cache.value.shape
        shape = (num_heads, num_kv_heads, head_dim_v)
        if shape not in self._shared_workspaces:
            device = layer_cache.value.device
            self._shared_workspaces[shape] = SharedWorkspace(self.max_num_seqs, *shape, num_sms(device), device)
        return self._shared_workspaces[shape]

    @property
    def workspace_bytes(self) -> int:
        """Device memory of all workspaces so far."""
        own = sum(workspace.num_bytes for workspace in self._workspaces.values())
        return own + sum(workspace.num_bytes for workspace in self._shared_workspaces.values())

"""What one executor can be told, by flags and OCTAVO_EXECUTOR_... Knows defaults that need no machine; reads nothing else."""

import json
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from common.rpc.security import ServerSecurity
from common.settings import ServiceSettings, settings_config

DEFAULT_MODEL = "smollm2-135m-instruct"


def default_cache_dir() -> Path:
    """Where prepared models are kept."""
    return Path.home() / ".cache" / "octavo" / "models"


class ExecutorSettings(ServiceSettings):
    """Settings of executor_svc."""

    model_config = settings_config("OCTAVO_EXECUTOR_", "python -m executor_svc")

    listen: str = Field(
        "127.0.0.1:50061", description="host:port or unix:/path to serve on; beyond this host needs TLS and a token"
    )
    executor_id: str = Field("executor-0", min_length=1, description="name of this executor in logs and at the scheduler")
    model: str = Field(DEFAULT_MODEL, description="the default model's name, a folder, a .gguf file or a hub id")
    model_name: str = Field("", description='public name, "models/..."; empty: from the model')
    cache_dir: Path = Field(default_factory=default_cache_dir, description="where converted models are kept")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="what computes; auto: an NVIDIA GPU if there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="of weights, and of KV unless kv_dtype says otherwise; auto: float32 on a CPU, on a GPU the model's own if "
        "it has 16 bits, else bfloat16",
    )
    kv_dtype: Literal["auto", "fp8_e4m3"] = Field(
        "auto", description="of the KV pool; auto: dtype; fp8_e4m3: a byte per value, on a GPU of compute capability 8.9 or more"
    )
    kv_stored_form: Literal["native", "fp8_e4m3", "int8"] = Field(
        "native", description="of blocks below a GPU; native: as the pool has them; others: a byte per value, made on the GPU"
    )
    quantization: Literal["none", "int8"] = Field("none", description="int8: linear weights in 8 bits, activations as they are")
    load_format: Literal["auto", "random"] = Field("auto", description="random: weights of the config's shape, for benchmarks")
    seed: int = Field(0, ge=0, description="of random weights")
    rewrites: bool = Field(True, description="fuse parts of the model for this device; off: as transformers made it")
    backend: Literal["auto", "cpu", "torch", "triton"] = Field(
        "auto", description="attention kernels; auto: cpu on a CPU, triton on a GPU"
    )
    block_size: int = Field(16, ge=1, le=256, description="tokens per KV block")
    num_blocks: int = Field(0, ge=0, description="KV blocks; 0: as many as kv_memory_bytes holds")
    kv_memory_bytes: int = Field(
        0,
        ge=0,
        description="KV pool; 0: on a CPU 1 GiB or one longest sequence if that is more, at most a quarter of the free memory; "
        "on a GPU what gpu_memory_utilization leaves",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of a GPU's memory that weights, scratch, graphs and KV pool may take together"
    )
    cuda_graphs: bool = Field(True, description="replay decode steps as CUDA graphs; off: launch kernel by kernel")
    max_num_seqs: int = Field(0, ge=0, le=4096, description="most sequences at once; 0: 256, on a GPU of 64 GiB or more 1024")
    max_num_batched_tokens: int = Field(
        0, ge=0, le=65536, description="most tokens of one step, decodes and chunks together; 0: 512 on a CPU, 8192 on a GPU"
    )
    max_model_len: int = Field(0, ge=0, description="longest sequence; 0: the model's own limit")
    num_threads: int = Field(0, ge=0, le=1024, description="compute threads; 0: the cores this process may use")
    line_folder: Path | None = Field(
        None, description="where a scheduler of this host finds the socket past gRPC; not set: the system's temporary folder"
    )
    kvstore: str = Field("", description="address of the block store; empty: none")
    kv_transport: Literal["auto", "shm", "inline"] = Field("auto", description="how blocks reach the store")
    save_drain_s: float = Field(
        3.0, ge=0, description="seconds at the end, beside grace_s, in which blocks that wait for the store are still written"
    )
    kvstore_tls_ca: Path | None = Field(None, description="PEM authority of a block store that is protected by TLS")
    kvstore_token: SecretStr = Field(SecretStr(""), description="bearer token for the block store")
    tls_cert: Path | None = Field(None, description="PEM certificate")
    tls_key: Path | None = Field(None, description="PEM key of tls_cert")
    tls_client_ca: Path | None = Field(None, description="PEM authority whose certificates callers must show")
    token: SecretStr = Field(SecretStr(""), description="bearer token that callers must send; empty: none")
    insecure: bool = Field(False, description="serve beyond this host without TLS and token")

    def security(self) -> ServerSecurity:
        """What callers must show."""
        return ServerSecurity(
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            tls_client_ca=self.tls_client_ca,
            token=self.token.get_secret_value(),
            insecure=self.insecure,
        )

    def to_json(self) -> bytes:
        """Everything, secrets in clear, for the worker process over its private pipe."""
        values = self.model_dump(mode="json")
        secrets = {name: value.get_secret_value() for name, value in self if isinstance(value, SecretStr)}
        return json.dumps({**values, **secrets}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "ExecutorSettings":
        """What to_json wrote."""
        return cls.model_validate(json.loads(data))

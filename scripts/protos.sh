#!/usr/bin/env bash
# Generates octavo/**/*_pb2*.py from protos/ with the pinned grpcio-tools, into the folder given (default: the repository).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}
python=${PYTHON:-.venv/bin/python}
find "$out/octavo" -name '*_pb2*.py*' -delete 2>/dev/null || true
PATH="$(dirname "$python"):$PATH" "$python" -m grpc_tools.protoc -I protos --python_out="$out" --grpc_python_out="$out" \
  --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" $(find protos -name '*.proto' | sort)
# A file without a service gets an empty gRPC stub: drop it.
grep -L '^class .*Stub' $(find "$out/octavo" -name '*_pb2_grpc.py') | while read -r stub; do rm -f "$stub" "${stub}i"; done
find "$out/octavo" -type d -name v1 | while read -r folder; do touch "$folder/__init__.py" "$folder/../__init__.py"; done

#!/usr/bin/env bash
# Checks and measures pagemill on a machine with one NVIDIA GPU, in under 6 minutes; a short table comes last.
#
#   scripts/gpu_check.sh [--only correctness,kernels,step,server,peer] [--quick] [--json]
#
# PYTHON chooses the interpreter (default: .venv/bin/python where there is one, else python3). It needs torch and triton;
# pagemill itself is taken from this checkout. WHEELS names a folder of wheels for what else it lacks, which are unpacked
# into a temporary folder and not installed. Ends with 0 when all went well, 1 when something failed or was wrong, 3
# where there is no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  [ -x .venv/bin/python ] && python=.venv/bin/python
fi
paths=scripts
for folder in shared services/scheduler services/worker services/gateway kernels cli; do
  paths=$paths:$PWD/$folder
done
if [ -n "${WHEELS:-}" ]; then
  unpacked=$(mktemp -d)
  trap 'rm -rf "$unpacked"' EXIT
  "$python" -m pip install --quiet --no-index --no-deps --target "$unpacked" "$WHEELS"/*.whl
  paths=$paths:$unpacked
fi
PYTHONPATH=$paths${PYTHONPATH:+:$PYTHONPATH} "$python" -P -W ignore -m gpu_check "$@"

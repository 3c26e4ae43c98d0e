#!/bin/sh
# What only a GPU can tell, in one command, the most important first: in under 9 minutes.
#
#   benchmarks/gpu_suite.sh                      on cuda:0
#   benchmarks/gpu_suite.sh --device cpu         the same steps on a software device
#   PYTHON=... benchmarks/gpu_suite.sh --help    the options
#
# For a machine that has a GPU for a short while: it needs a Python with torch 2.11 to 2.13 and a
# C++ compiler, installs nothing and downloads nothing. Three files go to $OUT (or --out): the table
# gpu_suite.md, the figures gpu_suite.json, and gpu_suite_logs.tar.gz. The exit status is that of a
# test. JUPYTER_SING_HOST_MEMORY of the environment is kept.
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m benchmarks.gpu.suite "$@"

#!/bin/sh
# Everything that a GPU can tell, in one command: builds, tests and measures, in under 9 minutes.
#
#   benchmarks/gpu_suite.sh                      on cuda:0
#   benchmarks/gpu_suite.sh --device cpu         the same steps on a software device
#   PYTHON=... benchmarks/gpu_suite.sh --help    the options
#
# For a machine that has a GPU for a short while: it needs a Python with torch 2.11 to 2.13 and a
# C++ compiler, installs nothing and downloads nothing. The table goes to $OUT (or --out), as
# gpu_suite.md beside gpu_suite.json and the output of each step. The exit status is that of a test.
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m benchmarks.gpu.suite "$@"

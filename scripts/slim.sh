#!/bin/sh
# Take out of an environment what no running program opens (tests, headers, Java), then compile what one may import.
set -eu
packages=$(echo "$1"/lib/python3.*/site-packages)
cd "$packages"
find . -mindepth 2 -type d -name tests -prune -exec rm -rf {} +
find . -name '*.a' -delete
rm -rf torch/test torch/include torch/share pyarrow/include pyarrow/src ray/jars ray/cpp ray/dashboard/client
find torch/bin -type f ! -name torch_shm_manager -delete
find . -name '*test*.so' -path './torch/lib/*' -delete
seldom='/ray/(rllib|llm|serve|tune|train|data)/|/torch/(testing/_internal|_inductor|onnx)/|/numba/cuda/|/fontTools/|/templates/'
"$1/bin/python" -m compileall -q -j 0 --invalidation-mode unchecked-hash -x "$seldom" "$packages"
